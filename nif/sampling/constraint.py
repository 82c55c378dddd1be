"""Constraint: which tokens may come next in one sequence, so that its text keeps to a grammar."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Constraint(Protocol):
    """A function of the tokens accepted so far, so whatever happens to a sequence's KV leaves it as it is.

    `accept` only notes a token; the work is in `prepare`, which any one thread may do before the next draw.
    """

    @property
    def fault(self) -> str | None:
        """Why the sequence cannot go on; None while it can. Valid once prepared."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether there is work left, and the last such work took long."""
        ...

    def accept(self, token_id: int) -> None:
        """Notes the sequence's next token."""
        ...

    def prepare(self) -> None:
        """Finds out which tokens may come next; does nothing the second time."""
        ...

    @property
    def allowed(self) -> npt.NDArray[np.int32]:
        """[ceil(vocab_size / 32)] a bit a token, from the lowest of the first word; valid once prepared."""
        ...


def forbid(logits: torch.Tensor, constraints: Sequence[Constraint | None]) -> None:
    """Sets to -inf, in place, what each row's constraint does not allow; all of a row whose constraint has a fault.

    Args:
        logits: [R, V] float32 on any device.
        constraints: R of them; None allows everything.
    """
    rows = [row for row, constraint in enumerate(constraints) if constraint is not None]
    if not rows:
        return
    width = logits.shape[1]
    words = np.zeros((len(rows), (width + 31) // 32), np.int32)
    for index, row in enumerate(rows):
        constraint = constraints[row]
        assert constraint is not None
        constraint.prepare()
        if constraint.fault is None:
            words[index] = constraint.allowed[: words.shape[1]]
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=width, bitorder="little")
    allowed = torch.from_numpy(bits).to(logits.device).view(torch.bool)
    if len(rows) == len(logits):
        logits.masked_fill_(allowed.logical_not_(), float("-inf"))
    else:
        logits[rows] = logits[rows].masked_fill_(allowed.logical_not_(), float("-inf"))
