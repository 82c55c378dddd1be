"""Choice: draws every sequence's next token where its logits are, on the host or on a GPU.

A fault of one row's sampler fails that row alone.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

from genbatch.nif.runner import Largest, Rows, on_host
from genbatch.nif.sampling.draw import SCORED_AT_ONCE, SORTED_AT_ONCE
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState, greedy, sample

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
        # guard: a sampler's fault is its row's
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
