"""Block tables: map each sequence's positions to blocks, share and evict blocks, and check callers' ranges."""

from array import array
from collections.abc import Callable, Iterable, Sequence
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
