"""Block tables: which blocks hold each sequence's positions, and how a step adds to them.

    tables.graft(source, target, p1)              # shares blocks; `settle` names, caches and evicts them
    reservation = Reservation(tables, entries, cap, on_end)
    reservation.commit()                          # or rollback(), if the step failed

Growth takes the blocks of a step. A Reservation is one step, and a RunReservation is a run of decode steps.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeAlias

from genbatch.nif.errors import BatchError, OutOfBlocks
from genbatch.nif.kv.block_pool import BlockPool, Match, PrefixCache, Reach
from genbatch.nif.runner import LayerGroup

Ints: TypeAlias = "array[int]"  # a string, since array is no generic class before Python 3.12
NEVER = 1 << 62  # more positions than any sequence has


@dataclass(slots=True)
class KVSequence:
    """A sequence's tokens and block tables. Entry position // block_size of a group's table is the position's block."""

    tables: list[Ints]  # per group, C ints; entries after the sinks' and before evicted[g] are the placeholder 0
    evicted: list[int]  # per group, the end of the entries that fell behind the window; 0 if none did
    tokens: Ints = field(default_factory=lambda: array("q"))  # one per position held
    hashes: list[bytes] = field(default_factory=list)  # names of its whole blocks, for the prefix cache
    marked: int = 0  # whole blocks of its prompt: later prompts are likely to share this prefix
    tail: int = 0  # the end of its prompt's tail; 0 if there is none, or once the tail has its name
    key: bytes | None = b""  # the prefix cache's key; None keeps imported blocks out of the cache
    # Positions below this can be written without a new block. The value may be too low, but never too high.
    writable: int = 0
    # The length at which a block completes or falls behind a window. The value may be too low, but never too high.
    wake: int = 0

    @classmethod
    def empty(cls, num_groups: int) -> "KVSequence":
        return cls(tables=[array("i") for _ in range(num_groups)], evicted=[0] * num_groups)


class BlockTables:
    """The pools, sequences and prefix cache, shared by the sequence operations and by reservations."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: Sequence[int],
        block_size: int,
        num_sequences: int,
        allow_block_sharing: bool,
    ) -> None:
        self.block_size = block_size
        self.windows = [(index, group.window) for index, group in enumerate(groups) if group.window is not None]
        self.reaches = tuple(Reach(group, block_size) for group in groups)
        # Per group, the leading table entries of sinks, which never fall behind the window.
        self.kept = [reach.kept for reach in self.reaches]
        self.prefix_cache = PrefixCache(block_size, groups) if allow_block_sharing else None
        self.pools = tuple(
            BlockPool(count)
            if (cache := self.prefix_cache) is None
            else BlockPool(count, partial(cache.forget, index), cache.kept_until)
            for index, count in enumerate(num_blocks)
        )
        self.sequences = [KVSequence.empty(len(groups)) for _ in range(num_sequences)]
        self.on_cached: Callable[[bytes, int, int], None] | None = None  # a block's name, its id and its version

    def blocks(self, length: int) -> int:
        """Return the number of table entries for `length` positions."""
        return -(-length // self.block_size)

    def live(self, group: int, sequence: KVSequence, start: int = 0) -> Ints:
        """Return a table's blocks from entry `start` on, without those that fell behind the window."""
        table, evicted = sequence.tables[group], sequence.evicted[group]
        return table[start:] if start >= evicted else table[start : self.kept[group]] + table[evicted:]

    def gone(self, group: int, first: int) -> int:
        """Return the number of entries between the sinks and `first`, where the window begins."""
        return max(0, first - self.kept[group])

    def first_needed(self, length: int) -> list[int]:
        """Return, per group, the table index of the first block that positions from `length` on attend to."""
        return [reach.first_needed(length) for reach in self.reaches]

    def require(self, needed: Sequence[int]) -> None:
        """Check that every group has enough free blocks; raises OutOfBlocks otherwise."""
        for pool, count in zip(self.pools, needed, strict=True):
            if count > pool.num_free:
                raise OutOfBlocks(count, pool.num_free)

    def partial_tail(self, group: int, sequence: KVSequence) -> int | None:
        """Return the partly filled last block; None if the last block is full."""
        return sequence.tables[group][-1] if len(sequence.tokens) % self.block_size else None

    def shared_tail(self, group: int, sequence: KVSequence) -> int | None:
        """Return the partly filled last block if another sequence shares it; else None."""
        block = self.partial_tail(group, sequence)
        if block is None:
            return None
        # guard: copy on write
        return block if self.pools[group].references[block] > 1 else None

    def settle(self, sequence: KVSequence) -> None:
        """Cache the blocks that became whole and evict those that fell behind a window."""
        length = len(sequence.tokens)
        wake = NEVER
        if self.prefix_cache is not None and sequence.key is not None:
            hashes = sequence.hashes
            first = len(hashes)
            self.prefix_cache.extend_hashes(hashes, sequence.tokens, sequence.key)
            for index in range(first, len(hashes)):
                self._cache_block(sequence, index)
            if 0 < sequence.tail <= length:
                self._cache_tail(sequence)
            wake = sequence.tail or (len(hashes) + 1) * self.block_size
        for group, window in self.windows:
            behind = self.reaches[group].first_needed(length)
            self.evict(group, sequence, behind)
            wake = min(wake, (max(behind, self.kept[group]) + 1) * self.block_size + window - 1)
        sequence.wake = wake

    def evict(self, group: int, sequence: KVSequence, behind: int) -> None:
        """Release the blocks before table index `behind`, but not the sinks' blocks.

        Blocks that the prompt's end attends to stay in the prefix cache like those of a finished sequence. The other
        blocks are the first to be evicted from the cache.
        """
        table, first = sequence.tables[group], max(sequence.evicted[group], self.kept[group])
        if behind > first:
            marked = min(max(self.reaches[group].first_needed(sequence.marked * self.block_size), first), behind)
            end = min(max(sequence.marked, marked), behind)
            self.pools[group].release(table[first:marked] + table[end:behind], passed=True)
            self.pools[group].release(table[marked:end])
            table[first:behind] = array("i", [0] * (behind - first))
            sequence.evicted[group] = behind

    def extend(self, group: int, sequence: KVSequence, blocks: Ints, end: int) -> None:
        """Extend a table, after its whole blocks, with another sequence's blocks or cached blocks.

        Args:
            blocks: the following blocks, up to position `end`. Blocks that position `end` does not attend to are left
                out.
        """
        whole, pool, table = len(sequence.tokens) // self.block_size, self.pools[group], sequence.tables[group]
        first = self.reaches[group].first_needed(end)
        self.evict(group, sequence, min(first, len(table)))
        num_entries = whole + len(blocks)
        hole = min(max(whole, self.kept[group]), num_entries)  # position `end` attends to nothing from here to `start`
        start = max(hole, first)
        sinks, shared = blocks[: hole - whole], blocks[start - whole :]
        # guard: copies share
        for block in sinks + shared:
            pool.share(block)
        pool.release(self.live(group, sequence, whole))  # the partly filled block, which `blocks` replaces
        table[whole:] = sinks + array("i", [0] * (start - hole)) + shared
        if first > whole:
            sequence.evicted[group] = first

    def adopt(self, sequence: KVSequence, tokens: Sequence[int], match: Match, tail: tuple[int, ...] | None) -> None:
        """Extend a sequence, after its whole blocks, with the blocks of a prefix hit and with its prompt's tail."""
        end = (len(sequence.hashes) + len(match.hashes)) * self.block_size
        matched = [*match.blocks]
        if tail is not None:
            end = len(tokens) - 1
            matched.append(tail)
            for other in self.sequences:  # one of them may write to a block that is shared from now on
                if any(table and table[-1] == block for table, block in zip(other.tables, tail, strict=True)):
                    other.writable = len(other.tokens)
        for group in range(len(self.pools)):
            self.extend(group, sequence, array("i", [blocks[group] for blocks in matched]), end)
        sequence.hashes += match.hashes
        sequence.tokens.extend(tokens[len(sequence.tokens) : end])
        sequence.writable = end

    def graft(self, source: KVSequence, target: KVSequence, p1: int) -> None:
        """Extend `target` with `source`'s blocks up to p1; `target` holds the first tokens of `source`."""
        p0 = len(target.tokens)
        whole, end = p0 // self.block_size, self.blocks(p1)
        for group in range(len(self.pools)):
            self.extend(group, target, source.tables[group][whole:end], p1)
        target.tokens.extend(source.tokens[p0:p1])
        if p0 == 0:
            target.key = source.key
            target.hashes[:] = source.hashes[: p1 // self.block_size]
            target.marked = min(source.marked, p1 // self.block_size)
            target.tail = 0
        elif source.key is None:
            target.key = None
        target.writable = p1
        target.wake = 0
        source.writable = len(source.tokens)  # the source's last block may be shared now

    def fill(self, sequence: KVSequence, tokens: Sequence[int]) -> list[list[int]]:
        """Allocate blocks for these tokens of an empty sequence; returns, per group, the blocks to fill."""
        first_needed = self.first_needed(len(tokens))
        whole = self.blocks(len(tokens))
        needed = [whole - self.gone(group, first) for group, first in enumerate(first_needed)]
        self.require(needed)
        filled = [pool.allocate(count) for pool, count in zip(self.pools, needed, strict=True)]
        for group, (first, blocks) in enumerate(zip(first_needed, filled, strict=True)):
            kept = self.kept[group]
            sequence.tables[group] = array("i", blocks[:kept] + [0] * self.gone(group, first) + blocks[kept:])
            sequence.evicted[group] = first
        sequence.tokens.extend(tokens)
        sequence.writable = len(tokens)
        sequence.wake = 0
        return filled

    def trim(self, sequence: KVSequence) -> None:
        """Release the blocks behind the last position held; no other sequence can share these blocks."""
        kept = self.blocks(len(sequence.tokens))
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(reversed(table[kept:]))
            del table[kept:]
        sequence.writable = min(sequence.writable, kept * self.block_size)

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Remove the positions from `length` on. Length 0 also resets the sequence's cache key."""
        kept = self.blocks(length)
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            # guard: blocks come back
            pool.release(reversed(self.live(group, sequence, kept)))  # so a chain's leaves are evicted first
            del table[kept:]
            sequence.evicted[group] = min(sequence.evicted[group], kept)
        del sequence.tokens[length:]
        del sequence.hashes[length // self.block_size :]
        sequence.writable = length
        sequence.wake = 0
        sequence.marked = min(sequence.marked, kept)
        if length < sequence.tail:
            sequence.tail = 0
        if length == 0:
            sequence.key = b""

    def check_integrity(self, pending: Iterable[tuple[int, int]]) -> None:
        """Check that tables, pools and prefix cache agree.

        Args:
            pending: (group, block) pairs that a reservation in progress still holds.

        Raises:
            AssertionError: they contradict each other.
        """
        users = [[0] * pool.num_blocks for pool in self.pools]
        for group, block in pending:
            users[group][block] += 1
        for seq_id, sequence in enumerate(self.sequences):
            blocks, length = self.blocks(len(sequence.tokens)), len(sequence.tokens)
            for group, table in enumerate(sequence.tables):
                where = f"sequence {seq_id}, group {group}"
                assert len(table) >= blocks, f"{where}: {len(table)} blocks for {length} positions"
                evicted = sequence.evicted[group]
                assert not any(table[self.kept[group] : evicted]), f"{where}: an evicted entry still names a block"
                assert evicted <= len(table), f"{where}: more evicted than there are"
                assert evicted == 0 or evicted > self.kept[group], f"{where}: sinks were evicted"
                for block in self.live(group, sequence):
                    users[group][block] += 1
            for group, table in enumerate(sequence.tables):
                if sequence.writable > length and length % self.block_size:
                    block = table[blocks - 1]
                    assert users[group][block] == 1, f"sequence {seq_id} takes shared block {block} for its own"
                    assert self.pools[group].hashes[block] is None, f"cached block {block} would be overwritten"
            assert len(sequence.hashes) <= length // self.block_size, f"sequence {seq_id}: a name too many"
        for group, pool in enumerate(self.pools):
            pool.check_integrity(users[group])
            if self.prefix_cache is not None:
                self.prefix_cache.check_integrity(group, pool.names())

    def _cache_block(self, sequence: KVSequence, index: int) -> None:
        assert self.prefix_cache is not None
        for group, pool in enumerate(self.pools):
            block, name = sequence.tables[group][index], sequence.hashes[index]
            if pool.hashes[block] is None and self.prefix_cache.insert(group, name, block):
                pool.set_hash(block, name)
                if self.on_cached is not None:
                    self.on_cached(name, block, pool.versions[block])

    def _cache_tail(self, sequence: KVSequence) -> None:
        assert self.prefix_cache is not None and sequence.key is not None
        end, sequence.tail = sequence.tail, 0
        name = self.prefix_cache.tail_name(sequence.tokens, sequence.key, sequence.hashes, end)
        index, length = divmod(end, self.block_size)
        for group, pool in enumerate(self.pools):
            block = sequence.tables[group][index]
            if block not in pool.tails and self.prefix_cache.insert(group, name, block):
                pool.set_tail(block, name, length)


def sequence_of(tables: BlockTables, seq_id: int) -> KVSequence:
    """Return the sequence with this id; raises BatchError if there is none."""
    if not 0 <= seq_id < len(tables.sequences):
        raise BatchError(f"sequence {seq_id} is outside 0..{len(tables.sequences) - 1}")
    return tables.sequences[seq_id]


def check_prompt(tables: BlockTables, seq_id: int, tokens: Sequence[int], cap: int) -> None:
    """Check that the tokens begin with those that the sequence holds, add at least one, and are at most `cap`."""
    cached = tables.sequences[seq_id].tokens
    if not tokens:
        raise BatchError(f"sequence {seq_id}: no tokens")
    if len(tokens) > cap:
        raise BatchError(f"sequence {seq_id}: {len(tokens)} positions are more than max_per_sequence = {cap}")
    if len(cached) >= len(tokens):
        raise BatchError(f"sequence {seq_id} holds {len(cached)} positions: nothing is left to evaluate")
    if array("q", tokens[: len(cached)]) != cached:
        raise BatchError(f"sequence {seq_id}: the prompt does not begin with the tokens that it holds")


def check_copy(tables: BlockTables, src: int, dst: int, p0: int, p1: int) -> None:
    """Check that `dst` holds exactly the first p0 positions of `src`, and that `src` can continue at p1."""
    source, target = sequence_of(tables, src), sequence_of(tables, dst)
    if src == dst:
        raise BatchError(f"sequence {src} cannot be copied onto itself")
    if not 0 <= p0 <= p1 <= len(source.tokens):
        raise BatchError(f"sequence {src}: positions [{p0}, {p1}) are not within its {len(source.tokens)}")
    if len(target.tokens) != p0:
        raise BatchError(f"sequence {dst} holds {len(target.tokens)} positions, the copy starts at {p0}")
    if target.tokens != source.tokens[:p0]:
        raise BatchError(f"sequences {src} and {dst} differ before {p0}: what follows was computed from that")
    if p0 < p1:
        check_end(tables, src, p1)


def check_removal(tables: BlockTables, seq_id: int, p0: int, p1: int) -> None:
    """Check that [p0, p1) is empty, or a tail without which the sequence can continue at p0."""
    length = len(sequence_of(tables, seq_id).tokens)
    if not 0 <= p0 <= p1 <= length:
        raise BatchError(f"sequence {seq_id}: positions [{p0}, {p1}) are not within its {length}")
    if p0 == p1:
        return
    if p1 < length:
        raise BatchError(
            f"sequence {seq_id}: removing [{p0}, {p1}) of {length} positions leaves a hole;"
            " those after it were computed from them"
        )
    check_end(tables, seq_id, p0)


def check_end(tables: BlockTables, seq_id: int, length: int) -> None:
    """Check that the sequence still has all positions that a token at position `length` attends to."""
    shortest = shortest_prefix(tables, tables.sequences[seq_id])
    if 0 < length < shortest:
        raise BatchError(
            f"sequence {seq_id} cannot end at {length}: its windows dropped positions that the next token"
            f" attends to; {shortest} is the least"
        )


def shortest_prefix(tables: BlockTables, sequence: KVSequence) -> int:
    """Return the fewest positions, at least 1, after which the sequence could still continue."""
    evicted = ((sequence.evicted[group], window) for group, window in tables.windows)
    return max((count * tables.block_size + window - 1 for count, window in evicted if count), default=1)


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
        # guard: final tokens at the commit
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
