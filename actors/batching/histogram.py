"""Histogram: how often values fell into fixed ranges; plain numbers, a fraction of a microsecond a value."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


class Histogram:
    """Counts of values by range.

    Args:
        le: the ranges' upper ends, each inclusive, rising; larger values fall into one more range.
    """

    __slots__ = ("counts", "le", "sum")

    def __init__(self, le: Sequence[float]) -> None:
        self.le = tuple(le)
        self.counts = [0] * (len(self.le) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Books one value."""
        self.counts[bisect_left(self.le, value)] += 1
        self.sum += value

    def snapshot(self) -> dict[str, Any]:
        """Plain data: `le`, `counts` (not cumulative, one more than `le`) and `sum`."""
        return {"le": list(self.le), "counts": list(self.counts), "sum": self.sum}
