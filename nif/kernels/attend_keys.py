"""The inner loop that both attention kernels share: online softmax over one sequence's blocks."""

# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

import triton
import triton.language as tl

# exp(x) = exp2(x * log2(e)), and exp2 is the instruction that the GPU has.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    query,  # [ROWS, HEAD_PAD]
    query_positions,  # [ROWS], negative where the row is padding
    first_key,
    end_key,
    table_ptr,
    key_ptr,
    value_ptr,
    block_stride,
    num_blocks,
    scale,
    softcap,
    window,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Online softmax over the keys at positions [first_key, end_key) of one sequence and KV head."""
    dims = tl.arange(0, HEAD_PAD)
    in_head = dims < HEAD
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for start in range(first_key, end_key, KEYS):
        positions = start + tl.arange(0, KEYS)
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end_key, other=-1)
        # The planner has refused bad tables; this keeps even a table damaged later from reading outside the pool.
        readable = (blocks >= 0) & (blocks < num_blocks)
        # A pool outgrows 2**31 elements: widen before multiplying.
        offsets = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * HEAD
        key = tl.load(key_ptr + offsets[None, :] + dims[:, None], mask=readable[None, :] & in_head[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither overflows nor needs a device library.
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E) / softcap) + 1.0))
        distance = query_positions[:, None] - positions[None, :]
        visible = (distance >= 0) & readable[None, :]
        if HAS_WINDOW:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        correction = tl.exp2(maximum - shift)
        value = tl.load(
            value_ptr + offsets[:, None] + dims[None, :], mask=readable[:, None] & in_head[None, :], other=0.0
        )
        total = total * correction + tl.sum(weights, 1)
        output = output * correction[:, None]
        output += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = new_maximum
    return output, maximum, total
