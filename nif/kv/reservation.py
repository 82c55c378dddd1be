"""Reservations: take the blocks of one step, or of a run of decode steps. A draft of a step only counts them."""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from genbatch.nif.errors import BatchError
from genbatch.nif.kv.block_tables import BlockTables, KVSequence

Entries: TypeAlias = Sequence[tuple[int, Sequence[int], int]]  # (seq_id, tokens, n_past)
Growing: TypeAlias = list[tuple[KVSequence, int]]  # sequences that need the pool, with their lengths after the step


class Growth:
    """The blocks that a step takes, appended to the tables of its growing sequences; ends with `keep` or `undo`.

    Args:
        growing, needed: see `plan`.

    Attributes:
        copies: per group, (source, destination) block pairs to copy before the forward pass.

    Raises:
        OutOfBlocks: a group has too few free blocks; nothing was changed.
    """

    __slots__ = ("_grown", "_tables", "copies")

    def __init__(self, tables: BlockTables, growing: Growing, needed: Sequence[int]) -> None:
        tables.require(needed)
        self.copies: list[list[tuple[int, int]]] = [[] for _ in needed]
        self._tables = tables
        # (sequence, group, table length before the step, shared last block that a copy replaced)
        self._grown: list[tuple[KVSequence, int, int, int | None]] = []
        if growing:
            for group, count in enumerate(needed):
                self._grow(group, tables.pools[group].allocate(count), growing)
            for sequence, _ in growing:
                sequence.writable = len(sequence.tables[0]) * tables.block_size

    def keep(self) -> None:
        """Release the blocks that copies replaced, after the step has succeeded."""
        for group, block in self.replaced():
            self._tables.pools[group].release((block,))

    def undo(self) -> None:
        """Restore every table and reference count, after the step has failed.

        The cached content of the taken blocks stays forgotten, because the step may have written to these blocks.
        """
        # Release in reverse, so that the free blocks return to their old order.
        for sequence, group, before, shared in reversed(self._grown):
            table, pool = sequence.tables[group], self._tables.pools[group]
            pool.release(reversed(table[before:]))
            del table[before:]
            if shared is not None:
                pool.release((table[-1],))
                table[-1] = shared
            sequence.writable = len(sequence.tokens)

    def replaced(self) -> Iterator[tuple[int, int]]:
        """Return the (group, block) pairs that copies replaced: no table has them, but a rollback needs them."""
        return ((group, shared) for _, group, _, shared in self._grown if shared is not None)

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
            self._grown.append((sequence, group, before, shared))


class Reservation:
    """The blocks reserved for one step. It ends with exactly one `commit` or `rollback`.

    Until then the block tables include the new blocks, but lengths and tokens are the old ones.

    Attributes:
        steps: the entries.
        evaluated: each entry's final tokens, in place of those of its entry; a caller sets them before `commit`. If
            they are fewer, the blocks behind them are released. None: all of the entries' tokens.
        growth: the blocks taken.

    Raises:
        BatchError: an entry contradicts what its sequence holds; nothing was changed.
        OutOfBlocks: a group has too few free blocks; nothing was changed.
    """

    __slots__ = ("_on_end", "_tables", "evaluated", "growth", "steps")

    def __init__(self, tables: BlockTables, entries: Entries, cap: int, on_end: Callable[[], None]) -> None:
        self.growth = Growth(tables, *plan(tables, entries, cap))
        self.steps = entries
        self.evaluated: Sequence[Sequence[int]] | None = None
        self._tables = tables
        self._on_end = on_end

    @property
    def copies(self) -> list[list[tuple[int, int]]]:
        """Return, per group, (source, destination) block pairs to copy before the forward pass."""
        return self.growth.copies

    def commit(self) -> None:
        """Add the new positions to the sequences, after the step has succeeded."""
        self._on_end()
        sequences, settle = self._tables.sequences, self._tables.settle
        shorter: list[KVSequence] = []
        reserved = [tokens for _, tokens, _ in self.steps]
        # guard: tokens told at the commit
        evaluated = reserved if self.evaluated is None else self.evaluated
        for (seq_id, _, _), most, tokens in zip(self.steps, reserved, evaluated, strict=True):
            sequence = sequences[seq_id]
            positions = sequence.tokens
            positions.extend(tokens)
            if len(positions) >= sequence.wake:
                settle(sequence)
            if len(tokens) < len(most):
                shorter.append(sequence)
        self.growth.keep()
        for sequence in shorter:
            # guard: blocks of wrong drafts come back
            self._tables.trim(sequence)

    def rollback(self) -> None:
        """Restore every table, length and reference count, after the step has failed; see `Growth.undo`."""
        self._on_end()
        self.growth.undo()

    def writes(self, seq_id: int) -> bool:
        """Return whether the step adds positions to this sequence."""
        return any(seq_id == entry for entry, _, _ in self.steps)


class RunReservation:
    """The blocks of a run of decode steps, reserved step by step. Each step adds one position to every sequence.

    A sequence needs the pool only where a block ends, and the run knows that step before. So a step looks at few of its
    sequences. No other code may change the sequences during the run.

        run.reserve(tokens)                    # then the copies and the forward pass
        run.commit() or run.rollback()

    Args:
        seq_ids: the run's sequences.
        cap: most positions of one sequence.
        on_end: called at the end of each step.

    Attributes:
        tokens: each sequence's token of the step; a caller may set them until `commit`.
        evaluated: None, as all tokens of a step count.
        growth: the blocks that the current step takes.
    """

    __slots__ = ("_cap", "_due", "_events", "_nothing", "_num_steps", "_on_end", "_positions", "_seq_ids", "_staying",
                 "_tables", "growth", "tokens")  # fmt: skip
    evaluated: ClassVar[None] = None

    def __init__(self, tables: BlockTables, seq_ids: Sequence[int], cap: int, on_end: Callable[[], None]) -> None:
        self._tables = tables
        self._cap = cap
        self._on_end = on_end
        self._num_steps = 0  # committed
        self._events: dict[int, list[int]] = {}  # by number of steps, the sequences to look at after so many
        self._due: list[int] = []  # those of the next step
        self.tokens: Sequence[int] = ()
        self.growth = self._nothing = Growth(tables, [], [0] * len(tables.pools))
        self.keep(seq_ids)
        for seq_id in seq_ids:
            self._await(seq_id)

    @property
    def copies(self) -> list[list[tuple[int, int]]]:
        """Return, per group, (source, destination) block pairs to copy before the forward pass."""
        return self.growth.copies

    @property
    def steps(self) -> Entries:
        """Return the entries of the current step."""
        return [
            (seq_id, (token,), len(positions))
            for seq_id, token, positions in zip(self._seq_ids, self.tokens, self._positions, strict=True)
        ]

    def keep(self, seq_ids: Sequence[int]) -> None:
        """Go on with these sequences only, in this order; call this between two steps."""
        self._seq_ids = seq_ids
        self._staying = frozenset(seq_ids)
        self._due = [seq_id for seq_id in self._due if seq_id in self._staying]
        self._positions = [self._tables.sequences[seq_id].tokens for seq_id in seq_ids]

    def reserve(self, tokens: Sequence[int]) -> None:
        """Reserve the blocks of the next step, all of them or none; raises as `KVCache.reserve`."""
        self.tokens = tokens
        if self._due:
            entries = [(seq_id, (0,), len(self._tables.sequences[seq_id].tokens)) for seq_id in self._due]
            self.growth = Growth(self._tables, *plan(self._tables, entries, self._cap))

    def commit(self) -> None:
        """Add the tokens to the sequences, after the step has succeeded."""
        self._on_end()
        assert len(self.tokens) == len(self._positions)
        deque(map(array.append, self._positions, self.tokens), maxlen=0)
        self._num_steps += 1
        if self._due:
            self.growth.keep()
            self.growth = self._nothing
        changing, self._due = self._due + self._events.pop(self._num_steps, []), []
        for seq_id in changing:
            if seq_id in self._staying:
                sequence = self._tables.sequences[seq_id]
                if len(sequence.tokens) >= sequence.wake:
                    self._tables.settle(sequence)
                self._await(seq_id)

    def rollback(self) -> None:
        """Restore every table and reference count, after the step has failed; see `Growth.undo`."""
        self._on_end()
        self.growth.undo()
        self.growth = self._nothing

    def writes(self, seq_id: int) -> bool:
        """Return whether the step adds a position to this sequence."""
        return seq_id in self._staying

    def _await(self, seq_id: int) -> None:
        """Note the step after which a sequence needs a block, has a whole one, or drops one behind its window."""
        sequence = self._tables.sequences[seq_id]
        length = len(sequence.tokens)
        if min(sequence.writable, self._cap) <= length:
            self._due.append(seq_id)
        else:
            event = min(sequence.writable, self._cap, max(sequence.wake, length + 1))
            self._events.setdefault(self._num_steps + event - length, []).append(seq_id)


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


BlockSet: TypeAlias = set[tuple[int, int]]  # (group, block)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The positions that an empty sequence would start with.

    Args:
        length: number of positions that need no evaluation.
        fresh: per group, the number of blocks to allocate for imported content.
        hits: free (group, block) pairs that a prefix hit would take.
        tail: per group, the partly filled last block; None if there is none. It is copied if another sequence has it.
    """

    length: int
    fresh: tuple[int, ...]
    hits: frozenset[tuple[int, int]] = frozenset()
    tail: tuple[int, ...] | None = None


class StepDraft:
    """Counts the blocks of a step's entries and refuses entries that do not fit. Valid until the tables change."""

    __slots__ = ("_alone", "_free", "_growing", "_hits", "_named", "_shared", "_tables", "_taken")

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._free = [pool.num_free for pool in tables.pools]
        self._taken = [0] * len(tables.pools)  # per group
        self._hits: BlockSet = set()  # free blocks that the prefix hits of this step's sequences take
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
        alone = (tails & beginning.hits) - self._hits
        self._shared |= (tails | (self._alone & beginning.hits)) - alone
        self._alone = (self._alone - beginning.hits) | alone
        self._note_named(alone)
        self._hits |= beginning.hits
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
        new = beginning.hits - self._hits
        # Each one counts: a found block, and a copy for the sequence that would have written to it in place.
        for group, _ in (*new, *(beginning.hits & self._alone)):
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
