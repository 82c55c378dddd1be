"""Describes the families with a mixture of experts in place of the MLP."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from genbatch.nif.models.architecture import (
    NONE,
    SHARED,
    WHOLE,
    Architecture,
    ExpertNames,
    LatentNames,
    Tensors,
    latent_rows,
    nextn,
)
from genbatch.nif.models.dense_families import (
    cohere2,
    ernie,
    exaone4,
    gemma4,
    granite,
    granite_swa,
    hunyuan,
    llama,
    qwen3,
)


def _qwen3_moe(config: Any) -> Architecture:
    mixed = frozenset(
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    )
    experts = ExpertNames(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        normalised=config.norm_topk_prob,
        layers=mixed,
    )
    return replace(qwen3(config), experts=experts if config.num_experts else None)


def parts_of(name: str) -> tuple[str, str, str]:
    return f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj"


def qwen2_moe(config: Any) -> Architecture:
    mixed = _qwen3_moe(config)
    experts = mixed.experts and replace(
        mixed.experts,
        shared=parts_of("mlp.shared_expert"),
        shared_intermediate=config.shared_expert_intermediate_size,
        shared_gate="mlp.shared_expert_gate",
    )
    return replace(mixed, qk_norm=NONE, experts=experts)


def _olmoe(config: Any) -> Architecture:
    if config.clip_qkv is not None:
        raise ValueError(f"clip_qkv is {config.clip_qkv}; clipped queries and keys are not computed")
    experts = ExpertNames(
        config.num_experts, config.num_experts_per_tok, config.intermediate_size, normalised=config.norm_topk_prob
    )
    return replace(llama(config), qk_norm=WHOLE, experts=experts)


def _glm4_moe(config: Any) -> Architecture:
    experts = ExpertNames(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        normalised=config.norm_topk_prob,
        layers=frozenset(range(getattr(config, "first_k_dense_replace", 0), config.num_hidden_layers)),
        shared=parts_of("mlp.shared_experts"),
        shared_intermediate=config.n_shared_experts * config.moe_intermediate_size,
        sigmoid=True,
        correction="mlp.gate.e_score_correction_bias",
        scale=config.routed_scaling_factor,
        groups=(config.n_group, config.topk_group),
    )
    kind = SHARED if getattr(config, "use_qk_norm", False) else NONE
    return replace(llama(config), qk_norm=kind, partial_rotary=True, experts=experts, mtp=nextn(config))


def _latent(config: Any) -> Architecture:
    """Describe DeepSeek's attention: one row gives the keys and values of all heads."""
    names = LatentNames(
        config.kv_lora_rank,
        config.qk_rope_head_dim,
        config.qk_nope_head_dim,
        config.v_head_dim,
        query_rank=config.q_lora_rank or 0,
    )
    rope = config.rope_parameters
    length = rope.get("mscale_all_dim", 0) if rope["rope_type"] != "default" else 0
    factor = 0.1 * length * math.log(rope["factor"]) + 1.0 if length and rope["factor"] > 1 else 1.0
    return replace(
        llama(config),
        score_scale=config.qk_head_dim**-0.5 * factor * factor,
        interleaved=getattr(config, "rope_interleave", True),
        latent=names,
        tensors=Tensors(qkv=tuple(rows.name for rows in latent_rows(names))),
    )


def _shared_experts(config: Any, layers: frozenset[int]) -> ExpertNames:
    """Return the names and sizes that DeepSeek's mixtures have in common."""
    num_shared = config.n_shared_experts if hasattr(config, "n_shared_experts") else config.num_shared_experts
    return ExpertNames(
        config.n_routed_experts if hasattr(config, "n_routed_experts") else config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        layers=layers,
        shared=parts_of("mlp.shared_experts"),
        shared_intermediate=num_shared * config.moe_intermediate_size,
        scale=config.routed_scaling_factor,
    )


def _deepseek2(config: Any) -> Architecture:
    experts = _shared_experts(config, frozenset(range(config.first_k_dense_replace, config.num_hidden_layers)))
    by_groups = config.topk_method == "group_limited_greedy"
    groups = (config.n_group, config.topk_group) if by_groups else (1, 1)
    return replace(_latent(config), experts=replace(experts, normalised=False, groups=groups))


def _chosen_by_sigmoid(config: Any) -> ExpertNames:
    """Return the names and sizes of DeepSeek-V3's mixture."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is None:
        mixed = frozenset(range(config.first_k_dense_replace, config.num_hidden_layers))
    else:
        mixed = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    return replace(
        _shared_experts(config, mixed),
        normalised=config.norm_topk_prob,
        sigmoid=True,
        correction="mlp.gate.e_score_correction_bias",
        groups=(config.n_group, config.topk_group),
    )


def _deepseek3(config: Any) -> Architecture:
    return replace(_latent(config), experts=_chosen_by_sigmoid(config), mtp=nextn(config))


def _dots1(config: Any) -> Architecture:
    return replace(qwen3(config), experts=_chosen_by_sigmoid(config))


def _exaone_moe(config: Any) -> Architecture:
    names = Tensors(in_files=(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),))
    return replace(exaone4(config), tensors=names, experts=_chosen_by_sigmoid(config))


def _hunyuan_moe(config: Any) -> Architecture:
    counts = {
        name: set(value) if isinstance(value, list) else {value}
        for name, value in (("num_experts", config.num_experts), ("moe_topk", config.moe_topk))
    }
    if differing := [name for name, values in counts.items() if len(values) > 1]:
        raise ValueError(f"{differing[0]} differs among layers")
    experts = ExpertNames(
        counts["num_experts"].pop(),
        counts["moe_topk"].pop(),
        config.intermediate_size,
        router="mlp.gate.wg",
        shared=parts_of("mlp.shared_mlp"),
        shared_intermediate=config.intermediate_size,
    )
    return replace(hunyuan(config), experts=experts)


def _ernie_moe(config: Any) -> Architecture:
    mixed = range(config.moe_layer_start_index, min(config.moe_layer_end_index + 1, config.num_hidden_layers))
    experts = ExpertNames(
        config.moe_num_experts,
        config.moe_k,
        config.moe_intermediate_size,
        layers=frozenset(layer for layer in mixed if (layer + 1) % config.moe_layer_interval == 0),
        shared=parts_of("mlp.shared_experts"),
        shared_intermediate=config.moe_num_shared_experts * config.moe_intermediate_size,
        correction="mlp.gate.moe_statics.e_score_correction_bias",
    )
    names = Tensors(in_files=(("mlp.gate.moe_statics", "mlp.moe_statics"),))
    return replace(ernie(config), experts=experts, tensors=names)


def _cohere2_moe(config: Any) -> Architecture:
    if config.num_shared_experts and config.shared_expert_combination_strategy != "sum":
        raise ValueError(f"shared_expert_combination_strategy is {config.shared_expert_combination_strategy}, not sum")
    mixed = frozenset(layer for layer, kind in enumerate(config.mlp_layer_types) if kind != "dense")
    by_sigmoid = config.expert_selection_fn == "sigmoid"
    experts = ExpertNames(
        config.num_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        normalised=config.norm_topk_prob or not by_sigmoid,
        layers=mixed,
        shared=parts_of("mlp.shared_experts") if config.num_shared_experts else (),
        shared_intermediate=config.num_shared_experts * config.intermediate_size,
        sigmoid=by_sigmoid,
    )
    dense = cohere2(config)
    # A prefix of dense layers with a pattern of 1 attends to all positions, and rotates them.
    rotated = (
        frozenset(range(config.num_hidden_layers)) - mixed if config.prefix_dense_sliding_window_pattern == 1 else ()
    )
    own_norm = config.rms_norm_eps is not None
    return replace(
        dense,
        norm_eps=config.rms_norm_eps if own_norm else config.layer_norm_eps,
        layer_norm=not own_norm,
        no_rope=dense.no_rope.difference(rotated),
        experts=experts,
    )


def _mixtral(config: Any) -> Architecture:
    experts = ExpertNames(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        single=("mlp.experts.{}.w1", "mlp.experts.{}.w3", "mlp.experts.{}.w2"),
    )
    return replace(llama(config), experts=experts, tensors=Tensors(in_files=((".mlp.", ".block_sparse_moe."),)))


def _minimax_m2(config: Any) -> Architecture:
    mixed = _mixtral(config)
    assert mixed.experts is not None
    experts = replace(mixed.experts, sigmoid=True, correction="mlp.e_score_correction_bias")
    return replace(mixed, qk_norm=WHOLE, partial_rotary=True, experts=experts)


def _phimoe(config: Any) -> Architecture:
    if config.num_local_experts < 2:
        raise ValueError(f"num_local_experts is {config.num_local_experts}; a token takes two")
    experts = ExpertNames(
        config.num_local_experts,
        2,  # always, for any num_experts_per_tok
        config.intermediate_size,
        router="mlp.router",
        single=("mlp.experts.{}.w1", "mlp.experts.{}.w3", "mlp.experts.{}.w2"),
        jitter=max(config.router_jitter_noise, 1e-30),  # 0 would turn this kind of choice off
    )
    names = Tensors(in_files=((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")))
    return replace(llama(config), layer_norm=True, experts=experts, tensors=names)


def _gemma4(config: Any) -> Architecture:
    if not config.enable_moe_block:
        return gemma4(config)
    experts = ExpertNames(
        config.num_experts,
        config.top_k_experts,
        config.moe_intermediate_size,
        router="router.proj",
        whole=("experts.gate_up_proj", "experts.down_proj"),
        scales="router.per_expert_scale",
        own_norms=(
            "router.scale",
            "pre_feedforward_layernorm_2.weight",
            "post_feedforward_layernorm_2.weight",
            "post_feedforward_layernorm_1.weight",
        ),
    )
    return replace(gemma4(config), experts=experts)


def granite_moe(config: Any) -> Architecture:
    """Describe Granite with experts, and with a shared expert in some models."""
    shared_size = getattr(config, "shared_intermediate_size", 0)
    names = Tensors(
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        in_files=(
            ("moe.experts.gate_up_proj", "moe.input_linear.weight"),
            ("moe.experts.down_proj", "moe.output_linear.weight"),
            ("moe.router.weight", "moe.router.layer.weight"),
        ),
    )
    experts = ExpertNames(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        router="block_sparse_moe.router",
        whole=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
        stacked=parts_of("block_sparse_moe.experts"),
        shared=(*names.gate_up, names.down) if shared_size else (),
        shared_intermediate=shared_size,
    )
    return replace(granite(config), tensors=names, experts=experts if config.num_local_experts else None)


def _granite_moe_swa(config: Any) -> Architecture:
    mixed, own = granite_moe(config), granite_swa(config)
    return replace(mixed, tensors=replace(mixed.tensors, sinks=own.tensors.sinks), no_rope=own.no_rope)


def _gpt_oss(config: Any) -> Architecture:
    experts = ExpertNames(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        router="mlp.router",
        transposed=True,
    )
    return replace(
        llama(config),
        tensors=Tensors(sinks="self_attn.sinks"),
        activation="clamped_swiglu",
        gate_slope=config.swiglu_alpha,
        gate_limit=config.swiglu_limit,
        experts=experts,
    )


EXPERT_FAMILIES: dict[str, Callable[[Any], Architecture]] = {
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "GptOssForCausalLM": _gpt_oss,
    "Gemma4ForCausalLM": _gemma4,
    "PhimoeForCausalLM": _phimoe,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeSWAForCausalLM": _granite_moe_swa,
    "GraniteMoeSharedForCausalLM": granite_moe,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "OlmoeForCausalLM": _olmoe,
    "Glm4MoeForCausalLM": _glm4_moe,
    "Ernie4_5_MoeForCausalLM": _ernie_moe,
    "HunYuanMoEV1ForCausalLM": _hunyuan_moe,
    "DeepseekV2ForCausalLM": _deepseek2,
    "DeepseekV3ForCausalLM": _deepseek3,
    "Glm4MoeLiteForCausalLM": _deepseek3,
    "YoutuForCausalLM": _latent,
    "Dots1ForCausalLM": _dots1,
    "ExaoneMoeForCausalLM": _exaone_moe,
    "SolarOpenForCausalLM": _glm4_moe,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "Cohere2MoeForCausalLM": _cohere2_moe,
}
