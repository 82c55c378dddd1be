"""Models of known shapes with random weights, for the GPU benchmark."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from genbatch.nif.cuda_device import Device
from genbatch.nif.models.architectures import layer_groups
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.self_check import probe_layers
from genbatch.nif.runners.torch_runner import ATTENTION_NAME, register_attention

_QWEN3 = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-0.6b": lambda: Qwen3Config(hidden_size=1024, intermediate_size=3072, **_QWEN3),
    "qwen3-1.7b": lambda: Qwen3Config(hidden_size=2048, intermediate_size=6144, **_QWEN3),
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
}
TINY = LlamaConfig(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=64,
    max_position_embeddings=64,
)


def build_model(name: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> Model:
    """A model of this shape with random weights."""
    register_attention()
    torch.manual_seed(0)
    with torch.device(device):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    hf.eval().requires_grad_(False)
    groups = layer_groups(name, config)
    layers, vocab_size = probe_layers(name, hf, groups)
    unused: Any = None  # prompts are token ids
    return Model(
        name=name,
        hf=hf,
        config=config,
        tokenizer=unused,
        dtype=str(dtype).removeprefix("torch."),
        device=Device(device.type, device.index),
        groups=groups,
        layers=layers,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(),
        max_position=config.max_position_embeddings,
    )


def bytes_per_step(model: Model, batch_size: int, context: int) -> int:
    """Bytes that a decode step must read: every weight once, and every sequence's keys and values."""
    hf: Any = model.hf
    weights = sum(parameter.nbytes for parameter in hf.parameters())
    if hf.lm_head.weight is not hf.model.embed_tokens.weight:
        weights -= hf.model.embed_tokens.weight.nbytes  # of which a step reads batch_size rows
    per_position = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in model.layers)
    return weights + batch_size * context * per_position * model.torch_dtype.itemsize
