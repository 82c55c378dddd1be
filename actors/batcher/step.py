"""A step's entries, whose they are, and what one forward gives each."""

from dataclasses import dataclass

import torch

from genbatch.actors.batcher.beam_search import BeamSearch
from genbatch.actors.batcher.requests import Sequence, Slotted
from genbatch.nif.context import Context
from genbatch.nif.runner import Entry, Logits
from genbatch.nif.sampling.draw import token_logprobs
from genbatch.nif.sampling.sampler import Sampled, SampleFault
from genbatch.proto.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Planned:
    """One entry of a step and whose it is."""

    owner: Slotted
    entry: Entry
    draws: bool


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What a step gave one entry."""

    drawn: Sampled | SampleFault | None
    prompt_logprobs: list[TokenLogprob]
    rows: torch.Tensor | None = None  # [rows, vocab_size] on the CPU, where logits are kept; of a text its states


def plan_beams(owner: Sequence, beams: BeamSearch) -> list[Planned]:
    """The last token of every beam that was not evaluated yet."""
    assert owner.seq_id is not None
    slots = [owner.seq_id, *owner.beam_slots]
    return [
        Planned(owner, Entry(slots[beam.slot], beam.tokens[-1:], owner.num_computed, Logits.LAST, _handle(owner)), True)
        for beam in beams.waiting
    ]


def plan_tokens(owner: Slotted, size: int) -> Planned:
    """The next `size` tokens that are not evaluated: a chunk of its context, or the token drawn last."""
    start = owner.num_computed
    tokens = owner.tokens[start : start + size]
    assert owner.seq_id is not None and tokens, "planned without a slot or without tokens"
    is_last = start + size == len(owner.tokens)
    if isinstance(owner, Sequence) and owner.pooled is not None:
        return Planned(owner, Entry(owner.seq_id, tokens, start, owner.pooled.wanted(is_last=is_last)), False)
    draws = is_last and isinstance(owner, Sequence)
    logits = Logits.LAST if draws else Logits.NONE
    if isinstance(owner, Sequence) and owner.scores_prompt and start < owner.num_prompt_tokens - 1:
        logits = Logits.ALL
    return Planned(owner, Entry(owner.seq_id, tokens, start, logits, _handle(owner)), draws)


def _handle(owner: Slotted) -> int:
    return 0 if owner.adapter is None else owner.adapter.handle


def evaluate(context: Context, batch: list[Planned]) -> list[Evaluated]:
    """One forward over the entries; changes nothing but the context and the samplers that drew."""
    samplers = [
        planned.owner.sampler if isinstance(planned.owner, Sequence) and planned.draws else None for planned in batch
    ]
    reads = any(_reads_rows(planned) for planned in batch)

    def read(logits: list[torch.Tensor], drawn: list[Sampled | SampleFault | None]) -> list[Evaluated]:
        if not reads:
            return [Evaluated(draw, []) for draw in drawn]
        return [
            Evaluated(draw, _prompt_logprobs(planned, rows), _kept_rows(planned, rows))
            for planned, rows, draw in zip(batch, logits, drawn, strict=True)
        ]

    entries = [planned.entry for planned in batch]
    results = context.step_and_read(entries, samplers, read, with_logits=reads)
    for planned, sampler, result in zip(batch, samplers, results, strict=True):
        # The beams of a search share a sampler, and no beam's tokens count for the others.
        if sampler is not None and isinstance(result.drawn, Sampled) and not _searches(planned):
            sampler.accept(result.drawn.token_id)
    return results


def _searches(planned: Planned) -> bool:
    return isinstance(planned.owner, Sequence) and planned.owner.beams is not None


def _reads_rows(planned: Planned) -> bool:
    """Whether more of its logits is wanted than a draw."""
    owner = planned.owner
    if not isinstance(owner, Sequence):
        return False
    if owner.pooled is not None:
        return True
    keep = owner.request.keep
    return planned.entry.logits is Logits.ALL or (keep is not None and (keep.context or keep.generation))


def _prompt_logprobs(planned: Planned, rows: torch.Tensor) -> list[TokenLogprob]:
    """Log-probs of the prompt tokens that follow this chunk's tokens; rows are the chunk's logits."""
    owner, entry = planned.owner, planned.entry
    if entry.logits is not Logits.ALL or not isinstance(owner, Sequence):
        return []
    if owner.request.wanted.prompt_logprobs is None:
        return []  # every token's logits are there to be kept
    following = owner.tokens[entry.n_past + 1 : min(entry.n_past + len(entry.tokens) + 1, owner.num_prompt_tokens)]
    scored = token_logprobs(rows[: len(following)], torch.tensor(following), owner.request.wanted.prompt_logprobs)
    return [
        TokenLogprob(token_id=token_id, logprob=score.logprob, top=dict(score.top))
        for token_id, score in zip(following, scored, strict=True)
    ]


def _kept_rows(planned: Planned, rows: torch.Tensor) -> torch.Tensor | None:
    """A copy of the rows that the caller may want; a runner may write its next step's over them."""
    owner = planned.owner
    if isinstance(owner, Sequence) and owner.pooled is not None:
        return rows.to("cpu", copy=True) if len(rows) else None
    keep = owner.request.keep if isinstance(owner, Sequence) else None
    if keep is None or not len(rows) or not (keep.context or keep.generation):
        return None
    return rows.to("cpu", copy=True)
