"""Describes the GGUF files of families with recurrent layers or short convolutions."""

from dataclasses import replace

from genbatch.nif.models.gguf_family import (
    EXPERT_SETTINGS,
    GRANITE_EXPERT_NAMES,
    LAYER_NAMES,
    SETTINGS,
    SHARED_EXPERT_NAMES,
    TOP_NAMES,
    GgufFamily,
)

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
    {**LAYER_NAMES, **_DELTA_NAMES},
    norm_offset=-1.0,
    kind="qwen3_5_text",
    settings={
        **SETTINGS,
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
    mtp_names={
        "nextn.eh_proj": "mtp.fc",
        "nextn.enorm": "mtp.pre_fc_norm_embedding",
        "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_norm": "mtp.norm",
    },
)
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
        **SETTINGS,
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
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
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

HYBRID_FAMILIES = {
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
        settings={**_LFM2.settings, **EXPERT_SETTINGS, "leading_dense_block_count": "num_dense_layers"},
        fixed={"use_expert_bias": True, "norm_topk_prob": True},
        bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
    ),
    "granitehybrid": GgufFamily(
        {
            **LAYER_NAMES,
            **GRANITE_EXPERT_NAMES,
            "ffn_down": "shared_mlp.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
            **_mamba_names("mamba"),
        },
        rotates_pairs=True,
        kind="granitemoehybrid",
        settings={
            **SETTINGS,
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
            **LAYER_NAMES,
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            **_mamba_names("mamba"),
        },
        kind="falcon_h1",
        settings={**SETTINGS, **_MAMBA_SETTINGS, "ssm.inner_size": "mamba_d_ssm"},
        fixed={"mamba_norm_before_gate": False},  # the factors are in the weights already
        bare={**_mamba_bare("mamba"), "ffn_norm": "pre_ff_layernorm.weight"},  # files have this name without ".weight"
        top_names={**TOP_NAMES, "output_norm": "model.final_layernorm"},
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
            **SHARED_EXPERT_NAMES,
            **{name: theirs for name, theirs in _DELTA_NAMES.items() if name not in ("attn_qkv", "attn_gate")},
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        kind="qwen3_next",
        settings={
            **_QWEN35.settings,
            **EXPERT_SETTINGS,
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
        layer_names={**SHARED_EXPERT_NAMES, **_DELTA_NAMES},
        kind="qwen3_5_moe_text",
        settings={
            **_QWEN35.settings,
            **EXPERT_SETTINGS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        single_rows=("shared_expert_gate.weight",),
    ),
}
"""Families by `general.architecture`."""
