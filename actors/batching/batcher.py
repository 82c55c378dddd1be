"""The Batcher: the actor that owns the model context and a pool of sequence slots, and serves every caller.

    batcher = await start(nursery, Batcher(open_context, options), name="batcher")
    result = await batcher.call(Generate(GenerateRequest(prompt="Hello", max_tokens=8)), timeout=None)

A request's way: `handle_call` validates it and holds the reply; an idle Batcher waits for `batch_size` requests or
`batch_timeout`; then ticks follow one another until nothing is left. A tick has four phases:

    finish   sequences whose caller is gone or whose deadline passed give their slot and blocks back
    plan     the scheduler, a pure function, picks decodes and prefill chunks; paused ones give up their blocks
    start    newly picked requests take a slot and share what was evaluated before (`seq_cp`, prefix cache)
    step     forwards on the worker thread: one, or one after another while there is nothing to decide (run_ahead.py)

Messages are handled while a step runs, so the Batcher always answers; only it touches its state, and the context
only between two steps or on the worker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import outcome
import trio

from genbatch.actors.batching.admission import Load
from genbatch.actors.batching.batcher_messages import (
    Detokenize,
    Drain,
    Generate,
    GetHealth,
    GetModels,
    GetStats,
    LoadSession,
    SaveSession,
    Tokenize,
)
from genbatch.actors.batching.batcher_stats import BatcherStats
from genbatch.actors.batching.draining import Draining
from genbatch.actors.batching.fair_share import FairShare
from genbatch.actors.batching.grammars import Compiled, Grammars, Prepared
from genbatch.actors.batching.held_prompts import HeldPrompts
from genbatch.actors.batching.intake import Intake
from genbatch.actors.batching.iteration import Interrupt, Iterate
from genbatch.actors.batching.journal import Journal
from genbatch.actors.batching.kv_view import KVView
from genbatch.actors.batching.model_card import model_card
from genbatch.actors.batching.open_requests import OpenRequests
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.batching.pace import Pace
from genbatch.actors.batching.planner import Planner
from genbatch.actors.batching.prompt_sharing import PromptSharing
from genbatch.actors.batching.request import Request
from genbatch.actors.batching.run_ahead import Decoded
from genbatch.actors.batching.sequence import HeldPrompt, Sequence
from genbatch.actors.batching.session_calls import SessionCalls, SessionEnded
from genbatch.actors.batching.slots import Slots
from genbatch.actors.batching.stall_watch import StallWatch
from genbatch.actors.batching.stats_report import stats_report
from genbatch.actors.batching.step_commit import StepCommit
from genbatch.actors.batching.stepper import RunEnded, Stepped, Stepper
from genbatch.actors.batching.swap import Swap
from genbatch.actors.batching.text_calls import TextCalls
from genbatch.actors.recording.flight import Flight
from genbatch.actors.recording.recorder import open_flight
from genbatch.actors.runtime.genserver import NOREPLY, Down, From, GenServer, Reason, Timer, reply_error
from genbatch.actors.runtime.worker import Worker
from genbatch.actors.scheduling.llm_request import LlmRequest, Phase
from genbatch.nif.context import Context
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import (
    EngineError,
    GenbatchError,
    PromptTooLong,
    Unavailable,
)
from genbatch.proto.grammar import grammar_of
from genbatch.proto.service_messages import Health, Models

# Prompts with more characters than this are tokenized off the event loop.
INLINE_PROMPT_CHARS = 8192


@dataclass(frozen=True, slots=True)
class Flush:
    """The accumulation window is over."""


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The time that a `Drain` call gave is over."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A long prompt has been tokenized."""

    request: Request
    tokens: outcome.Outcome[list[int]]


class Batcher(GenServer):
    """Owns the context; see the module's docstring for a request's way.

    Args:
        open_context: makes the context; runs once, on the worker thread.
        options: see BatcherOptions.
        paced: whether it evaluates only while an `Iterate` call waits, instead of as soon as there is work.
        open_worker: makes its threads; a simulation has none.
    """

    def __init__(
        self,
        open_context: Callable[[], Context],
        options: BatcherOptions | None = None,
        *,
        paced: bool = False,
        open_worker: Callable[[str], Worker] = Worker,
    ) -> None:
        self.options = options or BatcherOptions()
        self.paced = paced
        self.stats = BatcherStats()
        self._open_context = open_context
        self._open_worker = open_worker
        self._encoding = 0  # requests whose prompt or grammar is with its thread
        self._stepping = False  # whether the context is in use by its thread
        self._window: Timer | None = None
        self._pace: Pace | None = None  # the iteration that a paced Batcher was asked for
        self._draining: Draining | None = None
        self._numbers = count(1)
        self._runs_ahead = self.options.async_batching and not paced and self.options.record is None
        if paced and self.options.record is not None:
            raise OptionError("record", "a Batcher that evaluates on demand is not recorded")

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
                self._receive(request, from_)
                return NOREPLY
            case GetStats():
                return self._stats()
            case GetHealth():
                return self._health()
            case GetModels():
                return Models(models=(model_card(self.ctx, self.options.n_parallel),))
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
                self._drain(timeout_s, from_)
                return NOREPLY
            case Iterate():
                assert self.paced and self._pace is None, "one iteration at a time, of a paced Batcher"
                self._pace = Pace(from_, request.sit_out, self.stats.generation_tokens)
                self._tick()
                return NOREPLY
            case Interrupt():
                self._interrupt(request)
                return None
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
                self._encoding -= 1
                if message.request in self.requests:  # else its caller left meanwhile
                    self._encoded(message.request, message.tokens)
            case Compiled():
                self._encoding -= 1
                if message.request in self.requests:
                    self._compiled(message)
            case SessionEnded():
                self._stepping = False
                message.end()
                self._tick()
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

    async def terminate(self, reason: Reason) -> None:
        self._flight.close(f"the batcher has stopped: {reason!r}")
        self.stepper.hurry()
        self.requests.end_all(Unavailable("the batcher has stopped"))
        self.sessions.end_all(Unavailable("the batcher has stopped"))
        await self._worker.run(self.ctx.close)
        await self._close_workers()

    async def _open(self) -> None:
        self.ctx = await self._worker.run(self._open_context)
        self.intake = self._open_intake()
        self._texts = TextCalls(self.intake, self._tokenizing, INLINE_PROMPT_CHARS)
        self.grammars = Grammars(
            self.ctx.model, self.options.limits.max_grammar_s, lambda done: self.ref.info(done, control=True)
        )
        self._watch = StallWatch(self.options.stall_s, trio.current_time())
        self.held = HeldPrompts(range(self.options.n_parallel, self.ctx.num_sequences), self.ctx.kv.block_size)
        self.sessions = SessionCalls(self.ctx, self.held, self.intake)
        self.swap = Swap(self.ctx, self.options.cpu_offload_space)
        self.journal = Journal(self.stats, self.telemetry, self.ctx.model.name)
        fair = FairShare()
        in_turn = fair if self.options.fair_share else None
        self._flight = self._open_flight()
        now = self._flight.now
        self.slots = Slots(self.ctx, self.held, self.swap, in_turn, self.options.n_parallel, self.journal, now)
        self.requests = OpenRequests(self.slots, fair, self.journal, self._ended, now)
        self.commit = StepCommit(self.ctx, self.requests, self.journal)
        self.planner = Planner(self.options, KVView(self.ctx.kv), self.slots, self.held)
        self.sharing = PromptSharing(self.intake, self.held, self.slots)
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
                await self._worker.run(self.ctx.prefill, held.tokens, held.seq_id, 0)
            held.num_computed = len(held.tokens)

    def _open_intake(self) -> Intake:
        return Intake(self.ctx.model, self.options, self.ctx.max_positions)

    def _open_flight(self) -> Flight:
        return open_flight(self.options)

    async def _close_workers(self) -> None:
        if hasattr(self, "grammars"):  # else it did not get that far
            await self.grammars.close()
        await self._tokenizing.close()
        await self._worker.close()

    # Receiving

    def _receive(self, message: Generate, from_: From[Any]) -> None:
        wanted = message.request
        try:
            if self._draining is not None:
                raise Unavailable("the service is draining: it takes no new requests")
            self.intake.check(wanted)
            self.intake.check_beams(message.beam_width, wanted)
            deadline_s = self._admit(message)
        except GenbatchError as error:
            self.journal.refused(message, error)
            reply_error(from_, error)
            return
        now = self._flight.now()
        request = Request(
            number=next(self._numbers),
            wanted=wanted,
            from_=from_,
            monitor=self.monitor(from_),
            on_token=message.on_token,
            client=message.client,
            request_id=self.journal.request_id(message),
            accepted_at=now,
            tag=message.tag,
            beam_width=message.beam_width,
            keep=message.keep,
            grammar=grammar_of(wanted),
            expires_at=None if deadline_s is None else now + deadline_s,
        )
        if not self.requests:
            self._watch.restart(now)
        self.requests.add(request)
        self._flight.arrived(request, message, deadline_s)
        if request.grammar is None:
            self._encode(request)
        else:
            self._encoding += 1
            self.grammars.compile(request)

    def _compiled(self, message: Compiled) -> None:
        if isinstance(message.constraints, outcome.Error):
            self._encoded(message.request, message.constraints)
            return
        message.request.constraints = message.constraints.unwrap()
        self._encode(message.request)

    def _encode(self, request: Request) -> None:
        """Tokenizes the prompt, a long one off the event loop."""
        wanted = request.wanted
        if self.intake.size(wanted) <= INLINE_PROMPT_CHARS:
            self._encoded(request, outcome.capture(self.intake.encode, wanted))
        else:
            ref = self.ref
            self._encoding += 1
            self._tokenizing.submit(
                self.intake.encode,
                wanted,
                on_done=lambda tokens: ref.info(Encoded(request, tokens), control=True),
            )

    def _admit(self, message: Generate) -> float | None:
        """Lets a request wait, or raises; returns its deadline in seconds from now."""
        wanted = message.request
        deadline_s = wanted.deadline_s
        if deadline_s is None and message.client and self.options.default_deadline_s:
            deadline_s = self.options.default_deadline_s
        account = wanted.tenant or message.client
        load = Load(
            free_slots=len(self.slots.seq_pool),
            waiting=len(self.slots.pending) + self._encoding,
            # The program's own requests, of which there may be many, have no share to be measured.
            waiting_of=self.requests.waiting_of() if account else {},
            open_of=self.requests.open_of() if account else {},
            service_s=self.stats.median_service(),
        )
        admission = self.options.admission(message.client)
        admission.check(wanted=wanted.n, client=account, deadline_s=deadline_s, load=load)
        return deadline_s

    def _encoded(self, request: Request, tokens: "outcome.Outcome[list[int]]") -> None:
        self._flight.encoded(request, tokens, self.intake)
        try:
            request.prompt_tokens = tokens.unwrap()
            max_tokens = self.intake.max_tokens(request.wanted, len(request.prompt_tokens))
        except Exception as error:  # a tokenizer that chokes on a prompt fails that prompt's request
            refusal = error if isinstance(error, GenbatchError) else EngineError(f"reading it failed: {error}")
            self.journal.unreadable(request, refusal)
            self.requests.end(request, refusal)
            return
        request.sequences = self.intake.sequences(request, max_tokens)
        self.journal.accepted(request)
        self.sharing.share(request, context_is_free=not self._stepping)
        if request.constraints:
            self.grammars.watch(request.sequences)
        for sequence in request.sequences:
            self.slots.enqueue(sequence)
        if self.paced:
            return
        if self.slots.seq_pool:
            self.stepper.hurry()
        if len(self.slots.pending) >= self.options.flush_size:
            self._tick_when_idle()
        elif not self._stepping and self._window is None:
            self._window = self.send_after(self.options.batch_timeout / 1000, Flush())

    # The tick

    def _tick_when_idle(self) -> None:
        if not self._stepping:
            self._tick()

    def _tick(self) -> None:
        """One round of finish, plan, start and step; nothing happens when nothing can be done."""
        if self._window is not None:
            self._window.cancel()
            self._window = None
        self.requests.end_abandoned()
        if self.sessions:
            self._serve_session()
            return
        plan = self.planner.plan(self._flight.sitting_out(self._sitting_out()))
        if self._pace is not None:
            self._pace.plan = plan
        for owner in plan.paused_requests:
            self.slots.pause(owner)
        for owner in plan.never_fitting:
            self._refuse(owner)
        groups = self.planner.start(plan)
        self._flight.ticked(plan, groups)
        if groups:
            self._stepping = True
            repeats = self._runs_ahead and self.planner.repeats(plan)
            self.stepper.begin(groups, repeats=repeats)
        elif plan.paused_requests or plan.never_fitting:
            self._tick()  # what they gave back may let others in
        else:
            if not self.requests:
                self.ctx.kv.check_integrity()
            self._end_iteration()

    def _serve_session(self) -> None:
        """In place of a step, since it needs the context for itself."""
        self._stepping = True
        work, end = self.sessions.next()
        ref = self.ref
        self._worker.submit(work, on_done=lambda result: ref.info(SessionEnded(partial(end, result)), control=True))

    def _stepped(self) -> None:
        """The tick's forwards have ended and are booked."""
        self._stepping = False
        if self.paced:
            self._end_iteration()
        else:
            self._tick()

    def _end_iteration(self) -> None:
        if self._pace is not None:
            pace, self._pace = self._pace, None
            pace.end(self.ctx.kv, self.stats.generation_tokens)

    def _interrupt(self, message: Interrupt) -> None:
        self.requests.interrupt(message.tags)
        self._end_abandoned()

    def _end_abandoned(self) -> None:
        """Now, or as soon as the context is free."""
        self.stepper.hurry()
        if not self._stepping:
            self.requests.end_abandoned()

    def _sitting_out(self) -> frozenset[int]:
        """The ids of those that keep their place and are not planned."""
        sitting_out = self.grammars.sitting_out()
        if self._pace is None:
            return sitting_out
        owners = (*self.slots.sequences.values(), *self.slots.pending)
        return sitting_out | {owner.request_id for owner in owners if self._pace.sits_out(owner)}

    def _refuse(self, owner: LlmRequest) -> None:
        """The scheduler finds no way to fit it: a held prompt makes room first, then the request ends."""
        oldest = self.held.least_recent()
        if oldest is not None:
            self.slots.drop_held(oldest)
        elif isinstance(owner, Sequence) and owner.phase is not Phase.FINISHED:
            self.requests.fail(owner.request, PromptTooLong("the KV cache cannot hold this request"))
        elif isinstance(owner, HeldPrompt):
            self.slots.drop_held(owner)

    # Ending

    def _ended(self, request: Request) -> None:
        """A request was answered and is forgotten."""
        if self._draining is not None and not self.requests:
            self._draining.end()

    def _drain(self, timeout_s: float, from_: From[Any]) -> None:
        """Refuses new requests from now on; replies when those there are have ended."""
        if self._draining is None:
            self._draining = Draining()
        self._draining.ask(from_)
        self._flight.draining(timeout_s)
        if self.requests:
            self.send_after(timeout_s, DrainOver())
        else:
            self._draining.end()

    def _cancel_open(self) -> None:
        assert self._draining is not None
        for request in self.requests:
            if request.abandoned is None:
                request.abandoned = "cancelled"
                self._draining.num_cancelled += 1
        self._end_abandoned()

    def _health(self) -> Health:
        return self._watch.health(
            trio.current_time(),
            num_open=len(self.requests),
            draining=self._draining is not None,
            steps=self.stats.steps,
            running=len(self.slots.sequences),
            waiting=len(self.slots.pending) + self._encoding,
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
