"""BatcherParts: opens and closes the parts of a Batcher, and reports on them.

Each part gets its collaborators in its constructor, so this file shows which part uses which. The tick, in which the
parts work together, is in batcher.py. The reports are the models that a Batcher serves, and its statistics.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.arrivals import Arrivals, Grammars, PromptReader, PromptSharing
from genbatch.actors.batcher.calls import AdapterCalls, SessionCalls, TextCalls
from genbatch.actors.batcher.intake import Intake
from genbatch.actors.batcher.journal import BatcherStats, Journal, OpenFlight, StallWatch, unrecorded
from genbatch.actors.batcher.open_requests import BatchState, DiskBlocks, OpenRequests
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.planner import KVView, Planner
from genbatch.actors.batcher.requests import Sequence
from genbatch.actors.batcher.session_files import SessionFiles
from genbatch.actors.batcher.slots import HeldPrompts, Slots, Swap
from genbatch.actors.batcher.stepper import StepCommit, Stepper
from genbatch.actors.batcher.thinking import Thinking
from genbatch.actors.runtime.actor import Exit, GenServer, Reason, Timer
from genbatch.actors.runtime.worker import Worker
from genbatch.actors.scheduling.plan import RehearsedStep, StepTimeModel, StepWork
from genbatch.actors.scheduling.request import FairShare
from genbatch.nif.context import Context
from genbatch.nif.context.engine import Engine
from genbatch.nif.cuda_device import memory_of
from genbatch.nif.errors import OptionError, OutOfBlocks
from genbatch.nif.models.model_names import written_path
from genbatch.nif.runner import KnowsStep
from genbatch.proto.errors import Unavailable
from genbatch.proto.service_messages import Health, ModelCard, Models

log = logging.getLogger("genbatch")

# The rehearsal measures the cost of prompts: the most tokens of its prompt, and its approximate seconds.
REHEARSED_TOKENS, REHEARSAL_S = 32, 0.25
# Steps of each size. The fastest step counts, since other starting parts may slow the others.
TIMED_STEPS = 3


def context_factory(engine: Engine, options: BatcherOptions) -> Callable[[], Context]:
    """Return a function that opens a context over the loaded model; it runs at each start and restart of a Batcher."""
    options = options.on_device(memory_of(engine.model.device))
    return partial(
        engine.open_context,
        n_parallel=options.n_parallel,
        n_held=options.max_held_prompts,
        n_batch=options.max_batch_tokens,
    )


class BatcherParts(GenServer):
    """Opens and closes the parts of a Batcher; Batcher documents the arguments."""

    arrivals_type = Arrivals  # a replay has another type

    def __init__(
        self,
        open_context: Callable[[], Context],
        options: BatcherOptions | None = None,
        *,
        open_worker: Callable[[str], Worker] = Worker,
        open_flight: OpenFlight = unrecorded,
        on_models: Callable[[Models], None] | None = None,
        rehearsed: tuple[RehearsedStep, ...] = (),
    ) -> None:
        self.options = options or BatcherOptions()
        self.rehearsed = rehearsed
        self.stats = BatcherStats()
        self._open_context = open_context
        self._open_worker = open_worker
        self._open_flight = open_flight
        self._on_models = on_models
        self._stepping = False  # whether the worker thread uses the context
        self._window: Timer | None = None  # ends the wait of an idle Batcher
        self._window_ends = 0.0
        self._turn_began = 0.0  # arrival time of the current message, on the event loop's clock
        self._arrived = 0.0  # arrival time of the latest request
        self._is_telling = False  # whether first tokens are on their way to their callers; then the next tick waits
        self._deadline: Timer | None = None  # the next deadline; running steps check deadlines themselves
        self._runs_ahead = self.options.async_batching and self.options.record is None

    # Start and end

    async def init(self) -> None:
        # A part's message to the Batcher goes ahead of callers' messages.
        self._send: Callable[[object], None] = partial(self.ref.info, control=True)
        self._worker = self._open_worker("genbatch-model")
        self._tokenizing = self._open_worker("genbatch-tokenizer")
        self._reader = PromptReader(self._tokenizing, self._open_worker)
        try:
            await self._open()
        except BaseException:
            with trio.CancelScope(shield=True):  # an actor that failed to start is not terminated
                await self._close_workers()
            raise

    async def terminate(self, reason: Reason) -> None:
        self._flight.close("the batcher has stopped" if isinstance(reason, Exit) else f"the batcher failed: {reason!r}")
        self.stepper.hurry()
        self.requests.end_all(Unavailable("the batcher has stopped"))
        self.sessions.end_all(Unavailable("the batcher has stopped"))
        await self.sessions.close()
        await self.adapters.close()
        await self.disk.close()
        await self._worker.run(self.ctx.close)
        await self._close_workers()

    async def _open(self) -> None:
        self.ctx = await self._worker.run(self._open_context)
        self.ctx.kv.allow_keeping(self.options.kept_prefix_share)
        self.options = options = self.options.on_device(memory_of(self.ctx.model.device))
        self._flush_size, self._window_s, self._most_quiet_s = options.flush_size, options.window_s, options.quiet_s
        self.models = self._list_models()
        self.times = StepTimeModel()
        self.intake = self._open_intake()
        self._texts = TextCalls(self.intake, self._reader)
        self.grammars = Grammars(self.ctx.model, self.options.limits.max_grammar_s, self._send, self._open_worker)
        self._watch = StallWatch(self.options.stall_s, trio.current_time())
        self.swap = Swap(self.ctx, self.options.cpu_offload_space)
        self._flight = self._open_flight(self.options)
        self.journal = Journal(self.stats, self.telemetry, self.ctx.model.name, self._flight.now)
        state = self._open_state(self.options.n_parallel, self._flight.now)
        files = None
        if self.options.session_dir is not None:
            files = SessionFiles(written_path(self.options.session_dir), int(self.options.session_space * 2**30))
        self.sessions = SessionCalls(self.ctx, self.held_prompts, self._texts, self._send, files, self._open_worker)
        self.disk = DiskBlocks(self.ctx, self.requests, self._open_worker, self._send, self.send_after)
        self.adapters = AdapterCalls(state, self._open_worker, self._send, self.send_after, self._adapters_changed)
        view = KVView(self.ctx.kv, self.held_prompts, self.options.scheduling.limits(self.ctx.kv.block_size))
        self.intake.longest = view.longest
        self.planner = Planner(self.options, self.ctx.kv, view, self.slots, self.held_prompts, self.times)
        self.sharing = PromptSharing(self.intake, self.held_prompts, self.slots)
        self.arrivals = self.arrivals_type(state, self.options, self.intake, self.grammars, self._reader, self)
        self.commit = StepCommit(state)
        self.stepper = Stepper(
            state, self.commit, self._worker, self._send, looks_up=self.options.prompt_lookup, times=self.times
        )
        await self._rehearse()
        self._flight.begin(self.ctx, [self.intake.system_prompt(content) for content in self.options.system_prompts])
        for content in self.options.system_prompts:
            prompt = self.sharing.hold_configured(content)
            if prompt.seq_id is not None:
                try:
                    await self._worker.run(self.ctx.prefill, prompt.tokens, prompt.seq_id, 0)
                except OutOfBlocks as error:
                    reason = f"{content!r:.60} has {len(prompt.tokens)} tokens, for which the KV cache has no room"
                    raise OptionError("system_prompts", reason) from error
            prompt.num_computed = len(prompt.tokens)

    async def _rehearse(self) -> None:
        """Tokenize a conversation and run a few steps at the same time, without a request.

        So the first request finds all lazy parts built, and the first plan knows the cost of steps. After a crash,
        callers wait and the cost is known. So a native runner, which has no lazy parts, runs no step.
        """
        if not self.intake.generates:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._rehearse_text)
            await self._rehearse_steps()

    async def _rehearse_text(self) -> None:
        try:
            await self._tokenizing.run(self.ctx.model.tokenizer.rehearse)
        except Exception as error:  # a request with the same fault gets it as its error
            log.warning("the tokenizer's warm-up failed: %r", error)

    async def _rehearse_steps(self) -> None:
        runner = self.ctx.runner
        try:
            if isinstance(runner, KnowsStep):
                await self._worker.run(runner.reserve, self.ctx.n_batch, self.ctx.num_sequences)
            else:
                self.rehearsed = ()
            self.rehearsed = self.rehearsed or await self._timed_steps()
        except Exception as error:  # a request with the same fault gets it as its error
            log.warning("the warm-up step failed: %r", error)
        for step in self.rehearsed:
            self.times.took(step.work, step.seconds)

    async def _timed_steps(self) -> tuple[RehearsedStep, ...]:
        await self._time_step(1)
        step_s = await self._fastest_step(1)
        num_tokens = min(REHEARSED_TOKENS, self.options.max_batch_tokens, self.ctx.max_positions)
        if step_s:
            num_tokens = min(num_tokens, max(2, int(REHEARSAL_S / step_s)))
        prompt_s = await self._fastest_step(num_tokens)
        prompt = StepWork(prompts=1, prefill=num_tokens, prefill_keys=num_tokens**2 / 2)
        return RehearsedStep(StepWork(decodes=1, keys=1), step_s), RehearsedStep(prompt, prompt_s)

    async def _fastest_step(self, num_tokens: int) -> float:
        began, fastest = trio.current_time(), math.inf
        for _ in range(TIMED_STEPS):
            fastest = min(fastest, await self._time_step(num_tokens))
            if trio.current_time() - began > REHEARSAL_S / 2:
                break
        return fastest

    async def _time_step(self, num_tokens: int) -> float:
        began = trio.current_time()
        await self._worker.run(self.ctx.rehearse, num_tokens)
        return trio.current_time() - began

    def _open_state(self, n_parallel: int, now: Callable[[], float]) -> BatchState:
        fair = FairShare()
        in_turn = fair if self.options.fair_share else None
        self.held_prompts = HeldPrompts(range(n_parallel, self.ctx.num_sequences), self.ctx.kv.block_size, now)
        self.slots = Slots(self.ctx, self.held_prompts, self.swap, in_turn, n_parallel, self.journal)
        self.requests = OpenRequests(self.slots, fair, self.journal, self.send_after, now)
        self._state = BatchState(
            ctx=self.ctx,
            held_prompts=self.held_prompts,
            swap=self.swap,
            slots=self.slots,
            requests=self.requests,
            journal=self.journal,
            watch=self._watch,
            flight=self._flight,
        )
        return self._state

    def _open_intake(self) -> Intake:
        return Intake(self.ctx.model, self.options, self.ctx.max_positions, self.ctx.adapters)

    async def _close_workers(self) -> None:
        if hasattr(self, "grammars"):  # else opening failed before this part was made
            await self.grammars.close()
        await self._reader.close()
        await self._tokenizing.close()
        await self._worker.close()

    # Reports

    def _list_models(self) -> Models:
        return Models(models=model_cards(self.ctx, self.options.n_parallel))

    def _adapters_changed(self) -> None:
        self.models = self._list_models()
        if self._on_models is not None:
            self._on_models(self.models)

    def _health(self) -> Health:
        return self._watch.health(
            trio.current_time(),
            num_open=len(self.requests),
            draining=self.requests.is_draining,
            steps=self.stats.steps,
            running=len(self.slots.sequences),
            waiting=len(self.slots.pending) + len(self.arrivals),
        )

    def _stats(self) -> dict[str, Any]:
        return stats_report(self._state, trio.current_time())


def model_cards(ctx: Context, n_parallel: int) -> tuple[ModelCard, ...]:
    """Return the card of the model, for `n_parallel` sequences at once, and the cards of its adapters."""
    model, runner, pooling = ctx.model, ctx.runner, ctx.model.pooling
    thinking = Thinking.of(model)
    card = ModelCard(
        id=model.name,
        n_ctx=ctx.max_positions,
        n_parallel=n_parallel,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        quantize=runner.quantize,
        runner=runner.name,
        device=str(model.device),
        embedding_size=pooling.size if pooling is not None and pooling.embeds else None,
        generates=model.generates,
        labels=pooling.scoring.labels if pooling is not None and pooling.scoring is not None else (),
        sampling=dict(model.sampling),
        thinks=thinking is not None and thinking.takes_effort,
    )
    adapted = msgspec.structs.replace(card, parent=card.id, embedding_size=None, labels=())
    return card, *(msgspec.structs.replace(adapted, id=adapter.name) for adapter in ctx.adapters.serving())


# The most slots in a report; more do not fit on a screen.
MAX_SLOTS = 64


def stats_report(state: BatchState, now: float) -> dict[str, Any]:
    """Return all statistics at the time `now`, in seconds on the event loop's clock."""
    ctx, slots = state.ctx, state.slots
    kv, cache = ctx.kv, ctx.kv.prefix_cache
    counts = kv.counts()
    running = list(slots.sequences.items())[:MAX_SLOTS]
    return {
        **state.journal.stats.snapshot(now),
        "model": ctx.model.name,
        "runner": ctx.runner.name,
        "requests_running": len(slots.sequences),
        "requests_waiting": len(slots.pending),
        "n_parallel": slots.n_parallel,
        "slots": [_slot(seq_id, sequence, now) for seq_id, sequence in sorted(running)],
        "held_prompts": len(state.held_prompts),
        "prefix_cache_queries": cache.num_query_tokens if cache else 0,
        "prefix_cache_hits": cache.num_hit_tokens if cache else 0,
        "prefix_kept_blocks": kv.num_kept,
        "prefix_recomputed": dict(cache.num_recomputed) if cache else {},
        "prefix_disk": _disk_counters(ctx),
        "kv_blocks_max": counts.max,
        "kv_blocks_free": counts.free,
        "kv_blocks_used": counts.used,
        "kv_block_size": kv.block_size,
        "kv_bytes": sum(
            count * ctx.runner.bytes_per_block(group, kv.block_size) for group, count in enumerate(kv.num_blocks)
        ),
        "adapters": list(ctx.adapters),
        "adapter_bytes": sum(adapter.nbytes for adapter in ctx.adapters.values()),
        "swapped_bytes": state.swap.bytes_used,
        "tasks": trio.lowlevel.current_statistics().tasks_living,  # of this process's event loop
    }


def _disk_counters(ctx: Context) -> dict[str, int]:
    """Return the blocks that went to and came from the prefix cache on disk, and its faults; all 0 without one."""
    names = ("read", "written", "damaged", "errors")
    return {name: 0 if ctx.disk is None else getattr(ctx.disk, f"num_{name}") for name in names}


def _slot(seq_id: int, sequence: Sequence, now: float) -> dict[str, Any]:
    request = sequence.request
    first = request.first_token_at
    seconds = 0.0 if first is None or sequence.last_token_at is None else sequence.last_token_at - first
    return {
        "slot": seq_id,
        "request_id": request.request_id,
        "client": request.client,
        "tenant": request.tenant,
        "adapter": None if request.adapter is None else request.adapter.name,
        "phase": sequence.phase.value,
        "prompt_tokens": sequence.num_prompt_tokens,
        "computed_tokens": sequence.num_computed,
        "generated_tokens": sequence.num_generated,
        "max_tokens": sequence.max_new_tokens,
        "seconds": now - request.accepted_at,
        "tokens_per_s": (sequence.num_generated - 1) / seconds if seconds else None,
    }
