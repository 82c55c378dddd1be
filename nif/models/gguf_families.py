"""Lists the families of GGUF files that are read without a conversion.

family = family_of(file)                  # None means that transformers converts such a file
family.layer_names["attn_q"]              # "self_attn.q_proj"
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from genbatch.nif.models.gguf_family import (
    EXPERT_NAMES,
    EXPERT_SETTINGS,
    GRANITE_EXPERT_NAMES,
    LAYER_NAMES,
    SETTINGS,
    SHARED_EXPERT_NAMES,
    TOP_NAMES,
    GgufFamily,
)
from genbatch.nif.models.gguf_gemma import settle_gemma3n, settle_gemma4
from genbatch.nif.models.gguf_hybrids import HYBRID_FAMILIES
from genbatch.nif.models.gguf_latent import SIGMOID, settle_latent

_SANDWICH_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN_EMBEDDINGS = {
    **_SANDWICH_NAMES,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_TOP_WITH_OWN = {
    **TOP_NAMES,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_FUSED_NAMES = {**LAYER_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"}


# DeepSeek's names, which GLM-4-MoE's configuration uses, too.
_ROUTED_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_WITH_SHARED = {
    **EXPERT_NAMES,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# The layer of multi-token prediction has the number after the last layer's.
_NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}
_DEEPSEEK = GgufFamily(
    {
        **_WITH_SHARED,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    },
    kind="deepseek_v2",
    settings={
        **SETTINGS,
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.q_lora_rank": "q_lora_rank",
        **_ROUTED_EXPERTS,
    },
    settle=settle_latent,
)
_HUNYUAN = GgufFamily(
    {**LAYER_NAMES, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    kind="hunyuan_v1_dense",
    settings=SETTINGS,
    present={"attention_bias": "blk.0.attn_q.bias"},
)
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_COHERE = {**SETTINGS, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
_OLMO2 = GgufFamily(_SANDWICH_NAMES, settings=SETTINGS)
_GRANITE = GgufFamily(
    LAYER_NAMES,
    rotates_pairs=True,
    settings={
        **SETTINGS,
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    present=_BIASES,
)

FAMILIES = {
    "llama": GgufFamily(LAYER_NAMES, rotates_pairs=True, present=_BIASES),
    "qwen2": GgufFamily(LAYER_NAMES),
    "qwen3": GgufFamily(LAYER_NAMES),
    "gemma": GgufFamily(LAYER_NAMES, norm_offset=-1.0, settings=SETTINGS),
    "ernie4_5": GgufFamily(LAYER_NAMES, settings=SETTINGS),
    "seed_oss": GgufFamily(
        {**LAYER_NAMES, "post_attention_norm": "post_attention_layernorm"},
        settings=SETTINGS,
        fixed={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
    "olmoe": GgufFamily(
        EXPERT_NAMES,
        settings={**SETTINGS, "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        fixed={"norm_topk_prob": False},
    ),
    "gemma2": GgufFamily(
        _SANDWICH_NAMES,
        norm_offset=-1.0,
        settings={
            **SETTINGS,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": GgufFamily(_SANDWICH_NAMES, norm_offset=-1.0, kind="gemma3_text", settings=SETTINGS),
    "gemma3n": GgufFamily(
        {
            **_OWN_EMBEDDINGS,
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_correct_coef": "altup.correction_coefs",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        kind="gemma3n_text",
        settings={
            **SETTINGS,
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "final_logit_softcapping": "final_logit_softcapping",
            "altup.num_inputs": "altup_num_inputs",
            "altup.active_idx": "altup_active_idx",
        },
        bare={"altup_correct_scale.weight": "altup.correct_output_scale"},
        top_names=_TOP_WITH_OWN,
        stacked={
            "altup_proj": "model.altup_projections.{}.weight",
            "altup_unembd_proj": "model.altup_unembed_projections.{}.weight",
        },
        windows_by_layer=True,
        settle=settle_gemma3n,
    ),
    "gemma4": GgufFamily(
        {
            **_OWN_EMBEDDINGS,
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
        },
        kind="gemma4_text",
        settings={
            **SETTINGS,
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
        top_names=_TOP_WITH_OWN,
        windows_by_layer=True,
        settle=settle_gemma4,
    ),
    "phi3": GgufFamily(_FUSED_NAMES, settings=SETTINGS, rotates_part=True),
    "olmo2": _OLMO2,
    "granite": _GRANITE,
    "granitemoe": replace(
        _GRANITE,
        layer_names={**LAYER_NAMES, **GRANITE_EXPERT_NAMES},
        settings={**_GRANITE.settings, **_LOCAL_EXPERTS},
        present={"attention_bias": "blk.0.attn_q.bias"},
    ),
    "smollm3": GgufFamily(LAYER_NAMES, rotates_pairs=True, settings=SETTINGS, present=_BIASES),
    "glm4": GgufFamily(
        {
            **LAYER_NAMES,
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        settings=SETTINGS,
        present={"attention_bias": "blk.0.attn_q.bias"},
        rotates_part=True,
    ),
    "chatglm": GgufFamily(
        {**LAYER_NAMES, "ffn_up": "mlp.gate_up_proj"},
        kind="glm",
        settings=SETTINGS,
        present={"attention_bias": "blk.0.attn_q.bias"},
        rotates_part=True,
    ),
    "starcoder2": GgufFamily(
        {**LAYER_NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        settings={**SETTINGS, "attention.layer_norm_epsilon": "norm_epsilon"},
    ),
    "stablelm": GgufFamily(
        LAYER_NAMES,
        settings={
            **SETTINGS,
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
            **SETTINGS,
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
        LAYER_NAMES,
        norm_offset=-1.0,
        settings={**SETTINGS, "attention.layer_norm_epsilon": "norm_eps"},
        present={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        rotates_part=True,
    ),
    "command-r": GgufFamily(
        LAYER_NAMES, kind="cohere", settings=_COHERE, present={"use_qk_norm": "blk.0.attn_q_norm.weight"}
    ),
    "cohere2": GgufFamily(LAYER_NAMES, settings=_COHERE),
    "exaone4": GgufFamily(_SANDWICH_NAMES, settings=SETTINGS, windows_by_layer=True),
    "qwen3moe": GgufFamily(
        EXPERT_NAMES,
        kind="qwen3_moe",
        settings={**SETTINGS, **EXPERT_SETTINGS},
        fixed={"norm_topk_prob": True},  # llama.cpp always normalises these weights
    ),
    "qwen3vl": GgufFamily(LAYER_NAMES, kind="qwen3", settings=SETTINGS),
    "apertus": GgufFamily(
        {**LAYER_NAMES, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        settings=SETTINGS,
        present={"attention_bias": "blk.0.attn_q.bias"},
        numbers={f"xielu.{part}": f"mlp.act_fn.{part}" for part in ("alpha_p", "alpha_n", "beta", "eps")},
    ),
    "arcee": GgufFamily(LAYER_NAMES, rotates_pairs=True, settings=SETTINGS, present=_BIASES),
    "qwen2moe": GgufFamily(
        SHARED_EXPERT_NAMES,
        kind="qwen2_moe",
        settings={
            **SETTINGS,
            **EXPERT_SETTINGS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        fixed={"norm_topk_prob": False},  # llama.cpp never normalises these weights
        single_rows=("shared_expert_gate.weight",),
    ),
    "glm4moe": GgufFamily(
        {**_WITH_SHARED, **_NEXTN, "post_attention_norm": "post_attention_layernorm"},
        kind="glm4_moe",
        settings={**SETTINGS, **_ROUTED_EXPERTS},
        bare={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        present={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
        rotates_part=True,
    ),
    "ernie4_5-moe": GgufFamily(
        _WITH_SHARED,
        kind="ernie4_5_moe",
        settings={
            **SETTINGS,
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
    "deepseek2": _DEEPSEEK,
    "dots1": GgufFamily(
        _WITH_SHARED,
        settings={**SETTINGS, **_ROUTED_EXPERTS},
        bare={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ),
    "minimax-m2": GgufFamily(
        EXPERT_NAMES,
        kind="minimax_m2",
        settings={**SETTINGS, **_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        bare={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        rotates_part=True,
    ),
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": replace(
        _HUNYUAN,
        layer_names={
            **EXPERT_NAMES,
            **_HUNYUAN.layer_names,
            "ffn_gate_inp": "mlp.gate.wg",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        kind="hunyuan_v1_moe",
        settings={**SETTINGS, "expert_count": "num_experts", "expert_used_count": "moe_topk"},
    ),
    # Ministral 3 scales queries in long sequences, but only beyond the served positions.
    "mistral3": GgufFamily(LAYER_NAMES, rotates_pairs=True, kind="ministral3", settings=SETTINGS),
    "gpt-oss": GgufFamily(
        {**EXPERT_NAMES, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        kind="gpt_oss",
        settings={**SETTINGS, **_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        bare={"attn_sinks.weight": "self_attn.sinks"},
    ),
    **HYBRID_FAMILIES,
}
"""Families by `general.architecture`; files of other families are converted. Mistral's files say "llama"."""

VARIANTS: dict[str, tuple[str, Callable[[Any], bool], GgufFamily]] = {
    "llama": (
        "expert_count",
        bool,
        GgufFamily(
            EXPERT_NAMES,
            rotates_pairs=True,
            kind="mixtral",
            settings={**SETTINGS, **_LOCAL_EXPERTS},
        ),
    ),
    "olmo2": ("attention.sliding_window", bool, replace(_OLMO2, kind="olmo3", windows_by_layer=True)),
    "deepseek2": (
        "expert_gating_func",
        lambda value: value == SIGMOID,
        replace(_DEEPSEEK, kind="deepseek_v3", bare={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}),
    ),
}
"""By `general.architecture`: a key without its prefix, a test of the key's value, and the family of such files."""


ASSISTANT = "gemma4-assistant"
"""llama.cpp's architecture of assistants, which cannot run alone."""

_ASSISTANT_FAMILY = replace(
    FAMILIES["gemma4"],
    settings={**FAMILIES["gemma4"].settings, "nextn_predict_layers": "num_kv_shared_layers"},  # counts all layers
    fixed={"vocab_size_per_layer_input": 0},
    top_names={**TOP_NAMES, **{f"nextn.{part}": part for part in ("pre_projection", "post_projection")}},
)


def family_of(architecture: str, metadata: Mapping[str, Any]) -> GgufFamily | None:
    """Return the family of a file; None if the file's architecture is not in the table."""
    if architecture == ASSISTANT:
        return _ASSISTANT_FAMILY
    if architecture in VARIANTS:
        key, is_variant, variant = VARIANTS[architecture]
        if is_variant(metadata.get(f"{architecture}.{key}")):
            return variant
    return FAMILIES.get(architecture)


def known_kinds() -> Collection[tuple[str, str]]:
    """Return `general.architecture` and transformers' kind for each family."""
    named = [(architecture, family.kind or architecture) for architecture, family in FAMILIES.items()]
    return [*named, *((architecture, family.kind or architecture) for architecture, (_, _, family) in VARIANTS.items())]
