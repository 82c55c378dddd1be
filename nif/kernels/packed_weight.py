"""PackedWeight: the form in which our own products read a weight: in the model's type, or packed to 8 or 4 bits.

Weights of 8 bits have a scale for each output channel. Weights of 4 bits have a scale and a zero for each group of 64
inputs, as GPTQ and AWQ checkpoints have. Kernel functions multiply a tile of the inputs with packed weights (ADR 90).
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

GROUP = 64
"""Inputs that share a scale in 4 bits. The products take as many at a time."""
KINDS = ("none", "int8", "fp8", "int4")
_LARGEST_FP8 = 448.0  # of e4m3
NIBBLE_OFFSETS = {torch.bfloat16: 128, torch.float16: 1024}  # from this number on, the type has integers only
_UNPACKED_INPUTS = 1024  # inputs for each program: each of 64 threads loads 16 bytes of 8-bit weights


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One projection, or several merged projections, from `num_inputs` to `num_outputs`."""

    data: torch.Tensor  # [N, K] in the model's type, int8 or fp8; for 4 bits [N, groups * GROUP / 2] uint8
    bits: int  # 4, 8, or 0 for the model's type
    num_inputs: int
    # [N] float32. For 4 bits [N, groups] int32: a float32 with the group's zero in its lowest 4 bits, so that one load
    # reads scale and zero. A weight is (nibble - zero) * scale.
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # [N]

    @property
    def num_outputs(self) -> int:
        return len(self.data)

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1] if self.scales is not None and self.bits == 4 else 1

    @property
    def nbytes(self) -> int:
        """Return the bytes of the weight that a step reads."""
        parts = (self.data, self.scales, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


def pack(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> PackedWeight:
    """Pack [N, K] weights; `kind` is one of KINDS."""
    num_inputs = weight.shape[1]
    if kind == "none":
        return PackedWeight(weight, 0, num_inputs, bias=bias)
    wide = weight.float()
    if kind in ("int8", "fp8"):
        largest = 127.0 if kind == "int8" else _LARGEST_FP8
        scales = wide.abs().amax(1).clamp_min(1e-12) / largest
        scaled = wide / scales[:, None]
        data = scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
        return PackedWeight(data, 8, num_inputs, scales=scales, bias=bias)
    assert kind == "int4", kind
    padded = torch.nn.functional.pad(wide, (0, -num_inputs % (2 * GROUP)))
    groups = padded.view(len(wide), -1, GROUP)
    # The range includes 0, so that padding and pruned weights stay exactly 0.
    low, high = groups.amin(2).clamp_max(0.0), groups.amax(2).clamp_min(0.0)
    scales = ((high - low) / 15.0).clamp_min(1e-12)
    zeros = (-low / scales).round().clamp(0, 15)
    nibbles = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return from_groups(nibbles.to(torch.uint8), scales, zeros.to(torch.uint8), num_inputs, bias)


def from_groups(
    nibbles: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, num_inputs: int, bias: torch.Tensor | None
) -> PackedWeight:
    """Make a weight from groups of numbers that are quantised to 4 bits already.

    Scales keep 20 of 24 bits. Scales of GPTQ and AWQ checkpoints have 11 bits and stay unchanged.

    Args:
        nibbles: [N, groups, GROUP] uint8 below 16; the number of groups is even.
        scales: [N, groups].
        zeros: [N, groups] uint8.
        num_inputs: K, at most groups * GROUP.
    """
    pairs = nibbles.view(len(nibbles), -1, 2, GROUP)
    data = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)
    bits = scales.float().contiguous().view(torch.int32)
    return PackedWeight(data.contiguous(), 4, num_inputs, scales=(bits & ~0xF) | zeros.int(), bias=bias)


def unpack(weight: PackedWeight) -> torch.Tensor:
    """Return the weights [N, K] in float32, as the products use them. Kernels do the same tile by tile."""
    if weight.bits == 0:
        return weight.data.float()
    assert weight.scales is not None
    if weight.bits == 8:
        return weight.data.float() * weight.scales[:, None]
    zeros = weight.scales & 0xF
    scales = (weight.scales & ~0xF).view(torch.float32)
    pairs = weight.data.view(len(weight.data), -1, 1, GROUP)
    nibbles = torch.cat((pairs & 0xF, pairs >> 4), dim=2).view(len(weight.data), -1, GROUP).float()
    wide = (nibbles - zeros.float()[..., None]) * scales[..., None]
    return wide.flatten(1)[:, : weight.num_inputs]


@triton.jit
def scale_and_zero(word):
    """Return the scale and the zero of a word of `PackedWeight.scales`."""
    return (word & -16).to(tl.float32, bitcast=True), word & 0xF


@triton.jit
def _unpack_kernel(
    out_ptr,  # [N, K]
    weight_ptr,  # packed, see PackedWeight
    scale_ptr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """One program handles INPUTS weights of one output."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    inside = columns < K
    if BITS == 4:
        group = columns // GROUP
        bytes_at = row * (NUM_GROUPS * GROUP // 2) + group // 2 * GROUP + columns % GROUP
        packed = tl.load(weight_ptr + bytes_at, mask=inside, other=0).to(tl.int32)
        scale, zero = scale_and_zero(tl.load(scale_ptr + row * NUM_GROUPS + group, mask=inside, other=0))
        wide = (((packed >> (group % 2 * 4)) & 0xF) - zero).to(tl.float32) * scale
    else:
        wide = tl.load(weight_ptr + row * K + columns, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * K + columns, wide.to(out_ptr.dtype.element_ty), mask=inside)


def unpacked(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [N, K] in `dtype` for the library's products, in a new buffer if they are packed."""
    if weight.bits == 0:
        return weight.data
    num_outputs, num_inputs = weight.num_outputs, weight.num_inputs
    out = torch.empty((num_outputs, num_inputs), dtype=dtype, device=weight.data.device)
    _unpack_kernel[(num_outputs, triton.cdiv(num_inputs, _UNPACKED_INPUTS))](
        out,
        weight.data,
        weight.scales,
        K=num_inputs,
        BITS=weight.bits,
        NUM_GROUPS=weight.num_groups,
        GROUP=GROUP,
        INPUTS=_UNPACKED_INPUTS,
        num_warps=2,
    )
    return out


@triton.jit
def times_bytes(x, weight_ptr, outputs, used, columns, K: tl.constexpr):
    """Return the product [SPLITS, ROWS, COLUMNS] with 8-bit weights [outputs, K], without the scales."""
    weight = tl.load(
        weight_ptr + outputs.to(tl.int64)[None, None, :] * K + columns[:, :, None],
        mask=used[None, None, :] & (columns < K)[:, :, None],
        other=0.0,
    )
    if weight.dtype.is_fp8():
        weight = weight.to(tl.float32)  # on GPUs of 8.9, Triton 3.6 cannot convert fp8 to bfloat16
    return tl.dot(x, weight.to(x.dtype), input_precision="ieee")


@triton.jit
def load_scaling(scale_ptr, outputs, used, pair, NUM_GROUPS: tl.constexpr):
    """Return words [SPLITS, COLUMNS] int64, each of two groups: the low nibbles' in the lower half, then the high."""
    cells = outputs.to(tl.int64)[None, :] * (NUM_GROUPS // 2) + pair[:, None]
    mask = used[None, :] & (pair < NUM_GROUPS // 2)[:, None]
    return tl.load(scale_ptr.to(tl.pointer_type(tl.int64)) + cells, mask=mask, other=0)


@triton.jit
def times_nibbles(
    x,  # [SPLITS, ROWS, KS], the inputs of the low nibbles
    x_high,  # [SPLITS, ROWS, KS], the inputs of the high nibbles
    weight_ptr,
    outputs,
    used,
    bytes_at,  # [SPLITS, KS]
    scaling,  # see `load_scaling`
    NUM_BYTES: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Return the product [SPLITS, ROWS, COLUMNS] with 4-bit weights of two groups for each split.

    Integers below 2,048 (256 in bfloat16) are exact in every type; the scales are applied in float32.
    """
    scale, zero = scale_and_zero(scaling.to(tl.int32))
    scale_high, zero_high = scale_and_zero((scaling >> 32).to(tl.int32))
    packed = tl.load(
        weight_ptr + outputs.to(tl.int64)[None, None, :] * NUM_BYTES + bytes_at[:, :, None],
        mask=used[None, None, :] & (bytes_at < NUM_BYTES)[:, :, None],
        other=0,
    )
    if OFFSET == 0:
        low, high = (packed & 0xF).to(x.dtype), (packed >> 4).to(x.dtype)
    else:
        low, high = _nibbles(packed, OFFSET)
    low = low - (zero + OFFSET).to(x.dtype)[:, None, :]
    high = high - (zero_high + OFFSET).to(x.dtype)[:, None, :]
    return (
        tl.dot(x, low, input_precision="ieee") * scale[:, None, :]
        + tl.dot(x_high, high, input_precision="ieee") * scale_high[:, None, :]
    )


_SPREAD = """{
    .reg .b32 even, odd;
    prmt.b32 even, $4, 0, 0x4140;
    prmt.b32 odd, $4, 0, 0x4342;
    lop3.b32 $0, even, 0x000f000f, MAGIC, 0xea;
    lop3.b32 $1, odd, 0x000f000f, MAGIC, 0xea;
    shr.u32 even, even, 4;
    shr.u32 odd, odd, 4;
    lop3.b32 $2, even, 0x000f000f, MAGIC, 0xea;
    lop3.b32 $3, odd, 0x000f000f, MAGIC, 0xea;
}"""
_SPREAD_BF16 = tl.constexpr(_SPREAD.replace("MAGIC", "0x43004300"))  # twice 128.0
_SPREAD_FP16 = tl.constexpr(_SPREAD.replace("MAGIC", "0x64006400"))  # twice 1024.0
# Subtracts the zeros, which is exact. Then multiplies by the scale, which is a sum of two numbers, so that the product
# is rounded once.
_SCALED = """{
    .reg .b32 even, odd, n0, n1, n2, n3, one, none;
    prmt.b32 even, $4, 0, 0x4140;
    prmt.b32 odd, $4, 0, 0x4342;
    mov.b32 one, ONE;
    mov.b32 none, 0x80008000;
    lop3.b32 n0, even, 0x000f000f, MAGIC, 0xea;
    lop3.b32 n1, odd, 0x000f000f, MAGIC, 0xea;
    shr.u32 even, even, 4;
    shr.u32 odd, odd, 4;
    lop3.b32 n2, even, 0x000f000f, MAGIC, 0xea;
    lop3.b32 n3, odd, 0x000f000f, MAGIC, 0xea;
    fma.rn.KIND n0, n0, one, $5;
    fma.rn.KIND n1, n1, one, $6;
    fma.rn.KIND n2, n2, one, $7;
    fma.rn.KIND n3, n3, one, $8;
    fma.rn.KIND even, n0, $13, none;
    fma.rn.KIND $0, n0, $9, even;
    fma.rn.KIND odd, n1, $14, none;
    fma.rn.KIND $1, n1, $10, odd;
    fma.rn.KIND even, n2, $15, none;
    fma.rn.KIND $2, n2, $11, even;
    fma.rn.KIND odd, n3, $16, none;
    fma.rn.KIND $3, n3, $12, odd;
}"""
_SCALED_BF16 = tl.constexpr(
    _SCALED.replace("MAGIC", "0x43004300").replace("ONE", "0x3f803f80").replace("KIND", "bf16x2")
)
_SCALED_FP16 = tl.constexpr(
    _SCALED.replace("MAGIC", "0x64006400").replace("ONE", "0x3c003c00").replace("KIND", "f16x2")
)
_SCALED_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r" + 13 * ",r")


@triton.jit
def _nibbles(packed, OFFSET: tl.constexpr):
    """Return the low and the high nibbles n of bytes as OFFSET + n: n becomes the low bits of the number OFFSET.

    This takes eight instructions for eight weights. A conversion takes several instructions for each weight.
    """
    if OFFSET == 128:
        low, high = tl.inline_asm_elementwise(
            _SPREAD_BF16, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _SPREAD_FP16, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def scaled_nibbles(packed, scale, zero, high_scale, high_zero, kind: tl.constexpr, OFFSET: tl.constexpr):
    """Return the weights of the low nibbles and of the high nibbles in `kind`, each rounded once.

    Scales and zeros are broadcast. OFFSET is the number into which a nibble is written, see `_nibbles`; 0 converts.
    """
    if OFFSET == 0:
        low = (((packed & 0xF).to(tl.int32) - zero).to(tl.float32) * scale).to(kind)
        high = (((packed >> 4).to(tl.int32) - high_zero).to(tl.float32) * high_scale).to(kind)
    else:
        less, high_less = (-OFFSET - zero).to(kind), (-OFFSET - high_zero).to(kind)
        main, high_main = scale.to(kind), high_scale.to(kind)
        rest, high_rest = (scale - main.to(tl.float32)).to(kind), (high_scale - high_main.to(tl.float32)).to(kind)
        if OFFSET == 128:
            low, high = tl.inline_asm_elementwise(
                _SCALED_BF16, _SCALED_OPERANDS, [packed, less, high_less, main, high_main, rest, high_rest],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                _SCALED_FP16, _SCALED_OPERANDS, [packed, less, high_less, main, high_main, rest, high_rest],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
    return low, high
