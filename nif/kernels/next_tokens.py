"""A decode step's input: the tokens that the host gives, and for the other rows what the step before drew there.

The plain-torch twin is `reference.next_tokens`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

_CHUNK = 256  # rows a program covers


@triton.jit(do_not_specialize=["num_rows"])
def _next_tokens_kernel(out_ptr, given_ptr, drawn_ptr, num_rows, CHUNK: tl.constexpr):
    """One program: one chunk of rows."""
    rows = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = rows < num_rows
    given = tl.load(given_ptr + rows, mask=mask, other=0)
    drawn = tl.load(drawn_ptr + rows, mask=mask, other=0)
    # A row that could not be drawn from holds -1, which is no row of the embedding.
    tl.store(out_ptr + rows, tl.maximum(tl.where(given < 0, drawn, given), 0), mask=mask)


def next_tokens(given: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The input ids [R] int64 of a step.

    Args:
        given: [R] int64, contiguous; below 0 where the row goes on with what was drawn.
        drawn: [R or more] int64, contiguous, each row's token of the step before; below 0 counts as 0.
    """
    assert len(drawn) >= len(given)
    out = torch.empty_like(given)
    _next_tokens_kernel[(triton.cdiv(len(given), _CHUNK),)](out, given, drawn, len(given), CHUNK=_CHUNK, num_warps=4)
    return out
