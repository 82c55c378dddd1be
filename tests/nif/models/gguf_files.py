"""Small GGUF files for tests of what is read from them, and one sequence to run over them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from genbatch.nif.runner import RaggedBatch

_NEWER: dict[str, int] = {"Q1_0": 41, "Q2_0": 42}  # types of llama.cpp that the gguf package cannot write
GGML_QUANT_SIZES.update({41: (128, 18), 42: (64, 18)})  # type: ignore[dict-item]


def type_number(kind: str) -> Any:
    """GGML's number of a type, for a writer of the gguf package."""
    return _NEWER[kind] if kind in _NEWER else GGMLQuantizationType[kind]


def block_size(kind: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    return GGML_QUANT_SIZES[type_number(kind)]


def quantized(values: np.ndarray, kind: str) -> np.ndarray:
    """The blocks of a matrix, as llama.cpp makes them: [rows, bytes]."""
    if kind not in _NEWER:
        return np.asarray(gguf.quants.quantize(values, type_number(kind)))
    per_block, size = block_size(kind)
    blocks = values.reshape(len(values), -1, per_block)
    raw = np.zeros((*blocks.shape[:2], size), np.uint8)
    scales = np.abs(blocks).mean(axis=2) if kind == "Q1_0" else np.abs(blocks).max(axis=2)
    raw[:, :, :2] = scales.astype(np.float16)[:, :, None].view(np.uint8)
    codes = blocks >= 0 if kind == "Q1_0" else np.round(blocks / scales[:, :, None]) + 1
    a_byte = per_block // (size - 2)
    for i in range(per_block):
        raw[:, :, 2 + i // a_byte] |= codes[:, :, i].astype(np.uint8) << (i % a_byte * (8 // a_byte))
    return raw.reshape(len(raw), -1)


def dequantized(raw: np.ndarray, kind: str) -> np.ndarray:
    """The float32 weights of blocks, as llama.cpp makes them."""
    if kind not in _NEWER:
        return np.asarray(gguf.quants.dequantize(raw, type_number(kind)))
    per_block, size = block_size(kind)
    blocks = raw.reshape(len(raw), -1, size)
    scales = blocks[:, :, :2].copy().view(np.float16)[:, :, 0].astype(np.float32)
    values = np.zeros((*blocks.shape[:2], per_block), np.float32)
    a_byte = per_block // (size - 2)
    for i in range(per_block):
        code = (blocks[:, :, 2 + i // a_byte] >> (i % a_byte * (8 // a_byte))).astype(int)
        values[:, :, i] = np.where(code & 1, scales, -scales) if kind == "Q1_0" else ((code & 3) - 1) * scales
    return values.reshape(len(raw), -1)


def write_llama(
    path: Path,
    kind: str = "Q4_0",
    *,
    keys: Mapping[str, tuple[Any, gguf.GGUFValueType]] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **changed: Any,
) -> bytes:
    """A Llama of one layer.

    Args:
        kind: of its matrices.
        keys: more metadata, in place of what is there.
        tensors: more tensors, or others.
        changed: other numbers, by their keys without the architecture.
    """
    keys, tensors = dict(keys or {}), dict(tensors or {})
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16, **changed}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<b>", "<e>", *(chr(ord("A") + i) for i in range(36)), "AB", "ABC"])
    writer.add_token_types([3, 3] + [1] * 38)
    writer.add_token_merges(["A B", "AB C"])
    for key, (value, value_type) in {"tokenizer.ggml.eos_token_id": (1, gguf.GGUFValueType.UINT32), **keys}.items():
        writer.add_key_value(key, value, value_type)
    random, q = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    matrices = {"token_embd": (40, 64), **{f"blk.0.{name}": shape for name, shape in shapes.items()}}
    for name, shape in matrices.items():
        packed = gguf.quants.quantize(random.normal(size=shape).astype(np.float32), q)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=q)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, dtype=np.float32))
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def put_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """A vocabulary of `size` tokens without meaning; 2 is the end of sequence."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["t", "0", "<e>", "t0", *(f"t{i}" for i in range(4, size))])
    writer.add_token_types([1, 1, 3] + [1] * (size - 3))
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(2)


def batch_of(tokens: list[int], num_groups: int = 1) -> RaggedBatch:
    """One sequence in blocks of 16, at most four."""
    count = len(tokens)
    return RaggedBatch(
        input_ids=np.array(tokens, np.int64),
        positions=np.arange(count),
        query_starts=np.array([0, count], np.int32),
        kv_lens=np.array([count], np.int32),
        slots=(np.arange(count),) * num_groups,
        block_tables=(np.arange(4, dtype=np.int32)[None],) * num_groups,
        logit_rows=np.arange(count),
        max_query_len=count,
        max_kv_len=count,
    )
