"""RopeTables: cosines and sines of a model's rotary embeddings, position by position."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from genbatch.nif.models.architectures import head_dim_of

_FIRST_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class RopeTable:
    """One rotary embedding, as far as it was needed."""

    cosines: torch.Tensor  # [positions, rotary_dim / 2] float32
    sines: torch.Tensor


class RopeTables:
    """The tables that a model's layers take turns with; they grow in powers of two.

    Frequencies come from transformers' own functions, so every scaling of theirs is ours.

    Args:
        config: of the text decoder.
        partial: whether only the configuration's share of a head is rotated.
        max_position: positions that a sequence may have.

    Attributes:
        kinds: the kinds of layers (transformers' `layer_types`) by table; (None,) where all layers share one.
        rotary_dim: elements of a head that are rotated.
        max_position: as above.
    """

    def __init__(self, config: Any, *, partial: bool, max_position: int) -> None:
        parameters: Any = config.rope_parameters
        nested = "rope_type" not in parameters
        self.kinds: tuple[str | None, ...] = tuple(sorted(parameters)) if nested else (None,)
        self.max_position = max_position
        self._frequencies = [_frequencies(config, kind, partial=partial) for kind in self.kinds]
        self.rotary_dim = 2 * self._frequencies[0][0].numel()
        self._tables: list[RopeTable] = []

    def up_to(self, num_positions: int) -> list[RopeTable]:
        """The tables, of at least `num_positions` rows; at most the model's positions."""
        if not self._tables or self._tables[0].cosines.shape[0] < min(num_positions, self.max_position):
            rows = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            positions = torch.arange(min(rows, self.max_position)).float()[:, None]
            self._tables = [
                RopeTable((positions * frequencies).cos() * scale, (positions * frequencies).sin() * scale)
                for frequencies, scale in self._frequencies
            ]
        return self._tables


def rope_kinds(config: Any) -> list[str]:
    """The types of a model's rotary embeddings ("default", "llama3", ...), one a table."""
    parameters: Any = config.rope_parameters
    nested = [parameters] if "rope_type" in parameters else list(parameters.values())
    return [one["rope_type"] for one in nested]


def _frequencies(config: Any, kind: str | None, *, partial: bool) -> tuple[torch.Tensor, float]:
    """Radians a position for each pair of elements, [rotary_dim / 2], and a factor of the cosines and sines."""
    parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if parameters["rope_type"] != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), layer_type=kind)
        return frequencies.float(), float(scale)
    size = head_dim_of(config)
    size = int(size * parameters.get("partial_rotary_factor", 1.0)) if partial else size
    return 1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size), 1.0
