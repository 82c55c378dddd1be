"""Blocks: numbers of KV blocks, one for each pool of the model's layer groups, that schedulers add and compare."""

import math
from collections.abc import Iterable, Iterator
from typing import Union

Count = Union["Blocks", int]  # a plain number means so many in every pool


class Blocks:
    """A count for each pool; most models have one pool, those whose layers differ in their windows have more.

    `<=` and `>=` hold if they hold in every pool, `<` and `>` if they hold in any. So `needed <= available` says that
    it fits, and `needed > available` that it does not. A share of it, `0.2 * blocks`, is rounded up.
    """

    __slots__ = ("counts",)

    def __init__(self, counts: Iterable[int]) -> None:
        self.counts = tuple(counts)

    def __add__(self, other: Count) -> "Blocks":
        return Blocks(a + b for a, b in zip(self.counts, self._of(other), strict=True))

    __radd__ = __add__

    def __sub__(self, other: Count) -> "Blocks":
        return Blocks(a - b for a, b in zip(self.counts, self._of(other), strict=True))

    def __rsub__(self, other: int) -> "Blocks":
        return Blocks(other - count for count in self.counts)

    def __mul__(self, share: float) -> "Blocks":
        return Blocks(math.ceil(count * share) for count in self.counts)

    __rmul__ = __mul__

    def __le__(self, other: Count) -> bool:
        return all(a <= b for a, b in zip(self.counts, self._of(other), strict=True))

    def __ge__(self, other: Count) -> bool:
        return all(a >= b for a, b in zip(self.counts, self._of(other), strict=True))

    def __lt__(self, other: Count) -> bool:
        return any(a < b for a, b in zip(self.counts, self._of(other), strict=True))

    def __gt__(self, other: Count) -> bool:
        return any(a > b for a, b in zip(self.counts, self._of(other), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks | int) and self.counts == self._of(other)

    def __hash__(self) -> int:
        return hash(self.counts)

    def __iter__(self) -> Iterator[int]:
        return iter(self.counts)

    def __repr__(self) -> str:
        return f"Blocks({', '.join(map(str, self.counts))})"

    def at_most(self, other: "Blocks") -> "Blocks":
        """The smaller count of each pool."""
        return Blocks(map(min, self.counts, other.counts))

    def _of(self, other: Count) -> tuple[int, ...]:
        return other.counts if isinstance(other, Blocks) else (other,) * len(self.counts)


def total(needs: Iterable[Blocks], nothing: Blocks) -> Blocks:
    """The sum; most needs of a step are `nothing`, that very object, and cost no addition."""
    summed = nothing
    for need in needs:
        if need is not nothing:
            summed = summed + need
    return summed
