"""Weight matrices in the blocks that the C files describe: one function a kind, on plain [n, k] matrices."""

from dataclasses import dataclass

import torch

from genbatch.nif.native.library import COLUMNS, WEIGHT_BF16, WEIGHT_F32, WEIGHT_I8, WEIGHT_U4

U4_GROUP = 32
U4_LEVELS = 16
# How far a weight may lie from its 4-bit grid, relative to its group's largest, and still count as on it: rounding to
# the type that carried it here.
_GRID_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def padded_columns(matrix: torch.Tensor, group: int) -> torch.Tensor:
    """`matrix` with rows padded to COLUMNS and columns to `group`, by zeros."""
    n, k = matrix.shape
    return torch.nn.functional.pad(matrix, (0, -k % group, 0, -n % COLUMNS))


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows in runs of 16 gates and the 16 ups that they multiply, so that one block holds both.

    Args:
        gate, up: [intermediate, ...].

    Returns:
        [2 * intermediate padded to 16, ...].
    """
    half = COLUMNS // 2
    pad = (0, 0) * (gate.dim() - 1) + (0, -gate.shape[0] % half)
    parts = [torch.nn.functional.pad(x, pad).unflatten(0, (-1, half)) for x in (gate, up)]
    return torch.stack(parts, dim=1).flatten(0, 2)


def pack_f32(matrix: torch.Tensor) -> torch.Tensor:
    """[n, k] to bytes of [n / 32][k][32] float32."""
    blocks = padded_columns(matrix.float(), 1).unflatten(0, (-1, COLUMNS))
    return blocks.transpose(1, 2).contiguous().view(torch.uint8).flatten()


def pack_bf16(matrix: torch.Tensor) -> torch.Tensor:
    """[n, k] to bytes of [n / 32][k / 2][32][2] bfloat16."""
    blocks = padded_columns(matrix.bfloat16(), 2).unflatten(0, (-1, COLUMNS)).unflatten(2, (-1, 2))
    return blocks.transpose(1, 2).contiguous().view(torch.uint8).flatten()


def quantize_i8(matrix: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric 8-bit weights.

    Args:
        matrix: [n, k], k a multiple of `group`.

    Returns:
        Integers in -127 .. 127, [n, k / group, group] float32, and scales, [n, k / group] bfloat16.
    """
    grouped = matrix.float().unflatten(1, (-1, group))
    # The scale is rounded first and the weights to what it then is, so rounding it costs nothing.
    scales = (grouped.abs().amax(2) / 127).bfloat16()
    divisor = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    return (grouped / divisor[:, :, None]).round_().clamp_(-127, 127), scales


def pack_i8(matrix: torch.Tensor, group: int) -> torch.Tensor:
    """[n, k] to bytes of [n / 32][k / group]{ [group / 4][32][4] of value + 128, [32] bfloat16 scales }."""
    integers, scales = quantize_i8(padded_columns(matrix, group), group)
    values = (integers + 128).to(torch.uint8).unflatten(0, (-1, COLUMNS)).unflatten(3, (-1, 4))
    values = values.permute(0, 2, 3, 1, 4).flatten(2)  # [blocks, groups, group * 32]
    factors = scales.unflatten(0, (-1, COLUMNS)).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([values, factors], dim=2).flatten()


def find_u4_grid(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The 4-bit grid that the weights already lie on, as those of a GGUF in Q4_1 do.

    Args:
        matrix: [n, k] as loaded.

    Returns:
        Nibbles [n, k / 32, 32] uint8, steps and offsets [n, k / 32] float16, with
        weight = step * nibble + offset; None if some weight is on no such grid.
    """
    if matrix.shape[1] % U4_GROUP or matrix.dtype not in _GRID_TOLERANCE:
        return None
    grouped = matrix.float().unflatten(1, (-1, U4_GROUP))
    low, high = grouped.amin(2), grouped.amax(2)
    # A group uses both ends of its grid: its quantiser made them of the smallest and the largest weight.
    offsets, steps = low.half(), ((high - low) / (U4_LEVELS - 1)).half()
    step, offset = steps.float()[:, :, None], offsets.float()[:, :, None]
    nibbles = ((grouped - offset) / step.clamp(min=torch.finfo(torch.float32).tiny)).round_()
    nibbles.clamp_(0, U4_LEVELS - 1)
    error = (nibbles * step + offset - grouped).abs_()
    largest = torch.maximum(low.abs(), high.abs())[:, :, None]
    if bool((error > _GRID_TOLERANCE[matrix.dtype] * largest).any()):
        return None
    return nibbles.to(torch.uint8), steps, offsets


def pack_u4(nibbles: torch.Tensor, steps: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A grid to bytes of [n / 32][k / 32]{ [4][32][4] pairs of nibbles, [32] float16 steps, [32] float16 offsets }."""
    rows = -nibbles.shape[0] % COLUMNS
    nibbles = torch.nn.functional.pad(nibbles, (0, 0, 0, 0, 0, rows))
    pairs = nibbles.unflatten(2, (4, 2, 4))  # input 8j + 4h + i of a group: j, h, i
    values = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).unflatten(0, (-1, COLUMNS))
    values = values.permute(0, 2, 3, 1, 4).flatten(2)
    factors = [
        torch.nn.functional.pad(x, (0, 0, 0, rows)).unflatten(0, (-1, COLUMNS)).transpose(1, 2)
        for x in (steps, offsets)
    ]
    return torch.cat([values, *(x.contiguous().view(torch.uint8) for x in factors)], dim=2).flatten()


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix as one of the gemm files reads it.

    Args:
        kind: WEIGHT_F32, WEIGHT_BF16, WEIGHT_I8 or WEIGHT_U4.
        k: inputs, padded to a multiple of `group`.
        group: inputs that share a scale; 1 for float kinds.
        content: the bytes.
    """

    kind: int
    k: int
    group: int
    content: torch.Tensor


def pack_matrix(kind: int, matrix: torch.Tensor, group: int) -> PackedMatrix:
    """Packs a matrix [n, k].

    Args:
        kind: WEIGHT_F32, WEIGHT_BF16 or WEIGHT_I8; the last becomes WEIGHT_U4 where that loses nothing.
        group: inputs that share a scale of WEIGHT_I8.
    """
    k = matrix.shape[1]
    if kind == WEIGHT_F32:
        return PackedMatrix(kind, k, 1, pack_f32(matrix))
    if kind == WEIGHT_BF16:
        return PackedMatrix(kind, k + k % 2, 1, pack_bf16(matrix))
    if (grid := find_u4_grid(matrix)) is not None:
        return PackedMatrix(WEIGHT_U4, k, U4_GROUP, pack_u4(*grid))
    return PackedMatrix(WEIGHT_I8, k + -k % group, group, pack_i8(matrix, group))
