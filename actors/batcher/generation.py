"""Generations: a request for text, its choices, which draw token after token, and its beam search."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec
import torch

from genbatch.actors.batcher.beam_search import BeamSearch
from genbatch.actors.batcher.kept_logits import Keep
from genbatch.actors.batcher.output import Output
from genbatch.actors.batcher.requests import Books, Evaluated, Planned, Request, Sequence
from genbatch.actors.scheduling.request import Phase
from genbatch.nif.errors import NativeError
from genbatch.nif.runner import Entry, Logits
from genbatch.nif.sampling.draw import token_logprobs
from genbatch.nif.sampling.prompt_lookup import PromptLookup
from genbatch.nif.sampling.sampler import Constraint, Sampled, SampleFault, SamplerState
from genbatch.proto.drawn import DrawnTokens
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest
from genbatch.proto.messages import Choice, FinishReason, GenerateRequest, Result, Token, TokenLogprob, Usage
from genbatch.proto.validation import Grammar


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest(Request):
    """A request for text.

    Args:
        wanted: the validated message.
        on_token: called once per token, must not block; None for a request without a stream.
        shows, drawn, keep, beam_width: see Generate.
        grammar: the grammar that its answers must match.
    """

    wanted: GenerateRequest
    on_token: Callable[[Token], None] | None = None
    shows: bool = True
    drawn: tuple[DrawnTokens, ...] = ()
    beam_width: int = 1
    keep: Keep = field(default_factory=Keep)
    grammar: Grammar | None = None
    constraints: list[Constraint] = field(default_factory=list)  # one per sequence; empty without a grammar
    echo: str = ""  # see Prompt
    prompt_logprobs: list[TokenLogprob | None] | None = None
    choices: dict[int, Choice] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "text_completion" if self.wanted.messages is None else "chat"

    @property
    def generations(self) -> "list[Generation]":
        """The request's sequences."""
        return cast("list[Generation]", self.sequences)

    @property
    def scores_prompt(self) -> bool:
        """True if logits are read at every token of the prompt."""
        return self.wanted.scores_prompt or self.keep.context

    @property
    def has_answer(self) -> bool:
        return bool(self.choices)

    def response(self) -> Result:
        choices = tuple(self.choices[index] for index in sorted(self.choices))
        usage = Usage(
            prompt_tokens=len(self.prompt_tokens),
            completion_tokens=sum(len(choice.token_ids) for choice in choices),
            cached_tokens=self.cached_tokens,
        )
        return Result(
            **msgspec.structs.asdict(choices[0]),
            usage=usage,
            prompt_logprobs=self.prompt_logprobs,
            several=choices if len(choices) > 1 else (),
        )

    def refusal(self, fault: SampleFault) -> GenbatchError:
        """Return the request's error after its next token could not be chosen."""
        if not fault.by_request:
            return EngineError(fault.reason)
        return InvalidRequest(self.grammar.field if self.grammar is not None else None, fault.reason)


@dataclass(slots=True, kw_only=True, eq=False)
class Generation(Sequence):
    """One answer of a request: the only answer, or one of its `n` answers."""

    request: GenerationRequest
    output: Output
    sampler: SamplerState
    lookup: PromptLookup = field(default_factory=lambda: PromptLookup())
    raised: bool = False  # the caller's `on_token` raised at the last token
    num_shown: int = 0  # tokens that a failed engine has already sent

    @property
    def final_reason(self) -> FinishReason | None:
        return self.output.finish_reason

    @property
    def temperature(self) -> float:
        return self.sampler.params.temperature

    @property
    def constraint(self) -> Constraint | None:
        return self.sampler.constraint

    @property
    def runs_ahead(self) -> bool:
        # A constraint's next mask may still be in work. Kept logits are read after every step.
        return self.sampler.constraint is None and not self.request.keep.generation

    def conclude(self, reason: FinishReason) -> bool:
        self.request.choices |= self.choices(reason)
        return len(self.request.choices) >= len(self.request.sequences)

    def cut(self, reason: FinishReason) -> None:
        self.conclude(reason)

    def choices(self, reason: FinishReason) -> dict[int, Choice]:
        """Return the answers, by choice, of a sequence that ends for this reason."""
        only_shown = self.request.on_token is not None and self.request.shows
        return {self.choice: self.output.choice(reason, only_shown=only_shown)}

    def reads(self, start: int, *, is_last: bool) -> tuple[Logits, SamplerState | None]:
        if self.scores_prompt and start < self.num_prompt_tokens - 1:
            return Logits.ALL, self.sampler if is_last else None
        return (Logits.LAST, self.sampler) if is_last else (Logits.NONE, None)

    def reads_rows(self, planned: Planned) -> bool:
        keep = self.request.keep
        return planned.entry.logits is Logits.ALL or keep.context or keep.generation

    def read(self, planned: Planned, rows: torch.Tensor, drawn: Sampled | SampleFault | None) -> Evaluated:
        keep = self.request.keep
        # Copy the rows: a runner may overwrite them in its next step.
        kept = rows.to("cpu", copy=True) if len(rows) and (keep.context or keep.generation) else None
        return Evaluated(drawn, self._prompt_logprobs(planned.entry, rows), kept)

    def _prompt_logprobs(self, entry: Entry, rows: torch.Tensor) -> list[TokenLogprob]:
        """Return log-probs of the prompt tokens that follow this chunk's tokens; rows are the chunk's logits."""
        num_top = self.request.wanted.prompt_logprobs
        if entry.logits is not Logits.ALL or num_top is None:
            return []
        following = self.tokens[entry.n_past + 1 : min(entry.n_past + len(entry.tokens) + 1, self.num_prompt_tokens)]
        scored = token_logprobs(rows[: len(following)], torch.tensor(following), num_top)
        return [
            TokenLogprob(token_id=token_id, logprob=score.logprob, top=dict(score.top))
            for token_id, score in zip(following, scored, strict=True)
        ]

    def accept(self, token_id: int) -> None:
        self.sampler.accept(token_id)

    def book(self, planned: Planned, evaluated: Evaluated, books: Books) -> None:
        """Book the evaluated positions, the prompt's scores and the drawn token, and the end after the last token."""
        self._book_context(planned, evaluated, books)
        if evaluated.drawn is not None:
            self.book_drawn(evaluated.drawn, books, evaluated.rows)

    def _book_context(self, planned: Planned, evaluated: Evaluated, books: Books) -> None:
        Sequence.book(self, planned, evaluated, books)
        request, entry = self.request, planned.entry
        if evaluated.prompt_logprobs:
            assert request.prompt_logprobs is not None
            # A paused prompt is scored again: the same scores go to the same positions.
            first = entry.n_past + 1
            request.prompt_logprobs[first : first + len(evaluated.prompt_logprobs)] = evaluated.prompt_logprobs
        if request.keep.context and evaluated.rows is not None:
            first = entry.n_past + len(entry.tokens) - len(evaluated.rows)
            request.keep.add_context(first, evaluated.rows[: max(0, self.num_prompt_tokens - first)])

    def book_drawn(self, drawn: Sampled | SampleFault, books: Books, rows: torch.Tensor | None = None) -> None:
        """Book a drawn token and the row that it was drawn from; fail the request if the draw failed."""
        if drawn.failed:
            books.fail(self.request, self.request.refusal(drawn))
        elif self.request.abandoned is None:
            if self.request.keep.generation and rows is not None:
                self.request.keep.add_generation(self.choice, rows[-1])
            self._take(drawn, books)

    def _take(self, drawn: Sampled, books: Books) -> None:
        request = self.request
        if request.wanted.max_tokens == 0:  # only the prompt was requested
            self.output.end()
            books.finish(self, "length")
            return
        index = self.num_generated
        if self.phase is Phase.PREFILLING:
            self.move(Phase.DECODING)
        self.num_generated += 1
        books.generated(self)
        self.tokens.append(drawn.token_id)
        try:
            text = self.output.push(drawn)
        except NativeError as error:  # the model's tokenizer has no text for these tokens
            books.fail(request, EngineError(str(error)))
            return
        is_new = index >= self.num_shown
        if request.on_token is not None and is_new and not self._show(request.on_token, drawn, text, index, books):
            return
        if self.output.finish_reason is not None:
            books.finish(self, self.output.finish_reason)

    def _show(self, on_token: Callable[[Token], None], drawn: Sampled, text: str, index: int, books: Books) -> bool:
        """Call the caller's `on_token` with a token; return False if it raised."""
        apart = self.output.apart
        token = Token(
            text=text,
            token_id=drawn.token_id,
            index=index,
            logprob=drawn.logprob,
            choice=self.choice,
            top=dict(drawn.top),
            reasoning=apart.reasoning,
            tool_calls=apart.tool_calls,
        )
        try:
            on_token(token)
        # guard: a caller's function
        except Exception as error:  # a fault of the caller's function ends its request only
            self.raised = True
            books.fail(self.request, EngineError(f"on_token raised {error!r}"))
            return False
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class BeamGeneration(Generation):
    """A beam search over several continuations, each in its own slot.

    Args:
        search: the state of the beam search.
    """

    search: BeamSearch
    _num_completed: int = 0  # tokens of all beams, once the search has ended

    @property
    def runs_ahead(self) -> bool:
        return False  # beams choose together

    @property
    def keeps_progress(self) -> bool:
        return False

    @property
    def completion_tokens(self) -> int:
        return self._num_completed

    @property
    def _slots(self) -> list[int]:
        assert self.seq_id is not None
        return [self.seq_id, *self.beam_slots]

    @property
    def decode_slots(self) -> list[int]:
        return [self._slots[beam.slot] for beam in self.search.waiting]

    def plan_decode(self) -> list[Planned]:
        """Return the last token of every beam that was not evaluated yet."""
        handle = 0 if self.adapter is None else self.adapter.handle
        entries = [
            Entry(self._slots[beam.slot], beam.tokens[-1:], self.num_computed, Logits.LAST, handle)
            for beam in self.search.waiting
        ]
        return [Planned(self, entry, self.sampler) for entry in entries]

    def accept(self, token_id: int) -> None:
        """Do nothing: the beams share the sampler, so no beam's tokens may change its state."""

    def restart(self) -> None:
        self.search.restart()
        self.num_generated = 0

    def book(self, planned: Planned, evaluated: Evaluated, books: Books) -> None:
        """Book one beam's candidates; after the last beam's, continue the best beams, each with its parent's KV."""
        if self.phase is not Phase.DECODING:
            self._book_context(planned, evaluated, books)
        drawn = evaluated.drawn
        if drawn is None:
            return
        if drawn.failed:
            books.fail(self.request, self.request.refusal(drawn))
        elif self.request.abandoned is None:
            keeps = self.request.keep.generation and evaluated.rows is not None
            row = evaluated.rows[-1] if keeps and evaluated.rows is not None else None
            if self.search.draw(self._slots.index(planned.entry.seq_id), drawn.top, row):
                self._advance(books)

    def _advance(self, books: Books) -> None:
        num_tokens = len(self.search.running)
        if self.phase is Phase.PREFILLING:
            self.move(Phase.DECODING)
        else:
            self.num_computed += 1  # all beams' last tokens are evaluated by now
        self.num_generated += 1
        books.generated(self, num_tokens)
        if self.search.advance():
            books.finish(self, "stop" if self.search.ended_by_stop else "length")
            return
        for source, target in self.search.moves:
            books.copy_slot(self._slots[source], self._slots[target])

    def choices(self, reason: FinishReason) -> dict[int, Choice]:
        choices = {}
        for index, beam in enumerate(self.search.best()):
            output = self.output.blank()
            for token_id, logprob in zip(beam.tokens, beam.logprobs, strict=True):
                output.push(Sampled(token_id, logprob))
            # A beam that ended by itself says how; the others share the reason for which the search was cut short.
            choices[index] = output.choice(reason)
            self.request.keep.set_generation(index, beam.logits)
        self._num_completed = sum(len(choice.token_ids) for choice in choices.values())
        return choices
