"""Small random models that the C kernels run, with every feature that they have between them."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf

from genbatch.nif.models.architecture import read_whole
from tests.nif.native.attention_configs import ATTENTION_CONFIGS, SHARED, WINDOW, sizes, without_head_dim

__all__ = ["CONFIGS", "WINDOW", "build_native_model", "random_model"]


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
    **{key: value for key, value in SHARED.items() if key != "num_hidden_layers"},
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


CONFIGS: dict[str, tuple[Any, Any]] = {
    **ATTENTION_CONFIGS,
    # Models with recurrent layers.
    # Two convolutions in a row, one in the end; a bias in each; an inner size that follows from three settings.
    "lfm2": (
        hf.Lfm2ForCausalLM,
        lambda: hf.Lfm2Config(
            **{
                key: value
                for key, value in sizes(64, 96, 4, 2, 16).items()
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
    # Norms around each half, a gate for each head, two rotary kinds, windows, and a convolution.
    "lfm3": (
        hf.Lfm3ForCausalLM,
        lambda: hf.Lfm3Config(
            **(sizes(64, 96, 4, 2, 32) | {"num_hidden_layers": 4}),
            layer_types=["conv", "sliding_attention", "full_attention", "conv"],
            sliding_window=WINDOW,
            conv_bias=True,
            conv_L_cache=5,
        ),
    ),
    "qwen3_5": (
        hf.Qwen3_5ForCausalLM,
        lambda: hf.Qwen3_5TextConfig(**(sizes(64, 96, 4, 2, 32) | _deltas(18, 40, 4)), attention_bias=True),
    ),
    "qwen3_5_moe": (
        hf.Qwen3_5MoeForCausalLM,
        lambda: hf.Qwen3_5MoeTextConfig(
            **(
                {key: value for key, value in sizes(64, 0, 4, 2, 32).items() if key != "intermediate_size"}
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
            **(sizes(64, 96, 4, 2, 32) | _deltas(16, 32, 3)),
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
            **without_head_dim(sizes(64, 96, 2, 1, 32)),
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
            **without_head_dim(sizes(64, 32, 4, 2, 16)),
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
            **without_head_dim(sizes(64, 32, 4, 2, 16)),
            **_mambas(8, 4, 16),
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=0,
            shared_intermediate_size=80,
            position_embedding_type="rope",
        ),
    ),
    # Attention beside Mamba 2; every factor differs from 1, and every linear that may have a bias has one.
    "falcon_h1": (
        hf.FalconH1ForCausalLM,
        lambda: hf.FalconH1Config(
            **sizes(64, 96, 4, 2, 16),
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
            **sizes(64, 96, 4, 2, 16), **_mambas(4, 1, 18), mamba_d_ssm=128, mamba_rms_norm=True, **_FACTORS
        ),
    ),
    "falcon_h1_plain": (
        hf.FalconH1ForCausalLM,
        lambda: hf.FalconH1Config(
            **sizes(64, 96, 4, 2, 16), **_mambas(4, 1, 18), mamba_d_ssm=128, mamba_rms_norm=False, **_FACTORS
        ),
    ),
    # No layer attends, and none has an MLP.
    "mamba2": (
        hf.Mamba2ForCausalLM,
        lambda: hf.Mamba2Config(
            **{key: value for key, value in SHARED.items() if key != "max_position_embeddings"},
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
            **{key: value for key, value in sizes(64, 96, 4, 2, 16).items() if key != "head_dim"},
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
            **without_head_dim(sizes(64, 96, 4, 2, 16)),
            **_deltas(18, 40, 4),
            rope_parameters={"rope_type": "default", "rope_theta": None},
        ),
    ),
    "olmo_hybrid_rope": (
        hf.OlmoHybridForCausalLM,
        lambda: hf.OlmoHybridConfig(
            **without_head_dim(sizes(64, 96, 4, 2, 16)), **_deltas(16, 32, 3), linear_allow_neg_eigval=False
        ),
    ),
}
"""By name, the class of a model and a function that makes its configuration."""


# Their norms add 1, but for those that are gated.
_WEIGHTS_BEYOND_ONE = (
    *("gemma", "gemma_wide", "gemma2", "vault_gemma", "gemma3", "nemotron"),
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
