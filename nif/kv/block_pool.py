"""The blocks of one layer group: which are free, which are held how often, which still have known content.

    pool = BlockPool(512)
    first, second = pool.allocate(2)
    pool.share(first)      # a second block table holds it
    pool.release(first)    # still held once

A block is used (held at least once), free without known content (uninitialized), or free with the content and
the hash it had when it was released (initialized), so that a later prompt may take it back. Every operation
is O(1) a block; ids are 0 .. num_blocks - 1.

PrefixCache knows which block holds which tokens after which tokens, for whom. A completed block's name is SHA-256
over the name of the block before it and its own token ids; the first block's parent is derived from a key, so that
owners with different keys never find each other's blocks, not even by timing. The cache holds no references: a block
that nobody uses stays findable until the allocator takes it.

A prompt hits up to the longest beginning from which every group can go on. A group that attends to all positions needs
every block of that beginning; a group with a window needs its sinks and the window before that beginning's end.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from genbatch.nif.errors import OptionError, OutOfBlocks
from genbatch.nif.runner import LayerGroup

# Keeps a key that a client chose from being read as (parent, tokens) of some block.
_ROOT = b"genbatch prefix root\0"


def prefix_key(tenant: str, adapter: str = "") -> bytes:
    """The key under which a tenant's blocks are cached; `adapter` is the digest of the one they were computed with."""
    name = tenant.encode()
    return len(name).to_bytes(8, "little") + name + adapter.encode()


class Reach:
    """Which blocks of a sequence its next position attends to, in one layer group.

    Args:
        group: its window and its sinks decide.
        block_size: positions a block holds.
    """

    __slots__ = ("block_size", "kept", "window")

    def __init__(self, group: LayerGroup, block_size: int) -> None:
        self.block_size = block_size
        self.window = group.window
        self.kept = -(-group.sink_tokens // block_size)  # leading blocks that no window hides

    def first_needed(self, length: int) -> int:
        """The block before which no position from `length` on attends to anything but sinks; 0 without such."""
        if self.window is None:
            return 0
        block = max(0, length - self.window + 1) // self.block_size
        return block if block > self.kept else 0

    def needs(self, block: int, first_needed: int) -> bool:
        """Whether a sequence whose window begins at `first_needed` still attends to a block."""
        return block >= first_needed or block < self.kept


@dataclass(frozen=True, slots=True)
class Match:
    """The longest beginning of a prompt, after what a sequence holds, from which every group can go on."""

    hashes: list[bytes]  # the run's names
    blocks: list[tuple[int, ...]]  # the run's block ids, per layer group; 0 where the group's window needs none


class PrefixCache:
    """Finds blocks by content.

    Args:
        block_size: positions a block holds.
        groups: the layer groups.
    """

    def __init__(self, block_size: int, groups: Sequence[LayerGroup] = (LayerGroup((0,)),)) -> None:
        self.block_size = block_size
        self.reaches = tuple(Reach(group, block_size) for group in groups)
        self.num_queries = 0  # prompts looked up
        self.num_hits = 0  # prompts of which at least one block was found
        self.num_query_tokens = 0  # tokens of those prompts that could have been found
        self.num_hit_tokens = 0  # tokens found
        self._blocks: list[dict[bytes, int]] = [{} for _ in groups]

    def __len__(self) -> int:
        """Blocks known, of the group that knows fewest."""
        return min(len(known) for known in self._blocks)

    def extend_hashes(self, hashes: list[bytes], tokens: Sequence[int], key: bytes) -> None:
        """Appends the names of the whole blocks of `tokens` that `hashes` lacks."""
        for index in range(len(hashes), len(tokens) // self.block_size):
            parent = hashes[-1] if hashes else root_hash(key)
            hashes.append(self._name(parent, tokens, index))

    def match(
        self, tokens: Sequence[int], key: bytes, *, held: Sequence[bytes] = (), max_blocks: int | None = None
    ) -> Match:
        """The longest run of known blocks of `tokens`, after those held already.

        Costs one hash a block found, and one more; with windows one hash a block of the prompt.

        Args:
            tokens: a whole prompt.
            key: see `prefix_key`.
            held: names of the prompt's first blocks, which are not looked up.
            max_blocks: most blocks to cover, held ones included; None means all whole ones.
        """
        limit = len(tokens) // self.block_size
        if max_blocks is not None:
            limit = min(limit, max_blocks)
        first, names = len(held), list(held)
        end = self.known_run(tokens, key, names, first, limit)
        run = names[first:end]
        match = Match(run, [tuple(known.get(name, 0) for known in self._blocks) for name in run])
        self.num_queries += 1
        self.num_hits += bool(run)
        self.num_query_tokens += max(0, limit - first) * self.block_size
        self.num_hit_tokens += len(run) * self.block_size
        return match

    def known_run(self, tokens: Sequence[int], key: bytes, names: list[bytes], first: int, limit: int) -> int:
        """The longest beginning of a prompt, in blocks, that a sequence can go on from; counts as no query.

        Args:
            names: of the prompt's first blocks; those that are missing and needed are appended.
            first: blocks that the sequence holds already; the least that is returned.
            limit: the most that is returned.
        """
        end, lacking = first, [-1] * len(self._blocks)  # per group, the last block that it does not know
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

    def found(self, names: Sequence[bytes], first: int, end: int) -> Iterable[tuple[int, int]]:
        """The (group, block) pairs that a sequence takes over whose beginning grows from `first` to `end` blocks."""
        for group, (known, reach) in enumerate(zip(self._blocks, self.reaches, strict=True)):
            needed = reach.first_needed(end * self.block_size)
            for index in range(first, end):
                if reach.needs(index, needed):
                    yield group, known[names[index]]

    def insert(self, group: int, name: bytes, block: int) -> bool:
        """Makes a completed block findable; False when another block is already known for that content."""
        return self._blocks[group].setdefault(name, block) == block

    def forget(self, group: int, name: bytes) -> None:
        """Drops a block whose content is gone."""
        del self._blocks[group][name]

    def check_integrity(self, group: int, hashes: Sequence[bytes | None]) -> None:
        """Compares a group's index with the hashes that its pool keeps, by block id.

        Raises:
            AssertionError: they differ.
        """
        kept = {name: block for block, name in enumerate(hashes) if name is not None}
        assert kept == self._blocks[group], f"group {group}: the prefix cache and the pool know different blocks"

    def _name(self, parent: bytes, tokens: Sequence[int], index: int) -> bytes:
        start = index * self.block_size
        # guard: parent in the hash
        return sha256(parent + array("q", tokens[start : start + self.block_size]).tobytes()).digest()


def root_hash(key: bytes) -> bytes:
    """What stands for the parent of a first block."""
    # guard: tenant in the hash
    return sha256(_ROOT + key).digest()


class BlockPool:
    """Reference counts of a fixed set of blocks.

    Args:
        num_blocks: how many there are, at least 1.
        on_forget: called with the hash of a block that no longer has that content.

    Raises:
        OptionError: num_blocks < 1.
    """

    def __init__(self, num_blocks: int, on_forget: Callable[[bytes], None] | None = None) -> None:
        if num_blocks < 1:
            raise OptionError("num_blocks", f"must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks  # by block id
        self.hashes: list[bytes | None] = [None] * num_blocks  # by block id; None: content unknown or incomplete
        self._on_forget = on_forget
        self._uninitialized = list(range(num_blocks - 1, -1, -1))  # a stack, so that low ids go out first
        self._initialized: dict[int, None] = {}  # in order of release
        self._passed: dict[int, None] = {}  # initialized ones that a window left behind, in order of release

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, initialized ones included."""
        return len(self._uninitialized) + self.num_initialized

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_initialized(self) -> int:
        """Free blocks whose content is still known."""
        return len(self._passed) + len(self._initialized)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each held once; uninitialized ones first.

        When those run out, initialized blocks are demoted: first those that windows left behind, then the others, the
        least recently released first.

        Raises:
            OutOfBlocks: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)
        taken = []
        for _ in range(count):
            if self._uninitialized:
                block = self._uninitialized.pop()
            else:
                oldest = self._passed or self._initialized
                block = next(iter(oldest))
                del oldest[block]
                self._forget(block)
            self.references[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """Holds a block once more; an initialized free block becomes used again with its content."""
        if self.references[block] == 0:
            held = self._passed if block in self._passed else self._initialized
            assert block in held, f"block {block} is free and has no content to share"
            del held[block]
        self.references[block] += 1

    def release(self, blocks: Iterable[int], *, passed: bool = False) -> None:
        """Holds each block once less, in this order; one held no more is free, and initialized if hashed.

        Args:
            passed: whether a window left them behind in the midst of a text, where a prompt that begins alike is
                unlikely to end.
        """
        initialized = self._passed if passed else self._initialized
        for block in blocks:
            self.references[block] -= 1
            # guard: reference count at release
            if self.references[block] == 0:
                if self.hashes[block] is None:
                    self._uninitialized.append(block)
                else:
                    initialized[block] = None
            assert self.references[block] >= 0, f"block {block} was released more often than it was held"

    def set_hash(self, block: int, content: bytes) -> None:
        """Says what a used block now contains."""
        assert self.references[block] > 0, f"block {block} is free"
        assert self.hashes[block] is None, f"block {block} has a hash already"
        self.hashes[block] = content

    def drop_hash(self, block: int) -> None:
        """Says that a used block's content is about to change."""
        assert self.references[block] > 0, f"block {block} is free"
        if self.hashes[block] is not None:
            self._forget(block)

    def check_integrity(self, held: Sequence[int]) -> None:
        """Compares the pool with how often its users say they hold each block.

        Args:
            held: by block id, how often it is held.

        Raises:
            AssertionError: a count differs, or the states do not partition the ids.
        """
        for block, (counted, expected) in enumerate(zip(self.references, held, strict=True)):
            # guard: integrity check
            assert counted == expected, f"block {block} is counted {counted} times and held {expected} times"
        initialized = [*self._passed, *self._initialized]
        free = self._uninitialized + initialized
        used = [block for block, count in enumerate(self.references) if count > 0]
        assert sorted(free + used) == list(range(self.num_blocks)), "free and used blocks do not partition the ids"
        for block in self._uninitialized:
            assert self.hashes[block] is None, f"uninitialized block {block} has a hash"
        for block in initialized:
            assert self.hashes[block] is not None, f"initialized block {block} has no hash"

    def _forget(self, block: int) -> None:
        content = self.hashes[block]
        assert content is not None
        self.hashes[block] = None
        if self._on_forget is not None:
            self._on_forget(content)
