"""RopeTable: cosines and sines of the rotary embedding, position by position."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from genbatch.nif.models.model import Model

_FIRST_POSITIONS = 1024


class RopeTable:
    """Asks the model's own rotary module, so every scaling of theirs is ours; grows in powers of two."""

    def __init__(self, model: "Model") -> None:
        rotary = model.hf.model.rotary_emb
        # Of a module without weights the buffers are missing too; they follow from the configuration.
        self._rotary = type(rotary)(model.config) if rotary.inv_freq.is_meta else rotary
        self._limit = model.max_position
        self._cosines = self._sines = torch.empty(0)

    def up_to(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, [at least `num_positions`, head_dim / 2] float32; at most the model's positions."""
        if self._cosines.shape[0] < min(num_positions, self._limit):
            rows = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            positions = torch.arange(min(rows, self._limit))[None]
            with torch.inference_mode():
                cosines, sines = self._rotary(torch.empty(0), positions)
            half = cosines.shape[-1] // 2  # transformers repeats the half for both halves of a head
            self._cosines = cosines[0, :, :half].contiguous()
            self._sines = sines[0, :, :half].contiguous()
        return self._cosines, self._sines
