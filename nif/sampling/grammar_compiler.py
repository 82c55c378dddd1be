"""GrammarCompiler: JSON schemas, grammars and regular expressions to constraints on a model's tokens."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from genbatch.nif.errors import NativeError
from genbatch.nif.sampling.grammar_checker import GrammarChecker
from genbatch.nif.sampling.grammar_constraint import GrammarConstraint, one_line

if TYPE_CHECKING:  # the checker's process imports this file, and does without torch
    from llguidance._lib import JsonCompileOptions

    from genbatch.nif.models.model import Model

MAX_CACHED = 64
# How many items or states one mask may take before its sequence fails; a few milliseconds' worth.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=2_000,
    max_items_in_row=1_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# One way to write JSON, on one line: where whitespace is free, weak models write it without end. "lenient" would let
# keywords of a schema pass unread.
_JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
_NO_END = "the model has no end-of-sequence token, which is what ends an answer that matches"


class GrammarError(NativeError):
    """A schema, grammar or regular expression that cannot be compiled; the message says why."""


class GrammarCompiler:
    """Compiles for one model; not thread-safe, and slow: for a thread of its own.

    Args:
        model: whose tokenizer and end-of-sequence tokens.
        max_s: seconds of processor time that compiling one grammar may take.
    """

    def __init__(self, model: "Model", max_s: float) -> None:
        self._max_s = max_s
        self._has_end = bool(model.eos_token_ids)
        width = max(model.vocab_size, model.tokenizer.vocab_size)
        self._settings = {
            "tokenizer": model.tokenizer.backend.to_str(),
            "n_vocab": width,
            "eos_token": sorted(model.eos_token_ids) or None,
        }
        self._checker = GrammarChecker(self._settings)
        self._tokenizer: LLTokenizer | None = None
        self._cached: OrderedDict[bytes, GrammarConstraint | str] = OrderedDict()  # str: why it was refused

    def compile(self, kind: str, text: str, owner: bytes, number: int) -> list[GrammarConstraint]:
        """Constraints for `number` sequences, prepared for their first token.

        Args:
            kind: "json_schema", "grammar" (Lark or GBNF), "lark" (Lark for certain) or "regex".
            owner: whose grammar; what one owner compiled is not found, nor timed, by another.

        Raises:
            GrammarError: it is invalid, or beyond a limit.
        """
        if not self._has_end:
            raise GrammarError(_NO_END)
        key = hashlib.sha256(b"\0".join((owner, kind.encode(), text.encode()))).digest()
        known = self._cached.get(key)
        if known is None:
            known = self._cached[key] = self._compile(kind, text)
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        self._cached.move_to_end(key)
        if isinstance(known, str):
            raise GrammarError(known)
        return [known.fork() for _ in range(number)]

    def close(self) -> None:
        """Ends the checker's process."""
        self._checker.close()

    def _compile(self, kind: str, text: str) -> GrammarConstraint | str:
        """A constraint to fork, or why there is none."""
        grammar, refusal = self._checker.check(kind, text, self._max_s)
        if grammar is None:
            return refusal
        if self._tokenizer is None:
            self._tokenizer = build_tokenizer(self._settings)
        constraint = compile_matcher(self._tokenizer, grammar)
        constraint.prepare()
        return constraint if constraint.fault is None else constraint.fault


def build_tokenizer(settings: Mapping[str, Any]) -> LLTokenizer:
    """llguidance's view of a tokenizer.

    Args:
        settings: "tokenizer", the JSON of a Hugging Face tokenizer; "n_vocab"; "eos_token", a list of ids.
    """
    return LLTokenizer(settings["tokenizer"], n_vocab=settings["n_vocab"], eos_token=settings["eos_token"])


def convert(kind: str, text: str) -> str:
    """A grammar in llguidance's own form.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
        if kind == "lark":
            return grammar_from("lark", text)
        return grammar_from("gbnf" if kind == "grammar" else "regex", text)
    except ValueError as error:
        raise ValueError(one_line(str(error))) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def why_unreadable(kind: str, text: str) -> str:
    """What is wrong with a grammar whatever the model, for its own author, who waits as long as it takes; "" if
    nothing is."""
    try:
        fault = LLMatcher.validate_grammar(convert(kind, text))
    except ValueError as error:
        return str(error)
    return one_line(fault) if fault else ""


def compile_matcher(tokenizer: LLTokenizer, grammar: str) -> GrammarConstraint:
    """A constraint for a grammar in llguidance's form.

    Raises:
        ValueError: the grammar is invalid, or beyond a limit.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(one_line(matcher.get_error()))
    return GrammarConstraint(matcher, (tokenizer.vocab_size + 31) // 32)
