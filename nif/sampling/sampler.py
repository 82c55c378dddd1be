"""The sampler of one sequence: its parameters, its random numbers, the draw itself, its tokens and its constraint.

    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1)
    token_ids = draw(logits, logits.argmax(-1), [params], [uniform(params.seed, position)])
    state = SamplerState(params, prompt_token_ids)         # `choose` (choice.py) draws the tokens of a step's sequences

A draw is a pure function of a row's logits, parameters, seed and position. No operation mixes rows or depends on the
number of rows. On a CPU, models in C and in torch draw here, with numpy. `kernels/sample.py` draws on a GPU. A
Constraint restricts the next token, for example to a grammar.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

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

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def pad_to_chunks(log_weights: Floats) -> Floats:
    """Pad rows [R, V] with -inf to a multiple of CHUNK; returns them unchanged if V is a multiple."""
    missing = -log_weights.shape[1] % CHUNK
    return np.pad(log_weights, ((0, 0), (0, missing)), constant_values=-np.inf) if missing else log_weights


def ranked(log_weights: Floats, count: int) -> tuple[Floats, Ids]:
    """Find the `count` largest of every row exactly; a small `count` costs far less than sorting the row.

    The `count` best tokens lie in the `count` chunks with the best maxima, so a pass over the maxima leaves few tokens
    to compare. Keys are unique, so ties cannot come out differently in another batch. A chunk here is every n-th token
    of n chunks: numpy finds such maxima twenty times faster than those of neighbours.

    Args:
        log_weights: [R, V] float32, none above 0, V a multiple of CHUNK.
        count: 1 <= count <= V.

    Returns:
        The log-weights [R, count] in canonical order and their ids [R, count] int64.
    """
    rows, width = log_weights.shape
    num_chunks = width // CHUNK
    if count >= num_chunks:
        return _unpack(_smallest(_keys(log_weights, np.arange(width)), count))
    chunks = log_weights.reshape(rows, CHUNK, num_chunks)
    best = np.partition(_keys(chunks.max(1), np.arange(num_chunks)), count - 1, axis=1)[:, :count]
    ids = ((best & _LOW_WORD)[:, :, None] + np.arange(0, width, num_chunks)).reshape(rows, -1)  # [R, count * CHUNK]
    return _unpack(_smallest(_keys(np.take_along_axis(log_weights, ids, 1), ids), count))


def _keys(log_weights: Floats, ids: Ids) -> Ids:
    """Pack (-log-weight, id) into int64s that sort like the pair, because the bits of floats >= 0 sort like them."""
    return (log_weights.view(np.int32) & _MAGNITUDE).astype(np.int64) << 32 | ids


def _unpack(keys: Ids) -> tuple[Floats, Ids]:
    return -((keys >> 32).astype(np.int32).view(np.float32)), keys & _LOW_WORD


def _smallest(keys: Ids, count: int) -> Ids:
    """Return the `count` smallest of every row, ascending."""
    if count < keys.shape[1]:
        keys = np.partition(keys, count - 1, axis=1)[:, :count]
    return np.sort(keys, axis=1)


# Numbers of tokens to rank before ranking more, and at last all. At temperature 0.7 and top_p 0.95 the first number
# suffices for 96% of SmolLM2-135M's rows on technical English, and at temperature 1 for 57%. Doubling the first number
# costs every row 60% more.
_STAGES = (128, 4096)
# Most logits sorted at once when a whole row must be sorted, because each then takes nearly a hundred bytes.
SORTED_AT_ONCE = 1 << 17


def draw(logits: Floats, best: Floats, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Ids:
    """Draw a token id per row, [R].

    A row's token is the inverse of its cumulative distribution at its uniform number. The distribution runs over
    ascending ids, or over descending weights if top_k, top_p or min_p truncates it. No operation mixes rows or depends
    on the number of rows.

    Args:
        logits: [R, V] with the penalties applied; not changed.
        best: [R] each row's largest logit, finite.
        params: R parameters with temperature > 0.
        uniforms: R numbers in [0, 1).
    """
    width = logits.shape[1]
    temperature = np.array([p.temperature for p in params], np.float32)[:, None]
    # Subtract the maximum first, so that no small temperature overflows.
    log_weights = logits - best[:, None]
    log_weights /= temperature
    log_weights = pad_to_chunks(log_weights)  # [R, V padded], at most 0
    points = np.array(uniforms, np.float64)[:, None]
    truncated = [i for i, p in enumerate(params) if 0 < p.top_k < width or p.top_p < 1.0 or p.min_p > 0.0]
    if not truncated:
        return _invert_whole(np.exp(log_weights, out=log_weights), points)
    weights = np.exp(log_weights)  # the largest is exactly 1
    drawn = np.empty(len(params), np.int64)
    if len(truncated) < len(params):
        whole = sorted(set(range(len(params))) - set(truncated))
        drawn[whole] = _invert_whole(weights[whole], points[whole])
    limits = np.array([[p.top_k if p.top_k < width else 0, p.top_p, p.min_p] for p in params], np.float64)
    total = np.cumsum(_chunk_sums(weights), axis=1, dtype=np.float64)[:, -1:]
    if len(truncated) < len(params):
        log_weights = log_weights[truncated]
        total, limits, points = (x[truncated] for x in (total, limits, points))
    drawn[truncated] = _draw_truncated(log_weights, total, limits, points, (*_STAGES, log_weights.shape[1]))
    return drawn


def _chunk_sums(weights: Floats) -> Floats:
    """Return the sum of each chunk of CHUNK neighbours, [R, chunks].

    A plain sum of a row would have float32's error of V additions. `einsum` takes a fifth of the time of `sum`.
    """
    sums: Floats = np.einsum("rcn->rc", weights.reshape(len(weights), -1, CHUNK))
    return sums


def _draw_truncated(
    log_weights: Floats,  # [R, V padded]
    total: Doubles,  # [R, 1] weight of all the row's tokens
    limits: Doubles,  # [R, 3] top_k (0 off), top_p, min_p
    points: Doubles,  # [R, 1] uniforms
    stages: Sequence[int],  # how many tokens to rank, ascending
) -> Ids:  # [R]
    width = log_weights.shape[1]
    rows_at_once = max(1, SORTED_AT_ONCE // width)
    if stages[0] * CHUNK >= width and len(log_weights) > rows_at_once:
        parts = [slice(start, start + rows_at_once) for start in range(0, len(log_weights), rows_at_once)]
        return np.concatenate(
            [_draw_truncated(log_weights[part], total[part], limits[part], points[part], stages) for part in parts]
        )
    ranking = ranked(log_weights, min(stages[0], width))
    drawn, complete = _pick(*ranking, total, limits, points)
    short = np.flatnonzero(~complete) if len(stages) > 1 else ()
    if len(short):
        drawn[short] = _draw_truncated(log_weights[short], total[short], limits[short], points[short], stages[1:])
    return drawn


def _pick(
    log_weights: Floats,  # [R, N] candidates in canonical order, the row's heaviest ones
    ids: Ids,  # [R, N]
    total: Doubles,  # [R, 1] weight of all the row's tokens
    limits: Doubles,  # [R, 3] top_k (0 off), top_p, min_p
    points: Doubles,  # [R, 1]
) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Return the drawn ids [R], and whether the candidates hold every token that truncation keeps [R]."""
    top_k, top_p, min_p = limits[:, :1], limits[:, 1:2], limits[:, 2:]
    limited = top_k > 0
    last_rank = np.clip(top_k.astype(np.int64) - 1, 0, log_weights.shape[1] - 1)
    kth = np.where(limited, np.take_along_axis(log_weights, last_rank, 1), np.float32(-np.inf))
    weights = np.where(log_weights >= kth, np.exp(log_weights), np.float32(0)).astype(np.float64)
    cumulated = np.cumsum(weights, axis=1)
    total = np.where(limited, cumulated[:, -1:], total)
    nucleus = top_p * total
    before = np.pad(cumulated[:, :-1], ((0, 0), (1, 0)))
    # Treat top_p = 1 as off, because rounding may make the sum of a row's parts exceed its total.
    keep = ((before < nucleus) | (top_p >= 1.0)) & (weights >= min_p)
    column = _invert(np.where(keep, weights, 0.0), points)
    drawn = np.take_along_axis(ids, column[:, None], 1)[:, 0]
    enough = ((cumulated[:, -1:] >= nucleus) & (top_p < 1.0)) | (weights[:, -1:] < min_p)
    return drawn, np.where(limited, log_weights[:, -1:] < kth, enough)[:, 0]


def _invert_whole(weights: Floats, points: Doubles) -> Ids:
    """Invert whole rows [R, V padded] as `_invert` does: find the chunk, then the column, without V partial sums."""
    sums = _chunk_sums(weights)
    cumulative = np.cumsum(sums, axis=1, dtype=np.float64)
    aims = points * cumulative[:, -1:]
    rows = np.arange(len(weights))
    chunk = np.count_nonzero(cumulative <= aims, axis=1)  # [R]; its sum is not 0
    size = sums[rows, chunk].astype(np.float64)
    # A chunk's sum is rounded to float32, so express the rest of the point as a share of the sum, below 1.
    rest = np.clip((aims[:, 0] - (cumulative[rows, chunk] - size)) / size, 0.0, 1.0 - 2.0**-53)
    chunks = weights.reshape(len(weights), -1, CHUNK)
    drawn: Ids = chunk * CHUNK + _invert(chunks[rows, chunk], rest[:, None])
    return drawn


def _invert(weights: npt.NDArray[np.floating], points: Doubles) -> Ids:
    """Return the column [R] at which the cumulative weight first exceeds points * total; its weight is not 0.

    Such a column exists: with u <= 1 - 2**-53, u * total rounds to a double below total.
    """
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    columns: Ids = np.count_nonzero(cumulative <= points * cumulative[:, -1:], axis=1)
    return columns


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


def token_logprobs(logits: Floats, token_ids: Ids, top: int) -> list[TokenScore]:
    """Score each row's token, for generated tokens and for prompt tokens.

    Args:
        logits: [T, V] raw; row t predicts token_ids[t].
        token_ids: [T] below V.
        top: number of alternatives to report per row, 0 <= top <= V.
    """
    size = max(1, SCORED_AT_ONCE // logits.shape[1])
    parts = [slice(start, start + size) for start in range(0, len(logits), size)]
    with np.errstate(all="ignore"):  # a row that is not finite has the score NaN
        return [score for part in parts for score in _scores(logits[part], token_ids[part], top)]


def _scores(logits: Floats, token_ids: Ids, top: int) -> list[TokenScore]:
    below_best = pad_to_chunks(logits - logits.max(1, keepdims=True))  # at most 0, as `ranked` needs
    totals = np.cumsum(_chunk_sums(np.exp(below_best)), axis=1, dtype=np.float64)[:, -1:]
    log_totals = np.log(totals).astype(np.float32)
    chosen = (np.take_along_axis(below_best, token_ids[:, None], 1) - log_totals)[:, 0].tolist()
    if not top:
        return [TokenScore(logprob, ()) for logprob in chosen]
    values, ids = ranked(below_best, top)
    rows = zip(chosen, ids.tolist(), (values - log_totals).tolist(), strict=True)
    return [TokenScore(logprob, tuple(zip(i, v, strict=True))) for logprob, i, v in rows]


NUM_PARAMS = 5


class DrawTable:
    """A table with a row per sequence: temperature, top_k, top_p, min_p, and the next draw's uniform number.

    The uniform number depends only on seed and position, so it is known before the logits.

    Args:
        params: each row's parameters.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._table = np.array([(p.temperature, p.top_k, p.top_p, p.min_p, 0.0) for p in params], np.float64)
        self._drawing = np.flatnonzero(self._table[:, 0] > 0.0)
        self._keys = np.array([stream_key(p.seed) if p.temperature > 0.0 else 0 for p in params], np.uint64)

    def at(self, positions: Sequence[int]) -> Doubles:
        """Return the table [R, NUM_PARAMS] of a step's draws; the next call overwrites the table.

        Args:
            positions: each row's draw counter.
        """
        if len(self._drawing):
            rows = self._drawing
            self._table[rows, 4] = uniforms(self._keys[rows], np.array(positions, np.int64)[rows])
        return self._table

    def keep(self, places: list[int]) -> None:
        """Drop all rows but those at these places."""
        self._table, self._keys = self._table[places], self._keys[places]
        self._drawing = np.flatnonzero(self._table[:, 0] > 0.0)


class Constraint(Protocol):
    """Restricts the next token by the tokens accepted so far. Changes to the sequence's KV do not affect it.

    `accept` only stores a token. `prepare` does the work, on any one thread, before the next draw.
    """

    @property
    def fault(self) -> str | None:
        """Return the reason why the sequence cannot continue; None while it can. Valid after `prepare`."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether `prepare` has work to do and took long the last time."""
        ...

    def accept(self, token_id: int) -> None:
        """Store the sequence's next token."""
        ...

    def prepare(self) -> None:
        """Compute the allowed next tokens; a second call does nothing."""
        ...

    def forced(self) -> Sequence[int]:
        """Return tokens that very likely come next, because the constraint allows no other text. Valid after `prepare`.

        The tokens are a guess: the same text may be drawn in other tokens.
        """
        ...

    def fork(self) -> Self:
        """Return an independent copy."""
        ...

    @property
    def allowed(self) -> npt.NDArray[np.int32]:
        """Return the mask [ceil(vocab_size / 32)], a bit per token, lowest bit first. Valid after `prepare`."""
        ...


def allowed_tokens(constraints: Sequence[Constraint | None], width: int) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """Return the rows with a constraint, and which tokens each of them allows, [rows, width].

    A constraint with a fault allows none.
    """
    rows = [row for row, constraint in enumerate(constraints) if constraint is not None]
    words = np.zeros((len(rows), (width + 31) // 32), np.int32)
    for index, row in enumerate(rows):
        constraint = constraints[row]
        assert constraint is not None
        constraint.prepare()
        if constraint.fault is None:
            words[index] = constraint.allowed[: words.shape[1]]
    return rows, np.unpackbits(words.view(np.uint8), axis=1, count=width, bitorder="little").view(np.bool_)


NOT_FINITE = "the model's logits are not finite"


@dataclass(slots=True)
class Sampled:
    """A row's choice. It is not frozen: a frozen one takes ten times as long to make, and every token is one.

    Args:
        token_id: the chosen token.
        logprob: the token's log_softmax over the raw logits; None if the sequence does not report log-probabilities.
        top: (token id, log-probability) of the likeliest tokens, as many as the sequence's `logprobs`.
    """

    failed: ClassVar[Literal[False]] = False
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampleFault:
    """The reason why a row has no token; other rows are not affected.

    Args:
        reason: a message for people.
        by_request: whether the request's own settings cause the fault.
    """

    failed: ClassVar[Literal[True]] = True
    reason: str
    by_request: bool = False


class SamplerState:
    """The sampler of one sequence: its parameters, its tokens for the penalties, and its constraint.

    Args:
        params: the sampling parameters.
        prompt_token_ids: the prompt's tokens, for the repetition penalty.
        constraint: the output's constraint, before its first token.
    """

    __slots__ = ("_always_edits", "_always_reads", "_bias", "_counts", "_num_accepted", "_num_seen", "_penalised",
                 "_ranks", "_seen", "_suppressed", "constraint", "heeds", "params")  # fmt: skip

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Iterable[int], constraint: Constraint | None = None
    ) -> None:
        self.params = params
        self.constraint = constraint
        self._num_accepted = 0
        self._penalised = params.penalised
        self._always_edits = self._penalised or bool(params.logit_bias) or constraint is not None
        self._always_reads = self._always_edits or params.temperature > 0.0 or params.logprobs is not None
        bias = params.logit_bias or {}
        self._bias = (_ids(bias), np.fromiter(bias.values(), np.float32, len(bias)))
        self._suppressed = _ids(sorted(params.suppress))
        # Whether a draw depends on the tokens before. If not, a caller need not call `accept`.
        self.heeds = self._penalised or constraint is not None or params.min_tokens > 0
        # Distinct tokens seen, and each token's count in the output. The arrays grow by doubling.
        self._ranks: dict[int, int] = {}
        self._num_seen = 0
        self._seen = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float32)
        if self._penalised:
            for token_id in dict.fromkeys(prompt_token_ids):
                self._rank(token_id)

    def accept(self, token_id: int) -> None:
        """Add `token_id` to the sequence. Call this after the step has succeeded."""
        self._num_accepted += 1
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self._penalised:
            rank = self._rank(token_id)  # before reading `_counts`, because `_rank` may replace the arrays
            self._counts[rank] += 1.0

    def forced(self) -> Sequence[int]:
        """Return the tokens that the constraint very likely forces next; see `Constraint.forced`."""
        if self.constraint is None:
            return ()
        self.constraint.prepare()
        return self.constraint.forced()

    def fork(self, **changes: Any) -> Self:
        """Return an independent copy, with which a draft is drawn.

        Args:
            changes: the parameters in which the copy differs.
        """
        constraint = self.constraint
        if constraint is not None:
            constraint.prepare()  # once for both
            constraint = constraint.fork()
        twin = type(self)(replace(self.params, **changes), (), constraint)
        twin._num_accepted = self._num_accepted
        twin._ranks = dict(self._ranks)
        twin._num_seen = self._num_seen
        twin._seen = self._seen.copy()
        twin._counts = self._counts.copy()
        return twin

    @property
    def edits(self) -> bool:
        """Whether the next draw edits the model's logits."""
        return self._always_edits or self._suppresses

    @property
    def is_slow(self) -> bool:
        """Whether the next draw must wait long for the constraint."""
        return self.constraint is not None and self.constraint.is_slow

    @property
    def reads_logits(self) -> bool:
        """Whether the next draw needs more than the model's largest logit."""
        return self._always_reads or self._suppresses

    @property
    def seen_ids(self) -> npt.NDArray[np.int64]:
        """Return the distinct tokens of prompt and output, [S]; empty unless a penalty needs them."""
        return self._seen[: self._num_seen]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """Return each of `seen_ids`' count in the output, [S]."""
        return self._counts[: self._num_seen]

    @property
    def bias(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return token ids and the biases of their logits."""
        return self._bias

    @property
    def suppressed_ids(self) -> npt.NDArray[np.int64]:
        """Return the tokens that `min_tokens` forbids for the next draw."""
        return self._suppressed if self._suppresses else self._suppressed[:0]

    @property
    def _suppresses(self) -> bool:
        return self._num_accepted < self.params.min_tokens and self._suppressed.size > 0

    def _rank(self, token_id: int) -> int:
        """Return the token's index in the arrays; adds an entry for a new token."""
        rank = self._ranks.setdefault(token_id, self._num_seen)
        if rank == self._num_seen:
            if rank == len(self._seen):
                room = max(64, rank)
                self._seen = np.concatenate((self._seen, np.empty(room, np.int64)))
                self._counts = np.concatenate((self._counts, np.empty(room, np.float32)))
            self._seen[rank] = token_id
            self._counts[rank] = 0.0
            self._num_seen += 1
        return rank


def nothing_left(state: SamplerState) -> SampleFault:
    """Return the fault of a row that has finite logits and no allowed token."""
    if state.constraint is not None and state.constraint.fault is not None:
        return SampleFault(state.constraint.fault, by_request=True)
    return SampleFault("the request's rules leave no token to choose", by_request=True)


def _ids(ids: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(ids, np.int64)
