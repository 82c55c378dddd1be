"""GrammarCompiler: compiles grammars for answers, tries each in a child process first, and caches the results."""

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from llguidance import LLTokenizer

from genbatch.nif.errors import NativeError
from genbatch.nif.limited_process import LimitedProcess
from genbatch.nif.sampling.grammar import GrammarConstraint, build_tokenizer, compile_matcher

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model

# Compiled grammars that stay in memory.
MAX_CACHED = 64
MAX_MEMORY = 512 * 2**20  # bytes by which the child process may grow for one grammar
_NO_END = "the model has no end-of-sequence token, which is what ends an answer that matches"


class GrammarError(NativeError):
    """A schema, grammar or regular expression that cannot be compiled; the message says why."""


class GrammarCompiler:
    """Compiles grammars for one model. It is slow and not thread-safe, so give it a thread of its own.

    Args:
        model: provides the tokenizer and the end-of-sequence tokens.
        max_s: the limit of processor time for compiling one grammar, in seconds.
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
        self._child = LimitedProcess("genbatch.nif.sampling.grammar_child")
        self._tokenizer: LLTokenizer | None = None
        self._cached: OrderedDict[bytes, GrammarConstraint | str] = OrderedDict()  # str: the reason of a refusal

    def prepare(self) -> None:
        """Build what the first grammar needs, so that it takes no longer than later ones.

        llguidance builds its tokenizer under the interpreter's lock, so no other thread of this process goes on.
        """
        if self._has_end:
            self._tokenizer = self._tokenizer or build_tokenizer(self._settings)
            self._start()

    def compile(self, kind: str, text: str, owner: bytes, number: int) -> list[GrammarConstraint]:
        """Return constraints for `number` sequences, prepared for their first token.

        Args:
            kind: "json_schema", "grammar" (Lark or GBNF), "lark" (Lark for certain), "regex" or "branches" (see
                `branches`).
            owner: the grammar's owner; one owner's cached grammars are invisible to others, also by timing.

        Raises:
            GrammarError: the grammar is invalid, or exceeds a limit.
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
        """End the child process."""
        self._child.end()

    def _compile(self, kind: str, text: str) -> GrammarConstraint | str:
        """Compile a constraint to fork; returns the reason of a refusal instead if there is one."""
        grammar, refusal = self._check(kind, text)
        if grammar is None:
            return refusal
        self.prepare()
        assert self._tokenizer is not None
        constraint = compile_matcher(self._tokenizer, grammar)
        constraint.prepare()
        return constraint if constraint.fault is None else constraint.fault

    def _start(self) -> None:
        """Start the child process, unless it runs, and wait until it can compile."""
        if not self._child.is_running:
            self._child.start(self._settings)

    def _check(self, kind: str, text: str) -> tuple[str | None, str]:
        """Compile a grammar in the child process first; return it in llguidance's form, or None and the refusal."""
        self._start()
        job = {"kind": kind, "text": text}
        answer: tuple[str | None, str] | None = self._child.ask(job, limit_s=self._max_s, memory=MAX_MEMORY)
        return answer or (None, f"takes more than {self._max_s:g} s or {MAX_MEMORY >> 20} MiB to compile")
