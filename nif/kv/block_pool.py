"""Block pools and the prefix cache: reference counts of blocks, and lookup of blocks by content.

    pool = BlockPool(512)
    first, second = pool.allocate(2)
    pool.share(first)      # a second block table refers to the block
    pool.release([first])  # one reference is left

A block is in one of three states. A used block has at least one reference. A free block without known content is
uninitialized. A free block with known content and a hash is initialized, and a later prompt may reuse it. Every
operation is O(1) per block; ids are 0 .. num_blocks - 1.

PrefixCache maps content to blocks. A completed block's name is SHA-256 over the previous block's name and the block's
own token ids. The first block's parent is derived from a key, so owners with different keys never hit each other's
blocks, not even by timing. The cache holds no references: a free block stays in the cache until it is allocated again.

The last token of a prompt is always evaluated. The positions before it that fill no block are the prompt's tail. The
block with the tail has a second name, over the tail's tokens alone, so the same prompt finds its tail, too.

A prefix hit is the longest prefix of a prompt from which every group can continue. A group that attends to all
positions needs every block of the prefix. A group with a window needs its sinks and the window before the prefix's end.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import monotonic
from typing import TypeVar

from genbatch.nif.errors import OptionError, OutOfBlocks
from genbatch.nif.runner import LayerGroup

# A hash prefix, so that no key that a client chooses hashes like the (parent, tokens) of a block.
_ROOT = b"genbatch prefix root\0"


def prefix_key(tenant: str, adapter: str = "") -> bytes:
    """Return the prefix cache's key for a tenant's blocks; `adapter` is the adapter's digest."""
    name = tenant.encode()
    return len(name).to_bytes(8, "little") + name + adapter.encode()


class Reach:
    """Computes the blocks of a sequence that the next position attends to, in one layer group.

    Args:
        group: its window and its sinks determine the blocks.
        block_size: positions per block.
    """

    __slots__ = ("block_size", "kept", "window")

    def __init__(self, group: LayerGroup, block_size: int) -> None:
        self.block_size = block_size
        self.window = group.window
        self.kept = -(-group.sink_tokens // block_size)  # leading blocks that no window hides

    def first_needed(self, length: int) -> int:
        """Return the first block after the sinks that positions from `length` on attend to; 0 if none is skipped."""
        if self.window is None:
            return 0
        block = max(0, length - self.window + 1) // self.block_size
        return block if block > self.kept else 0

    def needs(self, block: int, first_needed: int) -> bool:
        """Return whether a sequence still attends to a block when its window begins at block `first_needed`."""
        return block >= first_needed or block < self.kept


# Why tokens are evaluated again, see `num_recomputed`; of several causes, the first one counts.
EVICTED, NO_SNAPSHOT, WINDOW, VOLATILE_LINE = "evicted", "no_snapshot", "window", "volatile_line"
CAUSES = (EVICTED, NO_SNAPSHOT, WINDOW, VOLATILE_LINE)

_MAX_REMEMBERED = 1 << 16  # names and contents of blocks, for the counters of causes


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix hit: the known blocks that follow a sequence's own blocks and from which every group can continue."""

    hashes: list[bytes]  # the names of the hit blocks
    blocks: list[tuple[int, ...]]  # the hit blocks' ids, per layer group; 0 if the group does not know the block


class PrefixCache:
    """Finds blocks by content.

    Args:
        block_size: positions a block holds.
        groups: the layer groups.

    Attributes:
        num_query_tokens: tokens of the prompts that were looked up, in whole blocks.
        num_hit_tokens: those of them that were cached.
        num_recomputed: by cause, tokens of whole blocks that this cache had before and that are evaluated again.
            "evicted": a group that attends to all positions lost the block. "no_snapshot": the states of recurrent
            layers at the block's end were evicted. "window": a window's blocks were evicted. "volatile_line": the
            block's own tokens were seen under this key, but after another beginning.
    """

    def __init__(self, block_size: int, groups: Sequence[LayerGroup] = (LayerGroup((0,)),)) -> None:
        self.block_size = block_size
        self.reaches = tuple(Reach(group, block_size) for group in groups)
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_recomputed = dict.fromkeys(CAUSES, 0)
        # Per group, why tokens are evaluated again if it alone lacks a block.
        self._causes = [NO_SNAPSHOT if g.recurs else EVICTED if g.window is None else WINDOW for g in groups]
        self._blocks: list[dict[bytes, int]] = [{} for _ in groups]
        self._lost: dict[bytes, None] = {}  # names of evicted blocks, in order of eviction
        self._kept: dict[bytes, float] = {}  # names of blocks, and until when callers asked to keep them
        self._contents: dict[int, None] = {}  # hashes of a key and a block's own tokens, in order of the first use

    def __len__(self) -> int:
        """Return the number of cached blocks, of the group that has the fewest."""
        return min(len(known) for known in self._blocks)

    def extend_hashes(self, hashes: list[bytes], tokens: Sequence[int], key: bytes) -> None:
        """Append the names of the whole blocks of `tokens` that `hashes` lacks."""
        for index in range(len(hashes), len(tokens) // self.block_size):
            parent = hashes[-1] if hashes else root_hash(key)
            hashes.append(self._name(parent, tokens, index))
            _remember(self._contents, self._content(tokens, key, index), None)

    def match(
        self, tokens: Sequence[int], key: bytes, *, first_names: Sequence[bytes] = (), max_blocks: int | None = None
    ) -> Match:
        """Look up a prompt: find the longest run of cached blocks after those that the sequence has already.

        The cost is one hash per hit block and one more. With windows the cost is one hash per block of the prompt.

        Args:
            tokens: a whole prompt.
            key: see `prefix_key`.
            first_names: names of the prompt's first blocks, which the sequence has and which are not looked up.
            max_blocks: most blocks to cover, including `first_names`; None means all whole blocks.
        """
        limit = len(tokens) // self.block_size
        if max_blocks is not None:
            limit = min(limit, max_blocks)
        first, names = len(first_names), list(first_names)
        end = self.known_run(tokens, key, names, first, limit)
        run = names[first:end]
        match = Match(run, [tuple(known.get(name, 0) for known in self._blocks) for name in run])
        self.num_query_tokens += max(0, limit - first) * self.block_size
        self.num_hit_tokens += len(run) * self.block_size
        if end < limit:
            self._count_recomputed(tokens, key, names, end, limit)
        return match

    def _count_recomputed(self, tokens: Sequence[int], key: bytes, names: list[bytes], end: int, limit: int) -> None:
        """Count the tokens after a hit's end that were evaluated before, by cause; see `num_recomputed`."""
        index, fresh = end, False
        while index < limit and not fresh:
            while len(names) <= index:
                names.append(self._name(names[-1] if names else root_hash(key), tokens, len(names)))
            fresh = names[index] not in self._lost and not any(names[index] in known for known in self._blocks)
            index += not fresh
        if index > end:
            groups = zip(self._blocks, self._causes, strict=True)
            cause = min((CAUSES.index(cause) for known, cause in groups if names[end] not in known), default=0)
            self.num_recomputed[CAUSES[cause]] += (index - end) * self.block_size
        seen = sum(self._content(tokens, key, block) in self._contents for block in range(index, limit))
        self.num_recomputed[VOLATILE_LINE] += seen * self.block_size

    def names(self, tokens: Sequence[int], key: bytes, count: int) -> list[bytes]:
        """Return the names of the first `count` blocks of `tokens`."""
        names: list[bytes] = []
        for index in range(count):
            names.append(self._name(names[-1] if names else root_hash(key), tokens, index))
        return names

    def known_run(self, tokens: Sequence[int], key: bytes, names: list[bytes], first: int, limit: int) -> int:
        """Return the length of a prefix hit in blocks. The counters do not change.

        Args:
            names: names of the prompt's first blocks; missing names are appended as needed.
            first: blocks that the sequence holds already, and the minimum of the result.
            limit: the maximum of the result.
        """
        end, lacking = first, [-1] * len(self._blocks)  # per group, the last block that the cache lacks
        for index in range(first, limit):
            while len(names) <= index:
                parent = names[-1] if names else root_hash(key)
                names.append(self._name(parent, tokens, len(names)))
            for group, (known, reach) in enumerate(zip(self._blocks, self.reaches, strict=True)):
                if names[index] not in known:
                    if reach.window is None or index < reach.kept:
                        return end
                    lacking[group] = index
            length = (index + 1) * self.block_size
            # guard: a hit needs the whole window
            if all(lack < reach.first_needed(length) for lack, reach in zip(lacking, self.reaches, strict=True)):
                end = index + 1
        return end

    def entries(self, names: Sequence[bytes], first: int, end: int, length: int) -> Iterable[tuple[int, int]]:
        """Return the (group, block) pairs that a sequence shares when its prefix grows from `first` to `end` blocks.

        Args:
            length: the positions of the prefix, its tail included.
        """
        for group, (known, reach) in enumerate(zip(self._blocks, self.reaches, strict=True)):
            needed = reach.first_needed(length)
            for index in range(first, end):
                if reach.needs(index, needed):
                    yield group, known[names[index]]

    def tail_name(self, tokens: Sequence[int], key: bytes, names: Sequence[bytes], end: int) -> bytes:
        """Return the name of the tail that ends before position `end`, within a block.

        Args:
            tokens, key: see `match`.
            names: names of the whole blocks before it.
        """
        index = end // self.block_size
        return self._name(names[index - 1] if index else root_hash(key), tokens, index, end)

    def tail(self, tokens: Sequence[int], key: bytes, names: Sequence[bytes], end: int) -> tuple[int, ...] | None:
        """Look up a tail; returns its block in each group, or None if a group does not know it."""
        if end % self.block_size == 0:
            return None
        name = self.tail_name(tokens, key, names, end)
        blocks = [known[name] for known in self._blocks if name in known]
        return tuple(blocks) if len(blocks) == len(self._blocks) else None

    def keep(self, tokens: Sequence[int], key: bytes, ttl_s: float) -> None:
        """Ask to keep a prompt's whole blocks: for `ttl_s` seconds, other blocks are evicted before them."""
        until = monotonic() + ttl_s
        for name in self.names(tokens, key, len(tokens) // self.block_size):
            until = max(until, self._kept.pop(name, until))
            _remember(self._kept, name, until)

    def kept_until(self, name: bytes) -> float:
        """Return the time until which callers asked to keep a block; 0 if none did."""
        return self._kept.get(name, 0.0)

    def block(self, group: int, name: bytes) -> int | None:
        """Return the block with this content; None if it is not cached."""
        return self._blocks[group].get(name)

    def insert(self, group: int, name: bytes, block: int) -> bool:
        """Add a block to the cache; returns False if another block with that content is cached."""
        self._lost.pop(name, None)
        return self._blocks[group].setdefault(name, block) == block

    def forget(self, group: int, name: bytes) -> None:
        """Remove a block from the cache, because its content is gone."""
        del self._blocks[group][name]
        _remember(self._lost, name, None)

    def check_integrity(self, group: int, names: dict[bytes, int]) -> None:
        """Compare a group's index with the names of its pool's blocks.

        Raises:
            AssertionError: they differ.
        """
        assert names == self._blocks[group], f"group {group}: the prefix cache and the pool know different blocks"

    def _name(self, parent: bytes, tokens: Sequence[int], index: int, end: int | None = None) -> bytes:
        start = index * self.block_size
        # guard: parent in the hash
        return sha256(parent + array("q", tokens[start : end or start + self.block_size]).tobytes()).digest()

    def _content(self, tokens: Sequence[int], key: bytes, index: int) -> int:
        start = index * self.block_size
        return hash((key, array("q", tokens[start : start + self.block_size]).tobytes()))


_Name = TypeVar("_Name")
_Value = TypeVar("_Value")


def _remember(names: dict[_Name, _Value], name: _Name, value: _Value) -> None:
    """Add a name; the oldest one is dropped when there are too many."""
    names[name] = value
    if len(names) > _MAX_REMEMBERED:
        del names[next(iter(names))]


def root_hash(key: bytes) -> bytes:
    """Return the parent name of a first block."""
    # guard: tenant in the hash
    return sha256(_ROOT + key).digest()


class BlockPool:
    """Counts the references to a fixed set of blocks and allocates free ones.

    Args:
        num_blocks: number of blocks, at least 1.
        on_forget: called with a block's hash, or its tail's name, when the block loses that content.
        kept_until: returns the time of `monotonic` until which callers asked to keep the block with a hash.

    Attributes:
        max_kept: most free blocks that are kept because callers asked for it.

    Raises:
        OptionError: num_blocks < 1.
    """

    def __init__(
        self,
        num_blocks: int,
        on_forget: Callable[[bytes], None] | None = None,
        kept_until: Callable[[bytes], float] = lambda content: 0.0,
    ) -> None:
        if num_blocks < 1:
            raise OptionError("num_blocks", f"must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks  # by block id
        self.hashes: list[bytes | None] = [None] * num_blocks  # by block id; None: content unknown or incomplete
        self.versions = [0] * num_blocks  # by block id: how often it lost its content; other threads read this
        self.tails: dict[int, tuple[bytes, int]] = {}  # by block id: the name and the length of a tail in it
        self.max_kept = 0
        self._on_forget = on_forget
        self._kept_until = kept_until
        self._uninitialized = list(range(num_blocks - 1, -1, -1))  # a stack, so that low ids are allocated first
        self._initialized: dict[int, None] = {}  # in order of release
        self._passed: dict[int, None] = {}  # initialized blocks that fell behind a window, in order of release
        self._kept: dict[int, None] = {}  # initialized blocks that callers asked to keep, in order of release
        self._next_end = math.inf  # a time before which no kept block's time ends

    @property
    def num_free(self) -> int:
        """Return the number of blocks that can be allocated, initialized blocks included."""
        return len(self._uninitialized) + self.num_initialized

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_initialized(self) -> int:
        """Return the number of free blocks with known content."""
        return len(self._passed) + len(self._initialized) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Return the number of free blocks that are evicted last, because callers asked to keep them."""
        self._end_keeping()
        return len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each; uninitialized blocks go first.

        When those run out, initialized blocks are evicted: first blocks that fell behind a window, then the others, and
        last those that callers asked to keep. In each case the least recently released block is evicted first.

        Raises:
            OutOfBlocks: fewer blocks are free; nothing was taken.
        """
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)
        taken = []
        for _ in range(count):
            if self._uninitialized:
                block = self._uninitialized.pop()
            else:
                self._end_keeping()
                oldest = self._passed or self._initialized or self._kept
                block = next(iter(oldest))
                del oldest[block]
                self._forget(block)
                self._forget_tail(block)
            self.references[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """Add a reference to a block. An initialized free block becomes used again and keeps its content."""
        if self.references[block] == 0:
            places = (self._passed, self._initialized, self._kept)
            place = next((place for place in places if block in place), None)
            assert place is not None, f"block {block} is free and has no content to share"
            del place[block]
        self.references[block] += 1

    def release(self, blocks: Iterable[int], *, passed: bool = False) -> None:
        """Drop one reference to each block, in this order. A block without references becomes free.

        A free block with a hash is initialized.

        Args:
            passed: whether the blocks fell behind a window in the middle of a text. Later prompts are unlikely to hit
                such blocks, so they are evicted first.
        """
        initialized = self._passed if passed else self._initialized
        for block in blocks:
            self.references[block] -= 1
            # guard: reference count at release
            if self.references[block] == 0:
                if self.hashes[block] is None and block not in self.tails:
                    self._uninitialized.append(block)
                elif passed or not self._keep(block):
                    initialized[block] = None
            assert self.references[block] >= 0, f"block {block} was released more often than it was held"

    def set_hash(self, block: int, content: bytes) -> None:
        """Set the hash of a used block's content."""
        assert self.references[block] > 0, f"block {block} is free"
        assert self.hashes[block] is None, f"block {block} has a hash already"
        self.hashes[block] = content

    def set_tail(self, block: int, name: bytes, length: int) -> None:
        """Set the name of a used block's first positions, which are a prompt's tail."""
        assert self.references[block] > 0, f"block {block} is free"
        assert block not in self.tails, f"block {block} has a tail already"
        self.tails[block] = name, length

    def overwrite(self, block: int, offset: int) -> None:
        """Drop the names of a used block's content before its positions from `offset` on change."""
        assert self.references[block] > 0, f"block {block} is free"
        self._forget(block)
        # guard: a tail that changes loses its name
        if block in self.tails and offset < self.tails[block][1]:
            self._forget_tail(block)

    def names(self) -> dict[bytes, int]:
        """Return the blocks by name."""
        hashes = {name: block for block, name in enumerate(self.hashes) if name is not None}
        return hashes | {name: block for block, (name, _) in self.tails.items()}

    def check_integrity(self, expected_references: Sequence[int]) -> None:
        """Compare the reference counts with the users' own counts.

        Args:
            expected_references: by block id, the number of references that the users have.

        Raises:
            AssertionError: a count differs, or the states do not partition the ids.
        """
        for block, (counted, expected) in enumerate(zip(self.references, expected_references, strict=True)):
            # guard: integrity check
            assert counted == expected, f"block {block} is counted {counted} times and held {expected} times"
        initialized = [*self._passed, *self._initialized, *self._kept]
        assert len(self._kept) <= self.max_kept, "more blocks are kept than the operator allows"
        free = self._uninitialized + initialized
        used = [block for block, count in enumerate(self.references) if count > 0]
        assert sorted(free + used) == list(range(self.num_blocks)), "free and used blocks do not partition the ids"
        for block in self._uninitialized:
            assert self.hashes[block] is None, f"uninitialized block {block} has a hash"
            assert block not in self.tails, f"uninitialized block {block} has a tail"
        for block in initialized:
            assert self.hashes[block] is not None or block in self.tails, f"initialized block {block} has no hash"

    def _keep(self, block: int) -> bool:
        """Keep a block that becomes free if callers asked for it. More than `max_kept` push out the oldest one."""
        content = self.hashes[block]
        until = 0.0 if content is None or not self.max_kept else self._kept_until(content)
        if until <= monotonic():
            return False
        self._next_end = min(self._next_end, until)
        self._kept[block] = None
        if len(self._kept) > self.max_kept:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._initialized[oldest] = None
        return True

    def _end_keeping(self) -> None:
        """Stop keeping blocks after their time. They then count as the blocks that were released last."""
        now = monotonic() if self._kept else 0.0
        if not self._kept or now < self._next_end:
            return
        self._next_end = math.inf
        for block in list(self._kept):
            until = self._kept_until(self.hashes[block] or b"")
            if until <= now:
                del self._kept[block]
                self._initialized[block] = None
            else:
                self._next_end = min(self._next_end, until)

    def _forget(self, block: int) -> None:
        content = self.hashes[block]
        if content is not None:
            self.hashes[block] = None
            self.versions[block] += 1
            if self._on_forget is not None:
                self._on_forget(content)

    def _forget_tail(self, block: int) -> None:
        if block in self.tails:
            name, _ = self.tails.pop(block)
            if self._on_forget is not None:
                self._on_forget(name)
