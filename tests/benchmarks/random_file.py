"""A GGUF file of random weights in the shape of a published model, for `model_files`: speed does not depend on values.

    python -m tests.benchmarks.random_file gpt_oss OUT.gguf     # gpt-oss-20B, 8 of its 24 layers, experts in MXFP4
    python -m tests.benchmarks.random_file gemma4 OUT.gguf      # Gemma 4 E2B in Q4_0
    python -m tests.benchmarks.random_file gemma3n OUT.gguf     # Gemma 3n E2B in Q4_0

The tensors' names and shapes are those that the tests of GGUF families write.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
)

from genbatch.nif.models.architecture import read_whole
from tests.nif.models import test_gguf_families as families
from tests.nif.models.gguf_files import put_tokenizer

# Of the module that gives names and shapes. No other size of a model equals these, so they are replaced in the file.
FEW_TOKENS, FEW_EXPERTS = 1021, 5
POSITIONS = 4096


def gpt_oss(vocab: int, experts: int) -> GptOssConfig:
    """Return gpt-oss-20B's configuration with a third of the layers."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": POSITIONS,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    return GptOssConfig(
        vocab_size=vocab,
        num_hidden_layers=8,
        num_local_experts=experts,
        max_position_embeddings=POSITIONS,
        rope_parameters=yarn,
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_experts_per_tok=4,
        sliding_window=128,
    )


def gemma4(vocab: int, experts: int) -> Gemma4TextConfig:
    """Return Gemma 4 E2B's configuration."""
    return Gemma4TextConfig(
        vocab_size=vocab,
        vocab_size_per_layer_input=vocab,
        max_position_embeddings=POSITIONS,
        num_hidden_layers=35,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        hidden_size=1536,
        intermediate_size=6144,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        num_kv_shared_layers=20,
        hidden_size_per_layer_input=256,
        use_double_wide_mlp=True,
        sliding_window=512,
        final_logit_softcapping=30.0,
    )


def gemma3n(vocab: int, experts: int) -> Gemma3nTextConfig:
    """Return Gemma 3n E2B's configuration."""
    return Gemma3nTextConfig(
        vocab_size=vocab,
        vocab_size_per_layer_input=vocab,
        max_position_embeddings=POSITIONS,
        num_hidden_layers=30,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=10,
        laurel_rank=64,
        activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20,
    )


# The configuration, its class, the tokens and experts of the published model, and the size of a value.
SHAPES: dict[str, tuple[Callable[[int, int], Any], Any, int, int, int]] = {
    "gpt_oss": (gpt_oss, GptOssForCausalLM, 201088, 32, 64),
    "gemma4": (gemma4, Gemma4ForCausalLM, 262144, 0, 512),
    "gemma3n": (gemma3n, Gemma3nForCausalLM, 262144, 0, 256),
}


class _Shapes(gguf.GGUFWriter):
    """Takes the tensors' shapes and nothing else."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add_tensor(self, name: str, tensor: np.ndarray, *_: Any, **__: Any) -> None:
        self.shapes[name] = tensor.shape

    def add_array(self, *_: Any) -> None:
        pass


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors' shapes by their names in the file."""
    make, model_class, vocab, experts, _ = SHAPES[name]
    with torch.device("meta"):
        model = model_class(make(FEW_TOKENS, FEW_EXPERTS))
    read_whole(model.config)
    taken = _Shapes()
    with np.errstate(all="ignore"):  # the values are what was in memory
        families.put_tensors(taken, name, model.to_empty(device="cpu").requires_grad_(False))
    if name == "gemma3n":
        families.put_unread_keys(taken, model.config)
    whole = {FEW_TOKENS: vocab, FEW_EXPERTS: experts}
    return {stored: tuple(whole.get(size, size) for size in shape) for stored, shape in taken.shapes.items()}


def tile(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return bytes of some blocks with small scales."""
    _, size = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (1 << 15, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.choice([118, 119, 120, 121], len(blocks))
    else:
        blocks[:, :2] = rng.normal(0, 1e-3, len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(-1)


def write(name: str, path: Path) -> None:
    """Write the file."""
    make, _, vocab, experts, value_length = SHAPES[name]
    config = make(vocab, experts)
    read_whole(config)
    arch = gguf.MODEL_ARCH_NAMES[families.ARCH[name]]
    writer = gguf.GGUFWriter(path, arch)
    families.put_metadata(writer, name, config)
    writer.add_value_length(value_length)
    if name == "gemma4":
        writer.add_uint32(f"{arch}.attention.value_length_swa", config.head_dim)
    put_tokenizer(writer, vocab)
    rng = np.random.default_rng(0)
    plain = rng.normal(0, 0.02, 1 << 20).astype(np.float32)
    tiles: dict[str, np.ndarray] = {}
    for stored, shape in shapes_of(name).items():
        kind = "MXFP4" if "exps" in stored else "Q8_0" if name == "gpt_oss" else "Q4_0"
        if len(shape) < 2 or stored.endswith(".bias") or any(part in stored for part in ("norm", "gate_inp", "altup")):
            is_factor = "norm" in stored or "scale" in stored
            writer.add_tensor(stored, np.ones(shape, np.float32) if is_factor else np.resize(plain, shape))
            continue
        numbers, size = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        if kind not in tiles:
            tiles[kind] = tile(kind, rng)
        data = np.resize(tiles[kind], (*shape[:-1], shape[-1] // numbers * size))
        writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("path", type=Path)
    chosen = parser.parse_args()
    write(chosen.name, chosen.path)


if __name__ == "__main__":
    main()
