"""The gated MLP's activation: silu(gate) * up, over the merged projection.

The plain-torch twin is `reference.silu_mul`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

_CHUNK = 1024  # columns a program covers


@triton.jit
def _silu_mul_kernel(out_ptr, gate_up_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """One program: one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + columns, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + columns, silu * up, mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for `gate_up` [T, 2 * width], contiguous, gate first; returns [T, width]."""
    rows, both = gate_up.shape
    width = both // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    chunk = min(_CHUNK, triton.next_power_of_2(width))
    _silu_mul_kernel[(rows, triton.cdiv(width, chunk))](out, gate_up, WIDTH=width, CHUNK=chunk, num_warps=4)
    return out
