"""The shape of what one layer keeps in the KV cache."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer, per position.

    Args:
        num_kv_heads: heads of keys and values.
        key_dim: elements of a key head.
        value_dim: elements of a value head; differs from `key_dim` in a few models.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
