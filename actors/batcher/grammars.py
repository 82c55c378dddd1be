"""Grammars: compile the grammars of answers and make slow masks, off the event loop and beside the steps."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import outcome

from genbatch.actors.batcher.generation import GenerationRequest
from genbatch.actors.batcher.requests import Sequence
from genbatch.actors.runtime.worker import Worker
from genbatch.actors.scheduling.request import Phase
from genbatch.nif.kv.block_pool import prefix_key
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.sampling.sampler import Constraint
from genbatch.proto.errors import InvalidRequest

if TYPE_CHECKING:  # imports llguidance, which is an extra
    from genbatch.nif.sampling.grammar_compiler import GrammarCompiler

# The compiling thread rests after each grammar as long as the grammar took, up to this. Otherwise a flood of small
# grammars fills all slots in every step: a step in which eight sequences begin takes 2.4 times that of two.
MAX_REST_S = 0.05


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request's grammar was compiled, or refused."""

    request: GenerationRequest
    constraints: outcome.Outcome[list[Constraint]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sequence without a mask may be planned again."""

    sequence: Sequence


class Grammars:
    """Compile grammars and make slow masks; the first grammar starts the threads, the process and the imports.

    Args:
        model: the model that defines the tokens.
        max_s: seconds of processor time that compiling one grammar may take.
        send: takes Compiled and Prepared, on the event loop.
        open_worker: makes the threads.
    """

    def __init__(
        self,
        model: Model,
        max_s: float,
        send: Callable[[Compiled | Prepared], None],
        open_worker: Callable[[str], Worker] = Worker,
    ) -> None:
        self._model = model
        self._max_s = max_s
        self._send = send
        self._open_worker = open_worker
        self._compiler: GrammarCompiler | None = None  # touched on the compiling thread only
        self._compiling: Worker | None = None
        self._preparing: Worker | None = None
        self._turns: dict[str, deque[GenerationRequest]] = {}  # waiting requests by account; accounts take turns
        self._is_busy = False
        self._is_closed = False
        self._live: list[Sequence] = []
        self._sitting_out: set[Sequence] = set()

    def compile(self, request: GenerationRequest) -> None:
        """Compile a grammar in its account's turn, so that one client's slow grammars delay no other client."""
        if self._is_closed:
            return
        waiting = self._turns.setdefault(request.account, deque())
        for left in [one for one in waiting if one.replied]:  # a client that cancels and retries must not pile these up
            waiting.remove(left)
            self._send(Compiled(left, outcome.Value([])))
        waiting.append(request)
        if not self._is_busy:
            self._compile_next()

    def watch(self, sequences: ListOf[Sequence]) -> None:
        """Add sequences that have a constraint."""
        self._live += sequences

    def sitting_out(self) -> frozenset[int]:
        """Return the ids of sequences with a slow mask in work; a step without them waits for no mask."""
        if not self._live:
            return frozenset()
        self._live = [sequence for sequence in self._live if sequence.phase is not Phase.FINISHED]
        for sequence in self._live:
            constraint = sequence.constraint
            if constraint is not None and constraint.is_slow and sequence not in self._sitting_out:
                self._prepare(sequence, constraint)
        return frozenset(sequence.request_id for sequence in self._sitting_out)

    def prepared(self, message: Prepared) -> None:
        """Let the sequence be planned again."""
        self._sitting_out.remove(message.sequence)

    async def close(self) -> None:
        """End the threads and the compiler's process; waiting requests get no answer."""
        self._is_closed = True
        self._turns.clear()
        if self._compiling is not None:
            await self._compiling.run(self._close_compiler)
            await self._compiling.close()
        if self._preparing is not None:
            await self._preparing.close()

    def _prepare(self, sequence: Sequence, constraint: Constraint) -> None:
        self._preparing = self._preparing or self._open_worker("genbatch-masks")
        self._sitting_out.add(sequence)
        self._preparing.submit(constraint.prepare, on_done=lambda _: self._send(Prepared(sequence)))

    def _compile_next(self) -> None:
        self._is_busy = bool(self._turns)
        if not self._turns:
            return
        account, waiting = next(iter(self._turns.items()))
        request = waiting.popleft()
        del self._turns[account]
        if waiting:
            self._turns[account] = waiting  # behind other accounts
        self._compiling = worker = self._compiling or self._open_worker("genbatch-grammar")
        began = worker.now()

        def compiled(result: "outcome.Outcome[list[Constraint]]") -> None:
            rest_s = min(worker.now() - began, MAX_REST_S)
            self._send(Compiled(request, result))
            worker.submit(time.sleep, rest_s, on_done=lambda _: self._compile_next())

        worker.submit(self._compile, request, on_done=compiled)

    def _compile(self, request: GenerationRequest) -> list[Constraint]:
        """Compile on the compiling thread."""
        grammar, wanted = request.grammar, request.wanted
        assert grammar is not None
        if request.replied:  # the caller left while the request waited
            return []
        # Import these with the first grammar.
        from genbatch.nif.sampling.grammar import branches
        from genbatch.nif.sampling.grammar_compiler import GrammarCompiler, GrammarError

        if self._compiler is None:
            self._compiler = GrammarCompiler(self._model, self._max_s)
        owner, answer, kind, text = prefix_key(wanted.tenant), grammar.answer, str(grammar.kind), grammar.text
        if answer is not None:
            try:  # compile the answer's schema alone first, so that an error names the field at fault
                self._compiler.compile(answer.kind, answer.text, owner, 0)
            except GrammarError as error:
                raise InvalidRequest(answer.field, str(error)) from None
            kind, text = "branches", branches(grammar.text, answer.kind, answer.text)
        try:
            return [*self._compiler.compile(kind, text, owner, wanted.n)]
        except GrammarError as error:
            raise InvalidRequest(grammar.field, str(error)) from None

    def _close_compiler(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
