"""Crowd: many requests at once in little memory, each compared with what it gives alone.

A seed draws a pool, layer groups, options and requests: windows, sinks, states, mixed groups, prompts held because they
are configured or noticed, several choices, beams, odd blocks, both policies, all batching types, swapping, schedulers
that ignore memory or raise. Each request runs alone first, on a Batcher with the same options but without prompt
lookup, then all run together. Promised:

    the same tokens and text; one answer each; what fits alone is never refused; no block is left over;
    a step takes the blocks that were drafted for it, with what prompt lookup drafts and without it;
    and the Batcher never goes in circles: between two pauses too many somebody gets a token.

The model is a runner over any kind of layers: a simulated one (`history`), or a small real one.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import ge, sub
from typing import Any

import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Planned
from genbatch.actors.runtime.actor import start
from genbatch.actors.scheduling.plan import BatchingType, SchedulerOutput
from genbatch.actors.scheduling.request import Phase
from genbatch.actors.scheduling.scheduler import PauseOrder, PlainPlan, RequestList, RequestScheduler, SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.context.drafters import Drafter
from genbatch.nif.errors import OptionError
from genbatch.nif.kv.block_tables import Entries, Reservation, RunReservation
from genbatch.nif.kv.kv_cache import StepDraft
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Runner
from genbatch.proto.errors import GenbatchError, Unavailable
from genbatch.proto.messages import GenerateRequest, Message, Result
from tests.simulation.history_runner import (
    FIRST_PLAIN,
    STATE,
    VOCAB,
    ChoosingHistoryRunner,
    HistoryRunner,
    LoopingRunner,
    Windows,
)
from tests.simulation.seeded_loop import run_seeded
from tests.simulation.sim_worker import SimWorker

# Pauses without a new token in between: more than one of each sequence, and it goes in circles.
MAX_PAUSES = 100
# Simulated seconds after which what has not ended never will: a step takes a fortieth.
LIVENESS_S = 600.0
STEP_S = 0.05
SYSTEM_MESSAGES = ("be brief", "sing it, and sing it well, from the first word to the last")
WORDS = ("one", "two", "three", "four")
SINK_TOKENS = (0, 0, 4, 0, 7)  # by the seed, so that no draw moves
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (8,), (8, None), (None, 5, 13))


class Reckless(RequestScheduler):
    """A user's scheduler that plans everything at once, never asks what fits, and now and then raises."""

    def __init__(self) -> None:
        self._num_plans = 0

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Any) -> PlainPlan:
        self._num_plans += 1
        if self._num_plans % 7 == 0:
            raise ValueError("the user's own fault")
        ready = [one for one in active_requests if one.request_id not in inflight_request_ids]
        contexts = [one for one in ready if one.phase in (Phase.PENDING, Phase.PREFILLING)]
        return contexts, [one for one in ready if one.phase is Phase.DECODING], []


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and when it comes."""

    request: GenerateRequest
    beam_width: int
    at_s: float


@dataclass(slots=True)
class Crowd:
    """What a seed has drawn.

    Args:
        seed: draws everything.
        model: tokenizer and limits.
        open_runner: makes the runner of a Batcher; None draws a simulated one.
        open_plain: makes the runner for a request alone; None takes `open_runner`.
        open_drafter: makes the drafter of the crowd's Batcher; the requests alone have none.
    """

    seed: int
    model: Model
    open_runner: Callable[[], Runner] | None = None
    open_plain: Callable[[], Runner] | None = None
    open_drafter: Callable[[], Drafter] | None = None
    rng: random.Random = field(init=False)
    options: BatcherOptions = field(init=False)
    asked: list[Asked] = field(init=False)
    memory: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        if self.open_runner is None:
            windows: Windows = rng.choice(WINDOWS)
            runner_type = rng.choice((HistoryRunner, ChoosingHistoryRunner))
            if self.seed % 4 == 1:  # by the seed, so that no draw moves
                windows = (*windows[self.seed % 8 // 4 :], STATE)
            if self.seed % 3 == 0:
                runner_type = LoopingRunner
            sink_tokens = SINK_TOKENS[self.seed % len(SINK_TOKENS)]
            self.open_runner = lambda: runner_type(windows=windows, sink_tokens=sink_tokens)
        self.options = _draw_options(rng)
        self.memory = {
            "n_ctx": rng.choice((40, 64, 96, 96, 104, 160, 240)),
            "block_size": rng.choice((3, 4, 5, 16)),
            "allow_block_sharing": rng.random() < 0.8,
        }
        groups = self.open_runner().groups
        if rng.random() < 0.2:
            # Pools of their own sizes, that nobody has made for each other.
            self.memory["num_blocks"] = [rng.randint(6, 40) for _ in groups]
        self.asked = [self._draw(rng) for _ in range(rng.randint(2, 9))]

    @property
    def _is_reckless(self) -> bool:
        return isinstance(self.options.scheduler, Reckless)

    def check(self) -> None:
        """Raises AssertionError unless every promise holds."""
        try:
            plain = replace(self.options, prompt_lookup=False)
            alone = [self._run([one], plain, drafts=False)[0] for one in self.asked]
        except ExceptionGroup as group:
            refused, others = group.split(OptionError)
            if refused is None or others is not None:
                raise
            return  # there is no room for what is configured to be held
        together = self._run(self.asked, replace(self.options, prompt_lookup=True))
        for asked, expected, answer in zip(self.asked, alone, together, strict=True):
            if isinstance(expected, GenbatchError):
                assert self._may_be_refused(asked), f"refused alone with {expected!r}: {asked}"
                assert isinstance(answer, GenbatchError), f"refused alone with {expected!r}, answered in the crowd"
                continue
            assert not isinstance(answer, GenbatchError), f"fits alone, in the crowd {answer!r}: {asked}"
            texts = [(one.token_ids, one.text, one.finish_reason) for one in answer.choices]
            should = [(one.token_ids, one.text, one.finish_reason) for one in expected.choices]
            assert texts == should, f"alone {should}, in the crowd {texts}: {asked}"

    def _may_be_refused(self, asked: Asked) -> bool:
        """Whether there is no way to run it in a pool that holds nothing but the configured prompts."""
        if asked.beam_width > 1:
            return True  # how much it takes depends on where its beams part
        context = self._open_context()
        block_size, request = context.kv.block_size, asked.request
        tokens = len(self._prompt(request)) + (request.max_tokens or 1)
        pinned = sum(
            -(-len(context.model.tokenizer.template_prefix([{"role": "system", "content": content}])) // block_size)
            for content in self.options.system_prompts
        )
        budget = self.options.cache_budget
        if tokens > context.max_positions or (budget is not None and -(-(tokens - 1) // block_size) > budget):
            return True
        for group, count in zip(context.kv.groups, context.kv.num_blocks, strict=True):
            needed = -(-(tokens - 1) // block_size)
            if group.window is not None:
                kept = -(-group.sink_tokens // block_size)
                needed = min(needed, kept + -(-(group.window - 1) // block_size) + 1)
            if needed > count - pinned:
                return True
        return False

    def _prompt(self, request: GenerateRequest) -> list[int]:
        if request.token_ids is not None:
            return request.token_ids
        assert request.messages is not None
        turns = [{"role": one.role, "content": one.content} for one in request.messages]
        return self.model.tokenizer.apply_chat_template(turns)

    def _draw(self, rng: random.Random) -> Asked:
        fields: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "ignore_eos": True, "temperature": 0.0}
        if rng.random() < 0.08:
            fields["max_tokens"] = None
        if rng.random() < 0.6:
            shared = random.Random(rng.randrange(3)).choices(range(FIRST_PLAIN, VOCAB), k=60)[: rng.randint(0, 60)]
            own = [rng.randrange(FIRST_PLAIN, VOCAB) for _ in range(rng.choice((1, 2, 13, 50)))]
            fields["token_ids"] = shared + own if rng.random() < 0.5 else own
        else:
            turns = [("system", rng.choice(SYSTEM_MESSAGES)), ("user", " ".join(rng.choices(WORDS, k=2)))]
            fields["messages"] = [Message(role=role, content=content) for role, content in turns]
        width = 1
        if rng.random() < 0.12:
            width = rng.randint(2, max(2, self.options.n_parallel))
        elif rng.random() < 0.3:
            fields["n"] = rng.randint(2, 3)
        elif rng.random() < 0.1:
            fields["prompt_logprobs"] = 0
        if rng.random() < 0.2:
            fields["tenant"] = rng.choice(("a", "b"))
        if width > min(self.options.n_parallel, self.options.max_batch_tokens):
            width = 1
        return Asked(GenerateRequest(**fields), width, rng.choice((0.0, 0.0, rng.random() * 3)))

    def _open_context(self, *, drafts: bool = True) -> Context:
        assert self.open_runner is not None
        runner = self.open_runner() if drafts or self.open_plain is None else self.open_plain()
        return Context(
            self.model,
            runner,
            drafter=self.open_drafter() if drafts and self.open_drafter is not None else None,
            n_parallel=self.options.n_parallel,
            n_held=self.options.max_held_prompts,
            n_batch=self.options.max_batch_tokens,
            **self.memory,
        )

    def _run(
        self, crowd: Sequence[Asked], options: BatcherOptions, *, drafts: bool = True
    ) -> list[Result | GenbatchError]:
        """Answers, in the order of the questions."""
        answers: list[Any] = [None] * len(crowd)

        async def main() -> None:
            with trio.fail_after(LIVENESS_S):
                await live()

        async def live() -> None:
            async with trio.open_nursery() as nursery:
                rng = random.Random(self.seed)
                open_context = partial(self._open_context, drafts=drafts)
                batcher = Batcher(open_context, options, open_worker=lambda _: SimWorker(nursery, rng, STEP_S))
                ref = await start(nursery, batcher, name="batcher")
                watch(batcher)

                async def ask(index: int, one: Asked) -> None:
                    await trio.sleep(one.at_s)
                    try:
                        answer = await ref.call(Generate(one.request, beam_width=one.beam_width), timeout=None)
                    except GenbatchError as error:
                        answer = error
                    assert answers[index] is None, "answered twice"
                    answers[index] = answer

                async with trio.open_nursery() as asking:
                    for index, one in enumerate(crowd):
                        asking.start_soon(ask, index, one)
                if self.options.scheduler_policy is SchedulerPolicy.GUARANTEED_NO_EVICT and not self._is_reckless:
                    assert batcher.stats.preemptions == 0, "nobody may be paused"
                if not any(isinstance(answer, Unavailable) for answer in answers):
                    check_rest(batcher)  # else the reason for which it has stopped is on its way
                nursery.cancel_scope.cancel()

        run_seeded(main, self.seed)
        return answers


def _draw_options(rng: random.Random) -> BatcherOptions:
    kind = rng.choice((BatchingType.INFLIGHT_FUSED_BATCHING,) * 3 + tuple(BatchingType))
    policy = rng.choice(list(SchedulerPolicy))
    pauses = policy is SchedulerPolicy.MAX_UTILIZATION and kind is not BatchingType.V1
    scheduler: Any = rng.choice(("fifo", "fifo", "prefill_first"))
    if kind is not BatchingType.V1 and rng.random() < 0.1:
        scheduler = Reckless()
    return BatcherOptions(
        n_parallel=rng.choice((1, 2, 4, 6)),
        batch_timeout=rng.choice((0.0, 20.0)),
        max_batch_tokens=rng.choice((8, 32, 512)),
        max_queue=1000,
        max_client_queue_share=1.0,
        max_client_open=1000.0,
        fair_share=rng.random() < 0.5,
        default_deadline_s=0.0,
        scheduler=scheduler,
        scheduler_policy=policy,
        batching_type=kind,
        cache_budget=rng.choice((None, None, None, 24)),
        enable_chunked_context=rng.random() < 0.8,
        margin=rng.choice((None, 0.0)) if pauses else None,
        pause_order=rng.choice((None, None, *PauseOrder)) if pauses else None,
        max_pauses=rng.choice((2, 2, 0)),
        async_batching=rng.random() < 0.8,
        cpu_offload_space=rng.choice((0.0, 0.001, 3e-7)),
        stall_s=0.0,
        system_prompts=rng.choice(((), (), SYSTEM_MESSAGES[:1], SYSTEM_MESSAGES[1:])),
        max_held_prompts=rng.choice((1, 4)),
    )


def watch(batcher: Batcher) -> None:
    """Has the Batcher fail if it pauses one sequence after another and nobody gets a token."""
    stats, paused = batcher.stats, batcher.journal.paused
    last = [0, 0]  # tokens, and pauses since then

    def count(sequence: Any, *, swapped: bool) -> None:
        last[:] = [stats.generation_tokens, 1] if stats.generation_tokens > last[0] else [last[0], last[1] + 1]
        assert last[1] <= MAX_PAUSES, "it goes in circles"
        paused(sequence, swapped=swapped)

    batcher.journal.paused = count  # type: ignore[method-assign]
    if batcher.ctx.drafter is None:  # a drafter reserves blocks of its own between a step's draft and its reservation
        _watch_drafts(batcher)


def _watch_drafts(batcher: Batcher) -> None:
    """Has the Batcher fail if a step takes other blocks than were drafted for it: starts, swaps and beams included."""
    kv, planner = batcher.ctx.kv, batcher.planner
    draft, reserve, reserve_step, start_plan = kv.draft, kv.reserve, kv.reserve_step, planner.start
    drafted: list[tuple[StepDraft, tuple[int, ...]]] = []  # the last one, and what was free then
    planned: list[StepDraft] = []  # the planner's last one
    left: list[tuple[tuple[int, ...], bool]] = []  # what the next step leaves, and whether it has to be just that

    def remember() -> StepDraft:
        drafted[:] = [(draft(), kv.free_blocks)]
        return drafted[0][0]

    def begin(plan: SchedulerOutput) -> list[list[Planned]]:
        swaps = batcher.stats.swaps
        groups = start_plan(plan)
        left.clear()
        if len(groups) == 1:
            made, free = drafted[0]
            planned[:] = [made]
            # A swap may take over a block that was to be found again: then that is evaluated, and less is held.
            is_exact = not swaps
            left.append((tuple(map(sub, free, made.taken)), is_exact))
        return groups

    def check(entries: Entries) -> None:
        made, free = drafted[0]
        if left:
            most, is_exact = left.pop()
            # Guessed tokens have a draft of their own. If they do not fit, the step is the planned one.
            if made is not planned[0] and any(len(tokens) > 1 for _, tokens, _ in entries):
                most = tuple(map(sub, free, made.taken))
            now = kv.free_blocks
            assert now == most if is_exact else all(map(ge, now, most)), f"{most} were to be left free, {now} are"

    def checked(entries: Entries) -> Reservation:
        reservation = reserve(entries)
        check(entries)
        return reservation

    def checked_step(run: RunReservation, tokens: Sequence[int]) -> RunReservation:
        reserve_step(run, tokens)
        check(run.steps)
        return run

    kv.draft, kv.reserve, kv.reserve_step = remember, checked, checked_step  # type: ignore[method-assign]
    planner.start = begin  # type: ignore[method-assign]


def check_rest(batcher: Batcher) -> None:
    """All that was taken is given back."""
    assert batcher.slots.seq_pool == set(range(batcher.options.n_parallel)), "a slot is lost"
    assert not batcher.slots.sequences and not batcher.slots.pending
    batcher.ctx.kv.check_integrity()
    for held in list(batcher.held_prompts):
        batcher.slots.drop_held(held)
    assert batcher.ctx.kv.counts().used == 0, "blocks are lost"
