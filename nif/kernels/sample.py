"""Draws a token from each row of logits without sorting: temperature, top_k, top_p, min_p.

A row's tokens are ordered by descending weight, then by ascending id. top_k, top_p and min_p each keep a prefix of that
order. The drawn token is the first one at which the cumulative weight exceeds the uniform number's share. Each of these
steps asks: "what is the total weight of the tokens with at least this weight?" A search over the weights' bit patterns
answers that.

For each row, many programs read the vocabulary, each program a piece of it, three times at most. Then one program for
each row draws:

    survey    every row       finds the largest logit and its token; a greedy row needs nothing else
    weigh     rows that draw  sums the weight and the number of the tokens down to each of a few levels
    gather    truncated rows  collects the tokens down to the first level below all that top_k, top_p and min_p may keep
    sample    every row       searches these candidates, or one piece of a row without truncation

If a row has more candidates than `_ROOM`, its one program searches the whole row. That takes long and is rare.
The twin in numpy is `genbatch.nif.sampling.sampler.draw`.

This file also has the small kernels at both ends of a decode step: its input tokens, its penalties and biases, and the
log-probabilities of the drawn tokens.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from genbatch.nif.cuda_device import sent

_ROW_CHUNK = 256  # rows a program covers


@triton.jit(do_not_specialize=["num_rows"])
def _next_tokens_kernel(out_ptr, given_ptr, drawn_ptr, num_rows, CHUNK: tl.constexpr):
    """One program handles one chunk of rows."""
    rows = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = rows < num_rows
    given = tl.load(given_ptr + rows, mask=mask, other=0)
    drawn = tl.load(drawn_ptr - 1 - given, mask=mask & (given < 0), other=0)
    # A row without a drawable token holds -1, which is no row of the embedding.
    tl.store(out_ptr + rows, tl.maximum(tl.where(given < 0, drawn, given), 0), mask=mask)


def next_tokens(given: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return the input ids [R] int64 of a step.

    Args:
        given: [R] int64, contiguous: token ids; -1 - row stands for the token that was drawn in that row.
        drawn: int64, contiguous: each row's token from the previous step. A number below 0 counts as 0.
    """
    out = torch.empty_like(given)
    programs = triton.cdiv(len(given), _ROW_CHUNK)
    _next_tokens_kernel[(programs,)](out, given, drawn, len(given), CHUNK=_ROW_CHUNK, num_warps=4)
    return out


RowEdits = tuple[np.ndarray, np.ndarray, np.ndarray]
_EDIT_CHUNK = 128  # edits a program makes


@triton.jit(do_not_specialize=["num_edits", "vocab_size"])
def _edit_kernel(
    logits_ptr,  # [R, vocab_size] float32, changed
    starts_ptr,  # [R + 1] int64, where each row's edits begin
    ids_ptr,  # [N] int64, distinct within a row
    changes_ptr,  # [2, N] float32: factors, then addends
    num_edits,
    vocab_size,
    row_stride,
    CHUNK: tl.constexpr,
):
    """One program handles one chunk of one row's edits."""
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
    """Return a copy of the logits [R, vocab_size] with every row's edits.

    Args:
        edits: for each row distinct token ids, the factors that divide or multiply the logits, and the addends.
    """
    logits = logits.clone(memory_format=torch.contiguous_format)
    counts = [len(ids) for ids, _, _ in edits]
    starts = np.concatenate(([0], np.cumsum(counts)))
    ids, factors, added = (np.concatenate(parts) for parts in zip(*edits, strict=True))
    device = logits.device
    _edit_kernel[(len(edits), max(1, triton.cdiv(max(counts), _EDIT_CHUNK)))](
        logits,
        sent(starts, device),
        sent(ids, device),
        sent(np.stack((factors, added)), device),
        len(ids),
        logits.shape[1],
        logits.stride(0),
        CHUNK=_EDIT_CHUNK,
        num_warps=4,
    )
    return logits


_LOGPROB_CHUNK = 4096  # vocabulary entries read at a time
_LOGPROB_TOKENS = 32  # one variant of the kernel serves up to as many tokens, the most that a request may ask for


@triton.jit(do_not_specialize=["vocab_size", "num_tokens"])
def _gather_logprobs_kernel(
    out_ptr,  # [R, num_tokens] float32
    logits_ptr,  # [R, vocab_size] with row stride
    tokens_ptr,  # [R, num_tokens] int64
    vocab_size,
    num_tokens,
    row_stride,
    TOKENS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program handles one row; the sum of exponentials is kept relative to the running maximum."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    columns = tl.arange(0, CHUNK)
    maximum = tl.full([CHUNK], float("-inf"), tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, vocab_size, CHUNK):
        logits = tl.load(logits_ptr + start + columns, mask=start + columns < vocab_size, other=float("-inf"))
        logits = logits.to(tl.float32)
        new_maximum = tl.maximum(maximum, logits)
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - shift) + tl.exp(logits - shift)
        maximum = new_maximum
    overall = tl.max(maximum, 0)
    log_total = overall + tl.log(tl.sum(total * tl.exp(maximum - overall), 0))
    wanted = tl.arange(0, TOKENS_PAD)
    tokens = tl.load(tokens_ptr + row * num_tokens + wanted, mask=wanted < num_tokens, other=-1)
    known = (tokens >= 0) & (tokens < vocab_size)
    chosen = tl.load(logits_ptr + tokens, mask=known, other=float("-inf")).to(tl.float32)
    tl.store(out_ptr + row * num_tokens + wanted, chosen - log_total, mask=wanted < num_tokens)


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return log_softmax(logits)[row, token] for each row's tokens.

    Args:
        logits: [R, vocab_size], the last dimension contiguous; every row holds at least one finite value.
        tokens: [R, N] int64; a token outside the vocabulary gives -inf.

    Returns:
        [R, N] float32.
    """
    rows, vocab_size = logits.shape
    num_tokens = tokens.shape[1]
    out = torch.empty((rows, num_tokens), dtype=torch.float32, device=logits.device)
    _gather_logprobs_kernel[(rows,)](
        out,
        logits,
        tokens,
        vocab_size,
        num_tokens,
        logits.stride(0),
        TOKENS_PAD=max(_LOGPROB_TOKENS, triton.next_power_of_2(num_tokens)),
        CHUNK=min(_LOGPROB_CHUNK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return out


_CHUNK = 2048  # vocabulary entries read at a time
# Most candidates of a row: they fill one chunk, so that each pass of a search reads each candidate once.
_ROOM = 2048
# Levels are shares of the largest weight: exp(-1.5), exp(-3) ... exp(-12), which is 1 in 160,000.
_LEVELS, _LEVEL_STEP = 8, 1.5
# A level must hold this much more than top_p needs, because the search adds the weights in another order.
_MARGIN = 1e-9
_LARGEST = 0x7F800000  # the bits of infinity, which are above those of every finite float32
NONE = -1
"""The token of a row without a drawable token."""


@triton.jit
def _log_weights(logits_ptr, start, vocab_size, best, temperature, CHUNK: tl.constexpr):
    """Return a chunk's (logit - best) / temperature, which is at most 0, and -inf past the vocabulary."""
    columns = start + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
    return (logits - best) / temperature


@triton.jit
def _light(log_weights):
    """Return the bits of -log_weight. Non-negative floats order like their bits, so 0 is the heaviest."""
    return (0.0 - log_weights).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass_up_to(logits_ptr, vocab_size, best, temperature, limit, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Return the weight (or the number, if COUNT) of the tokens that are no lighter than `limit`."""
    mass = tl.zeros([CHUNK], tl.float64)
    for start in range(0, vocab_size, CHUNK):
        log_weights = _log_weights(logits_ptr, start, vocab_size, best, temperature, CHUNK)
        light = _light(log_weights)
        share = tl.full([CHUNK], 1.0, tl.float64) if COUNT else tl.exp(log_weights).to(tl.float64)
        mass += tl.where(light <= limit, share, 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _find_level(
    logits_ptr,
    vocab_size,
    best,
    temperature,
    wanted,
    COUNT: tl.constexpr,
    STRICT: tl.constexpr,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the heaviest level that, together with all heavier levels, reaches (STRICT: exceeds) the mass `wanted`.

    Each pass over the row tries three pivots, and so leaves a quarter of the range.
    """
    low = tl.full([], -1, tl.int64)  # never enough
    high = tl.full([], LARGEST, tl.int64)  # always enough
    for _ in range(16):
        step = (high - low + 3) // 4
        first = tl.minimum(low + step, high)
        second = tl.minimum(low + 2 * step, high)
        third = tl.minimum(low + 3 * step, high)
        first_mass = tl.zeros([CHUNK], tl.float64)
        second_mass = tl.zeros([CHUNK], tl.float64)
        third_mass = tl.zeros([CHUNK], tl.float64)
        for start in range(0, vocab_size, CHUNK):
            log_weights = _log_weights(logits_ptr, start, vocab_size, best, temperature, CHUNK)
            light = _light(log_weights)
            share = tl.full([CHUNK], 1.0, tl.float64) if COUNT else tl.exp(log_weights).to(tl.float64)
            first_mass += tl.where(light <= first, share, 0.0)
            second_mass += tl.where(light <= second, share, 0.0)
            third_mass += tl.where(light <= third, share, 0.0)
        if STRICT:
            first_enough = tl.sum(first_mass, 0) > wanted
            second_enough = tl.sum(second_mass, 0) > wanted
            third_enough = tl.sum(third_mass, 0) > wanted
        else:
            first_enough = tl.sum(first_mass, 0) >= wanted
            second_enough = tl.sum(second_mass, 0) >= wanted
            third_enough = tl.sum(third_mass, 0) >= wanted
        new_high = tl.where(first_enough, first, tl.where(second_enough, second, tl.where(third_enough, third, high)))
        low = tl.where(first_enough, low, tl.where(second_enough, first, tl.where(third_enough, second, third)))
        low = tl.minimum(low, new_high - 1)
        high = new_high
    return high


@triton.jit
def _draw_truncated(
    logits_ptr,
    vocab_size,
    best,
    temperature,
    top_k,
    top_p,
    min_p,
    point,
    total,
    is_limited,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the place at `point` of the kept weight, over descending weights and ascending places.

    `logits_ptr` has `vocab_size` logits: those of the row or of its candidates. `total` is the weight of all tokens of
    the row. `is_limited` says whether top_k keeps fewer tokens.
    """
    kept = total
    if is_limited:
        level = _find_level(logits_ptr, vocab_size, best, temperature, top_k, True, False, LARGEST, CHUNK)
        limit = tl.minimum(level, LARGEST - 1)  # a token of weight 0 is never kept
        kept = _mass_up_to(logits_ptr, vocab_size, best, temperature, limit, False, CHUNK)
    if top_p < 1.0:
        nucleus = top_p * kept
        level = _find_level(logits_ptr, vocab_size, best, temperature, nucleus, False, False, LARGEST, CHUNK)
        heavier = _mass_up_to(logits_ptr, vocab_size, best, temperature, level - 1, False, CHUNK)
        weight = tl.exp(0.0 - level.to(tl.int32).to(tl.float32, bitcast=True)).to(tl.float64)
        # Of the tokens that tie, keep only as many as the nucleus needs.
        ties = tl.maximum(tl.ceil((nucleus - heavier) / weight), 1.0)
        kept = tl.minimum(kept, heavier + ties * weight)
    if min_p > 0.0:
        mass = tl.zeros([CHUNK], tl.float64)
        for start in range(0, vocab_size, CHUNK):
            log_weights = _log_weights(logits_ptr, start, vocab_size, best, temperature, CHUNK)
            share = tl.exp(log_weights).to(tl.float64)
            mass += tl.where(share >= min_p, share, 0.0)
        kept = tl.minimum(kept, tl.sum(mass, 0))
    target = point * kept
    level = _find_level(logits_ptr, vocab_size, best, temperature, target, False, True, LARGEST, CHUNK)
    heavier = _mass_up_to(logits_ptr, vocab_size, best, temperature, level - 1, False, CHUNK)
    weight = tl.exp(0.0 - level.to(tl.int32).to(tl.float32, bitcast=True)).to(tl.float64)
    rank = tl.maximum(tl.floor((target - heavier) / weight), 0.0).to(tl.int32)
    # Take the rank-th of the tokens on that level. Rounding must not lead past the last of these tokens.
    token = tl.full([], -1, tl.int32)
    before = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, CHUNK):
        log_weights = _log_weights(logits_ptr, start, vocab_size, best, temperature, CHUNK)
        ties = (_light(log_weights) == level).to(tl.int32)
        order = before + tl.cumsum(ties, 0) - 1
        columns = start + tl.arange(0, CHUNK)
        token = tl.maximum(token, tl.max(tl.where((ties > 0) & (order <= rank), columns, -1), 0))
        before += tl.sum(ties, 0)
    return token


@triton.jit
def _draw_whole(logits_ptr, first, end, vocab_size, best, temperature, target, CHUNK: tl.constexpr):
    """Return the first token at which the cumulative weight of the ids from `first` to `end` exceeds `target`."""
    past = tl.full([], 2147483647, tl.int32)
    token = past  # the first id at which the cumulative weight exceeds the target
    last = tl.full([], -1, tl.int32)  # the last id with any weight: rounding must not lead past this id
    before = tl.full([], 0.0, tl.float64)
    for start in range(first, tl.minimum(end, vocab_size), CHUNK):
        share = tl.exp(_log_weights(logits_ptr, start, vocab_size, best, temperature, CHUNK)).to(tl.float64)
        columns = start + tl.arange(0, CHUNK)
        cumulative = before + tl.cumsum(share, 0)
        exceeded = (cumulative > target) & (share > 0.0)
        token = tl.minimum(token, tl.min(tl.where(exceeded, columns, past), 0))
        last = tl.maximum(last, tl.max(tl.where(share > 0.0, columns, -1), 0))
        before += tl.sum(share, 0)
    return tl.minimum(token, last)


@triton.jit
def _survey_kernel(
    bests_ptr,  # [R, pieces] float32: the largest logit of each piece; +inf if a logit is NaN or +inf
    tokens_ptr,  # [R, pieces] int32: the token of that logit
    logits_ptr,  # [R, vocab_size] float32 with row stride
    vocab_size,
    row_stride,
    PIECE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program handles one piece of one row."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    logits_ptr += row * row_stride
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for start in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, vocab_size), CHUNK):
        columns = start + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
        broken += tl.sum(((logits != logits) | (logits == float("inf"))).to(tl.int32), 0)
        chunk_best = tl.max(logits, 0)
        lowest = tl.min(tl.where(logits == chunk_best, columns, vocab_size), 0)
        token = tl.where(chunk_best > best, lowest, token)  # the lowest id among equals
        best = tl.maximum(best, chunk_best)
    cell = row * tl.num_programs(1) + piece
    tl.store(bests_ptr + cell, tl.where(broken > 0, float("inf"), best))
    tl.store(tokens_ptr + cell, token)


@triton.jit
def _best_of(bests_ptr, row, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr):
    """Return the row's largest logit."""
    pieces = tl.arange(0, PIECES_PAD)
    return tl.max(tl.load(bests_ptr + row * PIECES + pieces, mask=pieces < PIECES, other=float("-inf")), 0)


@triton.jit
def _draws(best, temperature):
    """Return whether the row is drawn at a temperature, and has a drawable token."""
    return (temperature > 0.0) & (best != float("inf")) & (best != float("-inf"))


@triton.jit
def _weigh_kernel(
    masses_ptr,  # [R, pieces, LEVELS + 1] float64: weight of the piece's tokens down to each level, then of all tokens
    counts_ptr,  # [R, pieces, LEVELS] int32: number of the piece's tokens down to each level
    bests_ptr,  # [R, PIECES] float32
    logits_ptr,  # [R, vocab_size] float32 with row stride
    params_ptr,  # [R, 5] float64
    vocab_size,
    row_stride,
    PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    STEP: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One program handles one piece of one row."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    best = _best_of(bests_ptr, row, PIECES, PIECES_PAD)
    temperature = tl.load(params_ptr + row * 5).to(tl.float32)
    if _draws(best, temperature) == 0:
        return
    cell = row * PIECES + piece
    log_weights = _log_weights(logits_ptr + row * row_stride, piece * PIECE, vocab_size, best, temperature, PIECE)
    weights = tl.exp(log_weights).to(tl.float64)
    tl.store(masses_ptr + cell * (LEVELS + 1) + LEVELS, tl.sum(weights, 0))
    for level in tl.static_range(LEVELS):
        near = log_weights >= 0.0 - STEP * (level + 1)
        tl.store(masses_ptr + cell * (LEVELS + 1) + level, tl.sum(tl.where(near, weights, 0.0), 0))
        tl.store(counts_ptr + cell * LEVELS + level, tl.sum(near.to(tl.int32), 0))


@triton.jit
def _enough_level(
    masses_ptr,
    counts_ptr,
    row,
    total,
    top_k,
    top_p,
    min_p,
    is_limited,
    PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    STEP: tl.constexpr,
    ROOM: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """Return the first level down to which lie all tokens that may be kept, and the number of tokens down to it.

    The level is LEVELS if these are too many tokens.
    """
    pieces = tl.arange(0, PIECES_PAD)
    there = pieces < PIECES
    found = tl.full([], LEVELS, tl.int32)
    number = tl.full([], 0, tl.int32)
    for place in tl.static_range(LEVELS):
        level = LEVELS - 1 - place  # from the lightest level up, so the last level that is enough is the first level
        masses = tl.load(masses_ptr + (row * PIECES + pieces) * (LEVELS + 1) + level, mask=there, other=0.0)
        counts = tl.load(counts_ptr + (row * PIECES + pieces) * LEVELS + level, mask=there, other=0)
        count = tl.sum(counts, 0)
        lightest = tl.exp(tl.full([], 0.0 - STEP * (level + 1), tl.float32)).to(tl.float64)
        by_count = is_limited & (count >= top_k)
        # With top_k, top_p is a share of what top_k keeps. So only the count decides then.
        by_mass = (top_p < 1.0) & (tl.sum(masses, 0) >= top_p * total * (1.0 + MARGIN)) & (is_limited == 0)
        by_weight = (min_p > 0.0) & (lightest < min_p) & (is_limited == 0) & (top_p >= 1.0)
        fits = (by_count | by_mass | by_weight) & (count <= ROOM)
        found = tl.where(fits, level, found)
        number = tl.where(fits, count, number)
    return found, number


@triton.jit
def _gather_kernel(
    near_ptr,  # [R, ROOM] float32: the candidates' logits, by ascending id
    ids_ptr,  # [R, ROOM] int32
    masses_ptr,
    counts_ptr,
    bests_ptr,
    logits_ptr,
    params_ptr,
    vocab_size,
    row_stride,
    PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    STEP: tl.constexpr,
    ROOM: tl.constexpr,
    MARGIN: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One program handles one piece of one row: it stores the candidates behind those of the earlier pieces."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    best = _best_of(bests_ptr, row, PIECES, PIECES_PAD)
    params_ptr += row * 5
    temperature = tl.load(params_ptr).to(tl.float32)
    if _draws(best, temperature) == 0:
        return
    top_k, top_p, min_p = tl.load(params_ptr + 1), tl.load(params_ptr + 2), tl.load(params_ptr + 3)
    is_limited = (top_k > 0) & (top_k < vocab_size)
    if (is_limited | (top_p < 1.0) | (min_p > 0.0)) == 0:
        return
    total = _total_of(masses_ptr, row, PIECES, PIECES_PAD, LEVELS)
    level, _ = _enough_level(
        masses_ptr, counts_ptr, row, total, top_k, top_p, min_p, is_limited,
        PIECES, PIECES_PAD, LEVELS, STEP, ROOM, MARGIN,
    )  # fmt: skip
    if level == LEVELS:
        return
    pieces = tl.arange(0, PIECES_PAD)
    counts = tl.load(counts_ptr + (row * PIECES + pieces) * LEVELS + level, mask=pieces < piece, other=0)
    offset = tl.sum(counts, 0)
    lowest = 0.0 - STEP * (level + 1).to(tl.float32)
    columns = piece * PIECE + tl.arange(0, PIECE)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocab_size, other=float("-inf"))
    near = (logits - best) / temperature >= lowest
    places = row * ROOM + offset + tl.cumsum(near.to(tl.int32), 0) - 1
    tl.store(near_ptr + places, logits, mask=near)
    tl.store(ids_ptr + places, columns, mask=near)


@triton.jit
def _total_of(masses_ptr, row, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, LEVELS: tl.constexpr):
    """Return the weight of all the row's tokens."""
    pieces = tl.arange(0, PIECES_PAD)
    cells = (row * PIECES + pieces) * (LEVELS + 1) + LEVELS
    return tl.sum(tl.load(masses_ptr + cells, mask=pieces < PIECES, other=0.0), 0)


@triton.jit
def _sample_kernel(
    tokens_ptr,  # [R] int64
    bests_ptr,  # [R, PIECES] float32, written by `_survey_kernel`
    candidates_ptr,  # [R, PIECES] int32
    near_ptr,  # [R, ROOM] float32, written by `_gather_kernel`
    ids_ptr,  # [R, ROOM] int32
    masses_ptr,  # [R, PIECES, LEVELS + 1] float64, written by `_weigh_kernel`
    counts_ptr,  # [R, PIECES, LEVELS] int32
    logits_ptr,  # [R, vocab_size] float32 with row stride
    params_ptr,  # [R, 5] float64: temperature, top_k, top_p, min_p, uniform
    vocab_size,
    row_stride,
    PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    STEP: tl.constexpr,
    ROOM: tl.constexpr,
    MARGIN: tl.constexpr,
    PIECE: tl.constexpr,
    NONE: tl.constexpr,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program handles one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    params_ptr += row * 5
    pieces = tl.arange(0, PIECES_PAD)
    bests = tl.load(bests_ptr + row * PIECES + pieces, mask=pieces < PIECES, other=float("-inf"))
    candidates = tl.load(candidates_ptr + row * PIECES + pieces, mask=pieces < PIECES, other=0)
    best = tl.max(bests, 0)
    # Pieces are in the order of ids, and each piece has its lowest id.
    token = tl.min(tl.where(bests == best, candidates, vocab_size), 0)
    if (best == float("inf")) | (best == float("-inf")):
        tl.store(tokens_ptr + row, NONE)
        return
    temperature = tl.load(params_ptr).to(tl.float32)
    if temperature > 0.0:
        top_k = tl.load(params_ptr + 1)
        top_p = tl.load(params_ptr + 2)
        min_p = tl.load(params_ptr + 3)
        point = tl.load(params_ptr + 4)
        total = _total_of(masses_ptr, row, PIECES, PIECES_PAD, LEVELS)
        is_limited = (top_k > 0) & (top_k < vocab_size)
        if is_limited | (top_p < 1.0) | (min_p > 0.0):
            level, number = _enough_level(
                masses_ptr, counts_ptr, row, total, top_k, top_p, min_p, is_limited,
                PIECES, PIECES_PAD, LEVELS, STEP, ROOM, MARGIN,
            )  # fmt: skip
            if level == LEVELS:
                token = _draw_truncated(
                    logits_ptr, vocab_size, best, temperature, top_k, top_p, min_p, point, total, is_limited,
                    LARGEST, CHUNK,
                )  # fmt: skip
            else:
                place = _draw_truncated(
                    near_ptr + row * ROOM, number, best, temperature, top_k, top_p, min_p, point, total, is_limited,
                    LARGEST, CHUNK,
                )  # fmt: skip
                token = tl.load(ids_ptr + row * ROOM + place)
        else:
            cells = (row * PIECES + pieces) * (LEVELS + 1) + LEVELS
            masses = tl.load(masses_ptr + cells, mask=pieces < PIECES, other=0.0)
            cumulative = tl.cumsum(masses, 0)
            target = point * total
            # Find the first piece at which the cumulative weight exceeds the target. Rounding must not lead past the
            # last piece with any weight.
            past = tl.min(tl.where((cumulative > target) & (masses > 0.0), pieces, PIECES_PAD), 0)
            chosen = tl.minimum(past, tl.max(tl.where(masses > 0.0, pieces, 0), 0))
            before = tl.sum(tl.where(pieces < chosen, masses, 0.0), 0)
            token = _draw_whole(
                logits_ptr, chosen * PIECE, (chosen + 1) * PIECE, vocab_size, best, temperature, target - before, CHUNK
            )
    tl.store(tokens_ptr + row, token.to(tl.int64))


def draw_tokens(logits: torch.Tensor, params: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Draw one token for each row; the token is -1 if the row holds NaN, +inf or only -inf.

    Args:
        logits: [R, vocab_size] float32, the last dimension contiguous.
        params: [R, 5] float64, contiguous: temperature (0 is greedy), top_k (0 off), top_p (1 off), min_p (0 off),
            and the row's uniform number in [0, 1).
        out: [R or more] int64, contiguous; its first R elements are filled. None allocates a new tensor.

    Returns:
        [R] int64 on the logits' device, or `out`.
    """
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    chunk = min(_CHUNK, triton.next_power_of_2(vocab_size))
    piece = 2 * chunk
    pieces = triton.cdiv(vocab_size, piece)
    device = logits.device
    bests = torch.empty((rows, pieces), dtype=torch.float32, device=device)
    candidates = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    masses = torch.empty((rows, pieces, _LEVELS + 1), dtype=torch.float64, device=device)
    counts = torch.empty((rows, pieces, _LEVELS), dtype=torch.int32, device=device)
    near = torch.empty((rows, _ROOM), dtype=torch.float32, device=device)
    ids = torch.empty((rows, _ROOM), dtype=torch.int32, device=device)
    shape = (vocab_size, logits.stride(0))
    split = {"PIECES": pieces, "PIECES_PAD": triton.next_power_of_2(pieces), "LEVELS": _LEVELS, "STEP": _LEVEL_STEP}
    room = {"ROOM": _ROOM, "MARGIN": _MARGIN}
    _survey_kernel[(rows, pieces)](bests, candidates, logits, *shape, PIECE=piece, CHUNK=chunk, num_warps=8)
    _weigh_kernel[(rows, pieces)](masses, counts, bests, logits, params, *shape, **split, PIECE=piece, num_warps=8)
    # With 8 warps Triton 3.6 spills a register.
    _gather_kernel[(rows, pieces)](
        near, ids, masses, counts, bests, logits, params, *shape, **split, **room, PIECE=piece, num_warps=16
    )
    _sample_kernel[(rows,)](
        tokens, bests, candidates, near, ids, masses, counts, logits, params, *shape,
        **split, **room, PIECE=piece, CHUNK=chunk, NONE=NONE, LARGEST=_LARGEST, num_warps=8,
        maxnreg=160,  # without it, ptxas of Triton 3.6 takes 128 for compute capability 12.0 and spills some
    )  # fmt: skip
    return tokens
