"""Small random models as checkpoints that are quantised already, and what transformers makes of the same weights.

Packed code by code, as the formats' own tools define it, without any of the reader's code:
GPTQ (AutoGPTQ, GPTQModel: `qlinear` pack), AWQ (AutoAWQ: WQLinear_GEMM, order 0 2 4 6 1 3 5 7), compressed-tensors
(`pack_to_int32`), FP8 (transformers' and vLLM's `fp8`, DeepSeek's weight_scale_inv), bitsandbytes (`QuantState.as_dict`
with `packed=True`; `Linear8bitLt`), NVFP4 (`pack_fp4_to_uint8`, ModelOpt's NVFP4QTensor).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

NEW_TOKENS = 12
_SHARED: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"tie_word_embeddings": False}),  # qkv and gate_up are one matrix each
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 3, "num_experts_per_tok": 2}),
}


@dataclass(frozen=True)
class Codes:
    """A matrix [n, k] in codes: scale * (code - zero)."""

    bits: int
    codes: torch.Tensor  # [n, k] int64
    scales: torch.Tensor  # [n, groups], in the file's type
    zeros: torch.Tensor  # [n, groups] int64
    group_of: torch.Tensor  # [k]

    def values(self) -> torch.Tensor:
        distance = (self.codes - self.zeros[:, self.group_of]).float()
        return distance * self.scales.float()[:, self.group_of]


@dataclass(frozen=True)
class Format:
    """How linears are written.

    Args:
        write: tensors of one linear, by the ends of their names.
        config: of `quantization_config`.
        bits, group, symmetric, dtype: of the codes; group 0 is all inputs.
        shuffled: whether a group takes its inputs from everywhere.
        plain: names' parts of linears that stay plain numbers.
    """

    write: Callable[["Format", torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
    config: dict[str, Any]
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    dtype: torch.dtype = torch.float16
    shuffled: bool = False
    plain: tuple[str, ...] = field(default=("lm_head", ".gate."))  # a mixture's router never is quantised

    def codes(self, weight: torch.Tensor) -> Codes:
        k = weight.shape[1]
        size, most = self.group or k, 2**self.bits - 1
        group_of = torch.arange(k) // size
        if self.shuffled:
            group_of = group_of[torch.randperm(k)]
        count = int(group_of.max()) + 1
        inputs = [weight[:, group_of == group] for group in range(count)]
        low, high = (torch.stack([f(x, 1).clamp(*bounds) for x in inputs], 1) for f, bounds in _BOUNDS)
        if self.symmetric:
            scales = (torch.maximum(-low, high) / (most // 2)).clamp_min(1e-6).to(self.dtype)
            zeros = torch.full_like(scales, (most + 1) // 2, dtype=torch.int64)
        else:
            scales = ((high - low) / most).clamp_min(1e-6).to(self.dtype)
            zeros = (-low / scales.float()).round().long().clamp(0, most)
        codes = (weight / scales.float()[:, group_of]).round().long() + zeros[:, group_of]
        return Codes(self.bits, codes.clamp(0, most), scales, zeros, group_of)


_BOUNDS = ((torch.amin, (None, 0.0)), (torch.amax, (0.0, None)))


def pack(values: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Codes along the last dimension as int32 words, the first lowest; `order`: the place that comes to each part."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % per_word))
    parts = padded.reshape(*values.shape[:-1], -1, per_word)
    words = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for part, place in enumerate(order or range(per_word)):
        words |= parts[..., place] << (bits * part)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def gptq(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    made = form.codes(weight)
    zeros = made.zeros
    if form.config["checkpoint_format"] == "gptq":
        zeros = (zeros - 1) & (2**form.bits - 1)
    tensors = {
        "qweight": pack(made.codes, form.bits).T.contiguous(),
        "qzeros": pack(zeros.T, form.bits),
        "scales": made.scales.T.contiguous(),
        "g_idx": made.group_of.int(),
    }
    return tensors, made.values()


def awq(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    made, order = form.codes(weight), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": pack(made.codes.T, 4, order),
        "qzeros": pack(made.zeros.T, 4, order),
        "scales": made.scales.T.contiguous(),
    }
    return tensors, made.values()


def pack_quantized(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    made = form.codes(weight)
    tensors = {
        "weight_packed": pack(made.codes, form.bits),
        "weight_scale": made.scales.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not form.symmetric:
        tensors["weight_zero_point"] = pack(made.zeros.T, form.bits).T.contiguous()
    if form.shuffled:
        tensors["weight_g_idx"] = made.group_of.int()
    return tensors, made.values()


def int_quantized(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    made = form.codes(weight)
    tensors = {"weight": (made.codes - 128).to(torch.int8), "weight_scale": made.scales.contiguous()}
    if not form.symmetric:
        tensors["weight_zero_point"] = (made.zeros - 128).to(torch.int8)
    return tensors, made.values()


def fp8(
    tile: tuple[int, int] | None, scale_name: str, dtype: torch.dtype = torch.float32
) -> Callable[[Format, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """With a scale for every tile of outputs and inputs; (1, 0): an output; None: one."""

    def write(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        n, k = weight.shape
        tall, wide = tile or (n, k)
        wide = wide or k
        scales = torch.zeros(-(-n // tall), -(-k // wide))
        each = torch.zeros(n, k)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                at = slice(i * tall, (i + 1) * tall), slice(j * wide, (j + 1) * wide)
                scales[i, j] = (weight[at].abs().max() / 448).to(dtype).float()
                each[at] = scales[i, j]
        small = (weight / each).to(torch.float8_e4m3fn)
        tensors = {"weight": small, scale_name: scales.to(dtype) if tile else scales.to(dtype).reshape(())}
        return tensors, small.float() * each

    return write


# The levels of bitsandbytes' FP4; sixteen numbers of any kind would do, since the file has them.
FP4 = [0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]


def four_bits(
    kind: str, dtype: torch.dtype, block: int, nested: bool
) -> Callable[[Format, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """A factor for each block of consecutive weights; nested: the factors are codes of 8 bits in blocks of 256."""
    levels = torch.linspace(-1, 1, 16) ** 3 if kind == "nf4" else torch.tensor([*FP4, *(-level for level in FP4)])

    def write(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        blocks = weight.reshape(-1, block)
        factors = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": str(dtype).removeprefix("torch.")}
        tensors: dict[str, torch.Tensor] = {}
        if nested:
            offset = float(factors.mean())
            padded = torch.nn.functional.pad(factors - offset, (0, -len(factors) % 256)).reshape(-1, 256)
            outer, scale = padded.abs().amax(1), torch.linspace(-1, 1, 256)
            codes = (padded / outer[:, None])[:, :, None].sub(scale).abs().argmin(2)
            factors = (scale[codes] * outer[:, None]).reshape(-1)[: len(factors)] + offset
            tensors = {
                "weight.absmax": codes.reshape(-1)[: len(factors)].to(torch.uint8),
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": scale,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = (blocks / factors[:, None])[:, :, None].sub(levels).abs().argmin(2)
        flat = codes.reshape(-1, 2)
        text = json.dumps({**state, "shape": list(weight.shape)})
        tensors = {
            "weight.absmax": factors,
            **tensors,
            "weight": (flat[:, :1] * 16 + flat[:, 1:]).to(torch.uint8),
            "weight.quant_map": levels,
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text.encode()), dtype=torch.uint8),
        }
        return tensors, (levels[codes] * factors[:, None]).to(dtype).float().reshape(weight.shape)

    return write


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def four_bit_floats(
    codes_name: str, whole_name: str | None
) -> Callable[[Format, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """NVFP4, in which a group of 16 has a scale in FP8; without a name of the matrix's own scale: MXFP4."""
    levels = torch.tensor([*E2M1, *(-level for level in E2M1)])

    def write(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = weight.reshape(len(weight), -1, 32 if whole_name is None else 16)
        largest = groups.abs().amax(2) / 6
        if whole_name is None:
            exponents = largest.log2().ceil().clamp(-127, 127)
            tensors, scales = {"weight_scale": (exponents + 127).to(torch.uint8)}, exponents.exp2()
        else:
            whole = largest.max() / 448
            stored = (largest / whole).to(torch.float8_e4m3fn)
            if whole_name == "weight_global_scale":
                tensors = {whole_name: (1 / whole).reshape(1)}
                whole = 1 / tensors[whole_name]
            else:
                tensors = {whole_name: whole, "input_scale": torch.tensor(0.25)}
            tensors["weight_scale"], scales = stored, stored.float() * whole
        codes = (groups / scales[:, :, None])[..., None].sub(levels).abs().argmin(3)
        flat = codes.reshape(len(weight), -1)
        tensors[codes_name] = (flat[:, ::2] + 16 * flat[:, 1::2]).to(torch.uint8)
        return tensors, (levels[codes] * scales[:, :, None]).reshape(weight.shape)

    return write


def mlx(
    bits: int, group: int, dtype: torch.dtype
) -> Callable[[Format, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """A weight is scale * code + bias, as `mlx.core.quantize` has it."""

    def write(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = weight.reshape(len(weight), -1, group)
        least, most = groups.amin(2), groups.amax(2)
        scales, biases = ((most - least) / (2**bits - 1)).to(dtype), least.to(dtype)
        codes = ((groups - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 2**bits - 1).long()
        digits = (codes.reshape(len(weight), -1, 1) >> torch.arange(bits)) & 1
        packed = np.packbits(digits.reshape(len(weight), -1).numpy().astype(np.uint8), axis=1, bitorder="little")
        words = torch.from_numpy(packed).view(torch.uint32)
        values = codes.float() * scales.float()[..., None] + biases.float()[..., None]
        if bits != 4:
            values = values.to(dtype).float()
        return {"weight": words, "scales": scales, "biases": biases}, values.reshape(weight.shape)

    return write


def eight_bits(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """bitsandbytes in int8: the largest weight of a row has the code 127."""
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (largest / 127)[:, None]


def bitsandbytes_form(kind: str, dtype: torch.dtype, block: int, nested: bool) -> Format:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return Format(four_bits(kind, dtype, block, nested), {"quant_method": "bitsandbytes", **settings})


def compressed(layout: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def gptq_form(bits: int, group: int, symmetric: bool, layout: str, shuffled: bool = False) -> Format:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": shuffled,
        "checkpoint_format": layout,
    }
    return Format(gptq, config, bits, group, symmetric, shuffled=shuffled)


def awq_form(group: int) -> Format:
    settings = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}
    return Format(awq, settings, 4, group)


def packed_form(bits: int, group: int, symmetric: bool, dtype: torch.dtype, shuffled: bool = False) -> Format:
    strategy: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    config = compressed("pack-quantized", bits, symmetric=symmetric, **strategy)
    return Format(pack_quantized, config, bits, group, symmetric, dtype, shuffled)


FORMATS: dict[str, Format] = {
    **{f"gptq-4-{group}-{v}": gptq_form(4, group, False, v) for group in (0, 32, 64, 128) for v in ("gptq", "gptq_v2")},
    "gptq-4-128-symmetric": gptq_form(4, 128, True, "gptq"),
    "gptq-8-0-symmetric": gptq_form(8, 0, True, "gptq"),
    "gptq-8-32": gptq_form(8, 32, False, "gptq_v2"),
    "gptq-4-32-desc_act": gptq_form(4, 32, False, "gptq", True),
    "gptq-4-odd-groups": gptq_form(4, 48, False, "gptq"),
    "awq-0": awq_form(0),
    "awq-32": awq_form(32),
    "awq-128": awq_form(128),
    "packed-4-128": packed_form(4, 128, True, torch.bfloat16),
    "packed-4-32-float32": packed_form(4, 32, True, torch.float32),
    "packed-4-64-asymmetric": packed_form(4, 64, False, torch.float16),
    "packed-4-32-asymmetric-float32": packed_form(4, 32, False, torch.float32),
    "packed-4-32-actorder": packed_form(4, 32, True, torch.bfloat16, True),
    "packed-8-channel": packed_form(8, 0, True, torch.float32),
    "packed-8-128-asymmetric": packed_form(8, 128, False, torch.bfloat16),
    "int-quantized": Format(
        int_quantized, compressed("int-quantized", 8, strategy="channel"), 8, 0, True, torch.bfloat16
    ),
    "int-quantized-asymmetric": Format(
        int_quantized, compressed("int-quantized", 8, strategy="channel"), 8, 0, False, torch.float16
    ),
    "naive-quantized": Format(
        int_quantized, compressed("naive-quantized", 8, strategy="group", group_size=64), 8, 64, True, torch.float32
    ),
    "float-quantized": Format(
        fp8((1, 0), "weight_scale", torch.bfloat16), compressed("float-quantized", 8, "float", strategy="channel")
    ),
    "float-quantized-block": Format(
        fp8((64, 64), "weight_scale"),
        compressed("float-quantized", 8, "float", strategy="block", block_structure=[64, 64]),
    ),
    "bitsandbytes-nf4": bitsandbytes_form("nf4", torch.bfloat16, 64, True),
    "bitsandbytes-nf4-float32": bitsandbytes_form("nf4", torch.float32, 128, False),
    "bitsandbytes-fp4": bitsandbytes_form("fp4", torch.float16, 4096, True),
    "bitsandbytes-int8": Format(eight_bits, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nvfp4-packed": Format(
        four_bit_floats("weight_packed", "weight_global_scale"), compressed("nvfp4-pack-quantized", 4, "float")
    ),
    "mxfp4-packed": Format(four_bit_floats("weight_packed", None), compressed("mxfp4-pack-quantized", 4, "float")),
    "modelopt-nvfp4": Format(
        four_bit_floats("weight", "weight_scale_2"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    ),
    "modelopt-fp8": Format(fp8(None, "weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "mlx-4-64": Format(mlx(4, 64, torch.bfloat16), {"group_size": 64, "bits": 4}),
    "mlx-4-32-float16": Format(mlx(4, 32, torch.float16), {"group_size": 32, "bits": 4, "mode": "affine"}),
    "mlx-3-64": Format(mlx(3, 64, torch.bfloat16), {"group_size": 64, "bits": 3}),
    "mlx-6-32": Format(mlx(6, 32, torch.float16), {"group_size": 32, "bits": 6}),
    "mlx-8-64": Format(mlx(8, 64, torch.bfloat16), {"group_size": 64, "bits": 8}),
    "fp8-tensor": Format(fp8(None, "weight_scale"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-block": Format(
        fp8((96, 64), "weight_scale_inv"), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [96, 64]}
    ),
}


@dataclass
class Checkpoint:
    """A directory, and the module of transformers with the weights that it holds."""

    directory: Path
    hf: Any

    def generate(self, prompt: Sequence[int]) -> list[int]:
        """What transformers adds, greedily, in float32."""
        ids = torch.tensor([list(prompt)])
        out = self.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in out[0, len(prompt) :]]


def make_checkpoint(directory: Path, form: Format | str, family: str = "llama", **config: Any) -> Checkpoint:
    """Writes a random model of the family; the tokenizer is the caller's to add."""
    form = FORMATS[form] if isinstance(form, str) else form
    model_class, config_class, own = FAMILIES[family]
    torch.manual_seed(len(family))
    hf = model_class(config_class(**{**_SHARED, **own, **config})).eval()
    hf.config.eos_token_id = hf.generation_config.eos_token_id = None  # every answer is as long as it may be
    for parameter in hf.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    hf.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    state = dict(hf.state_dict())
    for name, weight in (safe_names(hf, directory)).items():
        if weight.dim() != 2 or "embed" in name or any(part in name for part in form.plain):
            tensors[name] = weight
            continue
        parts, values = form.write(form, weight)
        tensors |= {f"{name.removesuffix('.weight')}.{end}": part.clone() for end, part in parts.items()}
        _put(state, name, values)
    hf.load_state_dict(state)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    edit_config(directory, quantization_config=form.config)
    return Checkpoint(directory, hf)


def make_gpt_oss(directory: Path, **config: Any) -> Checkpoint:
    """A random gpt-oss with experts in MXFP4, as it is published; the values are transformers' own of these tensors."""
    torch.manual_seed(5)
    sizes = {**_SHARED, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    own = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 0.5}
    hf: Any = GptOssForCausalLM(GptOssConfig(**{**sizes, **own, **config})).eval()
    hf.config.eos_token_id = hf.generation_config.eos_token_id = None
    for name, parameter in hf.named_parameters():
        if parameter.dim() == 1 or name.endswith("bias"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    hf.save_pretrained(directory)
    state, tensors = hf.state_dict(), {}
    for name, values in state.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = values.clone()
            continue
        experts, inputs, outputs = values.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    edit_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return Checkpoint(directory, hf)


def safe_names(hf: Any, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors as they are in files, where a mixture's experts have names of their own."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return {name: tensor.float() for name, tensor in tensors.items()}


def _put(state: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    """The values into a module's state, whose experts stand in one tensor."""
    if name in state:
        state[name].copy_(values)
        return
    start, _, rest = name.replace("block_sparse_moe", "mlp").partition(".experts.")
    number, part, _ = rest.split(".")
    whole = state[f"{start}.experts.{'down_proj' if part == 'w2' else 'gate_up_proj'}"][int(number)]
    whole.chunk(2)[part == "w3"].copy_(values) if part != "w2" else whole.copy_(values)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without(form: str, *plain: str) -> Format:
    """The format with more linears left as they are, as `modules_to_not_convert` and `ignore` name them."""
    whole = FORMATS[form]
    return replace(whole, plain=(*whole.plain, *plain))
