"""Small random models that the C kernels run, with every feature that they have between them."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf

from genbatch.nif.models.architecture import read_whole

WINDOW = 24
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

_SHARED: dict[str, Any] = {
    "vocab_size": 320,
    "max_position_embeddings": 256,
    # Large enough that attention decides the logits; with the usual 0.02 the residual stream would.
    "initializer_range": 0.15,
    "num_hidden_layers": 3,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def _sizes(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        **_SHARED,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _deltas(key_dim: int, value_dim: int, kernel: int) -> dict[str, Any]:
    """A recurrent layer at either end, of two value heads a key head."""
    return {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": kernel,
    }


def _mambas(heads: int, groups: int, state: int) -> dict[str, Any]:
    """Of inner size 128."""
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": 128 // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_chunk_size": 8,
    }


_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.75,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.5,
}
_FACTORS: dict[str, Any] = {
    "lm_head_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6,
    "attention_out_multiplier": 0.8,
    "attention_in_multiplier": 1.25,
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.75,
}
_NEMOTRON_H: dict[str, Any] = {
    **{key: value for key, value in _SHARED.items() if key != "num_hidden_layers"},
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "time_step_min": 1e-30,  # transformers bounds the steps of prompts by it, and those of decodes not
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "n_group": 3,
    "topk_group": 2,
}


# Compressed keys and values: heads of 32 elements that are not rotated and 16 that are, all made of 48 numbers.
_LATENT: dict[str, Any] = {
    **_SHARED,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
_SCALED_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}


def _unsized(sizes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sizes.items() if key != "head_dim"}


CONFIGS: dict[str, tuple[Any, Any]] = {
    # SmolLM2's proportions: 3 query heads a KV head, tied head.
    "llama": (
        hf.LlamaForCausalLM,
        lambda: hf.LlamaConfig(**_sizes(96, 160, 6, 2, 16), tie_word_embeddings=True),
    ),
    # Sizes that fill no block, biases everywhere, one KV head for many, llama3's RoPE.
    "llama_odd": (
        hf.LlamaForCausalLM,
        lambda: hf.LlamaConfig(
            **_sizes(78, 102, 13, 1, 48),
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "mistral": (
        hf.MistralForCausalLM,
        lambda: hf.MistralConfig(**_sizes(64, 96, 4, 4, 80), sliding_window=WINDOW),
    ),
    "qwen2": (
        hf.Qwen2ForCausalLM,
        lambda: hf.Qwen2Config(
            **_sizes(64, 128, 4, 2, 16),
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "qwen3": (hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**_sizes(64, 128, 8, 2, 32))),
    "gemma_wide": (hf.GemmaForCausalLM, lambda: hf.GemmaConfig(**_sizes(64, 96, 2, 1, 512))),
    "gemma": (hf.GemmaForCausalLM, lambda: hf.GemmaConfig(**_sizes(64, 96, 4, 1, 32))),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        lambda: hf.Gemma2Config(
            **_sizes(64, 96, 4, 2, 16),
            sliding_window=WINDOW,
            layer_types=_MIXED,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        lambda: hf.Gemma3TextConfig(
            **_sizes(64, 96, 4, 1, 32),
            sliding_window=WINDOW,
            layer_types=_MIXED,
            query_pre_attn_scalar=20,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            },
        ),
    ),
    # The first 128 of 256 positions have short factors; more are not served.
    "phi3": (
        hf.Phi3ForCausalLM,
        lambda: hf.Phi3Config(
            **_sizes(128, 96, 4, 2, 32),
            original_max_position_embeddings=192,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1 + 0.1 * i for i in range(12)],
                "long_factor": [4.0] * 12,
            },
        ),
    ),
    "olmo2": (hf.Olmo2ForCausalLM, lambda: hf.Olmo2Config(**_sizes(64, 96, 4, 2, 16))),
    "granite": (
        hf.GraniteForCausalLM,
        lambda: hf.GraniteConfig(
            **_sizes(64, 96, 4, 2, 16),
            embedding_multiplier=3.0,
            attention_multiplier=0.125,
            residual_multiplier=0.375,
            logits_scaling=3.0,
        ),
    ),
    # Two rotary bases, a layer without one, sinks in all.
    "granite_swa": (
        hf.GraniteSWAForCausalLM,
        lambda: hf.GraniteSWAConfig(
            **_sizes(64, 96, 4, 2, 16),
            **_GRANITE,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            layer_rope_theta=[100.0, 0, 5000.0],
        ),
    ),
    "granite_moe_swa": (
        hf.GraniteMoeSWAForCausalLM,
        lambda: hf.GraniteMoeSWAConfig(
            **_sizes(64, 40, 4, 2, 16),
            **_GRANITE,
            num_local_experts=6,
            num_experts_per_tok=2,
            shared_intermediate_size=80,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            layer_rope_theta=[100.0, 100.0, 0],
        ),
    ),
    # A wide jitter, so that several experts have a share of the one that is chosen; a head with a bias.
    "phimoe": (
        hf.PhimoeForCausalLM,
        lambda: hf.PhimoeConfig(
            **_unsized(_sizes(64, 40, 4, 2, 16)),
            num_local_experts=6,
            num_experts_per_tok=2,
            router_jitter_noise=0.15,
            attention_bias=True,
            lm_head_bias=True,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1 + 0.1 * i for i in range(8)],
                "long_factor": [4.0] * 8,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 192,
            },
        ),
    ),
    "smollm3": (
        hf.SmolLM3ForCausalLM,
        lambda: hf.SmolLM3Config(**_sizes(64, 96, 4, 2, 16), no_rope_layers=[1, 0, 1], pretraining_tp=1),
    ),
    "glm": (hf.GlmForCausalLM, lambda: hf.GlmConfig(**_sizes(64, 96, 4, 2, 32))),
    "glm4": (hf.Glm4ForCausalLM, lambda: hf.Glm4Config(**_sizes(64, 96, 4, 2, 32))),
    "starcoder2": (
        hf.Starcoder2ForCausalLM,
        lambda: hf.Starcoder2Config(**_sizes(64, 100, 4, 2, 16), use_bias=True, sliding_window=WINDOW),
    ),
    "nemotron": (hf.NemotronForCausalLM, lambda: hf.NemotronConfig(**_sizes(64, 100, 4, 2, 32))),
    "stablelm": (
        hf.StableLmForCausalLM,
        lambda: hf.StableLmConfig(
            **_sizes(64, 96, 2, 1, 32), use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True
        ),
    ),
    "gpt_neox": (hf.GPTNeoXForCausalLM, lambda: hf.GPTNeoXConfig(**_sizes(64, 100, 2, 2, 32))),
    "qwen3_moe": (
        hf.Qwen3MoeForCausalLM,
        lambda: hf.Qwen3MoeConfig(
            **_sizes(64, 96, 4, 2, 16),
            moe_intermediate_size=40,
            num_experts=5,
            num_experts_per_tok=3,
            mlp_only_layers=[1],
        ),
    ),
    "mixtral": (
        hf.MixtralForCausalLM,
        lambda: hf.MixtralConfig(**_sizes(64, 96, 4, 2, 16), num_local_experts=4, num_experts_per_tok=2),
    ),
    "gpt_oss": (
        hf.GptOssForCausalLM,
        lambda: hf.GptOssConfig(
            **_sizes(64, 48, 4, 2, 16),
            sliding_window=WINDOW,
            layer_types=_MIXED,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_limit=0.5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        ),
    ),
    # Two convolutions in a row, one in the end; a bias in each; an inner size that follows from three settings.
    "lfm2": (
        hf.Lfm2ForCausalLM,
        lambda: hf.Lfm2Config(
            **{
                key: value
                for key, value in _sizes(64, 96, 4, 2, 16).items()
                if key not in ("head_dim", "num_hidden_layers")
            },
            num_hidden_layers=4,
            layer_types=["conv", "conv", "full_attention", "conv"],
            conv_bias=True,
            conv_L_cache=4,
            block_multiple_of=8,
            block_ffn_dim_multiplier=1.5,
        ),
    ),
    "qwen3_5": (
        hf.Qwen3_5ForCausalLM,
        lambda: hf.Qwen3_5TextConfig(**(_sizes(64, 96, 4, 2, 32) | _deltas(18, 40, 4)), attention_bias=True),
    ),
    "qwen3_5_moe": (
        hf.Qwen3_5MoeForCausalLM,
        lambda: hf.Qwen3_5MoeTextConfig(
            **(
                {key: value for key, value in _sizes(64, 0, 4, 2, 32).items() if key != "intermediate_size"}
                | _deltas(32, 16, 2)
            ),
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            num_experts=5,
            num_experts_per_tok=3,
        ),
    ),
    "qwen3_next": (
        hf.Qwen3NextForCausalLM,
        lambda: hf.Qwen3NextConfig(
            **(_sizes(64, 96, 4, 2, 32) | _deltas(16, 32, 3)),
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=5,
            num_experts_per_tok=3,
            mlp_only_layers=[1],
        ),
    ),
    "bamba": (
        hf.BambaForCausalLM,
        lambda: hf.BambaConfig(
            **_unsized(_sizes(64, 96, 2, 1, 32)),
            **_mambas(16, 2, 18),
            attn_layer_indices=[1],
            mamba_proj_bias=True,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "granite_hybrid": (
        hf.GraniteMoeHybridForCausalLM,
        lambda: hf.GraniteMoeHybridConfig(
            **_unsized(_sizes(64, 32, 4, 2, 16)),
            **_mambas(4, 1, 32),
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
            embedding_multiplier=3.0,
            attention_multiplier=0.125,
            residual_multiplier=0.375,
            logits_scaling=3.0,
            mamba_d_conv=3,
        ),
    ),
    "granite_hybrid_dense": (
        hf.GraniteMoeHybridForCausalLM,
        lambda: hf.GraniteMoeHybridConfig(
            **_unsized(_sizes(64, 32, 4, 2, 16)),
            **_mambas(8, 4, 16),
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=0,
            shared_intermediate_size=80,
            position_embedding_type="rope",
        ),
    ),
    # The last two layers read the keys and values of the two before them; full layers have heads of twice the size.
    "gemma4": (
        hf.Gemma4ForCausalLM,
        lambda: hf.Gemma4TextConfig(
            **{**_sizes(64, 96, 4, 2, 16), "num_hidden_layers": 4},
            layer_types=[*_MIXED[:2], *_MIXED[:2]],
            sliding_window=WINDOW,
            global_head_dim=32,
            vocab_size_per_layer_input=320,
            hidden_size_per_layer_input=24,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            final_logit_softcapping=5.0,
        ),
    ),
    # The active stream is the second. The sparse layer's inner size is no multiple of a block. Layers share keys.
    "gemma3n": (
        hf.Gemma3nForCausalLM,
        lambda: hf.Gemma3nTextConfig(
            **{**_sizes(72, 100, 4, 2, 16), "num_hidden_layers": 4},
            layer_types=[*_MIXED[:2], *_MIXED[:2]],
            sliding_window=WINDOW,
            vocab_size_per_layer_input=300,
            hidden_size_per_layer_input=24,
            num_kv_shared_layers=2,
            altup_num_inputs=3,
            altup_active_idx=1,
            laurel_rank=12,
            activation_sparsity_pattern=[0.7, 0.0, 0.4, 0.0],
            final_logit_softcapping=5.0,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        ),
    ),
    "gemma4_unified": (
        hf.Gemma4UnifiedForCausalLM,
        lambda: hf.Gemma4UnifiedTextConfig(
            **_sizes(64, 96, 4, 2, 16),
            layer_types=_MIXED[1:] + _MIXED[1:2],
            sliding_window=WINDOW,
            global_head_dim=32,
        ),
    ),
    "gemma4_experts": (
        hf.Gemma4ForCausalLM,
        lambda: hf.Gemma4TextConfig(
            **_sizes(64, 96, 4, 2, 16),
            layer_types=[_MIXED[0], _MIXED[0], _MIXED[1]],
            sliding_window=WINDOW,
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=2,
            moe_intermediate_size=40,
        ),
    ),
    "granite_moe": (
        hf.GraniteMoeForCausalLM,
        lambda: hf.GraniteMoeConfig(**_sizes(64, 40, 4, 2, 16), **_GRANITE, num_local_experts=6, num_experts_per_tok=2),
    ),
    "granite_moe_shared": (
        hf.GraniteMoeSharedForCausalLM,
        lambda: hf.GraniteMoeSharedConfig(
            **_sizes(64, 40, 4, 2, 16),
            **_GRANITE,
            num_local_experts=6,
            num_experts_per_tok=2,
            shared_intermediate_size=80,
        ),
    ),
    # Attention beside Mamba 2; every factor differs from 1, and every linear that may have a bias has one.
    "falcon_h1": (
        hf.FalconH1ForCausalLM,
        lambda: hf.FalconH1Config(
            **_sizes(64, 96, 4, 2, 16),
            **_mambas(8, 2, 16),
            mamba_d_ssm=128,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
            **_FACTORS,
        ),
    ),
    "falcon_h1_gate_last": (
        hf.FalconH1ForCausalLM,
        lambda: hf.FalconH1Config(
            **_sizes(64, 96, 4, 2, 16), **_mambas(4, 1, 18), mamba_d_ssm=128, mamba_rms_norm=True, **_FACTORS
        ),
    ),
    "falcon_h1_plain": (
        hf.FalconH1ForCausalLM,
        lambda: hf.FalconH1Config(
            **_sizes(64, 96, 4, 2, 16), **_mambas(4, 1, 18), mamba_d_ssm=128, mamba_rms_norm=False, **_FACTORS
        ),
    ),
    # No layer attends, and none has an MLP.
    "mamba2": (
        hf.Mamba2ForCausalLM,
        lambda: hf.Mamba2Config(
            **{key: value for key, value in _SHARED.items() if key != "max_position_embeddings"},
            hidden_size=64,
            num_heads=8,
            head_dim=16,
            n_groups=2,
            state_size=16,
            chunk_size=8,
            use_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    # A layer is one thing; two of a kind in a row, and an MLP at the end.
    "nemotron_h": (
        hf.NemotronHForCausalLM,
        lambda: hf.NemotronHConfig(
            **_NEMOTRON_H,
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "mlp"],
            use_bias=True,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "nemotron_h_attends_last": (
        hf.NemotronHForCausalLM,
        lambda: hf.NemotronHConfig(
            **_NEMOTRON_H, layers_block_type=["mlp", "linear_attention", "linear_attention", "full_attention"]
        ),
    ),
    "lfm2_moe": (
        hf.Lfm2MoeForCausalLM,
        lambda: hf.Lfm2MoeConfig(
            **{key: value for key, value in _sizes(64, 96, 4, 2, 16).items() if key != "head_dim"},
            layer_types=["conv", "full_attention", "conv"],
            conv_bias=True,
            num_dense_layers=1,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            routed_scaling_factor=1.5,
        ),
    ),
    "olmo_hybrid": (
        hf.OlmoHybridForCausalLM,
        lambda: hf.OlmoHybridConfig(
            **_unsized(_sizes(64, 96, 4, 2, 16)),
            **_deltas(18, 40, 4),
            rope_parameters={"rope_type": "default", "rope_theta": None},
        ),
    ),
    "olmo_hybrid_rope": (
        hf.OlmoHybridForCausalLM,
        lambda: hf.OlmoHybridConfig(
            **_unsized(_sizes(64, 96, 4, 2, 16)), **_deltas(16, 32, 3), linear_allow_neg_eigval=False
        ),
    ),
    "qwen2_moe": (
        hf.Qwen2MoeForCausalLM,
        lambda: hf.Qwen2MoeConfig(
            **_sizes(64, 96, 4, 2, 16),
            moe_intermediate_size=32,
            shared_expert_intermediate_size=96,
            num_experts=5,
            num_experts_per_tok=2,
            mlp_only_layers=[1],
        ),
    ),
    "olmoe": (
        hf.OlmoeForCausalLM,
        lambda: hf.OlmoeConfig(**_sizes(64, 32, 4, 2, 16), num_experts=5, num_experts_per_tok=2),
    ),
    "glm4_moe": (
        hf.Glm4MoeForCausalLM,
        lambda: hf.Glm4MoeConfig(
            **_sizes(64, 96, 4, 2, 32),
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            first_k_dense_replace=1,
            use_qk_norm=True,
            attention_bias=True,
        ),
    ),
    # V2-Lite's shape: queries are made of the layer's input.
    "deepseek2": (
        hf.DeepseekV2ForCausalLM,
        lambda: hf.DeepseekV2Config(
            **_LATENT, q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=1, rope_parameters=_SCALED_YARN
        ),
    ),
    # V2's: an expert's group is chosen by its best expert; there is a bias wherever one may be.
    "deepseek2_groups": (
        hf.DeepseekV2ForCausalLM,
        lambda: hf.DeepseekV2Config(
            **_LATENT,
            q_lora_rank=40,
            n_shared_experts=1,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            attention_bias=True,
        ),
    ),
    "deepseek3": (
        hf.DeepseekV3ForCausalLM,
        lambda: hf.DeepseekV3Config(
            **_LATENT,
            q_lora_rank=40,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            rope_parameters=_SCALED_YARN,
        ),
    ),
    # Rotated by halves; values are larger than keys.
    "glm4_moe_lite": (
        hf.Glm4MoeLiteForCausalLM,
        lambda: hf.Glm4MoeLiteConfig(
            **{**_LATENT, "v_head_dim": 80},
            n_shared_experts=1,
            q_lora_rank=40,
            rope_interleave=False,
            rms_norm_eps=1e-2,
        ),
    ),
    "apertus": (hf.ApertusForCausalLM, lambda: hf.ApertusConfig(**_sizes(64, 100, 4, 2, 16), dtype="float32")),
    # A rotary embedding that is called dynamic, and has a fixed factor.
    "hunyuan": (
        hf.HunYuanDenseV1ForCausalLM,
        lambda: hf.HunYuanDenseV1Config(
            **_sizes(64, 96, 4, 2, 16),
            attention_bias=True,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
        ),
    ),
    "hunyuan_moe": (
        hf.HunYuanMoEV1ForCausalLM,
        lambda: hf.HunYuanMoEV1Config(**_sizes(64, 32, 4, 2, 16), num_experts=5, moe_topk=[2, 2, 2]),
    ),
    "ernie": (hf.Ernie4_5ForCausalLM, lambda: hf.Ernie4_5Config(**_sizes(64, 96, 4, 2, 16))),
    "ernie_moe": (
        hf.Ernie4_5_MoeForCausalLM,
        lambda: hf.Ernie4_5_MoeConfig(
            **_sizes(64, 96, 4, 2, 16),
            moe_intermediate_size=32,
            moe_num_experts=6,
            moe_k=2,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=2,
        ),
    ),
    "olmo3": (
        hf.Olmo3ForCausalLM,
        lambda: hf.Olmo3Config(**_sizes(64, 96, 4, 2, 16), sliding_window=WINDOW, layer_types=_MIXED),
    ),
    "ministral": (
        hf.MinistralForCausalLM,
        lambda: hf.MinistralConfig(**_sizes(64, 96, 4, 2, 32), sliding_window=WINDOW, layer_types=_MIXED),
    ),
    # Queries are scaled from position 128 on; more are not served.
    "ministral3": (
        hf.Ministral3ForCausalLM,
        lambda: hf.Ministral3Config(
            **_sizes(64, 96, 4, 2, 32),
            sliding_window=None,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "llama_4_scaling_beta": 0.1,
            },
        ),
    ),
    "cwm": (
        hf.CwmForCausalLM,
        lambda: hf.CwmConfig(
            **_sizes(64, 96, 4, 2, 32),
            sliding_window=WINDOW,
            layer_types=_MIXED,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
    ),
    "helium": (hf.HeliumForCausalLM, lambda: hf.HeliumConfig(**_sizes(64, 96, 4, 2, 16))),
    "arcee": (hf.ArceeForCausalLM, lambda: hf.ArceeConfig(**_sizes(64, 96, 4, 2, 16), mlp_bias=True)),
    "seed_oss": (
        hf.SeedOssForCausalLM,
        lambda: hf.SeedOssConfig(
            **_sizes(64, 96, 4, 2, 32), attention_bias=True, attention_out_bias=False, mlp_bias=False
        ),
    ),
    "exaone4": (
        hf.Exaone4ForCausalLM,
        lambda: hf.Exaone4Config(**_sizes(64, 96, 4, 2, 16), sliding_window=WINDOW, layer_types=_MIXED),
    ),
    "cohere2": (
        hf.Cohere2ForCausalLM,
        lambda: hf.Cohere2Config(
            **_sizes(64, 96, 4, 2, 16), sliding_window=WINDOW, layer_types=_MIXED, logit_scale=0.25
        ),
    ),
}
"""Per name a model's class and what makes its configuration."""


# Their norms add 1, but for those that are gated.
_WEIGHTS_BEYOND_ONE = (
    *("gemma", "gemma_wide", "gemma2", "gemma3", "nemotron"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next"),
)


def random_model(name: str, **changes: Any) -> Any:
    """A random model in eval mode; biases, norms and sinks are random too, so that none is idle."""
    model_class, make_config = CONFIGS[name]
    torch.manual_seed(len(name))
    config = make_config()
    read_whole(config)
    for key, value in changes.items():
        setattr(config, key, value)
    model = model_class(config).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            parameter.normal_(std=0.2)
        elif key.endswith("sinks"):
            parameter.normal_(std=2.0)
        elif key.endswith(("conv.conv.weight", "conv1d.weight")):
            parameter.normal_(std=0.7)
        elif key.endswith("A_log"):
            parameter.uniform_(-3.0, 0.5)  # a state that lasts for some tokens
        elif key.endswith(("router.scale", "per_expert_scale")):
            parameter.uniform_(0.5, 1.5)
        elif ".altup." in key and "norm" not in key:
            parameter.normal_(std=1.0 if "router" in key else 0.2)
        elif ".act_fn." in key:
            parameter.uniform_(-1.0, 1.0)
        elif key.endswith(("mamba.D", "mixer.D")):
            parameter.normal_()
        elif "norm" in key:
            low = -0.5 if name in _WEIGHTS_BEYOND_ONE and "linear_attn" not in key else 0.5
            parameter.uniform_(low, low + 1.0)
    for key, buffer in model.named_buffers():
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(std=0.2)
        elif key.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    return model


def build_native_model(name: str, directory: Path, build_tokenizer: Any) -> Path:
    """Saves such a model with a tokenizer."""
    random_model(name).save_pretrained(directory)
    build_tokenizer(directory)
    return directory
