"""Draws one token a row from softmax(logits / temperature), truncated by top_k, then top_p, then min_p."""

from collections.abc import Sequence

import torch

from genbatch.nif.sampling.ranked_candidates import CHUNK, pad_to_chunks, ranked
from genbatch.nif.sampling.sampling_params import SamplingParams

# How many tokens to rank before trying again with more, and at last with all. At temperature 0.7 and top_p
# 0.95 the first number does for 96% of SmolLM2-135M's rows on technical English, at temperature 1 for 57%;
# twice as many cost every row 60% more.
_STAGES = (128, 4096)
# Logits ranked at once where all of a row's have to be: each then takes nearly a hundred bytes.
SORTED_AT_ONCE = 1 << 17


def draw(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """Returns a token id per row, [R] int64 on the logits' device.

    A row's token is the inverse of its cumulative distribution at its uniform: over ascending ids where
    nothing truncates, over descending weights otherwise. No operation mixes rows or depends on their number.

    Args:
        logits: [R, V] float32, already penalised; left as it is.
        best: [R] each row's largest logit, finite.
        params: R of them, with temperature > 0.
        uniforms: R numbers in [0, 1).
    """
    device = logits.device
    width = logits.shape[1]
    temperature = torch.tensor([p.temperature for p in params], device=device)[:, None]
    # The maximum goes first: no temperature, however small, then overflows.
    log_weights = pad_to_chunks((logits - best[:, None]).div_(temperature))  # [R, V padded], at most 0
    points = torch.tensor(uniforms, dtype=torch.float64, device=device)[:, None]
    truncated = [i for i, p in enumerate(params) if 0 < p.top_k < width or p.top_p < 1.0 or p.min_p > 0.0]
    if not truncated:
        return _invert_whole(log_weights.exp_(), points)
    weights = log_weights.exp()  # the largest is exactly 1
    drawn = torch.empty(len(params), dtype=torch.int64, device=device)
    if len(truncated) < len(params):
        whole = sorted(set(range(len(params))) - set(truncated))
        drawn[whole] = _invert_whole(weights[whole], points[whole])
    if truncated:
        # Chunks first, then a cumulative sum: how a plain sum adds up depends on the number of rows.
        total = weights.view(len(params), -1, CHUNK).sum(-1).cumsum(1, dtype=torch.float64)[:, -1:]
        limits = torch.tensor(
            [[p.top_k if p.top_k < width else 0, p.top_p, p.min_p] for p in params],
            dtype=torch.float64,
            device=device,
        )
        if len(truncated) < len(params):
            log_weights, total, limits, points = (x[truncated] for x in (log_weights, total, limits, points))
        stages = (*_STAGES, log_weights.shape[1])
        drawn[truncated] = _draw_truncated(log_weights, total, limits, points, stages)
    return drawn


def _draw_truncated(
    log_weights: torch.Tensor,  # [R, V padded]
    total: torch.Tensor,  # [R, 1] float64, weight of all the row's tokens
    limits: torch.Tensor,  # [R, 3] float64: top_k (0 off), top_p, min_p
    points: torch.Tensor,  # [R, 1] float64 uniforms
    stages: Sequence[int],  # how many tokens to rank, ascending
) -> torch.Tensor:  # [R] int64
    width = log_weights.shape[1]
    rows_at_once = max(1, SORTED_AT_ONCE // width)
    if stages[0] * CHUNK >= width and len(log_weights) > rows_at_once:
        weights, totals, bounds, places = (
            torch.split(each, rows_at_once) for each in (log_weights, total, limits, points)
        )
        parts = zip(weights, totals, bounds, places, strict=True)
        return torch.cat([_draw_truncated(w, t, b, p, stages) for w, t, b, p in parts])
    ranking = ranked(log_weights, min(stages[0], width))
    drawn, complete = _pick(*ranking, total, limits, points)
    short = [i for i, done in enumerate(complete.tolist()) if not done] if len(stages) > 1 else []
    if short:
        drawn[short] = _draw_truncated(log_weights[short], total[short], limits[short], points[short], stages[1:])
    return drawn


def _pick(
    log_weights: torch.Tensor,  # [R, N] candidates in canonical order, the row's heaviest ones
    ids: torch.Tensor,  # [R, N] int64
    total: torch.Tensor,  # [R, 1] float64, weight of all the row's tokens
    limits: torch.Tensor,  # [R, 3] float64: top_k (0 off), top_p, min_p
    points: torch.Tensor,  # [R, 1] float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the drawn ids [R] and whether all that may be kept was among the candidates [R]."""
    top_k, top_p, min_p = limits[:, :1], limits[:, 1:2], limits[:, 2:]
    limited = top_k > 0
    weights = log_weights.exp().to(torch.float64)
    last_rank = (top_k.to(torch.int64) - 1).clamp_(0, log_weights.shape[1] - 1)
    kth = log_weights.gather(1, last_rank).masked_fill_(~limited, float("-inf"))
    weights = torch.where(log_weights >= kth, weights, 0.0)
    held = weights.cumsum(1)
    total = torch.where(limited, held[:, -1:], total)
    nucleus = top_p * total
    before = torch.nn.functional.pad(held[:, :-1], (1, 0))
    # top_p = 1 keeps all: rounding may put the sum of a row's parts above its whole.
    keep = ((before < nucleus) | (top_p >= 1.0)) & (weights >= min_p)
    drawn = ids.gather(1, _invert(torch.where(keep, weights, 0.0), points)[:, None])[:, 0]
    enough = ((held[:, -1:] >= nucleus) & (top_p < 1.0)) | (weights[:, -1:] < min_p)
    return drawn, torch.where(limited, log_weights[:, -1:] < kth, enough)[:, 0]


def _invert_whole(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """As `_invert`, over whole rows [R, V padded]: first the chunk, then the column in it, without V partial sums."""
    chunks = weights.view(len(weights), -1, CHUNK)
    sums = chunks.sum(-1)
    cumulative = sums.cumsum(1, dtype=torch.float64)
    aims = points * cumulative[:, -1:]
    chunk = torch.searchsorted(cumulative, aims, right=True)  # [R, 1]; its sum is not 0
    size = sums.gather(1, chunk).to(torch.float64)
    # A chunk's sum is rounded to float32, so what is left of the point is taken as a share of it, below 1.
    rest = ((aims - (cumulative.gather(1, chunk) - size)) / size).clamp_(0.0, 1.0 - 2.0**-53)
    rows = torch.arange(len(weights), device=weights.device)
    return chunk[:, 0] * CHUNK + _invert(chunks[rows, chunk[:, 0]], rest)


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The column [R] int64 at which the cumulative weight first exceeds points * total; its weight is not 0.

    Such a column exists: with u <= 1 - 2**-53, u * total rounds to a double below total.
    """
    cumulative = weights.cumsum(1, dtype=torch.float64)
    return torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)[:, 0]
