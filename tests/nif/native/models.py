"""Small random models that the C kernels run, with every feature that they have between them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

WINDOW = 24

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


CONFIGS: dict[str, tuple[Any, Any]] = {
    # SmolLM2's proportions: 3 query heads a KV head, tied head.
    "llama": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**_sizes(96, 160, 6, 2, 16), tie_word_embeddings=True),
    ),
    # Sizes that fill no block, biases everywhere, one KV head for many, llama3's RoPE.
    "llama_odd": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
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
        MistralForCausalLM,
        lambda: MistralConfig(**_sizes(64, 96, 4, 4, 80), sliding_window=WINDOW),
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        lambda: Qwen2Config(
            **_sizes(64, 128, 4, 2, 16),
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**_sizes(64, 128, 8, 2, 32))),
}
"""Per name a model's class and what makes its configuration."""


def build_native_model(name: str, directory: Path, build_tokenizer: Any) -> Path:
    """Saves a random model with a tokenizer; biases and norms are random too, so that none is idle."""
    model_class, make_config = CONFIGS[name]
    torch.manual_seed(len(name))
    model = model_class(make_config())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    build_tokenizer(directory)
    return directory
