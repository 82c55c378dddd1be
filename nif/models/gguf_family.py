"""GgufFamily: describes the differences between one architecture's files and transformers' modules, as data.

This module also has the names that many families share.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT_NAMES = {
    **LAYER_NAMES,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
GRANITE_EXPERT_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
}
MTP_LAYER = "mtp.layers.0."
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SHARED_EXPERT_NAMES = {
    **EXPERT_NAMES,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.key_length": "head_dim",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}
EXPERT_SETTINGS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """The differences of one architecture's files from transformers' modules.

    Args:
        layer_names: transformers' name for each tensor of a layer.
        norm_offset: an addend to the elements of norms.
        rotates_pairs: whether the rows of queries and keys lie in the order for rotating neighbours, not halves.
        kind: transformers' name of the architecture if it differs from the file's.
        settings: keys of the metadata, without the architecture, with transformers' names.
        fixed: settings that the files do not have.
        bare: tensors of a layer, with ".weight" or ".bias", that transformers names without these endings.
        top_names: transformers' name for each tensor outside the layers.
        layer: the prefix of transformers' names of a layer's tensors.
        present: settings, each true if the file has the tensor of this name.
        per_head: tensors of a layer with one row for each head, and transformers' name of a row.
        stacked: tensors outside the layers with several matrices, and transformers' name of a matrix.
        numbers: keys with a number for each layer, and the name of the number's tensor in a layer.
        qkv_together: whether one tensor has all queries, then all keys and values; a module has them head by head.
        rotates_part: whether rope.dimension_count may be less than a head.
        single_rows: endings of tensors that are a row in the file and a matrix of one row in a module.
        negated_logs: names of tensors that store -exp(x) for transformers' x.
        as_stored: endings of norms to which `norm_offset` is not added.
        tiled_heads: whether the values' heads lie in turns of the key heads; else they lie key head by key head.
        other_layers: transformers' kind of the layers without heads in attention.head_count_kv, if this is an array.
        inner_size: a setting that is ssm.inner_size divided by another setting, and this other setting.
        windows_by_layer: whether attention.sliding_window_pattern names the layers with a window.
        settle: translates heads and rotary embeddings that differ among layers; None if they do not differ.
        joined: tensors of a layer that are parts of a transformers tensor, with this tensor's name and their place.
        mixed_heads: whether the parts have all queries of a delta net, then all keys, values and gates, where a module
            has them key head by key head.
        flattened: endings of tensors with several rows in the file and one row in a module.
        expands: a setting that is ssm.inner_size divided by embedding_length.
        mlp_layers: transformers' kind of the layers with a size in feed_forward_length, if this is an array: such a
            layer has only an MLP.
        choices: keys with true or false, a setting, and the setting's value for true and false; a missing key is false.
        mtp_names: names of tensors that only the layer of multi-token prediction has; this layer follows the others.
    """

    layer_names: dict[str, str]
    norm_offset: float = 0.0
    rotates_pairs: bool = False
    kind: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    bare: dict[str, str] = field(default_factory=dict)
    top_names: dict[str, str] = field(default_factory=lambda: TOP_NAMES)
    layer: str = "model.layers.{}."
    present: dict[str, str] = field(default_factory=dict)
    per_head: dict[str, str] = field(default_factory=dict)
    stacked: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    qkv_together: bool = False
    rotates_part: bool = False
    single_rows: tuple[str, ...] = ()
    windows_by_layer: bool = False
    negated_logs: tuple[str, ...] = ()
    as_stored: tuple[str, ...] = ()
    tiled_heads: bool = False
    other_layers: str | None = None
    inner_size: tuple[str, str] | None = None
    settle: Callable[[Any, dict[str, Any]], None] | None = None
    joined: dict[str, tuple[str, int]] = field(default_factory=dict)
    mixed_heads: bool = False
    flattened: tuple[str, ...] = ()
    expands: str | None = None
    mlp_layers: str | None = None
    choices: dict[str, tuple[str, Any, Any]] = field(default_factory=dict)
    mtp_names: dict[str, str] = field(default_factory=dict)
