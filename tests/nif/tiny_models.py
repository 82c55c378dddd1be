"""Small random models of several families, saved as Hugging Face directories."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB_SIZE = 320
WINDOW = 8

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_CORPUS = [
    "The capital of France is Paris. A pool of blocks is shared by every sequence.",
    "def attend(query, keys): return softmax(query @ keys) # 0123456789 éàü 世界",
    "system user assistant",
]

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    # Large enough that attention decides the logits; with the usual 0.02 the residual stream would.
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GROUPED: dict[str, Any] = {**_SHARED, "num_key_value_heads": 2, "head_dim": 8}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


_UNSIZED: dict[str, Any] = {key: value for key, value in _GROUPED.items() if key != "head_dim"}
_OF_ATTENTION = ("num_attention_heads", "intermediate_size", "max_position_embeddings")
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}


FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**_GROUPED)),
    # With heads that the kernels in C take: its engine process starts in half the time. Its answers are too fast for
    # tests that kill or pause an engine in the middle of one.
    "native_llama": (LlamaForCausalLM, lambda: LlamaConfig(**{**_GROUPED, "hidden_size": 64, "head_dim": 16})),
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**_GROUPED)),
    "mistral": (MistralForCausalLM, lambda: MistralConfig(**_GROUPED, sliding_window=WINDOW)),
    "gemma3": (
        Gemma3ForCausalLM,
        lambda: Gemma3TextConfig(**_GROUPED, sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=8),
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        lambda: Gemma2Config(
            **_GROUPED,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=8,
        ),
    ),
    "lfm2": (
        Lfm2ForCausalLM,
        lambda: Lfm2Config(
            **_SHARED,
            num_key_value_heads=2,
            layer_types=["conv", "conv", "full_attention", "conv"],
            conv_bias=True,
            block_auto_adjust_ff_dim=False,
        ),
    ),
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        lambda: Qwen3_5TextConfig(**_GROUPED, **_DELTA),
    ),
    "qwen3_next": (
        Qwen3NextForCausalLM,
        lambda: Qwen3NextConfig(
            **_GROUPED,
            **_DELTA,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
    ),
    "bamba": (BambaForCausalLM, lambda: BambaConfig(**_UNSIZED, **_MAMBA, attn_layer_indices=[1])),
    "granite_hybrid": (
        GraniteMoeHybridForCausalLM,
        lambda: GraniteMoeHybridConfig(
            **_UNSIZED,
            **_MAMBA,
            layer_types=["mamba", "attention", "mamba", "mamba"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            position_embedding_type="nope",
            embedding_multiplier=2.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
        ),
    ),
    "falcon_h1": (
        FalconH1ForCausalLM,
        lambda: FalconH1Config(
            **_GROUPED,
            **_MAMBA,
            mamba_d_ssm=64,
            lm_head_multiplier=0.5,
            embedding_multiplier=2.0,
            mlp_multipliers=[0.7, 1.3],
            key_multiplier=0.6,
            attention_out_multiplier=0.8,
            attention_in_multiplier=1.25,
            ssm_multipliers=[0.9, 1.1, 0.7, 1.3, 0.8],
            ssm_in_multiplier=1.2,
            ssm_out_multiplier=0.75,
        ),
    ),
    "mamba2": (
        Mamba2ForCausalLM,
        lambda: Mamba2Config(
            **{key: value for key, value in _SHARED.items() if key not in _OF_ATTENTION},
            num_heads=8,
            head_dim=8,
            n_groups=2,
            state_size=16,
            chunk_size=8,
        ),
    ),
    "nemotron_h": (
        NemotronHForCausalLM,
        lambda: NemotronHConfig(
            **{key: value for key, value in _GROUPED.items() if key != "num_hidden_layers"},
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            mamba_num_heads=8,
            mamba_head_dim=8,
            n_groups=2,
            ssm_state_size=16,
            chunk_size=8,
            time_step_min=1e-30,
            n_routed_experts=4,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=16,
        ),
    ),
    "lfm2_moe": (
        Lfm2MoeForCausalLM,
        lambda: Lfm2MoeConfig(
            **_SHARED,
            num_key_value_heads=2,
            layer_types=["conv", "conv", "full_attention", "conv"],
            conv_bias=True,
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        ),
    ),
    "olmo_hybrid": (OlmoHybridForCausalLM, lambda: OlmoHybridConfig(**_UNSIZED, **_DELTA)),
    "kimi_linear": (
        KimiLinearForCausalLM,
        lambda: KimiLinearConfig(
            **_SHARED,
            num_key_value_heads=4,
            layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            linear_head_dim=8,
            linear_num_heads=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        ),
    ),
    "gpt_neox": (GPTNeoXForCausalLM, lambda: GPTNeoXConfig(**_SHARED)),
    "gpt_oss": (
        GptOssForCausalLM,
        lambda: GptOssConfig(
            **_GROUPED,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
}
"""Per family its class and what makes its configuration."""


def build_model(family: str, directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Saves a random model of the family, with a tokenizer, and returns the directory."""
    model_class, make_config = FAMILIES[family]
    torch.manual_seed(len(family))
    model_class(make_config()).save_pretrained(directory)
    build_tokenizer(directory, chat_template=chat_template)
    return directory


def build_tokenizer(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Saves a byte-level tokenizer that knows every text and has a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|begin|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(directory)
