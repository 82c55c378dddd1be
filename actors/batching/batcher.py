"""The Batcher: the actor that owns the model context and a pool of sequence slots, and serves every caller.

    batcher = await start(nursery, Batcher(open_context, options), name="batcher")
    result = await batcher.call(Generate(GenerateRequest(prompt="Hello", max_tokens=8)), timeout=None)

A request's way: `handle_call` validates it and holds the reply; an idle Batcher waits for `batch_size` requests or
`batch_timeout`; then ticks follow one another until nothing is left. A tick has four phases:

    finish   sequences whose caller is gone or whose deadline passed give their slot and blocks back
    plan     the scheduler, a pure function, picks decodes and prefill chunks; paused ones give up their blocks
    start    newly picked requests take a slot and share what was evaluated before (`seq_cp`, prefix cache)
    step     one `Context.step` on the worker thread; its result comes back as the message `Stepped`

Messages are handled while a step runs, so the Batcher always answers; only it touches its state, and the context
only between two steps or on the worker.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import outcome
import trio

from genbatch.actors.batching.batcher_messages import Generate, GetStats
from genbatch.actors.batching.batcher_stats import BatcherStats
from genbatch.actors.batching.held_prompts import HeldPrompts
from genbatch.actors.batching.intake import Intake
from genbatch.actors.batching.iteration import Interrupt, Iterate
from genbatch.actors.batching.kv_view import KVView
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.batching.pace import Pace
from genbatch.actors.batching.request import Request
from genbatch.actors.batching.sequence import HeldPrompt, Sequence, Slotted
from genbatch.actors.batching.step import Evaluated, Planned, evaluate, plan_beams, plan_tokens
from genbatch.actors.batching.swap import Swap, SwapFault, run_copies
from genbatch.actors.runtime.genserver import NOREPLY, Down, From, GenServer, Monitor, Reason, Timer, reply_error
from genbatch.actors.runtime.worker import Worker
from genbatch.actors.scheduling.batching_type import forwards
from genbatch.actors.scheduling.llm_request import LlmRequest, Phase
from genbatch.actors.scheduling.scheduler import SchedulerOutput, normalize_output
from genbatch.actors.scheduling.scheduler_spec import build_scheduler
from genbatch.nif.context import Context
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.sampling.sampler import Sampled, SampleFault
from genbatch.proto.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    GenbatchError,
    PromptTooLong,
    QueueFull,
    Unavailable,
)
from genbatch.proto.messages import FinishReason, Token

# Prompts with more characters than this are tokenized off the event loop.
INLINE_PROMPT_CHARS = 8192
# What a refused caller is told to wait, per request ahead of it, until a measured rate is known.
RETRY_MS_PER_REQUEST = 50


@dataclass(frozen=True, slots=True)
class Flush:
    """The accumulation window is over."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A long prompt has been tokenized."""

    request: Request
    tokens: outcome.Outcome[list[int]]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step has ended on the worker thread."""

    batch: list[Planned]
    result: outcome.Outcome[list[Evaluated]]
    seconds: float


class Batcher(GenServer):
    """Owns the context; see the module's docstring for a request's way.

    Args:
        open_context: makes the context; runs once, on the worker thread.
        options: see BatcherOptions.
        paced: whether it evaluates only while an `Iterate` call waits, instead of as soon as there is work.
    """

    def __init__(
        self, open_context: Callable[[], Context], options: BatcherOptions | None = None, *, paced: bool = False
    ) -> None:
        self.options = options or BatcherOptions()
        self.paced = paced
        self.stats = BatcherStats()
        self.pending: list[Sequence] = []  # by priority, then arrival
        self.sequences: dict[int, Sequence] = {}  # by slot
        self.seq_pool = set(range(self.options.n_parallel))  # free slots
        self._open_context = open_context
        self._requests: dict[Monitor, Request] = {}
        self._encoding = 0  # prompts with the tokenizer's thread
        self._groups: deque[list[Planned]] = deque()  # what is left to evaluate in this tick
        self._stepping = False
        self._window: Timer | None = None
        self._pace: Pace | None = None  # the iteration that a paced Batcher was asked for

    # Callbacks

    async def init(self) -> None:
        self._worker = Worker("genbatch-model")
        self._tokenizing = Worker("genbatch-tokenizer")
        try:
            await self._open()
        except BaseException:
            with trio.CancelScope(shield=True):  # an actor that did not start is not terminated: its threads end here
                await self._close_workers()
            raise

    async def handle_call(self, request: object, from_: From[Any]) -> object:
        match request:
            case Generate():
                self._receive(request, from_)
                return NOREPLY
            case GetStats():
                return self._stats()
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
        match message:
            case Stepped():
                self._stepped(message)
            case Down():
                request = self._requests.get(message.monitor)
                if request:
                    request.abandoned = "cancelled"
                    if not self._stepping:
                        self._finish_abandoned()
            case Encoded():
                self._encoding -= 1
                if message.request.monitor in self._requests:  # else its caller left meanwhile
                    self._encoded(message.request, message.tokens)
            case Flush():
                self._window = None
                self._tick_when_idle()

    async def terminate(self, reason: Reason) -> None:
        for request in list(self._requests.values()):
            request.fail(Unavailable("the batcher has stopped"))
        self._requests.clear()
        await self._worker.run(self.ctx.close)
        await self._close_workers()

    async def _open(self) -> None:
        self.ctx = await self._worker.run(self._open_context)
        self.intake = Intake(self.ctx.model, self.options, self.ctx.max_positions)
        self.held = HeldPrompts(range(self.options.n_parallel, self.ctx.num_sequences), self.ctx.kv.block_size)
        self.swap = Swap(self.ctx, self.options.cpu_offload_space)
        kv_view = KVView(self.ctx.kv)
        self.scheduler = build_scheduler(self.options.scheduling, kv_view)
        self._limits = self.options.scheduling.limits(kv_view.block_size)
        for content in self.options.system_prompts:
            await self._hold_configured(content)

    async def _close_workers(self) -> None:
        await self._tokenizing.close()
        await self._worker.close()

    # Receiving

    def _receive(self, message: Generate, from_: From[Any]) -> None:
        wanted = message.request
        try:
            self.intake.check(wanted)
            self.intake.check_beams(message.beam_width, wanted)
            self._check_queue(wanted.n)
        except GenbatchError as error:
            self.stats.refused += 1
            reply_error(from_, error)
            return
        now = trio.current_time()
        request = Request(
            wanted=wanted,
            from_=from_,
            monitor=self.monitor(from_),
            on_token=message.on_token,
            client=message.client,
            accepted_at=now,
            tag=message.tag,
            beam_width=message.beam_width,
            keep=message.keep,
            expires_at=None if wanted.deadline_s is None else now + wanted.deadline_s,
        )
        self._requests[request.monitor] = request
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

    def _check_queue(self, wanted_sequences: int) -> None:
        waiting = len(self.pending) + self._encoding
        if waiting + wanted_sequences > self.options.max_queue + len(self.seq_pool):
            raise QueueFull(
                f"{waiting} requests are waiting, {self.options.max_queue} may",
                retry_after_ms=self._retry_ms(waiting),
            )

    def _retry_ms(self, waiting: int) -> int:
        """When a slot for one more should be free: the waiting ones' share of the recent pace."""
        latency = self.stats.median_latency()
        if latency is None:
            return RETRY_MS_PER_REQUEST * waiting
        return max(1, round(1000 * latency * waiting / self.options.n_parallel))

    def _encoded(self, request: Request, tokens: "outcome.Outcome[list[int]]") -> None:
        try:
            request.prompt_tokens = tokens.unwrap()
            max_tokens = self.intake.max_tokens(request.wanted, len(request.prompt_tokens))
        except Exception as error:  # a tokenizer that chokes on a prompt fails that prompt's request
            self.stats.refused += 1
            self._end(
                request, error if isinstance(error, GenbatchError) else EngineError(f"tokenizing failed: {error}")
            )
            return
        self.stats.accepted += 1
        self.stats.prompt_tokens += len(request.prompt_tokens)
        request.sequences = self.intake.sequences(request, max_tokens)
        self._share_first_message(request)
        for sequence in request.sequences:
            insort(self.pending, sequence, key=_waiting_key)
        if self.paced:
            return
        if len(self.pending) >= self.options.flush_size:
            self._tick_when_idle()
        elif not self._stepping and self._window is None:
            self._window = self.send_after(self.options.batch_timeout / 1000, Flush())

    # Shared system prompts

    async def _hold_configured(self, content: str) -> None:
        held = self.intake.held_prompt(self.intake.system_prompt(content), b"")
        held.pinned = True
        if self.held.hold(held):
            assert held.seq_id is not None
            await self._worker.run(self.ctx.prefill, held.tokens, held.seq_id, 0)
        held.num_computed = len(held.tokens)

    def _share_first_message(self, request: Request) -> None:
        """Lets the request share a held prompt; holds its first message when another request had the same."""
        first = request.sequences[0]
        if first.scores_prompt:
            return
        held = self.held.find(request.prompt_tokens, first.cache_key)
        if held is None:
            prefix = self.intake.first_message(request.wanted)
            # A template may do something new with a conversation; at least one token stays to be evaluated.
            shares = len(prefix) < len(request.prompt_tokens) and request.prompt_tokens[: len(prefix)] == prefix
            if shares and self.held.notice(prefix, first.cache_key):
                held = self._hold(prefix, first.cache_key)
        if held is not None:
            first.donor = held
            first.num_shared = len(held.tokens)

    def _hold(self, prefix: list[int], key: bytes) -> HeldPrompt | None:
        held = self.intake.held_prompt(prefix, key)
        if self.held.hold(held):
            return held
        oldest = self.held.least_recent()
        if oldest is None or self._stepping:
            return None  # the context is not touched while a step runs
        self.ctx.seq_rm(self.held.drop(oldest))
        self.held.hold(held)
        return held

    # The tick

    def _tick_when_idle(self) -> None:
        if not self._stepping:
            self._tick()

    def _tick(self) -> None:
        """One round of finish, plan, start and step; nothing happens when nothing can be done."""
        if self._window is not None:
            self._window.cancel()
            self._window = None
        self._finish_abandoned()
        plan = self._plan()
        for owner in plan.paused_requests:
            self._pause(owner)
        for owner in plan.never_fitting:
            self._refuse(owner)
        self._groups = deque(group for group in self._start(plan) if group)
        if self._groups:
            self._step()
        elif plan.paused_requests or plan.never_fitting:
            self._tick()  # what they gave back may let others in
        else:
            if not self._requests:
                self.ctx.kv.check_integrity()
            self._end_iteration()

    def _end_iteration(self) -> None:
        if self._pace is not None:
            pace, self._pace = self._pace, None
            pace.end(self.ctx.kv, self.stats.generation_tokens)

    def _interrupt(self, message: Interrupt) -> None:
        for request in self._requests.values():
            if request.tag in message.tags:
                request.abandoned = "cancelled"
        if not self._stepping:
            self._finish_abandoned()

    def _finish_abandoned(self) -> None:
        now = trio.current_time()
        for request in list(self._requests.values()):
            if request.abandoned is None and request.expires_at is not None and now >= request.expires_at:
                request.abandoned = "deadline"
            if request.abandoned is not None:
                self._abandon(request, request.abandoned)

    def _abandon(self, request: Request, reason: FinishReason) -> None:
        """Ends a request early: to a caller that is still there with what was generated so far."""
        for sequence in request.sequences:
            if sequence.phase is not Phase.FINISHED:
                self._release(sequence)
                request.finish(sequence, reason)
        self.stats.count_finished(reason, trio.current_time() - request.accepted_at)
        error: GenbatchError | None = None
        if not request.choices:  # its prompt was still being tokenized
            left = reason == "cancelled"
            error = Cancelled("cancelled") if left else DeadlineExceeded("the deadline passed before the first step")
        self._end(request, error)

    def _plan(self) -> SchedulerOutput:
        """Asks the scheduler; what a waiting sequence will share counts as computed while it is asked."""
        ready = [sequence for sequence in self.pending if not sequence.waits_for_donor]
        if len(self.sequences) + len(self.seq_pool) < self.options.n_parallel or any(s.width > 1 for s in ready):
            ready = self._with_slots(ready)
        candidates = ready[: len(self.seq_pool)]
        for sequence in candidates:
            sequence.num_computed = self._reusable(sequence)
        active: list[LlmRequest] = [*self.held.evaluating(), *self.sequences.values(), *ready]
        inflight: frozenset[int] = frozenset()
        if self._pace is not None:
            inflight = frozenset(owner.request_id for owner in active if self._pace.sits_out(owner))
        try:
            output = self.scheduler.schedule_request(active, inflight) if active else ([], [], [])
            plan = normalize_output(output, active, inflight, self._limits)
            if self._pace is not None:
                self._pace.plan = plan
            return plan
        finally:
            for sequence in candidates:
                sequence.num_computed = 0

    def _with_slots(self, ready: list[Sequence]) -> list[Sequence]:
        """The waiting sequences that find a slot for each beam; nobody overtakes one that does not."""
        free = len(self.seq_pool)
        for index, sequence in enumerate(ready):
            free -= sequence.width
            if free < 0:
                return ready[:index]
        return ready

    def _reusable(self, sequence: Sequence) -> int:
        swapped = self.swap.length(sequence.request_id)
        if swapped:
            return swapped
        if self._shares(sequence):
            return sequence.num_shared
        if sequence.scores_prompt:
            return 0
        return self.ctx.kv.peek_prefix(sequence.tokens, sequence.cache_key)

    def _shares(self, sequence: Sequence) -> bool:
        """Whether its donor still holds what is to be shared: a sliding window may have moved past it."""
        donor = sequence.donor
        if donor is None or donor.seq_id is None or not sequence.donor_ready:
            return False
        return self.ctx.kv.shortest_prefix(donor.seq_id) <= sequence.num_shared

    def _pause(self, owner: LlmRequest) -> None:
        """Takes a sequence's blocks; it waits in its old turn and evaluates all its tokens again."""
        if isinstance(owner, HeldPrompt):
            self.ctx.seq_rm(self.held.drop(owner))
            return
        assert isinstance(owner, Sequence) and owner.seq_id is not None
        if owner.beams is not None:
            owner.beams.restart()
            owner.num_generated = 0
        elif self.swap.out(owner.request_id, owner.seq_id):
            self.stats.swaps += 1
        self._free_slot(owner)
        owner.pause()
        self.stats.preemptions += 1
        insort(self.pending, owner, key=_waiting_key)

    def _start(self, plan: SchedulerOutput) -> list[list[Planned]]:
        """The plan's forwards, each a list of entries."""
        return [self._lay_out(part) for part in forwards(self.options.batching_type, plan)]

    def _lay_out(self, plan: SchedulerOutput) -> list[Planned]:
        """One forward's entries; those newly picked take their slots."""
        chunks = []
        for owner in plan.context_requests:
            assert isinstance(owner, Slotted)
            if isinstance(owner, Sequence) and owner.seq_id is None:
                self._admit(owner)
            size = min(plan.chunk_sizes.get(owner.request_id, owner.context_remaining), owner.context_remaining)
            chunks.append(plan_tokens(owner, size))
        decodes: list[Planned] = []
        for owner in plan.generation_requests:
            assert isinstance(owner, Sequence)
            decodes += plan_beams(owner, owner.beams) if owner.beams is not None else [plan_tokens(owner, 1)]
        return decodes + chunks

    def _admit(self, sequence: Sequence) -> None:
        """Moves a waiting sequence into a slot, with whatever is already evaluated of its beginning."""
        self.pending.remove(sequence)
        seq_id = min(self.seq_pool)
        self.seq_pool.remove(seq_id)
        self.sequences[seq_id] = sequence
        sequence.seq_id = seq_id
        sequence.beam_slots = sorted(self.seq_pool)[: sequence.width - 1]
        self.seq_pool.difference_update(sequence.beam_slots)
        sequence.move(Phase.PREFILLING)
        if self.swap.length(sequence.request_id):
            tokens, key = sequence.tokens, sequence.cache_key
            sequence.num_computed = self.swap.back(sequence.request_id, seq_id, tokens, key)
            return
        donor, num_shared = sequence.donor, 0
        if donor is not None and donor.seq_id is not None and self._shares(sequence):
            num_shared = sequence.num_shared
            self.ctx.seq_cp(donor.seq_id, seq_id, 0, num_shared)
            if isinstance(donor, HeldPrompt):
                donor.last_used = trio.current_time()
        if not sequence.scores_prompt:
            sequence.num_computed = self.ctx.attach_prefix(seq_id, sequence.tokens, sequence.cache_key)
        if sequence.num_pauses == 0:
            self.stats.shared_tokens += num_shared
            self.stats.reused_tokens += sequence.num_computed - num_shared
            if sequence.choice == 0:
                sequence.request.cached_tokens = sequence.num_computed

    def _refuse(self, owner: LlmRequest) -> None:
        """The scheduler finds no way to fit it: a held prompt makes room first, then the request ends."""
        oldest = self.held.least_recent()
        if oldest is not None:
            self.ctx.seq_rm(self.held.drop(oldest))
        elif isinstance(owner, Sequence) and owner.phase is not Phase.FINISHED:
            self._fail(owner.request, PromptTooLong("the KV cache cannot hold this request"))
        elif isinstance(owner, HeldPrompt):
            self.ctx.seq_rm(self.held.drop(owner))

    # The step

    def _step(self) -> None:
        """Evaluates the tick's next group on the worker thread."""
        batch = self._groups.popleft()
        self._stepping = True
        started = trio.current_time()
        ref = self.ref

        def done(result: "outcome.Outcome[list[Evaluated]]") -> None:
            ref.info(Stepped(batch, result, trio.current_time() - started), control=True)

        self._worker.submit(self._evaluate, batch, self.swap.take_copies(), on_done=done)

    def _evaluate(self, batch: list[Planned], copies: list[Callable[[], None]]) -> list[Evaluated]:
        """Runs on the worker thread."""
        run_copies(copies)
        return evaluate(self.ctx, batch)

    def _stepped(self, message: Stepped) -> None:
        result = message.result
        if isinstance(result, outcome.Error):
            self._split(message.batch, result.error)
        else:
            self.stats.count_step(len(message.batch), message.seconds)
            for planned, evaluated in zip(message.batch, result.unwrap(), strict=True):
                self._commit(planned, evaluated)
        while self._groups:
            self._groups[0] = [planned for planned in self._groups[0] if planned.owner.seq_id is not None]
            if self._groups[0]:
                self._step()
                return
            self._groups.popleft()
        self._stepping = False
        if self.paced:
            self._end_iteration()
        else:
            self._tick()

    def _split(self, batch: list[Planned], error: BaseException) -> None:
        """A step failed and left no trace: its halves are tried, until what is at fault stands alone."""
        if not isinstance(error, Exception) or isinstance(error, SwapFault):
            raise error
        if isinstance(error, OutOfBlocks) and len(self.sequences) > 1:
            # The newest gives way, as a plan would have it; the rest is planned anew.
            self._groups.clear()
            self._pause(max(self.sequences.values(), key=_waiting_key))
            return
        if len(batch) > 1:
            half = len(batch) // 2
            self._groups.extendleft([batch[half:], batch[:half]])
            return
        owner = batch[0].owner
        if isinstance(owner, HeldPrompt):
            self.ctx.seq_rm(self.held.drop(owner))
        elif isinstance(owner, Sequence):
            self._fail(owner.request, EngineError(f"the step failed: {error}"))

    def _commit(self, planned: Planned, evaluated: Evaluated) -> None:
        """Books what a step gave: positions, the token drawn, its text, and the end if it was the last."""
        owner = planned.owner
        if owner.seq_id is None:
            return  # its request has just ended through another of its sequences
        if isinstance(owner, Sequence) and owner.beams is not None and owner.phase is Phase.DECODING:
            self._draw_beam(owner, planned.entry.seq_id, evaluated)
            return
        owner.num_computed += len(planned.entry.tokens)
        if not isinstance(owner, Sequence):
            self.stats.prefilled_tokens += len(planned.entry.tokens)
            return
        request = owner.request
        if owner.phase is Phase.PREFILLING:
            # The token drawn last before a pause is decoded, not prefilled.
            self.stats.prefilled_tokens += len(planned.entry.tokens) - (planned.draws and owner.num_generated > 0)
        if evaluated.prompt_logprobs:
            request.prompt_logprobs = request.prompt_logprobs or [None]
            # A prompt that was paused is scored again: the same numbers take the same places.
            first = planned.entry.n_past + 1
            request.prompt_logprobs[first : first + len(evaluated.prompt_logprobs)] = evaluated.prompt_logprobs
        if request.keep is not None and request.keep.context and evaluated.rows is not None:
            first = planned.entry.n_past + len(planned.entry.tokens) - len(evaluated.rows)
            request.keep.add_context(first, evaluated.rows[: max(0, owner.num_prompt_tokens - first)])
        drawn = evaluated.drawn
        if owner.beams is not None and drawn is not None:
            self._draw_beam(owner, planned.entry.seq_id, evaluated)
        elif isinstance(drawn, SampleFault):
            self._fail(request, EngineError(drawn.reason))
        elif drawn is not None and request.abandoned is None:
            if request.keep is not None and request.keep.generation and evaluated.rows is not None:
                request.keep.add_generation(owner.choice, evaluated.rows[-1])
            self._accept(owner, drawn)

    def _draw_beam(self, sequence: Sequence, slot: int, evaluated: Evaluated) -> None:
        """Books one beam's candidates; after the last beam's, the best ones go on, each with its parent's KV."""
        beams, request, drawn = sequence.beams, sequence.request, evaluated.drawn
        assert beams is not None and sequence.seq_id is not None
        if not isinstance(drawn, Sampled):
            self._fail(request, EngineError(drawn.reason if drawn is not None else "nothing drawn"))
            return
        slots = [sequence.seq_id, *sequence.beam_slots]
        keeps = request.keep is not None and request.keep.generation and evaluated.rows is not None
        row = evaluated.rows[-1] if keeps and evaluated.rows is not None else None
        if request.abandoned is not None or not beams.draw(slots.index(slot), drawn.top, row):
            return
        self._count_token(sequence)
        self.stats.generation_tokens += len(beams.running) - 1
        if beams.advance():
            self._finish(sequence, "stop" if beams.ended_by_stop else "length")
            return
        for source, target in beams.moves:
            self.ctx.seq_rm(slots[target])
            self.ctx.seq_cp(slots[source], slots[target])

    def _count_token(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.phase is Phase.PREFILLING:
            sequence.move(Phase.DECODING)
        elif sequence.beams is not None:
            sequence.num_computed += 1  # all beams' last tokens are evaluated by now
        if request.first_token_at is None:
            request.first_token_at = trio.current_time()
            self.stats.ttft.append(request.first_token_at - request.accepted_at)
        sequence.num_generated += 1
        self.stats.generation_tokens += 1

    def _accept(self, sequence: Sequence, drawn: Sampled) -> None:
        request = sequence.request
        index = sequence.num_generated
        self._count_token(sequence)
        sequence.sampler.accept(drawn.token_id)
        sequence.tokens.append(drawn.token_id)
        text = sequence.output.push(drawn)
        if request.on_token is not None:
            try:
                request.on_token(
                    Token(
                        text=text,
                        token_id=drawn.token_id,
                        index=index,
                        logprob=drawn.logprob,
                        choice=sequence.choice,
                    )
                )
            except Exception as error:  # the caller's own function: its fault ends its request only
                self._fail(request, EngineError(f"on_token raised {error!r}"))
                return
        if sequence.output.finish_reason is not None:
            self._finish(sequence, sequence.output.finish_reason)

    # Ending

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Frees the sequence first, so that a caller who reads its reply finds the room already there."""
        request = sequence.request
        self._release(sequence)
        if request.finish(sequence, reason):
            self.stats.count_finished(reason, trio.current_time() - request.accepted_at)
            self._end(request, None)

    def _fail(self, request: Request, error: GenbatchError) -> None:
        for sequence in request.sequences:
            if sequence.phase is not Phase.FINISHED:
                self._release(sequence)
        self.stats.count_finished("error", trio.current_time() - request.accepted_at)
        self._end(request, error)

    def _release(self, sequence: Sequence) -> None:
        if sequence.seq_id is not None:
            self._free_slot(sequence)
        else:
            self.pending.remove(sequence)
            self.swap.forget(sequence.request_id)
        sequence.move(Phase.FINISHED)

    def _free_slot(self, sequence: Sequence) -> None:
        seq_id = sequence.seq_id
        assert seq_id is not None
        for slot in (seq_id, *sequence.beam_slots):
            self.ctx.seq_rm(slot)
            self.seq_pool.add(slot)
        del self.sequences[seq_id]
        sequence.seq_id = None
        sequence.beam_slots = []

    def _end(self, request: Request, error: GenbatchError | None) -> None:
        """The one place where a request is forgotten and its caller answered."""
        del self._requests[request.monitor]
        request.monitor.cancel()
        if error is not None:
            request.fail(error)
        else:
            request.reply()

    def _stats(self) -> dict[str, Any]:
        kv = self.ctx.kv
        counts = kv.counts()
        return {
            **self.stats.snapshot(),
            "model": self.ctx.model.name,
            "runner": self.ctx.runner.name,
            "requests_running": len(self.sequences),
            "requests_waiting": len(self.pending),
            "n_parallel": self.options.n_parallel,
            "held_prompts": len(self.held),
            "kv_blocks_max": counts.max,
            "kv_blocks_free": counts.free,
            "kv_blocks_used": counts.used,
            "kv_block_size": kv.block_size,
            "kv_bytes": sum(
                count * self.ctx.runner.bytes_per_block(group, kv.block_size)
                for group, count in enumerate(kv.num_blocks)
            ),
            "swapped_bytes": self.swap.bytes_used,
        }


def _waiting_key(sequence: LlmRequest) -> tuple[int, int]:
    return sequence.waiting_key
