"""What the KV cache knows of one sequence."""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class KVSequence:
    """A sequence's tokens and block tables; the index of a table entry is position // block_size in every group."""

    tables: list[array[int]]  # per group; the first evicted[g] entries are the placeholder 0
    evicted: list[int]  # per group, leading blocks that fell behind the window
    tokens: array[int] = field(default_factory=lambda: array("q"))  # of the positions held
    hashes: list[bytes] = field(default_factory=list)  # names of its whole blocks, for the prefix cache
    key: bytes | None = b""  # under which its blocks are cached; None: never, their content came from outside
    # Positions below `writable` can be written without asking the pool; it may say less than is true, never more.
    writable: int = 0
    wake: int = 0  # the length at which a block completes or falls behind a window; may be too low, never too high

    @classmethod
    def empty(cls, num_groups: int) -> "KVSequence":
        return cls(tables=[array("i") for _ in range(num_groups)], evicted=[0] * num_groups)
