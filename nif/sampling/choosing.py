"""Chooses the next token of every sequence of a step, on the device that holds the logits."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from genbatch.nif.runner import Largest
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState, greedy, sample


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
    from genbatch.nif.sampling.device_sampler import sample as sample_on_device

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
