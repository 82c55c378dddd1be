"""Draws a token from each row of logits without sorting: temperature, top_k, top_p, min_p.

A row's tokens are ordered by descending weight, then ascending id. top_k, top_p and min_p each keep a beginning of that
order, and the token drawn is where the cumulative weight first exceeds the uniform's share. All of these are questions
"how heavy are the tokens at least this heavy?", which a search over the weights' bit patterns answers.

Each row's largest logit is found first, by many programs a row; a greedy row wants nothing else. One program draws.
The plain-torch twin is `genbatch.nif.sampling.truncated_draw.draw`.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

_CHUNK = 2048  # vocabulary entries read at a time
_LARGEST = 0x7F800000  # the bits of infinity: above those of every finite float32
NONE = -1
"""Stands for a row from which nothing can be drawn."""


@triton.jit
def _log_weights(logits_ptr, start, vocab_size, best, temperature, CHUNK: tl.constexpr):
    """A chunk's (logit - best) / temperature, at most 0, and -inf past the vocabulary."""
    columns = start + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
    return (logits - best) / temperature


@triton.jit
def _light(log_weights):
    """The bits of -log_weight: non-negative floats order like their bits, so 0 is the heaviest."""
    return (0.0 - log_weights).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass_up_to(logits_ptr, vocab_size, best, temperature, limit, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Weight (or number, if COUNT) of the tokens no lighter than `limit`."""
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
    """The heaviest level whose tokens, with all heavier ones, reach (STRICT: exceed) `wanted`.

    Each pass over the row tries three pivots and so leaves a quarter of the range.
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
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token at `point` of the kept weight, over descending weights and ascending ids."""
    limit = tl.full([], LARGEST - 1, tl.int64)  # a token of weight 0 is never kept
    if (top_k > 0) & (top_k < vocab_size):
        level = _find_level(logits_ptr, vocab_size, best, temperature, top_k, True, False, LARGEST, CHUNK)
        limit = tl.minimum(limit, level)
    kept = _mass_up_to(logits_ptr, vocab_size, best, temperature, limit, False, CHUNK)
    if top_p < 1.0:
        nucleus = top_p * kept
        level = _find_level(logits_ptr, vocab_size, best, temperature, nucleus, False, False, LARGEST, CHUNK)
        heavier = _mass_up_to(logits_ptr, vocab_size, best, temperature, level - 1, False, CHUNK)
        weight = tl.exp(0.0 - level.to(tl.int32).to(tl.float32, bitcast=True)).to(tl.float64)
        # Of tokens that tie, only as many as the nucleus needs.
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
    # The rank-th of the tokens on that level; rounding must not lead past the last of them.
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
def _draw_whole(logits_ptr, vocab_size, best, temperature, point, CHUNK: tl.constexpr):
    """The token at `point` of the row's weight, over ascending ids."""
    mass = tl.zeros([CHUNK], tl.float64)
    for start in range(0, vocab_size, CHUNK):
        mass += tl.exp(_log_weights(logits_ptr, start, vocab_size, best, temperature, CHUNK)).to(tl.float64)
    target = point * tl.sum(mass, 0)
    past = tl.full([], 2147483647, tl.int32)
    token = past  # the first id at which the cumulative weight exceeds the target
    last = tl.full([], -1, tl.int32)  # the last id with any weight: rounding must not lead past it
    before = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, CHUNK):
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
    bests_ptr,  # [R, pieces] float32: the largest logit of each piece, +inf where one is no finite number
    tokens_ptr,  # [R, pieces] int32: its token
    logits_ptr,  # [R, vocab_size] float32 with row stride
    vocab_size,
    row_stride,
    PIECE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: one piece of one row."""
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
def _sample_kernel(
    tokens_ptr,  # [R] int64
    bests_ptr,  # [R, PIECES] float32, as `_survey_kernel` left them
    candidates_ptr,  # [R, PIECES] int32
    logits_ptr,  # [R, vocab_size] float32 with row stride
    params_ptr,  # [R, 5] float64: temperature, top_k, top_p, min_p, uniform
    vocab_size,
    row_stride,
    PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    NONE: tl.constexpr,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    params_ptr += row * 5
    pieces = tl.arange(0, PIECES_PAD)
    bests = tl.load(bests_ptr + row * PIECES + pieces, mask=pieces < PIECES, other=float("-inf"))
    candidates = tl.load(candidates_ptr + row * PIECES + pieces, mask=pieces < PIECES, other=0)
    best = tl.max(bests, 0)
    # Pieces are in the order of ids, and each has its lowest.
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
        if ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0):
            token = _draw_truncated(
                logits_ptr, vocab_size, best, temperature, top_k, top_p, min_p, point, LARGEST, CHUNK
            )
        else:
            token = _draw_whole(logits_ptr, vocab_size, best, temperature, point, CHUNK)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def draw_tokens(logits: torch.Tensor, params: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """One token a row, -1 where a row holds NaN, +inf or nothing but -inf.

    Args:
        logits: [R, vocab_size] float32, the last dimension contiguous.
        params: [R, 5] float64, contiguous: temperature (0 is greedy), top_k (0 off), top_p (1 off), min_p (0 off),
            and the row's uniform number in [0, 1).
        out: [R or more] int64, contiguous, whose first R are filled; None makes a new one.

    Returns:
        [R] int64 on the logits' device, or `out`.
    """
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    chunk = min(_CHUNK, triton.next_power_of_2(vocab_size))
    piece = 2 * chunk
    pieces = triton.cdiv(vocab_size, piece)
    bests = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
    candidates = torch.empty((rows, pieces), dtype=torch.int32, device=logits.device)
    _survey_kernel[(rows, pieces)](
        bests, candidates, logits, vocab_size, logits.stride(0), PIECE=piece, CHUNK=chunk, num_warps=8
    )
    _sample_kernel[(rows,)](
        tokens,
        bests,
        candidates,
        logits,
        params,
        vocab_size,
        logits.stride(0),
        PIECES=pieces,
        PIECES_PAD=triton.next_power_of_2(pieces),
        NONE=NONE,
        LARGEST=_LARGEST,
        CHUNK=chunk,
        num_warps=8,
    )
    return tokens
