"""Choice: chooses every sequence's next token from one step's logits.

    drawn = choose(logits, largest, states, positions)     # where the logits are: on the host or on a GPU
    drawn = sample(logits, states, positions)              # on the host

A fault of one row's sampler fails that row alone. `device_draws.py` draws on a GPU.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from genbatch.nif.runner import Largest, Rows, on_host
from genbatch.nif.sampling.sampler import (
    NOT_FINITE,
    SCORED_AT_ONCE,
    SORTED_AT_ONCE,
    Constraint,
    Floats,
    Sampled,
    SampleFault,
    SamplerState,
    allowed_tokens,
    draw,
    nothing_left,
    token_logprobs,
    uniform,
)

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
    logits: Rows | None, largest: Largest | None, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    """Choose one token per row; see `sample`. A GPU gives the same tokens.

    Args:
        logits: [R, V] float32; None only if no state reads them.
        largest: the rows' largest logits; None computes them from the logits.
    """
    try:
        return _choose_all(logits, largest, states, positions)
    except Exception:
        # A fault of one state must not fail the other rows' step.
        # guard: a sampler's fault fails its row alone
        return _choose_each(logits, largest, states, positions)


def _choose_all(
    logits: Rows | None, largest: Largest | None, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    if largest is not None and not any(state.reads_logits for state in states):
        return greedy(largest)
    assert logits is not None, "a sampler reads logits that were not computed"
    if isinstance(logits, np.ndarray):
        return sample(logits, states, positions, largest)
    if find_spec("triton") is None:
        return sample(on_host(logits), states, positions, largest)
    from genbatch.nif.sampling.device_draws import sample_on_device  # imports torch and Triton

    return sample_on_device(logits, states, positions)


def _choose_each(
    logits: Rows | None, largest: Largest | None, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    """Choose row by row, after choosing for all rows together raised.

    Raises:
        Exception: every one of several rows raised, so the cause is not in a single row.
    """
    drawn: list[Sampled | SampleFault] = []
    errors: list[Exception] = []
    for row, (state, position) in enumerate(zip(states, positions, strict=True)):
        row_logits = None if logits is None else logits[row : row + 1]
        try:
            drawn += _choose_all(row_logits, None if largest is None else largest.rows([row]), [state], [position])
        except Exception as error:
            errors.append(error)
            drawn.append(SampleFault(f"choosing a token failed: {error!r}"))
    if len(errors) == len(states) > 1:
        raise errors[0]
    return drawn


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
        chosen = _choose_rest(logits, largest.values, [states[i] for i in rest], [positions[i] for i in rest], rest)
        for i, token in zip(rest, chosen, strict=True):
            tokens[i] = token
            if token is None:
                finite[i] = False
                faults[i] = nothing_left(states[i])
    return _report(logits, states, [t if ok else None for t, ok in zip(tokens, finite, strict=True)], faults)


def _choose_rest(
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


def forbid(logits: Floats, constraints: Sequence[Constraint | None]) -> None:
    """Set the logits that a row's constraint forbids to -inf, in place.

    Args:
        logits: [R, V].
        constraints: R constraints; None allows every token.
    """
    rows, allowed = allowed_tokens(constraints, logits.shape[1])
    for row, mask in zip(rows, allowed, strict=True):
        np.copyto(logits[row], -np.inf, where=~mask)
