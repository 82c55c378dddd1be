"""Attention over a paged KV cache: ragged prefill chunks and decodes in one launch, and split-KV decode.

K and V are [num_blocks, num_kv_heads, block_size, head_size]; a block may lie anywhere in a larger tensor as long as
its last three dimensions are contiguous. The plain-torch twin is `reference.paged_attention`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

from genbatch.nif.kernels.attend_keys import LOG2_E, attend_keys
from genbatch.nif.kernels.attention_tiles import head_pad, tile_shape


@triton.jit(
    do_not_specialize=["num_sequences", "table_width", "num_blocks", "window"],
)
def _ragged_attention_kernel(
    out_ptr,  # [T, query_heads, HEAD]
    query_ptr,  # [T, query_heads, HEAD] with strides
    key_ptr,
    value_ptr,
    table_ptr,  # [B, table_width] int32
    query_starts_ptr,  # [B + 1] int32
    kv_lens_ptr,  # [B] int32
    sinks_ptr,  # [query_heads] or None
    num_sequences,
    table_width,
    num_blocks,
    query_token_stride,
    query_head_stride,
    block_stride,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program: ROWS // GROUP tokens of one sequence, with the GROUP query heads that share a KV head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    TOKENS: tl.constexpr = ROWS // GROUP
    # Sequence s owns the tiles from query_starts[s] // TOKENS + s on: never fewer than it needs, and no list of
    # tiles has to come from the host. Find the last sequence that begins at or before this tile.
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    query_start = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - query_start
    first_token = (tile - (query_start // TOKENS + sequence)) * TOKENS
    if first_token >= query_len:
        return
    kv_len = tl.load(kv_lens_ptr + sequence)

    rows = tl.arange(0, ROWS)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    used = (tokens < query_len) & (rows < TOKENS * GROUP)
    query_positions = tl.where(used, kv_len - query_len + tokens, -1)
    dims = tl.arange(0, HEAD_PAD)
    row_offsets = (query_start + tokens).to(tl.int64) * query_token_stride + heads * query_head_stride
    mask = used[:, None] & (dims < HEAD)[None, :]
    query = tl.load(query_ptr + row_offsets[:, None] + dims[None, :], mask=mask, other=0.0)

    end_key = tl.minimum(kv_len - query_len + first_token + TOKENS, kv_len)
    end_key = tl.minimum(end_key, table_width * BLOCK_SIZE)
    first_key = 0
    if HAS_WINDOW:
        # Whole tiles before the first query's window hold nothing that any row sees.
        first_key = tl.maximum(kv_len - query_len + first_token - window + 1, 0) // KEYS * KEYS
    output, maximum, total = attend_keys(
        query,
        query_positions,
        first_key,
        end_key,
        table_ptr + tl.cast(sequence, tl.int64) * table_width,
        key_ptr + kv_head * BLOCK_SIZE * HEAD,
        value_ptr + kv_head * BLOCK_SIZE * HEAD,
        block_stride,
        num_blocks,
        scale,
        softcap,
        window,
        ROWS,
        KEYS,
        BLOCK_SIZE,
        HEAD,
        HEAD_PAD,
        HAS_SOFTCAP,
        HAS_WINDOW,
    )
    if HAS_SINKS:
        # A sink is one more score of the head: it takes weight and gives no value.
        sink = tl.load(sinks_ptr + heads, mask=used, other=0.0).to(tl.float32) * LOG2_E
        new_maximum = tl.maximum(maximum, sink)
        correction = tl.exp2(maximum - new_maximum)
        output = output * correction[:, None]
        total = total * correction + tl.exp2(sink - new_maximum)
    # A row without a single valid key (padding) gives zeros, not 0 / 0.
    output = output / tl.where(total > 0.0, total, 1.0)[:, None]
    out_offsets = ((query_start + tokens).to(tl.int64) * tl.num_programs(1) * GROUP + heads) * HEAD
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], output.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_width", "num_blocks", "window"])
def _split_attention_kernel(
    partial_ptr,  # [B, query_heads, splits, HEAD] float32, each split's own softmax
    lse_ptr,  # [B, query_heads, splits] float32, log2 of each split's sum of exponentials
    query_ptr,  # [B, query_heads, HEAD] with strides
    key_ptr,
    value_ptr,
    table_ptr,
    kv_lens_ptr,
    table_width,
    num_blocks,
    query_token_stride,
    query_head_stride,
    block_stride,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One program: one decoding token, the query heads of one KV head, and one share of its keys."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    kv_len = tl.minimum(tl.load(kv_lens_ptr + sequence), table_width * BLOCK_SIZE)
    oldest = 0
    if HAS_WINDOW:
        oldest = tl.maximum(kv_len - window, 0) // KEYS * KEYS
    tiles = tl.cdiv(tl.cdiv(kv_len - oldest, KEYS), num_splits)
    first_key = oldest + split * tiles * KEYS
    end_key = tl.minimum(first_key + tiles * KEYS, kv_len)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PAD)
    heads = kv_head * GROUP + rows
    used = rows < GROUP
    mask = used[:, None] & (dims < HEAD)[None, :]
    row_offsets = sequence.to(tl.int64) * query_token_stride + heads * query_head_stride
    query = tl.load(query_ptr + row_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    output, maximum, total = attend_keys(
        query,
        tl.where(used, kv_len - 1, -1),
        first_key,
        end_key,
        table_ptr + tl.cast(sequence, tl.int64) * table_width,
        key_ptr + kv_head * BLOCK_SIZE * HEAD,
        value_ptr + kv_head * BLOCK_SIZE * HEAD,
        block_stride,
        num_blocks,
        scale,
        softcap,
        window,
        ROWS,
        KEYS,
        BLOCK_SIZE,
        HEAD,
        HEAD_PAD,
        HAS_SOFTCAP,
        HAS_WINDOW,
    )
    seen = total > 0.0
    safe_total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, maximum + tl.log2(safe_total), float("-inf"))
    cells = (sequence.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * num_splits + split
    tl.store(lse_ptr + cells, lse, mask=used)
    tl.store(partial_ptr + cells[:, None] * HEAD + dims[None, :], output / safe_total[:, None], mask=mask)


@triton.jit
def _reduce_splits_kernel(
    out_ptr,  # [B * query_heads, HEAD]
    partial_ptr,  # [B * query_heads, splits, HEAD] float32
    lse_ptr,  # [B * query_heads, splits] float32
    SPLITS: tl.constexpr,  # a power of two
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Joins one head's partial outputs, each weighted by its share of the softmax."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_PAD)
    in_head = dims < HEAD
    lse = tl.load(lse_ptr + row * SPLITS + splits)
    maximum = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(weights, 0)
    cells = (row * SPLITS + splits)[:, None] * HEAD + dims[None, :]
    partial = tl.load(partial_ptr + cells, mask=in_head[None, :], other=0.0)
    output = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * HEAD + dims, output.to(out_ptr.dtype.element_ty), mask=in_head)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int = 1,
) -> torch.Tensor:
    """Causal attention of ragged queries over their sequences' blocks; the queries' own keys are already written.

    Args:
        query: [T, num_heads, head_size], the entries end to end; the last dimension contiguous.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_size].
        block_table: [B, max_blocks] int32, contiguous.
        query_starts: [B + 1] int32, prefix sums of the query lengths.
        kv_lens: [B] int32, positions held, the queries' own included; 0 marks a padding row, which yields zeros.
        max_query_len: longest query; 1 allows the split kernel.
        window: positions a token attends to, itself included; None for all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [num_heads], one more score a head that takes weight and gives no value.
        num_splits: shares of a decode's keys worked on in parallel, a power of two; see
            `attention_tiles.choose_num_splits`. Taken
            as 1 where a query is longer than 1 or there are sinks.

    Returns:
        [T, num_heads, head_size] in the query's type.
    """
    num_tokens, num_heads, head_size = query.shape
    num_blocks, num_kv_heads, block_size, _ = key_cache.shape
    num_sequences, table_width = block_table.shape
    group = num_heads // num_kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    splitting = num_splits > 1 and max_query_len == 1 and sinks is None
    rows, keys, num_warps, num_stages = tile_shape(group, head_size, query.element_size(), decode=max_query_len == 1)
    shape = {
        "GROUP": group,
        "ROWS": rows,
        "KEYS": keys,
        "BLOCK_SIZE": block_size,
        "HEAD": head_size,
        "HEAD_PAD": head_pad(head_size),
        "HAS_SOFTCAP": bool(softcap),
        "HAS_WINDOW": window is not None,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    numbers = (
        table_width,
        num_blocks,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        scale,
        softcap or 0.0,
        window or 0,
    )
    if not splitting:
        num_tiles = num_tokens // (rows // group) + num_sequences
        _ragged_attention_kernel[(num_tiles, num_kv_heads)](
            out,
            query,
            key_cache,
            value_cache,
            block_table,
            query_starts,
            kv_lens,
            sinks,
            num_sequences,
            *numbers,
            **shape,
            HAS_SINKS=sinks is not None,
        )
        return out
    partial = torch.empty((num_tokens, num_heads, num_splits, head_size), dtype=torch.float32, device=query.device)
    lse = torch.empty((num_tokens, num_heads, num_splits), dtype=torch.float32, device=query.device)
    _split_attention_kernel[(num_tokens, num_kv_heads, num_splits)](
        partial, lse, query, key_cache, value_cache, block_table, kv_lens, *numbers, **shape
    )
    _reduce_splits_kernel[(num_tokens * num_heads,)](
        out, partial, lse, SPLITS=num_splits, HEAD=head_size, HEAD_PAD=head_pad(head_size)
    )
    return out
