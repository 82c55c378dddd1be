"""Choose the next token of every sequence from one step's logits.

`sample` draws on the host; `choice.py` draws where the logits are. A Constraint restricts the next token of a sequence,
for example to a grammar.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from genbatch.nif.runner import Largest
from genbatch.nif.sampling.draw import (
    NOT_FINITE,
    Floats,
    SamplingParams,
    draw,
    token_logprobs,
    uniform,
)


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


def forbid(logits: Floats, constraints: Sequence[Constraint | None]) -> None:
    """Set the logits that a row's constraint forbids to -inf, in place.

    Args:
        logits: [R, V].
        constraints: R constraints; None allows every token.
    """
    rows, allowed = allowed_tokens(constraints, logits.shape[1])
    for row, mask in zip(rows, allowed, strict=True):
        np.copyto(logits[row], -np.inf, where=~mask)


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


def greedy(largest: Largest) -> list[Sampled | SampleFault]:
    """Return the largest logit's token of each row, in the form of `sample`'s results."""
    tokens = largest.token_ids.tolist()
    # guard: rows that are no numbers, greedy
    finite = np.isfinite(largest.values)
    if finite.all():
        return [Sampled(token) for token in tokens]
    return [Sampled(token) if fine else SampleFault(NOT_FINITE) for token, fine in zip(tokens, finite, strict=True)]


def sample(
    logits: Floats, states: Sequence[SamplerState], positions: Sequence[int], largest: Largest | None = None
) -> list[Sampled | SampleFault]:
    """Choose one token per row. The logits and the states do not change; call `accept` with each accepted token.

    A row's logits are edited in this order: repetition penalty (tokens of prompt and output), frequency and
    presence penalty (tokens of the output), logit_bias, suppression until min_tokens, the constraint, temperature,
    top_k, top_p, min_p. Temperature 0 takes the largest logit, and the lowest id among equals. Order and meaning are
    those of transformers' logits processors. Log-probabilities come from the model's own, unedited logits.

    A row's result depends only on its logits, its state and its position, bit for bit.

    Args:
        logits: [R, V].
        states: R states; the ids in their params are below V.
        positions: R draw counters; a sequence uses each counter once, or again to repeat a draw.
        largest: the rows' largest logits, if they are known already.

    Returns:
        R results; a SampleFault if a row's logits hold NaN or +inf, or if no token is allowed.
    """
    assert logits.shape[0] == len(states) == len(positions)
    if not states:
        return []
    with np.errstate(all="ignore"):  # infinities are results here: of forbidden tokens, and of extreme settings
        return _sample(logits, states, positions, first_largest(logits) if largest is None else largest)


def _sample(
    logits: Floats, states: Sequence[SamplerState], positions: Sequence[int], largest: Largest
) -> list[Sampled | SampleFault]:
    tokens: list[int | None] = largest.token_ids.tolist()
    # guard: rows that are no numbers
    finite = np.isfinite(largest.values).tolist()
    faults = [SampleFault(NOT_FINITE)] * len(states)
    rest = [i for i, s in enumerate(states) if finite[i] and (s.edits or s.params.temperature > 0.0)]
    if rest:
        chosen = _choose(logits, largest.values, [states[i] for i in rest], [positions[i] for i in rest], rest)
        for i, token in zip(rest, chosen, strict=True):
            tokens[i] = token
            if token is None:
                finite[i] = False
                faults[i] = nothing_left(states[i])
    return _report(logits, states, [t if ok else None for t, ok in zip(tokens, finite, strict=True)], faults)


def nothing_left(state: SamplerState) -> SampleFault:
    """Return the fault of a row that has finite logits and no allowed token."""
    if state.constraint is not None and state.constraint.fault is not None:
        return SampleFault(state.constraint.fault, by_request=True)
    return SampleFault("the request's rules leave no token to choose", by_request=True)


def _choose(
    logits: Floats, best: Floats, states: Sequence[SamplerState], positions: Sequence[int], rows: list[int]
) -> list[int | None]:
    """Choose the tokens of the rows that edit their logits or draw at random; None if no token is allowed."""
    if len(rows) < logits.shape[0]:
        logits, best = logits[rows], best[rows]
    tokens: list[int | None] = [None] * len(rows)
    drawn = list(range(len(rows)))
    if any(state.edits for state in states):
        logits = _edited(logits, states)
        edited = first_largest(logits)
        best = edited.values
        alive = np.isfinite(best).tolist()
        for i, token in enumerate(edited.token_ids.tolist()):
            if alive[i] and states[i].params.temperature == 0.0:
                tokens[i] = token
        drawn = [i for i in drawn if alive[i] and states[i].params.temperature > 0.0]
    if drawn:
        if len(drawn) < len(rows):
            logits, best = logits[drawn], best[drawn]
        params = [states[i].params for i in drawn]
        uniforms = [uniform(p.seed, positions[i]) for i, p in zip(drawn, params, strict=True)]
        for i, token in zip(drawn, draw(logits, best, params, uniforms).tolist(), strict=True):
            tokens[i] = token
    return tokens


def _report(
    logits: Floats, states: Sequence[SamplerState], tokens: Sequence[int | None], faults: Sequence[SampleFault]
) -> list[Sampled | SampleFault]:
    """Join tokens, faults and the requested log-probabilities."""
    results: list[Sampled | SampleFault] = [
        fault if token is None else Sampled(token) for token, fault in zip(tokens, faults, strict=True)
    ]
    reported = [
        (i, t, n) for i, t in enumerate(tokens) if t is not None and (n := states[i].params.logprobs) is not None
    ]
    if reported:
        rows, ids, tops = zip(*reported, strict=True)
        raw = logits if len(rows) == len(tokens) else logits[list(rows)]
        scores = token_logprobs(raw, np.array(ids, np.int64), min(max(tops), logits.shape[1]))
        for (i, token, top), score in zip(reported, scores, strict=True):
            results[i] = Sampled(token, score.logprob, score.top[:top])
    return results


def _edited(logits: Floats, states: Sequence[SamplerState]) -> Floats:
    """Return a copy of the logits [R, V] with every state's penalties, biases, suppressions and constraint."""
    logits = np.array(logits, order="C")
    width = logits.shape[1]
    flat = logits.reshape(-1)
    penalised = [(i, s) for i, s in enumerate(states) if s.params.penalised]
    if penalised:
        places = _flat_index([(i, s.seen_ids) for i, s in penalised], width)
        lengths = [s.seen_ids.size for _, s in penalised]
        counts = np.concatenate([s.output_counts for _, s in penalised])
        penalties = [
            (s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty) for _, s in penalised
        ]
        repetition, frequency, presence = np.repeat(np.asarray(penalties, np.float32), lengths, axis=0).T
        less = frequency * counts + presence * (counts > 0)
        values = flat[places]
        flat[places] = np.where(values < 0, values * repetition, values / repetition) - less
    biased = [(i, s.bias) for i, s in enumerate(states) if s.bias[0].size]
    if biased:
        places = _flat_index([(i, ids) for i, (ids, _) in biased], width)
        flat[places] += np.concatenate([added for _, (_, added) in biased])
    suppressed = [(i, s.suppressed_ids) for i, s in enumerate(states) if s.suppressed_ids.size]
    if suppressed:
        flat[_flat_index(suppressed, width)] = -np.inf
    forbid(logits, [state.constraint for state in states])
    return logits


def _flat_index(parts: Sequence[tuple[int, npt.NDArray[np.int64]]], width: int) -> npt.NDArray[np.int64]:
    """Return the indices of each part's (row, ids) in the flattened logits."""
    # An id beyond the row would silently change the next row's logits.
    assert all(ids.size == 0 or (ids.min() >= 0 and ids.max() < width) for _, ids in parts)
    return np.concatenate([row * width + ids for row, ids in parts])


def first_largest(logits: Floats) -> Largest:
    """Return each row's largest value (NaN if the row holds one) and its lowest index."""
    ids = logits.argmax(1)
    return Largest(logits[np.arange(len(ids)), ids], ids)


def _ids(ids: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(ids, np.int64)
