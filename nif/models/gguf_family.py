"""GgufFamily: describes the differences between one architecture's files and transformers' modules, as data.

It stands beside the names that many families have in common.
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
        layer_names: transformers' name for each of a layer's tensors.
        norm_offset: to be added to the elements of norms.
        rotates_pairs: rows of queries and keys lie in the order that rotates neighbours, not halves.
        kind: transformers' name of the architecture, where it is another.
        settings: keys of the metadata, without the architecture, and transformers' names for them.
        fixed: settings that the files do not have.
        bare: tensors of a layer, with ".weight" or ".bias", that transformers names without either.
        top_names: transformers' name for each tensor that is of no layer.
        layer: the beginning of transformers' names of a layer's tensors.
        present: settings that are true where the file has a tensor of this name.
        per_head: tensors of a layer that hold one row a head, and transformers' name of a row.
        stacked: tensors of no layer that hold several matrices, and transformers' name of one.
        numbers: keys whose value is a number for each layer, and the tensor of a layer that has it in a module.
        qkv_together: whether queries, keys and values are one tensor with all queries first, which a module has head by
            head.
        rotates_part: whether rope.dimension_count may be less than a head.
        single_rows: ends of names whose tensor is a row in the file, and a matrix of one row in a module.
        negated_logs: names of tensors that hold -exp(x) of what transformers has.
        as_stored: ends of names of norms that `norm_offset` leaves as they are.
        tiled_heads: whether values' heads lie in turns of the key heads, and not key head by key head.
        other_layers: transformers' kind of the layers that attention.head_count_kv gives no heads, if it is an array.
        inner_size: a setting that is ssm.inner_size divided by another one, and that one.
        windows_by_layer: whether attention.sliding_window_pattern says which layers have the window.
        settle: translates heads and rotary embeddings that differ among layers; None where none does.
        joined: tensors of a layer that are a part of one of transformers', and its name and their place in it.
        mixed_heads: whether the joined tensor has all queries of a delta net, then all keys, values and gates, which a
            module has key head by key head.
        flattened: ends of names whose tensor has several rows in the file, and one in a module.
        expands: a setting that is ssm.inner_size divided by embedding_length.
        mlp_layers: transformers' kind of the layers that feed_forward_length gives a size, where it is an array: such a
            layer is an MLP and nothing else.
        choices: keys that are true or false, a setting, and its value for either; without the key it is false.
        mtp_names: names of tensors that only the layer of multi-token prediction has; the layer follows the others.
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
