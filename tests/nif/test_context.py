"""Context against transformers' generate: greedy output token for token, whatever shares the batch and the cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genbatch.nif.context import Context
from genbatch.nif.errors import BatchError, OptionError, OutOfBlocks
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Entry, LayerGroup, Logits, Rows
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.sampling.sampler import SamplerState, SamplingParams
from genbatch.nif.text.detokenizer import open_detokenizer

FAMILIES = [
    "llama", "qwen3", "mistral", "gemma3", "gpt_neox", "lfm2", "qwen3_5", "qwen3_next", "bamba", "granite_hybrid",
]  # fmt: skip

TinyModel = Callable[[str], Model]
OracleOf = Callable[[str], Any]


def make_context(model: Model, **options: Any) -> Context:
    defaults: dict[str, Any] = {"n_ctx": 512, "n_parallel": 4, "block_size": 4, "n_batch": 16}
    return Context(model, TorchRunner(model), **{**defaults, **options})


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


def greedy(context: Context, prompt: Sequence[int], seq_id: int, count: int) -> list[int]:
    """Decodes alone until `count` tokens or the end of sequence."""
    tokens = [int(context.prefill(prompt, seq_id, context.kv.length(seq_id)).argmax())]
    while len(tokens) < count and tokens[-1] not in context.model.eos_token_ids:
        position = context.kv.length(seq_id)
        [(_, token, _)] = context.decode_batch([(seq_id, tokens[-1], position)])
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a02_prefill_in_chunks_gives_the_logits_of_one_shot(tiny_model: TinyModel, family: str) -> None:
    model, prompt = tiny_model(family), prompt_of(45, 1)
    chunked = make_context(model, n_batch=7).prefill(prompt, 0, 0)
    whole = make_context(model, n_batch=64).prefill(prompt, 0, 0)
    np.testing.assert_allclose(chunked, whole, atol=1e-4, rtol=1e-4)
    assert chunked.shape == (model.vocab_size,)


class CountingRunner(TorchRunner):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.forwards: list[int] = []

    def forward(self, batch: Any) -> Rows:
        self.forwards.append(len(batch.input_ids))
        return super().forward(batch)


def test_a03_decode_batch_is_one_unpadded_forward_and_equals_decoding_alone(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    model = tiny_model("llama")
    runner = CountingRunner(model)
    context = Context(model, runner, n_ctx=256, n_parallel=3, block_size=4)
    prompts = [prompt_of(length, length) for length in (3, 17, 30)]
    outputs = [[int(context.prefill(p, i, 0).argmax())] for i, p in enumerate(prompts)]
    for _ in range(9):
        runner.forwards.clear()
        entries = [(i, output[-1], context.kv.length(i)) for i, output in enumerate(outputs)]
        decoded = context.decode_batch(entries)
        assert runner.forwards == [3]
        assert [seq_id for seq_id, _, _ in decoded] == [0, 1, 2]
        for output, (_, token, text) in zip(outputs, decoded, strict=True):
            output.append(token)
            assert isinstance(text, str)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle("llama").generate(prompt, 10)
        assert output[: len(expected)] == expected
    context.kv.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_h07_any_mix_of_batch_chunking_sharing_and_arrival_equals_generate(
    tiny_model: TinyModel, oracle: OracleOf, family: str, data: st.DataObject
) -> None:
    """Sequences start at drawn steps with drawn chunk sizes; some share a beginning through seq_cp or the cache."""
    model = tiny_model(family)
    context = make_context(model, n_parallel=4, n_held=1, block_size=data.draw(st.sampled_from([1, 4, 16])))
    common = prompt_of(data.draw(st.integers(1, 20), "common"), 99)
    context.prefill(common, 4, 0)
    count, plans = 6, []
    for i in range(4):
        prompt = common + prompt_of(data.draw(st.integers(1, 25), f"own {i}"), i)
        share = data.draw(st.sampled_from(["seq_cp", "cache", "none"]), f"share {i}")
        plans.append((prompt, share, data.draw(st.integers(0, 5), f"start {i}")))
    outputs: list[list[int]] = [[], [], [], []]
    started = [False] * 4
    for step in range(60):
        batch, owners = [], []
        for i, (prompt, share, start) in enumerate(plans):
            if step < start or len(outputs[i]) >= count:
                continue
            if not started[i]:
                started[i] = True
                if share == "seq_cp":
                    context.seq_cp(4, i, 0, len(common))
                elif share == "cache":
                    context.attach_prefix(i, prompt)
            tokens = prompt + outputs[i]
            n_past = context.kv.length(i)
            size = 1 if outputs[i] else data.draw(st.integers(1, 12), "chunk")
            chunk = tokens[n_past : n_past + size]
            last = n_past + len(chunk) == len(tokens)
            batch.append(Entry(i, chunk, n_past, Logits.LAST if last else Logits.NONE))
            owners.append((i, last))
        if not batch:
            continue
        for (i, last), logits in zip(owners, context.eval(batch), strict=True):
            assert logits.shape[0] == last
            if last:
                outputs[i].append(int(logits[-1].argmax()))
        context.kv.check_integrity()
    for (prompt, _, _), output in zip(plans, outputs, strict=True):
        expected = oracle(family).generate(prompt, count)
        assert len(output) == count
        assert output[: len(expected)] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_agree_with_a_plain_forward(tiny_model: TinyModel, oracle: OracleOf, family: str) -> None:
    prompt = prompt_of(40, 5)
    context = make_context(tiny_model(family))
    halves = [context.eval([Entry(0, prompt[a:b], a, Logits.ALL)])[0] for a, b in ((0, 23), (23, 40))]
    ours = torch.log_softmax(torch.from_numpy(np.concatenate(halves)), dim=-1)
    torch.testing.assert_close(ours, oracle(family).log_probs(prompt), atol=2e-4, rtol=0)


def test_a08_a_shared_system_prompt_is_evaluated_once_for_all_sequences(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    model = tiny_model("llama")
    runner = CountingRunner(model)
    context = Context(model, runner, n_ctx=256, n_parallel=3, n_held=1, block_size=4)
    system = prompt_of(21, 7)  # ends inside a block, which each sequence then copies on write
    context.prefill(system, 3, 0)
    runner.forwards.clear()
    for seq_id in range(3):
        context.seq_cp(3, seq_id, 0, len(system))
    assert runner.forwards == []
    assert context.kv.counts().used == 6
    for seq_id in range(3):
        user = prompt_of(5 + seq_id, seq_id)
        output = greedy(context, user, seq_id, 8)
        expected = oracle("llama").generate(system + user, 8)
        assert output[: len(expected)] == expected
        assert runner.forwards[0] == len(user)
        runner.forwards.clear()
    context.kv.check_integrity()


def test_a09_the_position_after_the_cap_is_refused(tiny_model: TinyModel) -> None:
    context = make_context(tiny_model("llama"), max_per_sequence=10)
    assert context.max_positions == 10
    context.prefill(prompt_of(10, 1), 0, 0)
    with pytest.raises(BatchError):
        context.decode_batch([(0, 5, 10)])
    assert context.kv.length(0) == 10


def test_sequences_that_shared_a_block_diverge_without_touching_each_other(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    model, context = tiny_model("llama"), make_context(tiny_model("llama"))
    prompt = prompt_of(10, 3)
    context.prefill(prompt, 0, 0)
    context.seq_cp(0, 1)
    context.eval([Entry(0, [11], 10), Entry(1, [12], 10)])
    for seq_id, token in ((0, 11), (1, 12)):
        expected = oracle("llama").generate([*prompt, token, 13], 6)
        assert greedy(context, [13], seq_id, 6)[: len(expected)] == expected
    context.seq_rm(0)
    context.seq_rm(1)
    assert context.kv.counts().used == 0
    assert model.vocab_size == 320


def test_seq_rm_of_a_tail_lets_the_sequence_go_on_differently(tiny_model: TinyModel, oracle: OracleOf) -> None:
    context = make_context(tiny_model("llama"))
    prompt = prompt_of(18, 4)
    context.prefill(prompt, 0, 0)
    context.seq_rm(0, 9)
    expected = oracle("llama").generate([*prompt[:9], 50, 51], 6)
    assert greedy(context, [50, 51], 0, 6)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (Entry(0, [], 0), "without tokens"),
        (Entry(0, [320], 0), "outside"),
        (Entry(0, [-1], 0), "outside"),
        (Entry(9, [5], 0), "outside 0..3"),
        (Entry(0, [5], 3), "position"),
    ],
)
def test_a_bad_entry_is_refused_and_changes_nothing(tiny_model: TinyModel, entry: Entry, reason: str) -> None:
    context = make_context(tiny_model("llama"))
    with pytest.raises(BatchError, match=reason):
        context.eval([Entry(1, [5, 6], 0), entry])
    assert context.kv.length(1) == 0
    assert context.kv.counts().used == 0


def test_a_step_that_does_not_fit_changes_nothing(tiny_model: TinyModel) -> None:
    context = make_context(tiny_model("llama"), n_ctx=16)
    context.prefill(prompt_of(12, 1), 0, 0)
    with pytest.raises(OutOfBlocks):
        context.eval([Entry(0, [5], 12), Entry(1, prompt_of(5, 2), 0)])
    assert (context.kv.length(0), context.kv.length(1)) == (12, 0)
    context.kv.check_integrity()


class FailingRunner(TorchRunner):
    fails = False

    def forward(self, batch: Any) -> Rows:
        logits = super().forward(batch)
        if self.fails:
            raise RuntimeError("the device is gone")
        return logits


def test_a_forward_that_fails_leaves_no_trace(tiny_model: TinyModel, oracle: OracleOf) -> None:
    model = tiny_model("llama")
    runner = FailingRunner(model)
    context = Context(model, runner, n_ctx=64, n_parallel=2, block_size=4)
    prompt = prompt_of(10, 8)
    context.prefill(prompt, 0, 0)
    context.seq_cp(0, 1)
    runner.fails = True
    with pytest.raises(RuntimeError):
        context.eval([Entry(0, [7], 10), Entry(1, [9], 10)])
    runner.fails = False
    assert (context.kv.length(0), context.kv.length(1)) == (10, 10)
    assert context.kv.counts().used == 3
    for seq_id, token in ((0, 7), (1, 9)):
        expected = oracle("llama").generate([*prompt, token], 5)
        assert greedy(context, [token], seq_id, 5)[: len(expected)] == expected


def test_a_slot_forgets_its_last_users_half_of_a_code_point(tiny_model: TinyModel) -> None:
    context, prompt = make_context(tiny_model("llama")), prompt_of(6, 2)
    text = context._texts[0] = open_detokenizer(context.model.tokenizer.backend)
    assert [text.push(token) for token in context.model.tokenizer.encode("€")[-3:-1]] == ["", ""]
    context.prefill(prompt, 0, 0)
    context.seq_rm(0)
    for seq_id in (0, 1):
        context.prefill(prompt, seq_id, 0)
    [(_, _, first), (_, _, second)] = context.decode_batch([(seq_id, prompt[0], len(prompt)) for seq_id in (0, 1)])
    assert first == second


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_saved_sequence_goes_on_in_another_context_without_prefill(
    tiny_model: TinyModel, oracle: OracleOf, family: str
) -> None:
    model, prompt = tiny_model(family), prompt_of(30, 9)
    first = make_context(model)
    first.prefill(prompt, 0, 0)
    data = first.seq_save(0)
    second = make_context(model)
    assert second.seq_load(2, data) == 30
    expected = oracle(family).generate([*prompt, 40], 8)
    assert greedy(second, [40], 2, 8)[: len(expected)] == expected
    second.kv.check_integrity()


def test_a_damaged_or_foreign_saved_sequence_is_refused(tiny_model: TinyModel) -> None:
    context = make_context(tiny_model("llama"))
    context.prefill(prompt_of(10, 1), 0, 0)
    data = context.seq_save(0)
    other = make_context(tiny_model("qwen3"))
    heads = [b"[]", b'{"__metadata__":5}', b'{"__metadata__":null}', b"[" * 99_999, b'{"tokens":1}', b"nul", b"\xff"]
    nasty = [len(head).to_bytes(8, "little") + head for head in heads]
    halves = [data[:size] for size in range(0, len(data), 97)]  # what a writer that is killed leaves
    for damaged in (*nasty, *halves, b"\xff" * 64, data + b"x"):
        with pytest.raises(BatchError):
            context.seq_load(1, damaged)
        assert context.kv.length(1) == 0
    with pytest.raises(BatchError):
        other.seq_load(1, data)
    assert other.kv.length(1) == 0
    with pytest.raises(BatchError, match="empty"):
        context.seq_save(3)
    with pytest.raises(BatchError, match="already"):
        context.seq_load(0, data)


def test_what_was_saved_under_another_window_is_refused(tiny_model: TinyModel) -> None:
    """Its keys are made of what the layers before had in sight."""
    model = tiny_model("llama")
    [group] = model.groups
    wide, narrow, sinks = (
        make_context(replace(model, groups=(LayerGroup(group.layers, *reach),))) for reach in ((40,), (39,), (40, 2))
    )
    wide.prefill(prompt_of(10, 1), 0, 0)  # no window has moved: each holds all of it
    data = wide.seq_save(0)
    for other in (narrow, sinks):
        with pytest.raises(BatchError, match="another model"):
            other.seq_load(1, data)


def test_a_step_draws_only_for_entries_with_a_sampler(tiny_model: TinyModel) -> None:
    context = make_context(tiny_model("llama"))
    prompts = [prompt_of(4, 1), prompt_of(6, 2)]
    batch = [Entry(0, prompts[0], 0, Logits.NONE), Entry(1, prompts[1], 0)]
    logits, drawn = context.step(batch, [None, SamplerState(SamplingParams(seed=0), prompts[1])])
    assert drawn[0] is None
    assert drawn[1].token_id == int(logits[1][-1].argmax())


@pytest.mark.parametrize("option", ["n_ctx", "n_parallel", "block_size", "n_batch"])
def test_an_option_out_of_range_is_named(tiny_model: TinyModel, option: str) -> None:
    with pytest.raises(OptionError, match=option):
        make_context(tiny_model("llama"), **{option: 0})


def test_the_real_model_answers_greedily_in_any_company(smollm2: Model) -> None:
    """Three chats decoded together, one sharing the system prompt, give what each gives alone."""
    tokenizer = smollm2.tokenizer
    questions = ["What is the capital of France?", "What is 2+2?", "Name a primary colour."]
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in questions]
    alone = [greedy(Context(smollm2, TorchRunner(smollm2), n_ctx=256, n_parallel=1), p, 0, 12) for p in prompts]
    assert tokenizer.decode(alone[0]) == "The capital of France is Paris."
    context = Context(smollm2, TorchRunner(smollm2), n_ctx=512, n_parallel=3)
    together = [[int(context.prefill(prompt, i, 0).argmax())] for i, prompt in enumerate(prompts)]
    for _ in range(11):
        entries = [(i, tokens[-1], context.kv.length(i)) for i, tokens in enumerate(together)]
        for tokens, (_, token, _) in zip(together, context.decode_batch(entries), strict=True):
            tokens.append(token)
    for expected, tokens in zip(alone, together, strict=True):
        assert tokens[: len(expected)] == expected
