"""Architecture: describes a model's architecture to the C kernels and the loader, as data.

Neither the kernels nor the loader has a branch for any architecture. They read the places of the norms, the activation
and the tensors' names from the description. nif/native/README.md tells how to add an architecture.

The module also reads the layers, their windows and the longest sequence from a configuration. It tells which models
are encoders, which give embeddings and no generated text.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from genbatch.nif.errors import ModelError
from genbatch.nif.runner import LayerGroup, LayerShape
from genbatch.nif.scoring import is_classifier

if TYPE_CHECKING:  # at run time where it is used: a model that was described before needs nothing of transformers
    from transformers import PreTrainedConfig, PreTrainedModel

NONE, SHARED, PER_HEAD, WHOLE = range(4)
"""Norms of queries and keys, as `enum qk_norm`: none, each head by the same weights, by its own, all heads as one."""

ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu": 1,
    "gelu_new": 2,
    "gelu_pytorch_tanh": 2,
    "relu2": 3,
    "clamped_swiglu": 4,
}
"""transformers' names of activations, as `enum activation`."""


RECURRENT_KINDS = ("linear_attention", "mamba")
"""transformers' `layer_types` that keep a state."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors' names, without ".weight" and ".bias"; None means that the model has no such tensor.

    Args:
        layer: the beginning of a layer's names; {} is its number.
        qkv: queries, keys and values, or one tensor of all three.
        gate_up: gates and ups, or one tensor of both; without gates the ups alone.
        attention_norm, mlp_norm: of what goes in.
        attention_post, mlp_post: of what comes out, before it is added to the residual.
        in_files: parts of transformers' names and what files have in their place.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    attention_post: str | None = None
    mlp_post: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str | None = None
    in_files: tuple[tuple[str, str], ...] = ()

    def stored(self, name: str, names: Collection[str]) -> str:
        """Return a tensor's name in a source with these names; the given name if the source has no other."""
        renamed = (name.replace(part, written) for part, written in self.in_files)
        return next((other for other in renamed if name not in names and other in names), name)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A mixture of experts in the place of the MLP.

    Args:
        count: experts of a layer.
        chosen: how many a token takes.
        intermediate: inner size of one.
        normalised: whether the weights of those chosen sum to 1.
        router: name of the router.
        whole: names of gates and ups, and of downs, of all experts in one tensor each, [experts, outputs, inputs].
        single: names of one expert's gates, ups and downs; {} is its number.
        stacked: names of the gates, the ups and the downs of all experts. A source has one of the three forms.
        transposed: whether `whole` is [experts, inputs, outputs], gates and ups taking turns.
        layers: the layers that have experts; None: all.
        shared: names of gates, ups and downs of the expert that every token takes; two where one has gates and ups.
        shared_intermediate: inner size of that one; 0: there is none.
        shared_gate: name of the row whose sigmoid is its weight; None: it weighs 1.
        sigmoid: whether an expert's weight is the sigmoid of its score, and not its share of all.
        correction: name of what is added to the weights while experts are chosen.
        scale: of the weights of those chosen.
        groups: groups of experts, and how many of them a token's experts come from.
    """

    count: int
    chosen: int
    intermediate: int
    normalised: bool = True
    router: str = "mlp.gate"
    whole: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    single: tuple[str, str, str] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )
    stacked: tuple[str, str, str] = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
    transposed: bool = False
    layers: frozenset[int] | None = None
    shared: tuple[str, ...] = ()
    shared_intermediate: int = 0
    shared_gate: str | None = None
    sigmoid: bool = False
    correction: str | None = None
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class ConvolutionNames:
    """Short convolutions in the place of some layers' attention.

    Such a layer makes a gate, a factor and an input of each token. The products of gate and input go through a causal
    convolution, each channel by itself, and are multiplied by the factor.

    Args:
        layers: the layers that have one.
        inputs: name of the linear of gates, factors and inputs.
        taps: name of the convolution.
        out: name of the last linear.
    """

    layers: frozenset[int]
    inputs: str = "conv.in_proj"
    taps: str = "conv.conv"
    out: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class SomeRows:
    """Some rows of a tensor.

    Args:
        name: the tensor's.
        parts: which of its rows, in this order; empty: all.
    """

    name: str
    parts: tuple[range, ...] = ()


@dataclass(frozen=True, slots=True)
class RecurrenceNames:
    """Recurrent layers in the place of some layers' attention: gated delta nets, or Mamba 2.

    Each head keeps a matrix of keys by values, its state. A token decays the state, adds its key times something of its
    value, and multiplies the state by its query. Queries, keys and values come out of a short convolution and SiLU.
    Mamba 2 calls them C, B and x.

    Args:
        layers: the layers that have one.
        inputs: which linears give queries, keys, values, steps, strengths (if it corrects) and gates, in this order.
        channels: the convolution's channels in the order of queries, keys and values; empty: they are in it.
        heads: of values.
        key_heads: of queries and keys.
        key_dim, value_dim: elements of a head.
        kernel: taps of the convolution.
        norm_groups: groups of outputs that are normed by themselves.
        corrects: whether what is added is the value less what the state has for the key (the delta rule).
        gate_first: whether the gate multiplies before the norm.
        start: beginning of the other tensors' names.
        skip: name of the factors of values that go past the state; None: no value does.
    """

    layers: frozenset[int]
    inputs: tuple[SomeRows, ...]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm_groups: int
    channels: tuple[range, ...] = ()
    corrects: bool = True
    gate_first: bool = False
    start: str = "linear_attn."
    skip: str | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model's architecture, every number resolved.

    Args:
        norm_eps: of every norm.
        score_scale: what queries are multiplied with.
        activation: a name of `ACTIVATIONS`.
        tensors: what the tensors are called.
        layer_norm: whether norms subtract the mean; else they are RMS norms.
        norm_offset: added to the weights of norms; 1 where a file holds what is beyond 1.
        qk_norm: NONE, SHARED, PER_HEAD or WHOLE.
        qkv_by_head: whether the one tensor of `qkv` holds, for one KV head after another, its queries, key and value.
        gated: whether the MLP multiplies its activations with ups.
        parallel: whether the MLP reads what attention reads.
        partial_rotary: whether the rotary embedding takes the configuration's share of a head.
        interleaved: whether it turns neighbours, and not the halves.
        no_rope: layers whose positions are not rotated.
        score_cap, logit_cap: x becomes cap * tanh(x / cap); 0: as it is.
        embedding_scale, residual_scale: of a token's embedding, of what is added to the residual.
        logit_divisor: of the logits.
        gate_slope, gate_limit: of "clamped_swiglu".
        experts: None where every layer has one MLP.
        convolution: None where no layer is a short convolution.
        recurrence: None where no layer keeps a state.
        gated_attention: whether each head's queries are followed by gates, whose sigmoid multiplies what it attends to.
    """

    norm_eps: float
    score_scale: float
    activation: str
    tensors: Tensors = field(default_factory=Tensors)
    layer_norm: bool = False
    norm_offset: float = 0.0
    qk_norm: int = NONE
    qkv_by_head: bool = False
    gated: bool = True
    parallel: bool = False
    partial_rotary: bool = False
    interleaved: bool = False
    no_rope: frozenset[int] = frozenset()
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    gate_slope: float = 0.0
    gate_limit: float = 0.0
    experts: ExpertNames | None = None
    convolution: ConvolutionNames | None = None
    recurrence: RecurrenceNames | None = None
    gated_attention: bool = False


LACKING = {
    "BloomForCausalLM": "its positions are biases of scores (ALiBi), which the attention kernels do not add",
    "FalconForCausalLM": "its KV heads and norms go by settings of their own, and some models add ALiBi's biases",
    "GPTJForCausalLM": "its rotary embedding and inner size go by settings of their own",
}
"""What would be needed for some that transformers cannot run over blocks of KV either."""


def described(model_class: type) -> bool:
    """Whether a configuration describes a model of this transformers class completely."""
    return model_class.__name__ in ARCHITECTURES


def kv_heads_of(config: Any) -> int:
    """Return the number of KV heads."""
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads


def head_dim_of(config: Any) -> int:
    """Return the number of elements of a head."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def gated_rows(names: Sequence[str], config: Any) -> tuple[SomeRows, ...]:
    """Rows of queries, keys, values and gates where each head's queries are followed by its gates."""
    head_dim = head_dim_of(config)
    starts = range(0, 2 * config.num_attention_heads * head_dim, 2 * head_dim)
    queries = tuple(range(start, start + head_dim) for start in starts)
    gates = tuple(range(start + head_dim, start + 2 * head_dim) for start in starts)
    both, keys, values = names
    return SomeRows(both, queries), SomeRows(keys), SomeRows(values), SomeRows(both, gates)


def widest_mlp(config: Any) -> int:
    """Return the inner size of the widest MLP of any layer."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest: int = max(size) if isinstance(size, list | tuple) else size
    return widest * 2 if getattr(config, "use_double_wide_mlp", False) else widest


def _llama(config: Any) -> Architecture:
    """Norm, attention, norm, MLP, each added to what came in."""
    return Architecture(config.rms_norm_eps, head_dim_of(config) ** -0.5, config.hidden_act)


def _arcee(config: Any) -> Architecture:
    return replace(_llama(config), tensors=Tensors(gate_up=("mlp.up_proj",)), gated=False)


def _qwen3(config: Any) -> Architecture:
    return replace(_llama(config), qk_norm=SHARED)


_SANDWICH = Tensors(
    attention_post="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
)


def _gemma(config: Any) -> Architecture:
    return Architecture(
        config.rms_norm_eps,
        head_dim_of(config) ** -0.5,
        getattr(config, "hidden_activation", None) or config.hidden_act,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
    )


def _gemma2(config: Any) -> Architecture:
    return replace(
        _gemma(config),
        score_scale=config.query_pre_attn_scalar**-0.5,
        tensors=_SANDWICH,
        score_cap=config.attn_logit_softcapping or 0.0,
        logit_cap=config.final_logit_softcapping or 0.0,
    )


def _gemma3(config: Any) -> Architecture:
    # transformers 5 hands no attention cap on for this one, though the configuration may name one.
    return replace(_gemma2(config), qk_norm=SHARED, score_cap=0.0)


_FUSED = Tensors(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def _phi3(config: Any) -> Architecture:
    return replace(_llama(config), tensors=_FUSED, partial_rotary=True)


def _olmo2(config: Any) -> Architecture:
    after = replace(_SANDWICH, attention_norm=None, mlp_norm=None)
    return replace(_llama(config), tensors=after, qk_norm=WHOLE)


def _granite(config: Any) -> Architecture:
    return replace(
        _llama(config),
        score_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_divisor=config.logits_scaling,
    )


def _smollm3(config: Any) -> Architecture:
    return replace(_llama(config), no_rope=frozenset(i for i, rope in enumerate(config.no_rope_layers) if not rope))


def _glm(config: Any) -> Architecture:
    return replace(
        _llama(config), tensors=Tensors(gate_up=("mlp.gate_up_proj",)), partial_rotary=True, interleaved=True
    )


def _glm4(config: Any) -> Architecture:
    sandwich = Tensors(
        gate_up=("mlp.gate_up_proj",),
        attention_post="post_self_attn_layernorm",
        mlp_post="post_mlp_layernorm",
    )
    return replace(_glm(config), tensors=sandwich)


def _starcoder2(config: Any) -> Architecture:
    return Architecture(
        config.norm_epsilon,
        head_dim_of(config) ** -0.5,
        config.hidden_act,
        tensors=Tensors(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        layer_norm=True,
        gated=False,
    )


def _nemotron(config: Any) -> Architecture:
    return Architecture(
        config.norm_eps,
        head_dim_of(config) ** -0.5,
        config.hidden_act,
        tensors=Tensors(gate_up=("mlp.up_proj",)),
        layer_norm=True,
        norm_offset=1.0,
        gated=False,
        partial_rotary=True,
    )


def _stablelm(config: Any) -> Architecture:
    # With a parallel MLP one norm serves both.
    norms = Tensors(
        mlp_norm="input_layernorm" if config.use_parallel_residual else "post_attention_layernorm",
        q_norm="self_attn.q_layernorm.norms.{}",
        k_norm="self_attn.k_layernorm.norms.{}",
    )
    return Architecture(
        config.layer_norm_eps,
        head_dim_of(config) ** -0.5,
        config.hidden_act,
        tensors=norms,
        layer_norm=True,
        qk_norm=PER_HEAD if config.qk_layernorm else NONE,
        parallel=config.use_parallel_residual,
        partial_rotary=True,
    )


def _gpt_neox(config: Any) -> Architecture:
    return Architecture(
        config.layer_norm_eps,
        head_dim_of(config) ** -0.5,
        config.hidden_act,
        tensors=Tensors(
            embedding="gpt_neox.embed_in",
            final_norm="gpt_neox.final_layer_norm",
            in_files=(("lm_head", "embed_out"),),
            layer="gpt_neox.layers.{}.",
            qkv=("attention.query_key_value",),
            out="attention.dense",
            gate_up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
        layer_norm=True,
        qkv_by_head=True,
        gated=False,
        parallel=config.use_parallel_residual,
        partial_rotary=True,
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
    return replace(_qwen3(config), experts=experts if config.num_experts else None)


def _parts_of(name: str) -> tuple[str, str, str]:
    return f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj"


def _qwen2_moe(config: Any) -> Architecture:
    mixed = _qwen3_moe(config)
    experts = mixed.experts and replace(
        mixed.experts,
        shared=_parts_of("mlp.shared_expert"),
        shared_intermediate=config.shared_expert_intermediate_size,
        shared_gate="mlp.shared_expert_gate",
    )
    return replace(mixed, qk_norm=NONE, experts=experts)


def _olmoe(config: Any) -> Architecture:
    if config.clip_qkv is not None:
        raise ValueError(f"clip_qkv is {config.clip_qkv}; queries and keys are not clipped here")
    experts = ExpertNames(
        config.num_experts, config.num_experts_per_tok, config.intermediate_size, normalised=config.norm_topk_prob
    )
    return replace(_llama(config), qk_norm=WHOLE, experts=experts)


def _glm4_moe(config: Any) -> Architecture:
    experts = ExpertNames(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        normalised=config.norm_topk_prob,
        layers=frozenset(range(config.first_k_dense_replace, config.num_hidden_layers)),
        shared=_parts_of("mlp.shared_experts"),
        shared_intermediate=config.n_shared_experts * config.moe_intermediate_size,
        sigmoid=True,
        correction="mlp.gate.e_score_correction_bias",
        scale=config.routed_scaling_factor,
        groups=(config.n_group, config.topk_group),
    )
    kind = SHARED if config.use_qk_norm else NONE
    return replace(_llama(config), qk_norm=kind, partial_rotary=True, experts=experts)


def _ernie(config: Any) -> Architecture:
    return replace(_llama(config), interleaved=True)


def _ernie_moe(config: Any) -> Architecture:
    mixed = range(config.moe_layer_start_index, min(config.moe_layer_end_index + 1, config.num_hidden_layers))
    experts = ExpertNames(
        config.moe_num_experts,
        config.moe_k,
        config.moe_intermediate_size,
        layers=frozenset(layer for layer in mixed if (layer + 1) % config.moe_layer_interval == 0),
        shared=_parts_of("mlp.shared_experts"),
        shared_intermediate=config.moe_num_shared_experts * config.moe_intermediate_size,
        correction="mlp.gate.moe_statics.e_score_correction_bias",
    )
    names = Tensors(in_files=(("mlp.gate.moe_statics", "mlp.moe_statics"),))
    return replace(_ernie(config), experts=experts, tensors=names)


def _full_layers(config: Any) -> frozenset[int]:
    return frozenset(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")


def _exaone4(config: Any) -> Architecture:
    unrotated = frozenset[int]() if config.sliding_window is None else _full_layers(config)
    return replace(_olmo2(config), qk_norm=SHARED, no_rope=unrotated)


def _cohere2(config: Any) -> Architecture:
    return Architecture(
        config.layer_norm_eps,
        head_dim_of(config) ** -0.5,
        config.hidden_act,
        tensors=Tensors(mlp_norm="input_layernorm"),
        layer_norm=True,
        parallel=True,
        interleaved=True,
        no_rope=_full_layers(config),
        logit_divisor=1 / config.logit_scale,
    )


def _mixtral(config: Any) -> Architecture:
    experts = ExpertNames(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        single=("mlp.experts.{}.w1", "mlp.experts.{}.w3", "mlp.experts.{}.w2"),
    )
    return replace(_llama(config), experts=experts, tensors=Tensors(in_files=((".mlp.", ".block_sparse_moe."),)))


def _gpt_oss(config: Any) -> Architecture:
    experts = ExpertNames(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        router="mlp.router",
        transposed=True,
    )
    return replace(
        _llama(config),
        tensors=Tensors(sinks="self_attn.sinks"),
        activation="clamped_swiglu",
        gate_slope=config.swiglu_alpha,
        gate_limit=config.swiglu_limit,
        experts=experts,
    )


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
        _qwen3(config),
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
        shared=_parts_of("mlp.shared_expert"),
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
        _qwen2_moe(config),
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
    return replace(_llama(config), tensors=names, partial_rotary=True, recurrence=_mamba2(config))


def _granite_hybrid(config: Any) -> Architecture:
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
        shared=(*names.gate_up, names.down),
        shared_intermediate=config.shared_intermediate_size,
    )
    rotates = config.position_embedding_type == "rope"
    return replace(
        _granite(config),
        tensors=names,
        no_rope=frozenset() if rotates else frozenset(range(config.num_hidden_layers)),
        experts=experts if config.num_local_experts else None,
        recurrence=_mamba2(config),
    )


ARCHITECTURES: dict[str, Callable[[Any], Architecture]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "Qwen2ForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "GraniteForCausalLM": _granite,
    "SmolLM3ForCausalLM": _smollm3,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": _glm4,
    "Starcoder2ForCausalLM": _starcoder2,
    "NemotronForCausalLM": _nemotron,
    "StableLmForCausalLM": _stablelm,
    "GPTNeoXForCausalLM": _gpt_neox,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "GptOssForCausalLM": _gpt_oss,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "OlmoeForCausalLM": _olmoe,
    "Glm4MoeForCausalLM": _glm4_moe,
    "Ernie4_5ForCausalLM": _ernie,
    "Ernie4_5_MoeForCausalLM": _ernie_moe,
    "Olmo3ForCausalLM": _olmo2,
    "MinistralForCausalLM": _llama,
    "Ministral3ForCausalLM": _llama,
    "SeedOssForCausalLM": _llama,
    "CwmForCausalLM": _llama,
    "HeliumForCausalLM": _ernie,
    "ArceeForCausalLM": _arcee,
    "Exaone4ForCausalLM": _exaone4,
    "Cohere2ForCausalLM": _cohere2,
    "Lfm2ForCausalLM": _lfm2,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "BambaForCausalLM": _bamba,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
}
"""By the name of transformers' class, what makes the architecture of a configuration."""


def layer_groups(name: str, config: "PreTrainedConfig") -> tuple[LayerGroup, ...]:
    """Group the model's layers by their attention window, in the order of each window's first layer.

    Args:
        name: the model's, for errors.
        config: of the text decoder.

    Raises:
        ModelError: a layer is neither full nor sliding-window attention, nor a short convolution, nor recurrent.
    """
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(name, "chunked attention; only full and sliding-window attention is served")
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
    if len(kinds) < num_layers:
        raise ModelError(name, f"config.json gives a kind for {len(kinds)} of {num_layers} layers")
    longest = max_position(name, config)
    taps: int | None = getattr(config, "conv_L_cache", None)
    inner_taps: int | None = getattr(config, "linear_conv_kernel_dim", None) or getattr(config, "mamba_d_conv", None)
    layers_of: dict[LayerGroup, list[int]] = {}
    for layer, kind in enumerate(kinds[:num_layers]):
        if kind == "conv" and taps is not None:
            layers_of.setdefault(LayerGroup((), taps, convolves=True), []).append(layer)
            continue
        if kind in RECURRENT_KINDS:
            layers_of.setdefault(LayerGroup((), inner_taps, recurs=True), []).append(layer)
            continue
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(name, f"layer {layer} is {kind!r}; only full and sliding-window attention is served")
        reach = window if kind == "sliding_attention" else None
        if kind == "sliding_attention" and reach is None:
            raise ModelError(name, f"layer {layer} attends within a window that config.json does not give")
        # A window that no sequence outgrows is no window: one group then holds all layers.
        reach = None if reach is not None and reach >= longest else reach
        layers_of.setdefault(LayerGroup((), reach), []).append(layer)
    return tuple(replace(group, layers=tuple(layers)) for group, layers in layers_of.items())


def layer_shapes(config: Any) -> tuple[LayerShape, ...]:
    """Return the shapes of each layer's entries in the KV cache, for a model with an `Architecture`."""
    head_dim, count = head_dim_of(config), int(config.num_hidden_layers)
    shapes = [LayerShape(kv_heads_of(config), head_dim, head_dim)] * count
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind in ("conv", *RECURRENT_KINDS):
            shapes[layer] = LayerShape(1, config.hidden_size, 0)
    return tuple(shapes)


def max_position(name: str, config: "PreTrainedConfig") -> int:
    """Return the most positions of one sequence.

    Some models rescale rotary embeddings or queries in long sequences. That would change other sequences of the same
    forward and contradict cached keys. So such a model's limit is the position at which the rescaling begins.

    Raises:
        ModelError: the configuration has no such limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelError(name, "config.json does not give max_position_embeddings")
    rope: Any = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope") or kind.get("llama_4_scaling_beta"):
            original = kind.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, original or limit)
    return limit


GROUPS = (LayerGroup((0,)),)
"""One group of one layer, whose blocks hold a text's token ids; see EncoderRunner."""
LAYERS = (LayerShape(1, 1, 1),)

# The length of a tokenizer without a limit.
_NO_BOUND = 10**9


def is_encoder(config: "PreTrainedConfig") -> bool:
    """Whether a model with this configuration is bidirectional."""
    settings: Any = config.get_text_config()
    if settings.is_encoder_decoder or getattr(settings, "is_decoder", False):
        return False
    if getattr(settings, "use_bidirectional_attention", None) is True or getattr(settings, "is_causal", None) is False:
        return True
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and type(config) in MODEL_MAPPING


def encoder_class(source: str, config: Any) -> Any:
    """Return transformers' class of an encoder, without a head or with a head that scores texts.

    Raises:
        ModelError: there is no such class, or the weights belong to another kind of head.
    """
    written = getattr(config, "architectures", None) or [""]
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING

    if is_classifier(config):
        model_class: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    elif written[0].endswith(("Classification", "Answering", "RewardModel")):
        raise ModelError(source, f"its weights are a {written[0]}, which gives no embeddings and no scores of texts")
    else:
        model_class = MODEL_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(source, f"transformers has no {written[0] or 'encoder'} of the kind {config.model_type}")
    return model_class


def load_encoder(
    source: str, directory: Path, config: Any, dtype: torch.dtype, device: torch.device
) -> tuple[Any, frozenset[str]]:
    """Load an encoder's module; also returns the names of the files' tensors that the module does not have.

    Raises:
        ModelError: the weights cannot be read or are incomplete, or as `encoder_class`.
    """
    model_class = encoder_class(source, config)
    try:
        hf, report = model_class.from_pretrained(
            directory, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except Exception as fault:
        raise ModelError(source, f"its weights cannot be read: {' '.join(str(fault).split())[:300]}") from fault
    # A pooler is a head for classification: files of encoders often lack it, and no embedding goes through it.
    missing = sorted(name for name in report["missing_keys"] if "pooler." not in name or is_classifier(config))
    if missing:
        raise ModelError(source, f"its weights lack {missing[0]} ({len(missing)} tensors missing)")
    return hf.eval().requires_grad_(False).to(device), frozenset(report["unexpected_keys"])


def encoder_positions(source: str, hf: "PreTrainedModel", tokenizer_bound: int | None) -> int:
    """Return the most tokens of one text.

    Args:
        tokenizer_bound: the tokenizer's own limit.

    Raises:
        ModelError: neither the configuration nor the tokenizer has a limit.
    """
    config: Any = hf.config
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int):
        # RoBERTa's family begins to count behind the padding's id.
        table = getattr(getattr(getattr(hf, "base_model", hf), "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        limit -= 0 if padding is None else padding + 1
    bounds = [bound for bound in (limit, tokenizer_bound) if isinstance(bound, int) and 0 < bound < _NO_BOUND]
    if not bounds:
        raise ModelError(source, "neither config.json nor its tokenizer gives the most positions of a text")
    return min(bounds)
