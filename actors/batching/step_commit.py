"""StepCommit: books what a step gave each entry: positions, the token drawn, its text, its sequence's end."""

from genbatch.actors.batching.journal import Journal
from genbatch.actors.batching.open_requests import OpenRequests
from genbatch.actors.batching.request import Request
from genbatch.actors.batching.sequence import Sequence
from genbatch.actors.batching.step import Evaluated, Planned
from genbatch.actors.scheduling.llm_request import Phase
from genbatch.nif.context import Context
from genbatch.nif.sampling.sampler import Sampled, SampleFault
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest
from genbatch.proto.messages import Token


class StepCommit:
    """Turns what was evaluated into what callers see; between two steps only.

    Args:
        ctx: where beams take over one another's KV.
        requests: whose tokens these are, and who ends with them.
        journal: where tokens are booked.
    """

    def __init__(self, ctx: Context, requests: OpenRequests, journal: Journal) -> None:
        self._ctx = ctx
        self._requests = requests
        self._journal = journal

    def book(self, planned: Planned, evaluated: Evaluated) -> None:
        """Books what a step gave: positions, the token drawn, its text, and the end if it was the last."""
        owner = planned.owner
        if owner.seq_id is None:
            return  # its request has just ended through another of its sequences
        if isinstance(owner, Sequence) and owner.beams is not None and owner.phase is Phase.DECODING:
            self._draw_beam(owner, planned.entry.seq_id, evaluated)
            return
        owner.num_computed += len(planned.entry.tokens)
        if not isinstance(owner, Sequence):
            self._journal.stats.prefilled_tokens += len(planned.entry.tokens)
            return
        request = owner.request
        if owner.phase is Phase.PREFILLING:
            # The token drawn last before a pause is decoded, not prefilled.
            decoded = planned.draws and owner.num_generated > 0
            self._journal.stats.prefilled_tokens += len(planned.entry.tokens) - decoded
        if evaluated.prompt_logprobs:
            assert request.prompt_logprobs is not None
            # A prompt that was paused is scored again: the same numbers take the same places.
            first = planned.entry.n_past + 1
            request.prompt_logprobs[first : first + len(evaluated.prompt_logprobs)] = evaluated.prompt_logprobs
        if request.keep is not None and request.keep.context and evaluated.rows is not None:
            first = planned.entry.n_past + len(planned.entry.tokens) - len(evaluated.rows)
            request.keep.add_context(first, evaluated.rows[: max(0, owner.num_prompt_tokens - first)])
        drawn = evaluated.drawn
        if owner.beams is not None and drawn is not None:
            self._draw_beam(owner, planned.entry.seq_id, evaluated)
        elif isinstance(drawn, SampleFault):
            self._requests.fail(request, _refusal(request, drawn))
        elif drawn is not None and request.abandoned is None:
            if request.keep is not None and request.keep.generation and evaluated.rows is not None:
                request.keep.add_generation(owner.choice, evaluated.rows[-1])
            self._accept(owner, drawn)

    def book_decodes(self, batch: list[Planned], drawn: list[Sampled | SampleFault]) -> None:
        """Books one step of a run, in which every sequence decoded one token."""
        for planned, draw in zip(batch, drawn, strict=True):
            sequence = planned.owner
            assert isinstance(sequence, Sequence)
            if sequence.ended:
                continue  # computed in vain: its end was found after this step had begun
            sequence.num_computed += 1
            if isinstance(draw, SampleFault):
                self._requests.fail(sequence.request, _refusal(sequence.request, draw))
            elif sequence.request.abandoned is None:
                self._accept(sequence, draw)

    def _draw_beam(self, sequence: Sequence, slot: int, evaluated: Evaluated) -> None:
        """Books one beam's candidates; after the last beam's, the best ones go on, each with its parent's KV."""
        beams, request, drawn = sequence.beams, sequence.request, evaluated.drawn
        assert beams is not None and sequence.seq_id is not None
        if not isinstance(drawn, Sampled):
            assert drawn is not None, "a beam that draws nothing"
            self._requests.fail(request, _refusal(request, drawn))
            return
        slots = [sequence.seq_id, *sequence.beam_slots]
        keeps = request.keep is not None and request.keep.generation and evaluated.rows is not None
        row = evaluated.rows[-1] if keeps and evaluated.rows is not None else None
        if request.abandoned is not None or not beams.draw(slots.index(slot), drawn.top, row):
            return
        self._count_token(sequence, len(beams.running))
        if beams.advance():
            self._requests.finish(sequence, "stop" if beams.ended_by_stop else "length")
            return
        for source, target in beams.moves:
            self._ctx.seq_rm(slots[target])
            self._ctx.seq_cp(slots[source], slots[target])

    def _count_token(self, sequence: Sequence, num_tokens: int = 1) -> None:
        if sequence.phase is Phase.PREFILLING:
            sequence.move(Phase.DECODING)
        elif sequence.beams is not None:
            sequence.num_computed += 1  # all beams' last tokens are evaluated by now
        sequence.num_generated += 1
        self._journal.generated(sequence, num_tokens)

    def _accept(self, sequence: Sequence, drawn: Sampled) -> None:
        request = sequence.request
        index = sequence.num_generated
        self._count_token(sequence)
        sequence.tokens.append(drawn.token_id)
        text = sequence.output.push(drawn)
        if request.on_token is not None:
            apart = sequence.output.apart
            try:
                request.on_token(
                    Token(
                        text=text,
                        token_id=drawn.token_id,
                        index=index,
                        logprob=drawn.logprob,
                        choice=sequence.choice,
                        top=dict(drawn.top),
                        reasoning=apart.reasoning,
                        tool_calls=apart.tool_calls,
                    )
                )
            except Exception as error:  # the caller's own function: its fault ends its request only
                sequence.raised = True
                self._requests.fail(request, EngineError(f"on_token raised {error!r}"))
                return
        if sequence.output.finish_reason is not None:
            self._requests.finish(sequence, sequence.output.finish_reason)


def _refusal(request: Request, fault: SampleFault) -> GenbatchError:
    """The error of a request whose next token could not be chosen."""
    if not fault.by_request:
        return EngineError(fault.reason)
    return InvalidRequest(request.grammar.field if request.grammar is not None else None, fault.reason)
