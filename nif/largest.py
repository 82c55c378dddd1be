"""Largest: what greedy decoding needs of a step's logits, and all it needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Largest:
    """Of each row of logits the largest value and where it is.

    Args:
        values: [R] float32; NaN where the row holds one.
        token_ids: [R] int32, the lowest id that has the value; of a row with NaN, any.
    """

    values: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int32]

    def rows(self, rows: Sequence[int]) -> "Largest":
        """Of these rows only."""
        return Largest(self.values[rows], self.token_ids[rows])
