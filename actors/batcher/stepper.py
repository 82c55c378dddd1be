"""Stepper: evaluates the forwards of a tick on the model's thread and books the results.

    stepper.begin([[entry, ...], ...], repeats=False)
    ...                                                # each message that it sends comes back through `take`
    if stepper.take(message): ...                      # all forwards have ended

RunAhead lets decode steps follow one another while there is nothing to decide. Where steps overlap, a run may open with
a step that has prompts. A sequence that ends leaves the run, and the others go on. StepFaults finds the request at
fault for a failed step. StepCommit books positions, tokens, text and ends.
"""

import gc
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from itertools import zip_longest
from typing import cast

import outcome
import trio

from genbatch.actors.batcher.drafting import MAX_LOOKUPS, MAX_SEQUENCES, DraftCosts, RunDrafts
from genbatch.actors.batcher.generation import Generation
from genbatch.actors.batcher.journal import Decoded, Drawn, Opened, Run, RunEnded, StepMessage, Stepped
from genbatch.actors.batcher.open_requests import BatchState
from genbatch.actors.batcher.requests import Evaluated, Planned
from genbatch.actors.batcher.slots import SwapFault, run_copies, waiting_key
from genbatch.actors.runtime.worker import Worker
from genbatch.actors.scheduling.plan import StepTimeModel, StepWork
from genbatch.actors.scheduling.request import Phase
from genbatch.nif.context import Context
from genbatch.nif.context.overlapped_run import OverlappedRun
from genbatch.nif.context.runs import DecodeRun
from genbatch.nif.cuda_device import empty_cache, is_out_of_memory
from genbatch.nif.errors import DeviceFault, OutOfBlocks
from genbatch.nif.runner import Entry, Rows
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState
from genbatch.proto.errors import EngineError


def evaluate(context: Context, batch: list[Planned]) -> list[Evaluated]:
    """Run one forward over the entries; it changes only the context and the samplers that drew."""
    samplers = [planned.sampler for planned in batch]
    reads = any(planned.owner.reads_rows(planned) for planned in batch)

    def read(logits: list[Rows], drawn: list[Sampled | SampleFault | None]) -> list[Evaluated]:
        if not reads:
            return [Evaluated(draw) for draw in drawn]
        return [
            planned.owner.read(planned, rows, draw) for planned, rows, draw in zip(batch, logits, drawn, strict=True)
        ]

    entries = [planned.entry for planned in batch]
    results = context.step_and_read(entries, samplers, read, with_logits=reads)
    for planned, result in zip(batch, results, strict=True):
        if result.drawn is not None and not result.drawn.failed:
            planned.owner.accept(result.drawn.token_id)
    return results


# The most steps of a run; a plan follows in any case.
MAX_STEPS = 64
# Seconds that the model's thread waits for the event loop to hand out a step's tokens. Then the run ends.
MAX_LATE_S = 0.1


class RunAhead:
    """One run. `evaluate` runs on the model's thread, all other methods on the event loop's thread.

    A sequence leaves after its last token, or when `leave` says that a token has ended it. A run with drafts ends then,
    since its drafts are of all its sequences.

    Args:
        batch: the first step's entry of each running sequence; each entry draws. All are tokens drawn before, or some
            are the rest of a prompt: then the run opens with a step like any other, and decodes from the second on.
        num_draws: the tokens that each sequence may draw, see `draws_ahead`.
        num_steps: the steps after which a plan is needed, at the latest.
        worker: the model's thread.
        send: gets each step but the last, on the event loop's thread.
        drafts: proposes draft tokens to verify; None for no drafts.
    """

    def __init__(
        self,
        batch: list[Planned],
        num_draws: list[int],
        num_steps: int,
        worker: Worker,
        send: Callable[[StepMessage], None],
        drafts: RunDrafts | None = None,
    ) -> None:
        self.batch = batch
        self.sequences = generations(batch)
        self._opens = has_prompts(batch)
        assert drafts is None or not self._opens, "where steps overlap, nothing verifies drafts"
        self._num_draws = num_draws
        self._max_steps = min(MAX_STEPS, num_steps)
        self._worker = worker
        self._send = send
        self._drafts = drafts
        # One thread writes each of these, and the other reads it. A stale value costs or saves one step.
        self._stopping = False
        self._booked = threading.Semaphore(0)
        self._leaving: deque[int] = deque()

    def stop(self) -> None:
        """Ask for a plan: the run ends with the current step, or with a step that has begun meanwhile."""
        self._stopping = True

    def booked(self) -> None:
        """Note that the tokens of one more step were handed out."""
        self._booked.release()

    def leave(self, index: int) -> None:
        """Take an ended sequence out of the run; a `Decoded` says when its blocks are free."""
        if self._drafts is not None:
            self.stop()
        else:
            self._leaving.append(index)

    def evaluate(self, context: Context, copies: list[Callable[[], None]]) -> Decoded | None:
        """Run all steps and return the last step; None if it was already sent.

        Raises:
            DeviceFault: the device failed, and the context with it.
            Exception: the error of the first step, which left no trace.
        """
        run_copies(copies)
        if self._drafts is not None:
            self._drafts.begin()
        samplers = [sequence.sampler for sequence in self.sequences]
        batch = self._open(context) if self._opens else [planned.entry for planned in self.batch]
        steps = int(self._opens)
        if not batch or self._max_steps <= steps:
            return None
        num_draws = None if self._drafts is not None else [count - steps for count in self._num_draws]
        run = context.decode_run(batch, samplers, max_steps=self._max_steps - steps, num_draws=num_draws)
        try:
            return self._decode(run, samplers, steps)
        finally:
            run.close()

    def _open(self, context: Context) -> list[Entry]:
        """Evaluate the step with prompts; returns the entries of the decode step behind it, none if a plan follows."""
        outputs = evaluate(context, self.batch)
        self._worker.tell(self._send, Opened(self, outputs))
        entries = []
        for planned, output in zip(self.batch, outputs, strict=True):
            entry, drawn = planned.entry, output.drawn
            if drawn is None or drawn.failed:
                return []
            next_position = entry.n_past + len(entry.tokens)
            entries.append(Entry(entry.seq_id, (drawn.token_id,), next_position, adapter=entry.adapter))
        is_slow = any(sequence.sampler.is_slow for sequence in self.sequences)
        return [] if self._stopping or is_slow else entries

    def _decode(self, run: DecodeRun | OverlappedRun, samplers: list[SamplerState], steps: int) -> Decoded | None:
        ends = False
        left: set[int] = set()  # a running step may still draw for these
        heeding = [(index, sampler) for index, sampler in enumerate(samplers) if sampler.heeds]
        while True:
            while self._leaving:
                index = self._leaving.popleft()
                run.rows.leave(index)
                left.add(index)
            try:
                decoded = self._step(run, heeding, ahead=not ends)
            except DeviceFault:
                raise
            except Exception:
                if steps == 0:
                    raise
                return None  # the next plan meets the same error and can handle it
            steps += 1
            whole = not self._lacks_tokens(decoded.drawn, left) and not any(
                sampler.is_slow for index, sampler in heeding if decoded.drawn[0][index] is not None
            )
            if self._drafts is not None:
                rows = [[draw for draw in draws if draw is not None] for draws in zip(*decoded.drawn, strict=True)]
                whole = self._drafts.took(rows, int(decoded.work.drafted)) and whole
            # Stay at most one step ahead of the tokens that were handed out.
            late = steps > 1 and not ends and not self._worker.wait(self._was_booked, MAX_LATE_S)
            ends = ends or self._stopping or late
            if not whole or run.is_over or (ends and not run.is_ahead):
                return decoded
            self._worker.tell(self._send, decoded)

    @staticmethod
    def _lacks_tokens(drawn: Drawn, left: set[int]) -> bool:
        """Return whether a draw has failed for a sequence that has not left."""
        return any(
            isinstance(draw, SampleFault) and index not in left
            for draws in drawn
            if SampleFault in set(map(type, draws))
            for index, draw in enumerate(draws)
        )

    def _was_booked(self, timeout_s: float | None) -> bool:
        """Wait until one more step was booked; return whether it was. A simulation passes None and does not wait."""
        return self._booked.acquire(blocking=timeout_s is not None, timeout=timeout_s)

    def _step(self, run: DecodeRun | OverlappedRun, heeding: list[tuple[int, SamplerState]], *, ahead: bool) -> Decoded:
        guessing_s = 0.0
        if self._drafts is not None and run.verifies:
            before = self._drafts.seconds
            drafts = self._drafts.next()
            guessing_s = self._drafts.seconds - before
            if drafts and run.has_room(drafts):
                columns = list(zip_longest(*run.verify(drafts)))
                return Decoded(self, columns, run_work(run, sum(map(len, drafts))), guessing_s)
        drawn = run.step(ahead=ahead)
        for index, sampler in heeding:
            draw = drawn[index]
            if draw is not None and not draw.failed:
                sampler.accept(draw.token_id)
        return Decoded(self, [drawn], run_work(run), guessing_s, run.rows.take_freed())


def generations(batch: list[Planned]) -> list[Generation]:
    """Cast the owners of a batch of decodes: only a generation runs ahead."""
    return [cast("Generation", planned.owner) for planned in batch]


def has_prompts(batch: list[Planned]) -> bool:
    """Return whether a batch evaluates a part of a prompt."""
    return any(planned.owner.phase is not Phase.DECODING for planned in batch)


def draws_ahead(batch: list[Planned]) -> list[int]:
    """Return the tokens that each sequence may draw without a plan; empty if the batch needs a plan after each step.

    It needs one if an entry is not the last part of a prompt, or if all its sequences end with the next token.
    """
    left = []
    for planned in batch:
        owner = planned.owner
        if planned.sampler is None or not owner.runs_ahead:
            return []
        left.append(owner.max_new_tokens - owner.num_generated)
    return left if max(left, default=1) > 1 else []


# The most seconds that a run goes on while a slot is free and a sequence waits for it.
MAX_GATHER_S = 0.05
# The weight of the latest step in the average number of ends.
_LATEST = 1 / 32


class Gathering:
    """Decides when a run ends for sequences that wait for slots: at an end, or after several ends.

    A plan leaves the device and all its rows idle for a moment. A free slot is one idle row as long as the run goes on.
    So the run goes on until its free slots have cost as much as a plan costs, if that time will bring another end. It
    ends as soon as every waiting sequence has a slot. It ends at once where plans cost nothing: `plan_s` is 0.
    """

    def __init__(self) -> None:
        self.plan_s = 0.0  # how long the latest plan left the device idle
        self.is_on = False  # whether the run goes on although a slot is free and a sequence waits
        self._ends_a_step = 0.0
        self._step_s = 0.0  # the latest step's seconds
        self.begin(1)

    def begin(self, num_rows: int) -> None:
        """Begin a run of this many sequences."""
        self._num_rows = num_rows
        self._num_free = 0
        self._idle_s = self._waited_s = 0.0  # what its free slots have cost; the time since its first end
        self.is_on = False

    def is_due(self, num_ended: int, num_waiting: int, step_s: float) -> bool:
        """Return whether the run ends with the step that was just booked.

        Args:
            num_ended: sequences that the step has ended.
            num_waiting: sequences that wait for a slot.
            step_s: the step's seconds.
        """
        self._ends_a_step += _LATEST * (num_ended - self._ends_a_step)
        self._step_s = step_s
        if self._num_free:
            self._idle_s += step_s * self._num_free / self._num_rows
            self._waited_s += step_s
        self._num_free += num_ended
        if not (self._num_free and num_waiting):
            self.is_on = False
            return False
        self.is_on = (
            self._num_free < num_waiting
            and self.expects_another()
            and self._idle_s < self.plan_s
            and self._waited_s < MAX_GATHER_S
        )
        return not self.is_on

    def expects_another(self) -> bool:
        """Return whether a second end is expected until one free slot has cost as much as a plan."""
        longest_s = min(MAX_GATHER_S, self.plan_s * self._num_rows)
        return self._ends_a_step * longest_s >= self._step_s > 0


# The number of requests that may fail in a row, each alone in its step, before the engine counts as at fault.
MAX_LONE_FAULTS = 3


class EngineFault(Exception):
    """Steps fail without a request at fault, so the engine must be restarted."""


def work_of(batch: list[Planned]) -> StepWork:
    """Return the work of a step that is not booked yet."""
    decodes = keys = prompts = prefill = 0
    prefill_keys = 0.0
    for planned in batch:
        entry, count = planned.entry, len(planned.entry.tokens)
        if planned.owner.phase is Phase.DECODING:
            decodes += 1
            keys += entry.n_past + 1
        else:
            prompts += 1
            prefill += count
            prefill_keys += count * (entry.n_past + count / 2)
    return StepWork(decodes=decodes, keys=keys, prompts=prompts, prefill=prefill, prefill_keys=prefill_keys)


def run_work(run: DecodeRun | OverlappedRun, num_drafted: int = 0) -> StepWork:
    """Return the work of a run's latest step."""
    return StepWork(decodes=len(run.rows.positions), keys=sum(run.rows.positions), drafted=num_drafted)


class StepFaults:
    """The faults of the current tick, and of earlier ticks."""

    def __init__(self) -> None:
        self._alone: list[tuple[Planned, Exception]] = []
        self._went_through = False  # whether a part succeeded since the first fault of this tick
        self._is_short = False  # of memory, and memory was freed already
        self._lone_faults = 0

    def parts(self, batch: list[Planned], error: BaseException) -> list[list[Planned]]:
        """Return the parts to try in place of a failed batch; an empty list for a batch of one entry.

        Raises:
            EngineFault: the error shows that the engine cannot go on.
        """
        if not isinstance(error, Exception) or isinstance(error, SwapFault):
            raise EngineFault(f"the engine cannot go on after {error!r}") from error
        if is_out_of_memory(error):
            if self._is_short:
                raise EngineFault(f"half a step is out of memory, too: {error}") from error
            self._is_short = True
            return _halves(batch) if len(batch) > 1 else [batch]
        # guard: bisection of a step
        if len(batch) > 1:
            return _halves(batch)
        self._alone.append((batch[0], error))
        return []

    @property
    def frees_memory(self) -> bool:
        """True if `free_memory` must run before the parts."""
        return self._is_short

    def succeeded(self) -> None:
        """Note that a batch or a part was evaluated."""
        self._went_through = True
        self._lone_faults = 0

    def verdict(self) -> list[tuple[Planned, Exception]]:
        """End the tick; return the entries at fault, with their errors.

        Raises:
            EngineFault: no entry's step succeeds.
        """
        alone, self._alone = self._alone, []
        went_through, self._went_through, self._is_short = self._went_through, False, False
        if not alone or went_through:
            return alone
        self._lone_faults += 1
        owners = {id(planned.owner.accountable) for planned, _ in alone}
        # guard: blame has an end
        if len(owners) > 1 or self._lone_faults >= MAX_LONE_FAULTS:
            error = alone[0][1]
            raise EngineFault(f"no request's step succeeds: {error}") from error
        return alone


def free_memory() -> None:
    """Free unused reserved memory; run this on the model's thread."""
    gc.collect()
    empty_cache()


def _halves(batch: list[Planned]) -> list[list[Planned]]:
    half = len(batch) // 2
    return [batch[:half], batch[half:]]


class StepCommit:
    """Books results so that callers see them; runs only between two steps. Implements `Books`.

    Args:
        state: the Batcher's shared state.
    """

    def __init__(self, state: BatchState) -> None:
        self._ctx = state.ctx
        self._slots = state.slots
        self._journal = state.journal
        self.finish = state.requests.finish
        self.fail = state.requests.fail
        self.generated = state.journal.generated
        self.drop_held = state.slots.drop_held

    def book(self, planned: Planned, evaluated: Evaluated) -> None:
        """Book the results of a step for one entry."""
        if planned.owner.seq_id is not None:  # else another sequence has ended its request
            planned.owner.book(planned, evaluated, self)

    def book_decodes(self, sequences: list[Generation], drawn: Drawn) -> list[int]:
        """Book one step of a run: each sequence decoded one token, or several with accepted drafts.

        Returns:
            The indices of the sequences that these tokens ended.
        """
        ended: list[int] = []
        for draws in drawn:
            for index, (sequence, draw) in enumerate(zip(sequences, draws, strict=True)):
                if draw is None or sequence.ended:
                    continue  # it ended after this step had begun, or with an earlier draft token
                sequence.num_computed += 1
                sequence.book_drawn(draw, self)
                if sequence.ended:
                    ended.append(index)
        return ended

    def prefilled(self, num_tokens: int) -> None:
        self._journal.stats.prefilled_tokens += num_tokens

    def embedded(self) -> None:
        self._journal.stats.embedded_texts += 1

    def copy_slot(self, source: int, target: int) -> None:
        self._ctx.seq_rm(target)
        self._ctx.seq_cp(source, target)


class Stepper:
    """Evaluates the forwards of a tick; it has exclusive use of the context from `begin` until `take` returns True.

    Args:
        state: the Batcher's shared state, with the context that evaluates.
        commit: books the results.
        worker: the model's thread.
        send: delivers a message to the actor that owns this object.
        looks_up: whether runs draft tokens by prompt lookup; grammars and a context's draft model draft in any case.
        times: learns the costs of steps.
    """

    def __init__(
        self,
        state: BatchState,
        commit: StepCommit,
        worker: Worker,
        send: Callable[[StepMessage], None],
        *,
        looks_up: bool,
        times: StepTimeModel,
    ) -> None:
        self._ctx = state.ctx
        self._swap = state.swap
        self._slots = state.slots
        self._requests = state.requests
        self._journal = state.journal
        self._watch = state.watch
        self._commit = commit
        self._worker = worker
        self._send = send
        self._looks_up = looks_up
        self._times = times
        self._costs = DraftCosts(times)
        self._groups: deque[list[Planned]] = deque()  # the forwards that are not evaluated yet
        self._began = 0.0  # start of the current step, in seconds on the event loop's clock
        # Start of the turn that planned the current step: callers wait for their tokens from that time.
        self._turn_began = 0.0
        self._run: RunAhead | None = None
        self._gathering = Gathering()
        self._faults = StepFaults()

    def begin(self, groups: list[list[Planned]], *, repeats: bool, turn_began: float) -> None:
        """Evaluate the groups one after another.

        Args:
            repeats: whether the steps that follow may decode every sequence without a plan in between.
            turn_began: the time when the Batcher began to handle the message that led to the plan.
        """
        self._turn_began = turn_began
        if self._ctx.overlaps:
            self._gathering.plan_s = trio.current_time() - turn_began
        self._groups.extend(groups)
        runs = repeats and len(groups) == 1 and (self._ctx.overlaps or not has_prompts(groups[0]))
        num_draws = draws_ahead(groups[0]) if runs else []
        if num_draws:
            self._run_ahead(self._groups.popleft(), num_draws)
        else:
            self._step()

    def take(self, message: StepMessage) -> bool:
        """Book the results of the model's thread; return whether no work is left."""
        return message.book(self)

    def hurry(self) -> None:
        """End a run with its current step, since there is something to decide."""
        if self._run is not None:
            self._run.stop()

    def arrived(self) -> None:
        """End a run with its current step for a new sequence that finds a free slot, unless the run gathers ends."""
        if not self._gathering.is_on:
            self.hurry()

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
        """Run one forward on the model's thread."""
        run_copies(copies)
        return evaluate(self._ctx, batch)

    def stepped(self, batch: list[Planned], result: "outcome.Outcome[list[Evaluated]]") -> bool:
        now = trio.current_time()
        try:
            outputs = result.unwrap()
        except BaseException as error:
            self._split(batch, error)
        else:
            self._book(batch, outputs, now)
        while self._groups:
            self._groups[0] = [planned for planned in self._groups[0] if planned.owner.seq_id is not None]
            if self._groups[0]:
                self._step()
                return False
            self._groups.popleft()
        self._blame()
        return True

    def _book(self, batch: list[Planned], outputs: list[Evaluated], now: float) -> None:
        self._watch.restart(now)
        self._faults.succeeded()
        num_tokens = sum([len(planned.entry.tokens) for planned in batch])
        self._journal.stepped(len(batch), num_tokens, now - self._began)
        self._times.took(work_of(batch), now - self._turn_began)
        self._turn_began = now
        for planned, evaluated in zip(batch, outputs, strict=True):
            self._commit.book(planned, evaluated)

    def _split(self, batch: list[Planned], error: BaseException) -> None:
        """Try the parts of a failed step, which left no trace, until the entry at fault is alone."""
        # guard: a failed device ends the engine
        if isinstance(error, DeviceFault):
            raise EngineFault(f"the engine cannot go on after {error!r}") from error
        if isinstance(error, OutOfBlocks) and len(self._slots.sequences) > 1:
            # Pause the newest sequence, as a plan would; the others are planned again.
            self._groups.clear()
            self._slots.pause(max(self._slots.sequences.values(), key=waiting_key))
            return
        self._groups.extendleft(reversed(self._faults.parts(batch, error)))

    def _blame(self) -> None:
        """End the units that failed alone while other units succeeded."""
        for planned, error in self._faults.verdict():
            if planned.owner.seq_id is not None:  # else another sequence has already failed its request
                planned.owner.give_up(EngineError(f"the step failed: {error}"), self._commit)

    # Runs

    def _run_ahead(self, batch: list[Planned], num_draws: list[int]) -> None:
        """Let the model's thread decode step after step."""
        self._began = trio.current_time()
        self._gathering.begin(len(batch))
        # If a sequence waits and ends are not gathered, the run stops at the first end by length.
        stops = self._ctx.overlaps and bool(self._slots.pending) and not self._gathering.expects_another()
        drafts = self._drafts_of(batch)
        num_steps = min(num_draws) if stops or drafts is not None else max(num_draws)
        self._run = run = RunAhead(batch, num_draws, num_steps, self._worker, self._send, drafts)
        self._requests.defer()
        self._worker.submit(
            run.evaluate,
            self._ctx,
            self._swap.take_copies(),
            on_done=lambda result: self._send(RunEnded(run, result)),
        )

    def _drafts_of(self, batch: list[Planned]) -> RunDrafts | None:
        drafter, sequences = self._ctx.drafter, generations(batch)
        looks_up = self._looks_up and len(batch) <= MAX_LOOKUPS
        guesses = looks_up or drafter is not None or any(sequence.constraint for sequence in sequences)
        if not (guesses and self._ctx.can_verify and len(batch) <= MAX_SEQUENCES):
            return None
        return RunDrafts(
            sequences,
            self._costs,
            max_rows=self._ctx.n_batch,
            vocab_size=self._ctx.runner.vocab_size,
            looks_up=looks_up,
            drafter=drafter,
        )

    def opened(self, opened: Opened) -> bool:
        """Book the first step of a run that opens with prompts; the next step may be running."""
        run, now = opened.run, trio.current_time()
        self._book(run.batch, opened.outputs, now)
        self._blame()  # no step has failed: this resets the count of successes for the next tick
        self._go_on(run, now, [index for index, sequence in enumerate(run.sequences) if sequence.ended])
        return False

    def decoded(self, decoded: Decoded) -> bool:
        """Book a step of a run; the next step may be running."""
        run, drawn, work = decoded.run, decoded.drawn, decoded.work
        now = trio.current_time()
        self._watch.restart(now)
        num_rows, num_drafted = int(work.decodes), int(work.drafted)
        self._journal.stepped(num_rows, num_rows + num_drafted, now - self._began)
        if num_drafted:
            self._journal.drafted(num_drafted, sum(draw is not None for draws in drawn[1:] for draw in draws))
        self._times.took(work, now - self._turn_began - decoded.guessing_s)
        self._turn_began = now
        self._go_on(run, now, self._commit.book_decodes(run.sequences, drawn), decoded.freed)
        return False

    def _go_on(self, run: Run, now: float, ended: list[int], freed: ListOf[int] = ()) -> None:
        """Let the run go on after a step was booked, unless there is something to decide.

        Args:
            now: when the step ended.
            ended: the indices of the sequences that the step has ended.
            freed: the indices of those that hold no blocks any more.
        """
        for index in ended:
            run.leave(index)
        self._requests.freed([run.sequences[index] for index in freed])
        is_due = self._gathering.is_due(len(ended), len(self._slots.pending), now - self._began)
        self._began = now
        if is_due or self._requests.overdue():
            run.stop()
        run.booked()

    def run_ended(self, run: Run, result: "outcome.Outcome[Decoded | None]") -> bool:
        self._run = None
        try:
            decoded = result.unwrap()
        except BaseException as error:  # of its first step; no results were sent
            self._requests.settle()
            return self.stepped(run.batch, outcome.Error(error))
        if decoded is not None:
            self.decoded(decoded)
        self._requests.settle()
        return True
