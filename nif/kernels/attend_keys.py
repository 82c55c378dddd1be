"""Shared by the attention kernels: tile sizes, and the inner loop, an online softmax over one sequence's blocks."""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from dataclasses import dataclass

import triton
import triton.language as tl

_MIN_DOT_ROWS = 16  # the smallest extent that tl.dot takes
SHARE = 256
"""Keys of a share near the beginning; with fewer, joining costs more than the parallelism saves."""
_FLAT_SHARES = tl.constexpr(32)  # of this size; behind them
_SHARES_PER_DOUBLING = tl.constexpr(16)  # of twice the size, then of four times the size, ...
_DOUBLINGS = tl.constexpr(17)  # reach 2**30 positions
_REGISTERS = 65_536  # of a multiprocessor
LARGE_SHARED_MEMORY = 228 * 1024
"""Bytes of a multiprocessor from 9.0 on, but for 12.0."""
_BLOCK_OVERHEAD = 1024  # bytes of shared memory that the device takes for each program


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one program."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None  # most of a thread; None leaves their number to the compiler


def head_pad(head_size: int) -> int:
    """The extent of a tile along the head."""
    return max(_MIN_DOT_ROWS, int(triton.next_power_of_2(head_size)))


def tile_shape(
    group: int,
    head_size: int,
    element_size: int,
    *,
    decode: bool,
    in_order: bool = False,
    shared_memory: int = LARGE_SHARED_MEMORY,
) -> Tile:
    """The tile for `group` query heads a KV head.

    Args:
        element_size: bytes of a cached number; 4 if the queries are float32.
        decode: of one token a sequence; else of chunks.
        in_order: chunks round as decodes do: the decodes' tile, with fewer stages, as chunks keep more beside it in
            registers. Stages change no sum.
        shared_memory: bytes of a multiprocessor. GPUs that have much of it multiply from there; the others multiply
            from registers, and a tile of theirs holds fewer keys.
    """
    needed = max(_MIN_DOT_ROWS, triton.next_power_of_2(group))
    if element_size > 2:
        return Tile(needed, 16, 4, 1)  # float32 has no fast dot product: larger tiles only spill registers
    wide = head_size > 128  # such tiles must stay small to fit shared memory
    if decode or in_order:
        # Triton 3.6 spills registers with more keys for wide heads, and for heads that a mask cuts from a tile of 128.
        # Numbers of FP8 take registers to become wider ones.
        is_tight = element_size == 1 or 64 < head_size < 128
        keys = 16 if wide else 32 if is_tight else 64
        # The block ids, which addresses wait for, take stages too. With 5, keys and values have two buffers each, and
        # with 4 one. On an H100 both were as fast: registers allow three programs either way.
        stages = (4 if keys == 64 else 5) if decode else 3 if keys == 64 else 2
        # By itself ptxas takes fewer registers than there are, and spills some: with Triton 3.6 in wide chunks and over
        # FP8, and with 3.9 in decodes of heads of 64 for 12.0.
        registers = _decode_registers(head_size) if decode else 200 if wide or element_size == 1 else None
        return Tile(needed, keys, 4, stages, registers)
    is_large = shared_memory >= LARGE_SHARED_MEMORY
    if wide:
        return Tile(max(needed, 64), 32, 8, 2) if is_large else Tile(max(needed, 32), 32, 4, 2)
    if is_large:
        return Tile(max(needed, 128), 64, 8, 2)
    return Tile(max(needed, 128), 32, 8, 2) if head_size <= 64 else Tile(max(needed, 64), 64, 8, 2)


def programs_per_processor(tile: Tile, head_size: int, element_size: int, shared_memory: int) -> int:
    """Decode programs that one multiprocessor runs at a time. A program more than these runs alone, after the others.

    Args:
        tile: the decodes'.
        element_size: bytes of an element of the cache.
        shared_memory: bytes of a multiprocessor.
    """
    if element_size > 2:
        return 4  # float32 keeps keys in registers
    padded = head_pad(head_size)
    pairs = 1 if tile.num_stages <= 4 else 2  # of keys' and values' buffers
    # Beside them are the query, the block ids and the weights.
    shared = 2 * pairs * tile.keys * padded * element_size + 32 * padded + 3584
    registers = _decode_registers(head_size)
    return max(1, min(shared_memory // (shared + _BLOCK_OVERHEAD), _REGISTERS // (32 * tile.num_warps * registers)))


def _decode_registers(head_size: int) -> int:
    """The most registers of a decode's thread: Triton 3.6 and 3.9 need no more."""
    return 128 if head_size <= 64 else 168


def num_shares(length: int, share: int) -> int:
    """Return the number of shares of a sequence of `length` positions, at least one.

    The cuts are at fixed positions. The first 32 shares have `share` keys each. Then the size doubles every 16 shares.
    A short sequence therefore has many shares even if the model allows long ones. The cuts do not depend on the batch,
    so a sequence's sums and rounding do not either.
    """
    most_flat, per_doubling = int(_FLAT_SHARES.value), int(_SHARES_PER_DOUBLING.value)
    count, flat = min(-(-length // share), most_flat), most_flat * share
    while flat < length:
        share *= 2
        count += min(-(-(length - flat) // share), per_doubling)
        flat *= 2
    return max(1, count)


def max_shares(num_sequences: int, max_kv_len: int, share: int) -> int:
    """Most shares that decodes of so many sequences have."""
    return num_sequences * num_shares(max_kv_len, share)


@triton.jit
def whole_shares(positions, SHARE: tl.constexpr):
    """How many whole shares lie before each position, which is also the number of the share that it is in."""
    count = tl.minimum(positions // SHARE, _FLAT_SHARES)
    for doubling in tl.static_range(_DOUBLINGS):
        behind = positions - ((_FLAT_SHARES * SHARE) << doubling)
        count += tl.minimum(tl.maximum(behind, 0) // ((2 * SHARE) << doubling), _SHARES_PER_DOUBLING)
    return count


@triton.jit
def share_begin(number, SHARE: tl.constexpr):
    """The position at which a share begins."""
    doublings = tl.maximum(number - _FLAT_SHARES + _SHARES_PER_DOUBLING, 0) // _SHARES_PER_DOUBLING
    # Shares 16, 32, 48, 64, ... begin at 16, 32, 64, 128, ... times the smallest size.
    size = (doublings * 0 + SHARE) << tl.maximum(doublings - 1, 0)
    return tl.where(
        number < _FLAT_SHARES,
        number * SHARE,
        (number - doublings * _SHARES_PER_DOUBLING) * 2 * size,
    )


@triton.jit
def share_end(begin, SHARE: tl.constexpr):
    """The position behind a share that begins at `begin`."""
    largest = begin | (begin >> 1)
    largest |= largest >> 2
    largest |= largest >> 4
    largest |= largest >> 8
    largest |= largest >> 16
    # The largest power of two up to `begin`, of which a share is a sixteenth.
    return begin + tl.maximum((largest + 1) // (2 * _SHARES_PER_DOUBLING), SHARE)


# exp(x) = exp2(x * log2(e)), and exp2 is the instruction that the GPU has.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    query,  # [ROWS, HEAD_PAD]
    query_positions,  # [ROWS], negative where the row is padding
    first_key,  # a multiple of KEYS
    whole_key,  # every row sees all keys before it, read where HAS_WHOLE
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
    HAS_WHOLE: tl.constexpr,
):
    """Online softmax over the keys at positions [first_key, end_key) of one sequence and KV head."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    if HAS_WHOLE:
        # Most keys of a long prompt's chunk are seen by all of its rows: they need no comparison of positions.
        whole_key = tl.maximum(whole_key // KEYS * KEYS, first_key)
        for start in range(first_key, whole_key, KEYS):
            output, maximum, total = _attend_tile(
                output, maximum, total, query, query_positions, start, end_key, table_ptr, key_ptr, value_ptr,
                block_stride, num_blocks, scale, softcap, window,
                KEYS, BLOCK_SIZE, HEAD, HEAD_PAD, HAS_SOFTCAP, HAS_WINDOW, False,
            )  # fmt: skip
        first_key = whole_key
    for start in range(first_key, end_key, KEYS):
        output, maximum, total = _attend_tile(
            output, maximum, total, query, query_positions, start, end_key, table_ptr, key_ptr, value_ptr,
            block_stride, num_blocks, scale, softcap, window,
            KEYS, BLOCK_SIZE, HEAD, HEAD_PAD, HAS_SOFTCAP, HAS_WINDOW, True,
        )  # fmt: skip
    return output, maximum, total


@triton.jit
def _converted(numbers, kind: tl.constexpr):
    """Convert cached numbers to the query's type. Without FP8 they have this type already."""
    if numbers.dtype.is_fp8():
        numbers = numbers.to(tl.float32).to(kind)  # Triton 3.6 has no way from fp8 to bfloat16 on 8.9
    return numbers


@triton.jit
def _attend_tile(
    output,
    maximum,
    total,
    query,
    query_positions,
    start,
    end_key,
    table_ptr,
    key_ptr,
    value_ptr,
    block_stride,
    num_blocks,
    scale,
    softcap,
    window,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_EDGE: tl.constexpr,  # else every row sees every key of the tile
):
    """Add KEYS keys from `start` on to the online softmax."""
    dims = tl.arange(0, HEAD_PAD)
    in_head = dims < HEAD
    positions = start + tl.arange(0, KEYS)
    # One id a position, though a block has many: Triton 3.6 pipelines no loads whose addresses were reshaped.
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end_key, other=-1)
    # The planner has refused bad tables; `readable` keeps even one damaged later from reading outside the pool.
    readable = (blocks >= 0) & (blocks < num_blocks)
    # A pool outgrows 2**31 elements: widen before multiplying.
    offsets = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * HEAD
    if HEAD % 16 == 0:
        # `block_stride` is a whole number of heads, so rows begin at multiples of 16 elements and loads are wide.
        offsets = tl.multiple_of(offsets, 16)
    key = tl.load(key_ptr + offsets[None, :] + dims[:, None], mask=readable[None, :] & in_head[:, None], other=0.0)
    scores = tl.dot(query, _converted(key, query.dtype), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither overflows nor needs a device library.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E) / softcap) + 1.0))
    if IS_EDGE:
        distance = query_positions[:, None] - positions[None, :]
        visible = (distance >= 0) & readable[None, :]
        if HAS_WINDOW:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
    else:
        scores = scores * LOG2_E + tl.where(readable, 0.0, float("-inf"))[None, :]
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - shift[:, None])
    correction = tl.exp2(maximum - shift)
    value = tl.load(value_ptr + offsets[:, None] + dims[None, :], mask=readable[:, None] & in_head[None, :], other=0.0)
    total = total * correction + tl.sum(weights, 1)
    output = output * correction[:, None]
    output += tl.dot(weights.to(query.dtype), _converted(value, query.dtype), input_precision="ieee")
    return output, new_maximum, total


@triton.jit
def join_softmax(output, maximum, total, more_output, more_maximum, more_total):
    """Two shares of the keys as one: weighted sums [ROWS, HEAD_PAD], their maxima and totals [ROWS]."""
    new_maximum = tl.maximum(maximum, more_maximum)
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    old = tl.exp2(maximum - shift)
    new = tl.exp2(more_maximum - shift)
    return output * old[:, None] + more_output * new[:, None], new_maximum, total * old + more_total * new


@triton.jit
def finish_softmax(output, maximum, total, heads, used, sinks_ptr, HAS_SINKS: tl.constexpr):
    """The attention output [ROWS, HEAD_PAD]; a row without a single valid key (padding) gives zeros, not 0 / 0."""
    if HAS_SINKS:
        # A sink is one more score of the head: it takes weight and gives no value.
        sink = tl.load(sinks_ptr + heads, mask=used, other=0.0).to(tl.float32) * LOG2_E
        new_maximum = tl.maximum(maximum, sink)
        correction = tl.exp2(maximum - new_maximum)
        output = output * correction[:, None]
        total = total * correction + tl.exp2(sink - new_maximum)
    return output / tl.where(total > 0.0, total, 1.0)[:, None]
