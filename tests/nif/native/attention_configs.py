"""Configurations of small models in which every layer has attention; `models.py` builds the models."""

from typing import Any

import transformers as hf

WINDOW = 24
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

SHARED: dict[str, Any] = {
    "vocab_size": 320,
    "max_position_embeddings": 256,
    # Large enough that attention decides the logits; with the usual 0.02 the residual stream would.
    "initializer_range": 0.15,
    "num_hidden_layers": 3,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def sizes(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        **SHARED,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def without_head_dim(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes for a family that has no `head_dim` in its configuration."""
    return {key: value for key, value in fields.items() if key != "head_dim"}


_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.75,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.5,
}
# Compressed keys and values: heads of 32 elements that are not rotated and 16 that are, all made of 48 numbers.
_LATENT: dict[str, Any] = {
    **SHARED,
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
_MIXTURE = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor")
_GROUPED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
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


ATTENTION_CONFIGS: dict[str, tuple[Any, Any]] = {
    # SmolLM2's proportions: 3 query heads a KV head, tied head.
    "llama": (
        hf.LlamaForCausalLM,
        lambda: hf.LlamaConfig(**sizes(96, 160, 6, 2, 16), tie_word_embeddings=True),
    ),
    # Sizes that fill no block, biases everywhere, one KV head for many, llama3's RoPE.
    "llama_odd": (
        hf.LlamaForCausalLM,
        lambda: hf.LlamaConfig(
            **sizes(78, 102, 13, 1, 48),
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
        lambda: hf.MistralConfig(**sizes(64, 96, 4, 4, 80), sliding_window=WINDOW),
    ),
    "qwen2": (
        hf.Qwen2ForCausalLM,
        lambda: hf.Qwen2Config(
            **sizes(64, 128, 4, 2, 16),
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "qwen3": (hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**sizes(64, 128, 8, 2, 32))),
    "gemma_wide": (hf.GemmaForCausalLM, lambda: hf.GemmaConfig(**sizes(64, 96, 2, 1, 512))),
    "gemma": (hf.GemmaForCausalLM, lambda: hf.GemmaConfig(**sizes(64, 96, 4, 1, 32))),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        lambda: hf.Gemma2Config(
            **sizes(64, 96, 4, 2, 16),
            sliding_window=WINDOW,
            layer_types=_MIXED,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "vault_gemma": (
        hf.VaultGemmaForCausalLM,
        lambda: hf.VaultGemmaConfig(
            **sizes(64, 96, 4, 2, 16),
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
            **sizes(64, 96, 4, 1, 32),
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
            **sizes(128, 96, 4, 2, 32),
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
    "olmo2": (hf.Olmo2ForCausalLM, lambda: hf.Olmo2Config(**sizes(64, 96, 4, 2, 16))),
    "granite": (
        hf.GraniteForCausalLM,
        lambda: hf.GraniteConfig(
            **sizes(64, 96, 4, 2, 16),
            embedding_multiplier=3.0,
            attention_multiplier=0.125,
            residual_multiplier=0.375,
            logits_scaling=3.0,
        ),
    ),
    "hyperclovax": (hf.HyperCLOVAXForCausalLM, lambda: hf.HyperCLOVAXConfig(**sizes(64, 96, 4, 2, 16), **_GRANITE)),
    # Two rotary bases, a layer without one, sinks in all.
    "granite_swa": (
        hf.GraniteSWAForCausalLM,
        lambda: hf.GraniteSWAConfig(
            **sizes(64, 96, 4, 2, 16),
            **_GRANITE,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            layer_rope_theta=[100.0, 0, 5000.0],
        ),
    ),
    "granite_moe_swa": (
        hf.GraniteMoeSWAForCausalLM,
        lambda: hf.GraniteMoeSWAConfig(
            **sizes(64, 40, 4, 2, 16),
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
            **without_head_dim(sizes(64, 40, 4, 2, 16)),
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
        lambda: hf.SmolLM3Config(**sizes(64, 96, 4, 2, 16), no_rope_layers=[1, 0, 1], pretraining_tp=1),
    ),
    "glm": (hf.GlmForCausalLM, lambda: hf.GlmConfig(**sizes(64, 96, 4, 2, 32))),
    "glm4": (hf.Glm4ForCausalLM, lambda: hf.Glm4Config(**sizes(64, 96, 4, 2, 32))),
    "starcoder2": (
        hf.Starcoder2ForCausalLM,
        lambda: hf.Starcoder2Config(**sizes(64, 100, 4, 2, 16), use_bias=True, sliding_window=WINDOW),
    ),
    "nemotron": (hf.NemotronForCausalLM, lambda: hf.NemotronConfig(**sizes(64, 100, 4, 2, 32))),
    "phi": (
        hf.PhiForCausalLM,
        lambda: hf.PhiConfig(
            **without_head_dim(sizes(64, 96, 2, 1, 32)),
            qk_layernorm=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        ),
    ),
    "stablelm": (
        hf.StableLmForCausalLM,
        lambda: hf.StableLmConfig(
            **sizes(64, 96, 2, 1, 32), use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True
        ),
    ),
    "gpt_neox": (hf.GPTNeoXForCausalLM, lambda: hf.GPTNeoXConfig(**sizes(64, 100, 2, 2, 32))),
    "qwen3_moe": (
        hf.Qwen3MoeForCausalLM,
        lambda: hf.Qwen3MoeConfig(
            **sizes(64, 96, 4, 2, 16),
            moe_intermediate_size=40,
            num_experts=5,
            num_experts_per_tok=3,
            mlp_only_layers=[1],
        ),
    ),
    "mixtral": (
        hf.MixtralForCausalLM,
        lambda: hf.MixtralConfig(**sizes(64, 96, 4, 2, 16), num_local_experts=4, num_experts_per_tok=2),
    ),
    "gpt_oss": (
        hf.GptOssForCausalLM,
        lambda: hf.GptOssConfig(
            **sizes(64, 48, 4, 2, 16),
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
    # The last two layers read the keys and values of the two before them; full layers have heads of twice the size.
    "gemma4": (
        hf.Gemma4ForCausalLM,
        lambda: hf.Gemma4TextConfig(
            **{**sizes(64, 96, 4, 2, 16), "num_hidden_layers": 4},
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
            **{**sizes(72, 100, 4, 2, 16), "num_hidden_layers": 4},
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
            **sizes(64, 96, 4, 2, 16),
            layer_types=_MIXED[1:] + _MIXED[1:2],
            sliding_window=WINDOW,
            global_head_dim=32,
        ),
    ),
    "gemma4_experts": (
        hf.Gemma4ForCausalLM,
        lambda: hf.Gemma4TextConfig(
            **sizes(64, 96, 4, 2, 16),
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
        lambda: hf.GraniteMoeConfig(**sizes(64, 40, 4, 2, 16), **_GRANITE, num_local_experts=6, num_experts_per_tok=2),
    ),
    "granite_moe_shared": (
        hf.GraniteMoeSharedForCausalLM,
        lambda: hf.GraniteMoeSharedConfig(
            **sizes(64, 40, 4, 2, 16),
            **_GRANITE,
            num_local_experts=6,
            num_experts_per_tok=2,
            shared_intermediate_size=80,
        ),
    ),
    "qwen2_moe": (
        hf.Qwen2MoeForCausalLM,
        lambda: hf.Qwen2MoeConfig(
            **sizes(64, 96, 4, 2, 16),
            moe_intermediate_size=32,
            shared_expert_intermediate_size=96,
            num_experts=5,
            num_experts_per_tok=2,
            mlp_only_layers=[1],
        ),
    ),
    "olmoe": (
        hf.OlmoeForCausalLM,
        lambda: hf.OlmoeConfig(**sizes(64, 32, 4, 2, 16), num_experts=5, num_experts_per_tok=2),
    ),
    "glm4_moe": (
        hf.Glm4MoeForCausalLM,
        lambda: hf.Glm4MoeConfig(
            **sizes(64, 96, 4, 2, 32),
            **_GROUPED_EXPERTS,
            n_shared_experts=2,
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
    "youtu": (
        hf.YoutuForCausalLM,
        lambda: hf.YoutuConfig(
            **{key: value for key, value in _LATENT.items() if key not in _MIXTURE},
            q_lora_rank=40,
        ),
    ),
    "dots1": (
        hf.Dots1ForCausalLM,
        lambda: hf.Dots1Config(
            **sizes(64, 96, 4, 2, 32),
            **_GROUPED_EXPERTS,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            n_shared_experts=2,
            norm_topk_prob=True,
            first_k_dense_replace=1,
        ),
    ),
    "exaone_moe": (
        hf.ExaoneMoeForCausalLM,
        lambda: hf.ExaoneMoeConfig(
            **sizes(64, 96, 4, 2, 16),
            sliding_window=WINDOW,
            layer_types=_MIXED,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            num_shared_experts=2,
            n_group=2,
            topk_group=1,
        ),
    ),
    "solar_open": (
        hf.SolarOpenForCausalLM,
        lambda: hf.SolarOpenConfig(
            **{key: value for key, value in sizes(64, 96, 4, 2, 32).items() if key != "intermediate_size"},
            **_GROUPED_EXPERTS,
            n_shared_experts=1,
        ),
    ),
    "minimax_m2": (
        hf.MiniMaxM2ForCausalLM,
        lambda: hf.MiniMaxM2Config(
            **sizes(64, 32, 4, 2, 32), num_local_experts=6, num_experts_per_tok=2, rotary_dim=16
        ),
    ),
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
    "apertus": (hf.ApertusForCausalLM, lambda: hf.ApertusConfig(**sizes(64, 100, 4, 2, 16), dtype="float32")),
    # A rotary embedding that is called dynamic, and has a fixed factor.
    "hunyuan": (
        hf.HunYuanDenseV1ForCausalLM,
        lambda: hf.HunYuanDenseV1Config(
            **sizes(64, 96, 4, 2, 16),
            attention_bias=True,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
        ),
    ),
    "hunyuan_moe": (
        hf.HunYuanMoEV1ForCausalLM,
        lambda: hf.HunYuanMoEV1Config(**sizes(64, 32, 4, 2, 16), num_experts=5, moe_topk=[2, 2, 2]),
    ),
    "ernie": (hf.Ernie4_5ForCausalLM, lambda: hf.Ernie4_5Config(**sizes(64, 96, 4, 2, 16))),
    "ernie_moe": (
        hf.Ernie4_5_MoeForCausalLM,
        lambda: hf.Ernie4_5_MoeConfig(
            **sizes(64, 96, 4, 2, 16),
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
        lambda: hf.Olmo3Config(**sizes(64, 96, 4, 2, 16), sliding_window=WINDOW, layer_types=_MIXED),
    ),
    "ministral": (
        hf.MinistralForCausalLM,
        lambda: hf.MinistralConfig(**sizes(64, 96, 4, 2, 32), sliding_window=WINDOW, layer_types=_MIXED),
    ),
    # Queries are scaled from position 128 on; more are not served.
    "ministral3": (
        hf.Ministral3ForCausalLM,
        lambda: hf.Ministral3Config(
            **sizes(64, 96, 4, 2, 32),
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
            **sizes(64, 96, 4, 2, 32),
            sliding_window=WINDOW,
            layer_types=_MIXED,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
    ),
    "helium": (hf.HeliumForCausalLM, lambda: hf.HeliumConfig(**sizes(64, 96, 4, 2, 16))),
    "arcee": (hf.ArceeForCausalLM, lambda: hf.ArceeConfig(**sizes(64, 96, 4, 2, 16), mlp_bias=True)),
    "seed_oss": (
        hf.SeedOssForCausalLM,
        lambda: hf.SeedOssConfig(
            **sizes(64, 96, 4, 2, 32), attention_bias=True, attention_out_bias=False, mlp_bias=False
        ),
    ),
    "exaone4": (
        hf.Exaone4ForCausalLM,
        lambda: hf.Exaone4Config(**sizes(64, 96, 4, 2, 16), sliding_window=WINDOW, layer_types=_MIXED),
    ),
    "cohere": (
        hf.CohereForCausalLM,
        lambda: hf.CohereConfig(
            **without_head_dim(sizes(64, 96, 4, 2, 16)), logit_scale=0.25, use_qk_norm=True, attention_bias=True
        ),
    ),
    "cohere2_moe": (
        hf.Cohere2MoeForCausalLM,
        lambda: hf.Cohere2MoeConfig(
            **sizes(64, 32, 4, 2, 16),
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse", "sparse"],
            prefix_dense_sliding_window_pattern=1,
            prefix_dense_intermediate_size=96,
            logit_scale=0.25,
            num_experts=6,
            num_experts_per_tok=2,
            num_shared_experts=1,
            shared_expert_combination_strategy="sum",
            expert_selection_fn="sigmoid",
            norm_topk_prob=True,
        ),
    ),
    "cohere2": (
        hf.Cohere2ForCausalLM,
        lambda: hf.Cohere2Config(
            **sizes(64, 96, 4, 2, 16), sliding_window=WINDOW, layer_types=_MIXED, logit_scale=0.25
        ),
    ),
}
"""By name, the class of a model and a function that makes its configuration."""
