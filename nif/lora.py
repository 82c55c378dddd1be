"""What a LoRA adapter is in memory, whoever computes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """What an adapter adds to one linear."""

    a: torch.Tensor  # [rank, inputs] float32
    b: torch.Tensor  # [outputs, rank] float32
    scale: float

    @property
    def rank(self) -> int:
        """Its rank."""
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """An adapter in memory; immutable.

    Args:
        name: what requests call it.
        path: its directory, absolute.
        digest: of both files: two adapters with the same one are the same.
        handle: what a step calls it; above 0, and never used twice by a process.
        linears: by transformers' name of the module.
    """

    name: str
    path: Path
    digest: str
    handle: int
    linears: Mapping[str, LoraLinear]

    @property
    def rank(self) -> int:
        """The largest rank of its linears."""
        return max(linear.rank for linear in self.linears.values())

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(linear.a.nbytes + linear.b.nbytes for linear in self.linears.values())
