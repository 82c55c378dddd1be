"""Describes the dense families: each layer has attention and one MLP. Each family is Llama with changes."""

from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from genbatch.nif.models.architecture import (
    NONE,
    PER_HEAD,
    SHARED,
    WHOLE,
    AltUpNames,
    Architecture,
    AssistantNames,
    LayerEmbeddings,
    Tensors,
    head_dim_of,
)


def llama(config: Any) -> Architecture:
    """Describe Llama: norm, attention, norm, MLP; the outputs of attention and MLP are added to the residual."""
    return Architecture(config.rms_norm_eps, head_dim_of(config) ** -0.5, config.hidden_act)


def _with_layer_norms(config: Any, eps: float, **changes: Any) -> Architecture:
    return Architecture(eps, head_dim_of(config) ** -0.5, config.hidden_act, layer_norm=True, **changes)


def _arcee(config: Any) -> Architecture:
    return replace(llama(config), tensors=Tensors(gate_up=("mlp.up_proj",)), gated=False)


def qwen3(config: Any) -> Architecture:
    return replace(llama(config), qk_norm=SHARED)


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


def _vault_gemma(config: Any) -> Architecture:
    return replace(_gemma2(config), tensors=replace(_SANDWICH, attention_post=None, mlp_post=None))


def _gemma3(config: Any) -> Architecture:
    # transformers 5 ignores an attention cap in the configuration of Gemma 3.
    return replace(_gemma2(config), qk_norm=SHARED, score_cap=0.0)


def gemma4(config: Any) -> Architecture:
    """Describe Gemma 4: norms without an offset, heads of two sizes, shared keys and values, embeddings for layers."""
    width = getattr(config, "hidden_size_per_layer_input", 0)
    return replace(
        _gemma(config),
        score_scale=1.0,
        norm_offset=0.0,
        tensors=replace(_SANDWICH, scale="layer_scalar"),
        qk_norm=SHARED,
        value_norm=True,
        logit_cap=config.final_logit_softcapping or 0.0,
        layer_embeddings=LayerEmbeddings(width) if width else None,
    )


def gemma4_assistant(config: Any) -> Architecture:
    """Describe an assistant: layers of Gemma 4 that read another model's keys, and logits without a cap."""
    names = AssistantNames(config.backbone_hidden_size)
    if config.use_ordered_embeddings:
        names = replace(names, clusters=config.num_centroids, chosen=config.centroid_intermediate_top_k)
    return replace(gemma4(config), logit_cap=0.0, assistant=names)


def _gemma3n(config: Any) -> Architecture:
    pattern = config.activation_sparsity_pattern
    altup = AltUpNames(config.altup_num_inputs, config.altup_active_idx)
    return replace(
        gemma4(config),
        tensors=_SANDWICH,
        altup=altup if config.altup_correct_scale else replace(altup, output_scale=None),
        sparse={layer: NormalDist().inv_cdf(share) for layer, share in enumerate(pattern) if share > 0},
    )


_FUSED = Tensors(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def _phi3(config: Any) -> Architecture:
    return replace(llama(config), tensors=_FUSED, partial_rotary=True)


def olmo2(config: Any) -> Architecture:
    after = replace(_SANDWICH, attention_norm=None, mlp_norm=None)
    return replace(llama(config), tensors=after, qk_norm=WHOLE)


def granite(config: Any) -> Architecture:
    return replace(
        llama(config),
        score_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_divisor=config.logits_scaling,
    )


def _hyperclovax(config: Any) -> Architecture:
    post = Tensors(attention_post="post_norm1", mlp_post="post_norm2") if config.use_post_norm else Tensors()
    return replace(granite(config), tensors=post, logit_divisor=1 / config.logits_scaling)


def granite_swa(config: Any) -> Architecture:
    """Describe Granite with windows and sinks. Each layer has its own rotary base; 0 means no rotation."""
    bases = config.layer_rope_theta
    if len(bases) != config.num_hidden_layers:
        raise ValueError(f"layer_rope_theta has {len(bases)} numbers for {config.num_hidden_layers} layers")
    if min(bases) < 0:
        raise ValueError(f"layer_rope_theta has {min(bases)}; a base is positive, or 0 for no rotation")
    unrotated = frozenset(layer for layer, base in enumerate(bases) if not base)
    return replace(granite(config), tensors=Tensors(sinks="self_attn.sinks"), no_rope=unrotated)


def _smollm3(config: Any) -> Architecture:
    return replace(llama(config), no_rope=frozenset(i for i, rope in enumerate(config.no_rope_layers) if not rope))


def _glm(config: Any) -> Architecture:
    return replace(llama(config), tensors=Tensors(gate_up=("mlp.gate_up_proj",)), partial_rotary=True, interleaved=True)


def _glm4(config: Any) -> Architecture:
    sandwich = Tensors(
        gate_up=("mlp.gate_up_proj",),
        attention_post="post_self_attn_layernorm",
        mlp_post="post_mlp_layernorm",
    )
    return replace(_glm(config), tensors=sandwich)


def _apertus(config: Any) -> Architecture:
    names = Tensors(
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        gate_up=("mlp.up_proj",),
        xielu=("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n", "mlp.act_fn.beta", "mlp.act_fn.eps"),
    )
    return replace(qwen3(config), tensors=names, gated=False)


def hunyuan(config: Any) -> Architecture:
    """Describe Hunyuan: Qwen3 with the norms of queries and keys after the rotation."""
    names = Tensors(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
    return replace(qwen3(config), tensors=names, norms_rotated=True)


def _starcoder2(config: Any) -> Architecture:
    names = Tensors(gate_up=("mlp.c_fc",), down="mlp.c_proj")
    return _with_layer_norms(config, config.norm_epsilon, tensors=names, gated=False)


def _nemotron(config: Any) -> Architecture:
    return _with_layer_norms(
        config,
        config.norm_eps,
        tensors=Tensors(gate_up=("mlp.up_proj",)),
        norm_offset=1.0,
        gated=False,
        partial_rotary=True,
    )


def _stablelm(config: Any) -> Architecture:
    # With a parallel MLP, attention and MLP share one norm.
    norms = Tensors(
        mlp_norm="input_layernorm" if config.use_parallel_residual else "post_attention_layernorm",
        q_norm="self_attn.q_layernorm.norms.{}",
        k_norm="self_attn.k_layernorm.norms.{}",
    )
    return _with_layer_norms(
        config,
        config.layer_norm_eps,
        tensors=norms,
        qk_norm=PER_HEAD if config.qk_layernorm else NONE,
        parallel=config.use_parallel_residual,
        partial_rotary=True,
    )


def _phi(config: Any) -> Architecture:
    names = Tensors(
        final_norm="model.final_layernorm",
        out="self_attn.dense",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
        mlp_norm="input_layernorm",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
    )
    return _with_layer_norms(
        config,
        config.layer_norm_eps,
        tensors=names,
        qk_norm=SHARED if config.qk_layernorm else NONE,
        gated=False,
        parallel=True,
        partial_rotary=True,
    )


def _gpt_neox(config: Any) -> Architecture:
    return _with_layer_norms(
        config,
        config.layer_norm_eps,
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
        qkv_by_head=True,
        gated=False,
        parallel=config.use_parallel_residual,
        partial_rotary=True,
    )


def ernie(config: Any) -> Architecture:
    return replace(llama(config), interleaved=True)


def layers_of(config: Any, *kinds: str) -> frozenset[int]:
    return frozenset(layer for layer, kind in enumerate(config.layer_types) if kind in kinds)


def exaone4(config: Any) -> Architecture:
    """Describe EXAONE 4: OLMo 2 with a norm for each head. Beside layers with a window, full layers rotate nothing."""
    unrotated = frozenset[int]() if config.sliding_window is None else layers_of(config, "full_attention")
    return replace(olmo2(config), qk_norm=SHARED, no_rope=unrotated)


def _cohere(config: Any) -> Architecture:
    return _with_layer_norms(
        config,
        config.layer_norm_eps,
        tensors=Tensors(mlp_norm="input_layernorm"),
        qk_norm=PER_HEAD if getattr(config, "use_qk_norm", False) else NONE,
        parallel=True,
        interleaved=True,
        logit_divisor=1 / config.logit_scale,
    )


def cohere2(config: Any) -> Architecture:
    """Describe Cohere 2: Command R in which layers without a window rotate nothing."""
    return replace(_cohere(config), no_rope=layers_of(config, "full_attention"))


DENSE_FAMILIES: dict[str, Callable[[Any], Architecture]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "Qwen2ForCausalLM": llama,
    "Qwen3ForCausalLM": qwen3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "VaultGemmaForCausalLM": _vault_gemma,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3nForCausalLM": _gemma3n,
    "Gemma4UnifiedForCausalLM": gemma4,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": olmo2,
    "GraniteForCausalLM": granite,
    "GraniteSWAForCausalLM": granite_swa,
    "HyperCLOVAXForCausalLM": _hyperclovax,
    "SmolLM3ForCausalLM": _smollm3,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": _glm4,
    "Starcoder2ForCausalLM": _starcoder2,
    "NemotronForCausalLM": _nemotron,
    "StableLmForCausalLM": _stablelm,
    "PhiForCausalLM": _phi,
    "GPTNeoXForCausalLM": _gpt_neox,
    "Ernie4_5ForCausalLM": ernie,
    "Olmo3ForCausalLM": olmo2,
    "MinistralForCausalLM": llama,
    "Ministral3ForCausalLM": llama,
    "SeedOssForCausalLM": llama,
    "CwmForCausalLM": llama,
    "HeliumForCausalLM": ernie,
    "ArceeForCausalLM": _arcee,
    "Exaone4ForCausalLM": exaone4,
    "CohereForCausalLM": _cohere,
    "Cohere2ForCausalLM": cohere2,
    "ApertusForCausalLM": _apertus,
    "HunYuanDenseV1ForCausalLM": hunyuan,
}
