"""A layer group: the layers that look back equally far and therefore share block ids."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one attention kind.

    Args:
        layers: indices of the model's layers in this group, ascending.
        window: how many positions a token attends to, itself included; None means all previous ones.
    """

    layers: tuple[int, ...]
    window: int | None = None
