"""GgufFamily: describes the differences between one architecture's files and transformers' modules, as data.

family = family_of(file)                  # None: transformers converts such a file
family.layer_names["attn_q"]              # "self_attn.q_proj"
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from genbatch.nif.models.gguf_gemma import settle_gemma4

_LAYER_NAMES = {
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
_EXPERT_NAMES = {
    **_LAYER_NAMES,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


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
    """

    layer_names: dict[str, str]
    norm_offset: float = 0.0
    rotates_pairs: bool = False
    kind: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    bare: dict[str, str] = field(default_factory=dict)
    top_names: dict[str, str] = field(default_factory=lambda: _TOP_NAMES)
    layer: str = "model.layers.{}."
    present: dict[str, str] = field(default_factory=dict)
    per_head: dict[str, str] = field(default_factory=dict)
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


_SETTINGS = {
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
_SANDWICH_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_NAMES = {**_LAYER_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"}
_SHARED_EXPERT_NAMES = {
    **_EXPERT_NAMES,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35 = GgufFamily(
    {**_LAYER_NAMES, **_DELTA_NAMES},
    norm_offset=-1.0,
    kind="qwen3_5_text",
    settings={
        **_SETTINGS,
        "full_attention_interval": "full_attention_interval",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    bare={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    rotates_part=True,
    negated_logs=("linear_attn.A_log",),
    as_stored=("linear_attn.norm.weight",),
    tiled_heads=True,
    inner_size=("linear_value_head_dim", "linear_num_value_heads"),
)
_EXPERT_SETTINGS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LFM2 = GgufFamily(
    {
        "attn_norm": "operator_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    settings={
        **_SETTINGS,
        "attention.layer_norm_rms_epsilon": "norm_eps",
        "shortconv.l_cache": "conv_L_cache",
    },
    fixed={"block_auto_adjust_ff_dim": False},
    top_names={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    other_layers="conv",
)


def _mamba_names(start: str) -> dict[str, str]:
    return {f"ssm_{ours}": f"{start}.{theirs}" for ours, theirs in _MAMBA_NAMES.items()}


def _mamba_bare(start: str) -> dict[str, str]:
    return {"ssm_a": f"{start}.A_log", "ssm_d": f"{start}.D", "ssm_dt.bias": f"{start}.dt_bias"}


_MAMBA_NAMES = {"in": "in_proj", "conv1d": "conv1d", "norm": "norm", "out": "out_proj"}
_FLAT_MAMBA = (".A_log", ".D", "mamba.norm.weight", "mixer.norm.weight")
_MAMBA_SETTINGS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_MIXER_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.group_count": "n_groups",
}
_NEMOTRON_H = GgufFamily(
    {
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        **_mamba_names("mixer"),
    },
    kind="nemotron_h",
    settings={
        **_MIXER_SETTINGS,
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "feed_forward_length": "intermediate_size",
        "ssm.state_size": "ssm_state_size",
        "ssm.time_step_rank": "mamba_num_heads",
    },
    rotates_pairs=True,
    bare=_mamba_bare("mixer"),
    top_names={"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
    negated_logs=("mixer.A_log",),
    flattened=_FLAT_MAMBA,
    other_layers="linear_attention",
    mlp_layers="mlp",
    inner_size=("mamba_head_dim", "mamba_num_heads"),
)
_OLMO2 = GgufFamily(_SANDWICH_NAMES, settings=_SETTINGS)
_GRANITE = GgufFamily(
    _LAYER_NAMES,
    rotates_pairs=True,
    settings={
        **_SETTINGS,
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    present=_BIASES,
)

FAMILIES = {
    "llama": GgufFamily(_LAYER_NAMES, rotates_pairs=True, present=_BIASES),
    "qwen2": GgufFamily(_LAYER_NAMES),
    "qwen3": GgufFamily(_LAYER_NAMES),
    "gemma": GgufFamily(_LAYER_NAMES, norm_offset=-1.0, settings=_SETTINGS),
    "ernie4_5": GgufFamily(_LAYER_NAMES, settings=_SETTINGS),
    "seed_oss": GgufFamily(
        {**_LAYER_NAMES, "post_attention_norm": "post_attention_layernorm"},
        settings=_SETTINGS,
        fixed={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
    "olmoe": GgufFamily(
        _EXPERT_NAMES,
        settings={**_SETTINGS, "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        fixed={"norm_topk_prob": False},
    ),
    "gemma2": GgufFamily(
        _SANDWICH_NAMES,
        norm_offset=-1.0,
        settings={
            **_SETTINGS,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": GgufFamily(_SANDWICH_NAMES, norm_offset=-1.0, kind="gemma3_text", settings=_SETTINGS),
    "gemma4": GgufFamily(
        {
            **_SANDWICH_NAMES,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
        },
        kind="gemma4_text",
        settings={
            **_SETTINGS,
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        bare={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        top_names={
            **_TOP_NAMES,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        windows_by_layer=True,
        settle=settle_gemma4,
    ),
    "phi3": GgufFamily(_FUSED_NAMES, settings=_SETTINGS, rotates_part=True),
    "olmo2": _OLMO2,
    "granite": _GRANITE,
    "granitemoe": replace(
        _GRANITE,
        layer_names={
            **_LAYER_NAMES,
            "ffn_gate_inp": "block_sparse_moe.router",
            "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
            "ffn_up_exps": "block_sparse_moe.experts.up_proj",
            "ffn_down_exps": "block_sparse_moe.experts.down_proj",
        },
        settings={
            **_GRANITE.settings,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        present={"attention_bias": "blk.0.attn_q.bias"},
    ),
    "smollm3": GgufFamily(_LAYER_NAMES, rotates_pairs=True, settings=_SETTINGS, present=_BIASES),
    "glm4": GgufFamily(
        {
            **_LAYER_NAMES,
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        settings=_SETTINGS,
        present={"attention_bias": "blk.0.attn_q.bias"},
        rotates_part=True,
    ),
    "chatglm": GgufFamily(
        {**_LAYER_NAMES, "ffn_up": "mlp.gate_up_proj"},
        kind="glm",
        settings=_SETTINGS,
        present={"attention_bias": "blk.0.attn_q.bias"},
        rotates_part=True,
    ),
    "starcoder2": GgufFamily(
        {**_LAYER_NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        settings={**_SETTINGS, "attention.layer_norm_epsilon": "norm_epsilon"},
    ),
    "stablelm": GgufFamily(
        _LAYER_NAMES,
        settings={
            **_SETTINGS,
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        present={"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
        per_head={
            "attn_q_norm": "self_attn.q_layernorm.norms.{}.weight",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}.weight",
        },
        rotates_part=True,
    ),
    "gptneox": GgufFamily(
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        kind="gpt_neox",
        settings={
            **_SETTINGS,
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        top_names={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "lm_head",
        },
        layer="gpt_neox.layers.{}.",
        present={"attention_bias": "blk.0.attn_qkv.bias"},
        qkv_together=True,
        rotates_part=True,
    ),
    "nemotron": GgufFamily(
        _LAYER_NAMES,
        norm_offset=-1.0,
        settings={**_SETTINGS, "attention.layer_norm_epsilon": "norm_eps"},
        present={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        rotates_part=True,
    ),
    "cohere2": GgufFamily(
        _LAYER_NAMES,
        settings={**_SETTINGS, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
    ),
    "exaone4": GgufFamily(_SANDWICH_NAMES, settings=_SETTINGS, windows_by_layer=True),
    "qwen3moe": GgufFamily(
        _EXPERT_NAMES,
        kind="qwen3_moe",
        settings={
            **_SETTINGS,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fixed={"norm_topk_prob": True},  # llama.cpp always does
    ),
    "qwen3vl": GgufFamily(_LAYER_NAMES, kind="qwen3", settings=_SETTINGS),
    "arcee": GgufFamily(_LAYER_NAMES, rotates_pairs=True, settings=_SETTINGS, present=_BIASES),
    "qwen2moe": GgufFamily(
        _SHARED_EXPERT_NAMES,
        kind="qwen2_moe",
        settings={
            **_SETTINGS,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        fixed={"norm_topk_prob": False},  # llama.cpp never does
        single_rows=("shared_expert_gate.weight",),
    ),
    "glm4moe": GgufFamily(
        {
            **_EXPERT_NAMES,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        kind="glm4_moe",
        settings={
            **_SETTINGS,
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        bare={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        present={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
        rotates_part=True,
    ),
    "ernie4_5-moe": GgufFamily(
        {
            **_EXPERT_NAMES,
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        kind="ernie4_5_moe",
        settings={
            **_SETTINGS,
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        bare={"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
        single_rows=("e_score_correction_bias",),
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        layer_names={
            **_LFM2.layer_names,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.gate_proj",
            "ffn_up_exps": "feed_forward.experts.up_proj",
            "ffn_down_exps": "feed_forward.experts.down_proj",
        },
        kind="lfm2_moe",
        settings={**_LFM2.settings, **_EXPERT_SETTINGS, "leading_dense_block_count": "num_dense_layers"},
        fixed={"use_expert_bias": True, "norm_topk_prob": True},
        bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
    ),
    "granitehybrid": GgufFamily(
        {
            **_LAYER_NAMES,
            "ffn_gate_inp": "block_sparse_moe.router",
            "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
            "ffn_up_exps": "block_sparse_moe.experts.up_proj",
            "ffn_down_exps": "block_sparse_moe.experts.down_proj",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
            **_mamba_names("mamba"),
        },
        rotates_pairs=True,
        kind="granitemoehybrid",
        settings={
            **_SETTINGS,
            **_MAMBA_SETTINGS,
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        fixed={"num_local_experts": 0},
        bare=_mamba_bare("mamba"),
        joined={
            "ffn_gate": ("shared_mlp.input_linear", 0),
            "ffn_up": ("shared_mlp.input_linear", 1),
            "ffn_gate_shexp": ("shared_mlp.input_linear", 0),
            "ffn_up_shexp": ("shared_mlp.input_linear", 1),
        },
        negated_logs=("mamba.A_log",),
        flattened=_FLAT_MAMBA,
        other_layers="linear_attention",
        inner_size=("mamba_d_head", "mamba_n_heads"),
        expands="mamba_expand",
        choices={"rope.scaling.finetuned": ("position_embedding_type", "rope", "nope")},
    ),
    "falcon-h1": GgufFamily(
        {
            **_LAYER_NAMES,
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            **_mamba_names("mamba"),
        },
        kind="falcon_h1",
        settings={**_SETTINGS, **_MAMBA_SETTINGS, "ssm.inner_size": "mamba_d_ssm"},
        fixed={"mamba_norm_before_gate": False},  # the converter multiplies the factors into the weights
        bare=_mamba_bare("mamba"),
        top_names={**_TOP_NAMES, "output_norm": "model.final_layernorm"},
        present={"mamba_rms_norm": "blk.0.ssm_norm.weight"},
        negated_logs=("mamba.A_log",),
        flattened=_FLAT_MAMBA,
        inner_size=("mamba_d_head", "mamba_n_heads"),
    ),
    "mamba2": GgufFamily(
        {"attn_norm": "norm", **_mamba_names("mixer")},
        settings={**_MIXER_SETTINGS, "ssm.state_size": "state_size", "ssm.time_step_rank": "num_heads"},
        bare=_mamba_bare("mixer"),
        top_names={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        layer="backbone.layers.{}.",
        negated_logs=("mixer.A_log",),
        flattened=_FLAT_MAMBA,
        inner_size=("head_dim", "num_heads"),
        expands="expand",
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H,
        layer_names={
            **_NEMOTRON_H.layer_names,
            "ffn_gate_inp": "mixer.gate",
            "ffn_up_exps": "mixer.experts.ups",
            "ffn_down_exps": "mixer.experts.downs",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
        },
        settings={
            **_NEMOTRON_H.settings,
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "moe_latent_size": "moe_latent_size",
        },
        bare={**_NEMOTRON_H.bare, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        mlp_layers="moe",
    ),
    "qwen3next": replace(
        _QWEN35,
        layer_names={
            **_SHARED_EXPERT_NAMES,
            **{name: theirs for name, theirs in _DELTA_NAMES.items() if name not in ("attn_qkv", "attn_gate")},
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        kind="qwen3_next",
        settings={
            **_QWEN35.settings,
            **_EXPERT_SETTINGS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        fixed={"norm_topk_prob": True},
        single_rows=("shared_expert_gate.weight",),
        tiled_heads=False,
        joined={"attn_qkv": ("linear_attn.in_proj_qkvz", 0), "attn_gate": ("linear_attn.in_proj_qkvz", 1)},
        mixed_heads=True,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        layer_names={**_SHARED_EXPERT_NAMES, **_DELTA_NAMES},
        kind="qwen3_5_moe_text",
        settings={
            **_QWEN35.settings,
            **_EXPERT_SETTINGS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        single_rows=("shared_expert_gate.weight",),
    ),
    "gpt-oss": GgufFamily(
        {
            **_EXPERT_NAMES,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        kind="gpt_oss",
        settings={
            **_SETTINGS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        bare={"attn_sinks.weight": "self_attn.sinks"},
    ),
}
"""By `general.architecture`; files of other families are converted. Mistral's are written as "llama"."""

VARIANTS = {
    "llama": (
        "expert_count",
        GgufFamily(
            _EXPERT_NAMES,
            rotates_pairs=True,
            kind="mixtral",
            settings={
                **_SETTINGS,
                "expert_count": "num_local_experts",
                "expert_used_count": "num_experts_per_tok",
            },
        ),
    ),
    "olmo2": ("attention.sliding_window", replace(_OLMO2, kind="olmo3", windows_by_layer=True)),
}
"""By `general.architecture`: a key, without the architecture, and the family of files that have it and not as zero."""


def family_of(architecture: str, metadata: Mapping[str, Any]) -> GgufFamily | None:
    """The family of a file; None where its architecture is not in the table."""
    if architecture in VARIANTS:
        key, variant = VARIANTS[architecture]
        if metadata.get(f"{architecture}.{key}"):
            return variant
    return FAMILIES.get(architecture)


def known_kinds() -> Collection[tuple[str, str]]:
    """`general.architecture` and transformers' kind of each family."""
    named = [(architecture, family.kind or architecture) for architecture, family in FAMILIES.items()]
    return [*named, *((architecture, family.kind or architecture) for architecture, (_, family) in VARIANTS.items())]
