"""Seeded operations on the block allocator, by the million, against plain counts of who holds what.

python -m tests.nif.kv.allocator_run --operations 10000000
"""

import argparse
import random
import time

from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.kv.block_pool import BlockPool

NUM_BLOCKS = 64
# Operations after which the whole pool is compared.
CHECK_EVERY = 1000


class AllocatorRun:
    """One pool and its users' tables.

    Args:
        seed: draws every operation.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._known: dict[bytes, int] = {}  # content -> the block that has it
        self.pool = BlockPool(NUM_BLOCKS, self._known.pop)
        self._tables: list[list[int]] = [[] for _ in range(8)]
        self._next_content = 0

    def run(self, operations: int) -> None:
        """Raises AssertionError where pool and tables differ; in the end everything is given back, and must be free."""
        draw = (self._allocate, self._allocate, self._release, self._share, self._fill, self._change)
        for number in range(operations):
            self._rng.choice(draw)(self._rng.choice(self._tables))
            if number % CHECK_EVERY == 0:
                self.check()
        for table in self._tables:
            self.pool.release(table)
            table.clear()
        self.check()
        assert self.pool.num_free == NUM_BLOCKS, f"{self.pool.num_used} blocks are lost"

    def check(self) -> None:
        held = [0] * NUM_BLOCKS
        for table in self._tables:
            for block in table:
                held[block] += 1
        self.pool.check_integrity(held)
        contents = {content: block for block, content in enumerate(self.pool.hashes) if content is not None}
        assert contents == self._known

    def _allocate(self, table: list[int]) -> None:
        count, free = self._rng.randint(1, 6), self.pool.num_free
        try:
            taken = self.pool.allocate(count)
        except OutOfBlocks:
            assert count > free == self.pool.num_free
        else:
            assert len(set(taken)) == count and self.pool.num_free == free - count
            table += taken

    def _release(self, table: list[int]) -> None:
        cut = self._rng.randint(0, len(table))
        self.pool.release(reversed(table[cut:]))
        del table[cut:]

    def _share(self, table: list[int]) -> None:
        """Another table holds a block whose content is known, used or free."""
        if self._known:
            block = self._rng.choice(list(self._known.values()))
            self.pool.share(block)
            table.append(block)

    def _fill(self, table: list[int]) -> None:
        empty = [block for block in table if self.pool.hashes[block] is None]
        if empty:
            self._next_content += 1
            content = b"%d" % self._next_content
            self.pool.set_hash(empty[0], content)
            self._known[content] = empty[0]

    def _change(self, table: list[int]) -> None:
        if table:
            self.pool.overwrite(self._rng.choice(table), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begun = time.perf_counter()
    AllocatorRun(given.seed).run(given.operations)
    print(f"{given.operations} allocator operations, 0 blocks lost, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
