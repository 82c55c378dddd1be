"""Adapters in the C kernels: each way of merging linears, each form of the model's own weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genbatch.nif.context import Context
from genbatch.nif.models.lora import Adapters
from genbatch.nif.models.model import load_model
from genbatch.nif.native.runner import native_runner
from genbatch.nif.runner import Entry, Logits
from tests.lora_adapters import ALL, PeftOracle, make_adapter
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer

PROMPT = [(7 * i) % 300 for i in range(23)]
TARGETS = {
    "gemma2": ALL,  # a norm before what is added to the residual
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],  # one tensor for three, and for two
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],  # head by head, no gates, parallel
    "starcoder2": ["q_proj", "v_proj", "c_fc", "c_proj"],
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],  # experts are not adapted
    "deepseek2": ["q_proj", "kv_a_proj_with_mqa", "o_proj"],  # the latent's rows in another order
    "deepseek3": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"],
    "gemma3n": ALL,  # gates before ups in sparse layers; layers without keys
    "qwen3_5": ALL,  # gates among the queries; recurrent layers are not adapted
}


def context_of(base: Path, adapter: Path, dtype: str = "float32", quantize: str = "none") -> Context:
    model = load_model(str(base), dtype=dtype, n_gpu_layers=0)
    adapters = Adapters(model)
    adapters.add(adapters.read("a", adapter))
    runner = native_runner(model, quantize=quantize, n_threads=2)
    return Context(model, runner, n_ctx=128, n_parallel=2, block_size=4, adapters=adapters)


def logits_of(ctx: Context, handle: int) -> np.ndarray:
    """After every token, in two chunks, beside a sequence without an adapter."""
    parts = []
    for start, end in ((0, 10), (10, len(PROMPT))):
        mine = Entry(0, PROMPT[start:end], start, Logits.ALL, handle)
        parts.append(ctx.eval([Entry(1, PROMPT[start:end], start, Logits.LAST), mine])[1])
    for slot in range(2):
        ctx.seq_rm(slot)
    return np.concatenate(parts)


@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_pefts_whatever_is_merged(name: str, tmp_path: Path) -> None:
    base = build_native_model(name, tmp_path / "base", build_tokenizer)
    adapter = make_adapter(base, tmp_path / "a", TARGETS[name], rank=5)
    expected = PeftOracle(base, {"a": adapter}).logits("a", PROMPT)
    ctx = context_of(base, adapter)
    found = logits_of(ctx, ctx.adapters["a"].handle)
    plain = logits_of(ctx, 0)
    ctx.close()
    assert error(plain, expected) > 0.1  # it does change what the model says
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize(("dtype", "quantize"), [("bfloat16", "none"), ("float32", "int8")])
def test_over_weights_of_fewer_bits_what_is_added_is_in_float32(dtype: str, quantize: str, tmp_path: Path) -> None:
    base = build_native_model("llama", tmp_path / "base", build_tokenizer)
    adapter = make_adapter(base, tmp_path / "a", rank=5)
    oracle: Any = PeftOracle(base, {"a": adapter})
    ctx = context_of(base, adapter, dtype, quantize)
    found, plain = logits_of(ctx, ctx.adapters["a"].handle), logits_of(ctx, 0)
    ctx.close()
    expected = oracle.logits("a", PROMPT)
    assert error(plain, expected) > 0.3
    assert error(found, expected) < 0.1


def error(found: np.ndarray, expected: torch.Tensor) -> float:
    """The median row's distance, as a share of its length."""
    return float(((torch.from_numpy(found) - expected).norm(dim=1) / expected.norm(dim=1)).median())
