"""Reads quantised checkpoints: GPTQ, AWQ, compressed-tensors, FP8, NVFP4, MXFP4, bitsandbytes and MLX in safetensors.

scheme = quantisation_of("model", config, directory)        # None for a plain checkpoint
weights = QuantisedWeights("model", SafetensorsWeights("model", directory), scheme)
weights.tensor("model.layers.0.mlp.up_proj.weight").kind    # "G4_128": the file's own codes, scales and zeros

A linear of such a checkpoint has several tensors. This module joins them under the name of a plain checkpoint, so that
no other code needs to know them. The files determine which linears are quantised: linears in the configuration's
`modules_to_not_convert` or `ignore` are stored as plain numbers.

    gptq                qweight [k / codes, n] int32, qzeros [groups, n / codes] int32, scales [groups, n], g_idx [k]
    awq                 qweight [k, n / 8] int32 in the order of `_AWQ_ORDER`, qzeros [groups, n / 8] likewise, scales
    compressed-tensors  weight_packed [n, k / codes] int32, weight_shape, weight_scale [n, groups], weight_zero_point;
                        or weight [n, k] in int8 or FP8, weight_scale; for NVFP4 and MXFP4 weight_packed [n, k / 2]
                        uint8, weight_scale [n, k / 16 or 32], and for NVFP4 weight_global_scale [1]
    modelopt            weight [n, k] in FP8, weight_scale [1]; or for NVFP4 weight [n, k / 2] uint8, weight_scale
                        [n, k / 16] in FP8, weight_scale_2 [1]
    fp8                 weight [n, k] in FP8, weight_scale_inv [n / 128, k / 128] or one number
    mxfp4               experts' NAME_blocks [experts, n, k / 32, 16] uint8, NAME_scales [experts, n, k / 32] uint8; in
                        gate_up_proj the rows of gates and ups alternate
    mlx                 weight [n, k / codes] uint32, scales and biases [n, groups]: a weight is scale * code + bias;
                        `switch_mlp` has these tensors for all experts
    bitsandbytes        4 bits: weight with two codes a byte, weight.quant_map [16], weight.absmax with a factor for
                        each block of weights, and weight.quant_state in JSON; 8 bits: weight [n, k] int8, SCB [n]

n is the number of outputs, k the number of inputs, and `codes` the number of codes in an int32. A weight is
scale * (code - zero), computed in float32. Codes of 4 and 8 bits in groups of whole 32 inputs stay codes
(`GROUP_KINDS`), and so do FP8 in E4M3 (`FP8_KINDS`) and NVFP4 (`FP4_KINDS`).
Other codes are widened to float32, one matrix at a time: FP8 in E5M2, and groups of scattered inputs (`desc_act`).
MLX's codes of 4 bits become GGUF's Q4_1, and its other codes are widened to the type of their scales. Codes of
bitsandbytes are widened to the type in their state, as bitsandbytes does.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from genbatch.nif.errors import ModelError
from genbatch.nif.json_files import one_line
from genbatch.nif.models.quantisation import CODE_BITS, Quantisation
from genbatch.nif.models.weight_source import (
    FLOAT_KINDS,
    FP4_KINDS,
    FP8_KINDS,
    GROUP_KINDS,
    SafetensorsWeights,
    StoredTensor,
    stored,
    torch_type,
)

_WORD = 32  # bits
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each half byte of a word, lowest half byte first
_FP8_KINDS = ("F8_E4M3", "F8_E5M2")
_SCALE_KINDS = (*FLOAT_KINDS, "F8_E8M0")

# A linear's tensors in addition to the codes, and scales of activations and of the KV cache, which are not used here.
_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("biases", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4"),
    *("SCB", "weight_format", "weight_scale_2", "weight_global_scale", "input_global_scale"),
    *("input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale", "k_scale", "v_scale"),
)


class QuantisedWeights:
    """The tensors of a quantised checkpoint. Implements `WeightSource`.

    Args:
        model: the user's name of the model, for errors.
        files: the checkpoint's own tensors.
        scheme: the quantisation from its configuration.
    """

    def __init__(self, model: str, files: SafetensorsWeights, scheme: Quantisation) -> None:
        self._model = model
        self._files = files
        self._scheme = scheme
        # By the name of a quantised linear's weight: the name of the linear's tensors, and the expert's index in them.
        self._linears: dict[str, tuple[str, int | None]] = {}
        self._experts = _mxfp4_experts(model, files) if scheme.method == "mxfp4" else {}
        plain: list[str] = []
        for name in files.names():
            if self._experts and name.endswith((_BLOCKS, _EXPONENTS)):
                continue
            linear, _, part = name.rpartition(".")
            if part in _PARTS[:3] or part == "weight_packed" or (part == "weight" and self._has_codes(name)):
                self._linears |= self._weights_of(linear)
            elif part not in _PARTS or (part.startswith("weight_") and self._is_plain(f"{linear}.weight")):
                plain.append(name)  # a part of plain numbers keeps its name, so that `check_all_used` refuses it
        self._names = frozenset((*plain, *self._linears, *self._experts))

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`. This also compares the shapes of the parts."""
        if (expert := self._experts.get(name)) is not None:
            return expert.shape
        return self._files.shape(name) if name not in self._linears else self._form(name).shape

    def tensor(self, name: str) -> StoredTensor:
        """See `WeightSource`."""
        if (expert := self._experts.get(name)) is not None:
            return expert.read(name, self._files)
        return self._files.tensor(name) if name not in self._linears else self._form(name).read()

    def release(self) -> None:
        """See `WeightSource`."""
        self._files.release()

    def _weights_of(self, linear: str) -> dict[str, tuple[str, int | None]]:
        start, stacked, projection = linear.rpartition(_STACKED)
        if not stacked:
            return {f"{linear}.weight": (linear, None)}
        if start.endswith("block_sparse_moe"):  # Mixtral's names
            projection = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.get(projection, projection)
        shape = self._files.shape(f"{linear}.scales")
        return {f"{start}.experts.{i}.{projection}.weight": (linear, i) for i in range(shape[0] if shape else 0)}

    def _is_plain(self, name: str) -> bool:
        return name in self._files.names() and self._files.kind(name) in FLOAT_KINDS

    def _has_codes(self, name: str) -> bool:
        beside = {f"{name}.quant_map", f"{name}_scale_2", f"{name.removesuffix('weight')}scales"}
        return self._files.kind(name) in ("I8", *_FP8_KINDS) or not beside.isdisjoint(self._files.names())

    def _form(self, name: str) -> "_Gptq | _Awq | _Packed | _Plain | _Bitsandbytes | _E2m1 | _Mlx":
        parts = _Parts(self._model, self._files, name, *self._linears[name], self._scheme)
        if self._scheme.method == "gptq":
            return _Gptq(parts)
        if self._scheme.method == "awq":
            return _Awq(parts)
        if self._scheme.method == "mlx":
            return _Mlx(parts)
        if parts.has("weight.quant_map"):
            return _Bitsandbytes(parts)
        for codes in ("weight_packed", "weight"):
            if parts.has(codes) and parts.kind(codes) == "U8":
                return _E2m1(parts, codes)
        return _Packed(parts) if parts.has("weight_packed") else _Plain(parts)


_STACKED = ".switch_mlp."
_BLOCKS, _EXPONENTS = "_blocks", "_scales"  # endings of the names of MXFP4's two tensors
_MX_GROUP = 32  # inputs that share an exponent


@dataclass(frozen=True, slots=True)
class _Mxfp4Expert:
    """One matrix of one expert, in the tensors of all experts.

    Args:
        base: the prefix of the two tensors' names.
        index: the expert.
        first, step: the matrix has every `step`-th row of the expert, from `first` on.
        shape: the matrix's shape.
    """

    base: str
    index: int
    first: int
    step: int
    shape: tuple[int, int]

    def read(self, name: str, files: SafetensorsWeights) -> StoredTensor:
        """Return the matrix in GGUF's blocks: an exponent, then bytes with the codes of the inputs i and i + 16."""
        pairs = files.part(self.base + _BLOCKS, self.index).numpy()[self.first :: self.step]
        scales = files.part(self.base + _EXPONENTS, self.index).numpy()[self.first :: self.step]
        return StoredTensor(name, "MXFP4", self.shape, _mxfp4_blocks(pairs, scales))


def _mxfp4_blocks(pairs: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return GGUF's blocks [n, bytes] for codes [n, groups, 16], two inputs a byte, and exponents [n, groups]."""
    blocks = np.empty((*exponents.shape, 17), np.uint8)
    blocks[:, :, 0] = exponents
    blocks[:, :, 1:] = _halves(pairs)
    return blocks.reshape(len(blocks), -1)


def _halves(pairs: np.ndarray) -> np.ndarray:
    """Reorder codes of 32 inputs [n, blocks, 16]: from neighbours in a byte to GGUF's inputs i and i + 16 in a byte."""
    low, high = pairs[:, :, :8], pairs[:, :, 8:]
    halves = np.empty_like(pairs)
    halves[:, :, ::2] = (low & 15) | (high << 4)
    halves[:, :, 1::2] = (low >> 4) | (high & 0xF0)
    return halves


def _mxfp4_experts(model: str, files: SafetensorsWeights) -> dict[str, _Mxfp4Expert]:
    """Return the matrices of every expert, by the names in checkpoints with a tensor for each expert.

    Raises:
        ModelError: a tensor has no partner, or its shape does not fit.
    """
    experts: dict[str, _Mxfp4Expert] = {}
    for name in sorted(files.names()):
        if not name.endswith((_BLOCKS, _EXPONENTS)):
            continue
        base = name.removesuffix(_BLOCKS).removesuffix(_EXPONENTS)
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        start, _, projection = base.rpartition(".")
        if base + _BLOCKS not in files.names() or base + _EXPONENTS not in files.names():
            raise ModelError(model, f"its weights lack the partner of {name}: {_BLOCKS} and {_EXPONENTS} go together")
        if projection not in parts:
            raise ModelError(model, f"its weights have {name}; MXFP4 is supported for experts' {' and '.join(parts)}")
        shape = files.shape(base + _BLOCKS)
        step = len(parts[projection])
        fits = len(shape) == 4 and min(shape) > 0 and shape[3] == 16 and shape[1] % step == 0
        if not fits or files.shape(base + _EXPONENTS) != shape[:3]:
            both = f"{list(shape)} and {list(files.shape(base + _EXPONENTS))}"
            raise ModelError(model, f"its weights cannot be read: {name} and its partner have the shapes {both}")
        if (kind := files.kind(name)) != "U8":
            raise ModelError(model, f"its weights cannot be read: {name} is of type {kind}, where U8 is needed")
        matrix = shape[1] // step, shape[2] * _MX_GROUP
        for index in range(shape[0]):
            for first, own in enumerate(parts[projection]):
                experts[f"{start}.{index}.{own}.weight"] = _Mxfp4Expert(base, index, first, step, matrix)
    return experts


class _Parts:
    """The tensors of one linear, and the errors that name them."""

    def __init__(
        self, model: str, files: SafetensorsWeights, name: str, linear: str, expert: int | None, scheme: Quantisation
    ) -> None:
        self._model = model
        self._files = files
        self.linear = linear
        self._expert = expert  # the index in tensors of all experts; else None
        self.scheme = scheme
        self.name = name

    def has(self, part: str) -> bool:
        return f"{self.linear}.{part}" in self._files.names()

    def kind(self, part: str) -> str:
        return self._files.kind(f"{self.linear}.{part}")

    def fault(self, part: str, what: str) -> ModelError:
        name = f"{self.linear}.{part}"
        file = self._files.file(name) if name in self._files.names() else "no file"
        return ModelError(self._model, f"its weights cannot be read: {file}: {name} {what}")

    def shape(self, part: str, kinds: Sequence[str], dims: int | None = None) -> tuple[int, ...]:
        """Return the shape of a part, which must exist in one of these types and with `dims` dimensions."""
        name = f"{self.linear}.{part}"
        if name not in self._files.names():
            other = next(other for other in self._files.names() if other.startswith(f"{self.linear}."))
            raise ModelError(self._model, f"its weights lack {name}, but {self._files.file(other)} has {other}")
        shape, kind = self._files.shape(name)[0 if self._expert is None else 1 :], self._files.kind(name)
        if kind not in kinds:
            raise self.fault(part, f"is of type {kind}, where {', '.join(kinds)} is needed")
        if dims is not None and (len(shape) != dims or 0 in shape):
            raise self.fault(part, f"has the shape {list(shape)}, where {dims} dimensions are needed")
        return shape

    def expect(self, part: str, expected: tuple[int, ...], kinds: Sequence[str]) -> None:
        shape = self.shape(part, kinds)
        if shape != expected:
            raise self.fault(part, f"has the shape {list(shape)}, where {list(expected)} is needed")

    def read(self, part: str) -> torch.Tensor:
        return self._files.part(f"{self.linear}.{part}", self._expert)

    def scales(self, part: str) -> np.ndarray:
        """Return a part of finite numbers, in float32."""
        values = self.read(part).float().numpy()
        if not np.isfinite(values).all():
            raise self.fault(part, "has a scale that is not finite")
        return values

    def group(self, part: str, inputs: int, count: int) -> int:
        """Return the number of inputs that share one of `count` scales."""
        for size in self.scheme.groups:
            known = inputs if size < 1 else min(size, inputs)
            if -(-inputs // known) == count:
                return known
        if count == 1:
            return inputs
        sizes = " or ".join(map(str, self.scheme.groups)) or "no"
        raise self.fault(part, f"has {count} groups of {inputs} inputs; the configuration has groups of {sizes}")

    def group_of_inputs(self, part: str, inputs: int, group: int, count: int) -> np.ndarray | None:
        """Return the group of each input [inputs]; None if the groups follow one another."""
        if not self.has(part):
            return None
        self.expect(part, (inputs,), ("I32", "I64"))
        groups = self.read(part).numpy().astype(np.int64)
        if (groups == -1).all() or np.array_equal(groups, np.arange(inputs) // group):  # -1 means that it was not set
            return None
        if groups.min() < 0 or groups.max() >= count:
            raise self.fault(part, f"names the groups {groups.min()} to {groups.max()} of {count}")
        return groups


class _Gptq:
    """GPTQ packs codes along the inputs, and zeros along the outputs."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._count, outputs = parts.shape("scales", _SCALE_KINDS, 2)
        words, _ = parts.shape("qweight", ("I32",), 2)
        _, zero_words = parts.shape("qzeros", ("I32",), 2)
        self._bits = parts.scheme.bits or zero_words * _WORD // outputs
        if self._bits not in CODE_BITS:
            raise parts.fault("qzeros", f"has {self._bits} bits an output, where 4 or 8 are needed")
        inputs = words * _WORD // self._bits
        if outputs * self._bits % _WORD:
            raise parts.fault("scales", f"has {outputs} outputs, so that their zeros do not fill whole words")
        parts.expect("qweight", (words, outputs), ("I32",))
        parts.expect("qzeros", (self._count, outputs * self._bits // _WORD), ("I32",))
        self._group = parts.group("scales", inputs, self._count)
        self.shape = (outputs, inputs)

    def read(self) -> StoredTensor:
        parts, inputs = self._parts, self.shape[1]
        codes = _bytes(parts.read("qweight").T)  # [outputs, inputs * bits / 8]
        zeros = _codes(_bytes(parts.read("qzeros")), self._bits)  # [groups, outputs]
        if parts.scheme.less_one:
            zeros = (zeros + 1) & (2**self._bits - 1)
        order = parts.group_of_inputs("g_idx", inputs, self._group, self._count)
        return _Groups(self._bits, codes, parts.scales("scales").T, zeros.T, self._group, order).stored(
            parts.name, inputs
        )


class _Awq:
    """AWQ packs codes and zeros along the outputs, in the order of `_AWQ_ORDER`."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        count, outputs = parts.shape("scales", _SCALE_KINDS, 2)
        inputs, _ = parts.shape("qweight", ("I32",), 2)
        if outputs % 8:
            raise parts.fault("scales", f"has {outputs} outputs, which do not fill whole words")
        parts.expect("qweight", (inputs, outputs // 8), ("I32",))
        parts.expect("qzeros", (count, outputs // 8), ("I32",))
        self._group = parts.group("scales", inputs, count)
        self.shape = (outputs, inputs)

    def read(self) -> StoredTensor:
        parts, inputs = self._parts, self.shape[1]
        codes = np.ascontiguousarray(_in_order(parts.read("qweight")).T)  # [outputs, inputs]
        codes = codes if inputs % 2 == 0 else np.pad(codes, ((0, 0), (0, 1)))
        halves = codes[:, ::2] | codes[:, 1::2] << 4
        zeros = _in_order(parts.read("qzeros")).T
        return _Groups(4, halves, parts.scales("scales").T, zeros, self._group).stored(parts.name, inputs)


class _Mlx:
    """MLX packs codes along the inputs, and has a scale and a bias for each group."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        scheme = parts.scheme
        self._bits, self._group = scheme.own.get(parts.linear, (scheme.bits or 0, scheme.groups[0]))
        outputs, words = parts.shape("weight", ("U32",), 2)
        self.shape = (outputs, words * _WORD // self._bits)
        if self.shape[1] % self._group:
            raise parts.fault("weight", f"has {self.shape[1]} inputs, which do not fill groups of {self._group}")
        for part in ("scales", "biases"):
            parts.expect(part, (outputs, self.shape[1] // self._group), (*FLOAT_KINDS,))

    def read(self) -> StoredTensor:
        parts, (outputs, inputs) = self._parts, self.shape
        packed, scales, biases = _bytes(parts.read("weight")), parts.scales("scales"), parts.scales("biases")
        factors = np.stack((scales, biases), axis=2)  # [outputs, groups, 2]
        halves = factors.astype("<f2")
        if self._bits == 4 and self._group % _MX_GROUP == 0 and (halves == factors).all():
            blocks = np.empty((outputs, inputs // _MX_GROUP, 20), np.uint8)
            blocks[:, :, :4] = np.repeat(halves.view(np.uint8), self._group // _MX_GROUP, axis=1)
            blocks[:, :, 4:] = _halves(packed.reshape(outputs, -1, 16))
            return StoredTensor(parts.name, "Q4_1", self.shape, blocks.reshape(outputs, -1))
        each = np.repeat(factors, self._group, axis=1)
        digits = np.unpackbits(packed, axis=1, bitorder="little").reshape(outputs, inputs, self._bits)
        codes = np.packbits(digits, axis=2, bitorder="little")[:, :, 0]
        values = torch.from_numpy(codes * each[:, :, 0] + each[:, :, 1])
        return stored(parts.name, values.to(torch_type(parts.kind("scales"))))


class _Packed:
    """compressed-tensors packs codes plus half their range along the inputs, and zeros along the outputs."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        parts.expect("weight_shape", (2,), ("I32", "I64"))
        outputs, inputs = parts.read("weight_shape").tolist()
        if min(outputs, inputs) < 1:
            raise parts.fault("weight_shape", f"has {outputs} outputs and {inputs} inputs")
        _, words = parts.shape("weight_packed", ("I32",), 2)
        fitting = [bits for bits in CODE_BITS if -(-inputs // (_WORD // bits)) == words]
        if not fitting:
            raise parts.fault("weight_packed", f"has {words} words for {inputs} inputs, which is neither 4 nor 8 bits")
        self._bits = fitting[0]
        parts.expect("weight_packed", (outputs, words), ("I32",))
        self._scales = _ScaleShape(parts, outputs, inputs)
        self.shape = (outputs, inputs)

    def read(self) -> StoredTensor:
        parts, (outputs, inputs) = self._parts, self.shape
        middle = 1 << (self._bits - 1)
        zeros = np.full((outputs, self._scales.count), middle, np.uint8)
        if parts.has("weight_zero_point"):
            zeros = self._zeros(outputs, middle)
        group, count = self._scales.group, self._scales.count
        order = parts.group_of_inputs("weight_g_idx", inputs, group, count)
        codes = _bytes(parts.read("weight_packed"))
        return _Groups(self._bits, codes, self._scales.read(), zeros, group, order).stored(parts.name, inputs)

    def _zeros(self, outputs: int, middle: int) -> np.ndarray:
        """Return the zeros [outputs, groups] as codes. Files have them packed along the outputs, or a byte each."""
        parts, count = self._parts, self._scales.count
        if parts.shape("weight_zero_point", ("I8", "I32")) == (outputs, count) and outputs > 1:
            return (parts.read("weight_zero_point").numpy().astype(np.int16) + middle).astype(np.uint8)
        per_word = _WORD // self._bits
        words = -(-outputs // per_word)
        parts.expect("weight_zero_point", (words, count), ("I32",))
        packed = _codes(_bytes(parts.read("weight_zero_point").T), self._bits)  # [groups, padded outputs]
        return packed.T[:outputs]


class _ScaleShape:
    """compressed-tensors' weight_scale: one scale, a scale for each output, or a scale for each output's groups."""

    def __init__(self, parts: _Parts, outputs: int, inputs: int) -> None:
        self._parts = parts
        self._outputs = outputs
        shape = parts.shape("weight_scale", _SCALE_KINDS)
        single = int(np.prod(shape, dtype=object)) == 1
        if not single and (len(shape) not in (1, 2) or shape[0] != outputs or 0 in shape):
            raise parts.fault("weight_scale", f"has the shape {list(shape)} for {outputs} outputs of {inputs} inputs")
        self.count = 1 if single or len(shape) == 1 else shape[1]
        self.group = parts.group("weight_scale", inputs, self.count)

    def read(self) -> np.ndarray:  # [outputs, groups] float32
        scales = self._parts.scales("weight_scale")
        return np.broadcast_to(scales.reshape(-1, self.count), (self._outputs, self.count))


class _Plain:
    """Codes of a byte, int8 or FP8, under the name of a plain weight."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        outputs, inputs = self.shape = parts.shape("weight", ("I8", *_FP8_KINDS), 2)
        self._scale = next(filter(parts.has, ("weight_scale_inv", "SCB")), "weight_scale")
        shape = parts.shape(self._scale, _SCALE_KINDS)
        self._tile = parts.scheme.tile
        if int(np.prod(shape, dtype=object)) == 1:
            self._tile = (outputs, inputs)
        elif len(shape) in (1, 2) and shape[0] == outputs and (len(shape) == 1 or shape[1] == 1):
            self._tile = (1, inputs)
        elif len(shape) == 2 and shape[0] == outputs and self._tile is None:
            self._tile = (1, parts.group(self._scale, inputs, shape[1]))
        elif self._tile is not None:
            tiles = tuple(-(-size // tile) for size, tile in zip(self.shape, self._tile, strict=True))
            parts.expect(self._scale, tiles, _SCALE_KINDS)
        else:
            raise parts.fault(self._scale, f"has the shape {list(shape)} for weights of {list(self.shape)}")

    def read(self) -> StoredTensor:
        parts, (outputs, inputs) = self._parts, self.shape
        assert self._tile is not None
        weight = parts.read("weight")
        tall, wide = self._tile
        scales = parts.scales(self._scale).reshape(-(-outputs // tall), -(-inputs // wide))
        if self._scale == "SCB":  # the largest weight of a row, which has the code 127
            scales = scales / np.float32(127)
        if weight.dtype == torch.int8 and tall in (1, outputs):
            zeros = np.full((outputs, scales.shape[1]), 128, np.uint8)
            if parts.has("weight_zero_point"):
                points = parts.read("weight_zero_point").numpy().reshape(-1, scales.shape[1])
                zeros[:] = (points.astype(np.int16) + 128).astype(np.uint8)
            codes = weight.view(torch.uint8).numpy() ^ 128
            every = np.broadcast_to(scales, zeros.shape)
            return _Groups(8, codes, every, zeros, wide).stored(parts.name, inputs)
        if parts.has("weight_zero_point"):
            raise parts.fault("weight_zero_point", "is not supported with scales of tiles or with FP8")
        if weight.dtype == torch.float8_e4m3fn and (block := _fp8_block(inputs, wide)) is not None:
            which = np.arange(outputs)[:, None] // tall, np.arange(0, inputs, block)[None] // wide
            blocks = np.empty((outputs, inputs // block, 4 + block), np.uint8)
            blocks[:, :, :4] = scales[which].astype("<f4")[:, :, None].view(np.uint8)
            blocks[:, :, 4:] = weight.view(torch.uint8).numpy().reshape(outputs, -1, block)
            return StoredTensor(parts.name, f"F8_{block}", (outputs, inputs), blocks.reshape(outputs, -1))
        scale = torch.from_numpy(scales).repeat_interleave(tall, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
        return stored(parts.name, weight.float().mul_(scale))


_NV_GROUP = 16  # inputs that share a scale of NVFP4


class _E2m1:
    """NVFP4 and compressed-tensors' MXFP4 have two codes of E2M1 in a byte, the first in the low half."""

    def __init__(self, parts: _Parts, codes: str) -> None:
        self._parts = parts
        self._codes = codes
        outputs, size = parts.shape(codes, ("U8",), 2)
        self.shape = (outputs, 2 * size)
        parts.shape("weight_scale", ("F8_E4M3", "U8", "F8_E8M0"), 2)
        self._mx = parts.kind("weight_scale") != "F8_E4M3"
        group = _MX_GROUP if self._mx else _NV_GROUP
        if 2 * size % _MX_GROUP:
            raise parts.fault(codes, f"has {2 * size} inputs, which do not fill groups of {_MX_GROUP}")
        parts.expect("weight_scale", (outputs, 2 * size // group), ("F8_E4M3", "U8", "F8_E8M0"))
        self._whole = "weight_global_scale" if codes == "weight_packed" else "weight_scale_2"
        if not self._mx and np.prod(parts.shape(self._whole, ("F32",)), dtype=object) != 1:
            raise parts.fault(self._whole, "is not one number")

    def read(self) -> StoredTensor:
        parts, (outputs, inputs) = self._parts, self.shape
        codes = parts.read(self._codes).numpy()
        scales = parts.read("weight_scale").view(torch.uint8).numpy()
        if self._mx:
            blocks = _mxfp4_blocks(codes.reshape(*scales.shape, -1), scales)
            return StoredTensor(parts.name, "MXFP4", self.shape, blocks)
        parts.scales("weight_scale")  # refuses NaN
        whole = parts.scales(self._whole).reshape(1)
        if self._whole == "weight_global_scale":  # a divisor of the scales
            if whole == 0:
                raise parts.fault(self._whole, "is zero, but the scales are divided by it")
            whole = np.float32(1) / whole
        kind, block = next((kind, size) for kind, size in reversed(FP4_KINDS.items()) if inputs % size == 0)
        groups = block // _NV_GROUP
        blocks = np.empty((outputs, inputs // block, 4 + groups + block // 2), np.uint8)
        blocks[:, :, :4] = whole.astype("<f4").view(np.uint8)
        blocks[:, :, 4 : 4 + groups] = scales.reshape(outputs, -1, groups)
        blocks[:, :, 4 + groups :] = codes.reshape(outputs, -1, block // 2)
        return StoredTensor(parts.name, kind, self.shape, blocks.reshape(outputs, -1))


_STATE = "weight.quant_state.bitsandbytes__"
_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class _Bitsandbytes:
    """bitsandbytes has NF4 or FP4 in blocks of consecutive weights. The blocks' factors may be codes themselves."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        name = f"{_STATE}nf4" if parts.has(f"{_STATE}nf4") else f"{_STATE}fp4"
        parts.shape(name, ("U8",), 1)
        try:
            state = json.loads(bytes(parts.read(name).numpy()))
            outputs, inputs = map(int, state["shape"])
            self._block, self._dtype = int(state["blocksize"]), _TYPES[state["dtype"]]
            self._offset = float(state.get("nested_offset", 0.0))
            self._nested_block = int(state.get("nested_blocksize", 0))
            if min(outputs, inputs, self._block) < 1 or self._nested_block < 0:
                raise ValueError("a size is not positive")
        except (ValueError, TypeError, KeyError, AttributeError) as fault:
            raise parts.fault(name, f"is not a state of bitsandbytes: {one_line(fault)}") from fault
        self.shape = (outputs, inputs)
        words, kind = parts.shape("weight", ("U8", *FLOAT_KINDS)), parts.kind("weight")
        size = int(np.prod(words, dtype=object)) * FLOAT_KINDS.get(kind, 1)
        if size != -(-outputs * inputs // 2):
            raise parts.fault("weight", f"has {size} bytes for {outputs} x {inputs} codes of 4 bits")
        parts.expect("weight.quant_map", (16,), ("F32",))
        count = -(-outputs * inputs // self._block)
        parts.expect("weight.absmax", (count,), ("U8",) if self._nested_block else ("F32",))
        if self._nested_block:
            parts.expect("weight.nested_quant_map", (256,), ("F32",))
            parts.expect("weight.nested_absmax", (-(-count // self._nested_block),), ("F32",))

    def read(self) -> StoredTensor:
        parts, size = self._parts, self.shape[0] * self.shape[1]
        packed = parts.read("weight").contiguous().view(torch.uint8).numpy().reshape(-1)
        codes = np.stack((packed >> 4, packed & 15), axis=1).reshape(-1)[:size]
        values = parts.scales("weight.quant_map")[codes]
        values *= np.repeat(self._factors(), self._block)[:size]
        return stored(parts.name, torch.from_numpy(values).to(self._dtype).reshape(self.shape))

    def _factors(self) -> np.ndarray:
        parts = self._parts
        if not self._nested_block:
            return parts.scales("weight.absmax")
        factors: np.ndarray = parts.scales("weight.nested_quant_map")[parts.read("weight.absmax").numpy()]
        factors *= np.repeat(parts.scales("weight.nested_absmax"), self._nested_block)[: len(factors)]
        factors += np.float32(self._offset)
        return factors


def _fp8_block(inputs: int, wide: int) -> int | None:
    """Return the longest block of `FP8_KINDS` for rows of `inputs`, `wide` with one scale; None if none fits."""
    fitting = (size for size in FP8_KINDS.values() if inputs % size == 0 and (wide >= inputs or wide % size == 0))
    return max(fitting, default=None)


@dataclass(frozen=True, slots=True)
class _Groups:
    """One matrix in codes.

    Args:
        bits: bits of a code.
        codes: [outputs, bytes]; a byte has one code of 8 bits, or two codes of 4 bits, the first in the low half.
        scales: [outputs, groups] float32.
        zeros: [outputs, groups] uint8.
        group: inputs that share a scale.
        group_of: each input's group if the groups do not follow one another; else None.
    """

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: int
    group_of: np.ndarray | None = None

    def stored(self, name: str, inputs: int) -> StoredTensor:
        """Return the matrix in the widest blocks that its groups fill, else in float32."""
        outputs = len(self.codes)
        if self.group_of is None:
            for kind, (bits, block) in reversed(GROUP_KINDS.items()):
                if bits == self.bits and inputs % block == 0 and (self.group >= inputs or self.group % block == 0):
                    return StoredTensor(name, kind, (outputs, inputs), self._blocks(inputs, block))
        group_of = np.arange(inputs) // self.group if self.group_of is None else self.group_of
        codes = _codes(self.codes, self.bits)[:, :inputs].astype(np.float32)
        codes -= self.zeros[:, group_of]
        codes *= self.scales[:, group_of]
        return stored(name, torch.from_numpy(codes))

    def _blocks(self, inputs: int, block: int) -> np.ndarray:
        outputs, count, size = len(self.codes), inputs // block, block * self.bits // 8
        which = np.arange(count) * block // self.group
        blocks = np.empty((outputs, count, 6 + size), np.uint8)
        blocks[:, :, :4] = self.scales[:, which].astype("<f4")[:, :, None].view(np.uint8)
        blocks[:, :, 4:6] = self.zeros[:, which].astype("<f2")[:, :, None].view(np.uint8)
        blocks[:, :, 6:] = self.codes[:, : count * size].reshape(outputs, count, size)
        return blocks.reshape(outputs, -1)


def _bytes(words: torch.Tensor) -> np.ndarray:
    """Return the bytes of each row of int32 words, lowest first: [rows, 4 * words]."""
    return np.ascontiguousarray(words.numpy()).view(np.uint8)


def _codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes in bytes, one a byte: [rows, codes]."""
    return packed if bits == 8 else np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)


def _in_order(words: torch.Tensor) -> np.ndarray:
    """Return AWQ's words [rows, words] as codes in the order of the outputs, one a byte: [rows, 8 * words]."""
    digits = _codes(_bytes(words), 4).reshape(len(words), -1, 8)
    codes = np.empty_like(digits)
    codes[:, :, list(_AWQ_ORDER)] = digits
    return codes.reshape(len(words), -1)
