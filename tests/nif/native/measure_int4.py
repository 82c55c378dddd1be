"""Perplexity of `quantize=int4` beside llama.cpp's Q4_K_M, weights alone, on the same model; a program.

    GENBATCH_BENCH_PEERS=ENVIRONMENT python tests/nif/native/measure_int4.py --windows 6

The model is SmolLM2-135M with its channels shuffled: the same function, but no 32 inputs side by side are a group of
the file, which int4 would find again without loss. Its layers' matrices are rounded by each method and widened to
float32; head and embedding stay. llama.cpp's own function rounds for Q4_K_M, with Q6_K for the value and down
projections of the layers that it picks, 256 weights in the order in which they lie: 576 columns are no multiple of
256, so its own tool would not use Q4_K for most of this model.
"""

import argparse
import copy
import ctypes
import math
from collections.abc import Callable
from pydoc_data import topics

import gguf
import numpy as np
import torch

from genbatch.nif.models.model import load_model
from genbatch.nif.native.layer_loader import keeps_8_bits
from genbatch.nif.native.library import COLUMNS, WEIGHT_U4, native_library
from genbatch.nif.native.weights import U4_GROUP, WeightPacker
from tests.benchmarks.compare.peers import peer_python

# Loaded separately: they are programs, too.
from measure_perplexity import CHARACTERS, WINDOW  # isort: skip

HEAD_DIM = 64
I8_GROUP = 64
Rounding = Callable[
    [torch.Tensor, str, int], torch.Tensor
]  # weights [outputs, inputs], the projection's name, its layer


def shuffle(model: torch.nn.Module) -> None:
    """Puts the channels of hidden states, MLPs and values in another order, which changes no answer."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    hidden = torch.randperm(config.hidden_size, generator=generator)
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data[:, hidden]
    model.model.norm.weight.data = model.model.norm.weight.data[hidden]
    kv_heads, per_head = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        inner = torch.randperm(config.intermediate_size, generator=generator)
        within = torch.stack([torch.randperm(HEAD_DIM, generator=generator) for _ in range(kv_heads)])
        values = (within + torch.arange(kv_heads)[:, None] * HEAD_DIM).reshape(-1)
        queries = torch.arange(kv_heads * per_head)[:, None] * HEAD_DIM + within.repeat_interleave(per_head, 0)
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data = norm.weight.data[hidden]
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight.data = linear.weight.data[:, hidden]
        attention.v_proj.weight.data = attention.v_proj.weight.data[values]
        attention.o_proj.weight.data = attention.o_proj.weight.data[hidden][:, queries.reshape(-1)]
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.data = linear.weight.data[inner]
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[hidden][:, inner]


class Ggml:
    """llama.cpp's rounding."""

    def __init__(self, layers: int) -> None:
        python = peer_python()
        found = sorted(python.parent.parent.glob("lib/python*/site-packages/llama_cpp/lib/libggml-base.so"))
        self._quantise = ctypes.CDLL(str(found[0])).ggml_quantize_chunk
        self._quantise.restype = ctypes.c_size_t
        self._quantise.argtypes = (
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        )
        self._layers = layers
        self.bits = self.weights = 0

    def rounded(self, weights: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
        """Rounded as `kind` and widened again."""
        flat = weights.contiguous().numpy().reshape(-1)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty(flat.size // block * size, np.uint8)
        self._quantise(int(kind), flat.ctypes.data, out.ctypes.data, 0, flat.size // block, block, None)
        self.bits += 8 * out.size
        self.weights += flat.size
        return torch.from_numpy(gguf.dequantize(out, kind).reshape(weights.shape).copy())

    def q4_k_m(self, weights: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        """As llama.cpp chooses: more bits for some in an eighth of the layers at either end and a third between."""
        eighth = self._layers // 8
        more = layer < eighth or layer >= 7 * self._layers // 8 or (layer - eighth) % 3 == 2
        fine = name in ("v_proj", "down_proj") and more
        return self.rounded(weights, gguf.GGMLQuantizationType.Q6_K if fine else gguf.GGMLQuantizationType.Q4_K)


class Ours:
    """int4's rounding."""

    def __init__(self, layers: int) -> None:
        self._library = native_library()
        self._layers = layers
        self.bits = self.weights = 0.0

    def int4(self, weights: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        """4 bits, or 8 where `keeps_8_bits` says so."""
        fine = name in ("q_proj", "k_proj", "v_proj", "down_proj") and keeps_8_bits(layer, self._layers)
        self.bits += weights.numel() * (8 + 16 / I8_GROUP if fine else 4 + 32 / U4_GROUP)
        self.weights += weights.numel()
        if not fine:
            return self.grids(weights, name, layer)
        groups = weights.reshape(-1, I8_GROUP)
        scale = (groups.abs().amax(dim=1, keepdim=True) / 127).bfloat16().float().clamp(min=1e-12)
        return ((groups / scale).round().clamp(-127, 127) * scale).reshape(weights.shape)

    def grids(self, weights: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        """4 bits everywhere, as pack.c lays them out, read back: steps and offsets of 16 bits."""
        packer = WeightPacker(self._library, 1)
        linear = packer.pack(WEIGHT_U4, weights, U4_GROUP)
        assert linear.kind == WEIGHT_U4, f"{name} of layer {layer} has no grid"
        n, k = weights.shape
        codes_size, size = COLUMNS * U4_GROUP // 2, COLUMNS * U4_GROUP // 2 + 4 * COLUMNS
        blocks, groups = -(-n // COLUMNS), k // U4_GROUP
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * (blocks * groups * size)).from_address(linear.weights))
        cells = raw.reshape(blocks, groups, size)
        codes = cells[:, :, :codes_size].reshape(blocks, groups, U4_GROUP // 8, COLUMNS, 4)
        levels = np.stack((codes & 15, codes >> 4), axis=4)  # [..., 2, 4]: eight inputs side by side
        levels = levels.transpose(0, 3, 1, 2, 4, 5).reshape(blocks * COLUMNS, groups, U4_GROUP).astype(np.float32)
        factors = (
            cells[:, :, codes_size:].copy().view(np.float16).reshape(blocks, groups, 2, COLUMNS).astype(np.float32)
        )
        step, offset = factors.transpose(2, 0, 3, 1).reshape(2, blocks * COLUMNS, groups)
        return torch.from_numpy((step[..., None] * levels + offset[..., None]).reshape(-1, k)[:n])


def end_to_end(weights: torch.Tensor, name: str, layer: int) -> torch.Tensor:
    """Rounding to nearest: 16 levels from a group's least to its largest, in 16 bits each."""
    groups = weights.reshape(-1, U4_GROUP)
    low = groups.min(dim=1, keepdim=True).values
    step = ((groups.max(dim=1, keepdim=True).values - low) / 15).clamp(min=1e-8)
    levels = ((groups - low) / step).round().clamp(0, 15)
    return (levels * step.half().float() + low.half().float()).reshape(weights.shape)


def mean_nll(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Mean negative log-likelihood per token over whole windows."""
    losses = []
    for window in tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW):
        with torch.inference_mode():
            logits = model(window[None]).logits[0]
        losses.append(float(torch.nn.functional.cross_entropy(logits[:-1], window[1:])))
    return sum(losses) / len(losses)


def main() -> None:
    """Prints each way of rounding and its ratio to none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=6, help=f"of {WINDOW} tokens")
    options = parser.parse_args()
    loaded = load_model("smollm2", dtype="float32", n_gpu_layers=0)
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))[CHARACTERS]
    tokens = torch.tensor(loaded.tokenizer.encode(text))[: options.windows * WINDOW]
    model = loaded.hf
    model.set_attn_implementation("sdpa")
    before = mean_nll(model, tokens)
    shuffle(model)
    base = mean_nll(model, tokens)
    assert abs(base - before) < 1e-4, "shuffled, it is another function"
    ggml, ours = Ggml(model.config.num_hidden_layers), Ours(model.config.num_hidden_layers)
    ways: dict[str, Rounding] = {
        "int4": ours.int4,
        "Q4_K_M": ggml.q4_k_m,
        "all in 4": ours.grids,
        "end to end": end_to_end,
    }
    print(f"exact       nll {base:.5f}  perplexity {math.exp(base):.4f}", flush=True)
    for name, way in ways.items():
        rounded = copy.deepcopy(model)
        for index, layer in enumerate(rounded.model.layers):
            for linear_name, linear in layer.named_modules():
                if isinstance(linear, torch.nn.Linear):
                    linear.weight.data = way(linear.weight.data, linear_name.rpartition(".")[2], index)
        nll = mean_nll(rounded, tokens)
        print(f"{name:11} nll {nll:.5f}  perplexity {math.exp(nll):.4f}  ratio {math.exp(nll - base):.5f}", flush=True)
    print(f"bits a weight of the layers: int4 {ours.bits / ours.weights:.2f}, Q4_K_M {ggml.bits / ggml.weights:.2f}")


if __name__ == "__main__":
    main()
