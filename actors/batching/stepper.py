"""Stepper: evaluates the forwards of a tick on the model's thread and books what they gave.

stepper.begin([[entry, ...], ...], repeats=False)
...                                                # each message that it sent comes back through `take`
if stepper.take(message): ...                      # all of them have ended
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import outcome
import trio

from genbatch.actors.batching.journal import Journal
from genbatch.actors.batching.open_requests import OpenRequests
from genbatch.actors.batching.run_ahead import Decoded, Drawn, RunAhead, steps_ahead
from genbatch.actors.batching.sequence import HeldPrompt, Sequence
from genbatch.actors.batching.slots import Slots, waiting_key
from genbatch.actors.batching.stall_watch import StallWatch
from genbatch.actors.batching.step import Evaluated, Planned, evaluate
from genbatch.actors.batching.step_commit import StepCommit
from genbatch.actors.batching.step_faults import EngineFault, StepFaults, free_memory
from genbatch.actors.batching.swap import Swap, run_copies
from genbatch.actors.runtime.worker import Worker
from genbatch.nif.context import Context
from genbatch.nif.errors import DeviceFault, OutOfBlocks
from genbatch.proto.errors import EngineError


@dataclass(frozen=True, slots=True)
class Stepped:
    """A forward has ended on the model's thread."""

    batch: list[Planned]
    result: outcome.Outcome[list[Evaluated]]


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run has ended on the model's thread: with its last step's draws, or None if those were told before."""

    run: RunAhead
    result: outcome.Outcome[Drawn | None]


StepMessage = Stepped | Decoded | RunEnded


class Stepper:
    """Has the context to itself from `begin` until `take` says that all has ended.

    Args:
        worker: the model's thread.
        ctx: evaluates.
        swap: KV to be copied before a step.
        slots, requests: for what a step that failed takes away.
        commit, journal, watch: where steps are booked.
        send: brings a message back to the actor that owns this.
    """

    def __init__(
        self,
        *,
        worker: Worker,
        ctx: Context,
        swap: Swap,
        slots: Slots,
        requests: OpenRequests,
        commit: StepCommit,
        journal: Journal,
        watch: StallWatch,
        send: Callable[[StepMessage], None],
    ) -> None:
        self._worker = worker
        self._ctx = ctx
        self._swap = swap
        self._slots = slots
        self._requests = requests
        self._commit = commit
        self._journal = journal
        self._watch = watch
        self._send = send
        self._groups: deque[list[Planned]] = deque()  # what is left to evaluate
        self._began = 0.0  # seconds on the event loop's clock, of the step under way
        self._run: RunAhead | None = None
        self._faults = StepFaults()

    def begin(self, groups: list[list[Planned]], *, repeats: bool) -> None:
        """Evaluates the groups one after another.

        Args:
            repeats: whether the same plan may be carried out again and again, so that steps need not wait for one.
        """
        self._groups.extend(groups)
        steps = steps_ahead(groups[0]) if repeats and len(groups) == 1 else 1
        if steps > 1:
            self._run_ahead(self._groups.popleft(), steps)
        else:
            self._step()

    def take(self, message: StepMessage) -> bool:
        """Books what the model's thread has done; returns whether nothing is under way any more."""
        match message:
            case Decoded(run, drawn):
                self._decoded(run, drawn)
                return False
            case Stepped(batch, result):
                return self._stepped(batch, result)
            case RunEnded(run, result):
                return self._run_ended(run, result)

    def hurry(self) -> None:
        """There is something to decide: a run ends with the step under way."""
        if self._run is not None:
            self._run.stop()

    # Single steps

    def _step(self) -> None:
        batch = self._groups.popleft()
        self._began = trio.current_time()
        self._worker.submit(
            self.evaluate,
            batch,
            [*([free_memory] if self._faults.frees_memory else []), *self._swap.take_copies()],
            on_done=lambda result: self._send(Stepped(batch, result)),
        )

    def evaluate(self, batch: list[Planned], copies: list[Callable[[], None]]) -> list[Evaluated]:
        """One forward; runs on the model's thread."""
        run_copies(copies)
        return evaluate(self._ctx, batch)

    def _stepped(self, batch: list[Planned], result: "outcome.Outcome[list[Evaluated]]") -> bool:
        now = trio.current_time()
        if isinstance(result, outcome.Error):
            self._split(batch, result.error)
        else:
            self._watch.restart(now)
            self._faults.succeeded()
            self._journal.stepped(batch, now - self._began)
            for planned, evaluated in zip(batch, result.unwrap(), strict=True):
                self._commit.book(planned, evaluated)
        while self._groups:
            self._groups[0] = [planned for planned in self._groups[0] if planned.owner.seq_id is not None]
            if self._groups[0]:
                self._step()
                return False
            self._groups.popleft()
        self._blame()
        return True

    def _split(self, batch: list[Planned], error: BaseException) -> None:
        """A step failed and left no trace: its parts are tried, until what is at fault stands alone."""
        if isinstance(error, DeviceFault):
            raise EngineFault(f"the engine cannot go on after {error!r}") from error
        if isinstance(error, OutOfBlocks) and len(self._slots.sequences) > 1:
            # The newest gives way, as a plan would have it; the rest is planned anew.
            self._groups.clear()
            self._slots.pause(max(self._slots.sequences.values(), key=waiting_key))
            return
        self._groups.extendleft(reversed(self._faults.parts(batch, error)))

    def _blame(self) -> None:
        """Ends those whose steps failed alone while others' went through."""
        for planned, error in self._faults.verdict():
            owner = planned.owner
            if owner.seq_id is None:
                continue  # its request has just failed through another of its sequences
            if isinstance(owner, HeldPrompt):
                self._slots.drop_held(owner)
            elif isinstance(owner, Sequence):
                self._requests.fail(owner.request, EngineError(f"the step failed: {error}"))

    # Runs

    def _run_ahead(self, batch: list[Planned], steps: int) -> None:
        """Lets the model's thread decode step after step."""
        self._began = trio.current_time()
        self._run = run = RunAhead(batch, steps, lambda decoded: self._worker.tell(self._send, decoded))
        self._requests.defer()
        self._worker.submit(
            run.evaluate,
            self._ctx,
            self._swap.take_copies(),
            on_done=lambda result: self._send(RunEnded(run, result)),
        )

    def _decoded(self, run: RunAhead, drawn: Drawn) -> None:
        """Books a step of a run, while its next step is under way."""
        now = trio.current_time()
        self._watch.restart(now)
        self._journal.stepped(run.batch, now - self._began)
        self._began = now
        self._commit.book_decodes(run.batch, drawn)
        if self._requests.overdue():
            run.stop()
        run.booked()

    def _run_ended(self, run: RunAhead, result: "outcome.Outcome[Drawn | None]") -> bool:
        self._run = None
        if isinstance(result, outcome.Error):  # its first step's: nothing of it was told
            self._requests.settle()
            return self._stepped(run.batch, result)
        drawn = result.unwrap()
        if drawn is not None:
            self._decoded(run, drawn)
        self._requests.settle()
        return True
