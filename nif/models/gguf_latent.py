"""Translates the metadata of compressed keys and values in GGUF files of DeepSeek's architecture."""

from typing import Any

SIGMOID = 2
"""The expert_gating_func of files with sigmoid weights for experts."""


def settle_latent(file: Any, settings: dict[str, Any]) -> None:
    """Translate the metadata of a model with compressed keys and values to the configuration's settings.

    Newer files have the sizes of a cached row, and with "_mla" the sizes of a head. Older files have only the sizes of
    a head.

    Args:
        file: the GgufFile.
        settings: the settings, which are changed in place.

    Raises:
        ModelError: the metadata are incomplete or contradict each other; the reason names the key.
    """
    metadata, start = file.metadata, f"{file.architecture}."
    settings.pop("head_dim", None)
    if "kv_lora_rank" not in settings:
        raise file.fault(f"{start}attention.kv_lora_rank is missing: only compressed keys and values are supported")
    rotated, key, value = (
        next((metadata[start + name] for name in names if start + name in metadata), None)
        for names in (
            ("rope.dimension_count",),
            ("attention.key_length_mla", "attention.key_length"),
            ("attention.value_length_mla", "attention.value_length"),
        )
    )
    if not (isinstance(rotated, int) and isinstance(key, int) and isinstance(value, int) and 0 < rotated < key):
        raise file.fault(f"a head has {key} elements, {rotated} of them rotated, and values of {value}")
    settings["qk_rope_head_dim"], settings["qk_nope_head_dim"] = rotated, key - rotated
    settings["v_head_dim"] = value
    settings["num_key_value_heads"] = settings.get("num_attention_heads")
    settings.setdefault("q_lora_rank", None)
    _settle_experts(file, settings)
    settings["head_dim"] = rotated  # the rotary embedding's size


def _settle_experts(file: Any, settings: dict[str, Any]) -> None:
    groups = settings.get("n_group") or 1
    settings["n_group"], settings["topk_group"] = groups, settings.get("topk_group") or 1
    is_sigmoid = file.metadata.get(f"{file.architecture}.expert_gating_func") == SIGMOID
    if not is_sigmoid:
        settings["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
        if settings.get("norm_topk_prob"):
            raise file.fault(f"{file.architecture}.expert_weights_norm is true, which only sigmoid weights support")
