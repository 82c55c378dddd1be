"""The twins in torch of the C linears, of their packing and of attention in 8 bits: slow, plain, for the tests.

Attention in floats, RoPE and the norms have their twin in TorchRunner.
"""

import torch

from genbatch.nif.native.library import COLUMNS

U4_GROUP = 32
U4_LEVELS = 16
_TINY = torch.finfo(torch.float32).tiny


def pad_matrix(matrix: torch.Tensor, group: int) -> torch.Tensor:
    """`matrix` [n, k] with rows padded to COLUMNS and columns to `group`, by zeros."""
    n, k = matrix.shape
    return torch.nn.functional.pad(matrix, (0, -k % group, 0, -n % COLUMNS))


# Quantising


def quantize_i8(matrix: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric 8-bit weights.

    Args:
        matrix: [n, k], k a multiple of `group`.

    Returns:
        Integers in -127 .. 127, [n, k / group, group] float32, and scales, [n, k / group] bfloat16.
    """
    grouped = matrix.float().reshape(len(matrix), -1, group)
    # The scale is rounded first and the weights to what it then is, so rounding it costs nothing.
    scales = (grouped.abs().amax(2) / 127).bfloat16()
    divisor = scales.float().clamp(min=_TINY)
    return (grouped / divisor[:, :, None]).round().clamp(-127, 127), scales


def find_u4_grid(matrix: torch.Tensor, tolerance: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The 4-bit grid that the weights already lie on, as those of a GGUF in Q4_1 do.

    Args:
        matrix: [n, k], k a multiple of 32.
        tolerance: how far a weight may lie from the grid, relative to its group's largest.

    Returns:
        Nibbles [n, k / 32, 32] uint8, steps and offsets [n, k / 32] float16, with
        weight = step * nibble + offset; None if some weight is on no such grid.
    """
    grouped = matrix.float().reshape(len(matrix), -1, U4_GROUP)
    low, high = grouped.amin(2), grouped.amax(2)
    # A group uses both ends of its grid: its quantiser made them of the smallest and the largest weight.
    offsets, steps = low.half(), ((high - low) / (U4_LEVELS - 1)).half()
    step, offset = steps.float()[:, :, None], offsets.float()[:, :, None]
    nibbles = ((grouped - offset) / step.clamp(min=_TINY)).round().clamp(0, U4_LEVELS - 1)
    error = (nibbles * step + offset - grouped).abs()
    if bool((error > tolerance * grouped.abs().amax(2, keepdim=True)).any()):
        return None
    return nibbles.to(torch.uint8), steps, offsets


def quantize_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations in 8 bits, each group by its own largest magnitude.

    Args:
        x: [rows, k], k a multiple of `group`.

    Returns:
        Integers [rows, k / group, group] float32, and scales [rows, k / group] float32 of 8 significant bits.
    """
    grouped = x.reshape(len(x), -1, group)
    bits = (grouped.abs().amax(2) / 127).view(torch.int32)
    scales = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)  # rounded up: no group exceeds 127 steps
    return (grouped * (1 / scales.clamp(min=_TINY))[:, :, None]).round(), scales


# Packing


def pack_f32(matrix: torch.Tensor) -> torch.Tensor:
    """[n, k] to bytes of [n / 32][k][32] float32."""
    blocks = pad_matrix(matrix.float(), 1).reshape(-1, COLUMNS, matrix.shape[1])
    return _bytes(blocks.transpose(1, 2)).flatten()


def pack_bf16(matrix: torch.Tensor) -> torch.Tensor:
    """[n, k] to bytes of [n / 32][k / 2][32][2] bfloat16."""
    padded = pad_matrix(matrix.bfloat16(), 2)
    return _bytes(padded.reshape(-1, COLUMNS, padded.shape[1] // 2, 2).transpose(1, 2)).flatten()


def pack_i8(matrix: torch.Tensor, group: int) -> torch.Tensor:
    """[n, k] to bytes of [n / 32][k / group]{ [group / 4][32][4] of value + 128, [32] bfloat16 scales }."""
    integers, scales = quantize_i8(pad_matrix(matrix, group), group)
    groups = scales.shape[1]
    values = (integers + 128).to(torch.uint8).reshape(-1, COLUMNS, groups, group // 4, 4)
    values = values.permute(0, 2, 3, 1, 4).flatten(2)  # [blocks, groups, group * 32]
    return torch.cat([values, _per_block(scales)], dim=2).flatten()


def pack_u4(nibbles: torch.Tensor, steps: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A grid to bytes of [n / 32][k / 32]{ [4][32][4] pairs of nibbles, [32] float16 steps, [32] float16 offsets }."""
    rows = -len(nibbles) % COLUMNS
    nibbles = torch.nn.functional.pad(nibbles, (0, 0, 0, 0, 0, rows))
    pairs = nibbles.reshape(-1, COLUMNS, nibbles.shape[1], 4, 2, 4)  # input 8j + 4h + i of a group: j, h, i
    values = (pairs[:, :, :, :, 0] | pairs[:, :, :, :, 1] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    factors = [_per_block(torch.nn.functional.pad(x, (0, 0, 0, rows))) for x in (steps, offsets)]
    return torch.cat([values, *factors], dim=2).flatten()


def _per_block(factors: torch.Tensor) -> torch.Tensor:
    """[n, groups] to the bytes that end each group of a block, [n / 32, groups, bytes]."""
    return _bytes(factors.reshape(-1, COLUMNS, factors.shape[1]).transpose(1, 2))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# Multiplying


def linear_i8(x: torch.Tensor, matrix: torch.Tensor, group: int) -> torch.Tensor:
    """x [rows, k] times matrix [n, k] transposed, both in 8 bits; [rows, n] float64."""
    integers, scales = quantize_i8(pad_matrix(matrix, group), group)
    rows, row_scales = quantize_rows(torch.nn.functional.pad(x, (0, -x.shape[1] % group)), group)
    weights = integers.double() * scales.double()[:, :, None]
    return (rows * row_scales[:, :, None]).double().flatten(1) @ weights.flatten(1)[: len(matrix)].T


def linear_u4(x: torch.Tensor, nibbles: torch.Tensor, steps: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [rows, k] in 8 bits times a 4-bit grid transposed; [rows, n] float64."""
    rows, row_scales = quantize_rows(x, U4_GROUP)
    weights = nibbles.double() * steps.double()[:, :, None] + offsets.double()[:, :, None]
    return (rows * row_scales[:, :, None]).double().flatten(1) @ weights.flatten(1).T


# Attention


def attention_i8(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, window: int, tiles: list[int]
) -> torch.Tensor:
    """Attention of the last positions over keys and values in 8 bits, as attention_int8.c rounds them.

    Args:
        queries: [rows, head_dim], scaled; the last row is at the last key's position.
        keys, values: [num_keys, head_dim].
        window: positions that a row sees.
        tiles: how many keys stand in each tile of 16 lanes; four tiles are a chunk.

    Returns:
        [rows, head_dim] float64.
    """
    q, q_scales = quantize_tokens(queries)
    k, k_scales = quantize_tokens(keys)
    v, v_scales = quantize_tokens(values)
    scores = (q @ k.T) * q_scales * k_scales.T
    position, row = torch.arange(len(keys)), torch.arange(len(keys) - len(queries), len(keys))[:, None]
    seen = (position <= row) & (position > row - window)
    exponents = (scores + v_scales.T.log()).masked_fill(~seen, -torch.inf)
    total, outputs = torch.zeros(len(queries), 1).double(), torch.zeros(queries.shape).double()
    highest = exponents.amax(1, keepdim=True)
    for first in range(0, len(tiles), 4):
        start = sum(tiles[:first])
        chunk = slice(start, start + sum(tiles[first : first + 4]))
        part = exponents[:, chunk]
        largest = part.amax(1, keepdim=True).clamp(min=-1e30)
        weights = 255 * (part - largest).exp()
        factor = (largest - highest).exp()
        outputs += factor * (weights.round() @ v[chunk])
        total += factor * (weights / v_scales[chunk].T).sum(1, keepdim=True)
    return outputs / total


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in 127 steps of its own: integers [rows, k] and scales [rows, 1], both float64."""
    scales = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-20)
    return (x * (1 / scales)).round().double(), scales.double()
