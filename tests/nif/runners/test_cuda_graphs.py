"""Buckets, padding and eviction of CUDA graphs; capture and replay where there is a GPU."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.engine_options import GraphKey, GraphOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.runners.launches import DecodeStep, GraphCache, empty_step, graph_key, pad_decodes, pad_step
from genbatch.nif.runners.torch_runner import TensorBatch

MAX_POSITION = 5000


def decodes(num_tokens: int, max_kv_len: int = 40, width: int = 4) -> TensorBatch:
    return TensorBatch(
        input_ids=torch.arange(num_tokens) + 7,
        positions=torch.arange(num_tokens),
        query_starts=torch.arange(num_tokens + 1, dtype=torch.int32),
        kv_lens=torch.arange(num_tokens, dtype=torch.int32) + 1,
        slots=(torch.arange(num_tokens),),
        block_tables=(torch.ones((num_tokens, width), dtype=torch.int32),),
        logit_rows=torch.arange(num_tokens),
        max_query_len=1,
        max_kv_len=max_kv_len,
    )


def test_h14_buckets_are_1_2_4_8_and_then_multiples_of_8() -> None:
    buckets = GraphOptions().row_sizes()
    assert buckets[:6] == [1, 2, 4, 8, 16, 24]
    assert buckets[-2:] == [248, 256]


def test_h14_an_interval_replaces_the_buckets() -> None:
    assert GraphOptions(q_padding_interval_size=64, max_batch_size=200).row_sizes() == [64, 128, 192, 200]


@given(
    st.integers(0, 40),
    st.integers(0, 3000),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, MAX_POSITION),
)
def test_h14_a_step_is_padded_up_by_less_than_an_interval(
    q_interval: int, kv_interval: int, largest: int, num_tokens: int, max_kv_len: int
) -> None:
    options = GraphOptions(
        q_padding_interval_size=q_interval,
        kv_padding_interval_size=kv_interval,
        max_batch_size=largest,
        max_cached_graphs=300,
    )
    key = graph_key(decodes(num_tokens, max_kv_len), options, MAX_POSITION)
    if num_tokens > largest:
        assert key is None
        return
    assert key is not None
    assert num_tokens <= key.num_tokens <= largest
    assert key.num_tokens - num_tokens < (q_interval or 8)
    assert max_kv_len <= key.kv_len <= MAX_POSITION
    assert key.kv_len == MAX_POSITION if kv_interval == 0 else key.kv_len - max_kv_len < kv_interval


@given(st.integers(0, 40), st.integers(1, 300), st.integers(1, 9), st.integers(1, 300), st.integers(1, MAX_POSITION))
def test_h14_every_step_that_may_come_is_captured_at_the_start(
    q_interval: int, largest: int, most_graphs: int, num_tokens: int, max_kv_len: int
) -> None:
    options = GraphOptions(q_padding_interval_size=q_interval, max_cached_graphs=most_graphs, max_batch_size=largest)
    captured = options.captured_keys(MAX_POSITION)
    assert len(captured) <= most_graphs
    assert captured == sorted(captured, reverse=True)
    key = graph_key(decodes(num_tokens, max_kv_len), options, MAX_POSITION)
    assert key in captured if num_tokens <= largest else key is None


def test_h14_no_graph_is_larger_than_what_can_decode_at_once() -> None:
    assert [key.num_tokens for key in GraphOptions(max_batch_size=12).captured_keys(100)] == [12, 8, 4, 2, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"max_query_len": 3},
        {"logit_rows": torch.tensor([0, 2])},
        {"logit_rows": torch.tensor([0, 2, 1])},
    ],
)
def test_h14_graphs_stay_out_of_steps_that_they_do_not_fit(change: dict[str, object]) -> None:
    assert graph_key(decodes(3), GraphOptions(), MAX_POSITION) is not None
    assert graph_key(dataclasses.replace(decodes(3), **change), GraphOptions(), MAX_POSITION) is None


@pytest.mark.parametrize("width", [2, 4, 9])
def test_h14_padding_rows_write_nothing_and_hold_nothing(width: int) -> None:
    padded = pad_decodes(decodes(3, max_kv_len=8, width=width), GraphKey(8, 64), 16)
    assert padded.input_ids.tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert padded.slots[0].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert padded.kv_lens.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert padded.query_starts.tolist() == list(range(9))
    assert padded.block_tables[0].shape == (8, min(width, 4)), (
        "columns past the longest sequence are cut, none is added"
    )
    assert padded.block_tables[0][3:].eq(0).all()
    assert padded.max_kv_len == 64


def test_h14_padding_rows_draw_greedily() -> None:
    draws = torch.full((3, 5), 0.5, dtype=torch.float64)
    padded = pad_step(DecodeStep(decodes(3), draws), GraphKey(8, 64), 16)
    assert padded.batch.input_ids.tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert padded.draws[:3].equal(draws)
    assert padded.draws[3:].eq(0).all()
    assert padded.draws.shape == (8, 5)


def test_h14_the_step_to_capture_with_is_all_padding() -> None:
    step = empty_step(GraphKey(4, 100), num_groups=2, block_size=16)
    assert step.draws.shape == (4, 5)
    empty = step.batch
    assert len(empty.slots) == len(empty.block_tables) == 2
    assert all(slots.eq(-1).all() for slots in empty.slots)
    assert empty.kv_lens.eq(0).all()
    assert empty.block_tables[0].shape == (4, 7)


@given(st.integers(1, 4), st.lists(st.integers(0, 6), max_size=40))
def test_h14_the_least_recently_used_graph_is_dropped(limit: int, sizes: list[int]) -> None:
    captured: list[int] = []
    finished: list[int] = []

    class Graph:
        def __init__(self, key: GraphKey) -> None:
            captured.append(key.num_tokens)

            self.size = key.num_tokens

        def replay(self) -> torch.Tensor:
            return torch.empty(0)

        def finish(self) -> None:
            finished.append(self.size)

        def __del__(self) -> None:
            alive.discard(self.size)

    def capture(key: GraphKey) -> Graph:
        assert len(alive) < limit, "the one that was dropped is alive while the next is captured"
        alive.add(key.num_tokens)
        return Graph(key)

    alive: set[int] = set()
    cache = GraphCache(capture, limit)
    recent: list[int] = []  # a plain model of it, most recent last
    expected: list[int] = []
    for size in sizes:
        if size in recent:
            recent.remove(size)
        else:
            expected.append(size)
            recent = recent[-(limit - 1) :] if limit > 1 else []
        recent.append(size)
        cache.get(GraphKey(size, 1))
        assert len(cache) == len(recent) <= limit
        assert all(GraphKey(kept, 1) in cache for kept in recent)
    assert captured == expected
    assert sorted(finished + recent) == sorted(captured)  # those that were dropped, and no other


@pytest.mark.parametrize(
    "options", [{"q_padding_interval_size": -1}, {"kv_padding_interval_size": -1}, {"max_cached_graphs": 0}]
)
def test_h14_bad_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        GraphOptions(**options)
