"""DecodeRun against single steps: the same tokens, the same KV, and nothing left behind by a step that failed."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from genbatch.nif.context import Context
from genbatch.nif.context.runs import DecodeRun
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import describe_model
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.runner import Entry
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState, SamplingParams
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer
from tests.simulation.history_runner import HistoryRunner, expected

TinyModel = Callable[[str], Model]

PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.9, top_p=0.8),
    SamplingParams(seed=3, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(seed=4, min_tokens=5, suppress=frozenset(range(0, 300, 3)), logprobs=2),
]
STEPS = 21


def begin(context: Context, params: list[SamplingParams]) -> tuple[list[Entry], list[SamplerState]]:
    """Evaluates a prompt for each sequence; its last token is the first to be decoded."""
    entries, states = [], []
    for seq_id, settings in enumerate(params):
        generator = torch.Generator().manual_seed(seq_id)
        prompt = torch.randint(3, 320, (5 + 6 * seq_id,), generator=generator).tolist()
        context.prefill(prompt[:-1], seq_id, 0)
        entries.append(Entry(seq_id, prompt[-1:], len(prompt) - 1))
        states.append(SamplerState(settings, prompt))
    return entries, states


def accepted(states: list[SamplerState], drawn: Sequence[Sampled | SampleFault | None]) -> list[Sampled]:
    sampled = [draw for draw in drawn if isinstance(draw, Sampled)]
    for state, draw in zip(states, sampled, strict=True):
        state.accept(draw.token_id)
    return sampled


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("params", [PARAMS[:1] * 4, PARAMS])
def test_a_run_draws_what_single_steps_draw(tiny_model: TinyModel, family: str, params: list[SamplingParams]) -> None:
    model = tiny_model(family)
    drawn: dict[bool, list[list[Sampled]]] = {True: [], False: []}
    for in_a_run in (True, False):
        context = Context(model, TorchRunner(model), n_ctx=512, n_parallel=4, block_size=4)
        entries, states = begin(context, params)
        run = context.decode_run(entries, states, max_steps=STEPS)
        for _ in range(STEPS):
            step = run.step() if in_a_run else context.step(entries, states)[1]
            drawn[in_a_run].append(accepted(states, step))
            entries = [
                Entry(entry.seq_id, [draw.token_id], entry.n_past + 1)
                for entry, draw in zip(entries, drawn[in_a_run][-1], strict=True)
            ]
        assert [context.kv.length(seq_id) for seq_id in range(4)] == [entry.n_past for entry in entries]
        context.kv.check_integrity()
        context.close()
    assert drawn[True] == drawn[False]


def test_a_shared_last_block_is_copied_before_a_run_writes_to_it(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    texts = []
    for shares in (True, False):
        context = Context(model, TorchRunner(model), n_ctx=256, n_parallel=2, block_size=8)
        prompt = torch.randint(3, 320, (13,), generator=torch.Generator().manual_seed(9)).tolist()
        context.prefill(prompt, 0, 0)
        if shares:
            context.seq_cp(0, 1)
        else:
            context.prefill(prompt, 1, 0)
        entries = [Entry(0, [7], 13), Entry(1, [8], 13)]
        states = [SamplerState(PARAMS[0], ()), SamplerState(PARAMS[0], ())]
        run = context.decode_run(entries, states, max_steps=6)
        texts.append([accepted(states, run.step()) for _ in range(6)])
    assert texts[0] == texts[1]


def test_a_run_that_finds_no_block_leaves_its_last_step_whole(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    context = Context(model, TorchRunner(model), num_blocks=[4], n_parallel=2, block_size=4)
    context.prefill([5, 6, 7], 0, 0)
    context.prefill([8, 9, 10], 1, 0)
    states = [SamplerState(PARAMS[0], ()), SamplerState(PARAMS[0], ())]
    run = context.decode_run([Entry(0, [11], 3), Entry(1, [12], 3)], states, max_steps=20)
    for _ in range(5):
        run.step()
    with pytest.raises(OutOfBlocks):
        run.step()
    assert [context.kv.length(seq_id) for seq_id in range(2)] == [8, 8]
    context.kv.check_integrity()


@pytest.mark.parametrize("windows", [(None,), (8, None)])
def test_checked_drafts_leave_what_single_steps_leave(tiny_model: TinyModel, windows: tuple[int | None, ...]) -> None:
    """Right ones, wrong ones, none: beside one another, and with plain steps in between."""
    model = tiny_model("llama")
    prompts = [list(range(20, 31)), list(range(50, 57)), list(range(80, 99))]
    told = [expected(prompt, 60) for prompt in prompts]
    context = Context(model, HistoryRunner(windows=windows), n_ctx=512, n_parallel=3, block_size=4)
    for seq_id, prompt in enumerate(prompts):
        context.prefill(prompt[:-1], seq_id, 0)
    entries = [Entry(seq_id, prompt[-1:], len(prompt) - 1) for seq_id, prompt in enumerate(prompts)]
    states = [SamplerState(PARAMS[0], ()) for _ in prompts]
    run = context.decode_run(entries, states, max_steps=STEPS)
    assert isinstance(run, DecodeRun)
    drawn: list[list[int]] = [[], [], []]
    rng = random.Random(4)
    for step in range(STEPS):
        drafts = []
        for index, tokens in enumerate(told):
            at = len(drawn[index])
            draft = tokens[at : at + rng.randint(0, 5)]
            if draft and rng.random() < 0.5:
                draft[rng.randrange(len(draft))] = 11 + rng.randrange(9)
            drafts.append([] if step % 4 == 3 else draft)
        if any(drafts):
            assert run.has_room(drafts)
            of_each = run.verify(drafts)
        else:
            of_each = [[draw] for draw in run.step()]
        for index, (draft, draws) in enumerate(zip(drafts, of_each, strict=True)):
            tokens = [draw.token_id for draw in draws if isinstance(draw, Sampled)]
            assert len(tokens) == len(draws) <= len(draft) + 1
            drawn[index] += tokens
        context.kv.check_integrity()
    for index, (prompt, tokens) in enumerate(zip(prompts, drawn, strict=True)):
        assert tokens == told[index][: len(tokens)] and len(tokens) > STEPS
        held = [*prompt, *tokens[:-1]]
        assert list(context.kv.tokens(index)) == held
        # Neither a block too many, nor the name of one that holds what was drafted in vain.
        assert len(context.kv.block_table(0, index)) == -(-len(held) // 4)
    context.close()


class Planted:
    """A constraint that allows every token. After `num_tokens` tokens its masks are slow or raise."""

    fault = None
    allowed = np.full(16, -1, np.int32)

    def __init__(self, num_tokens: int, *, raises: bool = False) -> None:
        self.num_tokens = num_tokens
        self.raises = raises
        self.tokens: list[int] = []

    @property
    def is_slow(self) -> bool:
        return not self.raises and len(self.tokens) == self.num_tokens

    def accept(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def prepare(self) -> None:
        assert not self.is_slow, "a slow mask was made on the model's thread"
        if self.raises and len(self.tokens) == self.num_tokens:
            raise ValueError("planted")

    def forced(self) -> Sequence[int]:
        return ()

    def fork(self) -> "Planted":
        raise AssertionError("no draft model")


def begun(model: Model, constraints: Sequence[Planted]) -> tuple[Context, DecodeRun, list[list[int]]]:
    """A run, and what each of its sequences will draw."""
    prompts = [list(range(first, first + 11)) for first in range(20, 20 + 30 * len(constraints), 30)]
    context = Context(model, HistoryRunner(), n_ctx=512, n_parallel=len(prompts), block_size=4)
    for seq_id, prompt in enumerate(prompts):
        context.prefill(prompt[:-1], seq_id, 0)
    entries = [Entry(seq_id, prompt[-1:], len(prompt) - 1) for seq_id, prompt in enumerate(prompts)]
    states = [SamplerState(PARAMS[0], (), constraint) for constraint in constraints]
    run = context.decode_run(entries, states, max_steps=STEPS)
    assert isinstance(run, DecodeRun)
    return context, run, [expected(prompt, 12) for prompt in prompts]


def test_a_draft_ends_where_a_mask_becomes_slow(tiny_model: TinyModel) -> None:
    constraints = [Planted(3), Planted(100)]
    context, run, told = begun(tiny_model("llama"), constraints)
    drawn = run.verify([told[0][:6], told[1][:6]])
    assert [[draw.token_id for draw in draws if not draw.failed] for draws in drawn] == [told[0][:3], told[1][:7]]
    assert [constraint.tokens for constraint in constraints] == [told[0][:3], told[1][:7]]
    constraints[0].num_tokens = 100  # another thread has made it
    assert [draw.token_id for draw in run.step() if not draw.failed] == [told[0][3], told[1][7]]
    assert [context.kv.length(seq_id) for seq_id in range(2)] == [14, 18]
    context.kv.check_integrity()


def test_an_error_within_drafts_leaves_the_draws_before_it_and_the_next_step_meets_it(tiny_model: TinyModel) -> None:
    constraints = [Planted(2, raises=True), Planted(2, raises=True)]
    context, run, told = begun(tiny_model("llama"), constraints)
    drawn = run.verify([told[0][:6], told[1][:6]])
    assert [[draw.token_id for draw in draws if not draw.failed] for draws in drawn] == [told[0][:2], told[1][:2]]
    with pytest.raises(ValueError, match="planted"):
        run.step()
    assert [context.kv.length(seq_id) for seq_id in range(2)] == [12, 12]
    constraints[1].num_tokens = 100
    [[failed], alone] = run.verify([told[0][2:6], told[1][2:6]])
    assert failed.failed and "planted" in failed.reason
    assert [draw.token_id for draw in alone if not draw.failed] == told[1][2:7]
    context.kv.check_integrity()


def test_drafts_for_which_there_is_no_block_are_told_from_others(tiny_model: TinyModel) -> None:
    context = Context(tiny_model("llama"), HistoryRunner(), num_blocks=[4], n_parallel=2, block_size=4)
    context.prefill([15, 16, 17], 0, 0)
    context.prefill([18, 19, 20], 1, 0)
    states = [SamplerState(PARAMS[0], ()), SamplerState(PARAMS[0], ())]
    run = context.decode_run([Entry(0, [11], 3), Entry(1, [12], 3)], states, max_steps=20)
    assert isinstance(run, DecodeRun)
    assert run.has_room([[9] * 4, [9] * 4])
    assert not run.has_room([[9] * 5, [9] * 4])
    assert run.has_room([[9] * 8, []]) and not run.has_room([[9] * 9, []])
    run.verify([[9] * 8, []])
    assert context.kv.free_blocks == (2,)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_run_goes_on_without_the_sequences_that_leave_it(tiny_model: TinyModel, family: str) -> None:
    """One leaves after its last token, one is taken out; the first step has none of it then."""
    model = tiny_model(family)
    drawn: dict[bool, list[list[Sampled]]] = {True: [[], [], [], []], False: [[], [], [], []]}
    for leave in (True, False):
        context = Context(model, TorchRunner(model), n_ctx=512, n_parallel=4, block_size=4)
        entries, states = begin(context, PARAMS)
        num_draws = [STEPS, STEPS, 6, STEPS] if leave else None
        run = context.decode_run(entries, states, max_steps=STEPS, num_draws=num_draws)
        for step in range(STEPS):
            if leave and step == 9:
                run.rows.leave(0)
            for tokens, state, draw in zip(drawn[leave], states, run.step(), strict=True):
                if isinstance(draw, Sampled):
                    state.accept(draw.token_id)
                    tokens.append(draw)
            if leave:
                assert run.rows.take_freed() == {5: [2], 9: [0], STEPS - 1: [1, 3]}.get(step, [])
            context.kv.check_integrity()
        assert run.is_over
        assert (context.kv.counts().used == 0) == leave
        context.close()
    for tokens, all_tokens, count in zip(drawn[True], drawn[False], (9, STEPS, 6, STEPS), strict=True):
        assert [draw.token_id for draw in tokens] == [draw.token_id for draw in all_tokens[:count]]


LOGPROBS = [SamplingParams(seed=seed, temperature=0.7 * (seed % 2), logprobs=3) for seed in range(4)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "lfm2", "falcon_h1", "deepseek2", "gemma4"])
def test_a_native_run_that_sequences_leave_has_the_bits_of_each_sequence_alone(name: str, tmp_path: Path) -> None:
    model = describe_model(str(build_native_model(name, tmp_path / name, build_tokenizer)), dtype="float32")
    assert model is not None
    weights = ModelWeights(model)
    context = Context(model, NativeRunner(weights, n_threads=2), n_ctx=512, n_parallel=4, block_size=16)
    entries, states = begin(context, LOGPROBS)
    run = context.decode_run(entries, states, max_steps=STEPS, num_draws=[STEPS, 3, STEPS, 12])
    together: list[list[Sampled]] = [[], [], [], []]
    while not run.is_over:
        if len(together[0]) == 7:
            run.rows.leave(0)
        for draws, state, draw in zip(together, states, run.step(), strict=True):
            if isinstance(draw, Sampled):
                state.accept(draw.token_id)
                draws.append(draw)
    run.close()
    assert [len(draws) for draws in together] == [7, 3, STEPS, 12]
    assert context.kv.counts().used == 0
    for seq_id, draws in enumerate(together):
        entries, states = begin(context, LOGPROBS)
        entry, state = entries[seq_id], states[seq_id]
        for draw in draws:
            [alone] = accepted([state], context.step([entry], [state])[1])
            assert alone == draw
            entry = Entry(seq_id, [draw.token_id], entry.n_past + 1)
        for slot in range(4):
            context.seq_rm(slot)
    context.close()
