"""Residual addition and RMSNorm in one pass over the hidden states.

The plain-torch twin is `reference.add_rms_norm`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm_kernel(
    out_ptr,
    residual_ptr,  # read and written
    delta_ptr,
    weight_ptr,
    eps,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, PAD)
    mask = columns < WIDTH
    residual = tl.load(residual_ptr + row + columns, mask=mask, other=0.0)
    if HAS_DELTA:
        # Summed in float32, then rounded: the sum that the next layer adds to is the one normalised here.
        delta = tl.load(delta_ptr + row + columns, mask=mask, other=0.0)
        residual = (residual.to(tl.float32) + delta.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + row + columns, residual, mask=mask)
    wide = residual.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row + columns, (wide * factor).to(residual.dtype) * weight, mask=mask)


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `delta` to `residual` in place, and returns the sum's RMSNorm times `weight`.

    Args:
        residual: [T, width], contiguous, changed.
        delta: [T, width], contiguous; None leaves the residual alone.
        weight: [width].
    """
    rows, width = residual.shape
    out = torch.empty_like(residual)
    pad = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(rows,)](
        out,
        residual,
        delta,
        weight,
        eps,
        WIDTH=width,
        PAD=pad,
        HAS_DELTA=delta is not None,
        num_warps=4 if pad <= 2048 else 8,
    )
    return out
