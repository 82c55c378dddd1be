"""Draws tokens: sampling parameters, random numbers, ranking of candidates, and the draw itself.

    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1)
    token_ids = draw(logits, logits.argmax(-1), [params], [uniform(params.seed, position)])

A draw is a pure function of a row's logits, parameters, seed and position. No operation mixes rows or depends on the
number of rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# The limits of temperature. Below the first a draw takes the largest logit, and above the second all tokens are equal.
# Beyond the limits the float32 divisor would become 0 or infinite, and the row would hold NaN.
_COLDEST, _HOTTEST = 2.0**-64, 2.0**64


# The parameters that a model's files may set, and the check of each value.
FILE_SAMPLING: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 < value < 2**31,
    "top_k": lambda value: 0 <= value < 2**31 and value == int(value),
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value < 1,
    "repetition_penalty": lambda value: 0 < value < 2**31,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one sequence. The gateways check the ranges; here the ranges are invariants.

    Args:
        seed: keys the random draws, 0 <= seed < 2**64; the same seed and position give the same draw.
        temperature: 0 is greedy, otherwise the logits' divisor, clamped to 2**-64..2**64, as more changes nothing.
        top_k: keep the k most likely tokens and all that tie with the k-th; 0 is off.
        top_p: keep the fewest most likely tokens that hold this share of the probability; 1 is off.
        min_p: keep tokens at least this fraction as likely as the likeliest one; 0 is off.
        repetition_penalty: divides the positive logits and multiplies the negative logits of tokens in the prompt
            or the output (the rule of transformers); 1 is off.
        presence_penalty: subtracted once from the logit of every token in the output.
        frequency_penalty: subtracted from a token's logit once per occurrence in the output.
        logit_bias: added to the logits of these token ids, which are below the logits' width.
        logprobs: how many of the likeliest tokens to report beside the chosen one; None reports no log-probability.
        min_tokens: number of generated tokens before the ids in `suppress` are allowed.
        suppress: ids that would end the sequence (EOS, stop ids), below the logits' width.
    """

    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    suppress: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        assert 0 <= self.seed < 2**64
        assert 0.0 <= self.temperature < math.inf
        if self.temperature > 0.0:
            object.__setattr__(self, "temperature", min(max(self.temperature, _COLDEST), _HOTTEST))
        assert self.top_k >= 0
        assert 0.0 < self.top_p <= 1.0
        assert 0.0 <= self.min_p <= 1.0
        assert 0.0 < self.repetition_penalty < math.inf
        assert math.isfinite(self.presence_penalty)
        assert math.isfinite(self.frequency_penalty)
        assert self.logprobs is None or self.logprobs >= 0
        assert self.min_tokens >= 0

    @property
    def penalised(self) -> bool:
        """Whether tokens already seen change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment, 2**64 / golden ratio


def uniform(seed: int, position: int) -> float:
    """Return the draw of `seed` at `position`, uniform over the multiples of 2**-53 in [0, 1).

    The draw is element `position` of the splitmix64 stream that starts at the mixed seed. The seed is mixed first,
    because otherwise the draw would depend only on the sum of seed and position.

    Args:
        seed: 0 <= seed < 2**64.
        position: any non-negative integer, used once per sequence.
    """
    key = stream_key(seed)
    return (_mix((key + (position + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def stream_key(seed: int) -> int:
    """Return a seed's key for `uniforms`."""
    return _mix((seed + _GAMMA) & _MASK)


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return many draws at once, equal to those of `uniform` bit for bit.

    Args:
        keys: [N] the `stream_key` of each seed.
        positions: [N] non-negative.
    """
    # Arrays of uint64 wrap around silently, as splitmix64 requires.
    mixed = _mix_all(keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_all(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix(z: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


CHUNK = 32  # tokens per chunk; only each chunk's best token competes at first. 16 and 64 were slower on 49152 tokens
_MAGNITUDE = 0x7FFFFFFF  # float32 bits without the sign
_LOW_WORD = 0xFFFFFFFF


def pad_to_chunks(log_weights: torch.Tensor) -> torch.Tensor:
    """Pad rows [R, V] with -inf to a multiple of CHUNK; returns them unchanged if V is a multiple."""
    missing = -log_weights.shape[1] % CHUNK
    return torch.nn.functional.pad(log_weights, (0, missing), value=float("-inf")) if missing else log_weights


def ranked(log_weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the `count` largest of every row exactly; a small `count` costs far less than sorting the row.

    The `count` best tokens lie in the `count` chunks with the best maxima, so a pass over the maxima leaves
    few tokens to compare. Keys are unique, so ties cannot come out differently in another batch.

    Args:
        log_weights: [R, V] float32, none above 0, V a multiple of CHUNK.
        count: 1 <= count <= V.

    Returns:
        The log-weights [R, count] in canonical order and their ids [R, count] int64.
    """
    rows, width = log_weights.shape
    num_chunks = width // CHUNK
    ids = torch.arange(width, device=log_weights.device)
    if count >= num_chunks:
        return _unpack(_smallest(_keys(log_weights, ids), count))
    chunks = log_weights.view(rows, num_chunks, CHUNK)
    best = _keys(chunks.amax(-1), ids[:num_chunks]).topk(count, largest=False, sorted=False).values
    chosen = (best & _LOW_WORD)[:, :, None]  # [R, count, 1] chunk numbers
    candidates = chunks.gather(1, chosen.expand(-1, -1, CHUNK)).view(rows, -1)
    candidate_ids = (chosen * CHUNK + ids[:CHUNK]).view(rows, -1)
    return _unpack(_keys(candidates, candidate_ids).topk(count, largest=False, sorted=True).values)


def _keys(log_weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Pack (-log-weight, id) into int64s that sort like the pair, because the bits of floats >= 0 sort like them."""
    return ((log_weights.view(torch.int32) & _MAGNITUDE).to(torch.int64) << 32) | ids


def _unpack(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return -((keys >> 32).to(torch.int32).view(torch.float32)), keys & _LOW_WORD


def _smallest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` smallest of every row, ascending."""
    if keys.device.type != "cpu":
        return keys.topk(count, largest=False, sorted=True).values
    columns = keys.numpy()  # numpy's vectorised partition and sort take an eighth of torch's time
    if count < columns.shape[1]:
        columns = np.partition(columns, count - 1, axis=1)[:, :count]
    return torch.from_numpy(np.sort(columns, axis=1))


# Numbers of tokens to rank before ranking more, and at last all. At temperature 0.7 and top_p 0.95 the first number
# suffices for 96% of SmolLM2-135M's rows on technical English, and at temperature 1 for 57%. Doubling the first number
# costs every row 60% more.
_STAGES = (128, 4096)
# Most logits sorted at once when a whole row must be sorted, because each then takes nearly a hundred bytes.
SORTED_AT_ONCE = 1 << 17


def draw(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """Draw a token id per row, [R] int64 on the logits' device.

    A row's token is the inverse of its cumulative distribution at its uniform number. The distribution runs over
    ascending ids, or over descending weights if top_k, top_p or min_p truncates it. No operation mixes rows or depends
    on the number of rows.

    Args:
        logits: [R, V] float32 with the penalties applied; not changed.
        best: [R] each row's largest logit, finite.
        params: R parameters with temperature > 0.
        uniforms: R numbers in [0, 1).
    """
    device = logits.device
    width = logits.shape[1]
    temperature = torch.tensor([p.temperature for p in params], device=device)[:, None]
    # Subtract the maximum first, so that no small temperature overflows.
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
        # Sum the chunks, then take a cumulative sum: a plain sum's rounding depends on the number of rows.
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
    """Return the drawn ids [R], and whether the candidates hold every token that truncation keeps [R]."""
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
    # Treat top_p = 1 as off, because rounding may make the sum of a row's parts exceed its total.
    keep = ((before < nucleus) | (top_p >= 1.0)) & (weights >= min_p)
    drawn = ids.gather(1, _invert(torch.where(keep, weights, 0.0), points)[:, None])[:, 0]
    enough = ((held[:, -1:] >= nucleus) & (top_p < 1.0)) | (weights[:, -1:] < min_p)
    return drawn, torch.where(limited, log_weights[:, -1:] < kth, enough)[:, 0]


def _invert_whole(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Invert whole rows [R, V padded] as `_invert` does: find the chunk, then the column, without V partial sums."""
    chunks = weights.view(len(weights), -1, CHUNK)
    sums = chunks.sum(-1)
    cumulative = sums.cumsum(1, dtype=torch.float64)
    aims = points * cumulative[:, -1:]
    chunk = torch.searchsorted(cumulative, aims, right=True)  # [R, 1]; its sum is not 0
    size = sums.gather(1, chunk).to(torch.float64)
    # A chunk's sum is rounded to float32, so express the rest of the point as a share of the sum, below 1.
    rest = ((aims - (cumulative.gather(1, chunk) - size)) / size).clamp_(0.0, 1.0 - 2.0**-53)
    rows = torch.arange(len(weights), device=weights.device)
    return chunk[:, 0] * CHUNK + _invert(chunks[rows, chunk[:, 0]], rest)


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return the column [R] int64 at which the cumulative weight first exceeds points * total; its weight is not 0.

    Such a column exists: with u <= 1 - 2**-53, u * total rounds to a double below total.
    """
    cumulative = weights.cumsum(1, dtype=torch.float64)
    return torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)[:, 0]


# Most logits scored at once: a prompt's chunk may have a hundred times as many, and scoring copies each one.
SCORED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token's log-probability and the likeliest alternatives at its position.

    Args:
        logprob: log_softmax of the raw logits at the token.
        top: (token id, log-probability), most likely first, lower ids first among equals.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> list[TokenScore]:
    """Score each row's token, for generated tokens and for prompt tokens.

    Args:
        logits: [T, V] float32, raw; row t predicts token_ids[t].
        token_ids: [T] int64 on the logits' device, below V.
        top: number of alternatives to report per row, 0 <= top <= V.
    """
    rows_at_once = max(1, SCORED_AT_ONCE // logits.shape[1])
    parts = zip(torch.split(logits, rows_at_once), torch.split(token_ids, rows_at_once), strict=True)
    return [score for rows, ids in parts for score in _scores(rows, ids, top)]


def _scores(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> list[TokenScore]:
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(1, token_ids[:, None])[:, 0].tolist()
    if not top:
        return [TokenScore(logprob, ()) for logprob in chosen]
    values, ids = ranked(pad_to_chunks(log_probs), top)
    rows = zip(chosen, ids.tolist(), values.tolist(), strict=True)
    return [TokenScore(logprob, tuple(zip(i, v, strict=True))) for logprob, i, v in rows]


NUM_PARAMS = 5
NOT_FINITE = "the model's logits are not finite"


class DrawTable:
    """A table with a row per sequence: temperature, top_k, top_p, min_p, and the next draw's uniform number.

    The uniform number depends only on seed and position, so it is known before the logits.

    Args:
        params: each row's parameters.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._table = np.array([(p.temperature, p.top_k, p.top_p, p.min_p, 0.0) for p in params], np.float64)
        self._drawing = np.flatnonzero(self._table[:, 0] > 0.0)
        self._keys = np.array([stream_key(p.seed) for p in params if p.temperature > 0.0], np.uint64)

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """Return the table [R, NUM_PARAMS] float64 of a step's draws; the next call overwrites the table.

        Args:
            positions: each row's draw counter.
        """
        if len(self._drawing):
            self._table[self._drawing, 4] = uniforms(self._keys, np.array(positions, np.int64)[self._drawing])
        return torch.from_numpy(self._table)
