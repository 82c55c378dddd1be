"""Generations: a request for text, and its choices, which draw token after token.

    output.push(drawn)        # the text that became final; finds the token that ends the output
    output.choice(reason)     # the generated choice in the form that the caller gets

A Generation is one choice; a BeamGeneration is a beam search. A caller that asks for logits gets them in its Keep.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from genbatch.actors.batcher.beam_search import BeamSearch
from genbatch.actors.batcher.messages import Keep
from genbatch.actors.batcher.requests import Books, Evaluated, Planned, Request, Sequence
from genbatch.actors.scheduling.request import Phase
from genbatch.nif.errors import NativeError
from genbatch.nif.runner import Entry, Logits, Rows, host_copy, on_host
from genbatch.nif.sampling.prompt_lookup import PromptLookup
from genbatch.nif.sampling.sampler import Constraint, Sampled, SampleFault, SamplerState, token_logprobs
from genbatch.nif.text.detokenizer import StopMatcher, open_detokenizer
from genbatch.nif.text.tools import Parts, Reader
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest
from genbatch.proto.messages import (
    Choice,
    DrawnTokens,
    FinishReason,
    GenerateRequest,
    Result,
    Token,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from genbatch.proto.validation import Grammar


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """Output beside the text that became final: thinking, and pieces of tool calls."""

    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


_NOTHING = ParsedOutput()


@dataclass(frozen=True, slots=True)
class Reading:
    """How to separate calls and thinking from an output's text.

    Args:
        reader: makes the reader of one answer.
        shown: special tokens that are the format's marks.
        several: whether an answer may have several calls; else it ends where a second call begins.
    """

    reader: Callable[[], Reader]
    shown: frozenset[int]
    several: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """The contents and the end conditions of an output.

    Args:
        max_tokens: tokens after which the output ends with "length".
        stop: strings that end the output and are not part of it.
        stop_ids: token ids that end the output; their text is not part of it.
        min_tokens: tokens before which no stop string ends it.
        echo: text in front of the output.
        wants_logprobs: whether to keep each token's log-prob.
        keep_stop: whether the stop string that ended the output is part of the text.
        shown: special tokens with visible text.
        reading: separates calls and thinking from the text; None where all output is text.
    """

    max_tokens: int
    stop: ListOf[str] = ()
    stop_ids: Collection[int] = ()
    min_tokens: int = 0
    echo: str = ""
    wants_logprobs: bool = False
    keep_stop: bool = False
    shown: frozenset[int] = frozenset()
    reading: Reading | None = None


class Output:
    """Turns drawn tokens into text; a piece never splits a code point and never shows a part of a stop string.

    Args:
        tokenizer: the backend that decodes.
        prompt_tokens: the tokens before the output.
        rules: the contents and the end conditions.
    """

    __slots__ = ("_calls", "_detokenizer", "_num_reasoning", "_prompt_tokens", "_reader", "_reasoning", "_rules",
                 "_stop", "_tokenizer", "finish_reason", "logprobs", "parsed", "text_parts", "token_ids")  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: ListOf[int], rules: OutputRules) -> None:
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._rules = rules
        reading = rules.reading
        shown = rules.shown if reading is None else rules.shown | reading.shown
        self._detokenizer = open_detokenizer(tokenizer, prompt_tokens, shown=shown)
        self._reader = reading.reader() if reading is not None else None
        self._reasoning: list[str] = []
        self._num_reasoning = 0  # tokens up to the end of the thinking
        self._calls: list[list[str]] = []  # id, name and the pieces of the arguments
        self._stop = StopMatcher(rules.stop, keep=rules.keep_stop)
        self.parsed = _NOTHING  # parsed output of the last token
        self.token_ids: list[int] = []
        self.text_parts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None

    def blank(self) -> "Output":
        """Return an empty output of the same kind, for a beam."""
        return Output(self._tokenizer, self._prompt_tokens, self._rules)

    def push(self, drawn: Sampled) -> str:
        """Take the next token; return the text that became final, and set `finish_reason` after the last token."""
        token_id, rules, token_ids = drawn.token_id, self._rules, self.token_ids
        token_ids.append(token_id)
        if rules.wants_logprobs:
            assert drawn.logprob is not None, "log-probs were asked for and not computed"
            self.logprobs.append(TokenLogprob(token_id=token_id, logprob=drawn.logprob, top=dict(drawn.top)))
        piece, ended = "", token_id in rules.stop_ids
        if not ended:
            piece = self._detokenizer.push(token_id)
            if rules.stop:
                piece, ended = self._match(piece)
        if ended:
            self.finish_reason = "stop"
        elif len(token_ids) >= rules.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            piece += self._flush()
        if self._reader is not None:
            piece = self._take_apart(self._reader, piece)
        if len(token_ids) == 1:
            piece = rules.echo + piece
        self.text_parts.append(piece)
        return piece

    def keep_call_ids(self, call_ids: ListOf[str]) -> None:
        """Give the first calls the ids that were already shown to the caller."""
        for call, call_id in zip(self._calls, call_ids, strict=False):
            call[0] = call_id

    def end(self) -> None:
        """End an output without tokens: its text is the echo alone."""
        self.text_parts.append(self._rules.echo)
        self.finish_reason = "length"

    def _match(self, text: str) -> tuple[str, bool]:
        return self._stop.push(text, may_end=len(self.token_ids) >= self._rules.min_tokens)

    def _take_apart(self, reader: Reader, piece: str) -> str:
        """Return the text in a piece; `parsed` gets the rest of the piece."""
        parts = [reader.push(piece)]
        if self.finish_reason is not None:
            parts.append(reader.finish())
        self._keep(parts)
        return "".join(part.text for part in parts)

    def _keep(self, parts: ListOf[Parts]) -> None:
        reasoning = "".join(part.reasoning for part in parts)
        pieces = [piece for part in parts for piece in part.calls]
        reading = self._rules.reading
        if reading is not None and not reading.several and any(piece.index for piece in pieces):
            pieces = [piece for piece in pieces if not piece.index]
            self.finish_reason = "stop"
        if reasoning:
            self._reasoning.append(reasoning)
            self._num_reasoning = len(self.token_ids)
        for piece in pieces:
            if piece.id is not None:
                self._calls.append([piece.id, piece.name or ""])
            self._calls[piece.index].append(piece.arguments)
        self.parsed = _NOTHING
        if reasoning or pieces:
            deltas = tuple(
                ToolCallDelta(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)
                for piece in pieces
            )
            self.parsed = ParsedOutput(reasoning, deltas)

    def _flush(self) -> str:
        """Return the text held back so far; the end may show that it contains a complete stop string."""
        tail, stopped = self._match(self._detokenizer.flush())
        if not stopped:
            tail += self._stop.flush()
        if self._stop.stopped:
            self.finish_reason = "stop"
        return tail

    def choice(self, finish_reason: FinishReason, *, only_shown: bool = False) -> Choice:
        """Return the generated choice in the form that the caller gets.

        Args:
            finish_reason: the reason for the end, if no token has ended the output; text held back is then included.
            only_shown: leave out text that was held back. A stream can no longer show it, and the text must equal the
                stream's joined pieces.
        """
        if self.finish_reason is None and not only_shown:
            rest = self._flush() if self.token_ids else self._rules.echo
            if self._reader is not None:
                parts = [self._reader.push(rest), self._reader.finish()]
                self._keep(parts)
                rest = "".join(part.text for part in parts)
            self.text_parts.append(rest)
        reason = self.finish_reason or finish_reason
        return Choice(
            text="".join(self.text_parts),
            token_ids=self.token_ids,
            finish_reason="tool_calls" if self._calls and reason == "stop" else reason,
            reasoning="".join(self._reasoning),
            tool_calls=tuple(
                ToolCall(id=call_id, name=name, arguments="".join(pieces)) for call_id, name, *pieces in self._calls
            ),
            logprobs=self.logprobs if self._rules.wants_logprobs else None,
            stop_string=self._stop.stop_string,
            reasoning_tokens=self._num_reasoning,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest(Request):
    """A request for text.

    Args:
        params: the validated message.
        on_token: called once per token, must not block; None for a request without a stream.
        shows, drawn, keep, beam_width: see Generate.
        grammar: the grammar that its answers must match.
    """

    params: GenerateRequest
    on_token: Callable[[Token], None] | None = None
    shows: bool = True
    drawn: tuple[DrawnTokens, ...] = ()
    beam_width: int = 1
    keep: Keep | None = None
    grammar: Grammar | None = None
    constraints: list[Constraint] = field(default_factory=list)  # one per sequence; empty without a grammar
    echo: str = ""  # see Prompt
    prompt_logprobs: list[TokenLogprob | None] | None = None
    choices: dict[int, Choice] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "text_completion" if self.params.messages is None else "chat"

    @property
    def generations(self) -> "list[Generation]":
        """The request's sequences."""
        return cast("list[Generation]", self.sequences)

    @property
    def scores_prompt(self) -> bool:
        """True if logits are read at every token of the prompt."""
        return self.params.scores_prompt or self.keeps_context

    @property
    def keeps_context(self) -> bool:
        """True if the caller gets the logits after every token of the prompt."""
        return self.keep is not None and self.keep.context

    @property
    def keeps_generation(self) -> bool:
        """True if the caller gets the logits that every token was drawn from."""
        return self.keep is not None and self.keep.generation

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
            prompt_token_ids=list(self.prompt_tokens) if self.params.return_prompt_token_ids else None,
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
    lookup: PromptLookup | None = None  # made by the first run that may draft
    forced_chance: float = 0.9  # the estimated share of the tokens forced by its grammar that it draws
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
        # Another thread makes a slow mask, see `Grammars`. Kept logits are read after every step.
        return not self.sampler.is_slow and not self.request.keeps_generation

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
        request = self.request
        return planned.entry.logits is Logits.ALL or request.keeps_context or request.keeps_generation

    def read(self, planned: Planned, rows: Rows, drawn: Sampled | SampleFault | None) -> Evaluated:
        keeps = self.request.keeps_context or self.request.keeps_generation
        # Copy the rows: a runner may overwrite them in its next step.
        kept = host_copy(rows) if keeps and len(rows) else None
        return Evaluated(drawn, self._prompt_logprobs(planned.entry, rows), kept)

    def _prompt_logprobs(self, entry: Entry, rows: Rows) -> list[TokenLogprob]:
        """Return log-probs of the prompt tokens that follow this chunk's tokens; rows are the chunk's logits."""
        num_top = self.request.params.prompt_logprobs
        if entry.logits is not Logits.ALL or num_top is None:
            return []
        following = self.tokens[entry.n_past + 1 : min(entry.n_past + len(entry.tokens) + 1, self.num_prompt_tokens)]
        scored = token_logprobs(on_host(rows[: len(following)]), np.array(following, np.int64), num_top)
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
        if request.keep is not None and request.keep.context and evaluated.rows is not None:
            first = entry.n_past + len(entry.tokens) - len(evaluated.rows)
            request.keep.add_context(first, evaluated.rows[: max(0, self.num_prompt_tokens - first)])

    def book_drawn(
        self, drawn: Sampled | SampleFault, books: Books, rows: npt.NDArray[np.float32] | None = None
    ) -> None:
        """Book a drawn token and the row that it was drawn from; fail the request if the draw failed."""
        if drawn.failed:
            books.fail(self.request, self.request.refusal(drawn))
        elif self.request.abandoned is None:
            keep = self.request.keep
            if keep is not None and keep.generation and rows is not None:
                keep.add_generation(self.choice, rows[-1])
            if self.phase is Phase.PREFILLING:
                if self.request.params.max_tokens == 0:  # only the prompt was requested
                    self.output.end()
                    books.finish(self, "length")
                    return
                self.move(Phase.DECODING)
            self._take(drawn, books)

    def _take(self, drawn: Sampled, books: Books) -> None:
        """Count a token, make text of it and call the caller's `on_token`: one function, as all tokens pass it."""
        request, output, index = self.request, self.output, self.num_generated
        self.num_generated = index + 1
        books.generated(self)
        self.tokens.append(drawn.token_id)
        try:
            text = output.push(drawn)
        except NativeError as error:  # the model's tokenizer has no text for these tokens
            books.fail(request, EngineError(str(error)))
            return
        if request.on_token is not None and index >= self.num_shown:
            parsed = output.parsed
            token = Token(
                text=text,
                token_id=drawn.token_id,
                index=index,
                logprob=drawn.logprob,
                choice=self.choice,
                top=dict(drawn.top),
                reasoning=parsed.reasoning,
                tool_calls=parsed.tool_calls,
            )
            try:
                request.on_token(token)
            # guard: a caller's function
            except Exception as error:  # a fault of the caller's function ends its request only
                self.raised = True
                books.fail(request, EngineError(f"on_token raised {error!r}"))
                return
        if output.finish_reason is not None:
            books.finish(self, output.finish_reason)


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
            keeps = self.request.keeps_generation and evaluated.rows is not None
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
            # A beam that ended by itself has its own reason. The others get the reason for which the search ended.
            choices[index] = output.choice(reason)
            if self.request.keep is not None:
                self.request.keep.set_generation(index, beam.logits)
        self._num_completed = sum(len(choice.token_ids) for choice in choices.values())
        return choices
