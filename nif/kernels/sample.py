"""Sampling on the device: the draws of `genbatch.nif.sampler.sample`, its twin, without sorting a row.

A row's tokens are ordered by descending weight, then ascending id. top_k, top_p and min_p each keep a beginning of that
order, and the token drawn is where the cumulative weight first exceeds the uniform's share. All of these are questions
"how heavy are the tokens at least this heavy?", which a search over the weights' bit patterns answers.
"""
# A kernel's arguments are Triton's, not Python's: type checkers see only the launchers.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from genbatch.nif.kernels.logprob import gather_logprobs
from genbatch.nif.ranked_candidates import pad_to_chunks, ranked
from genbatch.nif.sampler import Sampled, SampleFault, SamplerState
from genbatch.nif.uniform_draw import uniform

_CHUNK = 2048  # vocabulary entries read at a time
_LARGEST = 0x7F800000  # the bits of infinity: above those of every finite float32
_NONE = -1  # a row from which nothing can be drawn


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
        if COUNT:
            share = tl.full([CHUNK], 1.0, tl.float64)
        else:
            share = tl.exp(log_weights).to(tl.float64)
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
            if COUNT:
                share = tl.full([CHUNK], 1.0, tl.float64)
            else:
                share = tl.exp(log_weights).to(tl.float64)
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


@triton.jit(do_not_specialize=["vocab_size"])
def _sample_kernel(
    tokens_ptr,  # [R] int64
    logits_ptr,  # [R, vocab_size] float32 with row stride
    params_ptr,  # [R, 5] float64: temperature, top_k, top_p, min_p, uniform
    vocab_size,
    row_stride,
    NONE: tl.constexpr,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    params_ptr += row * 5
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
        broken += tl.sum(((logits != logits) | (logits == float("inf"))).to(tl.int32), 0)
        chunk_best = tl.max(logits, 0)
        lowest = tl.min(tl.where(logits == chunk_best, columns, vocab_size), 0)
        token = tl.where(chunk_best > best, lowest, token)  # the lowest id among equals
        best = tl.maximum(best, chunk_best)
    if (broken > 0) | (best == float("-inf")):
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


def sample(
    logits: torch.Tensor, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    """Chooses one token a row; arguments, order of operations and results as in `genbatch.nif.sampler.sample`.

    One copy goes to the device and one comes back, whatever the rows ask for (log-probabilities: one more).
    """
    assert logits.shape[0] == len(states) == len(positions)
    if not states:
        return []
    raw = logits
    if any(state.edits for state in states):
        logits = edit_logits(logits, states)
    params = np.array(
        [
            (p.temperature, p.top_k, p.top_p, p.min_p, uniform(p.seed, position) if p.temperature > 0.0 else 0.0)
            for p, position in zip((state.params for state in states), positions, strict=True)
        ],
        np.float64,
    )
    tokens = draw_tokens(logits, torch.from_numpy(params).to(logits.device, non_blocking=True))
    healthy = raw.amax(dim=1).isfinite()
    host = torch.stack((tokens, healthy.long())).tolist()
    results: list[Sampled | SampleFault] = []
    for token, fine in zip(*host, strict=True):
        if not fine:
            results.append(SampleFault("the model's logits are not finite"))
        elif token == _NONE:
            results.append(SampleFault("penalties and biases leave no token to choose"))
        else:
            results.append(Sampled(token))
    return _with_logprobs(raw, states, results)


def draw_tokens(logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """One token a row, -1 where a row holds NaN, +inf or nothing but -inf.

    Args:
        logits: [R, vocab_size] float32, the last dimension contiguous.
        params: [R, 5] float64, contiguous: temperature (0 is greedy), top_k (0 off), top_p (1 off), min_p (0 off),
            and the row's uniform number in [0, 1).

    Returns:
        [R] int64 on the logits' device.
    """
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _sample_kernel[(rows,)](
        tokens,
        logits,
        params,
        vocab_size,
        logits.stride(0),
        NONE=_NONE,
        LARGEST=_LARGEST,
        CHUNK=min(_CHUNK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return tokens


def edit_logits(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """A copy of the logits [R, vocab_size] with every state's penalties, biases and suppressions."""
    logits = logits.clone(memory_format=torch.contiguous_format)
    edits = [_row_edits(state) for state in states]
    counts = [len(ids) for ids, _, _ in edits]
    starts = np.concatenate(([0], np.cumsum(counts)))
    ids, factors, added = (np.concatenate(parts) for parts in zip(*edits, strict=True))
    device = logits.device
    chunk = 128
    _edit_kernel[(len(states), max(1, triton.cdiv(max(counts), chunk)))](
        logits,
        torch.from_numpy(starts).to(device),
        torch.from_numpy(ids).to(device),
        torch.from_numpy(np.stack((factors, added))).to(device),
        len(ids),
        logits.shape[1],
        logits.stride(0),
        CHUNK=chunk,
        num_warps=4,
    )
    return logits


def _row_edits(state: SamplerState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct token ids, the factor each logit is divided or multiplied by, and what is then added."""
    params = state.params
    counts = state.output_counts
    bias_ids, bias = state.bias
    ids, place = np.unique(
        np.concatenate((state.seen_ids, bias_ids, state.suppressed_ids)).astype(np.int64), return_inverse=True
    )
    factors, added = np.ones(len(ids), np.float32), np.zeros(len(ids), np.float32)
    seen, biased = place[: len(counts)], place[len(counts) : len(counts) + len(bias_ids)]
    factors[seen] = params.repetition_penalty
    added[seen] = -(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    added[biased] += bias
    added[place[len(counts) + len(bias_ids) :]] = -np.inf
    return ids, factors, added


def _with_logprobs(
    logits: torch.Tensor, states: Sequence[SamplerState], results: list[Sampled | SampleFault]
) -> list[Sampled | SampleFault]:
    """Adds the log-probabilities of the model's own logits to the rows that asked for them."""
    wanted = [
        (row, result.token_id, number)
        for row, (state, result) in enumerate(zip(states, results, strict=True))
        if isinstance(result, Sampled) and (number := state.params.logprobs) is not None
    ]
    if not wanted:
        return results
    rows = [row for row, _, _ in wanted]
    chosen_logits = logits[rows]
    chosen = torch.tensor([[token] for _, token, _ in wanted], device=logits.device)
    most = min(max(number for _, _, number in wanted), logits.shape[1])
    ids = chosen
    if most:
        # Shifted so that none is above 0, as `ranked` wants them; ties come out as on the host.
        below_best = chosen_logits - chosen_logits.amax(dim=1, keepdim=True)
        ids = torch.cat((chosen, ranked(pad_to_chunks(below_best), most)[1]), dim=1)
    logprobs = gather_logprobs(chosen_logits, ids)
    results = list(results)
    for (row, token, number), names, values in zip(wanted, ids.tolist(), logprobs.tolist(), strict=True):
        top = tuple(zip(names[1 : 1 + number], values[1 : 1 + number], strict=True))
        results[row] = Sampled(token, values[0], top)
    return results
