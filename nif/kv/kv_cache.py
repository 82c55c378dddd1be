"""The paged KV cache's bookkeeping: which block holds which positions of which sequence.

    reservation = kv.reserve([(seq_id, tokens, n_past)])
    ...                       # do reservation.copies, run the forward pass over kv.block_table(group, seq_id)
    reservation.commit()      # or rollback()

No tensors: the content of blocks is somebody else's, and what has to be copied is returned as pairs of ids.
Each layer group has its own pool and each sequence one block table a group. Not thread-safe: one caller at a
time, and between reserve and commit nothing but reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from genbatch.nif.errors import BatchError, OptionError
from genbatch.nif.kv.block_tables import NEVER, BlockTables, Ints
from genbatch.nif.kv.prefix_cache import PrefixCache
from genbatch.nif.kv.reservation import Entries, Reservation, plan
from genbatch.nif.kv.sequence_checks import (
    check_copy,
    check_prompt,
    check_removal,
    sequence_of,
    shortest_prefix,
)
from genbatch.nif.layer_group import LayerGroup


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of one group or of all; `free` includes `initialized`, and free + used = max always."""

    max: int
    used: int
    free: int
    initialized: int


class KVCache:
    """Block tables of `num_sequences` sequences over one block pool per layer group.

    Args:
        groups: the model's layer groups.
        num_blocks: per group, the blocks of its pool.
        block_size: positions a block holds.
        num_sequences: sequence ids are 0 .. num_sequences - 1.
        allow_block_sharing: whether completed blocks are found again by content; works only when every group
            attends to all positions.
        max_per_sequence: most positions of one sequence; None leaves it to the pool.

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
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self.num_sequences = num_sequences
        self.max_per_sequence = max_per_sequence
        self._cap = NEVER if max_per_sequence is None else max_per_sequence
        self._tables = BlockTables(groups, num_blocks, block_size, num_sequences, allow_block_sharing)
        self._open: Reservation | None = None

    # What a sequence holds

    def length(self, seq_id: int) -> int:
        """Positions that a sequence holds.

        Raises:
            BatchError: no such sequence (as every method that takes a seq_id).
        """
        return len(sequence_of(self._tables, seq_id).tokens)

    def tokens(self, seq_id: int) -> Ints:
        """The token ids at those positions; live, to be read only."""
        return sequence_of(self._tables, seq_id).tokens

    def block_table(self, group: int, seq_id: int) -> Ints:
        """Block ids (C int) by position // block_size; live: to be read only, and no buffer of it kept.

        The first `num_evicted` entries are the placeholder 0: those blocks fell behind the group's window.
        """
        return sequence_of(self._tables, seq_id).tables[group]

    def num_evicted(self, group: int, seq_id: int) -> int:
        """Leading entries of a block table whose blocks are gone."""
        return sequence_of(self._tables, seq_id).evicted[group]

    def slots(self, group: int, seq_id: int, p0: int, p1: int) -> list[int]:
        """Where positions [p0, p1) are stored: block id * block_size + offset.

        Raises:
            BatchError: a position is not in the table, or fell behind the window.
        """
        sequence, size = sequence_of(self._tables, seq_id), self.block_size
        table = sequence.tables[group]
        first, end = sequence.evicted[group] * size, len(table) * size
        if not first <= p0 <= p1 <= end:
            raise BatchError(f"sequence {seq_id}: positions {p0}..{p1 - 1} are not all in {first}..{end - 1}")
        return [table[position // size] * size + position % size for position in range(p0, p1)]

    # A step

    def reserve(self, entries: Entries) -> Reservation:
        """Takes the blocks that a step over these entries writes to, all of them or none.

        A sequence's partly filled last block, if shared, is replaced by a copy of its own (see `copies`).

        Raises:
            BatchError: an entry contradicts what its sequence holds; nothing was changed.
            OutOfBlocks: a group has too few free blocks; nothing was changed.
        """
        self._assert_idle()
        self._open = Reservation(self._tables, entries, self._cap, self._close)
        return self._open

    def blocks_needed(self, entries: Entries) -> tuple[int, ...]:
        """Per group, the blocks that `reserve` would take.

        Raises:
            BatchError: as `reserve`.
        """
        return tuple(plan(self._tables, entries, self._cap)[1])

    # Sequences

    def attach_prefix(self, seq_id: int, tokens: Sequence[int], key: bytes = b"") -> int:
        """Continues a sequence with the blocks known for its prompt, and says whose blocks it will write.

        To be called once a prompt, after any `seq_cp` and also when nothing is expected to match: what the
        sequence computes from now on is cached under `key`. Costs O(positions held + blocks matched).

        Args:
            tokens: the whole prompt; its last token is never matched, since its logits are wanted.
            key: whose blocks may be found, see `prefix_key`.

        Returns:
            Positions that need no evaluation, those held before included.

        Raises:
            BatchError: the prompt is empty or too long, does not begin with what the sequence holds, or is
                held whole.
        """
        self._assert_idle()
        sequence = sequence_of(self._tables, seq_id)
        held = len(sequence.tokens)
        check_prompt(self._tables, seq_id, tokens, self._cap)
        cache = self._tables.prefix_cache
        if cache is None or (held and sequence.key is None):
            return held
        if key != sequence.key:
            sequence.key = key
            sequence.hashes.clear()
        cache.extend_hashes(sequence.hashes, sequence.tokens, key)
        match = cache.match(tokens, key, held=sequence.hashes, max_blocks=(len(tokens) - 1) // self.block_size)
        if match.blocks:
            self._tables.adopt(sequence, tokens, match)
        sequence.wake = 0
        return len(sequence.tokens)

    def peek_prefix(self, tokens: Sequence[int], key: bytes = b"") -> int:
        """Positions that `attach_prefix` would give an empty sequence now; counts as no query."""
        cache = self._tables.prefix_cache
        if cache is None:
            return 0
        return cache.known_run(tokens, key, (len(tokens) - 1) // self.block_size) * self.block_size

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int | None = None) -> None:
        """Makes positions [p0, p1) of `src` belong to `dst` too.

        Whole blocks are shared; a partly covered last block is shared until one of the two writes to it. With
        p0 = 0, `dst` also takes over the key under which its blocks are cached.

        Args:
            p0: what `dst` holds, which must be the same tokens that `src` holds there.
            p1: one past the last position; None means all that `src` holds.

        Raises:
            BatchError: the range does not fit either sequence, or a window has dropped part of what it needs.
        """
        self._assert_idle()
        source = sequence_of(self._tables, src)
        end = len(source.tokens) if p1 is None else p1
        check_copy(self._tables, src, dst, p0, end)
        if p0 < end:
            self._tables.graft(source, self._tables.sequences[dst], end)

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int | None = None) -> None:
        """Forgets positions [p0, p1) of a sequence: its tail, or all of it.

        Raises:
            BatchError: the range is not within the sequence, would leave a hole, or ends it where a window
                has dropped positions that the next token attends to.
        """
        self._assert_idle()
        sequence = sequence_of(self._tables, seq_id)
        end = len(sequence.tokens) if p1 is None else p1
        check_removal(self._tables, seq_id, p0, end)
        if p0 < end or not sequence.tokens:
            self._tables.truncate(sequence, p0)

    def shortest_prefix(self, seq_id: int) -> int:
        """The fewest positions to which the sequence can be cut or copied; above 1 once a window moved."""
        return shortest_prefix(self._tables, sequence_of(self._tables, seq_id))

    def export(self, seq_id: int) -> tuple[list[int], list[list[int]]]:
        """What has to be kept of a sequence to bring it back with `import_`.

        Returns:
            Its tokens, and per group the ids of the blocks whose content later positions need.
        """
        sequence = sequence_of(self._tables, seq_id)
        tables = zip(sequence.tables, self._tables.first_needed(len(sequence.tokens)), strict=True)
        return list(sequence.tokens), [list(table[first:]) for table, first in tables]

    def import_(self, seq_id: int, tokens: Sequence[int], key: bytes | None = None) -> list[list[int]]:
        """Gives an empty sequence positions whose KV the caller will write.

        Args:
            tokens: as `export` returned them.
            key: under which blocks computed from here on are cached, for content that came from this cache;
                with None they never are, so that content from elsewhere cannot reach another sequence.

        Returns:
            Per group, the new blocks' ids, to be filled with what `export`'s blocks contained, in that order.

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
        sequence.key = key
        if key is not None and self._tables.prefix_cache is not None:
            # Named, but not cached: the caller has yet to fill them.
            self._tables.prefix_cache.extend_hashes(sequence.hashes, sequence.tokens, key)
        return filled

    # Capacity

    def counts(self, group: int | None = None) -> BlockCounts:
        """How many blocks a group has, or all groups together."""
        pools = self._tables.pools if group is None else (self._tables.pools[group],)
        used = sum(pool.num_used for pool in pools)
        total = sum(pool.num_blocks for pool in pools)
        return BlockCounts(total, used, total - used, sum(pool.num_initialized for pool in pools))

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Per group, the blocks that can be allocated."""
        return tuple(pool.num_free for pool in self._tables.pools)

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """The prefix cache with its counters; None while blocks are not shared by content."""
        return self._tables.prefix_cache

    def exclusive_blocks(self, seq_id: int) -> tuple[int, ...]:
        """Per group, the blocks that would become free if this sequence alone were removed."""
        sequence = sequence_of(self._tables, seq_id)
        exclusive = []
        for pool, table, evicted in zip(self._tables.pools, sequence.tables, sequence.evicted, strict=True):
            exclusive.append(sum(pool.references[block] == 1 for block in table[evicted:]))
        return tuple(exclusive)

    def needed_to_completion(self, prompt_len: int, max_new_tokens: int) -> tuple[int, ...]:
        """Per group, the most blocks that a request alone holds until it has produced all its tokens.

        The last token is never evaluated, so the full length is prompt_len + max_new_tokens - 1 positions. A
        windowed group holds no more than its window spans; a prefill chunk in flight comes on top of that.
        """
        return self._most_held(prompt_len + max(0, max_new_tokens - 1))

    def blocks_to_reach(self, seq_id: int, length: int) -> tuple[int, ...]:
        """Per group, how many more blocks a sequence takes until it holds `length` positions."""
        sequence = sequence_of(self._tables, seq_id)
        more = []
        for group, most in enumerate(self._most_held(length)):
            held = len(sequence.tables[group]) - sequence.evicted[group]
            copied = length > len(sequence.tokens) and self._tables.shared_tail(group, sequence) is not None
            more.append(max(0, most - held) + copied)
        return tuple(more)

    def is_writable(self, seq_id: int, length: int) -> bool:
        """Whether a sequence can grow to `length` positions without a new block; it may not know that it can."""
        return length <= sequence_of(self._tables, seq_id).writable

    def can_admit(self, prompt_len: int, max_new_tokens: int = 0) -> bool:
        """Whether every group has the free blocks that such a request needs, shared prefixes aside."""
        needed = self.needed_to_completion(prompt_len, max_new_tokens)
        return all(count <= pool.num_free for count, pool in zip(needed, self._tables.pools, strict=True))

    def can_ever_admit(self, prompt_len: int, max_new_tokens: int = 0) -> bool:
        """Whether such a request fits when nothing else is there."""
        if prompt_len + max(0, max_new_tokens - 1) > self._cap:
            return False
        needed = self.needed_to_completion(prompt_len, max_new_tokens)
        return all(count <= total for count, total in zip(needed, self.num_blocks, strict=True))

    def check_integrity(self) -> None:
        """Raises AssertionError unless tables, reference counts, pools and the prefix cache agree."""
        self._tables.check_integrity(self._open.replaced() if self._open is not None else ())

    # Helpers

    def _close(self) -> None:
        assert self._open is not None, "a reservation ends once"
        self._open = None

    def _assert_idle(self) -> None:
        assert self._open is None, "a step is in progress: its reservation is neither committed nor rolled back"

    def _most_held(self, length: int) -> tuple[int, ...]:
        whole = self._tables.blocks(length)
        # A window that starts at the last position of a block spans one block more than its size says.
        return tuple(
            whole if group.window is None else min(whole, self._tables.blocks(group.window - 1) + 1)
            for group in self.groups
        )
