"""Describes the families some of whose layers keep a state or convolve and do not attend."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from genbatch.nif.models.architecture import (
    SHARED,
    Architecture,
    ConvolutionNames,
    ExpertNames,
    RecurrenceNames,
    SomeRows,
    Tensors,
    head_dim_of,
)
from genbatch.nif.models.dense_families import llama, qwen3
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
    convolving = frozenset(layer for layer, kind in enumerate(config.layer_types) if kind == "conv")
    return Architecture(
        config.norm_eps,
        head_dim_of(config) ** -0.5,
        "silu",
        tensors=names,
        qk_norm=SHARED,
        convolution=ConvolutionNames(convolving),
    )


def _layers_of(config: Any, *kinds: str) -> frozenset[int]:
    return frozenset(layer for layer, kind in enumerate(config.layer_types) if kind in kinds)


def _delta_net(config: Any, inputs: tuple[SomeRows, ...]) -> RecurrenceNames:
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act is {config.hidden_act}; the convolution of a delta net is followed by silu here")
    return RecurrenceNames(
        _layers_of(config, "linear_attention"),
        inputs,
        heads=config.linear_num_value_heads,
        key_heads=config.linear_num_key_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
        norm_groups=config.linear_num_value_heads,
    )


_APART = tuple(SomeRows(f"linear_attn.in_proj_{name}") for name in ("qkv", "a", "b", "z"))


def _qwen3_5(config: Any) -> Architecture:
    return replace(
        qwen3(config),
        norm_offset=1.0,
        partial_rotary=True,
        gated_attention=True,
        recurrence=_delta_net(config, _APART),
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
    # The rows go by key heads: a query, a key, and the values and gates that it serves.
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
    return replace(
        qwen2_moe(config),
        qk_norm=SHARED,
        norm_offset=1.0,
        partial_rotary=True,
        gated_attention=True,
        recurrence=_delta_net(config, inputs),
    )


def _mamba2(config: Any) -> RecurrenceNames:
    if config.hidden_act != "silu" or tuple(config.time_step_limit) != (0.0, math.inf):
        what = f"hidden_act is {config.hidden_act}, time_step_limit {config.time_step_limit}"
        raise ValueError(f"{what}; Mamba 2 runs with silu and unlimited steps here")
    inner, group = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    # In the file: gates, x, B, C, steps; of these the convolution has x, B and C.
    ends = list(accumulate((inner, inner, group, group, config.mamba_n_heads)))
    gates, values, keys, queries, steps = (range(start, end) for start, end in pairwise((0, *ends)))
    in_convolution = tuple(range(part.start - inner, part.stop - inner) for part in (queries, keys, values))
    return RecurrenceNames(
        _layers_of(config, "linear_attention"),
        (SomeRows("mamba.in_proj", (queries, keys, values, steps, gates)),),
        heads=config.mamba_n_heads,
        key_heads=config.mamba_n_groups,
        key_dim=config.mamba_d_state,
        value_dim=config.mamba_d_head,
        kernel=config.mamba_d_conv,
        norm_groups=config.mamba_n_groups,
        channels=in_convolution,
        corrects=False,
        gate_first=True,
        start="mamba.",
        skip="D",
    )


def _bamba(config: Any) -> Architecture:
    names = Tensors(
        final_norm="model.final_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        mlp_norm="pre_ff_layernorm",
    )
    return replace(llama(config), tensors=names, partial_rotary=True, recurrence=_mamba2(config))


def _granite_hybrid(config: Any) -> Architecture:
    rotates = config.position_embedding_type == "rope"
    return replace(
        granite_moe(config),
        no_rope=frozenset() if rotates else frozenset(range(config.num_hidden_layers)),
        recurrence=_mamba2(config),
    )


HYBRID_FAMILIES: dict[str, Callable[[Any], Architecture]] = {
    "Lfm2ForCausalLM": _lfm2,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "BambaForCausalLM": _bamba,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
}
