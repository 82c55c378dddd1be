"""Grammars: a constraint that follows an answer token by token, and conversion to llguidance's form."""

import json
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import fill_next_token_bitmask

from genbatch.nif.text.answer_grammar import readable_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# If a sequence's last mask took longer, its next mask is prepared beside the steps and other sequences do not wait.
SLOW_S = 0.001
# Seconds of processor time for a sequence's masks: a base, and an allowance per token. Ordinary schemas take 0.00005 s
# per token, and a schema of 200 optional properties takes 0.0005 s.
FIRST_S = 0.25
PER_TOKEN_S = 0.002
# Seconds of processor time for finding forced tokens, in place of `FIRST_S`.
FORCING_S = 0.01
MAX_MESSAGE = 300  # characters; llguidance's messages quote the whole grammar
# Parts of llguidance's messages, and what they mean for a caller.
_PLAIN = {
    "<non-verbose/>": "",
    "NoExtensionBias": "no token may come next",
    "Unimplemented keys:": "these keywords are not supported:",
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "Write anyOf, or require a property with a const of its own in each branch"
    ),
}


class GrammarConstraint:
    """Tracks one sequence's state in its grammar. Implements `Constraint`.

    Args:
        matcher: a new matcher over the model's tokenizer.
        num_words: words of a mask, 32 tokens each; the mask covers every token that the matcher knows.
    """

    __slots__ = ("_accepted", "_fault", "_forced", "_forcing_s", "_is_prepared", "_last_s", "_mask", "_matcher",
                 "_num_tokens", "_spent_s")  # fmt: skip

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((1, num_words), np.int32)
        self._accepted: list[int] = []  # not consumed yet
        self._num_tokens = 0
        self._is_prepared = False
        self._fault: str | None = None
        self._spent_s = 0.0
        self._last_s = 0.0
        self._forced: list[int] = []  # the rest of the forced tokens that were computed last
        self._forcing_s = 0.0

    def fork(self) -> Self:
        """Return an independent copy of this constraint."""
        twin = type(self)(self._matcher.deep_copy(), self._mask.shape[1])
        twin._mask[:] = self._mask
        twin._accepted = list(self._accepted)
        twin._num_tokens = self._num_tokens
        twin._is_prepared = self._is_prepared
        twin._fault = self._fault
        twin._spent_s = self._spent_s
        twin._last_s = self._last_s
        twin._forced = list(self._forced)
        twin._forcing_s = self._forcing_s
        return twin

    @property
    def fault(self) -> str | None:
        return self._fault

    @property
    def is_slow(self) -> bool:
        return not self._is_prepared and self._last_s > SLOW_S

    @property
    def allowed(self) -> npt.NDArray[np.int32]:
        row: npt.NDArray[np.int32] = self._mask[0]
        return row

    def accept(self, token_id: int) -> None:
        self._accepted.append(token_id)
        self._num_tokens += 1
        self._is_prepared = False
        self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []

    def prepare(self) -> None:
        if self._is_prepared:
            return
        # Measure processor time, because on a busy machine wall time would make a grammar look expensive.
        started = time.thread_time()
        if self._accepted:
            self._matcher.consume_tokens(self._accepted)
            self._accepted = []
        if not self._matcher.is_error():
            fill_next_token_bitmask(self._matcher, self._mask)
        self._last_s = time.thread_time() - started
        self._spent_s += self._last_s
        if self._matcher.is_error():
            self._fault = f"cannot be followed any further: {one_line(self._matcher.get_error())}"
        elif self._spent_s > FIRST_S + PER_TOKEN_S * self._num_tokens:
            self._fault = f"takes too long to follow: {self._spent_s:.1f} s for {self._num_tokens} tokens"
        self._is_prepared = True

    def forced(self) -> list[int]:
        # The matcher computes the whole forced text at once, however long it is. So the rest of it is kept, and its
        # time has a limit.
        if not self._forced and self._fault is None and self._forcing_s <= FORCING_S + PER_TOKEN_S * self._num_tokens:
            started = time.thread_time()
            self._forced = self._matcher.compute_ff_tokens()
            if not self._forced and np.bitwise_count(self._mask).sum() == 1:  # such as the end token after the answer
                self._forced = np.flatnonzero(np.unpackbits(self._mask.view(np.uint8), bitorder="little")).tolist()
            self._forcing_s += time.thread_time() - started
        return self._forced


def one_line(message: str) -> str:
    """Shorten llguidance's message to one line for an error message."""
    _, found, reason = message.rpartition("failed to compile JSON schema: ")
    if found:  # drop the quoted lines: the caller has not written the grammar that the schema is a part of
        message = re.split(r"\n *\d+ \| ", reason)[0]
    for theirs, ours in _PLAIN.items():
        message = message.replace(theirs, ours)
    text = " ".join(message.split())
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "…"


# Limits of the items and states for one mask, about a few milliseconds of work. Beyond them the sequence fails.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=2_000,
    max_items_in_row=1_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# Allow only one way to write JSON, on one line: with free whitespace, weak models write whitespace without end.
# "lenient" would ignore unknown keywords of a schema.
_JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}


def build_tokenizer(settings: Mapping[str, Any]) -> LLTokenizer:
    """Build llguidance's tokenizer from a model's tokenizer.

    Args:
        settings: "tokenizer", the JSON of a Hugging Face tokenizer; "n_vocab"; "eos_token", a list of ids.
    """
    return LLTokenizer(settings["tokenizer"], n_vocab=settings["n_vocab"], eos_token=settings["eos_token"])


def convert(kind: str, text: str) -> str:
    """Convert a grammar to llguidance's own form.

    Raises:
        ValueError: the grammar cannot be read.
    """
    try:
        if kind == "json_schema":
            schema = json.loads(text)
            readable = readable_schema(schema)
            text = text if readable == schema else json.dumps(readable)
            return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
        if kind == "lark":
            return grammar_from("lark", text)
        if kind == "branches":
            parts = json.loads(text)
            return json.dumps(
                {"grammars": [{"lark_grammar": parts["lark"]}, _named_answer(parts["kind"], parts["text"])]}
            )
        return grammar_from("gbnf" if kind == "grammar" else "regex", text)
    except ValueError as error:
        raise ValueError(one_line(str(error))) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def branches(lark: str, kind: str, text: str) -> str:
    """Build the text of a grammar of the kind "branches".

    The Lark grammar refers to the other grammar, of kind `kind`, as `@answer`.
    """
    return json.dumps({"lark": lark, "kind": kind, "text": text})


def _named_answer(kind: str, text: str) -> dict[str, Any]:
    """Convert a grammar to the part `@answer` of another grammar."""
    grammar = convert(kind, text)
    try:
        (part,) = json.loads(grammar)["grammars"]
    except ValueError:  # the grammar is still Lark text
        part = {"lark_grammar": grammar}
    return {**part, "name": "answer"}


def why_unreadable(kind: str, text: str) -> str:
    """Return the fault of a grammar without a model, "" if there is none. The check has no time limit."""
    try:
        fault = LLMatcher.validate_grammar(convert(kind, text))
    except ValueError as error:
        return str(error)
    return one_line(fault) if fault else ""


def compile_matcher(tokenizer: LLTokenizer, grammar: str) -> GrammarConstraint:
    """Compile a constraint from a grammar in llguidance's form.

    Raises:
        ValueError: the grammar is invalid, or exceeds a limit.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(one_line(matcher.get_error()))
    return GrammarConstraint(matcher, (tokenizer.vocab_size + 31) // 32)
