"""Chooses the next tokens from what a step left: its logits, or only what is largest in them."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from genbatch.nif.largest import Largest
from genbatch.nif.sampling.logprobs import SCORED_AT_ONCE
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState, greedy, sample
from genbatch.nif.sampling.truncated_draw import SORTED_AT_ONCE

# Bytes a logit: edited, chosen from, divided, as weights, and two passing copies; sorted with the float64 sums; scored.
_DRAWN, _SORTED, _SCORED = 40, 128, 12


def choose(
    logits: torch.Tensor | None, largest: Largest | None, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    """One token a row, where the logits are; see `sample`. All ways give the same tokens.

    Args:
        logits: [R, V] float32; None only if no state reads them.
        largest: of these rows; None leaves it to be found in the logits.
    """
    try:
        return _choose_all(logits, largest, states, positions)
    except Exception:
        # What is one state's own fault must not cost the others this step.
        return _choose_each(logits, largest, states, positions)


def _choose_all(
    logits: torch.Tensor | None, largest: Largest | None, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    if largest is not None and not any(state.reads_logits for state in states):
        return greedy(largest)
    assert logits is not None, "a sampler reads logits that were not computed"
    if logits.device.type == "cpu" or find_spec("triton") is None:
        return sample(logits, states, positions, largest)
    from genbatch.nif.sampling.device_sampler import sample as sample_on_device

    return sample_on_device(logits, states, positions)


def _choose_each(
    logits: torch.Tensor | None, largest: Largest | None, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    """One row at a time, where choosing for all together raised.

    Raises:
        Exception: it raises for each of several: then no row is to blame.
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


def choice_bytes(num_draws: int, num_rows: int, vocab_size: int) -> int:
    """What choosing the tokens of a step takes beside its logits, and scoring those of prompts after that.

    Args:
        num_draws: rows of which a token is drawn.
        num_rows: rows in all.
    """

    def at_once(limit: int, rows: int) -> int:
        return min(rows, max(1, limit // vocab_size)) * vocab_size

    draws = num_draws * vocab_size * _DRAWN + at_once(SORTED_AT_ONCE, num_draws) * _SORTED
    return max(draws, at_once(SCORED_AT_ONCE, num_rows) * _SCORED)
