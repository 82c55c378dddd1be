"""NativeRunner against the model's own eager attention, one sequence at a time and without a cache."""

import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.context.context import Context
from genbatch.nif.errors import BatchError, OptionError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.native.layer_loader import keeps_8_bits
from genbatch.nif.native.library import WEIGHT_I8, WEIGHT_U4
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.native.runner import NativeRunner, apart, native_runner
from genbatch.nif.runner import Entry, LayerGroup, Logits, RaggedBatch

SINKS = "llama with sinks"  # in sight of a window, which the family has not of itself
NAMES = ["llama", "llama_odd", "mistral", "qwen2", "qwen3", SINKS]
LENGTH = 150  # more than two chunks of 64 keys and several windows
SEQUENCES = 3

# Relative error of a row of logits of a random model; other rounding costs a fraction of these.
# Where pairs of bfloat16 are multiplied (AMD), activations are rounded too.
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2, "int8": 2.5e-1}
MODES = list(TOLERANCE)

Layout = Callable[..., RaggedBatch]
Models = Callable[..., Model]


@contextmanager
def opened(model: Model, mode: str, block_size: int = 16, n_threads: int = 2) -> Iterator[NativeRunner]:
    runner = native_runner(model, quantize="int8" if mode == "int8" else "none", n_threads=n_threads)
    runner.allocate([SEQUENCES * capacity(block_size)] * len(runner.groups), block_size)
    yield runner
    runner.close()


def capacity(block_size: int) -> int:
    return -(-LENGTH // block_size)


def tokens_of(model: Model) -> list[list[int]]:
    drawn = torch.randint(model.vocab_size, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(7))
    rows: list[list[int]] = drawn.tolist()
    return rows


def eager(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """The model's own attention over its own weights, in float32 arithmetic."""
    hf = copy.deepcopy(model.hf).float()
    hf.set_attn_implementation("eager")
    [*_, group] = model.groups
    mask = None
    if group.sink_tokens:
        key, query = torch.arange(len(tokens)), torch.arange(len(tokens))[:, None]
        seen = (key <= query) & ((key > query - group.window) | (key < group.sink_tokens))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        logits: torch.Tensor = hf(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]
    return logits


def model_for(native_model: Models, name: str, mode: str) -> Model:
    model = native_model(name.removesuffix(" with sinks"), "bfloat16" if mode == "bfloat16" else "float32")
    if name != SINKS:
        return model
    [group] = model.groups
    return dataclasses.replace(model, groups=(LayerGroup(group.layers, window=29, sink_tokens=5),))


def worst_error(got: np.ndarray, want: torch.Tensor) -> float:
    return float(((torch.from_numpy(got) - want).norm(dim=-1) / want.norm(dim=-1)).max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_mix_gives_the_logits_of_each_sequence_alone(
    native_model: Models, layout: Layout, name: str, mode: str
) -> None:
    model = model_for(native_model, name, mode)
    a, b, c = tokens_of(model)
    with opened(model, mode) as runner:
        groups = len(runner.groups)
        first = runner.forward(layout(groups, [(0, a[:70], 0), (1, b[:1], 0)], capacity(16), 16))
        second = runner.forward(layout(groups, [(1, b[1:50], 1), (2, c, 0), (0, a[70:71], 70)], capacity(16), 16))
        third = runner.forward(layout(groups, [(0, a[71:], 71)], capacity(16), 16))
    got = np.concatenate([first[:70], second[49 + LENGTH :], third])
    assert worst_error(got, eager(model, a)) < TOLERANCE[mode]
    assert worst_error(np.concatenate([first[70:], second[:49]]), eager(model, b[:50])) < TOLERANCE[mode]
    assert worst_error(second[49 : 49 + LENGTH], eager(model, c)) < TOLERANCE[mode]


@pytest.mark.parametrize("block_size", [1, 4, 16, 20, 64])
@pytest.mark.parametrize("mode", MODES)
def test_every_block_size_gives_the_same_logits(
    native_model: Models, layout: Layout, block_size: int, mode: str
) -> None:
    model = model_for(native_model, "mistral", mode)
    tokens = tokens_of(model)[0]
    with opened(model, mode, block_size) as runner:
        parts = [(0, tokens[:33], 0)], [(0, tokens[33:], 33)]
        got = [runner.forward(layout(1, part, capacity(block_size), block_size)) for part in parts]
    assert worst_error(np.concatenate(got), eager(model, tokens)) < TOLERANCE[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama_odd", "mistral", "qwen2", SINKS])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_logits_are_the_same_to_the_bit_in_every_batch_and_chunking(
    native_model: Models, layout: Layout, name: str, mode: str, data: st.DataObject
) -> None:
    model = model_for(native_model, name, mode)
    tokens = tokens_of(model)
    cuts = sorted({0, LENGTH, *data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=4))})
    company = data.draw(st.lists(st.tuples(st.booleans(), st.integers(1, 60)), min_size=len(cuts) - 1))
    with opened(model, mode, n_threads=1) as alone:
        groups = len(alone.groups)
        want = alone.forward(layout(groups, [(0, tokens[0], 0)], capacity(16), 16))
    with opened(model, mode, n_threads=3) as mixed:
        rows = []
        for start, stop, (before, size) in zip(cuts, cuts[1:], company, strict=False):
            own, other = (0, tokens[0][start:stop], start), (1, tokens[1][:size], 0)
            parts = [other, own] if before else [own, other]
            out = mixed.forward(layout(groups, parts, capacity(16), 16))
            rows.append(out[size:] if before else out[: stop - start])
    assert np.array_equal(np.concatenate(rows), want)


SHARED = 131  # a common beginning: two chunks of 64 keys and the start of a third


@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "llama_odd", "mistral", "qwen2", SINKS])
def test_a_shared_beginning_changes_no_bit(native_model: Models, name: str, mode: str, block_size: int) -> None:
    """Members of different lengths, one alone among them, that read one copy of their first blocks or each its own."""
    model = model_for(native_model, name, mode)
    common = tokens_of(model)[0][:SHARED]
    whole = SHARED // block_size  # blocks that can be shared
    lengths = [1, 9, 40, 1, 2, 3, 70]
    drawn = torch.randint(model.vocab_size, (len(lengths), 70), generator=torch.Generator().manual_seed(8)).tolist()
    texts = [common + row[:length] for row, length in zip(drawn, lengths, strict=True)]
    texts[3] = drawn[3] + drawn[4]  # another beginning: interrupts the run of members
    size = -(-max(map(len, texts)) // block_size)
    tables = np.arange(len(texts) * size, dtype=np.int32).reshape(-1, size)
    sharing = tables.copy()
    for member in (1, 2, 4, 5, 6):
        sharing[member, :whole] = tables[0, :whole]
    sharing[6, whole - 1] = tables[6, whole - 1]  # leaves the others a block earlier

    def batch(rows: Sequence[int], used: np.ndarray, groups: int) -> RaggedBatch:
        """Decodes the last token of these texts."""
        last = np.array([len(texts[row]) - 1 for row in rows])
        picked = used[list(rows)]
        slots = picked[np.arange(len(rows)), last // block_size].astype(np.int64) * block_size + last % block_size
        return RaggedBatch(
            input_ids=np.array([texts[row][-1] for row in rows]),
            positions=last,
            query_starts=np.arange(len(rows) + 1, dtype=np.int32),
            kv_lens=(last + 1).astype(np.int32),
            slots=(slots,) * groups,
            block_tables=(picked,) * groups,
            logit_rows=np.arange(len(rows)),
            max_query_len=1,
            max_kv_len=int(last.max()) + 1,
        )

    runner = native_runner(model, quantize="int8" if mode == "int8" else "none", n_threads=1)
    groups = len(runner.groups)
    runner.allocate([tables.size] * groups, block_size)
    for row, text in enumerate(texts):
        at = np.arange(len(text) - 1)
        runner.forward(
            RaggedBatch(
                input_ids=np.array(text[:-1], np.int64),
                positions=at,
                query_starts=np.array([0, len(at)], np.int32),
                kv_lens=np.array([len(at)], np.int32),
                slots=(tables[row][at // block_size].astype(np.int64) * block_size + at % block_size,) * groups,
                block_tables=(tables[row : row + 1],) * groups,
                logit_rows=np.empty(0, np.int64),
                max_query_len=len(at),
                max_kv_len=len(at),
            )
        )
    want = np.concatenate([runner.forward(batch([row], tables, groups)) for row in range(len(texts))])
    everyone = range(len(texts))
    assert np.array_equal(runner.forward(batch(everyone, tables, groups)), want)
    assert np.array_equal(runner.forward(batch(everyone, sharing, groups)), want)
    for rows in ([0, 1], [6, 5, 4], [2, 0, 6, 1, 4, 5], [0, 0, 3]):
        assert np.array_equal(runner.forward(batch(rows, sharing, groups)), want[rows])
    for row in range(3):
        assert worst_error(want[row : row + 1], eager(model, texts[row])[-1:]) < TOLERANCE[mode]
    runner.close()


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("mode", MODES)
def test_b21_a_window_with_sinks_is_the_same_to_the_bit_however_blocks_are_given_back(
    native_model: Models, mode: str, block_size: int
) -> None:
    """A sequence is evaluated in chunks, saved and copied, beside another that takes the blocks given back."""
    model = model_for(native_model, SINKS, mode)
    tokens, other, _ = tokens_of(model)

    def evaluated(sizes: Sequence[int], *, company: bool) -> np.ndarray:
        runner = native_runner(model, quantize="int8" if mode == "int8" else "none", n_threads=1)
        num_blocks = 3 * (-(-(5 + 29 + 33) // block_size) + 3)
        context = Context(
            model, runner, n_ctx=512, num_blocks=[num_blocks], n_parallel=3, block_size=block_size, n_batch=64
        )
        rows, n_past, seq_id = [], 0, 0
        for turn, size in enumerate(sizes):
            batch = [Entry(seq_id, tokens[n_past : n_past + size], n_past, Logits.ALL)]
            if company and 9 * turn + 9 <= LENGTH:
                batch.append(Entry(2, other[9 * turn : 9 * turn + 9], context.kv.length(2), Logits.NONE))
            rows.append(context.eval(batch)[0])
            n_past += size
            context.kv.check_integrity()
            if company and turn % 3 == 1:
                context.seq_cp(seq_id, 1 - seq_id)
                context.seq_rm(seq_id)
                seq_id = 1 - seq_id
            if company and turn % 3 == 2:
                saved = context.seq_save(seq_id)
                context.seq_rm(seq_id)
                context.seq_load(seq_id, saved)
        runner.close()
        return np.concatenate(rows)

    alone = evaluated([33, 33, 33, 33, 18], company=False)
    assert worst_error(alone, eager(model, tokens)) < TOLERANCE[mode]
    mixed = evaluated([1, 6, 7, 20, 11, 33, 2, *[1] * 40, 30], company=True)
    assert np.array_equal(mixed, alone)


def test_only_the_wanted_rows_are_computed(native_model: Models, layout: Layout) -> None:
    model = native_model("llama")
    a, b, _ = tokens_of(model)
    with opened(model, "float32") as runner:
        batch = layout(1, [(0, a[:20], 0), (1, b[:9], 0)], capacity(16), 16)
        everything = runner.forward(batch)
        some = np.array([28, 3, 3])
        assert np.array_equal(runner.forward(replaced(batch, logit_rows=some)), everything[some])
        nothing = runner.forward(replaced(batch, logit_rows=np.empty(0, np.int64)))
        assert nothing.shape == (0, model.vocab_size)
        # The keys and values were written all the same.
        rest = runner.forward(layout(1, [(0, a[20:21], 20)], capacity(16), 16))
    assert worst_error(rest, eager(model, a[:21])[20:]) < TOLERANCE["float32"]


def replaced(batch: RaggedBatch, **changes: object) -> RaggedBatch:
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return RaggedBatch(**{**fields, **changes})


@pytest.mark.parametrize("mode", MODES)
def test_blocks_copied_and_put_back_hold_the_same_keys(native_model: Models, layout: Layout, mode: str) -> None:
    model = model_for(native_model, "qwen2", mode)
    tokens = tokens_of(model)[0]
    groups, blocks = 2, capacity(16)
    with opened(model, mode) as runner:
        runner.forward(layout(groups, [(0, tokens[:40], 0)], blocks, 16))
        want = runner.forward(layout(groups, [(0, tokens[40:41], 40)], blocks, 16))
        own, other = ([(s + 1) * blocks - 1 - b for b in range(blocks)] for s in (0, 1))
        for group in range(groups):
            runner.copy_blocks(group, list(zip(own, other, strict=True)))
        assert np.array_equal(runner.forward(layout(groups, [(1, tokens[40:41], 40)], blocks, 16)), want)
        for group in range(groups):
            content = runner.read_blocks(group, own)
            assert content.shape == (blocks, runner.bytes_per_block(group, 16))
            runner.write_blocks(group, own, np.zeros_like(content))
            assert not runner.read_blocks(group, own).any()
            runner.write_blocks(group, [block + blocks for block in other], content)
            none = runner.read_blocks(group, [])
            assert none.shape == (0, content.shape[1])
            runner.write_blocks(group, [], none)
        assert np.array_equal(runner.forward(layout(groups, [(2, tokens[40:41], 40)], blocks, 16)), want)


@pytest.mark.parametrize("num_layers", [2, 24, 30, 80])
@pytest.mark.parametrize("size", [2**21, 12 * 2**20, 2**21 + 7 * 2**12, 3 * 2**30])
def test_layers_reach_new_huge_pages_in_turn(size: int, num_layers: int) -> None:
    stride = apart(size, num_layers)
    places = sorted(layer * stride % 2**21 for layer in range(num_layers))
    assert stride >= size and stride % 2**12 == 0
    assert min(end - begin for begin, end in pairwise(places)) >= 2**20 // num_layers


def test_a_pool_of_more_than_huge_pages_holds_the_same_keys(native_model: Models, layout: Layout) -> None:
    model = native_model("llama")
    tokens = tokens_of(model)[0]
    logits = []
    for num_blocks in (2 * capacity(16), 2**22 // (16 * 2 * 32 * 4)):
        runner = native_runner(model, n_threads=2)
        runner.allocate([num_blocks], 16)
        logits.append(runner.forward(layout(1, [(0, tokens[:40], 0)], capacity(16), 16)))
        assert runner.read_blocks(0, range(capacity(16) - 3, capacity(16))).any(1).all()
        assert not runner.read_blocks(0, range(num_blocks - 3, num_blocks)).any()
        runner.close()
    assert np.array_equal(*logits)


@pytest.mark.parametrize(("mode", "token_bytes"), [("float32", 4 * 32), ("bfloat16", 2 * 32), ("int8", 32 + 12)])
def test_a_block_takes_the_bytes_of_its_tokens(native_model: Models, mode: str, token_bytes: int) -> None:
    model = model_for(native_model, "llama", mode)  # 3 layers, 2 KV heads of 16
    with opened(model, mode) as runner:
        assert runner.bytes_per_block(0, 16) == 3 * 2 * 16 * token_bytes


@pytest.mark.parametrize("mode", MODES)
def test_a_key_that_is_no_number_stays_in_its_own_sequence(native_model: Models, layout: Layout, mode: str) -> None:
    model = model_for(native_model, "llama", mode)
    tokens = tokens_of(model)[0]
    with opened(model, mode) as runner:
        want = runner.forward(layout(1, [(0, tokens[:21], 0)], capacity(16), 16))
        poison = np.full((runner._blocks(0).shape[1], runner.bytes_per_block(0, 16)), 0xFF, np.uint8)
        runner.write_blocks(0, range(len(poison)), poison)
        assert np.array_equal(runner.forward(layout(1, [(0, tokens[:21], 0)], capacity(16), 16)), want)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"input_ids": np.array([1, 320, 2])}, "token 1"),
        ({"input_ids": np.array([-1, 3, 2])}, "token 0"),
        ({"positions": np.array([0, 1, 3])}, "entry 0|token"),
        ({"slots": (np.array([0, 1, 10_000]),)}, "token 2"),
        ({"slots": (np.array([0, -1, 2]),)}, "token 1"),
        ({"block_tables": (np.array([[9999]], np.int32),)}, "block table"),
        ({"block_tables": (np.array([[-1]], np.int32),)}, "block table"),
        ({"block_tables": (np.empty((1, 0), np.int32),)}, "block table"),
        ({"kv_lens": np.array([2], np.int32)}, "entry 0"),
        ({"kv_lens": np.array([10**9], np.int32)}, "entry 0"),
        ({"query_starts": np.array([0, 4], np.int32)}, "query starts"),
        ({"query_starts": np.array([1, 3], np.int32)}, "query starts"),
        ({"logit_rows": np.array([3])}, "logit row 0"),
        ({"logit_rows": np.array([0, -1])}, "logit row 1"),
        ({"positions": np.array([0, 1])}, "length"),
    ],
)
def test_what_is_out_of_range_is_refused_before_anything_is_written(
    native_model: Models, layout: Layout, change: dict[str, object], fault: str
) -> None:
    model = native_model("llama")
    with opened(model, "float32") as runner:
        batch = layout(1, [(0, [5, 6, 7], 0)], 1, 16)
        with pytest.raises(BatchError, match=fault):
            runner.forward(replaced(batch, **change))
        assert not runner._blocks(0).any()


@pytest.mark.parametrize(
    "options", [{"quantize": "int3"}, {"kv_dtype": "float16"}, {"n_threads": 0}, {"n_threads": -1}]
)
def test_options_out_of_range_are_refused_by_name(native_model: Models, options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        native_runner(native_model("llama"), **options)


@pytest.mark.parametrize("mode", MODES)
def test_one_runner_follows_another_over_the_same_weights(native_model: Models, layout: Layout, mode: str) -> None:
    model = model_for(native_model, "llama", mode)
    tokens = tokens_of(model)[0]
    with opened(model, mode) as first:
        want = first.forward(layout(1, [(0, tokens, 0)], capacity(16), 16))
        second = NativeRunner(first._weights, n_threads=1)
    second.allocate([capacity(16)], 16)
    assert np.array_equal(second.forward(layout(1, [(0, tokens, 0)], capacity(16), 16)), want)
    second.close()


def test_int4_leaves_8_bits_to_an_eighth_of_the_layers_at_either_end_and_to_every_third_between() -> None:
    assert [layer for layer in range(16) if keeps_8_bits(layer, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]
    assert [layer for layer in range(30) if keeps_8_bits(layer, 30)] == [*range(3), *range(5, 26, 3), *range(26, 30)]
    assert [layer for layer in range(2) if keeps_8_bits(layer, 2)] == [1]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_int4_is_int8_with_layers_of_4_bits(native_model: Models, layout: Layout, name: str) -> None:
    """Near the model, and a row of logits is the same bit for bit alone and beside others."""
    model = native_model(name)
    weights = ModelWeights(model, "int4")
    layer = weights.layers[0]
    inner = [layer.gate_up, layer.down]
    if name == "mixtral":
        inner = [layer.experts[0].gate_up[1], layer.experts[0].down[1]]
    matrices = [layer.qkv, layer.out, *inner]
    assert {matrix.kind for matrix in matrices} == {WEIGHT_U4}
    assert weights.struct.head.kind == WEIGHT_I8
    last = weights.layers[len(weights.layers) - 1]
    down, gate_up = last.down, last.gate_up
    if name == "mixtral":
        down, gate_up = last.experts[0].down[1], last.experts[0].gate_up[1]
    assert (last.qkv.kind, down.kind) == (WEIGHT_I8, WEIGHT_I8)
    assert (last.out.kind, gate_up.kind) == (WEIGHT_U4, WEIGHT_U4)
    tokens = tokens_of(model)[:2]
    runner = native_runner(model, quantize="int4", n_threads=2)
    assert "int4" in runner.name
    runner.allocate([2 * capacity(16)] * len(runner.groups), 16)
    together = runner.forward(layout(len(runner.groups), [(0, tokens[0], 0), (1, tokens[1], 0)], capacity(16), 16))
    alone = runner.forward(layout(len(runner.groups), [(1, tokens[1], 0)], capacity(16), 16))
    assert np.array_equal(together[len(tokens[0]) :], alone)
    exact = eager(model, tokens[0])
    errors = (torch.from_numpy(together[: len(tokens[0])]) - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0 < float(errors.median()) < 0.5
    runner.close()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by Linux")
def test_a_runner_that_nobody_closed_stops_its_threads(native_model: Models) -> None:
    def num_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    runner = native_runner(native_model("llama"), n_threads=3)
    gc.collect()
    before = num_threads()
    runner.allocate([2] * len(runner.groups), 16)
    assert num_threads() == before + 2
    del runner
    gc.collect()
    assert num_threads() == before
