"""Which sequences of a step meet their keys together, as families.c finds them."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32

import pytest
import torch

from genbatch.nif.native.library import ALL_POSITIONS, Cache, Step, native_library
from tests.nif.native.test_attention import Entry

BLOCK = 16  # four blocks a chunk
MAX_FAMILY = 12


class Family(ctypes.Structure):
    """`family` of genbatch.h."""

    _fields_ = (("members", Entry * MAX_FAMILY), ("count", c_int32), ("chunks", c_int32))


def families(
    tables: Sequence[Sequence[int]],
    kv_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    window: int = ALL_POSITIONS,
    most: int = 4,
) -> list[tuple[list[int], int]]:
    """Each family's sequences and the chunks of keys that they share."""
    entries = len(tables)
    padded = torch.full((entries, max(map(len, tables))), -1, dtype=torch.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = torch.tensor(table)
    starts = torch.tensor([0, *(query_lens or [1] * entries)], dtype=torch.int32).cumsum(0).int()
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    step = Step(num_entries=entries, query_starts=starts.data_ptr(), kv_lens=lengths.data_ptr())
    step.block_tables[0] = padded.data_ptr()
    step.table_width[0] = padded.shape[1]
    cache = Cache(block_size=BLOCK, padded_keys=BLOCK)
    out = (Family * entries)()
    found = native_library().families_find(ctypes.byref(step), False, 0, ctypes.byref(cache), window, most, out)
    by_token = {int(start): row for row, start in enumerate(starts[:-1])}
    return [
        ([by_token[member.first_token] for member in family.members[: family.count]], family.chunks)
        for family in out[:found]
    ]


PREFIX = list(range(100, 110))  # ten blocks: two chunks and two blocks


def own(row: int, blocks: int = 3) -> list[int]:
    return list(range(1000 * (row + 1), 1000 * (row + 1) + blocks))


def test_those_that_begin_alike_are_a_family_wherever_they_stand() -> None:
    tables = [PREFIX + own(0), own(1), PREFIX + own(2), own(3, 13), PREFIX + own(4)]
    assert families(tables, [170, 40, 200, 200, 165]) == [([0, 2, 4], 2), ([1], 0), ([3], 0)]


def test_a_family_has_its_limit() -> None:
    tables = [PREFIX + own(row) for row in range(5)]
    assert families(tables, [170] * 5, most=2) == [([0, 1], 2), ([2, 3], 2), ([4], 0)]
    assert families(tables[:2], [170] * 2, most=0) == [([0], 0), ([1], 0)]


def test_less_than_a_chunk_is_not_worth_it() -> None:
    assert families([PREFIX[:3] + own(0), PREFIX[:3] + own(1)], [90, 90]) == [([0], 0), ([1], 0)]


def test_the_block_that_a_sequence_writes_is_never_shared() -> None:
    """Both tables go on alike behind the shorter one's end, as tables may that are not cleared."""
    assert families([PREFIX, PREFIX], [128, 160]) == [([0, 1], 1)]
    assert families([PREFIX, PREFIX], [160, 128]) == [([0, 1], 1)]
    assert families([PREFIX, PREFIX], [129, 160]) == [([0, 1], 2)]
    assert families([PREFIX, PREFIX], [40, 160]) == [([0], 0), ([1], 0)]


def test_one_that_shares_much_less_does_not_join() -> None:
    long = list(range(100, 120))  # five chunks
    half, less = [*long[:12], *own(2, 9)], [*long[:4], *own(3, 17)]
    tables = [long + own(0), long + own(1), half, less]
    assert families(tables, [340] * 4) == [([0, 1, 2], 3), ([3], 0)]
    assert families([tables[row] for row in (0, 2, 1)], [340] * 3) == [([0, 1, 2], 3)]


def test_prefill_and_what_a_window_hides_stay_alone() -> None:
    tables = [PREFIX + own(row) for row in range(3)]
    assert families(tables, [170, 180, 190], query_lens=[1, 20, 1]) == [([0, 2], 2), ([1], 0)]
    assert families(tables, [170, 180, 190], query_lens=[20, 1, 1]) == [([0], 0), ([1, 2], 2)]
    assert families(tables, [170, 180, 190], window=180) == [([0, 1], 2), ([2], 0)]
    assert families(tables, [190, 180, 170], window=180) == [([0], 0), ([1, 2], 2)]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_family_shares_what_its_shortest_beginning_allows(order: list[int]) -> None:
    both = [PREFIX + own(0), [*PREFIX[:5], *own(1, 8)]]
    assert families([both[row] for row in order], [200, 200]) == [([0, 1], 1)]
