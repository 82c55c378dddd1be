"""Chooses the next token of every sequence on the device that holds the logits; the twin of `sampler.py`."""

from collections.abc import Sequence

import numpy as np
import torch

from genbatch.nif.cuda_device import on_device
from genbatch.nif.kernels.sample import NONE, RowEdits, draw_tokens, edit_logits, gather_logprobs
from genbatch.nif.sampling.draw import NOT_FINITE, DrawTable, pad_to_chunks, ranked
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState, forbid, nothing_left


def sample(
    logits: torch.Tensor, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    """Choose one token per row; arguments, order of operations and results are those of `sampler.sample`.

    A step makes one copy to the device and one copy back. Log-probabilities and masks of constraints take one more
    copy each.
    """
    assert logits.shape[0] == len(states) == len(positions)
    if not states:
        return []
    with on_device(logits.device):
        return _sample(logits, states, positions)


def _sample(
    logits: torch.Tensor, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[Sampled | SampleFault]:
    raw = logits
    if any(state.edits for state in states):
        logits = edit_logits(logits, [row_edits(state) for state in states])
        forbid(logits, [state.constraint for state in states])
    draws = DrawTable([state.params for state in states]).at(positions)
    tokens = draw_tokens(logits, draws.to(logits.device, non_blocking=True))
    healthy = raw.amax(dim=1).isfinite()
    host = torch.stack((tokens, healthy.long())).tolist()
    results: list[Sampled | SampleFault] = []
    for state, token, fine in zip(states, *host, strict=True):
        if not fine:
            results.append(SampleFault(NOT_FINITE))
        elif token == NONE:
            results.append(nothing_left(state))
        else:
            results.append(Sampled(token))
    return _with_logprobs(raw, states, results)


def row_edits(state: SamplerState) -> RowEdits:
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


def _with_logprobs(
    logits: torch.Tensor, states: Sequence[SamplerState], results: list[Sampled | SampleFault]
) -> list[Sampled | SampleFault]:
    """Add log-probabilities of the model's own logits to the rows that report them."""
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
        # Shift the logits so that none is above 0, as `ranked` requires; ties then rank as on the host.
        below_best = chosen_logits - chosen_logits.amax(dim=1, keepdim=True)
        ids = torch.cat((chosen, ranked(pad_to_chunks(below_best), most)[1]), dim=1)
    logprobs = gather_logprobs(chosen_logits, ids)
    results = list(results)
    for (row, token, number), names, values in zip(wanted, ids.tolist(), logprobs.tolist(), strict=True):
        top = tuple(zip(names[1 : 1 + number], values[1 : 1 + number], strict=True))
        results[row] = Sampled(token, values[0], top)
    return results
