"""Block tables: map each sequence's positions to blocks, share and evict blocks, and check callers' ranges.

A Reservation takes the blocks of one step, and a draft of a step only counts them.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

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

    def commit(self, evaluated: Sequence[Sequence[int]] | None = None) -> None:
        """Add the new positions to the sequences, after the step has succeeded.

        Args:
            evaluated: each entry's final tokens, in place of the tokens of `reserve`; None keeps those. If an entry has
                fewer tokens than it reserved, the blocks behind them are released.
        """
        self._on_end()
        sequences, settle = self._tables.sequences, self._tables.settle
        shorter: list[KVSequence] = []
        reserved = [tokens for _, tokens, _ in self._entries]
        # guard: tokens told at the commit
        kept = reserved if evaluated is None else evaluated
        for (seq_id, _, _), most, tokens in zip(self._entries, reserved, kept, strict=True):
            sequence = sequences[seq_id]
            positions = sequence.tokens
            positions.extend(tokens)
            if len(positions) >= sequence.wake:
                settle(sequence)
            if len(tokens) < len(most):
                shorter.append(sequence)
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

    def writes(self, seq_id: int) -> bool:
        """Return whether the step adds positions to this sequence."""
        return any(seq_id == entry for entry, _, _ in self._entries)

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
