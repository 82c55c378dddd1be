"""The product of some tens or hundreds of rows with packed weights, x @ weight.T.

With fewer rows the products of `linear` are faster, because they also compute what comes before and after. With more
rows it is faster to unpack the weights for the library. Here the weights are the left operand. On GPUs of capability
9.0 they are unpacked in registers, and the matrix instructions read them there. A weight is unpacked once for up to 128
rows (ADR 113).
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from genbatch.nif.kernels.attend_keys import LARGE_SHARED_MEMORY
from genbatch.nif.kernels.packed_weight import GROUP, NIBBLE_OFFSETS, PackedWeight, scale_and_zero, scaled_nibbles

MAX_ROWS = 256
"""With more, unpacked weights and the library's product were faster on an H100."""
_MAX_SPLITS = 8
_JOINED_COLUMNS = 1024  # of a program


@triton.jit(do_not_specialize=["num_rows", "num_pairs"])
def _packed_linear_kernel(
    out_ptr,  # [num_rows, N], or [splits, num_rows, N] float32
    x_ptr,  # [num_rows, K] with stride
    weight_ptr,  # packed, see `PackedWeight`
    scale_ptr,
    bias_ptr,  # [N] or None
    num_rows,
    x_stride,
    N,  # no constant: a variant of the kernel serves the products of all shapes
    K,
    num_pairs,  # of groups: those of low nibbles and those of high ones
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BYTES: tl.constexpr,  # of an output's weights at a time; GROUP for 4 bits
    GROUP: tl.constexpr,
    NIBBLE_OFFSET: tl.constexpr,  # see `scaled_nibbles`
):
    """One program: OUTPUTS outputs of ROWS rows, over one of the splits of the inputs."""
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    used = outputs < N
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # those that read the same weights run one after another
    known = rows < num_rows
    x_rows = x_ptr + rows.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    lanes = tl.arange(0, BYTES)
    if BITS == 4:
        weights = weight_ptr + outputs.to(tl.int64)[:, None] * (num_pairs * GROUP)
        words = scale_ptr.to(tl.pointer_type(tl.int64)) + outputs.to(tl.int64) * num_pairs
        share = (num_pairs + splits - 1) // splits
        for pair in range(split * share, tl.minimum((split + 1) * share, num_pairs)):
            columns = pair * (2 * GROUP) + lanes
            low_x = tl.load(x_rows + columns[:, None], mask=known[None, :] & (columns < K)[:, None], other=0.0)
            columns += GROUP
            high_x = tl.load(x_rows + columns[:, None], mask=known[None, :] & (columns < K)[:, None], other=0.0)
            packed = tl.load(weights + (pair * GROUP + lanes)[None, :], mask=used[:, None], other=0)
            word = tl.load(words + pair, mask=used, other=0)
            scale, zero = scale_and_zero(word.to(tl.int32)[:, None])
            high_scale, high_zero = scale_and_zero((word >> 32).to(tl.int32)[:, None])
            low, high = scaled_nibbles(packed, scale, zero, high_scale, high_zero, low_x.dtype, NIBBLE_OFFSET)
            acc = tl.dot(low, low_x, acc, input_precision="ieee")
            acc = tl.dot(high, high_x, acc, input_precision="ieee")
    else:
        weights = weight_ptr + outputs.to(tl.int64)[:, None] * K
        share = (K + splits * BYTES - 1) // (splits * BYTES) * BYTES
        for start in range(split * share, tl.minimum((split + 1) * share, K), BYTES):
            columns = start + lanes
            inside = columns < K
            x = tl.load(x_rows + columns[:, None], mask=known[None, :] & inside[:, None], other=0.0)
            weight = tl.load(weights + columns[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            if weight.dtype.is_fp8():
                weight = weight.to(tl.float32)  # Triton 3.6 has no way from fp8 to bfloat16 on 8.9
            acc = tl.dot(weight.to(x.dtype), x, acc, input_precision="ieee")
        acc = acc * tl.load(scale_ptr + outputs, mask=used, other=0.0)[:, None]
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + outputs, mask=used, other=0.0).to(tl.float32)[:, None]
    cells = out_ptr + (split.to(tl.int64) * num_rows + rows)[None, :] * N + outputs[:, None]
    tl.store(cells, acc.to(out_ptr.dtype.element_ty), mask=used[:, None] & known[None, :])


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _join_splits_kernel(
    out_ptr,  # [num_rows, N]
    parts_ptr,  # [splits, num_rows, N] float32
    bias_ptr,  # [N] or None
    num_rows,
    splits,
    N,
    COLUMNS: tl.constexpr,
):
    """Add up the parts of each output in their order. One program: COLUMNS outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used = columns < N
    acc = tl.zeros([COLUMNS], tl.float32)
    for split in range(splits):
        acc += tl.load(parts_ptr + (split * num_rows + row) * N + columns, mask=used, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=used, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, acc.to(out_ptr.dtype.element_ty), mask=used)


@dataclass(frozen=True, slots=True)
class PackedTile:
    """Rows and outputs that one program computes, and how many bytes of an output's weights it takes at a time."""

    rows: int
    outputs: int
    bytes: int
    num_warps: int
    num_stages: int
    registers: int | None = None  # limit for a thread; None lets the compiler choose


def packed_tile(num_rows: int, bits: int, shared_memory: int) -> PackedTile:
    """Choose the tile: the fastest of four to seven on one H100 (docs/lab/2026-11-27-h100.md).

    Args:
        shared_memory: bytes of a multiprocessor.
    """
    if num_rows <= 16:
        return PackedTile(16, 128, GROUP, 4, 4) if bits == 4 else PackedTile(16, 64, 128, 4, 4)
    if num_rows <= 32:
        # Without a limit ptxas takes fewer registers than the GPU has, and spills some: with Triton 3.6 for 12.0.
        return PackedTile(32, 64, GROUP, 4, 4, 168) if bits == 4 else PackedTile(32, 64, 128, 4, 4)
    if num_rows <= 64 or shared_memory < LARGE_SHARED_MEMORY:
        return PackedTile(64, 64, GROUP, 4, 4) if bits == 4 else PackedTile(64, 64, 128, 4, 3)
    return PackedTile(128, 128, GROUP if bits == 4 else 128, 8, 3)


def num_splits(num_programs: int, tile: PackedTile, num_processors: int) -> int:
    """Return the number of parts of the inputs with which all multiprocessors are busy.

    Args:
        num_programs: programs for each part.
    """
    at_a_time = num_processors * (2 if tile.num_warps == 4 else 1)
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * num_programs <= at_a_time:
        splits *= 2
    return splits


def packed_linear(x: torch.Tensor, weight: PackedWeight, num_processors: int, shared_memory: int) -> torch.Tensor:
    """Return x @ weight.T + bias, [R, N]: summed in float32, rounded once to the type of `x`.

    Four-bit weights are rounded to the type of `x` once, as `unpacked` rounds them.

    Args:
        x: [R, K]; each row is contiguous.
        weight: of 4 or 8 bits.
        num_processors: multiprocessors of the GPU.
        shared_memory: bytes of each of them.
    """
    num_rows, num_outputs = len(x), weight.num_outputs
    tile = packed_tile(num_rows, weight.bits, shared_memory)
    programs = triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs)
    splits = num_splits(programs[0] * programs[1], tile, num_processors)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    parts = out
    if splits > 1:
        parts = torch.empty((splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    _packed_linear_kernel[(*programs, splits)](
        parts,
        x,
        weight.data,
        weight.scales,
        weight.bias if splits == 1 else None,
        num_rows,
        x.stride(0),
        num_outputs,
        weight.num_inputs,
        weight.num_groups // 2,
        BITS=weight.bits,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        BYTES=tile.bytes,
        GROUP=GROUP,
        NIBBLE_OFFSET=0 if x.device.type == "cpu" else NIBBLE_OFFSETS.get(x.dtype, 0),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.registers,
    )
    if splits > 1:
        _join_splits_kernel[(num_rows, triton.cdiv(num_outputs, _JOINED_COLUMNS))](
            out, parts, weight.bias, num_rows, splits, num_outputs, COLUMNS=_JOINED_COLUMNS, num_warps=4
        )
    return out
