"""Applies penalties, biases and suppressions to a few logits of each row.

The plain-torch twin is in `genbatch.nif.sampling.sampler`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

RowEdits = tuple[np.ndarray, np.ndarray, np.ndarray]
_CHUNK = 128  # edits a program makes


@triton.jit(do_not_specialize=["vocab_size"])
def _edit_kernel(
    logits_ptr,  # [R, vocab_size] float32, changed
    starts_ptr,  # [R + 1] int64, where each row's edits begin
    ids_ptr,  # [N] int64, distinct within a row
    changes_ptr,  # [2, N] float32: factor, then what is added
    num_edits,
    vocab_size,
    row_stride,
    CHUNK: tl.constexpr,
):
    """One program: one chunk of one row's edits."""
    row = tl.program_id(0).to(tl.int64)
    edits = tl.load(starts_ptr + row) + tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = edits < tl.load(starts_ptr + row + 1)
    ids = tl.load(ids_ptr + edits, mask=mask, other=-1)
    # An id outside the row would change a neighbour's logits.
    mask = mask & (ids >= 0) & (ids < vocab_size)
    factor = tl.load(changes_ptr + edits, mask=mask, other=1.0)
    added = tl.load(changes_ptr + num_edits + edits, mask=mask, other=0.0)
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=mask, other=0.0)
    logits = tl.where(logits < 0.0, logits * factor, logits / factor) + added
    tl.store(logits_ptr + row * row_stride + ids, logits, mask=mask)


def edit_logits(logits: torch.Tensor, edits: Sequence[RowEdits]) -> torch.Tensor:
    """A copy of the logits [R, vocab_size] with every row's edits.

    Args:
        edits: of a row: distinct token ids, the factor each logit is divided or multiplied by, what is then added.
    """
    logits = logits.clone(memory_format=torch.contiguous_format)
    counts = [len(ids) for ids, _, _ in edits]
    starts = np.concatenate(([0], np.cumsum(counts)))
    ids, factors, added = (np.concatenate(parts) for parts in zip(*edits, strict=True))
    device = logits.device
    _edit_kernel[(len(edits), max(1, triton.cdiv(max(counts), _CHUNK)))](
        logits,
        torch.from_numpy(starts).to(device),
        torch.from_numpy(ids).to(device),
        torch.from_numpy(np.stack((factors, added))).to(device),
        len(ids),
        logits.shape[1],
        logits.stride(0),
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return logits
