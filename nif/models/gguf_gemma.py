"""Translates the metadata of layers that differ in GGUF files of Gemma: heads, widths, sparsity, rotary embeddings."""

from statistics import NormalDist
from typing import Any

import numpy as np


def settle_gemma4(file: Any, settings: dict[str, Any]) -> None:
    """Translate the metadata of a Gemma 4 to the configuration's settings.

    A file has the heads of layers with full attention, and with "_swa" the heads of layers with a window. The factors
    in rope_freqs.weight are 1 for rotated pairs of elements, and huge for the other pairs.

    Args:
        file: the GgufFile.
        settings: the settings, which are changed in place.

    Raises:
        ModelError: the metadata contradict each other; the reason names the key or the tensor.
    """
    metadata, start = file.metadata, f"{file.architecture}."
    kinds = _kinds_of_layers(file, settings)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    settings["global_head_dim"] = settings.pop("head_dim", None)
    settings["head_dim"] = metadata.get(f"{start}attention.key_length_swa", settings["global_head_dim"])
    own, heads = _own(full, settings), _each(file, "attention.head_count_kv", settings)
    without_values = any(f"blk.{layer}.attn_v.weight" not in file.names() for layer in own)
    settings["attention_k_eq_v"] = without_values or (not own and len(set(heads)) > 1)  # an assistant has no keys
    for kind, name in (("sliding_attention", "num_key_value_heads"), ("full_attention", "num_global_key_value_heads")):
        counts = {count for count, other in zip(heads, kinds, strict=True) if other == kind} or set(heads)
        if len(counts) != 1:
            raise file.fault(f"{start}attention.head_count_kv is {heads}: layers of one kind differ")
        settings[name] = counts.pop()
    if settings["num_global_key_value_heads"] != settings["num_key_value_heads"] and not settings["attention_k_eq_v"]:
        raise file.fault(f"{start}attention.head_count_kv is {heads} in layers with separate values")
    widths = _each(file, "feed_forward_length", settings)
    settings["intermediate_size"] = widths[0]
    settings["use_double_wide_mlp"] = set(widths) == {widths[0], 2 * widths[0]}
    settings["enable_moe_block"] = bool(settings.get("num_experts"))
    settings.setdefault("hidden_size_per_layer_input", 0)
    if "per_layer_token_embd.weight" in file.names():
        settings["vocab_size_per_layer_input"] = file.tensor("per_layer_token_embd.weight").shape[0]
    full_rope = _proportional(file, settings.pop("rope_theta", 1e6), settings["global_head_dim"])
    settings["rope_parameters"] = {"full_attention": full_rope, "sliding_attention": _window_rope(file)}


def settle_gemma3n(file: Any, settings: dict[str, Any]) -> None:
    """Translate the metadata of a Gemma 3n to the configuration's settings.

    A file has the standard deviations from which a layer's gates count. The configuration has the share of gates below.

    Args:
        file: the GgufFile.
        settings: the settings, which are changed in place.

    Raises:
        ModelError: the metadata contradict each other; the reason names the key or the tensor.
    """
    _kinds_of_layers(file, settings)
    deviations = _each(file, "activation_sparsity_scale", settings)
    if not all(isinstance(number, float) for number in deviations):
        raise file.fault(f"{file.architecture}.activation_sparsity_scale is {deviations}, not a number for each layer")
    settings["activation_sparsity_pattern"] = [NormalDist().cdf(number) for number in deviations]
    settings["intermediate_size"] = _each(file, "feed_forward_length", settings)
    settings["laurel_rank"] = file.tensor("blk.0.laurel_l.weight").shape[0]
    settings["vocab_size_per_layer_input"] = file.tensor("per_layer_token_embd.weight").shape[0]
    full_rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta", 1e6)}
    settings["rope_parameters"] = {"full_attention": full_rope, "sliding_attention": _window_rope(file)}


def _kinds_of_layers(file: Any, settings: dict[str, Any]) -> list[str]:
    """Return the kind of each layer's attention, and refuse a scaled rotary embedding."""
    start, kinds, count = f"{file.architecture}.", settings.get("layer_types"), settings.get("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count:
        raise file.fault(f"{start}attention.sliding_window_pattern is not a list of {count} values")
    if (scaling := file.metadata.get(f"{start}rope.scaling.type", "none")) != "none":
        raise file.fault(f"{start}rope.scaling.type is {scaling!r}; only none is supported")
    return kinds


def _window_rope(file: Any) -> dict[str, Any]:
    base = file.metadata.get(f"{file.architecture}.rope.freq_base_swa", 10000.0)
    return {"rope_type": "default", "rope_theta": base}


def _own(layers: list[int], settings: dict[str, Any]) -> list[int]:
    """Return those of the layers that write keys and values."""
    shared = settings.get("num_kv_shared_layers")
    first = settings["num_hidden_layers"] - (shared if isinstance(shared, int) else 0)
    return [layer for layer in layers if layer < first]


def _each(file: Any, key: str, settings: dict[str, Any]) -> list[Any]:
    """Return a number for each layer; a file may have one number for all layers."""
    value, count = file.metadata.get(f"{file.architecture}.{key}"), settings["num_hidden_layers"]
    each = value.tolist() if isinstance(value, np.ndarray) else [value] * count
    if len(each) != count:
        raise file.fault(f"{file.architecture}.{key} has {len(each)} numbers for {count} layers")
    return each


def _proportional(file: Any, base: Any, head_dim: Any) -> dict[str, Any]:
    factors = file.tensor("rope_freqs.weight").whole().flatten()
    rotated = int((factors == 1).sum())
    if 2 * len(factors) != head_dim or not (factors[:rotated] == 1).all() or not (factors[rotated:] > 1e29).all():
        raise file.fault(f"tensor rope_freqs.weight does not divide {head_dim} elements into rotated and others")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors), "rope_theta": base}
