"""The Batcher: the actor that owns the model context and a pool of sequence slots, and serves every caller.

    batcher = await start(nursery, Batcher(open_context, options), name="batcher")
    result = await batcher.call(Generate(GenerateRequest(prompt="Hello", max_tokens=8)), timeout=None)

A request first passes arrivals.py, which puts it into the queue. An idle Batcher waits for `batch_size` requests or
for `batch_timeout`. Then ticks follow one another until no work is left. A tick has four phases:

    finish   Cancelled and expired sequences give back their slots and blocks. A client above its share of the slots
             pauses a sequence when another client waits below its share.
    plan     The scheduler, a pure function, picks decodes and prefill chunks. Paused sequences give up their blocks.
    start    Newly picked requests take a slot and share evaluated prefixes (`seq_cp`, prefix cache).
    step     Forwards run on the worker thread: one, or several in a row while there is nothing to decide (stepper.py).

The Batcher handles messages while a step runs, so calls are always answered. Only the Batcher touches its state. It
touches the context only between two steps or on the worker thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import trio

from genbatch.actors.batcher.arrivals import Compiled, Encoded, Prepared, PrepareGrammars, end_complete
from genbatch.actors.batcher.calls import AdapterReady, SessionFileRead, SessionRead, UnloadOver, WorkEnded
from genbatch.actors.batcher.journal import Decoded, Opened, RunEnded, StepMessage, Stepped
from genbatch.actors.batcher.messages import DrainOver, Embed, Generate, LoadSession, SaveSession
from genbatch.actors.batcher.open_requests import BlocksLate, BlocksRead, End, Work
from genbatch.actors.batcher.parts import BatcherParts
from genbatch.actors.batcher.requests import Request, slotted
from genbatch.actors.runtime.actor import NOREPLY, Down, From, NoReply, reply, reply_error
from genbatch.actors.scheduling.plan import PromptBudget, SchedulerOutput
from genbatch.actors.scheduling.request import LlmRequest
from genbatch.proto.errors import GenbatchError, ModelNotFound, PromptTooLong
from genbatch.proto.messages import KeepSessionRequest, ResumeSessionRequest
from genbatch.proto.methods import METHODS, Lane
from genbatch.proto.service_messages import (
    DrainRequest,
    HealthRequest,
    LoadAdapterRequest,
    LoadModelRequest,
    ModelsRequest,
    StatsRequest,
    UnloadAdapterRequest,
)

# Slack so that rounding cannot fire the timer before the deadline.
LATE_S = 1e-6
# The longest wait for further requests, as a share of the step that they would share. A request that arrives later
# joins the next step, so it loses one step at most.
QUIET_SHARE = 0.1
# The event loop's timers fire up to this late, so an idle Batcher does not wait for less.
TIMER_S = 0.001


@dataclass(frozen=True, slots=True)
class Flush:
    """The accumulation window has ended."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """No request has arrived for a while, and the accumulation window is still open."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """A request's deadline has passed while no step ran."""


class Batcher(BatcherParts):
    """Own the context and serve requests; the module's docstring describes a request's path.

    Args:
        open_context: opens the context; runs once, on the worker thread.
        options: see BatcherOptions.
        open_worker: makes the worker threads; a simulation has none.
        open_flight: makes the Flight, which sees every input of a decision; `actors/recording` has one that records.
        on_models: called with the served models whenever they change.
        rehearsed: the steps that the last engine has rehearsed; without them a native runner rehearses some itself.
    """

    # Callbacks

    async def handle_call(self, request: object, from_: From[Any]) -> object:
        self._begin_turn()
        answer = _CALLS.get(type(request))
        if answer is None:
            raise TypeError(f"the Batcher has no call {type(request).__name__}")
        return answer(self, request, from_)

    async def handle_info(self, message: object) -> None:
        self._begin_turn()
        handle = _MESSAGES.get(type(message))
        if handle is not None:
            handle(self, message)
        if self._is_telling:
            # First tokens are sent before the threads of the next step take all cores. The sending tasks run somewhere
            # in the event loop's next turn. So the Batcher continues in the turn after that.
            await trio.lowlevel.cancel_shielded_checkpoint()
            await trio.lowlevel.cancel_shielded_checkpoint()
            self._is_telling = False
            self._stepped()

    # Calls

    def _take(self, message: Generate | Embed, from_: From[Any]) -> NoReply:
        self._arrived = self._turn_began
        self._enqueue(self.arrivals.take(message, from_))
        self._await_deadline()
        return NOREPLY

    def _load_adapter(self, request: LoadAdapterRequest, from_: From[Any]) -> NoReply:
        self.adapters.load(request, from_)
        return NOREPLY

    def _unload_adapter(self, request: UnloadAdapterRequest, from_: From[Any]) -> NoReply:
        self.adapters.unload(request, from_)
        self._settle_when_idle()
        return NOREPLY

    def _load_model(self, request: LoadModelRequest, from_: From[Any]) -> object:
        """Answer at once: an engine has its model loaded, and `keep_alive` is its service's concern."""
        served = [card.id for card in self.models.models]
        if request.model is None or request.model in served:
            return self.models
        reason = f"the model {request.model[:128]!r} is not served here; there is {', '.join(served)}"
        reply_error(from_, ModelNotFound(reason, field="model"))
        return NOREPLY

    def _read_text(self, request: object, from_: From[Any]) -> NoReply:
        self._texts.answer(request, from_)
        return NOREPLY

    def _save_session(self, message: SaveSession, from_: From[Any]) -> NoReply:
        self._touch_session(partial(self.sessions.save, message, from_))
        return NOREPLY

    def _load_session(self, message: LoadSession, from_: From[Any]) -> NoReply:
        self._touch_session(partial(self.sessions.load, message, from_))
        return NOREPLY

    def _keep_session(self, request: KeepSessionRequest, from_: From[Any]) -> NoReply:
        self._with_files(partial(self.sessions.keep, request, from_), from_)
        return NOREPLY

    def _resume_session(self, request: ResumeSessionRequest, from_: From[Any]) -> NoReply:
        self._with_files(partial(self.sessions.resume, request, from_), from_)
        return NOREPLY

    def _with_files(self, ask: Callable[[], None], from_: From[Any]) -> None:
        try:
            self._touch_session(ask)
        except GenbatchError as error:
            reply_error(from_, error)

    def _drain(self, request: DrainRequest, from_: From[Any]) -> NoReply:
        self._flight.draining(request.timeout_s)
        self.requests.drain(from_, request.timeout_s)
        return NOREPLY

    # Messages

    def _take_step(self, message: StepMessage) -> None:
        try:
            has_ended = self.stepper.take(message)
        finally:  # the record must contain the step that ends the engine
            self._flight.stepped(message)
        if has_ended:
            self._is_telling = message.has_first_tokens
            if not self._is_telling:
                self._stepped()
        elif self.adapters.unloading and self.adapters.can_settle():
            self.stepper.hurry()

    def _caller_left(self, message: Down) -> None:
        request = self.requests.find(message.monitor)
        # guard: callers that leave
        if request:
            self._flight.left(request)
            request.abandoned = "cancelled"
            self._end_abandoned()

    def _session_read(self, message: SessionRead) -> None:
        self.sessions.read(message)
        self.stepper.hurry()
        self._tick_when_idle()

    def _session_file_read(self, message: SessionFileRead) -> None:
        self._touch_session(partial(self.sessions.file_read, message))

    def _work_ended(self, message: WorkEnded) -> None:
        self._stepping = False
        message.end()
        self._tick_when_idle()

    def _blocks_read(self, message: BlocksRead) -> None:
        self._flight.close("blocks of a prompt were read from the disk, and they are not in the record")
        self.disk.read(message)
        self.stepper.hurry()
        self._tick_when_idle()

    def _blocks_late(self, message: BlocksLate) -> None:
        self.disk.late(message)
        self._tick_when_idle()

    def _adapter_ready(self, message: AdapterReady) -> None:
        caller = self.adapters.ready(message)
        if caller is not None:
            reply(caller, self.models)

    def _unload_over(self, message: UnloadOver) -> None:
        self.adapters.over(message)
        self._end_abandoned()

    def _grammar_prepared(self, message: Prepared) -> None:
        self._flight.prompted()
        self.grammars.prepared(message)
        self._tick_when_idle()

    def _drain_over(self, message: DrainOver) -> None:
        self._flight.drain_over()
        self.requests.cancel_all()
        self._end_abandoned()

    def _quiet(self, message: Quiet) -> None:
        if len(self.arrivals):  # a tokenizer or a grammar compiler still has requests, which will arrive
            self._arrived = self._turn_began
            self._wait_for_more()
        else:
            self._flush(message)

    def _flush(self, message: Quiet | Flush) -> None:
        self._flight.prompted()
        self._window = None
        self._tick_when_idle()

    def _deadline_passed(self, message: DeadlinePassed) -> None:
        self._flight.prompted()
        self._deadline = None
        self._tick_when_idle()

    def _begin_turn(self) -> None:
        self._turn_began = trio.current_time()
        self._flight.began()

    # The tick

    def _enqueue(self, request: Request | None) -> None:
        """Queue the sequences of a request; None stands for a request that a thread still has, or that was refused."""
        if request is None:
            return
        self.disk.begin(request)
        self.sharing.share(request, context_is_free=not self._stepping)
        for sequence in request.sequences:
            self.slots.enqueue(sequence)
        end_complete(request, self.requests)
        self._wake()

    def _wake(self) -> None:
        """Bring the next tick forward; an idle Batcher ticks once the queue is long enough or the window has ended."""
        if self.planner.is_owed():
            self.stepper.hurry()
        elif self.slots.seq_pool:
            self.stepper.arrived()
        if len(self.slots.pending) >= self._flush_size:
            self._tick_when_idle()
        elif not self._stepping:
            self._wait_for_more()

    def _wait_for_more(self) -> None:
        """Let an idle Batcher wait until the window ends, or until no request has arrived for the quiet time.

        The quiet time includes the time that the latest request spent at the chat template and the tokenizer.
        """
        now, quiet_s = trio.current_time(), self._quiet_s()
        if self._window is None:
            self._window_ends = now + self._window_s
        elif quiet_s is None:
            return
        else:
            self._window.cancel()
        left_s = max(0.0, self._window_ends - now)
        if quiet_s is None or quiet_s >= left_s:
            self._window = self.send_after(left_s, Flush())
            return
        waits_s = max(0.0, self._arrived + quiet_s - now)
        if quiet_s >= TIMER_S or len(self._mailbox):
            waits_s = max(waits_s, LATE_S)  # wait for one turn of the event loop, in which other requests may arrive
        self._window = self.send_after(waits_s, Quiet())

    def _quiet_s(self) -> float | None:
        """Return the seconds without a new request that end the wait: a share of the step that requests would share."""
        quiet_s = self._most_quiet_s
        if quiet_s is None:
            return None
        step_s = self.planner.first_step_s()
        return quiet_s if step_s is None else min(quiet_s, QUIET_SHARE * step_s)

    def _tick_when_idle(self) -> None:
        if not self._stepping:
            self._tick()

    def _tick(self) -> None:
        """Run one round of finish, plan, start and step; do nothing when there is no work."""
        if self._window is not None:
            self._window.cancel()
            self._window = None
        self.requests.end_abandoned()
        self._settle_adapters()
        if self.sessions.calls:
            self._work_between_steps(*self.sessions.next())
            return
        if self.disk.takes_turn():
            self._copy_blocks()
            return
        is_done = False
        while not is_done:
            inflight = self._flight.sitting_out(self._sitting_out())
            gave_way = self._give_way(inflight)
            budget = self._flight.prompt_budget(self.planner.prompt_budget())
            is_done = self._carry_out(self._plan(inflight, budget), gave_way, can_be_stuck=not inflight)

    def _give_way(self, inflight: frozenset[int]) -> list[LlmRequest]:
        """Pause sequences of clients above their share of slots or blocks, and return these sequences."""
        gave_way: list[LlmRequest] = [*self.planner.giving_way(inflight)]
        for unit in slotted(gave_way):
            self.slots.pause(unit)
        return gave_way

    def _carry_out(self, plan: SchedulerOutput, gave_way: list[LlmRequest], *, can_be_stuck: bool) -> bool:
        """Carry out a plan, and return whether the tick is done.

        A plan without any effect would be made again forever. So each plan steps, pauses or refuses a sequence, or
        there is no work.

        Args:
            gave_way: the sequences that were paused before the plan.
        """
        for unit in slotted(plan.paused_requests):
            self.slots.pause(unit)
        for unit in slotted(plan.never_fitting):
            unit.give_up(PromptTooLong("the KV cache cannot hold this request"), self.commit)
        groups = self.planner.start(plan)
        self._flight.ticked(replace(plan, paused_requests=[*gave_way, *plan.paused_requests]), groups)
        if groups:
            self._stepping = True
            self._await_deadline()
            repeats = self._runs_ahead and self.planner.repeats(plan)
            self.stepper.begin(groups, repeats=repeats, turn_began=self._turn_began)
            return True
        if plan.paused_requests or plan.never_fitting:
            return False  # their blocks may let other sequences start
        rescue = self.planner.stuck() if can_be_stuck else None
        if rescue is not None:
            return self._carry_out(rescue, [], can_be_stuck=False)
        self._rest()
        return True

    def _plan(self, inflight: frozenset[int], budget: PromptBudget | None) -> SchedulerOutput:
        return self.planner.plan(inflight, budget)

    def _sitting_out(self) -> frozenset[int]:
        """Return the ids of the sequences that keep their place and are not planned."""
        return self.grammars.sitting_out()

    def _touch_session(self, ask: Callable[[], None]) -> None:
        self._flight.close("a session was saved or loaded, and its KV is not in the record")
        ask()
        self.stepper.hurry()
        self._tick_when_idle()

    def _copy_blocks(self) -> None:
        self._work_between_steps(*self.disk.next())

    def _work_between_steps(self, work: Work, end: End) -> None:
        """Run a session call, or copy blocks, in place of a step, since it needs the context to itself."""
        self._stepping = True
        ref = self.ref
        self._worker.submit(work, on_done=lambda result: ref.info(WorkEnded(partial(end, result)), control=True))

    def _stepped(self) -> None:
        """Continue after the tick's forwards have ended and were booked."""
        self._stepping = False
        self._tick()

    def _rest(self) -> None:
        """Check for leaked blocks, and set the deadline timer; runs when there is nothing to evaluate."""
        if self.disk.is_waiting:
            self._copy_blocks()
            return
        if not self.requests:
            kv = self.ctx.kv
            blocks = kv.held_only_by([prompt.seq_id for prompt in self.held_prompts if prompt.seq_id is not None])
            used = tuple(kv.counts(group).used for group in range(len(blocks)))
            assert used == blocks, f"{used} blocks are used without a request, held prompts have {blocks}"
        self._await_deadline()

    def _await_deadline(self) -> None:
        """Set a timer for the earliest deadline, so that waiting requests time out while no step runs."""
        soonest = None if self._stepping else self.requests.next_deadline()
        if self._deadline is not None:
            if soonest is not None and self._deadline.deadline <= soonest + LATE_S:
                return
            self._deadline.cancel()
            self._deadline = None
        if soonest is not None:
            self._deadline = self.send_after(max(0.0, soonest - trio.current_time()) + LATE_S, DeadlinePassed())

    def _end_abandoned(self) -> None:
        """End abandoned requests now, or as soon as the context is free."""
        self.stepper.hurry()
        if not self._stepping:
            self.requests.end_abandoned()
            self._settle_adapters()

    def _settle_when_idle(self) -> None:
        self.stepper.hurry()
        if not self._stepping:
            self._settle_adapters()

    def _settle_adapters(self) -> None:
        if self.adapters.unloading and self.adapters.settle():
            self._flight.close("an adapter was unloaded with prompts that were held, which is not in the record")


# The handler of each call, and the handler of each message.
_CALLS: dict[type, Callable[[Batcher, Any, From[Any]], object]] = {
    Generate: Batcher._take,
    Embed: Batcher._take,
    StatsRequest: lambda batcher, _request, _from: batcher._stats(),
    HealthRequest: lambda batcher, _request, _from: batcher._health(),
    ModelsRequest: lambda batcher, _request, _from: batcher.models,
    LoadModelRequest: Batcher._load_model,
    LoadAdapterRequest: Batcher._load_adapter,
    UnloadAdapterRequest: Batcher._unload_adapter,
    SaveSession: Batcher._save_session,
    LoadSession: Batcher._load_session,
    DrainRequest: Batcher._drain,
    **{method.request: Batcher._read_text for method in METHODS.values() if method.lane is Lane.TEXT},
    KeepSessionRequest: Batcher._keep_session,
    ResumeSessionRequest: Batcher._resume_session,
}
_MESSAGES: dict[type, Callable[[Batcher, Any], None]] = {
    Stepped: Batcher._take_step,
    Opened: Batcher._take_step,
    Decoded: Batcher._take_step,
    RunEnded: Batcher._take_step,
    Down: Batcher._caller_left,
    Encoded: lambda batcher, message: batcher._enqueue(batcher.arrivals.encoded(message)),
    Compiled: lambda batcher, message: batcher._enqueue(batcher.arrivals.compiled(message)),
    SessionRead: Batcher._session_read,
    SessionFileRead: Batcher._session_file_read,
    WorkEnded: Batcher._work_ended,
    BlocksRead: Batcher._blocks_read,
    BlocksLate: Batcher._blocks_late,
    AdapterReady: Batcher._adapter_ready,
    UnloadOver: Batcher._unload_over,
    PrepareGrammars: lambda batcher, _: batcher.grammars.prepare(),
    Prepared: Batcher._grammar_prepared,
    DrainOver: Batcher._drain_over,
    Quiet: Batcher._quiet,
    Flush: Batcher._flush,
    DeadlinePassed: Batcher._deadline_passed,
}
