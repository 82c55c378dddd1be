"""Copies whole KV blocks inside the pool, all layers in one launch: copy on write, beam forks.

The plain-torch twin is `reference.copy_blocks`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

_CHUNK = 2048  # elements a program copies


@triton.jit(do_not_specialize=["num_blocks"])
def _copy_blocks_kernel(pool_ptr, pairs_ptr, num_blocks, block_elements, CHUNK: tl.constexpr):
    """One program: one chunk of one pair's block."""
    pair = tl.program_id(0)
    source = tl.load(pairs_ptr + 2 * pair)
    target = tl.load(pairs_ptr + 2 * pair + 1)
    if (source < 0) | (source >= num_blocks) | (target < 0) | (target >= num_blocks):
        return
    offsets = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = offsets < block_elements
    content = tl.load(pool_ptr + source * block_elements + offsets, mask=mask)
    tl.store(pool_ptr + target * block_elements + offsets, content, mask=mask)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies blocks within the pool.

    Args:
        pool: [num_blocks, ...], contiguous.
        pairs: [N, 2] int64 (source, target); no target is another pair's source or target, as the copies race.
    """
    num_blocks = pool.shape[0]
    elements = pool[0].numel()
    _copy_blocks_kernel[(pairs.shape[0], triton.cdiv(elements, _CHUNK))](
        pool, pairs, num_blocks, elements, CHUNK=_CHUNK, num_warps=4
    )
