"""Reservations and drafts of a step's blocks: a reservation takes blocks, a draft only counts them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from genbatch.nif.errors import BatchError
from genbatch.nif.kv.block_tables import BlockTables, KVSequence

Entries = Sequence[tuple[int, Sequence[int], int]]  # (seq_id, tokens, n_past)
Growing = list[tuple[KVSequence, int]]  # sequences that need the pool, with their lengths after the step


class Reservation:
    """The blocks reserved for one step. It ends with exactly one `commit` or `rollback`.

    Until then the block tables include the new blocks, but lengths and tokens are the old ones.

    Attributes:
        copies: per group, (source, destination) block pairs to copy before the forward pass.

    Raises:
        BatchError: an entry contradicts what its sequence holds; nothing was changed.
        OutOfBlocks: a group has too few free blocks; nothing was changed.
    """

    __slots__ = ("_entries", "_growth", "_on_end", "_tables", "copies")

    def __init__(self, tables: BlockTables, entries: Entries, cap: int, on_end: Callable[[], None]) -> None:
        growing, needed = plan(tables, entries, cap)
        tables.require(needed)
        self.copies: list[list[tuple[int, int]]] = [[] for _ in needed]
        self._tables = tables
        self._entries = entries
        # (sequence, group, table length before the step, shared last block that a copy replaced)
        self._growth: list[tuple[KVSequence, int, int, int | None]] = []
        self._on_end = on_end
        if growing:
            for group, count in enumerate(needed):
                self._grow(group, tables.pools[group].allocate(count), growing)
            for sequence, _ in growing:
                sequence.writable = len(sequence.tables[0]) * tables.block_size

    def commit(self, told: Sequence[Sequence[int]] | None = None) -> None:
        """Add the new positions to the sequences, after the step has succeeded.

        Args:
            told: each entry's final tokens; they replace the tokens of `reserve`. If an entry has fewer tokens than it
                reserved, the blocks behind them are released.
        """
        self._on_end()
        sequences, settle = self._tables.sequences, self._tables.settle
        shorter: list[KVSequence] = []
        # guard: tokens told at the commit
        if told is not None:
            entries = list(zip(self._entries, told, strict=True))
            shorter = [sequences[seq_id] for (seq_id, tokens, _), kept in entries if len(kept) < len(tokens)]
            self._entries = [(seq_id, kept, n_past) for (seq_id, _, n_past), kept in entries]
        for seq_id, tokens, _ in self._entries:
            sequence = sequences[seq_id]
            held = sequence.tokens
            held.extend(tokens)
            if len(held) >= sequence.wake:
                settle(sequence)
        for group, block in self.replaced():
            self._tables.pools[group].release((block,))
        for sequence in shorter:
            # guard: blocks of wrong drafts come back
            self._tables.trim(sequence)

    def rollback(self) -> None:
        """Restore every table, length and reference count, after the step has failed.

        The cached content of the taken blocks stays forgotten, because the step may have written to these blocks.
        """
        self._on_end()
        # Release in reverse, so that the free blocks return to their old order.
        for sequence, group, before, shared in reversed(self._growth):
            table, pool = sequence.tables[group], self._tables.pools[group]
            pool.release(reversed(table[before:]))
            del table[before:]
            if shared is not None:
                pool.release((table[-1],))
                table[-1] = shared
            sequence.writable = len(sequence.tokens)

    def replaced(self) -> Iterator[tuple[int, int]]:
        """Return the (group, block) pairs that copies replaced: no table has them, but a rollback needs them."""
        return ((group, shared) for _, group, _, shared in self._growth if shared is not None)

    def _grow(self, group: int, blocks: list[int], growing: Growing) -> None:
        """Append a group's new blocks to the tables of the growing sequences."""
        tables, pool, used = self._tables, self._tables.pools[group], 0
        for sequence, length in growing:
            table = sequence.tables[group]
            before, shared = len(table), tables.shared_tail(group, sequence)
            if shared is not None:
                table[-1] = blocks[used]
                self.copies[group].append((shared, blocks[used]))
                used += 1
            elif offset := len(sequence.tokens) % tables.block_size:
                if pool.hashes[table[-1]] is not None and pool.num_free:
                    # Another prompt may continue with this block, and there is room for a copy.
                    shared = table[-1]
                    (table[-1],) = pool.allocate(1)
                    self.copies[group].append((shared, table[-1]))
                else:
                    # The step writes this unshared block in place, so its hash becomes wrong.
                    # guard: content that changes loses its name
                    pool.overwrite(table[-1], offset)
            more = tables.blocks(length) - before
            if more:
                table.extend(blocks[used : used + more])
                used += more
            self._growth.append((sequence, group, before, shared))


def plan(tables: BlockTables, entries: Entries, cap: int) -> tuple[Growing, list[int]]:
    """Check a step's entries and count the blocks that they need. Nothing changes.

    Args:
        cap: most positions of one sequence.

    Returns:
        The sequences that need new blocks, and per group the number of blocks they need together.

    Raises:
        BatchError: an entry contradicts what its sequence holds.
    """
    sequences = tables.sequences
    count = len(sequences)
    growing: Growing = []
    for seq_id, tokens, n_past in entries:
        if not 0 <= seq_id < count:
            raise BatchError(f"sequence {seq_id} is outside 0..{count - 1}")
        sequence = sequences[seq_id]
        length = n_past + len(tokens)
        if n_past != len(sequence.tokens) or length > cap or length == n_past:
            raise _contradiction(seq_id, sequence, len(tokens), n_past, cap)
        if length > sequence.writable:
            growing.append((sequence, length))
    if len({seq_id for seq_id, _, _ in entries}) != len(entries):
        raise BatchError("a sequence appears twice in one batch")
    needed = [0] * len(tables.pools)
    for sequence, length in growing:
        for group, count in enumerate(more_blocks(tables, sequence, length)):
            needed[group] += count
    return growing, needed


def more_blocks(tables: BlockTables, sequence: KVSequence, length: int) -> list[int]:
    """Return, per group, the number of blocks that a step takes for a sequence that grows to `length` positions.

    Blocks that fall behind a window are released only after the step.
    """
    more = max(0, tables.blocks(length) - len(sequence.tables[0]))
    return [more + (tables.shared_tail(group, sequence) is not None) for group in range(len(tables.pools))]


def _contradiction(seq_id: int, sequence: KVSequence, count: int, n_past: int, cap: int) -> BatchError:
    if count == 0:
        return BatchError(f"sequence {seq_id}: an entry without tokens")
    if n_past != len(sequence.tokens):
        return BatchError(f"sequence {seq_id} holds {len(sequence.tokens)} positions, n_past says {n_past}")
    return BatchError(f"sequence {seq_id}: {n_past + count} positions are more than max_per_sequence = {cap}")


BlockSet = set[tuple[int, int]]  # (group, block)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The positions that an empty sequence would start with.

    Args:
        length: number of positions that need no evaluation.
        fresh: per group, the number of blocks to allocate for imported content.
        found: free (group, block) pairs that a prefix hit would take.
        tail: per group, the partly filled last block; None if there is none. It is copied if another sequence has it.
    """

    length: int
    fresh: tuple[int, ...]
    found: frozenset[tuple[int, int]] = frozenset()
    tail: tuple[int, ...] | None = None


class StepDraft:
    """Counts the blocks of a step's entries and refuses entries that do not fit. Valid until the tables change."""

    __slots__ = ("_alone", "_found", "_free", "_growing", "_named", "_shared", "_tables", "_taken")

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._free = [pool.num_free for pool in tables.pools]
        self._taken = [0] * len(tables.pools)  # per group
        self._found: BlockSet = set()  # free blocks that the prefix hits of this step's sequences take
        self._shared: BlockSet = set()  # partly filled last blocks that a new sequence shares
        self._alone: BlockSet = set()  # partly filled last blocks that a new sequence finds, and no other one has
        self._named: BlockSet = set()  # last blocks to write to that the prefix cache knows: copied if there is room
        self._growing: list[KVSequence] = []

    @property
    def taken(self) -> tuple[int, ...]:
        """Return, per group, the number of free blocks that the step takes."""
        spared = Counter(group for group, _ in self._named - self._shared)
        groups = enumerate(zip(self._free, self._taken, strict=True))
        return tuple(taken + min(spared[group], free - taken) for group, (free, taken) in groups)

    def grow(self, seq_ids: Sequence[int], length: int) -> bool:
        """Add sequences that all grow to `length` positions, or none of them; returns whether they fit."""
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
        for sequence in growing:
            if length > sequence.writable:
                self._note_named(self._owned_tails(sequence))
        return True

    def begin(self, beginning: Beginning, length: int) -> bool:
        """Add a new sequence that grows to `length` positions; returns whether it fits."""
        tables = self._tables
        more = tables.blocks(length) - tables.blocks(beginning.length)
        needed = [count + more for count in self.costs(beginning)]
        if not self._fits(needed):
            return False
        self._take(needed)
        tails = set() if beginning.tail is None else set(enumerate(beginning.tail))
        alone = (tails & beginning.found) - self._found
        self._shared |= (tails | (self._alone & beginning.found)) - alone
        self._alone = (self._alone - beginning.found) | alone
        self._note_named(alone)
        self._found |= beginning.found
        return True

    def reach(self, seq_id: int) -> int:
        """Return the most positions to which a running sequence can grow in this step; 0 if it cannot grow."""
        tables = self._tables
        sequence = tables.sequences[seq_id]
        length = len(sequence.tokens) + 1
        num_blocks = len(sequence.tables[0])
        reach = self._reach(num_blocks, self._more(sequence, num_blocks * tables.block_size))
        return reach if reach >= length else 0

    def reach_from(self, beginning: Beginning) -> int:
        """Return the most positions to which a new sequence can grow in this step; 0 if it cannot start."""
        reach = self._reach(self._tables.blocks(beginning.length), self.costs(beginning))
        return reach if reach > beginning.length else 0

    def _more(self, sequence: KVSequence, length: int) -> list[int]:
        """Count the blocks for a sequence's growth, including a copy of a last block that a new sequence shares."""
        more = more_blocks(self._tables, sequence, length)
        for group, tail in self._owned_tails(sequence):
            more[group] += (group, tail) in self._shared
        return more

    def _owned_tails(self, sequence: KVSequence) -> list[tuple[int, int]]:
        """Return the sequence's partly filled, unshared last blocks, which a step writes in place."""
        tables = self._tables
        tails = [(group, tables.partial_tail(group, sequence)) for group in range(len(tables.pools))]
        return [
            (group, tail) for group, tail in tails if tail is not None and tables.pools[group].references[tail] == 1
        ]

    def costs(self, beginning: Beginning) -> list[int]:
        """Return, per group, the blocks that a beginning takes before it grows, including the copy of its tail."""
        costs = list(beginning.fresh)
        new = beginning.found - self._found
        # Each one counts: a found block, and a copy for the sequence that would have written to it in place.
        for group, _ in (*new, *(beginning.found & self._alone)):
            costs[group] += 1
        if beginning.tail is not None:
            owned = {tail for sequence in self._growing for tail in self._owned_tails(sequence)} - self._shared
            # Count the new sequence's copy, and one for the entry that would have written the block in place.
            for pair in set(enumerate(beginning.tail)) - new:
                costs[pair[0]] += 1 + (pair in owned)
        return costs

    def _note_named(self, tails: Iterable[tuple[int, int]]) -> None:
        pools = self._tables.pools
        self._named |= {(group, block) for group, block in tails if pools[group].hashes[block] is not None}

    def _reach(self, num_blocks: int, costs: Sequence[int]) -> int:
        room = min(free - taken - cost for free, taken, cost in zip(self._free, self._taken, costs, strict=True))
        return (num_blocks + room) * self._tables.block_size if room >= 0 else 0

    def _fits(self, needed: Sequence[int]) -> bool:
        return all(taken + count <= free for free, taken, count in zip(self._free, self._taken, needed, strict=True))

    def _take(self, needed: Sequence[int]) -> None:
        self._taken = [taken + count for taken, count in zip(self._taken, needed, strict=True)]
