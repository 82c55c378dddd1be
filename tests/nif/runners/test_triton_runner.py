"""TritonRunner under Triton's interpreter: both tiers against transformers' `generate` and against TorchRunner."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton

from genbatch.nif.context import Context
from genbatch.nif.engine_options import GraphOptions
from genbatch.nif.errors import BatchError, ModelError, OptionError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import RaggedBatch
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.runners.triton_runner import Precision, TritonRunner
from tests.nif.runners.ragged_batches import ragged_batch

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="these models are on the CPU, where only the interpreter runs kernels"
)

BLOCK_SIZE = 4
CAPACITY = 5  # blocks a sequence owns
LEAN = ["llama", "qwen3", "mistral"]
GENERAL = ["llama", "mistral", "gemma2", "gpt_oss"]  # plain, window, soft-cap, sinks
TIERS = [("lean", family) for family in LEAN] + [("general", family) for family in GENERAL]
PROMPTS = [[5, 17, 100, 42, 9, 250, 33, 8, 77], [200, 3, 11]]


def layout(groups: int, parts: Sequence[tuple[int, Sequence[int], int]]) -> RaggedBatch:
    return ragged_batch(groups, parts, capacity=CAPACITY, block_size=BLOCK_SIZE)


def allocated(runner: Any, sequences: int = 2) -> Any:
    runner.allocate([sequences * CAPACITY] * len(runner.groups), BLOCK_SIZE)
    return runner


@pytest.mark.parametrize(("tier", "family"), TIERS)
def test_greedy_answers_equal_generate(tier: Any, family: str, tiny_model: Any, oracle: Any) -> None:
    model = tiny_model(family)
    context = Context(model, TritonRunner(model, tier=tier), n_ctx=64, n_parallel=2, block_size=BLOCK_SIZE, n_batch=6)
    answers: list[list[int]] = []
    for seq_id, prompt in enumerate(PROMPTS):
        answers.append([int(context.prefill(prompt, seq_id, 0).argmax())])
    for _ in range(2):  # each decode takes seconds in the interpreter
        entries = [
            (seq_id, answer[-1], len(PROMPTS[seq_id]) + len(answer) - 1) for seq_id, answer in enumerate(answers)
        ]
        for seq_id, token_id, _ in context.decode_batch(entries):
            answers[seq_id].append(token_id)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = oracle(family).generate(prompt, 3)  # shorter where it ends
        assert answer[: len(expected)] == expected


@pytest.mark.parametrize(("tier", "family"), TIERS)
def test_a_mix_of_chunks_and_decodes_equals_the_torch_runner(tier: Any, family: str, tiny_model: Any) -> None:
    model = tiny_model(family)
    runners = [allocated(TorchRunner(model)), allocated(TritonRunner(model, tier=tier))]
    groups = len(model.groups)
    steps = [
        layout(groups, [(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], 0)]),
        layout(groups, [(0, [10], 9), (1, [11, 12, 13], 0)]),
        layout(groups, [(1, [14], 3), (0, [15], 10)]),
    ]
    for batch in steps:
        expected, actual = (torch.as_tensor(runner.forward(batch)) for runner in runners)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_batch_invariant_rows_are_the_same_to_the_bit_alone_among_others_and_in_chunks(
    tiny_model: Any, exact_interpreter: None, family: str
) -> None:
    model = tiny_model(family)
    runner = allocated(TritonRunner(model, batch_invariant=True))
    groups = len(model.groups)
    prompt = [(7 * token) % 300 + 3 for token in range(11)]
    whole = runner.forward(layout(groups, [(0, prompt, 0)]))
    for first in (1, 10):
        again = [runner.forward(layout(groups, [(0, prompt[:first], 0)]))]
        again.append(runner.forward(layout(groups, [(1, [9] * 6, 0), (0, prompt[first:], first)]))[6:])
        assert np.array_equal(np.concatenate(again), whole)


@pytest.mark.parametrize(("tier", "family"), [("lean", "qwen3"), ("general", "gemma2")])
def test_a_cache_in_fp8_takes_a_byte_a_number_and_holds_what_the_model_computed(
    tiny_model: Any, exact_interpreter: None, tier: Any, family: str
) -> None:
    model = tiny_model(family)
    runner, plain = (
        allocated(TritonRunner(model, tier=tier, precision=Precision(cache=kind))) for kind in ("float8", None)
    )
    assert runner.name.endswith("float8 cache")
    assert 4 * runner.bytes_per_block(0, BLOCK_SIZE) == plain.bytes_per_block(0, BLOCK_SIZE)
    groups, prompt = len(model.groups), [(7 * token) % 300 + 3 for token in range(9)]
    got, want = (torch.as_tensor(r.forward(layout(groups, [(0, prompt, 0)]))) for r in (runner, plain))
    # The first layer's keys and values do not depend on the cache.
    for read, exact in zip(vars_of(runner, 0), vars_of(plain, 0), strict=True):
        assert torch.equal(read, exact.to(torch.float8_e4m3fn).float())
    assert 0 < float((got - want).norm() / want.norm()) < 0.1
    # Blocks can be copied, read and written: the second sequence gets the first one's.
    last = CAPACITY - 1
    for group in range(groups):
        runner.copy_blocks(group, [(last, last + CAPACITY), (last - 1, last - 1 + CAPACITY)])
        runner.write_blocks(group, [last - 2 + CAPACITY], runner.read_blocks(group, [last - 2]))
    decoded = [runner.forward(layout(groups, [(row, [44], 9)])) for row in (0, 1)]
    assert np.array_equal(*decoded)


def vars_of(runner: TritonRunner, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values as numbers."""
    pool = runner._pools[layer]
    return pool.keys.float(), pool.values.float()


def test_batch_invariance_and_packed_weights_are_refused_where_they_cannot_be_had(tiny_model: Any) -> None:
    with pytest.raises(OptionError, match=r"batch_invariant.*Gemma2ForCausalLM"):
        TritonRunner(tiny_model("gemma2"), batch_invariant=True)
    with pytest.raises(OptionError, match=r"quantize.*the option tier is general"):
        TritonRunner(tiny_model("llama"), tier="general", precision=Precision("int8"))


def test_only_the_wanted_rows_come_back(tiny_model: Any) -> None:
    model = tiny_model("llama")
    batch = layout(1, [(0, [1, 2, 3], 0)])
    for tier in ("lean", "general"):
        runner = allocated(TritonRunner(model, tier=tier))
        whole = runner.forward(batch)
        one = runner.forward(dataclasses.replace(batch, logit_rows=np.array([2])))
        none = runner.forward(dataclasses.replace(batch, logit_rows=np.empty(0, np.int64)))
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(whole[2:]))
        assert none.shape == (0, model.vocab_size)


def planted(batch: RaggedBatch, field: str, value: int) -> RaggedBatch:
    array = getattr(batch, field)
    if isinstance(array, tuple):
        bad = array[0].copy()
        bad.flat[-1] = value
        return dataclasses.replace(batch, **{field: (bad,)})
    bad = array.copy()
    bad[-1] = value
    return dataclasses.replace(batch, **{field: bad})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_tables", 2 * CAPACITY),
        ("block_tables", -1),
        ("block_tables", 2**31 - 1),
        ("slots", 2 * CAPACITY * BLOCK_SIZE),
        ("slots", -1),
        ("positions", 256),
        ("positions", -1),
        ("input_ids", 320),
        ("input_ids", -5),
        ("logit_rows", 3),
        ("kv_lens", 10**6),
        ("kv_lens", 1),
        ("query_starts", 7),
    ],
)
def test_an_index_out_of_range_is_refused_before_any_kernel_runs(tiny_model: Any, field: str, value: int) -> None:
    runner = allocated(TritonRunner(tiny_model("llama")))
    batch = layout(1, [(0, [1, 2, 3], 0)])
    with pytest.raises(BatchError):
        runner.forward(planted(batch, field, value))
    assert runner.read_blocks(0, range(2 * CAPACITY)).eq(0).all()


def test_a_table_narrower_than_the_positions_is_refused(tiny_model: Any) -> None:
    runner = allocated(TritonRunner(tiny_model("llama")))
    batch = layout(1, [(0, [1, 2, 3, 4, 5], 0)])
    with pytest.raises(BatchError, match="does not hold"):
        runner.forward(dataclasses.replace(batch, block_tables=(batch.block_tables[0][:, :1],)))


def test_blocks_are_copied_read_and_written_whole(tiny_model: Any) -> None:
    model = tiny_model("mistral")
    runner = allocated(TritonRunner(model))
    runner.forward(layout(len(model.groups), [(0, [1, 2, 3, 4, 5, 6], 0)]))
    first, second = CAPACITY - 1, CAPACITY - 2
    before = runner.read_blocks(0, range(2 * CAPACITY))
    assert before.shape == (2 * CAPACITY, runner.bytes_per_block(0, BLOCK_SIZE))
    runner.copy_blocks(0, [(first, 7), (second, 8)])
    after = runner.read_blocks(0, range(2 * CAPACITY))
    assert after[7].equal(before[first])
    assert after[8].equal(before[second])
    assert after[:7].equal(before[:7])
    runner.write_blocks(0, [9, 6], before[[first, second]])
    assert runner.read_blocks(0, [9, 6]).equal(before[[first, second]])


def test_copies_that_overlap_read_every_source_first(tiny_model: Any) -> None:
    runner = allocated(TritonRunner(tiny_model("llama")))
    content = torch.arange(3, dtype=torch.uint8)[:, None].repeat(1, runner.bytes_per_block(0, BLOCK_SIZE))
    runner.write_blocks(0, [0, 1, 2], content)
    runner.copy_blocks(0, [(0, 1), (1, 2)])
    assert runner.read_blocks(0, [0, 1, 2])[:, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("block", [-1, 2 * CAPACITY])
def test_a_block_outside_the_pool_is_refused(tiny_model: Any, block: int) -> None:
    runner = allocated(TritonRunner(tiny_model("llama")))
    with pytest.raises(BatchError, match="outside"):
        runner.copy_blocks(0, [(0, block)])
    with pytest.raises(BatchError, match="outside"):
        runner.read_blocks(0, [block])
    with pytest.raises(BatchError, match="outside"):
        runner.write_blocks(0, [block], torch.zeros((1, runner.bytes_per_block(0, BLOCK_SIZE)), dtype=torch.uint8))


def test_merged_weights_are_the_models_own_and_shared_between_runners(tiny_model: Any) -> None:
    model = tiny_model("qwen3")
    before = model.hf.model.layers[0].self_attn.k_proj.weight.clone()
    TritonRunner(model, tier="lean")
    projection = model.hf.model.layers[0].self_attn
    storage = projection.q_proj.weight.untyped_storage().data_ptr()
    assert projection.k_proj.weight.untyped_storage().data_ptr() == storage
    assert projection.k_proj.weight.equal(before)
    TritonRunner(model, tier="lean")
    assert projection.q_proj.weight.untyped_storage().data_ptr() == storage


def test_auto_takes_the_lean_loop_where_it_can(tiny_model: Any) -> None:
    assert TritonRunner(tiny_model("llama")).name == "triton, lean loop"
    assert TritonRunner(tiny_model("gemma2")).name == "triton, general"


def test_the_lean_loop_is_refused_for_another_family(tiny_model: Any) -> None:
    with pytest.raises(OptionError, match="Gemma2ForCausalLM"):
        TritonRunner(tiny_model("gemma2"), tier="lean")


def test_h14_graphs_on_a_cpu_are_refused(tiny_model: Any) -> None:
    with pytest.raises(OptionError, match="CUDA graphs need a CUDA device"):
        TritonRunner(tiny_model("llama"), graphs=GraphOptions())


def test_a_cpu_without_the_interpreter_is_refused(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(OptionError, match="CUDA device"):
        TritonRunner(tiny_model("llama"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda model: {"dtype": "bfloat16"}, OptionError),
        (lambda model: {"layers": (dataclasses.replace(model.layers[0], value_dim=4),)}, ModelError),
        (lambda model: {"layers": (dataclasses.replace(model.layers[0], key_dim=512, value_dim=512),)}, ModelError),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused_at_start(
    tiny_model: Any, change: Callable[[Model], dict[str, Any]], error: type[Exception]
) -> None:
    model = tiny_model("llama")
    with pytest.raises(error):
        TritonRunner(dataclasses.replace(model, **change(model)))


def test_a_closed_runner_holds_no_blocks(tiny_model: Any) -> None:
    runner = allocated(TritonRunner(tiny_model("llama")))
    runner.close()
    with pytest.raises(IndexError):
        runner.read_blocks(0, [0])
