"""Lists the architectures that the native kernels support, by the names of transformers' classes.

The module also reads the layers, their windows and the longest sequence from a configuration.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from genbatch.nif.errors import ModelError
from genbatch.nif.models.architecture import BOTH, KEEP_NOTHING, RECURRENT_KINDS, Architecture, has_alpha, shapes_of
from genbatch.nif.models.dense_families import DENSE_FAMILIES, gemma4_assistant
from genbatch.nif.models.expert_families import EXPERT_FAMILIES
from genbatch.nif.models.hybrid_families import HYBRID_FAMILIES
from genbatch.nif.runner import NO_SHAPE, LayerGroup, LayerShape

if TYPE_CHECKING:  # a model with a kept description does not need transformers
    from transformers import PreTrainedConfig


LACKING = {
    "BloomForCausalLM": "its positions are biases of scores (ALiBi), which the attention kernels do not add",
    "FalconForCausalLM": "its KV heads and norms have settings that are not read, and some models add ALiBi's biases",
    "GPTJForCausalLM": "its rotary embedding and inner size have settings that are not read",
}
"""The missing features for classes that transformers cannot run over blocks of KV either."""

ARCHITECTURES: dict[str, Callable[[Any], Architecture]] = {**DENSE_FAMILIES, **EXPERT_FAMILIES, **HYBRID_FAMILIES}
"""By the name of transformers' class, the function that makes an Architecture from a configuration."""

ASSISTANTS: dict[str, Callable[[Any], Architecture]] = {
    "Gemma4AssistantForCausalLM": gemma4_assistant,
    "Gemma4UnifiedAssistantForCausalLM": gemma4_assistant,
}
"""The same functions for assistants, which cannot run alone."""

DESCRIPTIONS = {**ARCHITECTURES, **ASSISTANTS}


def described(model_class: type) -> bool:
    """Return whether a configuration describes a model of this transformers class completely."""
    return model_class.__name__ in ARCHITECTURES


def layer_groups(name: str, config: "PreTrainedConfig") -> tuple[LayerGroup, ...]:
    """Group the model's layers by attention window and shape of keys, in the order of each group's first layer.

    A layer that both attends and recurs is in two groups: its state counts as layer `num_hidden_layers` plus its index.

    Args:
        name: the model's name, for errors.
        config: the text decoder's configuration.

    Raises:
        ModelError: a layer is neither full nor sliding-window attention, nor a short convolution, nor recurrent.
    """
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(name, "it has chunked attention; only full and sliding-window attention is served")
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
    if len(kinds) < num_layers:
        raise ModelError(name, f"config.json gives a kind for {len(kinds)} of {num_layers} layers")
    longest = max_position(name, config)
    taps: int | None = getattr(config, "conv_L_cache", None)
    named_taps = (getattr(config, name, None) for name in ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"))
    recurrent = LayerGroup((), next((count for count in named_taps if count), None), recurs=True), None
    shapes = shapes_of(config)
    layers_of: dict[tuple[LayerGroup, tuple[int, int] | None], list[int]] = {}
    for layer, kind in enumerate(kinds[:num_layers]):
        if kind in KEEP_NOTHING:
            continue
        if kind == "conv" and taps is not None:
            layers_of.setdefault((LayerGroup((), taps, convolves=True), None), []).append(layer)
            continue
        if kind in RECURRENT_KINDS:
            layers_of.setdefault(recurrent, []).append(layer)
            continue
        if kind == BOTH:
            layers_of.setdefault((LayerGroup(()), shapes[layer]), []).append(layer)
            layers_of.setdefault(recurrent, []).append(num_layers + layer)
            continue
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(name, f"layer {layer} is {kind!r}; only full and sliding-window attention is served")
        reach = window if kind == "sliding_attention" else None
        if kind == "sliding_attention" and reach is None:
            raise ModelError(name, f"layer {layer} attends within a window that config.json does not give")
        # Ignore a window that no sequence exceeds, so that one group has all layers.
        reach = None if reach is not None and reach >= longest else reach
        layers_of.setdefault((LayerGroup((), reach), shapes[layer]), []).append(layer)
    return tuple(replace(group, layers=tuple(layers)) for (group, _), layers in layers_of.items())


def layer_shapes(config: Any) -> tuple[LayerShape, ...]:
    """Return the shapes of each layer's entries in the KV cache, for a model with an `Architecture`.

    The states of layers that also attend come after all layers.
    """
    shapes = [LayerShape(heads, head_dim, head_dim) for heads, head_dim in shapes_of(config)]
    rank: int | None = getattr(config, "kv_lora_rank", None)
    if rank is not None:
        shapes = [LayerShape(1, config.qk_rope_head_dim + rank, rank)] * len(shapes)
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind in ("conv", *RECURRENT_KINDS):
            shapes[layer] = LayerShape(1, config.hidden_size, 0)
        if kind in KEEP_NOTHING:
            shapes[layer] = NO_SHAPE
        if kind == BOTH:
            shapes.append(LayerShape(1, config.hidden_size, 0))
    return tuple(shapes)


UNLIMITED = 1 << 20
"""Most positions of a sequence if the model has no limit."""


def max_position(name: str, config: "PreTrainedConfig") -> int:
    """Return the most positions of one sequence.

    Some models rescale rotary embeddings or queries in long sequences. This would change other sequences of the same
    forward, and contradict cached keys. So the limit of such a model is the position at which the rescaling begins.

    Raises:
        ModelError: the configuration has no such limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    of_layers = set(getattr(config, "layer_types", None) or ())
    if limit is None and of_layers and of_layers <= set(RECURRENT_KINDS):
        return UNLIMITED  # no layer uses positions
    if not isinstance(limit, int) or limit < 1:
        raise ModelError(name, "config.json does not give max_position_embeddings")
    rope: Any = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    for kind in kinds:
        if has_alpha(kind):
            continue
        if kind.get("rope_type") in ("dynamic", "longrope") or kind.get("llama_4_scaling_beta"):
            original = kind.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, original or limit)
    return limit
