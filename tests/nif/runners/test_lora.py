"""Adapters in every runner: each row of a mixed batch says what PEFT's model says, and what it says alone."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from genbatch.nif.context import Context
from genbatch.nif.engine_options import GraphOptions
from genbatch.nif.errors import AdapterError, BatchError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.lora import AdapterLimits, Adapters, LoraAdapter, read_lora
from genbatch.nif.models.model import load_model
from genbatch.nif.native.runner import native_runner
from genbatch.nif.runner import Entry, Logits, Runner
from genbatch.nif.runners.device_lora import DeviceLora
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.runners.triton_runner import TritonRunner
from genbatch.nif.sampling.sampler import Sampled, SamplerState, SamplingParams
from tests.lora_adapters import ALL, PeftOracle, make_adapter
from tests.nif.native.models import build_native_model
from tests.nif.runners.test_launches import eager_graphs
from tests.nif.tiny_models import build_tokenizer

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [100, 101, 102, 103, 104], [7], [42, 43]]
NAMES = ["all", "qv", None, "mlp", "all"]
MAX_TOKENS = 10
RUNNERS: dict[str, Callable[[Model], Runner]] = {
    "torch": TorchRunner,
    "native": native_runner,
    "lean": lambda model: TritonRunner(model, tier="lean"),
    "lean in order": lambda model: TritonRunner(model, tier="lean", batch_invariant=True),
    "general": lambda model: TritonRunner(model, tier="general"),
}
LONG_ONES = [pytest.param(kind, marks=pytest.mark.long) for kind in ("lean", "lean in order")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama that every runner can run."""
    return build_native_model("llama", tmp_path_factory.mktemp("llama"), build_tokenizer)


@pytest.fixture(scope="module")
def model(base: Path) -> Model:
    return load_model(str(base), dtype="float32", n_gpu_layers=0)


@pytest.fixture(scope="module")
def adapter_dirs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "all": make_adapter(base, folder / "all", ALL, seed=1),
        "qv": make_adapter(base, folder / "qv", ["q_proj", "v_proj"], rank=7, seed=2, use_rslora=True),
        "mlp": make_adapter(base, folder / "mlp", ["up_proj", "down_proj"], rank=19, seed=3),
    }


@pytest.fixture(scope="module")
def peft_oracle(base: Path, adapter_dirs: dict[str, Path]) -> PeftOracle:
    return PeftOracle(base, adapter_dirs)


def open_context(model: Model, runner: Runner, dirs: dict[str, Path]) -> Context:
    adapters = Adapters(model)
    for name, path in dirs.items():
        adapters.add(adapters.read(name, path))
    return Context(model, runner, n_ctx=512, n_parallel=8, block_size=4, adapters=adapters)


def handle(ctx: Context, name: str | None) -> int:
    return 0 if name is None else ctx.adapters[name].handle


def generate(
    ctx: Context, rows: Sequence[tuple[str | None, Sequence[int]]], max_tokens: int = MAX_TOKENS
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens of each row, prompts first and then step by step together; and all logits of each."""
    entries = [
        Entry(slot, prompt, 0, Logits.LAST, adapter=handle(ctx, name)) for slot, (name, prompt) in enumerate(rows)
    ]
    tokens: list[list[int]] = [[] for _ in rows]
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for _ in range(max_tokens):
        for slot, row in enumerate(ctx.eval(entries)):
            logits[slot].append(torch.as_tensor(row[-1]).clone())
            tokens[slot].append(int(row[-1].argmax()))
        entries = [
            Entry(entry.seq_id, tokens[slot][-1:], entry.n_past + len(entry.tokens), adapter=entry.adapter)
            for slot, entry in enumerate(entries)
        ]
    for slot in range(len(rows)):
        ctx.seq_rm(slot)
    return tokens, [torch.stack(row) for row in logits]


@pytest.mark.parametrize("kind", ["torch", "native", "general", *LONG_ONES])
def test_each_row_of_a_mixed_batch_says_what_peft_says(
    kind: str, model: Model, adapter_dirs: dict[str, Path], peft_oracle: PeftOracle
) -> None:
    ctx = open_context(model, RUNNERS[kind](model), adapter_dirs)
    max_tokens = MAX_TOKENS if kind in ("torch", "native") else 4  # the others are interpreted
    tokens, _ = generate(ctx, list(zip(NAMES, PROMPTS, strict=True)), max_tokens)
    expected = [peft_oracle.generate(name, prompt, max_tokens) for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    assert tokens == expected
    plain = [peft_oracle.generate(None, prompt, max_tokens) for prompt in PROMPTS]
    assert [a != b for a, b in zip(expected, plain, strict=True)] == [name is not None for name in NAMES]
    ctx.close()


@pytest.mark.parametrize("way", ["own", "library", "graphs"])
def test_launched_steps_with_adapters_draw_what_peft_says(
    way: str,
    model: Model,
    adapter_dirs: dict[str, Path],
    peft_oracle: PeftOracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each row names its adapter by a number on the device, as a captured step reads it."""
    if way == "library":
        monkeypatch.setattr("genbatch.nif.runners.lean_llama._MAX_OWN_ROWS", 0)
    runner = TritonRunner(model, tier="lean")
    ctx = open_context(model, runner, adapter_dirs)
    if way == "graphs":
        eager_graphs(monkeypatch)(runner, GraphOptions(max_batch_size=8))
    rows = list(zip(NAMES, PROMPTS, strict=True))
    entries = [
        Entry(slot, prompt, 0, Logits.LAST, adapter=handle(ctx, name)) for slot, (name, prompt) in enumerate(rows)
    ]
    tokens = [[int(row[-1].argmax())] for row in ctx.eval(entries)]
    entries = [
        Entry(slot, tokens[slot], len(prompt), adapter=entries[slot].adapter) for slot, (_, prompt) in enumerate(rows)
    ]
    run = ctx.decode_run(entries, [SamplerState(SamplingParams(seed=0), ())] * len(rows), max_steps=2)
    for _ in range(2):
        for row, drawn in zip(tokens, run.step(), strict=True):
            assert isinstance(drawn, Sampled)
            row.append(drawn.token_id)
    run.close()
    assert tokens == [peft_oracle.generate(name, prompt, 3) for name, prompt in rows]
    if way == "graphs":
        assert runner._graphs is not None
        assert runner._graphs._adapted is not None
        assert len(runner._graphs._adapted[1]) == 1, "the step with adapters was captured"
    ctx.close()


def test_tables_of_many_adapters_grow_and_places_are_used_again(model: Model, adapter_dirs: dict[str, Path]) -> None:
    lora = DeviceLora(model)
    first, last = (read_lora("qv", adapter_dirs["qv"], model, AdapterLimits()) for _ in range(2))
    adapters = [dataclasses.replace(first, handle=handle) for handle in range(1, 34)]
    for adapter in adapters[:32]:
        lora.add(adapter)
    before = lora.tables
    lora.add(adapters[32])
    assert lora.tables is not before
    assert lora.tables.ranks.shape[-1] == 64
    assert lora.tables.matrices[..., :32].equal(before.matrices)
    assert lora.tables.ranks[0, 0, :33].eq(14).all(), "rank 7 of the queries and of the values"
    lora.drop(adapters[4])
    assert lora.tables.ranks[0, 0, 4] == 0
    lora.add(dataclasses.replace(last, handle=99))
    numbers = lora.numbers(torch.tensor([99, 0, 33]))
    assert numbers is not None
    assert numbers.tolist() == [4, -1, 32]


@pytest.mark.parametrize("kind", ["native", LONG_ONES[1]])
def test_a_rows_logits_are_the_same_bits_alone_and_in_every_mix(
    kind: str, model: Model, adapter_dirs: dict[str, Path]
) -> None:
    ctx = open_context(model, RUNNERS[kind](model), adapter_dirs)
    rows = list(zip(NAMES, PROMPTS, strict=True))
    mixes = [rows, rows[::-1], rows[1:3], [rows[0], rows[4], *[("all", [200 + i]) for i in range(5)]]]
    steps = 4 if kind == "native" else 1  # the other is interpreted
    alone = {str(row): generate(ctx, [row], steps)[1][0] for row in rows[: steps + 1]}
    without = Context(model, RUNNERS[kind](model), n_ctx=64, n_parallel=1, block_size=4)
    alone[str(rows[2])] = generate(without, [rows[2]], steps)[1][0]
    # numpy, by which the interpreter multiplies, rounds by a row's place in its tile: there only the first row counts.
    count = None if kind == "native" else 1
    for mix in mixes if kind == "native" else [rows[:3], rows[2:0:-1]]:
        for row, logits in zip(mix[:count], generate(ctx, mix, steps)[1][:count], strict=True):
            if str(row) in alone:
                assert torch.equal(logits, alone[str(row)]), row
    ctx.close()
    without.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_native_chunks_and_threads_change_no_bit(threads: int, model: Model, adapter_dirs: dict[str, Path]) -> None:
    prompt = [(7 * i) % 300 for i in range(40)]
    whole = open_context(model, native_runner(model, n_threads=1), adapter_dirs)
    parts = open_context(model, native_runner(model, n_threads=threads), adapter_dirs)
    [expected] = whole.eval([Entry(0, prompt, 0, Logits.ALL, handle(whole, "all"))])
    got = []
    for start in range(0, 40, 13):
        size = min(13, 40 - start)
        beside = Entry(1, prompt[start : start + size], start, Logits.NONE, handle(parts, "mlp"))
        mine = Entry(0, prompt[start : start + size], start, Logits.ALL, handle(parts, "all"))
        got.append(parts.eval([beside, mine])[1])
    assert np.array_equal(np.concatenate(got), expected)
    whole.close()
    parts.close()


def test_an_adapter_whose_name_was_taken_meanwhile_leaves_no_weights(
    model: Model, adapter_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = native_runner(model)
    ctx = open_context(model, runner, adapter_dirs)
    dropped: list[LoraAdapter] = []
    monkeypatch.setattr(runner, "drop_adapter", dropped.append)
    second = read_lora("qv", adapter_dirs["qv"], model, AdapterLimits())
    ctx.prepare_adapter(second)
    with pytest.raises(AdapterError):
        ctx.add_adapter(second)
    assert dropped == [second]
    ctx.close()


def test_an_adapter_that_is_dropped_is_named_by_nobody(model: Model, adapter_dirs: dict[str, Path]) -> None:
    ctx = open_context(model, native_runner(model), adapter_dirs)
    gone = ctx.adapters["qv"]
    ctx.drop_adapter(gone)
    with pytest.raises(BatchError, match="no adapter has the handle"):
        ctx.eval([Entry(0, [5], 0, adapter=gone.handle)])
    again = read_lora("qv", adapter_dirs["qv"], model, AdapterLimits())
    ctx.prepare_adapter(again)
    ctx.add_adapter(again)
    assert again.digest == gone.digest and again.handle != gone.handle
    ctx.eval([Entry(0, [5], 0, adapter=again.handle)])
    ctx.close()
