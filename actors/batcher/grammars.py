"""Grammars: compiles what answers must match and makes slow ones' masks, beside the event loop and the steps."""

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

# For a client, who cannot install anything: its operator can.
# Before the next grammar its thread rests as long as the last one took, up to this. Else a flood of small ones has all
# slots filled in every step: a step of eight sequences that begin takes 2.4 times that of two.
MAX_REST_S = 0.05


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request's grammar was compiled, or refused."""

    request: GenerationRequest
    constraints: outcome.Outcome[list[Constraint]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sequence that sat out may be planned again."""

    sequence: Sequence


class Grammars:
    """Nothing of it exists before the first request with a grammar: no thread, no process, no import.

    Args:
        model: whose tokens.
        max_s: seconds of processor time that compiling one grammar may take.
        send: takes Compiled and Prepared, on the event loop.
        open_worker: makes its threads.
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
        self._turns: dict[str, deque[GenerationRequest]] = {}  # who waits, by account; accounts take turns
        self._is_busy = False
        self._is_closed = False
        self._live: list[Sequence] = []
        self._sitting_out: set[Sequence] = set()

    def compile(self, request: GenerationRequest) -> None:
        """Answers with Compiled, in its account's turn: many slow grammars of one client do not delay another's."""
        if self._is_closed:
            return
        waiting = self._turns.setdefault(request.account, deque())
        for left in [one for one in waiting if one.replied]:  # else who asks and leaves again and again piles them up
            waiting.remove(left)
            self._send(Compiled(left, outcome.Value([])))
        waiting.append(request)
        if not self._is_busy:
            self._compile_next()

    def watch(self, sequences: ListOf[Sequence]) -> None:
        """Takes note of sequences that have a constraint."""
        self._live += sequences

    def sitting_out(self) -> frozenset[int]:
        """Ids of those whose next mask takes long and is under way: planned without them, a step waits for nobody."""
        if not self._live:
            return frozenset()
        self._live = [sequence for sequence in self._live if sequence.phase is not Phase.FINISHED]
        for sequence in self._live:
            constraint = sequence.constraint
            if constraint is not None and constraint.is_slow and sequence not in self._sitting_out:
                self._prepare(sequence, constraint)
        return frozenset(sequence.request_id for sequence in self._sitting_out)

    def prepared(self, message: Prepared) -> None:
        """Lets the sequence take part again."""
        self._sitting_out.remove(message.sequence)

    async def close(self) -> None:
        """Ends the threads and the compiler's process; what waits for them is answered by nobody."""
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
            self._turns[account] = waiting  # behind the others
        self._compiling = worker = self._compiling or self._open_worker("genbatch-grammar")
        began = worker.now()

        def compiled(result: "outcome.Outcome[list[Constraint]]") -> None:
            rest_s = min(worker.now() - began, MAX_REST_S)
            self._send(Compiled(request, result))
            worker.submit(time.sleep, rest_s, on_done=lambda _: self._compile_next())

        worker.submit(self._compile, request, on_done=compiled)

    def _compile(self, request: GenerationRequest) -> list[Constraint]:
        """Runs on the compiling thread."""
        grammar, wanted = request.grammar, request.wanted
        assert grammar is not None
        if request.replied:  # its caller left while it waited
            return []
        # When the first grammar comes.
        from genbatch.nif.sampling.grammar import branches
        from genbatch.nif.sampling.grammar_compiler import GrammarCompiler, GrammarError

        if self._compiler is None:
            self._compiler = GrammarCompiler(self._model, self._max_s)
        owner, answer, kind, text = prefix_key(wanted.tenant), grammar.answer, str(grammar.kind), grammar.text
        if answer is not None:
            try:  # by itself first: else nobody could say which of the two is at fault
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
