"""Output: turn drawn tokens into text, and find the token that ends it."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from tokenizers import Tokenizer

from genbatch.nif.sampling.sampler import Sampled
from genbatch.nif.text.detokenizer import Detokenizer, StopMatcher
from genbatch.nif.text.tools import Parts, Reader
from genbatch.proto.messages import Choice, FinishReason, TokenLogprob, ToolCall, ToolCallDelta


@dataclass(frozen=True, slots=True)
class Apart:
    """Output beside the text that became final: thinking, and pieces of tool calls."""

    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


_NOTHING = Apart()


@dataclass(frozen=True, slots=True)
class Reading:
    """The way to read an output with calls or thinking.

    Args:
        reader: makes the reader of one answer.
        shown: special tokens that are the format's marks.
        several: whether an answer may have several calls; else it ends where a second one begins.
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
        reading: separates calls and thinking from the text; None where all output is text.
    """

    max_tokens: int
    stop: ListOf[str] = ()
    stop_ids: Collection[int] = ()
    min_tokens: int = 0
    echo: str = ""
    wants_logprobs: bool = False
    keep_stop: bool = False
    reading: Reading | None = None


class Output:
    """Turns drawn tokens into text; a piece never splits a code point and never shows a part of a stop string.

    Args:
        tokenizer: the backend that decodes.
        prompt_tokens: the tokens before the output.
        rules: the contents and the end conditions.
    """

    __slots__ = ("_calls", "_detokenizer", "_num_reasoning", "_prompt_tokens", "_reader", "_reasoning", "_rules",
                 "_stop", "_tokenizer", "apart", "finish_reason", "logprobs", "text_parts", "token_ids")  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: ListOf[int], rules: OutputRules) -> None:
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._rules = rules
        reading = rules.reading
        shown = reading.shown if reading is not None else frozenset()
        self._detokenizer = Detokenizer(tokenizer, prompt_tokens, shown=shown)
        self._reader = reading.reader() if reading is not None else None
        self._reasoning: list[str] = []
        self._num_reasoning = 0  # tokens up to the end of the thinking
        self._calls: list[list[str]] = []  # id, name and the pieces of the arguments
        self._stop = StopMatcher(rules.stop, keep=rules.keep_stop)
        self.apart = _NOTHING  # parsed output of the last token
        self.token_ids: list[int] = []
        self.text_parts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None

    def blank(self) -> "Output":
        """Return an empty output of the same kind, for a beam."""
        return Output(self._tokenizer, self._prompt_tokens, self._rules)

    def push(self, drawn: Sampled) -> str:
        """Take the next token; return the text that became final, and set `finish_reason` after the last token."""
        token_id = drawn.token_id
        self.token_ids.append(token_id)
        if self._rules.wants_logprobs:
            assert drawn.logprob is not None, "log-probs were asked for and not computed"
            self.logprobs.append(TokenLogprob(token_id=token_id, logprob=drawn.logprob, top=dict(drawn.top)))
        ended = token_id in self._rules.stop_ids
        piece, stopped = ("", False) if ended else self._match(self._detokenizer.push(token_id))
        if ended or stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._rules.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            piece += self._flush()
        if self._reader is not None:
            piece = self._take_apart(self._reader, piece)
        if len(self.token_ids) == 1:
            piece = self._rules.echo + piece
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
        """Return the text in a piece; `apart` gets the rest of the piece."""
        found = [reader.push(piece)]
        if self.finish_reason is not None:
            found.append(reader.finish())
        self._keep(found)
        return "".join(parts.text for parts in found)

    def _keep(self, found: ListOf[Parts]) -> None:
        reasoning = "".join(parts.reasoning for parts in found)
        pieces = [piece for parts in found for piece in parts.calls]
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
        self.apart = _NOTHING
        if reasoning or pieces:
            deltas = tuple(
                ToolCallDelta(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)
                for piece in pieces
            )
            self.apart = Apart(reasoning, deltas)

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
                found = [self._reader.push(rest), self._reader.finish()]
                self._keep(found)
                rest = "".join(parts.text for parts in found)
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
            stop_string=self._stop.found,
            reasoning_tokens=self._num_reasoning,
        )
