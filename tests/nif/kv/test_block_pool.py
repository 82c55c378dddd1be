"""Blocks are free, used or initialized-but-free, and nothing else."""

import pytest

from genbatch.nif.errors import OptionError, OutOfBlocks
from genbatch.nif.kv.block_pool import BlockPool
from tests.nif.kv.allocator_run import AllocatorRun


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(2)
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert pool.num_free == 1


def test_a_block_returns_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.share(block)
    pool.release([block])
    assert pool.num_used == 1
    pool.release([block])
    assert (pool.num_used, pool.num_free, pool.num_initialized) == (0, 2, 0)


def test_h12_a_released_block_with_a_hash_stays_initialized_and_counts_as_free() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.set_hash(block, b"content")
    pool.release([block])
    assert (pool.num_free, pool.num_initialized, pool.hashes[block]) == (2, 1, b"content")
    pool.share(block)
    assert (pool.num_free, pool.num_initialized, pool.references[block]) == (1, 0, 1)


def test_h12_demotion_is_lazy_and_takes_the_least_recently_released_first() -> None:
    forgotten: list[bytes] = []
    pool = BlockPool(5, forgotten.append)
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        pool.set_hash(block, bytes([block]))
    order = [blocks[1], blocks[0], blocks[2]]
    pool.release([*order, blocks[3]])
    assert len(pool.allocate(2)) == 2  # the two without content come first
    assert forgotten == []
    assert pool.allocate(3) == order
    assert forgotten == [bytes([block]) for block in order]
    assert pool.hashes == [None] * 5


def test_dropping_a_hash_tells_whoever_indexed_it() -> None:
    forgotten: list[bytes] = []
    pool = BlockPool(1, forgotten.append)
    [block] = pool.allocate(1)
    pool.overwrite(block, 0)
    assert forgotten == []
    pool.set_hash(block, b"content")
    pool.overwrite(block, 0)
    assert forgotten == [b"content"]
    pool.release([block])
    assert pool.num_initialized == 0


def test_releasing_a_free_block_is_noticed() -> None:
    pool = BlockPool(1)
    pool.release(pool.allocate(1))
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([0])


def test_integrity_names_a_wrong_reference_count() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.check_integrity([1, 0])
    pool.share(block)
    with pytest.raises(AssertionError, match="counted 2 times and held 1"):
        pool.check_integrity([1, 0])


def test_integrity_names_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.references[1] = 1
    with pytest.raises(AssertionError, match="partition"):
        pool.check_integrity([0, 1])


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(OptionError, match="num_blocks"):
        BlockPool(0)


@pytest.mark.parametrize("seed", range(4))
def test_no_block_is_lost_in_any_order_of_operations(seed: int) -> None:
    AllocatorRun(seed).run(10_000)
