"""Rotary embeddings: the frequencies, and tables of the cosines and sines of each position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genbatch.nif.models.architecture import has_alpha, layer_bases, shapes_of

_FIRST_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class RopeTable:
    """One rotary embedding's table, up to the highest position so far."""

    cosines: npt.NDArray[np.float32]  # [positions, rotary_dim / 2]
    sines: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Frequencies:
    """The frequencies of one table.

    Args:
        kind: the layers' kind (transformers' `layer_types`), or the base if layers have different bases; None if all
            layers share one table.
        values: radians per position for each pair of elements, [rotary_dim / 2], exactly float32.
        scale: the factor of cosines and sines.
    """

    kind: str | float | None
    values: Sequence[float]
    scale: float


class RopeTables:
    """The rotary tables of a model's layers; the tables grow in powers of two.

    Args:
        config: the text decoder's configuration.
        partial: whether only the configuration's share of a head is rotated.
        max_position: most positions of a sequence.

    Attributes:
        kinds: the `Frequencies.kind` of each table.
        rotary_dims: rotated elements of a head, by table.
        max_position: most positions of a sequence.
    """

    def __init__(self, config: Any, *, partial: bool, max_position: int) -> None:
        self.max_position = max_position
        self._frequencies = rope_frequencies(config, partial=partial)
        self.kinds = tuple(each.kind for each in self._frequencies)
        self.rotary_dims = [2 * len(each.values) for each in self._frequencies]
        self._tables: list[RopeTable] = []

    def up_to(self, num_positions: int) -> list[RopeTable]:
        """Return tables of at least `num_positions` rows, and at most the model's positions."""
        if not self._tables or len(self._tables[0].cosines) < min(num_positions, self.max_position):
            rows = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            self._tables = [_table(each, min(rows, self.max_position)) for each in self._frequencies]
        return self._tables


def _table(frequencies: Frequencies, num_positions: int) -> RopeTable:
    """Compute a table: angles in float32 as in transformers, and their cosines and sines in float64, rounded once."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * np.array(frequencies.values, np.float32)
    cosines, sines = np.empty_like(angles), np.empty_like(angles)
    np.cos(angles, out=cosines, dtype=np.float64, casting="same_kind")
    np.sin(angles, out=sines, dtype=np.float64, casting="same_kind")
    scale = np.float32(frequencies.scale)
    return RopeTable(cosines * scale, sines * scale)


def rope_frequencies(config: Any, *, partial: bool) -> Sequence[Frequencies]:
    """Return the frequencies of each table, in the order of the kinds' names.

    transformers' own functions compute them, so all its scalings are supported. A KeptConfig has them already.
    """
    kept: Sequence[Frequencies] | None = getattr(config, "kept_frequencies", None)
    if kept is not None:
        return kept
    parameters: Any = _rope_parameters(config)
    shared = sorted(parameters) if "rope_type" not in parameters else [None]
    kinds: Sequence[str | float | None] = layer_bases(config) or shared
    return [_computed(config, kind, partial=partial) for kind in kinds]


def _computed(config: Any, kind: str | float | None, *, partial: bool) -> Frequencies:
    import torch  # here, because a model with a kept description does not need torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters[kind] if isinstance(kind, str) else _rope_parameters(config)
    base = kind if isinstance(kind, float | int) else parameters["rope_theta"]
    if parameters["rope_type"] != "default" and not has_alpha(parameters):
        init = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, scale = init(config, torch.device("cpu"), layer_type=kind)
        scale = parameters.get("short_mscale", scale)  # Phi-MoE's own
        return Frequencies(kind, frequencies.float().tolist(), float(scale))
    shapes, kinds = shapes_of(config), getattr(config, "layer_types", None) or ()
    size = shapes[kinds.index(kind) if kind in kinds else 0][1]
    size = int(size * parameters.get("partial_rotary_factor", 1.0)) if partial else size
    if has_alpha(parameters):
        base *= parameters["alpha"] ** (size / (size - 2))
    frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    return Frequencies(kind, frequencies.tolist(), 1.0)


def _rope_parameters(config: Any) -> Any:
    """Return the configuration's parameters, or those of an unused table for a model without rotary embeddings."""
    parameters = getattr(config, "rope_parameters", None) or {}
    unused = {"rope_type": "default", "rope_theta": 1.0}
    return unused if parameters.get("rope_theta", 0) is None else parameters or unused


def rope_kinds(config: Any) -> list[str]:
    """Return the types of a model's rotary embeddings ("default", "llama3", ...), one per table."""
    parameters: Any = _rope_parameters(config)
    nested = [parameters] if "rope_type" in parameters else list(parameters.values())
    nested *= max(1, len(layer_bases(config)))
    return ["default" if has_alpha(rope) else rope["rope_type"] for rope in nested]
