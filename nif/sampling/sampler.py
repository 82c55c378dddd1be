"""Choose the next token of every sequence from one step's logits.

`choose` draws on the device that holds the logits. A Constraint restricts the next token of a sequence, for example to
a grammar.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from genbatch.nif.cuda_device import on_device, sent
from genbatch.nif.runner import Largest
from genbatch.nif.sampling.draw import (
    NOT_FINITE,
    SCORED_AT_ONCE,
    SORTED_AT_ONCE,
    DrawTable,
    SamplingParams,
    draw,
    pad_to_chunks,
    ranked,
    token_logprobs,
    uniform,
)

if TYPE_CHECKING:  # imports Triton, which machines without a GPU need not have
    from genbatch.nif.kernels.sample import RowEdits


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

    @property
    def allowed(self) -> npt.NDArray[np.int32]:
        """Return the mask [ceil(vocab_size / 32)], a bit per token, lowest bit first. Valid after `prepare`."""
        ...


def forbid(logits: torch.Tensor, constraints: Sequence[Constraint | None]) -> None:
    """Set the logits that a row's constraint forbids to -inf, in place. A constraint with a fault forbids all.

    Args:
        logits: [R, V] float32 on any device.
        constraints: R constraints; None allows every token.
    """
    rows = [row for row, constraint in enumerate(constraints) if constraint is not None]
    if not rows:
        return
    width = logits.shape[1]
    words = np.zeros((len(rows), (width + 31) // 32), np.int32)
    for index, row in enumerate(rows):
        constraint = constraints[row]
        assert constraint is not None
        constraint.prepare()
        if constraint.fault is None:
            words[index] = constraint.allowed[: words.shape[1]]
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=width, bitorder="little")
    allowed = sent(bits, logits.device).view(torch.bool)
    if len(rows) == len(logits):
        logits.masked_fill_(allowed.logical_not_(), float("-inf"))
    else:
        places = sent(np.array(rows, np.int64), logits.device)
        logits[places] = logits[places].masked_fill_(allowed.logical_not_(), float("-inf"))


_NOT_FINITE = "the model's logits are not finite"
_CHUNK = 64  # columns per maximum that the CPU computes with vector instructions


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row's choice.

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

    __slots__ = ("_always_edits", "_always_reads", "_bias", "_counts", "_num_seen", "_ranks", "_seen", "_suppressed",
                 "constraint", "num_generated", "params")  # fmt: skip

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Iterable[int], constraint: Constraint | None = None
    ) -> None:
        self.params = params
        self.constraint = constraint
        self.num_generated = 0
        self._always_edits = params.penalised or bool(params.logit_bias) or constraint is not None
        self._always_reads = self._always_edits or params.temperature > 0.0 or params.logprobs is not None
        bias = params.logit_bias or {}
        self._bias = (_ids(bias), np.fromiter(bias.values(), np.float32, len(bias)))
        self._suppressed = _ids(sorted(params.suppress))
        # Distinct tokens seen, and each token's count in the output. The arrays grow by doubling.
        self._ranks: dict[int, int] = {}
        self._num_seen = 0
        self._seen = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float32)
        if params.penalised:
            for token_id in dict.fromkeys(prompt_token_ids):
                self._rank(token_id)

    def accept(self, token_id: int) -> None:
        """Add `token_id` to the sequence. Call this after the step has succeeded."""
        self.num_generated += 1
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self.params.penalised:
            rank = self._rank(token_id)  # before reading `_counts`, because `_rank` may replace the arrays
            self._counts[rank] += 1.0

    def fork(self, seed: int) -> Self:
        """Return an independent copy that draws by `seed`, for a parallel sample or a beam."""
        assert self.constraint is None, "a constraint has one sequence"
        twin = type(self)(replace(self.params, seed=seed), ())
        twin.num_generated = self.num_generated
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
        return self.num_generated < self.params.min_tokens and self._suppressed.size > 0

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
    return [Sampled(token) if fine else SampleFault(_NOT_FINITE) for token, fine in zip(tokens, finite, strict=True)]


def sample(
    logits: torch.Tensor,
    states: Sequence[SamplerState],
    positions: Sequence[int],
    largest: Largest | None = None,
) -> list[Sampled | SampleFault]:
    """Choose one token per row. The logits and the states do not change; call `accept` with each accepted token.

    A row's logits are edited in this order: repetition penalty (tokens of prompt and output), frequency and
    presence penalty (tokens of the output), logit_bias, suppression until min_tokens, the constraint, temperature,
    top_k, top_p, min_p. Temperature 0 takes the largest logit, and the lowest id among equals. Order and meaning are
    those of transformers' logits processors. Log-probabilities come from the model's own, unedited logits.

    A row's result depends only on its logits, its state and its position, bit for bit.

    Args:
        logits: [R, V] float32 on any device.
        states: R states; the ids in their params are below V.
        positions: R draw counters; a sequence uses each counter once, or again to repeat a draw.
        largest: the rows' largest logits, if they are known already.

    Returns:
        R results; a SampleFault if a row's logits hold NaN or +inf, or if no token is allowed.
    """
    assert logits.shape[0] == len(states) == len(positions)
    if not states:
        return []
    if largest is None:
        best, best_ids = _first_largest(logits)
        tokens: list[int | None] = best_ids.tolist()
    else:
        best, tokens = torch.from_numpy(largest.values), largest.token_ids.tolist()
    # guard: rows that are no numbers
    finite = best.isfinite().tolist()
    faults = [SampleFault(_NOT_FINITE)] * len(states)
    rest = [i for i, s in enumerate(states) if finite[i] and (s.edits or s.params.temperature > 0.0)]
    if rest:
        chosen = _choose(logits, best, [states[i] for i in rest], [positions[i] for i in rest], rest)
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
    return SampleFault("what was asked for leaves no token to choose", by_request=True)


def _choose(
    logits: torch.Tensor,
    best: torch.Tensor,
    states: Sequence[SamplerState],
    positions: Sequence[int],
    rows: list[int],
) -> list[int | None]:
    """Choose the tokens of the rows that edit their logits or draw at random; None if no token is allowed."""
    if len(rows) < logits.shape[0]:
        logits, best = logits[rows], best[rows]
    tokens: list[int | None] = [None] * len(rows)
    drawn = list(range(len(rows)))
    if any(state.edits for state in states):
        logits = _edited(logits, states)
        best, best_ids = _first_largest(logits)
        alive = best.isfinite().tolist()
        for i, token in enumerate(best_ids.tolist()):
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
    logits: torch.Tensor,
    states: Sequence[SamplerState],
    tokens: Sequence[int | None],
    faults: Sequence[SampleFault],
) -> list[Sampled | SampleFault]:
    """Join tokens, faults and the requested log-probabilities."""
    results: list[Sampled | SampleFault] = [
        fault if token is None else Sampled(token) for token, fault in zip(tokens, faults, strict=True)
    ]
    wanted = [(i, t, n) for i, t in enumerate(tokens) if t is not None and (n := states[i].params.logprobs) is not None]
    if wanted:
        rows, ids, tops = zip(*wanted, strict=True)
        raw = logits if len(rows) == len(tokens) else logits[list(rows)]
        scores = token_logprobs(raw, torch.tensor(ids, device=logits.device), min(max(tops), logits.shape[1]))
        for (i, token, top), score in zip(wanted, scores, strict=True):
            results[i] = Sampled(token, score.logprob, score.top[:top])
    return results


def _edited(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """Return a copy of the logits [R, V] with every state's penalties, biases, suppressions and constraint."""
    logits = logits.clone(memory_format=torch.contiguous_format)
    width = logits.shape[1]
    flat = logits.view(-1)
    penalised = [(i, s) for i, s in enumerate(states) if s.params.penalised]
    if penalised:
        index = _flat_index([(i, s.seen_ids) for i, s in penalised], width)
        lengths = [s.seen_ids.size for _, s in penalised]
        counts = np.concatenate([s.output_counts for _, s in penalised])
        penalties = [
            (s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty) for _, s in penalised
        ]
        repetition, frequency, presence = np.repeat(np.asarray(penalties, np.float32), lengths, axis=0).T
        less = torch.from_numpy(frequency * counts + presence * (counts > 0)).to(flat.device)
        factor = torch.from_numpy(repetition.copy()).to(flat.device)
        place = torch.from_numpy(index).to(flat.device)
        values = flat[place]
        flat[place] = torch.where(values < 0, values * factor, values / factor) - less
    biased = [(i, s.bias) for i, s in enumerate(states) if s.bias[0].size]
    if biased:
        place = torch.from_numpy(_flat_index([(i, ids) for i, (ids, _) in biased], width)).to(flat.device)
        flat[place] += torch.from_numpy(np.concatenate([added for _, (_, added) in biased])).to(flat.device)
    suppressed = [(i, s.suppressed_ids) for i, s in enumerate(states) if s.suppressed_ids.size]
    if suppressed:
        flat[torch.from_numpy(_flat_index(suppressed, width)).to(flat.device)] = float("-inf")
    forbid(logits, [state.constraint for state in states])
    return logits


def _flat_index(parts: Sequence[tuple[int, npt.NDArray[np.int64]]], width: int) -> npt.NDArray[np.int64]:
    """Return the indices of each part's (row, ids) in the flattened logits."""
    # An id beyond the row would silently change the next row's logits.
    assert all(ids.size == 0 or (ids.min() >= 0 and ids.max() < width) for _, ids in parts)
    return np.concatenate([row * width + ids for row, ids in parts])


def _first_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest value (NaN if the row holds one) and its lowest index, [R] each."""
    rows, width = logits.shape
    if logits.device.type != "cpu" or width % _CHUNK:
        best, index = logits.max(dim=1)
        return best, index
    # amax is vectorised and max with indices is not, so working by chunks takes a third of the time.
    chunks = logits.reshape(rows, -1, _CHUNK)
    best, chunk = chunks.amax(dim=-1).max(dim=1)
    return best, chunk * _CHUNK + chunks[torch.arange(rows), chunk].argmax(dim=1)


def _ids(ids: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(ids, np.int64)


# Bytes per logit: for edits, weights and copies while drawing; for sorting with float64 sums; for scoring.
_DRAWN, _SORTED, _SCORED = 40, 128, 12


def choice_bytes(num_draws: int, num_rows: int, vocab_size: int) -> int:
    """Return the bytes that drawing a step's tokens and then scoring prompts need beside the logits.

    Args:
        num_draws: rows with a draw.
        num_rows: all rows.
    """

    def at_once(limit: int, rows: int) -> int:
        return min(rows, max(1, limit // vocab_size)) * vocab_size

    draws = num_draws * vocab_size * _DRAWN + at_once(SORTED_AT_ONCE, num_draws) * _SORTED
    return max(draws, at_once(SCORED_AT_ONCE, num_rows) * _SCORED)


def choose(
    logits: torch.Tensor | None, largest: Largest | None, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    """Choose one token per row on the logits' device; see `sample`. Every device gives the same tokens.

    Args:
        logits: [R, V] float32; None only if no state reads them.
        largest: the rows' largest logits; None computes them from the logits.
    """
    try:
        return _choose_all(logits, largest, states, positions)
    except Exception:
        # A fault of one state must not fail the other rows' step.
        # guard: a sampler's fault is its row's
        return _choose_each(logits, largest, states, positions)


def _choose_all(
    logits: torch.Tensor | None, largest: Largest | None, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    if largest is not None and not any(state.reads_logits for state in states):
        return greedy(largest)
    assert logits is not None, "a sampler reads logits that were not computed"
    if logits.device.type == "cpu" or find_spec("triton") is None:
        return sample(logits, states, positions, largest)
    return sample_on_device(logits, states, positions)


def _choose_each(
    logits: torch.Tensor | None, largest: Largest | None, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    """Choose row by row, after choosing for all rows together raised.

    Raises:
        Exception: every one of several rows raised, so the cause is not in a single row.
    """
    drawn: list[Sampled | SampleFault] = []
    errors: list[Exception] = []
    for row, (state, position) in enumerate(zip(states, positions, strict=True)):
        one = None if logits is None else logits[row : row + 1]
        try:
            drawn += _choose_all(one, None if largest is None else largest.rows([row]), [state], [position])
        except Exception as error:
            errors.append(error)
            drawn.append(SampleFault(f"choosing a token failed: {error!r}"))
    if len(errors) == len(states) > 1:
        raise errors[0]
    return drawn


def sample_on_device(
    logits: torch.Tensor, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    """Choose one token per row on a GPU; arguments, order of operations and results are those of `sample`.

    A step makes a few copies to the device, and waits once for the results.
    """
    assert logits.shape[0] == len(states) == len(positions)
    if not states:
        return []
    with on_device(logits.device):
        draws = LateDraws(logits, states, positions)
        draws.send()
        if logits.device.type == "cuda":
            torch.cuda.current_stream(logits.device).synchronize()
        return draws.results()


class LateDraws:
    """Draws that were launched and not read: the host may do other work until the device has made them.

    The arguments are those of `sample`. They are not needed after the constructor.
    """

    def __init__(self, logits: torch.Tensor, states: Sequence[SamplerState], positions: Sequence[int]) -> None:
        from genbatch.nif.kernels.sample import draw_tokens, edit_logits

        device = logits.device
        self._states = states
        raw = logits
        if any(state.edits for state in states):
            logits = edit_logits(logits, [row_edits(state) for state in states])
            forbid(logits, [state.constraint for state in states])
        table = DrawTable([state.params for state in states]).at(positions)
        self.tokens = draw_tokens(logits, sent(table.numpy(), device))  # [R] int64 on the device
        self._parts = [torch.stack((self.tokens, raw.amax(dim=1).isfinite().long()))]
        self._scored = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        if self._scored:
            self._parts += self._scores(raw)
        self._host: list[torch.Tensor] = []

    def send(self) -> None:
        """Launch the copies of the results to the host."""
        for part in self._parts:
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
            host.copy_(part, non_blocking=True)
            self._host.append(host)

    def results(self) -> list[Sampled | SampleFault]:
        """Return a token or a fault for each row. Call this once the copies have arrived."""
        from genbatch.nif.kernels.sample import NONE

        results: list[Sampled | SampleFault] = []
        for state, token, is_finite in zip(self._states, *self._host[0].tolist(), strict=True):
            if not is_finite:
                results.append(SampleFault(NOT_FINITE))
            elif token == NONE:
                results.append(nothing_left(state))
            else:
                results.append(Sampled(token))
        if self._scored:
            for row, ids, values in zip(self._scored, *(part.tolist() for part in self._host[1:]), strict=True):
                number, result = self._states[row].params.logprobs, results[row]
                if isinstance(result, Sampled):
                    assert number is not None
                    top = tuple(zip(ids[1 : 1 + number], values[1 : 1 + number], strict=True))
                    results[row] = Sampled(result.token_id, values[0], top)
        return results

    def _scores(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Return ids and log-probabilities by the model's own logits: the drawn token's, then the likeliest ones'."""
        from genbatch.nif.kernels.sample import gather_logprobs

        rows = sent(np.array(self._scored, np.int64), logits.device)
        scored = logits[rows]
        # A row without a token is scored too, and its scores are not read.
        ids = self.tokens[rows].clamp_min(0)[:, None]
        most = min(max(self._states[row].params.logprobs or 0 for row in self._scored), logits.shape[1])
        if most:
            # Shift the logits so that none is above 0, as `ranked` requires; ties then rank as on the host.
            below_best = scored - scored.amax(dim=1, keepdim=True)
            ids = torch.cat((ids, ranked(pad_to_chunks(below_best), most)[1]), dim=1)
        return [ids, gather_logprobs(scored, ids)]


def row_edits(state: SamplerState) -> "RowEdits":
    """Convert a state's penalties, biases and suppressions to the arguments of `edit_logits`."""
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
