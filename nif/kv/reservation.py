"""A reservation: the blocks of one step, taken but not yet final."""

from collections.abc import Callable, Iterator, Sequence

from genbatch.nif.errors import BatchError
from genbatch.nif.kv.block_tables import BlockTables, KVSequence

Entries = Sequence[tuple[int, Sequence[int], int]]  # (seq_id, tokens, n_past)
Growing = list[tuple[KVSequence, int]]  # sequences that need the pool, with their lengths after the step


class Reservation:
    """What `KVCache.reserve` returns; ends with exactly one `commit` or `rollback`.

    Until then the block tables show the new blocks already, while lengths and tokens are the old ones.

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
        # (sequence, group, its table's length before, the shared last block that was replaced by a copy)
        self._growth: list[tuple[KVSequence, int, int, int | None]] = []
        self._on_end = on_end
        if growing:
            for group, count in enumerate(needed):
                self._grow(group, tables.pools[group].allocate(count), growing)
            for sequence, _ in growing:
                sequence.writable = len(sequence.tables[0]) * tables.block_size

    def commit(self, told: Sequence[Sequence[int]] | None = None) -> None:
        """The step succeeded: the sequences hold the new positions.

        Args:
            told: each entry's tokens, where those it was reserved with only said how many there would be.
        """
        self._on_end()
        if told is not None:
            entries = zip(self._entries, told, strict=True)
            self._entries = [(seq_id, tokens, n_past) for (seq_id, _, n_past), tokens in entries]
        sequences, settle = self._tables.sequences, self._tables.settle
        for seq_id, tokens, _ in self._entries:
            sequence = sequences[seq_id]
            held = sequence.tokens
            held.extend(tokens)
            if len(held) >= sequence.wake:
                settle(sequence)
        for group, block in self.replaced():
            self._tables.pools[group].release((block,))

    def rollback(self) -> None:
        """The step failed: every table, length and reference count is what it was.

        Only what was known of the content of the blocks taken is gone, since the step may have written there.
        """
        self._on_end()
        # In reverse, so that the free blocks lie in the order they had.
        for sequence, group, before, shared in reversed(self._growth):
            table, pool = sequence.tables[group], self._tables.pools[group]
            pool.release(reversed(table[before:]))
            del table[before:]
            if shared is not None:
                pool.release((table[-1],))
                table[-1] = shared
            sequence.writable = len(sequence.tokens)

    def replaced(self) -> Iterator[tuple[int, int]]:
        """The (group, block) pairs that are still held although no table shows them: rollback needs them."""
        return ((group, shared) for _, group, _, shared in self._growth if shared is not None)

    def _grow(self, group: int, blocks: list[int], growing: Growing) -> None:
        """Hands a group's new blocks to the tables of the sequences they are for."""
        tables, used = self._tables, 0
        for sequence, length in growing:
            table = sequence.tables[group]
            before, shared = len(table), tables.shared_tail(group, sequence)
            if shared is not None:
                table[-1] = blocks[used]
                self.copies[group].append((shared, blocks[used]))
                used += 1
            elif len(sequence.tokens) % tables.block_size:
                # Nobody else holds it, so it is written in place, and stops being what its hash says.
                tables.pools[group].drop_hash(table[-1])
            more = tables.blocks(length) - before
            if more:
                table.extend(blocks[used : used + more])
                used += more
            self._growth.append((sequence, group, before, shared))


def plan(tables: BlockTables, entries: Entries, cap: int) -> tuple[Growing, list[int]]:
    """Checks a step's entries and finds what they need, changing nothing.

    Args:
        cap: most positions of one sequence.

    Returns:
        The sequences that need the pool, and per group the blocks they need together.

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
    """Per group, the blocks that a step takes in which a sequence grows to `length` positions.

    What falls behind a window is given back after the step only.
    """
    more = max(0, tables.blocks(length) - len(sequence.tables[0]))
    return [more + (tables.shared_tail(group, sequence) is not None) for group in range(len(tables.pools))]


def _contradiction(seq_id: int, sequence: KVSequence, count: int, n_past: int, cap: int) -> BatchError:
    if count == 0:
        return BatchError(f"sequence {seq_id}: an entry without tokens")
    if n_past != len(sequence.tokens):
        return BatchError(f"sequence {seq_id} holds {len(sequence.tokens)} positions, n_past says {n_past}")
    return BatchError(f"sequence {seq_id}: {n_past + count} positions are more than max_per_sequence = {cap}")
