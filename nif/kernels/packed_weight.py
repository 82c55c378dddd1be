"""PackedWeight: a linear layer's weights as the GPU's products read them, whole or packed to 8 or 4 bits.

Weights only: activations stay in the model's type, and every sum is in float32. 8 bits have a scale per output channel,
4 bits a scale and a zero per group of 64 inputs, which is what GPTQ and AWQ checkpoints hold too.
"""

from dataclasses import dataclass

import torch

GROUP = 64
"""Inputs that share a scale in 4 bits, and that the products take at a time."""
KINDS = ("none", "int8", "fp8", "int4")
_LARGEST_FP8 = 448.0  # of e4m3


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One projection, or several merged, of `num_inputs` to `num_outputs`."""

    data: torch.Tensor  # [N, K] in the model's type, int8 or fp8; for 4 bits [N, groups * GROUP / 2] uint8
    bits: int  # 4, 8, or 0 for the model's type
    num_inputs: int
    scales: torch.Tensor | None = None  # [N] float32; for 4 bits [N, groups]
    zeros: torch.Tensor | None = None  # [N, groups] uint8, for 4 bits: a weight is (nibble - zero) * scale
    bias: torch.Tensor | None = None  # [N]

    @property
    def num_outputs(self) -> int:
        return len(self.data)

    @property
    def num_groups(self) -> int:
        return 1 if self.zeros is None else self.zeros.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads of it."""
        parts = (self.data, self.scales, self.zeros, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


def pack(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> PackedWeight:
    """Packs [N, K] weights; `kind` is one of KINDS."""
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
    # The range holds 0, so that padding and pruned weights stay exactly 0.
    low, high = groups.amin(2).clamp_max(0.0), groups.amax(2).clamp_min(0.0)
    scales = ((high - low) / 15.0).clamp_min(1e-12)
    zeros = (-low / scales).round().clamp(0, 15)
    nibbles = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return from_groups(nibbles.to(torch.uint8), scales, zeros.to(torch.uint8), num_inputs, bias)


def from_groups(
    nibbles: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, num_inputs: int, bias: torch.Tensor | None
) -> PackedWeight:
    """4-bit weights whose groups are quantised already.

    Args:
        nibbles: [N, groups, GROUP] uint8 below 16; the number of groups is even.
        scales: [N, groups].
        zeros: [N, groups] uint8.
        num_inputs: K, at most groups * GROUP.
    """
    pairs = nibbles.view(len(nibbles), -1, 2, GROUP)
    data = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)
    return PackedWeight(
        data.contiguous(), 4, num_inputs, scales=scales.float().contiguous(), zeros=zeros.contiguous(), bias=bias
    )


def unpack(weight: PackedWeight) -> torch.Tensor:
    """The weights [N, K] in float32, as the products use them; the twin of what the kernel does tile by tile."""
    if weight.bits == 0:
        return weight.data.float()
    assert weight.scales is not None
    if weight.bits == 8:
        return weight.data.float() * weight.scales[:, None]
    assert weight.zeros is not None
    pairs = weight.data.view(len(weight.data), -1, 1, GROUP)
    nibbles = torch.cat((pairs & 0xF, pairs >> 4), dim=2).view(len(weight.data), -1, GROUP).float()
    wide = (nibbles - weight.zeros.float()[..., None]) * weight.scales[..., None]
    return wide.flatten(1)[:, : weight.num_inputs]
