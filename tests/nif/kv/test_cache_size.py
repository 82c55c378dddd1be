"""The pool is as large as the smallest of memory and pins, and never takes more than predicted."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from genbatch.nif.errors import OptionError
from genbatch.nif.kv.cache_size import (
    CacheLimits,
    CacheSize,
    FreeMemory,
    StepShape,
    _footprint,
    cache_size,
    group_blocks,
)
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import LayerGroup, RaggedBatch
from genbatch.nif.runners.torch_runner import TorchRunner

_FULL = (LayerGroup((0,)),)
_MIXED = (LayerGroup((0, 2)), LayerGroup((1,), 64))
_STEP = StepShape(
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
    dtype_bytes=4,
    max_batch_tokens=32,
    num_sequences=4,
    logit_rows=4,
    max_positions=1024,
)


def _size(
    free: int | None = 1 << 30,
    groups: Sequence[LayerGroup] = _FULL,
    step: StepShape = _STEP,
    **limits: float | None,
) -> CacheSize:
    sizes = [4096 * len(group.layers) for group in groups]
    chosen = CacheLimits.named(**limits)
    return cache_size(step, groups, sizes, block_size=16, memory=FreeMemory(lambda: free), limits=chosen)


def test_h08_memory_alone_fills_the_fraction_asked_for() -> None:
    size = _size(max_memory_percent=0.5)
    assert size.limited_by == "max_memory_percent"
    assert size.footprint.total <= (1 << 30) * 0.5
    assert (1 << 30) * 0.5 - size.footprint.total < 2 * (4096 + 512)  # not one block more would fit


def test_h08_the_default_fraction_is_nine_tenths() -> None:
    assert CacheLimits().max_memory_percent == 0.9
    assert _size() == _size(max_memory_percent=0.9)


def test_h08_what_the_runner_takes_for_itself_is_no_blocks() -> None:
    plain, taking = _size(), _size(step=dataclasses.replace(_STEP, runner_bytes=1 << 29))
    assert taking.footprint.runner == 1 << 29
    assert taking.footprint.total <= (1 << 30) * 0.9
    assert plain.footprint.kv - taking.footprint.kv > (1 << 29) * 0.8


def test_h08_pins_are_honoured() -> None:
    assert _size(num_blocks=100).num_blocks == (100,)
    assert _size(n_ctx=8192).num_blocks == (512,)
    assert _size(n_ctx=100, num_blocks=100).num_blocks == (7,)
    assert _size(n_ctx=100, num_blocks=100).limited_by == "n_ctx"


@given(st.integers(16, 1 << 20), st.floats(0.05, 1.0))
def test_b19_b20_capacity_is_the_smaller_of_max_tokens_and_the_memory_fraction(
    max_tokens: int, fraction: float
) -> None:
    free = 64 << 20
    [both] = _size(free, maxTokens=max_tokens, freeGpuMemoryFraction=fraction).num_blocks
    [by_memory] = _size(free, freeGpuMemoryFraction=fraction).num_blocks
    assert both == min(by_memory, max_tokens // 16)


def test_b19_max_tokens_is_not_exceeded_by_rounding() -> None:
    assert _size(maxTokens=47).num_blocks == (2,)
    with pytest.raises(OptionError, match="max_tokens"):
        _size(maxTokens=15)


def test_memory_wins_over_a_pin_that_does_not_fit() -> None:
    size = _size(64 << 20, num_blocks=1 << 20)
    assert size.limited_by == "max_memory_percent"
    assert size.footprint.total <= (64 << 20) * 0.9


def test_not_even_one_sequence_fits() -> None:
    with pytest.raises(OptionError, match="max_memory_percent: a sequence of one block takes"):
        _size(10_000)


def test_unknown_memory_needs_a_pin() -> None:
    assert _size(None, n_ctx=64).num_blocks == (4,)
    with pytest.raises(OptionError, match="give n_ctx or num_blocks"):
        _size(None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_memory_percent": 0.0}, "max_memory_percent"),
        ({"max_memory_percent": 1.5}, "max_memory_percent"),
        ({"freeGpuMemoryFraction": float("nan")}, "max_memory_percent"),
        ({"maxTokens": 0}, "max_tokens"),
        ({"n_ctx": -1}, "n_ctx"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"maxTokens": 16, "max_tokens": 16}, "max_tokens"),
        ({"blocks": 1}, "blocks"),
    ],
)
def test_a_limit_out_of_range_is_named(options: dict[str, float], named: str) -> None:
    with pytest.raises(OptionError) as caught:
        CacheLimits.named(**options)
    assert caught.value.option == named


def test_h07_a_windowed_group_gets_no_more_than_its_windows_and_a_step() -> None:
    size = _size(groups=_MIXED, n_ctx=8192)
    assert size.num_blocks == (512, group_blocks(LayerGroup((0,), 64), 8192, 16, 32, 4))
    assert size.num_blocks[1] < 512
    assert group_blocks(LayerGroup((0,), 64), 16, 16, 32, 4) == 1  # nor more than all positions need


@pytest.mark.parametrize("sink_tokens", [0, 17])
@pytest.mark.parametrize(("num_sequences", "max_batch_tokens"), [(4, 8), (1, 64), (2, 33)])
def test_h07_windows_that_straddle_a_block_more_and_the_whole_step_find_room(
    num_sequences: int, max_batch_tokens: int, sink_tokens: int
) -> None:
    """The positions that are kept begin at the end of one block, and a step's at that of another."""
    positions = 512
    windowed = LayerGroup((1,), 17, sink_tokens)
    count = group_blocks(windowed, positions, 16, max_batch_tokens, num_sequences)
    assert count < positions // 16
    kv = KVCache(
        [LayerGroup((0,)), windowed],
        num_blocks=[positions // 16, count],
        block_size=16,
        num_sequences=num_sequences,
    )
    for seq_id in range(num_sequences):
        kv.reserve([(seq_id, [1] * 31, 0)]).commit()
        for n_past in (31, 47, 63):
            kv.reserve([(seq_id, [1] * 16, n_past)]).commit()
        assert kv.blocks_held(seq_id)[1] == 2 + -(-sink_tokens // 16)
    chunk = max_batch_tokens // num_sequences
    kv.reserve([(seq_id, [1] * chunk, 79) for seq_id in range(num_sequences)]).commit()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_h08_the_predicted_footprint_is_at_least_what_a_step_takes(
    family: str, tiny_model: Callable[[str], Model]
) -> None:
    model = tiny_model(family)
    runner = TorchRunner(model)
    shape = _step_of(model)
    sizes = [runner.bytes_per_block(group, 16) for group in range(len(runner.groups))]
    size = cache_size(
        shape,
        runner.groups,
        sizes,
        block_size=16,
        memory=FreeMemory(lambda: 1 << 30),
        limits=CacheLimits(n_ctx=shape.max_positions),
    )
    with _LiveBytes() as live:
        runner.allocate([-(-shape.max_positions // 16)] * len(sizes), 16)
        pool = live.peak
        runner.forward(_last_chunk(shape, len(runner.groups)))
    assert pool >= size.footprint.kv
    assert pool < live.peak <= size.footprint.total + pool - size.footprint.kv


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def _step_of(model: Model) -> StepShape:
    config = model.hf.config.get_text_config()
    shapes = model.layers
    return StepShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=max(shape.num_kv_heads for shape in shapes),
        head_dim=max(max(shape.key_dim, shape.value_dim) for shape in shapes),
        vocab_size=model.vocab_size,
        dtype_bytes=4,
        max_batch_tokens=32,
        num_sequences=1,
        logit_rows=1,
        max_positions=128,
    )


def _last_chunk(shape: StepShape, num_groups: int) -> RaggedBatch:
    """One sequence's last chunk: as many tokens as a step may have, at the end of the longest sequence."""
    count, length = shape.max_batch_tokens, shape.max_positions
    positions = np.arange(length - count, length)
    return RaggedBatch(
        input_ids=np.zeros(count, np.int64),
        positions=positions,
        query_starts=np.array([0, count], np.int32),
        kv_lens=np.array([length], np.int32),
        slots=(positions,) * num_groups,
        block_tables=(np.arange(length // 16, dtype=np.int32)[None],) * num_groups,
        logit_rows=np.array([count - 1]),
        max_query_len=count,
        max_kv_len=length,
    )


def test_each_row_of_logits_costs_a_number_of_the_whole_vocabulary() -> None:
    def foreseen(rows: int, dtype_bytes: int) -> int:
        step = dataclasses.replace(_STEP, logit_rows=rows, dtype_bytes=dtype_bytes, score_bytes=0.0)
        return _footprint(step, [4], [4096], 16, 4).logits

    assert foreseen(8, 4) - foreseen(4, 4) == 4 * 256 * 4
    assert foreseen(8, 2) - foreseen(4, 2) == 4 * 256 * (4 + 2), "in float32, and as they were computed"


def test_what_a_step_takes_is_foreseen_by_the_width_of_a_token_and_the_keys_of_a_sequence() -> None:
    def foreseen(**fields: float) -> int:
        step = dataclasses.replace(_STEP, score_bytes=0.0)
        return _footprint(dataclasses.replace(step, **fields), [4], [4096], 16, 4).activations

    # For 32 tokens: four residuals as computed and four norms in float32, Q, K, V twice, the MLP's three.
    assert foreseen(hidden_size=65) - foreseen() == 32 * (4 * 4 + 4 * 4)
    assert foreseen(num_heads=5) - foreseen() == 32 * 4 * 2 * 16
    assert foreseen(num_kv_heads=3) - foreseen() == 32 * 4 * 2 * 2 * 16
    assert foreseen(intermediate_size=129) - foreseen() == 32 * 4 * 3
    # One sequence's keys and values of a layer, where all 4 blocks of 16 positions are its own, and again in float32.
    assert foreseen(score_bytes=1e-9) - foreseen() == 64 * 2 * 2 * 16 * (4 + 4)
