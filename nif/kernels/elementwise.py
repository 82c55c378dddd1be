"""Small kernels of a layer: RMSNorm, rotary embeddings with the cache write, the gated activation, and block copies.

Each kernel has a plain-torch twin in tests/nif/kernels/reference.py.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl


@triton.jit
def store_in_cache(cells, numbers, mask):
    """Store keys or values in the cache's type. FP8 (E4M3) saturates at 448; NaN stays NaN."""
    kind: tl.constexpr = cells.dtype.scalar.element_ty
    if kind.is_fp8():
        # Round with integers, because Triton's interpreter rounds to FP8 otherwise than a GPU.
        wide = numbers.to(tl.float32)
        size = tl.minimum(tl.abs(wide), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Adding 2**14 rounds to multiples of 2**-9, the smallest FP8 number above 0.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(wide == wide, code | ((wide.to(tl.int32, bitcast=True) >> 24) & 0x80), 0x7F)
        tl.store(cells, code.to(tl.uint8).to(kind, bitcast=True), mask=mask)
    else:
        tl.store(cells, numbers.to(kind), mask=mask)


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
    """One program handles one row."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, PAD)
    mask = columns < WIDTH
    residual = tl.load(residual_ptr + row + columns, mask=mask, other=0.0)
    if HAS_DELTA:
        # Add in float32, then round: the norm is of the rounded sum, to which the next layer adds.
        delta = tl.load(delta_ptr + row + columns, mask=mask, other=0.0)
        residual = (residual.to(tl.float32) + delta.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + row + columns, residual, mask=mask)
    wide = residual.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row + columns, (wide * factor).to(residual.dtype) * weight, mask=mask)


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `residual` in place; returns the sum's RMSNorm times `weight`.

    Args:
        residual: [T, width], contiguous, changed.
        delta: [T, width], contiguous; None leaves the residual unchanged.
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


@triton.jit
def _load_rotated(
    source_ptr,  # this token's heads, HEAD values each
    norm_ptr,
    heads,
    dims,
    mask,
    cos,
    sin,
    eps,
    HEAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Return the two halves of every head after the optional per-head RMSNorm and the rotation, in float32."""
    HALF: tl.constexpr = HEAD // 2
    offsets = heads[:, None] * HEAD + dims[None, :]
    first = tl.load(source_ptr + offsets, mask=mask, other=0.0)
    second = tl.load(source_ptr + offsets + HALF, mask=mask, other=0.0)
    kind = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if HAS_NORM:
        in_half = dims < HALF
        square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD
        factor = 1.0 / tl.sqrt(square + eps)
        first_weight = tl.load(norm_ptr + dims, mask=in_half, other=0.0)
        second_weight = tl.load(norm_ptr + HALF + dims, mask=in_half, other=0.0)
        # Round to the model's type before multiplying with the weight, as the models themselves do.
        first = ((first * factor[:, None]).to(kind) * first_weight[None, :]).to(tl.float32)
        second = ((second * factor[:, None]).to(kind) * second_weight[None, :]).to(tl.float32)
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit(do_not_specialize=["num_slots", "num_positions"])
def _rope_cache_kernel(
    query_ptr,  # [T, QUERY_HEADS, HEAD] out
    qkv_ptr,  # [T, (QUERY_HEADS + 2 * KV_HEADS) * HEAD]
    key_ptr,
    value_ptr,
    slots_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    cos_ptr,  # [num_positions, HEAD // 2] float32
    sin_ptr,
    query_norm_ptr,  # [HEAD] or None
    key_norm_ptr,
    eps,
    num_slots,
    num_positions,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    QUERY_PAD: tl.constexpr,
    KV_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program handles all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD // 2
    dims = tl.arange(0, HALF_PAD)
    in_half = dims < HALF
    position = tl.load(positions_ptr + token)
    known = dims < tl.where((position >= 0) & (position < num_positions), HALF, 0)
    cos = tl.load(cos_ptr + position * HALF + dims, mask=known, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + dims, mask=known, other=0.0)
    qkv_ptr += token * (QUERY_HEADS + 2 * KV_HEADS) * HEAD

    heads = tl.arange(0, QUERY_PAD)
    mask = (heads < QUERY_HEADS)[:, None] & in_half[None, :]
    first, second = _load_rotated(qkv_ptr, query_norm_ptr, heads, dims, mask, cos, sin, eps, HEAD, HAS_NORM)
    out = query_ptr + token * QUERY_HEADS * HEAD + heads[:, None] * HEAD + dims[None, :]
    tl.store(out, first.to(query_ptr.dtype.element_ty), mask=mask)
    tl.store(out + HALF, second.to(query_ptr.dtype.element_ty), mask=mask)

    slot = tl.load(slots_ptr + token)
    if (slot < 0) | (slot >= num_slots):
        return  # a padding row writes nowhere
    heads = tl.arange(0, KV_PAD)
    mask = (heads < KV_HEADS)[:, None] & in_half[None, :]
    cell = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD
    cells = cell + heads[:, None] * BLOCK_SIZE * HEAD + dims[None, :]
    keys = qkv_ptr + QUERY_HEADS * HEAD
    first, second = _load_rotated(keys, key_norm_ptr, heads, dims, mask, cos, sin, eps, HEAD, HAS_NORM)
    store_in_cache(key_ptr + cells, first, mask)
    store_in_cache(key_ptr + cells + HALF, second, mask)
    values = keys + KV_HEADS * HEAD + heads[:, None] * HEAD + dims[None, :]
    store_in_cache(value_ptr + cells, tl.load(values, mask=mask), mask)
    store_in_cache(value_ptr + cells + HALF, tl.load(values + HALF, mask=mask), mask)


@triton.jit(do_not_specialize=["num_slots"])
def _write_kv_kernel(
    key_cache_ptr,
    value_cache_ptr,
    key_ptr,  # [T, KV_HEADS, HEAD] with strides
    value_ptr,
    slots_ptr,  # [T] int64
    num_slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    KV_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """One program handles all KV heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if (slot < 0) | (slot >= num_slots):
        return
    heads = tl.arange(0, KV_PAD)[:, None]
    dims = tl.arange(0, HEAD_PAD)[None, :]
    mask = (heads < KV_HEADS) & (dims < HEAD)
    key = tl.load(key_ptr + token * key_token_stride + heads * key_head_stride + dims, mask=mask)
    value = tl.load(value_ptr + token * value_token_stride + heads * value_head_stride + dims, mask=mask)
    cells = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * HEAD + heads * BLOCK_SIZE * HEAD + dims
    store_in_cache(key_cache_ptr + cells, key, mask)
    store_in_cache(value_cache_ptr + cells, value, mask)


def rope_and_write(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rotate the query and key heads, and write keys and values to their slots; a per-head RMSNorm may come first.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_size], contiguous: queries, keys, values.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_size], written.
        slots: [T] int64, block id * block_size + offset; a negative slot is skipped.
        positions: [T] int64, below the length of the tables.
        cos, sin: [positions, head_size // 2] float32.
        query_norm, key_norm: [head_size] weights of a per-head RMSNorm, both or neither.

    Returns:
        The rotated queries, [T, num_heads, head_size].
    """
    num_tokens = qkv.shape[0]
    num_blocks, num_kv_heads, block_size, head_size = key_cache.shape
    query = torch.empty((num_tokens, num_heads, head_size), dtype=qkv.dtype, device=qkv.device)
    _rope_cache_kernel[(num_tokens,)](
        query,
        qkv,
        key_cache,
        value_cache,
        slots,
        positions,
        cos,
        sin,
        query_norm,
        key_norm,
        eps,
        num_blocks * block_size,
        cos.shape[0],
        key_cache.stride(0),
        BLOCK_SIZE=block_size,
        QUERY_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD=head_size,
        QUERY_PAD=triton.next_power_of_2(num_heads),
        KV_PAD=triton.next_power_of_2(num_kv_heads),
        HALF_PAD=triton.next_power_of_2(head_size // 2),
        HAS_NORM=query_norm is not None,
        num_warps=4,
    )
    return query


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write keys and values [T, num_kv_heads, head_size] to their slots; a negative slot is skipped.

    The last dimension of `key` and `value` is contiguous; the others may have any stride.
    """
    num_tokens = key.shape[0]
    num_blocks, num_kv_heads, block_size, head_size = key_cache.shape
    _write_kv_kernel[(num_tokens,)](
        key_cache,
        value_cache,
        key,
        value,
        slots,
        num_blocks * block_size,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        BLOCK_SIZE=block_size,
        KV_HEADS=num_kv_heads,
        HEAD=head_size,
        KV_PAD=triton.next_power_of_2(num_kv_heads),
        HEAD_PAD=triton.next_power_of_2(head_size),
        num_warps=4,
    )


_SILU_CHUNK = 1024  # columns a program covers


@triton.jit
def _silu_mul_kernel(out_ptr, gate_up_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """One program handles one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + columns, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + columns, silu * up, mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, width] for `gate_up` [T, 2 * width], contiguous, gate first."""
    rows, both = gate_up.shape
    width = both // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    chunk = min(_SILU_CHUNK, triton.next_power_of_2(width))
    _silu_mul_kernel[(rows, triton.cdiv(width, chunk))](out, gate_up, WIDTH=width, CHUNK=chunk, num_warps=4)
    return out


_COPY_CHUNK = 2048  # elements a program copies


@triton.jit(do_not_specialize=["num_blocks"])
def _copy_blocks_kernel(pool_ptr, pairs_ptr, num_blocks, block_elements, CHUNK: tl.constexpr):
    """One program handles one chunk of one pair's block."""
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
    """Copy blocks within the pool.

    Args:
        pool: [num_blocks, ...], contiguous.
        pairs: [N, 2] int64 (source, target). The copies race, so no target may be another pair's source or target.
    """
    num_blocks = pool.shape[0]
    elements = pool[0].numel()
    _copy_blocks_kernel[(pairs.shape[0], triton.cdiv(elements, _COPY_CHUNK))](
        pool, pairs, num_blocks, elements, CHUNK=_COPY_CHUNK, num_warps=4
    )
