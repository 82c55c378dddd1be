"""The Batcher: the actor that owns the model context and a pool of sequence slots, and serves every caller.

    batcher = await start(nursery, Batcher(open_context, options), name="batcher")
    result = await batcher.call(Generate(GenerateRequest(prompt="Hello", max_tokens=8)), timeout=None)

A request's way: its arrival (arrivals.py) lets it into the queue; an idle Batcher waits for `batch_size` requests or
`batch_timeout`; then ticks follow one another until nothing is left. A tick has four phases:

    finish   sequences whose caller is gone or whose deadline passed give their slot and blocks back
    plan     the scheduler, a pure function, picks decodes and prefill chunks; paused ones give up their blocks
    start    newly picked requests take a slot and share what was evaluated before (`seq_cp`, prefix cache)
    step     forwards on the worker thread: one, or one after another while there is nothing to decide (stepper.py)

Messages are handled while a step runs, so the Batcher always answers; only it touches its state, and the context
only between two steps or on the worker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from genbatch.actors.batcher.adapters import AdapterCalls, AdapterReady, UnloadOver
from genbatch.actors.batcher.arrivals import INLINE_PROMPT_CHARS, Arrivals, Encoded
from genbatch.actors.batcher.calls import SessionCalls, SessionEnded, SessionRead, TextCalls
from genbatch.actors.batcher.draining import Draining, DrainOver
from genbatch.actors.batcher.flight import OpenFlight, unrecorded
from genbatch.actors.batcher.grammars import Compiled, Grammars, Prepared
from genbatch.actors.batcher.intake import Intake
from genbatch.actors.batcher.journal import Journal
from genbatch.actors.batcher.messages import (
    Detokenize,
    Drain,
    Embed,
    Generate,
    GetHealth,
    GetModels,
    GetStats,
    LoadAdapter,
    LoadSession,
    SaveSession,
    Tokenize,
    UnloadAdapter,
)
from genbatch.actors.batcher.open_requests import OpenRequests
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.planner import KVView, Planner
from genbatch.actors.batcher.prompt_sharing import PromptSharing
from genbatch.actors.batcher.report import StallWatch, model_cards, stats_report
from genbatch.actors.batcher.requests import HeldPrompt, Request, Sequence
from genbatch.actors.batcher.slots import HeldPrompts, Slots, Swap
from genbatch.actors.batcher.stats import BatcherStats
from genbatch.actors.batcher.stepper import Decoded, RunEnded, StepCommit, Stepped, Stepper
from genbatch.actors.runtime.actor import NOREPLY, Down, From, GenServer, Reason, Timer, reply
from genbatch.actors.runtime.worker import Worker
from genbatch.actors.scheduling.fair_share import FairShare
from genbatch.actors.scheduling.plan import SchedulerOutput
from genbatch.actors.scheduling.request import LlmRequest, Phase
from genbatch.nif.context import Context
from genbatch.nif.context.engine import Engine
from genbatch.nif.errors import OptionError, OutOfBlocks
from genbatch.proto.errors import PromptTooLong, Unavailable
from genbatch.proto.messages import Health, Models


def context_factory(engine: Engine, options: BatcherOptions) -> Callable[[], Context]:
    """Makes a context over the loaded model, at a Batcher's start and at each restart."""
    return partial(
        engine.open_context,
        n_parallel=options.n_parallel,
        n_held=options.max_held_prompts,
        n_batch=options.max_batch_tokens,
    )


# Seconds by which a timer is set behind a deadline: it would be set again if it came the last bit of a float too soon.
LATE_S = 1e-6


@dataclass(frozen=True, slots=True)
class Flush:
    """The accumulation window is over."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """A request's deadline, while nothing was evaluated."""


class Batcher(GenServer):
    """Owns the context; see the module's docstring for a request's way.

    Args:
        open_context: makes the context; runs once, on the worker thread.
        options: see BatcherOptions.
        open_worker: makes its threads; a simulation has none.
        open_flight: makes what is told of all that decides; `actors/recording` has one that keeps it.
        on_models: called with what is served, whenever that has changed.
    """

    arrivals_type = Arrivals  # a replay has others

    def __init__(
        self,
        open_context: Callable[[], Context],
        options: BatcherOptions | None = None,
        *,
        open_worker: Callable[[str], Worker] = Worker,
        open_flight: OpenFlight = unrecorded,
        on_models: Callable[[Models], None] | None = None,
    ) -> None:
        self.options = options or BatcherOptions()
        self.stats = BatcherStats()
        self._open_context = open_context
        self._open_worker = open_worker
        self._open_flight = open_flight
        self._on_models = on_models
        self._stepping = False  # whether the context is in use by its thread
        self._window: Timer | None = None
        self._deadline: Timer | None = None  # the next one; steps look for themselves
        self._draining = Draining(lambda: len(self.requests), self.send_after)
        self._runs_ahead = self.options.async_batching and self.options.record is None

    # Callbacks

    async def init(self) -> None:
        self._worker = self._open_worker("genbatch-model")
        self._tokenizing = self._open_worker("genbatch-tokenizer")
        try:
            await self._open()
        except BaseException:
            with trio.CancelScope(shield=True):  # an actor that did not start is not terminated: its threads end here
                await self._close_workers()
            raise

    async def handle_call(self, request: object, from_: From[Any]) -> object:
        self._flight.began()
        match request:
            case Generate():
                self.arrivals.take(request, from_)
                self._await_deadline()
                return NOREPLY
            case Embed():
                self.arrivals.embed(request, from_)
                self._await_deadline()
                return NOREPLY
            case GetStats():
                return self._stats()
            case GetHealth():
                return self._health()
            case GetModels():
                return self._models()
            case LoadAdapter():
                self.adapters.load(request, from_)
                return NOREPLY
            case UnloadAdapter():
                self.adapters.unload(request, from_)
                self._settle_when_idle()
                return NOREPLY
            case Tokenize() | Detokenize():
                self._texts.answer(request, from_)
                return NOREPLY
            case SaveSession() | LoadSession():
                self._flight.close("a session was saved or loaded, and its KV is not in the record")
                self.sessions.ask(request, from_)
                self.stepper.hurry()
                self._tick_when_idle()
                return NOREPLY
            case Drain(timeout_s):
                self._flight.draining(timeout_s)
                self._draining.ask(from_, timeout_s)
                return NOREPLY
            case _:
                raise TypeError(f"the Batcher has no call {type(request).__name__}")

    async def handle_info(self, message: object) -> None:
        self._flight.began()
        match message:
            case Stepped() | Decoded() | RunEnded():
                try:
                    has_ended = self.stepper.take(message)
                finally:  # what ends the engine is what one wants to know
                    self._flight.stepped(message)
                if has_ended:
                    self._stepped()
            case Down():
                request = self.requests.find(message.monitor)
                if request:
                    self._flight.left(request)
                    request.abandoned = "cancelled"
                    self._end_abandoned()
            case Encoded():
                self.arrivals.encoded(message)
            case Compiled():
                self.arrivals.compiled(message)
            case SessionRead():
                self.sessions.read(message)
                self.stepper.hurry()
                self._tick_when_idle()
            case SessionEnded():
                self._stepping = False
                message.end()
                self._tick()
            case AdapterReady():
                caller = self.adapters.ready(message)
                if caller is not None:
                    reply(caller, self._models())
            case UnloadOver():
                self.adapters.over(message)
                self._end_abandoned()
            case Prepared():
                self._flight.prompted()
                self.grammars.prepared(message)
                self._tick_when_idle()
            case DrainOver():
                self._flight.drain_over()
                self._cancel_open()
            case Flush():
                self._flight.prompted()
                self._window = None
                self._tick_when_idle()
            case DeadlinePassed():
                self._flight.prompted()
                self._deadline = None
                self._tick_when_idle()

    async def terminate(self, reason: Reason) -> None:
        self._flight.close(f"the batcher has stopped: {reason!r}")
        self.stepper.hurry()
        self.requests.end_all(Unavailable("the batcher has stopped"))
        self.sessions.end_all(Unavailable("the batcher has stopped"))
        await self.adapters.close()
        await self._worker.run(self.ctx.close)
        await self._close_workers()

    async def _open(self) -> None:
        self.ctx = await self._worker.run(self._open_context)
        self.intake = self._open_intake()
        self._texts = TextCalls(self.intake, self._tokenizing, INLINE_PROMPT_CHARS)
        self.grammars = Grammars(
            self.ctx.model,
            self.options.limits.max_grammar_s,
            lambda done: self.ref.info(done, control=True),
            self._open_worker,
        )
        self._watch = StallWatch(self.options.stall_s, trio.current_time())
        self.held = HeldPrompts(range(self.options.n_parallel, self.ctx.num_sequences), self.ctx.kv.block_size)
        self.sessions = SessionCalls(
            self.ctx, self.held, self.intake, self._tokenizing, lambda message: self.ref.info(message, control=True)
        )
        self.swap = Swap(self.ctx, self.options.cpu_offload_space)
        self.journal = Journal(self.stats, self.telemetry, self.ctx.model.name)
        fair = FairShare()
        in_turn = fair if self.options.fair_share else None
        self._flight = self._open_flight(self.options)
        now = self._flight.now
        self.slots = Slots(self.ctx, self.held, self.swap, in_turn, self.options.n_parallel, self.journal, now)
        self.requests = OpenRequests(self.slots, fair, self.journal, self._draining.settle, now)
        self.adapters = AdapterCalls(
            ctx=self.ctx,
            slots=self.slots,
            held=self.held,
            requests=self.requests,
            open_worker=self._open_worker,
            send=lambda message: self.ref.info(message, control=True),
            send_after=self.send_after,
            on_change=self._tell_models,
        )
        self.commit = StepCommit(self.ctx, self.requests, self.journal)
        view = KVView(self.ctx.kv, self.held, self.options.scheduling.limits(self.ctx.kv.block_size))
        self.intake.longest = view.longest
        self.planner = Planner(self.options, self.ctx.kv, view, self.slots, self.held)
        self.sharing = PromptSharing(self.intake, self.held, self.slots)
        self.arrivals = self.arrivals_type(
            options=self.options,
            draining=self._draining,
            intake=self.intake,
            grammars=self.grammars,
            worker=self._tokenizing,
            slots=self.slots,
            requests=self.requests,
            journal=self.journal,
            flight=self._flight,
            watch=self._watch,
            monitor=self.monitor,
            send=lambda message: self.ref.info(message, control=True),
            on_ready=self._enqueue,
        )
        self.stepper = Stepper(
            worker=self._worker,
            ctx=self.ctx,
            swap=self.swap,
            slots=self.slots,
            requests=self.requests,
            commit=self.commit,
            journal=self.journal,
            watch=self._watch,
            send=lambda message: self.ref.info(message, control=True),
        )
        self._flight.begin(self.ctx, [self.intake.system_prompt(content) for content in self.options.system_prompts])
        for content in self.options.system_prompts:
            held = self.sharing.hold_configured(content)
            if held.seq_id is not None:
                try:
                    await self._worker.run(self.ctx.prefill, held.tokens, held.seq_id, 0)
                except OutOfBlocks as error:
                    reason = f"{content!r:.60} has {len(held.tokens)} tokens, for which the KV cache has no room"
                    raise OptionError("system_prompts", reason) from error
            held.num_computed = len(held.tokens)

    def _open_intake(self) -> Intake:
        return Intake(self.ctx.model, self.options, self.ctx.max_positions, self.ctx.adapters)

    async def _close_workers(self) -> None:
        if hasattr(self, "grammars"):  # else it did not get that far
            await self.grammars.close()
        await self._tokenizing.close()
        await self._worker.close()

    # The tick

    def _enqueue(self, request: Request) -> None:
        """A request is ready: its sequences wait for a slot."""
        if request.embedding is None:
            self.sharing.share(request, context_is_free=not self._stepping)
        for sequence in request.sequences:
            self.slots.enqueue(sequence)
        self._wake()

    def _wake(self) -> None:
        """The next tick comes as soon as may be; of an idle Batcher once enough waits, or has waited long enough."""
        if self.slots.seq_pool:
            self.stepper.hurry()
        if len(self.slots.pending) >= self.options.flush_size:
            self._tick_when_idle()
        elif not self._stepping and self._window is None:
            self._window = self.send_after(self.options.batch_timeout / 1000, Flush())

    def _tick_when_idle(self) -> None:
        if not self._stepping:
            self._tick()

    def _tick(self) -> None:
        """One round of finish, plan, start and step; nothing happens when nothing can be done."""
        if self._window is not None:
            self._window.cancel()
            self._window = None
        self.requests.end_abandoned()
        self._settle_adapters()
        if self.sessions:
            self._serve_session()
            return
        is_done = False
        while not is_done:
            inflight = self._flight.sitting_out(self._sitting_out())
            is_done = self._carry_out(self._plan(inflight), can_be_stuck=not inflight)

    def _carry_out(self, plan: SchedulerOutput, *, can_be_stuck: bool) -> bool:
        """Does what a plan says; whether that is all that can be done now.

        A plan of which nothing can be done would be made again and again. So each one steps, pauses or refuses
        somebody, or there is nothing to do.
        """
        for owner in plan.paused_requests:
            self.slots.pause(owner)
        for owner in plan.never_fitting:
            self._refuse(owner)
        groups = self.planner.start(plan)
        self._flight.ticked(plan, groups)
        if groups:
            self._stepping = True
            self._await_deadline()
            repeats = self._runs_ahead and self.planner.repeats(plan)
            self.stepper.begin(groups, repeats=repeats)
            return True
        if plan.paused_requests or plan.never_fitting:
            return False  # what they gave back may let others in
        rescue = self.planner.stuck() if can_be_stuck else None
        if rescue is not None:
            return self._carry_out(rescue, can_be_stuck=False)
        self._rest()
        return True

    def _plan(self, inflight: frozenset[int]) -> SchedulerOutput:
        return self.planner.plan(inflight)

    def _sitting_out(self) -> frozenset[int]:
        """The ids of those that keep their place and are not planned."""
        return self.grammars.sitting_out()

    def _serve_session(self) -> None:
        """In place of a step, since it needs the context for itself."""
        self._stepping = True
        work, end = self.sessions.next()
        ref = self.ref
        self._worker.submit(work, on_done=lambda result: ref.info(SessionEnded(partial(end, result)), control=True))

    def _stepped(self) -> None:
        """The tick's forwards have ended and are booked."""
        self._stepping = False
        self._tick()

    def _rest(self) -> None:
        """There is nothing to evaluate."""
        if not self.requests:
            kv = self.ctx.kv
            held = kv.held_only_by([held.seq_id for held in self.held if held.seq_id is not None])
            used = tuple(kv.counts(group).used for group in range(len(held)))
            assert used == held, f"{used} blocks are used with nobody there, held prompts have {held}"
        self._await_deadline()

    def _await_deadline(self) -> None:
        """While nothing is evaluated, requests wait for a window, a tokenizer or a grammar: no longer than they may."""
        soonest = None if self._stepping else self.requests.next_deadline()
        if self._deadline is not None:
            if soonest is not None and self._deadline.deadline <= soonest + LATE_S:
                return
            self._deadline.cancel()
            self._deadline = None
        if soonest is not None:
            self._deadline = self.send_after(max(0.0, soonest - trio.current_time()) + LATE_S, DeadlinePassed())

    def _end_abandoned(self) -> None:
        """Now, or as soon as the context is free."""
        self.stepper.hurry()
        if not self._stepping:
            self.requests.end_abandoned()
            self._settle_adapters()

    def _settle_when_idle(self) -> None:
        self.stepper.hurry()
        if not self._stepping:
            self._settle_adapters()

    def _settle_adapters(self) -> None:
        if self.adapters.settle():
            self._flight.close("an adapter was unloaded with prompts that were held, which is not in the record")

    def _refuse(self, owner: LlmRequest) -> None:
        """Ends a request that would not fit even if nothing else were there."""
        if isinstance(owner, HeldPrompt):
            self.slots.drop_held(owner)
        elif isinstance(owner, Sequence) and owner.phase is not Phase.FINISHED:
            self.requests.fail(owner.request, PromptTooLong("the KV cache cannot hold this request"))

    # Ending, and what is asked meanwhile

    def _cancel_open(self) -> None:
        for request in self.requests:
            if request.abandoned is None:
                request.abandoned = "cancelled"
                self._draining.num_cancelled += 1
        self._end_abandoned()

    def _models(self) -> Models:
        return Models(models=model_cards(self.ctx, self.options.n_parallel))

    def _tell_models(self) -> None:
        if self._on_models is not None:
            self._on_models(self._models())

    def _health(self) -> Health:
        return self._watch.health(
            trio.current_time(),
            num_open=len(self.requests),
            draining=self._draining.has_begun,
            steps=self.stats.steps,
            running=len(self.slots.sequences),
            waiting=len(self.slots.pending) + len(self.arrivals),
        )

    def _stats(self) -> dict[str, Any]:
        return stats_report(
            self.stats,
            self.ctx,
            self.slots,
            self.held,
            self.swap,
            n_parallel=self.options.n_parallel,
            now=trio.current_time(),
        )
