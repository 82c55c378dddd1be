"""Attention over a paged KV cache, for decodes and ragged prefill chunks in one step.

A decode's keys are cut into shares at fixed positions (see `attend_keys.num_shares`). A plan, which the device computes
once for each step, lists the shares of all sequences. A fixed number of programs works through the list. So one long
sequence is spread over the whole GPU, and the launch does not depend on lengths. A second kernel joins the shares.

K and V are [num_blocks, num_kv_heads, block_size, head_size]. A block may lie anywhere in a larger tensor if its last
three dimensions are contiguous. The twins are `reference.paged_attention` and `reference.plan_shares`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from genbatch.nif.kernels.attend_keys import (
    SHARE,
    Tile,
    attend_keys,
    finish_softmax,
    head_pad,
    join_softmax,
    max_shares,
    num_shares,
    programs_per_processor,
    share_begin,
    share_end,
    tile_shape,
    whole_shares,
)

_PLAN_CHUNK = 128  # sequences that a program of the plan reads at a time
_SHARES_AT_ONCE = 16  # shares that are joined at a time
# Programs that are launched for each program that runs at a time. When a program ends early, another takes its place:
# that was up to 7 % faster on an H100.
_WAVES = 2


@triton.jit
def _shares_of(
    sequences,
    num_sequences,
    query_starts_ptr,
    kv_lens_ptr,
    longest,
    window,
    SHARE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return each sequence's number of shares: at least 1 if the sequence decodes, else 0."""
    known = sequences < num_sequences
    begin = tl.load(query_starts_ptr + sequences, mask=known, other=0)
    end = tl.load(query_starts_ptr + sequences + 1, mask=known, other=0)
    kv_len = tl.minimum(tl.load(kv_lens_ptr + sequences, mask=known, other=0), longest)
    first = tl.zeros_like(kv_len)
    if HAS_WINDOW:
        first = whole_shares(tl.maximum(kv_len - window, 0), SHARE)
    last = whole_shares(tl.maximum(kv_len - 1, 0), SHARE)
    return tl.where(end - begin == 1, last - first + 1, 0)


@triton.jit(do_not_specialize=["num_sequences", "longest", "window"])
def _plan_kernel(
    owners_ptr,  # [most shares] int32, each share's sequence
    firsts_ptr,  # [B + 1] int32, each sequence's first share
    query_starts_ptr,  # [B + 1] int32
    kv_lens_ptr,  # [B] int32
    num_sequences,
    longest,
    window,
    SHARE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program handles one sequence. A further program stores the end of the last sequence's shares."""
    sequence = tl.program_id(0)
    before = tl.zeros([CHUNK], tl.int32)
    for start in range(0, sequence, CHUNK):
        others = start + tl.arange(0, CHUNK)
        shares = _shares_of(others, num_sequences, query_starts_ptr, kv_lens_ptr, longest, window, SHARE, HAS_WINDOW)
        before += tl.where(others < sequence, shares, 0)
    first = tl.sum(before, 0)
    tl.store(firsts_ptr + sequence, first)
    own = _shares_of(sequence, num_sequences, query_starts_ptr, kv_lens_ptr, longest, window, SHARE, HAS_WINDOW)
    for start in range(0, own, CHUNK):
        shares = start + tl.arange(0, CHUNK)
        tl.store(owners_ptr + first + shares, tl.zeros_like(shares) + sequence, mask=shares < own)


@triton.jit
def place_of_chunk(KV_HEADS: tl.constexpr):
    """Return the tile and the KV head of this program.

    Programs start in order, and a later tile of a prompt has more keys before it: the longest work comes first.
    """
    program = tl.program_id(0)
    return (tl.num_programs(0) - 1 - program) // KV_HEADS, program % KV_HEADS


@triton.jit(do_not_specialize=["num_sequences", "table_width", "num_blocks", "window"])
def _chunk_attention_kernel(
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARE: tl.constexpr,  # 0 reads the keys in one loop
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program handles ROWS // GROUP tokens of one sequence, for the GROUP query heads that share a KV head."""
    tile, kv_head = place_of_chunk(KV_HEADS)
    TOKENS: tl.constexpr = ROWS // GROUP
    # Sequence s owns the tiles from query_starts[s] // TOKENS + s on. These are never fewer than the sequence needs,
    # and the host sends no list of tiles. Find the last sequence that begins at or before this tile.
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
    if (first_token >= query_len) | (query_len == 1):
        return  # `_decode_attention_kernel` handles decodes
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
        # Skip whole tiles before the first query's window: no row sees their keys.
        first_key = tl.maximum(kv_len - query_len + first_token - window + 1, 0) // KEYS * KEYS
    table_ptr += tl.cast(sequence, tl.int64) * table_width
    key_ptr += kv_head * BLOCK_SIZE * HEAD
    value_ptr += kv_head * BLOCK_SIZE * HEAD
    if SHARE == 0:
        output, maximum, total = attend_keys(
            query,
            query_positions,
            first_key,
            kv_len - query_len + first_token + 1,
            end_key,
            table_ptr,
            key_ptr,
            value_ptr,
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
            HAS_WHOLE=not HAS_WINDOW,
        )
    else:
        # Compute share by share and join the shares in order, as a decode of each of these tokens would.
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        output = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        begin = share_begin(whole_shares(first_key, SHARE), SHARE)
        while begin < end_key:
            end = share_end(begin, SHARE)
            more_output, more_maximum, more_total = attend_keys(
                query,
                query_positions,
                tl.maximum(begin, first_key),
                0,
                tl.minimum(end, end_key),
                table_ptr,
                key_ptr,
                value_ptr,
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
                HAS_WHOLE=False,
            )
            output, maximum, total = join_softmax(output, maximum, total, more_output, more_maximum, more_total)
            begin = end
    output = finish_softmax(output, maximum, total, heads, used, sinks_ptr, HAS_SINKS)
    out_offsets = ((query_start + tokens).to(tl.int64) * KV_HEADS * GROUP + heads) * HEAD
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], output.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_sequences", "table_width", "num_blocks", "window"])
def _decode_attention_kernel(
    out_ptr,  # [T, query_heads, HEAD]
    partial_ptr,  # [most shares, query_heads, HEAD] float32, each share's weighted sum
    stats_ptr,  # [most shares, query_heads, 2] float32, its maximum and its total
    query_ptr,  # [T, query_heads, HEAD] with strides
    key_ptr,
    value_ptr,
    table_ptr,  # [B, table_width] int32
    query_starts_ptr,
    kv_lens_ptr,
    owners_ptr,
    firsts_ptr,
    sinks_ptr,
    num_sequences,
    table_width,
    num_blocks,
    query_token_stride,
    query_head_stride,
    block_stride,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program handles shares of the plan at a fixed distance, each for the query heads of one KV head."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PAD)
    used = rows < GROUP
    mask = used[:, None] & (dims < HEAD)[None, :]
    num_items = tl.load(firsts_ptr + num_sequences) * KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        listed = item // KV_HEADS
        kv_head = item % KV_HEADS
        sequence = tl.load(owners_ptr + listed)
        first_listed = tl.load(firsts_ptr + sequence)
        is_whole = tl.load(firsts_ptr + sequence + 1) - first_listed == 1
        token = tl.load(query_starts_ptr + sequence)
        kv_len = tl.minimum(tl.load(kv_lens_ptr + sequence), table_width * BLOCK_SIZE)
        oldest = 0
        if HAS_WINDOW:
            oldest = tl.maximum(kv_len - window, 0)
        begin = share_begin(whole_shares(oldest, SHARE) + listed - first_listed, SHARE)
        heads = kv_head * GROUP + rows
        row_offsets = token.to(tl.int64) * query_token_stride + heads * query_head_stride
        query = tl.load(query_ptr + row_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        output, maximum, total = attend_keys(
            query,
            tl.where(used, kv_len - 1, -1),
            tl.maximum(begin, oldest // KEYS * KEYS),
            0,
            tl.minimum(share_end(begin, SHARE), kv_len),
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
            HAS_WHOLE=False,
        )
        if is_whole:
            output = finish_softmax(output, maximum, total, heads, used, sinks_ptr, HAS_SINKS)
            cells = (token.to(tl.int64) * KV_HEADS * GROUP + heads) * HEAD
            tl.store(out_ptr + cells[:, None] + dims[None, :], output.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            cells = listed.to(tl.int64) * KV_HEADS * GROUP + heads
            tl.store(partial_ptr + cells[:, None] * HEAD + dims[None, :], output, mask=mask)
            tl.store(stats_ptr + cells * 2, maximum, mask=used)
            tl.store(stats_ptr + cells * 2 + 1, total, mask=used)


@triton.jit
def _join_shares_kernel(
    out_ptr,  # [T, query_heads, HEAD]
    partial_ptr,
    stats_ptr,
    query_starts_ptr,
    firsts_ptr,
    sinks_ptr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,  # shares that are joined at a time; 1 keeps the order of `_chunk_attention_kernel`
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program handles one query head of one sequence that decodes in more than one share."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(firsts_ptr + sequence)
    end = tl.load(firsts_ptr + sequence + 1)
    if end - first < 2:
        return
    dims = tl.arange(0, HEAD_PAD)
    in_head = dims < HEAD
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    output = tl.zeros([1, HEAD_PAD], tl.float32)
    for start in range(first, end, CHUNK):
        shares = start + tl.arange(0, CHUNK)
        known = shares < end
        cells = shares.to(tl.int64) * HEADS + head
        maxima = tl.load(stats_ptr + cells * 2, mask=known, other=float("-inf"))
        totals = tl.load(stats_ptr + cells * 2 + 1, mask=known, other=0.0)
        sums = tl.load(
            partial_ptr + cells[:, None] * HEAD + dims[None, :], mask=known[:, None] & in_head[None, :], other=0.0
        )
        if CHUNK == 1:
            output, maximum, total = join_softmax(output, maximum, total, sums, maxima, totals)
        else:
            largest = tl.max(maxima, 0)
            weights = tl.exp2(maxima - tl.where(largest == float("-inf"), 0.0, largest))
            output, maximum, total = join_softmax(
                output,
                maximum,
                total,
                tl.sum(sums * weights[:, None], 0)[None, :],
                tl.zeros([1], tl.float32) + largest,
                tl.zeros([1], tl.float32) + tl.sum(totals * weights, 0),
            )
    heads = tl.zeros([1], tl.int32) + head
    output = finish_softmax(output, maximum, total, heads, heads >= 0, sinks_ptr, HAS_SINKS)
    token = tl.load(query_starts_ptr + sequence)
    cells = (token.to(tl.int64) * HEADS + heads) * HEAD
    tl.store(
        out_ptr + cells[:, None] + dims[None, :],
        output.to(out_ptr.dtype.element_ty),
        mask=in_head[None, :] & (heads >= 0)[:, None],
    )


@dataclass(frozen=True, slots=True)
class AttentionSetting:
    """A runner's setting for attention.

    Args:
        num_processors: multiprocessors of the GPU, which decide how many programs work through a plan.
        shared_memory: bytes of each multiprocessor.
        in_order: whether a token's output must be the same in a chunk and in a decode, which is slower.
        share: keys of a share near the beginning, a power of two; see `attend_keys.num_shares`.
    """

    num_processors: int
    shared_memory: int = 228 * 1024
    in_order: bool = False
    share: int = SHARE


@dataclass(frozen=True, slots=True)
class SharePlan:
    """The shares of a step's decodes in the order of the entries, for all layers of a group."""

    owners: torch.Tensor  # [most shares] int32, each share's entry; the last number in `firsts` counts the shares
    firsts: torch.Tensor  # [B + 1] int32, each entry's first share
    most_per_entry: int  # most shares of an entry; 1 means that no shares are joined
    setting: AttentionSetting


def plan_shares(
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    setting: AttentionSetting,
    *,
    max_kv_len: int,
    window: int | None = None,
) -> SharePlan:
    """List the shares of all entries of one token.

    Args:
        query_starts: [B + 1] int32, prefix sums of the query lengths.
        kv_lens: [B] int32.
        setting: the runner's setting.
        max_kv_len: an upper limit of `kv_lens`.
        window: positions a token attends to; None for all.
    """
    num_sequences = len(kv_lens)
    most = max_shares(num_sequences, max_kv_len, setting.share)
    owners = torch.empty(most, dtype=torch.int32, device=kv_lens.device)
    firsts = torch.empty(num_sequences + 1, dtype=torch.int32, device=kv_lens.device)
    _plan_kernel[(num_sequences + 1,)](
        owners,
        firsts,
        query_starts,
        kv_lens,
        num_sequences,
        max_kv_len,
        window or 0,
        SHARE=setting.share,
        HAS_WINDOW=window is not None,
        CHUNK=_PLAN_CHUNK,
        num_warps=4,
    )
    return SharePlan(owners, firsts, num_shares(max_kv_len, setting.share), setting)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    plan: SharePlan,
    *,
    scale: float,
    max_query_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of ragged queries over their sequences' blocks. The queries' own keys must be written.

    Args:
        query: [T, num_heads, head_size], the entries end to end; the last dimension contiguous.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_size], in the query's type or in FP8.
        block_table: [B, max_blocks] int32, contiguous.
        query_starts: [B + 1] int32, prefix sums of the query lengths.
        kv_lens: [B] int32, cached positions, including the queries' own. 0 marks a padding row, which gives zeros.
        plan: the plan of these entries for this window.
        max_query_len: longest query.
        window: positions a token attends to, itself included; None for all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [num_heads], an additional score for each head, which takes weight and gives no value.

    Returns:
        [T, num_heads, head_size] in the query's type.
    """
    num_tokens, num_heads, head_size = query.shape
    num_blocks, num_kv_heads, block_size, _ = key_cache.shape
    num_sequences, table_width = block_table.shape
    group = num_heads // num_kv_heads
    setting, device = plan.setting, query.device
    out = torch.empty(query.shape, dtype=query.dtype, device=device)
    size = query.element_size() if query.element_size() > 2 else key_cache.element_size()
    assert size > 1 or head_size % 2 == 0, "numbers of FP8 are read two at a time"

    def shape(tile: Tile) -> dict[str, object]:
        return {
            "GROUP": group,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "BLOCK_SIZE": block_size,
            "HEAD": head_size,
            "HEAD_PAD": head_pad(head_size, size),
            "HAS_SOFTCAP": bool(softcap),
            "HAS_WINDOW": window is not None,
            "HAS_SINKS": sinks is not None,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.registers,
        }

    numbers = (
        num_sequences,
        table_width,
        num_blocks,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        scale,
        softcap or 0.0,
        window or 0,
    )
    if max_query_len > 1:
        tile = tile_shape(
            group, head_size, size, decode=False, in_order=setting.in_order, shared_memory=setting.shared_memory
        )
        num_tiles = num_tokens // (tile.rows // group) + num_sequences
        _chunk_attention_kernel[(num_tiles * num_kv_heads,)](
            out,
            query,
            key_cache,
            value_cache,
            block_table,
            query_starts,
            kv_lens,
            sinks,
            *numbers,
            KV_HEADS=num_kv_heads,
            SHARE=setting.share if setting.in_order else 0,
            **shape(tile),
        )
    most_shares = len(plan.owners)
    joins = plan.most_per_entry > 1
    partial_shape = (most_shares if joins else 1, num_heads)
    partial = torch.empty((*partial_shape, head_size), dtype=torch.float32, device=device)
    stats = torch.empty((*partial_shape, 2), dtype=torch.float32, device=device)
    tile = tile_shape(group, head_size, size, decode=True, shared_memory=setting.shared_memory)
    resident = programs_per_processor(tile, head_size, size, setting.shared_memory)
    num_programs = min(most_shares * num_kv_heads, _WAVES * resident * setting.num_processors)
    _decode_attention_kernel[(num_programs,)](
        out,
        partial,
        stats,
        query,
        key_cache,
        value_cache,
        block_table,
        query_starts,
        kv_lens,
        plan.owners,
        plan.firsts,
        sinks,
        *numbers,
        KV_HEADS=num_kv_heads,
        SHARE=setting.share,
        **shape(tile),
    )
    if joins:
        _join_shares_kernel[(num_sequences, num_heads)](
            out,
            partial,
            stats,
            query_starts,
            plan.firsts,
            sinks,
            HEADS=num_heads,
            CHUNK=1 if setting.in_order else _SHARES_AT_ONCE,
            HEAD=head_size,
            HEAD_PAD=head_pad(head_size),
            HAS_SINKS=sinks is not None,
            num_warps=2,
        )
    return out
