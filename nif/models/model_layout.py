"""What a configuration says about a model's layers: how far each looks back, and the longest sequence."""

from typing import Any

from transformers import PreTrainedConfig

from genbatch.nif.errors import ModelError
from genbatch.nif.layer_group import LayerGroup
from genbatch.nif.layer_shape import LayerShape
from genbatch.nif.models.architectures import head_dim_of, kv_heads_of


def layer_groups(name: str, config: PreTrainedConfig) -> tuple[LayerGroup, ...]:
    """The model's layers by how far back they attend, in the order in which each kind first appears.

    Args:
        name: the model's, for errors.
        config: of the text decoder.

    Raises:
        ModelError: a layer is neither full nor sliding-window attention.
    """
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(name, "chunked attention; only full and sliding-window attention is served")
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
    if len(kinds) < num_layers:
        raise ModelError(name, f"config.json gives a kind for {len(kinds)} of {num_layers} layers")
    longest = max_position(name, config)
    layers_of: dict[int | None, list[int]] = {}
    for layer, kind in enumerate(kinds[:num_layers]):
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(name, f"layer {layer} is {kind!r}; only full and sliding-window attention is served")
        reach = window if kind == "sliding_attention" else None
        if kind == "sliding_attention" and reach is None:
            raise ModelError(name, f"layer {layer} attends within a window that config.json does not give")
        # A window that no sequence outgrows is no window: one group then holds all layers.
        layers_of.setdefault(None if reach is not None and reach >= longest else reach, []).append(layer)
    return tuple(LayerGroup(tuple(layers), reach) for reach, layers in layers_of.items())


def layer_shapes(config: Any) -> tuple[LayerShape, ...]:
    """What each layer keeps in the KV cache, of a model that has an `Architecture`."""
    head_dim, count = head_dim_of(config), int(config.num_hidden_layers)
    return (LayerShape(kv_heads_of(config), head_dim, head_dim),) * count


def max_position(name: str, config: PreTrainedConfig) -> int:
    """How many positions one sequence may have.

    Rotary embeddings that are rescaled once a sequence is long would change the other sequences of the same
    forward and contradict the keys already cached, so such a model ends where the rescaling would begin.

    Raises:
        ModelError: the configuration does not say.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelError(name, "config.json does not give max_position_embeddings")
    rope: Any = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            original = kind.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, original or limit)
    return limit
