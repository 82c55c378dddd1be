"""Compute the adapters' part of a product of few rows: each row is multiplied by the matrices of its own adapter.

    h = shrink(x, owners, parts)              # [R, ranks]
    delta = expand(h, owners, parts, width)   # [R, width]

A row's result depends only on the row's values and its adapter. The plain-torch twin is `reference.lora_delta`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_INPUTS = 128
_OUTPUTS = 64
_RANKS = 16


@dataclass(frozen=True, slots=True)
class LoraParts:
    """The matrices of one linear, one pair for each adapter of a step; on the device.

    Args:
        a, b: [n] int64, addresses of [ranks, inputs] and [outputs, ranks] float32; b includes the scales.
        ranks: [n] int32; 0 for an adapter that does not adapt this linear.
        most_ranks: the largest number in `ranks`.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    most_ranks: int


@dataclass(frozen=True, slots=True)
class NormedRows:
    """Rows that the kernel normalises when it reads them; see `linear.Residual`."""

    hidden: torch.Tensor  # [R, K]
    sums: torch.Tensor | None  # [R, parts] float32; None: the rows are not normalised
    norm: torch.Tensor | None  # [K]
    eps: float = 0.0


@triton.jit
def _shrink_kernel(
    h_ptr,  # [R, ranks_pad] float32
    x_ptr,  # [R, K] with stride
    sums_ptr,  # [R, PARTS] float32 or None
    norm_ptr,  # [K] or None
    owners_ptr,  # [R] int32
    a_ptr,
    ranks_ptr,
    x_stride,
    eps,
    ranks_pad,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    RANKS: tl.constexpr,
    KS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program handles one row, RANKS ranks."""
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners_ptr + row)
    if owner >= 0:
        count = tl.load(ranks_ptr + owner)
        ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        there = ranks < count
        matrix = tl.load(a_ptr + owner).to(tl.pointer_type(tl.float32))
        factor = 1.0
        if HAS_NORM:
            parts = tl.arange(0, PARTS_PAD)
            sums = tl.load(sums_ptr + row * PARTS + parts, mask=parts < PARTS, other=0.0)
            factor = 1.0 / tl.sqrt(tl.sum(sums, 0) / K + eps)
        acc = tl.zeros([RANKS], tl.float32)
        for start in range(0, K, KS):
            columns = start + tl.arange(0, KS)
            inside = columns < K
            x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
            if HAS_NORM:
                weight = tl.load(norm_ptr + columns, mask=inside, other=0.0)
                x = (x.to(tl.float32) * factor).to(x.dtype) * weight
            a = tl.load(
                matrix + ranks.to(tl.int64)[:, None] * K + columns[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            acc += tl.sum(a * x.to(tl.float32)[None, :], 1)
        tl.store(h_ptr + row * ranks_pad + ranks, acc, mask=there)


@triton.jit
def _expand_kernel(
    out_ptr,  # [R, N] float32
    h_ptr,  # [R, ranks_pad] float32
    owners_ptr,
    b_ptr,
    ranks_ptr,
    ranks_pad,
    N: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """One program handles one row, OUTPUTS outputs; zeros for a row without an adapter."""
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners_ptr + row)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    used = outputs < N
    acc = tl.zeros([OUTPUTS], tl.float32)
    if owner >= 0:
        count = tl.load(ranks_ptr + owner)
        matrix = tl.load(b_ptr + owner).to(tl.pointer_type(tl.float32))
        for start in range(0, count, RANKS):
            ranks = start + tl.arange(0, RANKS)
            there = ranks < count
            h = tl.load(h_ptr + row * ranks_pad + ranks, mask=there, other=0.0)
            b = tl.load(
                matrix + outputs.to(tl.int64)[:, None] * count + ranks[None, :],
                mask=used[:, None] & there[None, :],
                other=0.0,
            )
            acc += tl.sum(b * h[None, :], 1)
    tl.store(out_ptr + row * N + outputs, acc, mask=used)


def lora_delta(x: NormedRows, owners: torch.Tensor, parts: LoraParts, width: int) -> torch.Tensor:
    """Return the part that the rows' adapters add to a product, [R, width] float32.

    Args:
        x: the rows that the product multiplies.
        owners: [R] int32, each row's adapter by its index in `parts`; -1 for a row without an adapter.
        parts: the adapters' matrices for this product.
        width: outputs.
    """
    rows, inputs = x.hidden.shape
    ranks_pad = triton.cdiv(parts.most_ranks, _RANKS) * _RANKS
    h = torch.empty((rows, ranks_pad), dtype=torch.float32, device=x.hidden.device)
    out = torch.empty((rows, width), dtype=torch.float32, device=x.hidden.device)
    sums = 1 if x.sums is None else x.sums.shape[1]
    _shrink_kernel[(rows, ranks_pad // _RANKS)](
        h,
        x.hidden,
        x.sums,
        x.norm,
        owners,
        parts.a,
        parts.ranks,
        x.hidden.stride(0),
        x.eps,
        ranks_pad,
        K=inputs,
        PARTS=sums,
        PARTS_PAD=triton.next_power_of_2(sums),
        RANKS=_RANKS,
        KS=_INPUTS,
        HAS_NORM=x.norm is not None,
        num_warps=4,
    )
    _expand_kernel[(rows, triton.cdiv(width, _OUTPUTS))](
        out,
        h,
        owners,
        parts.b,
        parts.ranks,
        ranks_pad,
        N=width,
        RANKS=_RANKS,
        OUTPUTS=_OUTPUTS,
        num_warps=4,
    )
    return out
