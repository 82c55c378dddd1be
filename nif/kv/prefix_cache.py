"""The prefix cache: which block holds which tokens after which tokens, for whom.

A completed block's name is SHA-256 over the name of the block before it and its own token ids; the first
block's parent is derived from a key, so that owners with different keys never find each other's blocks, not
even by timing. The cache holds no references: a block that nobody uses stays findable until the allocator
takes it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

# Keeps a key that a client chose from being read as (parent, tokens) of some block.
_ROOT = b"genbatch prefix root\0"


def prefix_key(tenant: str, adapter: str = "") -> bytes:
    """The key under which a tenant's blocks are cached; `adapter` is the digest of the one they were computed with."""
    name = tenant.encode()
    return len(name).to_bytes(8, "little") + name + adapter.encode()


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known run of blocks that continues what a sequence holds."""

    hashes: list[bytes]  # the run's names
    blocks: list[tuple[int, ...]]  # the run's block ids, per layer group


class PrefixCache:
    """Finds blocks by content.

    Args:
        block_size: positions a block holds.
        num_groups: layer groups; a block is known only if every group has it.
    """

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        self.num_queries = 0  # prompts looked up
        self.num_hits = 0  # prompts of which at least one block was found
        self.num_query_tokens = 0  # tokens of those prompts that could have been found
        self.num_hit_tokens = 0  # tokens found
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]

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

        Costs one hash a block found, and one more.

        Args:
            tokens: a whole prompt.
            key: see `prefix_key`.
            held: names of the prompt's first blocks, which are not looked up.
            max_blocks: most blocks to cover, held ones included; None means all whole ones.
        """
        limit = len(tokens) // self.block_size
        if max_blocks is not None:
            limit = min(limit, max_blocks)
        match = Match([], [])
        parent = held[-1] if held else root_hash(key)
        for index in range(len(held), limit):
            parent = self._name(parent, tokens, index)
            blocks = tuple(known[parent] for known in self._blocks if parent in known)
            if len(blocks) < len(self._blocks):
                break
            match.hashes.append(parent)
            match.blocks.append(blocks)
        self.num_queries += 1
        self.num_hits += bool(match.blocks)
        self.num_query_tokens += max(0, limit - len(held)) * self.block_size
        self.num_hit_tokens += len(match.blocks) * self.block_size
        return match

    def known_run(self, tokens: Sequence[int], key: bytes, names: list[bytes], first: int, limit: int) -> int:
        """Up to which block, from `first` on and at most `limit`, all of the prompt's are known; counts as no query.

        Args:
            names: of the prompt's first blocks; those that are missing and needed are appended.
        """
        for index in range(first, limit):
            while len(names) <= index:
                parent = names[-1] if names else root_hash(key)
                names.append(self._name(parent, tokens, len(names)))
            if not all(names[index] in known for known in self._blocks):
                return index
        return limit

    def blocks(self, name: bytes) -> list[int]:
        """Per group, the block with a known name."""
        return [known[name] for known in self._blocks]

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
        return sha256(parent + array("q", tokens[start : start + self.block_size]).tobytes()).digest()


def root_hash(key: bytes) -> bytes:
    """What stands for the parent of a first block."""
    return sha256(_ROOT + key).digest()
