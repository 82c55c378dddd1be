"""DrawTable: how each row of a run of decode steps draws, as the device's sampler reads it."""

from collections.abc import Sequence

import numpy as np
import torch

from genbatch.nif.sampling.sampling_params import SamplingParams
from genbatch.nif.sampling.uniform_draw import stream_key, uniforms

NUM_PARAMS = 5
NOT_FINITE = "the model's logits are not finite"


class DrawTable:
    """A row a sequence: temperature, top_k, top_p, min_p, and the uniform number of its next draw.

    That number depends on the seed and the position alone, so it is known before the logits are.

    Args:
        params: of each row.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._table = np.array([(p.temperature, p.top_k, p.top_p, p.min_p, 0.0) for p in params], np.float64)
        self._drawing = np.flatnonzero(self._table[:, 0] > 0.0)
        self._keys = np.array([stream_key(p.seed) for p in params if p.temperature > 0.0], np.uint64)

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """The table [R, NUM_PARAMS] float64 of a step's draws; the next call changes it.

        Args:
            positions: each row's draw counter.
        """
        if len(self._drawing):
            self._table[self._drawing, 4] = uniforms(self._keys, np.array(positions, np.int64)[self._drawing])
        return torch.from_numpy(self._table)
