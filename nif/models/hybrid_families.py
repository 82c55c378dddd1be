"""Describes the hybrid families: some layers have a recurrent state or a convolution instead of attention."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from genbatch.nif.models.architecture import (
    SHARED,
    Architecture,
    ConvolutionNames,
    ExpertNames,
    MtpNames,
    RecurrenceNames,
    SomeRows,
    Tensors,
    head_dim_of,
)
from genbatch.nif.models.dense_families import layers_of, llama, olmo2, qwen3
from genbatch.nif.models.expert_families import granite_moe, parts_of, qwen2_moe


def _lfm2(config: Any) -> Architecture:
    names = Tensors(
        final_norm="model.embedding_norm",
        out="self_attn.out_proj",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
    )
    return Architecture(
        config.norm_eps,
        head_dim_of(config) ** -0.5,
        "silu",
        tensors=names,
        qk_norm=SHARED,
        convolution=ConvolutionNames(layers_of(config, "conv")),
    )


def _lfm2_moe(config: Any) -> Architecture:
    experts = ExpertNames(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        normalised=config.norm_topk_prob,
        router="feed_forward.gate",
        whole=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        single=tuple(f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
        stacked=tuple(f"feed_forward.experts.{name}_proj" for name in ("gate", "up", "down")),
        layers=frozenset(range(config.num_dense_layers, config.num_hidden_layers)),
        sigmoid=True,
        correction="feed_forward.expert_bias" if config.use_expert_bias else None,
        scale=config.routed_scaling_factor,
    )
    return replace(_lfm2(config), experts=experts)


def _lfm3(config: Any) -> Architecture:
    plain = Tensors()
    names = replace(
        _lfm2(config).tensors,
        qkv=(*plain.qkv, "self_attn.g_proj") if config.use_attention_gate else plain.qkv,
        out=plain.out,
        q_norm=plain.q_norm,
        k_norm=plain.k_norm,
        attention_post="post_operator_norm" if config.use_sandwich_norm else None,
        mlp_post="post_ffn_norm" if config.use_sandwich_norm else None,
        in_files=(("self_attn.g_proj", "self_attn.gate_proj"),),
    )
    return replace(_lfm2(config), tensors=names, head_gated=config.use_attention_gate)


def _delta_net(config: Any, inputs: tuple[SomeRows, ...]) -> RecurrenceNames:
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act is {config.hidden_act}; after a delta net's convolution only silu is computed")
    return RecurrenceNames(
        layers_of(config, "linear_attention"),
        inputs,
        heads=config.linear_num_value_heads,
        key_heads=config.linear_num_key_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
        norm_groups=config.linear_num_value_heads,
    )


def _qwen3_5(config: Any) -> Architecture:
    inputs = tuple(SomeRows(f"linear_attn.in_proj_{name}") for name in ("qkv", "a", "b", "z"))
    return replace(
        qwen3(config),
        norm_offset=1.0,
        partial_rotary=True,
        gated_attention=True,
        recurrence=_delta_net(config, inputs),
        mtp=MtpNames(),
    )


def _qwen3_5_moe(config: Any) -> Architecture:
    experts = ExpertNames(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        shared=parts_of("mlp.shared_expert"),
        shared_intermediate=config.shared_expert_intermediate_size,
        shared_gate="mlp.shared_expert_gate",
    )
    return replace(_qwen3_5(config), experts=experts)


def _qwen3_next(config: Any) -> Architecture:
    # The rows lie key head by key head: a query, a key, and their values and gates.
    per_key = config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, per_key * config.linear_value_head_dim

    def rows(size: int, start: int, length: int) -> tuple[range, ...]:
        return tuple(range(i * size + start, i * size + start + length) for i in range(config.linear_num_key_heads))

    mixed, pairs = 2 * key + 2 * value, 2 * per_key
    both, scalars = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
    queries, keys, values = rows(mixed, 0, key), rows(mixed, key, key), rows(mixed, 2 * key, value)
    inputs = (
        SomeRows(both, (*queries, *keys, *values)),
        SomeRows(scalars, (*rows(pairs, per_key, per_key), *rows(pairs, 0, per_key))),
        SomeRows(both, rows(mixed, 2 * key + value, value)),
    )
    recurrence = _delta_net(config, inputs)
    return replace(_qwen3_5(config), experts=qwen2_moe(config).experts, recurrence=recurrence)


@dataclass(frozen=True, slots=True)
class _MambaSizes:
    """The sizes of a Mamba 2 layer, for which families use different names."""

    heads: int
    head: int
    groups: int
    state: int
    kernel: int


def _mamba2(
    config: Any, sizes: _MambaSizes, start: str = "mamba.", factors: Sequence[float] = (1.0, 1.0, 1.0, 1.0, 1.0)
) -> RecurrenceNames:
    """Return Mamba 2's names for the layers of linear attention; `factors` are for gates, x, B, C and steps."""
    activation = getattr(config, "mamba_hidden_act", None) or config.hidden_act
    if activation != "silu" or tuple(config.time_step_limit) != (0.0, math.inf):
        what = f"hidden_act is {activation}, time_step_limit {config.time_step_limit}"
        raise ValueError(f"{what}; Mamba 2 is computed with silu and unlimited steps only")
    inner, group = sizes.heads * sizes.head, sizes.groups * sizes.state
    # Files have gates, x, B, C and steps in this order; the convolution has x, B and C.
    ends = list(accumulate((inner, inner, group, group, sizes.heads)))
    gates, values, keys, queries, steps = (range(start, end) for start, end in pairwise((0, *ends)))
    in_convolution = tuple(range(part.start - inner, part.stop - inner) for part in (queries, keys, values))
    of_gates, of_values, of_keys, of_queries, of_steps = factors
    return RecurrenceNames(
        layers_of(config, "linear_attention"),
        (
            SomeRows(
                f"{start}in_proj",
                (queries, keys, values, steps, gates),
                (of_queries, of_keys, of_values, of_steps, of_gates),
            ),
        ),
        heads=sizes.heads,
        key_heads=sizes.groups,
        key_dim=sizes.state,
        value_dim=sizes.head,
        kernel=sizes.kernel,
        norm_groups=sizes.groups,
        channels=in_convolution,
        corrects=False,
        gate_first=True,
        start=start,
        skip="D",
    )


def _mamba_sizes(config: Any) -> _MambaSizes:
    """Return the sizes by the names of Bamba, Granite 4 and Falcon-H1."""
    return _MambaSizes(
        config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv
    )


def _bamba(config: Any) -> Architecture:
    names = Tensors(
        final_norm="model.final_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        mlp_norm="pre_ff_layernorm",
    )
    return replace(llama(config), tensors=names, partial_rotary=True, recurrence=_mamba2(config, _mamba_sizes(config)))


def _granite_hybrid(config: Any) -> Architecture:
    rotates = config.position_embedding_type == "rope"
    return replace(
        granite_moe(config),
        no_rope=frozenset() if rotates else frozenset(range(config.num_hidden_layers)),
        recurrence=_mamba2(config, _mamba_sizes(config)),
    )


def _falcon_h1(config: Any) -> Architecture:
    """Describe Falcon-H1: attention and Mamba 2 read the same row, and both outputs are added; linears have factors."""
    every = frozenset(range(config.num_hidden_layers))
    gate_factor, down_factor = config.mlp_multipliers
    mixer = replace(
        _mamba2(config, _mamba_sizes(config), factors=config.ssm_multipliers),
        layers=every,
        gate_first=not (config.mamba_rms_norm and config.mamba_norm_before_gate),
        norm="norm" if config.mamba_rms_norm else None,
        input_factor=config.ssm_in_multiplier,
    )
    return replace(
        _bamba(config),
        partial_rotary=False,
        recurrence=mixer,
        attending=every,
        embedding_scale=config.embedding_multiplier,
        logit_divisor=1 / config.lm_head_multiplier,
        input_factor=config.attention_in_multiplier,
        factors={
            "self_attn.k_proj": config.key_multiplier,
            "self_attn.o_proj": config.attention_out_multiplier,
            "mamba.out_proj": config.ssm_out_multiplier,
            "feed_forward.gate_proj": gate_factor,
            "feed_forward.down_proj": down_factor,
        },
    )


def _mamba2_alone(config: Any) -> Architecture:
    sizes = _MambaSizes(config.num_heads, config.head_dim, config.n_groups, config.state_size, config.conv_kernel)
    names = Tensors(
        embedding="backbone.embeddings",
        final_norm="backbone.norm_f",
        layer="backbone.layers.{}.",
        attention_norm="norm",
        in_files=(("embeddings", "embedding"),),
    )
    return Architecture(
        config.layer_norm_epsilon, 1.0, "silu", names, recurrence=_mamba2(config, sizes, "mixer."), mlps=frozenset()
    )


def _nemotron_h(config: Any) -> Architecture:
    """Describe Nemotron-H: after its norm, a layer has only one of Mamba 2, attention, an MLP or experts."""
    if config.moe_latent_size is not None and "moe" in config.layer_types:
        raise ValueError(f"moe_latent_size is {config.moe_latent_size}; only experts that read whole rows are computed")
    sizes = _MambaSizes(
        config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size, config.conv_kernel
    )
    names = Tensors(
        embedding="model.embeddings",
        final_norm="model.norm_f",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        out="mixer.o_proj",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        attention_norm="norm",
        mlp_norm="norm",
        in_files=(("model.", "backbone."),),
    )
    experts = ExpertNames(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        normalised=config.norm_topk_prob,
        router="mixer.gate",
        whole=("mixer.experts.up_proj", "mixer.experts.down_proj"),
        single=("mixer.experts.{}.up_proj", "mixer.experts.{}.down_proj"),
        stacked=("mixer.experts.ups", "mixer.experts.downs"),
        layers=layers_of(config, "moe"),
        shared=("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
        shared_intermediate=config.moe_shared_expert_intermediate_size,
        sigmoid=True,
        correction="mixer.gate.e_score_correction_bias",
        scale=config.routed_scaling_factor,
        groups=(config.n_group, config.topk_group),
    )
    return Architecture(
        config.layer_norm_epsilon,
        head_dim_of(config) ** -0.5,
        config.mlp_hidden_act,
        names,
        gated=False,
        no_rope=frozenset(range(config.num_hidden_layers)),
        experts=experts if experts.layers else None,
        recurrence=_mamba2(config, sizes, "mixer."),
        attending=layers_of(config, "full_attention"),
        mlps=layers_of(config, "mlp", "moe"),
    )


def _olmo_hybrid(config: Any) -> Architecture:
    """Describe OLMo hybrid: attention layers have OLMo 2's norms, and delta nets have Llama's norms."""
    projections = tuple(SomeRows(f"linear_attn.{name}_proj") for name in "qkvabg")
    delta = replace(
        _delta_net(config, projections),
        norm="o_norm",
        out="o_proj",
        gate_eps=1e-5,  # a constant of transformers' class
        strength=2.0 if config.linear_allow_neg_eigval else 1.0,
        layer=Tensors(),
    )
    attending = olmo2(config)
    renamed = (("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm"))
    return replace(
        attending,
        tensors=replace(attending.tensors, in_files=renamed),
        no_rope=frozenset() if _rotates(config) else frozenset(range(config.num_hidden_layers)),
        recurrence=delta,
    )


def _rotates(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None)
    return rope is not None and rope.get("rope_theta") is not None


HYBRID_FAMILIES: dict[str, Callable[[Any], Architecture]] = {
    "Lfm2ForCausalLM": _lfm2,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "BambaForCausalLM": _bamba,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "FalconH1ForCausalLM": _falcon_h1,
    "Mamba2ForCausalLM": _mamba2_alone,
    "NemotronHForCausalLM": _nemotron_h,
    "Lfm3ForCausalLM": _lfm3,
    "Lfm2MoeForCausalLM": _lfm2_moe,
    "OlmoHybridForCausalLM": _olmo_hybrid,
}
