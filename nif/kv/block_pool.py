"""The blocks of one layer group: which are free, which are held how often, which still have known content.

    pool = BlockPool(512)
    first, second = pool.allocate(2)
    pool.share(first)      # a second block table holds it
    pool.release(first)    # still held once

A block is used (held at least once), free without known content (uninitialized), or free with the content and
the hash it had when it was released (initialized), so that a later prompt may take it back. Every operation
is O(1) a block; ids are 0 .. num_blocks - 1.
"""

from collections.abc import Callable, Iterable, Sequence

from genbatch.nif.errors import OptionError, OutOfBlocks


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

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, initialized ones included."""
        return len(self._uninitialized) + len(self._initialized)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_initialized(self) -> int:
        """Free blocks whose content is still known."""
        return len(self._initialized)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each held once; uninitialized ones first.

        When those run out, initialized blocks are demoted, the least recently released first.

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
                block = next(iter(self._initialized))
                del self._initialized[block]
                self._forget(block)
            self.references[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """Holds a block once more; an initialized free block becomes used again with its content."""
        if self.references[block] == 0:
            assert block in self._initialized, f"block {block} is free and has no content to share"
            del self._initialized[block]
        self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Holds each block once less, in this order; one held no more is free, and initialized if hashed."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                if self.hashes[block] is None:
                    self._uninitialized.append(block)
                else:
                    self._initialized[block] = None
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
            assert counted == expected, f"block {block} is counted {counted} times and held {expected} times"
        free = self._uninitialized + list(self._initialized)
        used = [block for block, count in enumerate(self.references) if count > 0]
        assert sorted(free + used) == list(range(self.num_blocks)), "free and used blocks do not partition the ids"
        for block in self._uninitialized:
            assert self.hashes[block] is None, f"uninitialized block {block} has a hash"
        for block in self._initialized:
            assert self.hashes[block] is not None, f"initialized block {block} has no hash"

    def _forget(self, block: int) -> None:
        content = self.hashes[block]
        assert content is not None
        self.hashes[block] = None
        if self._on_forget is not None:
            self._on_forget(content)
