"""Draws on a GPU: edits, draws and log-probabilities of a step's logits, which stay on the device.

`sample_on_device` waits for the tokens. LateDraws are launched, and read when the host has done other work. Arguments,
order of operations and results are those of `choice.sample`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from genbatch.nif.cuda_device import on_device, sent
from genbatch.nif.kernels.sample import NONE, RowEdits, draw_tokens, edit_logits, gather_logprobs
from genbatch.nif.sampling.sampler import (
    CHUNK,
    NOT_FINITE,
    Constraint,
    DrawTable,
    Sampled,
    SampleFault,
    SamplerState,
    allowed_tokens,
    nothing_left,
)


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
        device = logits.device
        self._states = states
        raw = logits
        if any(state.edits for state in states):
            logits = edit_logits(logits, [row_edits(state) for state in states])
            _forbid(logits, [state.constraint for state in states])
        table = DrawTable([state.params for state in states]).at(positions)
        self.tokens = draw_tokens(logits, sent(table, device))  # [R] int64 on the device
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
        rows = sent(np.array(self._scored, np.int64), logits.device)
        scored = logits[rows]
        # A row without a token is scored too, and its scores are not read.
        ids = self.tokens[rows].clamp_min(0)[:, None]
        most = min(max(self._states[row].params.logprobs or 0 for row in self._scored), logits.shape[1])
        if most:
            # Shift the logits so that none is above 0, as `ranked` requires; ties then rank as on the host.
            below_best = scored - scored.amax(dim=1, keepdim=True)
            ids = torch.cat((ids, _likeliest(below_best, most)), dim=1)
        return [ids, gather_logprobs(scored, ids)]


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


def _forbid(logits: torch.Tensor, constraints: Sequence[Constraint | None]) -> None:
    """Set the logits [R, V] that a row's constraint forbids to -inf, in place; None allows every token."""
    rows, allowed = allowed_tokens(constraints, logits.shape[1])
    if not rows:
        return
    forbidden = sent(allowed, logits.device).logical_not_()
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        places = sent(np.array(rows, np.int64), logits.device)
        logits[places] = logits[places].masked_fill_(forbidden, float("-inf"))


_MAGNITUDE = 0x7FFFFFFF  # float32 bits without the sign
_LOW_WORD = 0xFFFFFFFF


def _likeliest(below_best: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids [R, count] int64 of the largest logits of rows [R, V] that are at most 0; see `sampler.ranked`."""
    missing = -below_best.shape[1] % CHUNK
    padded = torch.nn.functional.pad(below_best, (0, missing), value=float("-inf")) if missing else below_best
    rows, width = padded.shape
    num_chunks = width // CHUNK
    ids = torch.arange(width, device=padded.device)
    if count < num_chunks:
        chunks = padded.view(rows, num_chunks, CHUNK)
        best = _keys(chunks.amax(-1), ids[:num_chunks]).topk(count, largest=False, sorted=False).values
        chosen = (best & _LOW_WORD)[:, :, None]  # [R, count, 1] chunk numbers
        padded = chunks.gather(1, chosen.expand(-1, -1, CHUNK)).view(rows, -1)
        ids = (chosen * CHUNK + ids[:CHUNK]).view(rows, -1)
    return _keys(padded, ids).topk(count, largest=False, sorted=True).values & _LOW_WORD


def _keys(below_best: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return ((below_best.view(torch.int32) & _MAGNITUDE).to(torch.int64) << 32) | ids
