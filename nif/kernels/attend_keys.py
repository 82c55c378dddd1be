"""The attention kernels share these tile sizes and this inner loop, an online softmax over one sequence's blocks."""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from dataclasses import dataclass

import triton
import triton.language as tl

_MIN_DOT_ROWS = 16  # the smallest extent that tl.dot takes
SHARE = 256
"""Keys of a share near the beginning. With fewer keys, joining costs more time than the parallelism saves."""
_FLAT_SHARES = tl.constexpr(32)  # number of shares of this size; behind them
_SHARES_PER_DOUBLING = tl.constexpr(16)  # number of shares of twice the size, then of four times the size, ...
_DOUBLINGS = tl.constexpr(17)  # enough for 2**30 positions
_REGISTERS = 65_536  # of a multiprocessor
LARGE_SHARED_MEMORY = 228 * 1024
"""Bytes of a multiprocessor from compute capability 9.0 on, except 12.0."""
_BLOCK_OVERHEAD = 1024  # bytes of shared memory that the device takes for each program


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one program."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None  # limit for a thread; None lets the compiler choose


def head_pad(head_size: int, element_size: int = 2) -> int:
    """Return the extent of a tile along the head.

    Args:
        element_size: bytes of an element of the cache. Numbers of FP8 are multiplied in two halves of the head.
    """
    least = 2 * _MIN_DOT_ROWS if element_size == 1 else _MIN_DOT_ROWS
    return max(least, int(triton.next_power_of_2(head_size)))


def tile_shape(
    group: int,
    head_size: int,
    element_size: int,
    *,
    decode: bool,
    in_order: bool = False,
    shared_memory: int = LARGE_SHARED_MEMORY,
) -> Tile:
    """Choose the tile for `group` query heads that share a KV head.

    Args:
        element_size: bytes of a cached number; 4 if the queries are float32.
        decode: whether the tile is for decodes, with one token a sequence; else it is for chunks.
        in_order: whether chunks round as decodes do. They then have the decodes' tile with fewer stages, because chunks
            need more registers beside it. Stages do not change a sum.
        shared_memory: bytes of a multiprocessor. GPUs with much shared memory multiply from there. Other GPUs multiply
            from registers, so their tiles hold fewer keys.
    """
    needed = max(_MIN_DOT_ROWS, triton.next_power_of_2(group))
    if element_size > 2:
        return Tile(needed, 16, 4, 1)  # float32 has no fast dot product: larger tiles only spill registers
    wide = head_size > 128  # such tiles must stay small to fit shared memory
    is_large = shared_memory >= LARGE_SHARED_MEMORY
    if decode or in_order:
        if element_size == 1:
            # Of eight tiles this was the fastest on an H100. With 3 stages it was as fast, and spilled registers.
            keys = 32 if wide else 128 if is_large else 64
            stages = {32: 5, 64: 4, 128: 2}[keys]
        else:
            # With more keys Triton 3.6 spills registers for wide heads, and for heads that a mask cuts from a tile of
            # 128.
            keys = 16 if wide else 32 if 64 < head_size < 128 else 64
            # Addresses wait for block ids, so block ids take stages, too. With 5 stages, keys and values have two
            # buffers each; with 4 stages they have one. On an H100 both were as fast: registers allow three programs
            # either way.
            stages = 4 if keys == 64 else 5
        if not decode:
            stages = 3 if keys == 64 else 2
        # Without a limit ptxas takes fewer registers than the GPU has, and spills some: with Triton 3.6 in wide chunks
        # and over FP8, and with Triton 3.9 in decodes of heads of 64 for compute capability 12.0.
        registers = _decode_registers(head_size) if decode else 200 if wide else 216 if element_size == 1 else None
        return Tile(needed, keys, 4, stages, registers)
    if wide:
        keys = 16 if element_size == 1 else 32  # two halves of a head take more registers than one whole
        return Tile(max(needed, 64), keys, 8, 2) if is_large else Tile(max(needed, 32), 32, 4, 2)
    if is_large:
        return Tile(max(needed, 128), 64, 8, 2)
    if head_size <= 64:
        return Tile(max(needed, 128), 32, 8, 2)
    return Tile(max(needed, 64), 32 if element_size == 1 else 64, 8, 2)


def programs_per_processor(tile: Tile, head_size: int, element_size: int, shared_memory: int) -> int:
    """Return how many decode programs one multiprocessor runs at a time. Each further program runs after the others.

    Args:
        tile: the tile of decodes.
        element_size: bytes of an element of the cache.
        shared_memory: bytes of a multiprocessor.
    """
    if element_size > 2:
        return 4  # float32 keeps keys in registers
    padded = head_pad(head_size, element_size)
    pairs = 1 if tile.num_stages <= 4 else 2  # of buffers for keys and values
    # The query, the block ids and the weights take shared memory, too.
    shared = 2 * pairs * tile.keys * padded * element_size + 32 * padded + 3584
    registers = _decode_registers(head_size)
    return max(1, min(shared_memory // (shared + _BLOCK_OVERHEAD), _REGISTERS // (32 * tile.num_warps * registers)))


def _decode_registers(head_size: int) -> int:
    """Return the limit of registers for a decode's thread: Triton 3.6 and 3.9 need no more."""
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
    """Return the most shares that the decodes of `num_sequences` sequences have."""
    return num_sequences * num_shares(max_kv_len, share)


@triton.jit
def whole_shares(positions, SHARE: tl.constexpr):
    """Return the number of whole shares before each position. This is also the index of the position's own share."""
    count = tl.minimum(positions // SHARE, _FLAT_SHARES)
    for doubling in tl.static_range(_DOUBLINGS):
        behind = positions - ((_FLAT_SHARES * SHARE) << doubling)
        count += tl.minimum(tl.maximum(behind, 0) // ((2 * SHARE) << doubling), _SHARES_PER_DOUBLING)
    return count


@triton.jit
def share_begin(number, SHARE: tl.constexpr):
    """Return the position at which a share begins."""
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
    """Return the first position after the share that begins at `begin`."""
    largest = begin | (begin >> 1)
    largest |= largest >> 2
    largest |= largest >> 4
    largest |= largest >> 8
    largest |= largest >> 16
    # A share is a sixteenth of the largest power of two up to `begin`.
    return begin + tl.maximum((largest + 1) // (2 * _SHARES_PER_DOUBLING), SHARE)


# exp(x) = exp2(x * log2(e)). The GPU has an instruction for exp2 only.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    query,  # [ROWS, HEAD_PAD]
    query_positions,  # [ROWS], negative where the row is padding
    first_key,  # a multiple of KEYS
    whole_key,  # every row sees all keys before this position; read if HAS_WHOLE
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
    """Compute an online softmax over the keys at positions [first_key, end_key) of one sequence and KV head."""
    # Two numbers of FP8 make a word. Matrix instructions get words in the order that they need; single bytes they do
    # not. A word's low byte is an even dimension of the head.
    IN_WORDS: tl.constexpr = key_ptr.dtype.element_ty.is_fp8() and query.dtype != tl.float32
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if IN_WORDS:
        query, odd_query, scale = _halves_of(query, scale, ROWS, HEAD_PAD)
        key_ptr = key_ptr.to(tl.pointer_type(tl.uint16))
        value_ptr = value_ptr.to(tl.pointer_type(tl.uint16))
        output = tl.zeros([ROWS, HEAD_PAD // 2], tl.float32)
        odd_output = tl.zeros([ROWS, HEAD_PAD // 2], tl.float32)
    else:
        odd_query = query
        output = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        odd_output = tl.zeros([1, 1], tl.float32)  # not used
    PACK: tl.constexpr = 2 if IN_WORDS else 1
    if HAS_WHOLE:
        # All rows of a long prompt's chunk see most keys, which therefore need no comparison of positions.
        whole_key = tl.maximum(whole_key // KEYS * KEYS, first_key)
        for start in range(first_key, whole_key, KEYS):
            output, odd_output, maximum, total = _attend_tile(
                output, odd_output, maximum, total, query, odd_query, query_positions, start, end_key, table_ptr,
                key_ptr, value_ptr, block_stride // PACK, num_blocks, scale, softcap, window,
                KEYS, BLOCK_SIZE, HEAD // PACK, HEAD_PAD // PACK, IN_WORDS, HAS_SOFTCAP, HAS_WINDOW, False,
            )  # fmt: skip
        first_key = whole_key
    for start in range(first_key, end_key, KEYS):
        output, odd_output, maximum, total = _attend_tile(
            output, odd_output, maximum, total, query, odd_query, query_positions, start, end_key, table_ptr,
            key_ptr, value_ptr, block_stride // PACK, num_blocks, scale, softcap, window,
            KEYS, BLOCK_SIZE, HEAD // PACK, HEAD_PAD // PACK, IN_WORDS, HAS_SOFTCAP, HAS_WINDOW, True,
        )  # fmt: skip
    if IN_WORDS:
        output = tl.join(output, odd_output).reshape([ROWS, HEAD_PAD])
    return output, maximum, total


@triton.jit
def _halves_of(query, scale, ROWS: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Return the even and the odd dimensions of the queries in float16, and each row's scale [ROWS, 1].

    Numbers of FP8 become float16 in one instruction, and exactly. Each query is divided by a power of two, so that it
    fits float16.
    """
    wide = query.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    power = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000), 0x7E800000)
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    halves = (wide * inverse[:, None]).to(tl.float16).reshape([ROWS, HEAD_PAD // 2, 2])
    even, odd = tl.split(halves)
    return even, odd, scale * power.to(tl.float32, bitcast=True)[:, None]


_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter has no inline assembly
# For two words: puts the low bytes side by side and converts both, then the high bytes.
_FP8_TO_FP16 = tl.constexpr("""{
    .reg .b32 pair;
    .reg .b16 bytes, unused;
    prmt.b32 pair, $2, 0, 0x4420;
    mov.b32 {bytes, unused}, pair;
    cvt.rn.f16x2.e4m3x2 $0, bytes;
    prmt.b32 pair, $2, 0, 0x4431;
    mov.b32 {bytes, unused}, pair;
    cvt.rn.f16x2.e4m3x2 $1, bytes;
}""")


@triton.jit
def _numbers_of(words):
    """Return in float16 the numbers of FP8 in the low bytes of words, and those in the high bytes."""
    if _IS_INTERPRETED:
        low = words.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            _FP8_TO_FP16, "=&r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def _converted(numbers, kind: tl.constexpr):
    """Convert cached numbers to the query's type, which is float32 if they are of FP8."""
    if numbers.dtype.is_fp8():
        numbers = numbers.to(kind)
    return numbers


@triton.jit
def _attend_tile(
    output,
    odd_output,
    maximum,
    total,
    query,
    odd_query,
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
    IN_WORDS: tl.constexpr,  # whether keys are words of two numbers; block_stride, HEAD and HEAD_PAD then count words
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_EDGE: tl.constexpr,  # else every row sees every key of the tile
):
    """Add the KEYS keys from position `start` on to the online softmax."""
    dims = tl.arange(0, HEAD_PAD)
    in_head = dims < HEAD
    positions = start + tl.arange(0, KEYS)
    # Load an id for each position, not for each block: Triton 3.6 pipelines no loads from reshaped addresses.
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end_key, other=-1)
    # The host checks block tables. `readable` keeps even a table that is damaged later from reading outside the pool.
    readable = (blocks >= 0) & (blocks < num_blocks)
    # A pool outgrows 2**31 elements: widen before multiplying.
    offsets = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * HEAD
    if HEAD % 16 == 0:
        # `block_stride` is a whole number of heads, so rows begin at multiples of 16 elements and loads are wide.
        offsets = tl.multiple_of(offsets, 16)
    elif HEAD % 8 == 0:
        offsets = tl.multiple_of(offsets, 8)
    key = tl.load(key_ptr + offsets[None, :] + dims[:, None], mask=readable[None, :] & in_head[:, None], other=0.0)
    if IN_WORDS:
        key, odd_key = _numbers_of(key)
        scores = tl.dot(odd_query, odd_key, tl.dot(query, key)) * scale
    else:
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
    if IN_WORDS:
        value, odd_value = _numbers_of(value)
        odd_output = tl.dot(weights.to(tl.float16), odd_value, odd_output * correction[:, None])
        output = tl.dot(weights.to(tl.float16), value, output)
    else:
        output += tl.dot(weights.to(query.dtype), _converted(value, query.dtype), input_precision="ieee")
    return output, odd_output, new_maximum, total


@triton.jit
def join_softmax(output, maximum, total, more_output, more_maximum, more_total):
    """Join two shares of the keys: weighted sums [ROWS, HEAD_PAD], their maxima and totals [ROWS]."""
    new_maximum = tl.maximum(maximum, more_maximum)
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    old = tl.exp2(maximum - shift)
    new = tl.exp2(more_maximum - shift)
    return output * old[:, None] + more_output * new[:, None], new_maximum, total * old + more_total * new


@triton.jit
def finish_softmax(output, maximum, total, heads, used, sinks_ptr, HAS_SINKS: tl.constexpr):
    """Return the attention output [ROWS, HEAD_PAD]. A padding row has no valid key and gives zeros, not 0 / 0."""
    if HAS_SINKS:
        # A sink is an additional score of the head, which takes weight and gives no value.
        sink = tl.load(sinks_ptr + heads, mask=used, other=0.0).to(tl.float32) * LOG2_E
        new_maximum = tl.maximum(maximum, sink)
        correction = tl.exp2(maximum - new_maximum)
        output = output * correction[:, None]
        total = total * correction + tl.exp2(sink - new_maximum)
    return output / tl.where(total > 0.0, total, 1.0)[:, None]
