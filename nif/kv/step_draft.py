"""A step on paper: which blocks it would take, by the arithmetic that `reserve` uses, changing nothing.

    draft = kv.draft()
    length = min(wanted, draft.reach(seq_id))
    draft.grow([seq_id], length)             # True: there is room, and it is counted
    beginning = kv.beginning(tokens, key, names)
    draft.begin(beginning, length)           # a sequence that is started and grows in the same step

What one entry takes depends on the others: two that share a partly filled block both copy it, and a free block of the
prefix cache that two of them find is taken once. So entries are added one by one, and what fits here fits together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from genbatch.nif.kv.block_tables import BlockTables, KVSequence
from genbatch.nif.kv.reservation import more_blocks

Blocks = set[tuple[int, int]]  # (group, block)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What an empty sequence would start with.

    Args:
        length: positions that it would not have to evaluate.
        fresh: per group, the blocks to allocate for them, where their content comes from elsewhere.
        found: (group, block) pairs that are free, and stop being so, since the prefix cache knows their content.
        tail: per group, the partly filled last block, which somebody else holds, too; None without one.
    """

    length: int
    fresh: tuple[int, ...]
    found: frozenset[tuple[int, int]] = frozenset()
    tail: tuple[int, ...] | None = None


class StepDraft:
    """The entries of a step that fit together so far; good until the tables change."""

    __slots__ = ("_found", "_growing", "_shared", "_tables", "_taken")

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._taken = [0] * len(tables.pools)  # per group
        self._found: Blocks = set()  # free now, and not once the step's sequences have begun
        self._shared: Blocks = set()  # last blocks that a beginning shares
        self._growing: list[KVSequence] = []

    @property
    def taken(self) -> tuple[int, ...]:
        """Per group, the blocks that leave the free ones."""
        return tuple(self._taken)

    def grow(self, seq_ids: Sequence[int], length: int) -> bool:
        """Adds sequences that all grow to `length` positions, or none of them; whether there is room."""
        tables = self._tables
        needed = [0] * len(self._taken)
        growing = [tables.sequences[seq_id] for seq_id in seq_ids]
        for sequence in growing:
            if length <= sequence.writable and not self._shared:
                continue
            for group, count in enumerate(self._more(sequence, length)):
                needed[group] += count
        if not self._fits(needed):
            return False
        self._take(needed)
        self._growing += growing
        return True

    def begin(self, beginning: Beginning, length: int) -> bool:
        """Adds a sequence that is started and grows to `length` positions; whether there is room."""
        tables = self._tables
        more = tables.blocks(length) - tables.blocks(beginning.length)
        needed = [count + more for count in self.costs(beginning)]
        if not self._fits(needed):
            return False
        self._take(needed)
        self._found |= beginning.found
        if beginning.tail is not None:
            self._shared.update(enumerate(beginning.tail))
        return True

    def reach(self, seq_id: int) -> int:
        """The most positions to which a sequence that holds some can grow in this step; 0 if it cannot."""
        tables = self._tables
        sequence = tables.sequences[seq_id]
        length = len(sequence.tokens) + 1
        num_blocks = len(sequence.tables[0])
        reach = self._reach(num_blocks, self._more(sequence, num_blocks * tables.block_size))
        return reach if reach >= length else 0

    def reach_from(self, beginning: Beginning) -> int:
        """The same for a sequence that is yet to be started."""
        reach = self._reach(self._tables.blocks(beginning.length), self.costs(beginning))
        return reach if reach > beginning.length else 0

    def _more(self, sequence: KVSequence, length: int) -> list[int]:
        """What a sequence takes to grow, the copy of a last block that a beginning comes to share included."""
        more = more_blocks(self._tables, sequence, length)
        for group, tail in self._owned_tails(sequence):
            more[group] += (group, tail) in self._shared
        return more

    def _owned_tails(self, sequence: KVSequence) -> list[tuple[int, int]]:
        """The partly filled last blocks that it would write to in place, since nobody else holds them."""
        tables = self._tables
        tails = [(group, tables.partial_tail(group, sequence)) for group in range(len(tables.pools))]
        return [
            (group, tail) for group, tail in tails if tail is not None and tables.pools[group].references[tail] == 1
        ]

    def costs(self, beginning: Beginning) -> list[int]:
        """Per group, what a beginning takes before it grows by a block: the copy of its last one included."""
        costs = list(beginning.fresh)
        for group, _ in beginning.found - self._found:
            costs[group] += 1
        if beginning.tail is not None:
            owned = {tail for sequence in self._growing for tail in self._owned_tails(sequence)} - self._shared
            for group, tail in enumerate(beginning.tail):
                # Its own copy, and one for the entry that would have written to the block itself.
                costs[group] += 1 + ((group, tail) in owned)
        return costs

    def _reach(self, num_blocks: int, costs: Sequence[int]) -> int:
        pairs = zip(self._tables.pools, self._taken, costs, strict=True)
        room = min(pool.num_free - taken - cost for pool, taken, cost in pairs)
        return (num_blocks + room) * self._tables.block_size if room >= 0 else 0

    def _fits(self, needed: Sequence[int]) -> bool:
        pairs = zip(self._tables.pools, self._taken, needed, strict=True)
        return all(taken + count <= pool.num_free for pool, taken, count in pairs)

    def _take(self, needed: Sequence[int]) -> None:
        self._taken = [taken + count for taken, count in zip(self._taken, needed, strict=True)]
