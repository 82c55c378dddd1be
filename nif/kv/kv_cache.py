"""The paged KV cache's bookkeeping: it maps the positions of each sequence to blocks.

    reservation = kv.reserve([(seq_id, tokens, n_past)])
    ...                       # do reservation.copies, run the forward pass over kv.block_table(group, seq_id)
    reservation.commit()      # or rollback()

This module has no tensors: the runner owns the blocks' content, and copies are returned as pairs of block ids.
Each layer group has its own pool, and each sequence has one block table per group. A KVCache is not thread-safe.
Between reserve and commit only reads are allowed, and `seq_rm` of a sequence that the step leaves out.

A StepDraft counts the blocks of a planned step, and takes none.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from genbatch.nif.errors import BatchError, OptionError
from genbatch.nif.kv.block_pool import PrefixCache
from genbatch.nif.kv.block_tables import (
    NEVER,
    BlockTables,
    Entries,
    Ints,
    KVSequence,
    Reservation,
    RunReservation,
    check_copy,
    check_prompt,
    check_removal,
    more_blocks,
    sequence_of,
    shortest_prefix,
)
from genbatch.nif.kv.disk_cache import Copy, DiskCache
from genbatch.nif.runner import LayerGroup


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


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Numbers of blocks of one group or of all; `free` includes `initialized`, and free + used = max."""

    max: int
    used: int
    free: int
    initialized: int


class KVCache:
    """Block tables of `num_sequences` sequences over one block pool per layer group.

    Args:
        groups: the model's layer groups.
        num_blocks: per group, the blocks of its pool.
        block_size: positions per block.
        num_sequences: sequence ids are 0 .. num_sequences - 1.
        allow_block_sharing: whether completed blocks are cached by content (the prefix cache).
        max_per_sequence: most positions of one sequence; None means that only the pool limits a sequence.

    Raises:
        OptionError: a number is below 1, or num_blocks and groups differ in length.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        num_blocks: Sequence[int],
        block_size: int = 16,
        num_sequences: int,
        allow_block_sharing: bool = True,
        max_per_sequence: int | None = None,
    ) -> None:
        if len(num_blocks) != len(groups) or not groups:
            raise OptionError("num_blocks", f"{len(num_blocks)} pools for {len(groups)} layer groups")
        options = {
            "block_size": block_size,
            "num_sequences": num_sequences,
            "max_per_sequence": max_per_sequence,
        }
        for option, value in options.items():
            if value is not None and value < 1:
                raise OptionError(option, f"must be at least 1, not {value}")
        self.groups = groups = tuple(group.sized(block_size) for group in groups)
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self.num_sequences = num_sequences
        self.max_per_sequence = max_per_sequence
        self._cap = NEVER if max_per_sequence is None else max_per_sequence
        self._tables = BlockTables(groups, num_blocks, block_size, num_sequences, allow_block_sharing)
        self._no_blocks = (0,) * len(groups)
        self._open: Reservation | RunReservation | None = None

    # Reading a sequence

    def length(self, seq_id: int) -> int:
        """Return the number of positions that a sequence holds.

        Raises:
            BatchError: there is no such sequence. Every method with a seq_id raises this error.
        """
        return len(sequence_of(self._tables, seq_id).tokens)

    def tokens(self, seq_id: int) -> Ints:
        """Return the sequence's token ids. The array is live: do not change it."""
        return sequence_of(self._tables, seq_id).tokens

    def block_table(self, group: int, seq_id: int) -> Ints:
        """Return block ids (C int) by position // block_size.

        The array is live: do not change it, and keep no buffer of it. Entries behind the sinks' may be the placeholder
        0, for blocks that fell behind the group's window.
        """
        return sequence_of(self._tables, seq_id).tables[group]

    def slots(self, group: int, seq_id: int, p0: int, p1: int) -> list[int]:
        """Return the slots of positions [p0, p1): block id * block_size + offset.

        Raises:
            BatchError: a position is not in the table, or fell behind the window.
        """
        sequence, size = sequence_of(self._tables, seq_id), self.block_size
        table = sequence.tables[group]
        first, end = sequence.evicted[group] * size, len(table) * size
        is_sinks = p1 <= self._tables.kept[group] * size
        if not (0 if is_sinks else first) <= p0 <= p1 <= end:
            raise BatchError(f"sequence {seq_id}: positions {p0}..{p1 - 1} are not all in {first}..{end - 1}")
        return [table[position // size] * size + position % size for position in range(p0, p1)]

    # A step

    def reserve(self, entries: Entries) -> Reservation:
        """Reserve the blocks that a step over these entries writes to, all of them or none.

        If a sequence's partly filled last block is shared, a copy replaces it (see `copies`).

        Raises:
            BatchError: an entry contradicts what its sequence holds; nothing was changed.
            OutOfBlocks: a group has too few free blocks; nothing was changed.
        """
        self._assert_idle()
        reservation = self._open = Reservation(self._tables, entries, self._cap, self._close)
        return reservation

    def reserve_run(self, seq_ids: Sequence[int]) -> RunReservation:
        """Return the reservation of a run of decode steps over these sequences; `reserve_step` begins each step."""
        return RunReservation(self._tables, seq_ids, self._cap, self._close)

    def reserve_step(self, run: RunReservation, tokens: Sequence[int]) -> RunReservation:
        """Reserve the blocks of a run's next step, and return the run; see `reserve`.

        Args:
            tokens: each sequence's token, see `RunReservation`.
        """
        self._assert_idle()
        run.reserve(tokens)
        self._open = run
        return run

    def draft(self) -> "StepDraft":
        """Return an empty draft of a step, which counts the blocks that `reserve` would take."""
        return StepDraft(self._tables)

    def beginning(
        self,
        tokens: Sequence[int],
        key: bytes,
        names: list[bytes],
        *,
        source: int | None = None,
        num_shared: int = 0,
        finds: bool = True,
    ) -> Beginning:
        """Predict an empty sequence's content after a `seq_cp` and an `attach_prefix`. No counter changes.

        Args:
            tokens, key: as for `attach_prefix`.
            names: names of the first blocks of `tokens` under `key`. Missing names are appended as needed. The caller
                keeps the list for the next call, so that no block is hashed twice.
            source: the sequence that would share its first `num_shared` positions.
            finds: whether `attach_prefix` would be called.
        """
        tables, cache = self._tables, self._tables.prefix_cache
        tail: tuple[int, ...] | None = None
        length = 0
        if source is not None:
            length = num_shared
            donor = tables.sequences[source]
            finds = finds and donor.key is not None
            if length % self.block_size:
                tail = tuple(table[length // self.block_size] for table in donor.tables)
        if cache is None or not finds:
            return Beginning(length, self._no_blocks, tail=tail)
        first = length // self.block_size
        end = len(tokens) - 1
        limit = end // self.block_size
        known = cache.known_run(tokens, key, names, first, limit)
        blocks: tuple[int, ...] | None = None
        if known == limit and length < end:
            cache.extend_hashes(names, tokens, key)
            blocks = cache.tail(tokens, key, names, end)
        if blocks is not None:
            length, tail = end, blocks
        elif known > first:
            length, tail = known * self.block_size, None
        entries = [*cache.entries(names, first, known, length), *enumerate(blocks or ())]
        free = frozenset((group, block) for group, block in entries if tables.pools[group].references[block] == 0)
        return Beginning(length, self._no_blocks, free, tail)

    def beginning_from_host(self, length: int) -> Beginning:
        """Predict an empty sequence's content after an `import_` of `length` tokens."""
        whole = self._tables.blocks(length)
        first_needed = self._tables.first_needed(length)
        return Beginning(length, tuple(whole - self._tables.gone(g, first) for g, first in enumerate(first_needed)))

    # Sequences

    def attach_prefix(self, seq_id: int, tokens: Sequence[int], key: bytes = b"") -> int:
        """Extend a sequence with cached blocks of its prompt, and set the key for the blocks that it will write.

        If all whole blocks are found, and the tail after them, then only the prompt's last token is left to evaluate.

        Call this once per prompt, after any `seq_cp`, even if no hit is expected: the sequence's later blocks are
        cached under `key`. The cost is O(positions held + hit blocks).

        Args:
            tokens: the whole prompt; its last token is never a hit, because its logits must be computed.
            key: the owner's key, see `prefix_key`; only blocks under this key are hits.

        Returns:
            The number of positions that need no evaluation, including those held before.

        Raises:
            BatchError: the prompt is empty or too long, does not begin with what the sequence holds, or is
                held whole.
        """
        self._assert_idle()
        sequence = sequence_of(self._tables, seq_id)
        num_positions = len(sequence.tokens)
        check_prompt(self._tables, seq_id, tokens, self._cap)
        cache = self._tables.prefix_cache
        if cache is None or (num_positions and sequence.key is None):
            return num_positions
        if key != sequence.key:
            sequence.key = key
            sequence.hashes.clear()
        cache.extend_hashes(sequence.hashes, sequence.tokens, key)
        end = len(tokens) - 1
        limit = end // self.block_size
        sequence.marked = len(tokens) // self.block_size
        sequence.tail = end if end % self.block_size else 0
        match = cache.match(tokens, key, first_names=sequence.hashes, max_blocks=limit)
        names = sequence.hashes + match.hashes
        tail = cache.tail(tokens, key, names, end) if len(names) == limit and num_positions < end else None
        if match.blocks or tail is not None:
            self._tables.adopt(sequence, tokens, match, tail)
        sequence.wake = 0
        return len(sequence.tokens)

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """Share positions [p0, p1) of `src` with `dst`.

        Whole blocks are shared; a partly covered last block is shared until one of the two writes to it. With
        p0 = 0, `dst` also takes over the cache key of `src`.

        Args:
            p0: the number of positions that `dst` holds; their tokens must equal those of `src`.
            p1: one past the last position; None means all that `src` holds.

        Raises:
            BatchError: the range does not fit either sequence, or needed blocks fell behind a window.
        """
        self._assert_idle()
        source = sequence_of(self._tables, src)
        end = len(source.tokens) if p1 is None else p1
        check_copy(self._tables, src, dst, p0, end)
        if p0 < end:
            self._tables.graft(source, self._tables.sequences[dst], end)

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int | None = None) -> None:
        """Remove positions [p0, p1) of a sequence: its tail, or all of it.

        Raises:
            BatchError: the range is not within the sequence, would leave a hole, or cuts the sequence where the next
                token attends to positions that fell behind a window.
        """
        assert self._open is None or not self._open.writes(seq_id), f"a step is in progress that writes to {seq_id}"
        sequence = sequence_of(self._tables, seq_id)
        end = len(sequence.tokens) if p1 is None else p1
        check_removal(self._tables, seq_id, p0, end)
        if p0 < end or not sequence.tokens:
            self._tables.truncate(sequence, p0)

    def shortest_prefix(self, seq_id: int) -> int:
        """Return the fewest positions to which the sequence can be cut or copied; above 1 once a window moved."""
        return shortest_prefix(self._tables, sequence_of(self._tables, seq_id))

    def export(self, seq_id: int) -> tuple[list[int], list[list[int]]]:
        """Return the parts of a sequence that `import_` needs to restore it.

        Returns:
            The tokens, and per group the ids of the blocks that later positions attend to.
        """
        sequence = sequence_of(self._tables, seq_id)
        tables = zip(sequence.tables, self._tables.kept, self._tables.first_needed(len(sequence.tokens)), strict=True)
        needed = [list(table[: min(kept, first)] + table[first:]) for table, kept, first in tables]
        return list(sequence.tokens), needed

    def import_(self, seq_id: int, tokens: Sequence[int], key: bytes | None = None) -> list[list[int]]:
        """Allocate the positions of an empty sequence; the caller writes their KV.

        Args:
            tokens: the tokens that `export` returned.
            key: the cache key of the sequence's later blocks, for content that came from this cache.
                None keeps the sequence out of the prefix cache, so that foreign content cannot reach another sequence.

        Returns:
            Per group, the new blocks' ids. The caller fills them with the content of `export`'s blocks, in that order.

        Raises:
            BatchError: the sequence is not empty, or there are no tokens or too many.
            OutOfBlocks: a group has too few free blocks; nothing was changed.
        """
        self._assert_idle()
        sequence = sequence_of(self._tables, seq_id)
        if sequence.tokens:
            raise BatchError(f"sequence {seq_id} holds {len(sequence.tokens)} positions already")
        check_prompt(self._tables, seq_id, tokens, self._cap)
        filled = self._tables.fill(sequence, tokens)
        # guard: content from outside is not shared
        sequence.key = key
        if key is not None and self._tables.prefix_cache is not None:
            # Compute the names, but do not cache the blocks: the caller has not filled them yet.
            self._tables.prefix_cache.extend_hashes(sequence.hashes, sequence.tokens, key)
        return filled

    # Hints of callers

    def allow_keeping(self, share: float) -> None:
        """Set the share of each pool's blocks that `keep` may put last in the order of eviction."""
        for pool in self._tables.pools:
            pool.max_kept = int(share * pool.num_blocks)

    def keep(self, tokens: Sequence[int], key: bytes, ttl_s: float) -> None:
        """Ask to keep a prompt's whole blocks in the prefix cache for a time after now; a hint.

        The blocks are evicted after all others, up to the share of `allow_keeping`. They never refuse memory to a
        sequence.
        """
        if self._tables.prefix_cache is not None and any(pool.max_kept for pool in self._tables.pools):
            self._tables.prefix_cache.keep(tokens, key, ttl_s)

    @property
    def num_kept(self) -> int:
        """Return the number of free blocks, of all groups, that are evicted last because of `keep`."""
        return sum(pool.num_kept for pool in self._tables.pools)

    # The prefix cache on disk

    def follow(self, disk: DiskCache, copy: Copy) -> None:
        """Offer each block that becomes whole to the disk; `copy` returns a block's content."""
        [pool] = self._tables.pools
        disk.follow(copy, lambda block, version: pool.versions[block] == version)
        self._tables.on_cached = disk.offer

    def on_disk(self, disk: DiskCache, tokens: Sequence[int], key: bytes) -> tuple[list[bytes], int]:
        """Look up a prompt; return the names of its first blocks, and how many of the first are cached already.

        The blocks between that number and the last name are on disk.
        """
        cache = self._tables.prefix_cache
        assert cache is not None, "the disk extends the prefix cache"
        names: list[bytes] = []
        limit = (len(tokens) - 1) // self.block_size
        cached = cache.known_run(tokens, key, names, 0, limit)
        if cached == limit:
            return names[:cached], cached
        names = cache.names(tokens, key, limit)
        return names[: cached + disk.num_known(names[cached:])], cached

    def restore(self, names: Sequence[bytes], first: int, write: Callable[[list[int], list[int]], None]) -> int:
        """Cache a prefix's blocks, with content from elsewhere; they are the last to be evicted.

        Args:
            names: the names of the prefix's first blocks.
            first: the number of blocks that must be cached already.
            write: called with places in `names` and the new blocks' ids; it writes their content.

        Returns:
            The number of first blocks that are cached now. It is less than the names if free blocks run out, or if
            one of the `first` blocks was evicted.
        """
        self._assert_idle()
        [pool], cache = self._tables.pools, self._tables.prefix_cache
        assert cache is not None, "restored blocks are cached"
        restored: list[int] = []
        places, blocks = [], []
        try:
            for place, name in enumerate(names):
                block = cache.block(0, name)
                if block is not None:
                    pool.share(block)
                elif place >= first and pool.num_free:
                    [block] = pool.allocate(1)
                    places.append(place)
                    blocks.append(block)
                else:
                    break
                restored.append(block)
            write(places, blocks)
            for place, block in zip(places, blocks, strict=True):
                cache.insert(0, names[place], block)
                pool.set_hash(block, names[place])
        finally:
            pool.release(reversed(restored))
        return len(restored)

    # Capacity

    def counts(self, group: int | None = None) -> BlockCounts:
        """Count the blocks of a group, or of all groups together."""
        pools = self._tables.pools if group is None else (self._tables.pools[group],)
        used = sum(pool.num_used for pool in pools)
        total = sum(pool.num_blocks for pool in pools)
        return BlockCounts(total, used, total - used, sum(pool.num_initialized for pool in pools))

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Return, per group, the number of blocks that can be allocated."""
        return tuple(pool.num_free for pool in self._tables.pools)

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """Return the prefix cache with its counters; None if blocks are not shared by content."""
        return self._tables.prefix_cache

    def blocks_held(self, seq_id: int) -> tuple[int, ...]:
        """Return, per group, the number of a sequence's blocks, shared blocks included."""
        sequence = sequence_of(self._tables, seq_id)
        return tuple(len(self._tables.live(group, sequence)) for group in range(len(self.groups)))

    def held_only_by(self, seq_ids: Sequence[int]) -> tuple[int, ...]:
        """Return, per group, the number of blocks that removing these sequences would free."""
        counts = []
        for group, pool in enumerate(self._tables.pools):
            holders: Counter[int] = Counter()
            for seq_id in seq_ids:
                sequence = sequence_of(self._tables, seq_id)
                holders.update(self._tables.live(group, sequence))
            counts.append(sum(pool.references[block] == count for block, count in holders.items()))
        return tuple(counts)

    def most_held(self, length: int, chunk: int = 1) -> tuple[int, ...]:
        """Return, per group, the most blocks that one sequence holds while it grows to `length` positions.

        A group with a window holds its sinks, its window and the step's tokens. Blocks behind the window are released
        after the step.

        Args:
            chunk: most positions that one step adds.
        """
        whole = self._tables.blocks(length)
        spans = (None if group.window is None else group.window + chunk + self.block_size - 2 for group in self.groups)
        most = zip(self._tables.kept, spans, strict=True)
        return tuple(whole if span is None else min(whole, kept + self._tables.blocks(span)) for kept, span in most)

    def still_to_take(self, seq_id: int, length: int, chunk: int = 1) -> tuple[int, ...]:
        """Return, per group, the most blocks that a sequence still takes while it grows to `length` positions.

        The arguments are those of `most_held`.
        """
        sequence = sequence_of(self._tables, seq_id)
        if length <= len(sequence.tokens):
            return self._no_blocks
        more = more_blocks(self._tables, sequence, length)
        if not self._tables.windows:
            return tuple(more)
        # Count own blocks only: a shared block does not become free when it falls behind the window.
        own = self.held_only_by((seq_id,))
        most = self.most_held(length, chunk)
        for group, _ in self._tables.windows:
            more[group] = min(more[group], max(0, most[group] - own[group]))
        return tuple(more)

    def still_to_take_from(self, beginning: Beginning, length: int, chunk: int = 1) -> tuple[int, ...]:
        """Return the result of `still_to_take` for a sequence that has not started."""
        draft = self.draft()
        more = self._tables.blocks(length) - self._tables.blocks(beginning.length)
        needed = [cost + more for cost in draft.costs(beginning)]
        most = self.most_held(length, chunk)
        for group, _ in self._tables.windows:
            needed[group] = min(needed[group], most[group])
        return tuple(needed)

    def is_writable(self, seq_id: int, length: int) -> bool:
        """Return whether a sequence surely can grow to `length` positions without a new block; False means maybe."""
        return length <= sequence_of(self._tables, seq_id).writable

    def check_integrity(self) -> None:
        """Check that tables, reference counts, pools and prefix cache agree; raises AssertionError otherwise."""
        self._tables.check_integrity(self._open.growth.replaced() if self._open is not None else ())

    # Helpers

    def _close(self) -> None:
        assert self._open is not None, "a reservation ends once"
        self._open = None

    def _assert_idle(self) -> None:
        assert self._open is None, "a step is in progress: its reservation is neither committed nor rolled back"


BlockSet: TypeAlias = set[tuple[int, int]]  # (group, block)


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
