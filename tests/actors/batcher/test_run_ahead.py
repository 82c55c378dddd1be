"""Running ahead: the model goes on with the next step while a step's tokens are handed out; nothing else changes."""

import threading
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.stepper import EngineFault, RunAhead
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.supervisor import ChildSpec, Supervisor
from genbatch.actors.scheduling.plan import PromptBudget
from genbatch.actors.scheduling.request import RequestList, split_by_phase
from genbatch.actors.scheduling.scheduler import RequestScheduler, SchedulerOutput, SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Rows
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import EngineError, Unavailable
from genbatch.proto.messages import GenerateRequest, Result, Token
from tests.actors.batcher.bench import Bench, prompt_of
from tests.actors.batcher.bench import batcher as open_batcher
from tests.nif.launching_runner import LaunchingTorchRunner
from tests.waiting import a_moment

TinyModel = Callable[[str], Model]


class TracedRunner(TorchRunner):
    """Counts forwards, and holds each one up until `gate` lets it go."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.forwards = 0
        self.gate: Callable[[int], None] = lambda forward: None

    def forward(self, batch: Any) -> Rows:
        self.forwards += 1
        self.gate(self.forwards)
        return super().forward(batch)


@asynccontextmanager
async def batcher(model: Model, *, n_ctx: int = 512, overlapped: bool = False, **options: Any) -> AsyncIterator[Bench]:
    new_runner: Callable[[Model], Any] = LaunchingTorchRunner if overlapped else TracedRunner
    usual = {"max_tokens": 12, "ignore_eos": True}
    async with open_batcher(model, n_ctx=n_ctx, new_runner=new_runner, usual=usual, **options) as bench:
        bench.runner.forwards = 0  # the Batcher has rehearsed
        yield bench


async def gather(bench: Bench, requests: list[dict[str, Any]]) -> tuple[list[Result], list[list[Token]]]:
    results: dict[int, Result] = {}
    streams: list[list[Token]] = [[] for _ in requests]

    async def one(index: int, params: dict[str, Any]) -> None:
        results[index] = await bench.generate(streams[index].append, **params)

    async with trio.open_nursery() as nursery:
        for index, params in enumerate(requests):
            nursery.start_soon(one, index, params)
    return [results[index] for index in range(len(requests))], streams


@pytest.mark.trio
async def test_while_somebody_waits_and_a_slot_is_free_each_step_has_a_plan(tiny_model: TinyModel) -> None:
    """Whose turn it is may change with every token; without anybody who waits, plans are made for many steps."""
    policy = SchedulerPolicy.GUARANTEED_NO_EVICT
    options: dict[str, Any] = {"batch_size": 2, "batch_timeout": 1e6, "scheduler_policy": policy}
    async with batcher(tiny_model("llama"), n_ctx=64, n_parallel=2, **options) as bench:
        planner = bench.actor.planner
        plan, waiting = planner.plan, []

        def count(inflight: Set[int], budget: PromptBudget | None) -> SchedulerOutput:
            waiting.append(len(bench.actor.slots.pending))
            return plan(inflight, budget)

        planner.plan = count  # type: ignore[method-assign]
        # Twelve of sixteen blocks each, so the second waits for the end of the first.
        await gather(bench, [{"token_ids": prompt_of(8, seed), "max_tokens": 40} for seed in (1, 2)])
    assert waiting.count(1) >= 39 and waiting.count(0) < 30, waiting  # on a busy machine runs end early


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "token_ids": st.builds(prompt_of, st.integers(1, 20), st.integers(0, 50)),
            "max_tokens": st.integers(1, 25),
            "ignore_eos": st.booleans(),
            "temperature": st.sampled_from([0.0, 0.9]),
            "seed": st.integers(0, 9),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "stop": st.sampled_from([[], ["a"], ["e", "th"]]),
            "n": st.integers(1, 2),
        }
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(requests=REQUESTS, n_ctx=st.sampled_from([64, 512]))
def test_h15_async_batching_changes_no_text_no_ids_and_no_stream(
    tiny_model: TinyModel, requests: list[dict[str, Any]], n_ctx: int
) -> None:
    """The small pool makes sequences pause in between; stop ids and strings end some a step after they were drawn."""
    compare(tiny_model("llama"), requests, n_ctx, overlapped=False)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(requests=REQUESTS, n_ctx=st.sampled_from([64, 512]), family=st.sampled_from(["llama", "gemma3"]))
def test_h15_steps_launched_before_the_last_ones_tokens_are_read_change_nothing(
    tiny_model: TinyModel, requests: list[dict[str, Any]], n_ctx: int, family: str
) -> None:
    """As on a GPU; requests with a penalty make the steps that they are in wait for one another."""
    compare(tiny_model(family), requests, n_ctx, overlapped=True)


def compare(model: Model, requests: list[dict[str, Any]], n_ctx: int, *, overlapped: bool) -> None:
    async def run(async_batching: bool) -> tuple[list[Result], list[list[Token]]]:
        async with batcher(model, n_ctx=n_ctx, async_batching=async_batching, overlapped=overlapped) as bench:
            return await gather(bench, requests)

    ahead, waiting = trio.run(run, True), trio.run(run, False)
    # What the prefix cache gave depends on when a request was admitted, its text does not.
    for one, other in zip(ahead[0], waiting[0], strict=True):
        assert (one.text, one.token_ids, one.finish_reason, one.choices) == (
            other.text,
            other.token_ids,
            other.finish_reason,
            other.choices,
        )
    assert [sorted(tokens, key=lambda t: (t.choice, t.index)) for tokens in ahead[1]] == [
        sorted(tokens, key=lambda t: (t.choice, t.index)) for tokens in waiting[1]
    ]


@pytest.mark.trio
async def test_h15_a_steps_tokens_are_handed_out_while_the_next_step_runs(tiny_model: TinyModel) -> None:
    """Forward N waits for the tokens of forward N - 1, which come in time only if nobody waits for forward N."""
    handed_out = [threading.Event() for _ in range(40)]
    overlapped = []
    async with batcher(tiny_model("llama")) as bench:
        # Forward 1 is the prefill, 2 the first of the run; the token drawn by forward N has index N - 1.
        bench.runner.gate = lambda forward: overlapped.append(
            2 < forward <= 11 and handed_out[forward - 2].wait(timeout=30)
        )
        result = await bench.generate(lambda token: handed_out[token.index].set(), token_ids=prompt_of(5, 1))
    assert len(result.token_ids) == 12
    assert overlapped[2:11] == [True] * 9


@pytest.mark.trio
async def test_h15_without_async_batching_a_step_begins_after_the_tokens_of_the_last(tiny_model: TinyModel) -> None:
    begun = []
    async with batcher(tiny_model("llama"), async_batching=False) as bench:
        await bench.generate(lambda token: begun.append(bench.runner.forwards - token.index), token_ids=prompt_of(5, 1))
    assert begun == [1] * 12


@pytest.mark.trio
async def test_the_model_is_at_most_one_step_ahead_of_the_tokens_handed_out(tiny_model: TinyModel) -> None:
    ahead = []
    begun = [threading.Event() for _ in range(40)]
    async with batcher(tiny_model("llama")) as bench:
        bench.runner.gate = lambda forward: begun[forward].set()

        def slow(token: Token) -> None:
            # Forward index + 1 drew it. Unless the run has ended the next ones come while we wait, but not a third.
            begun[token.index + 4].wait(timeout=0.01)
            ahead.append(bench.runner.forwards - (token.index + 1))

        await bench.generate(slow, token_ids=prompt_of(5, 1), max_tokens=30)
    assert max(ahead) <= 2  # one that is told of after this, and one under way


@pytest.mark.trio
async def test_a_sequence_that_ended_gives_its_room_back_and_its_late_token_is_dropped(
    tiny_model: TinyModel,
) -> None:
    drawn = {"token_ids": prompt_of(9, 1), "temperature": 50.0, "seed": 3, "max_tokens": 20}
    greedy = {"token_ids": prompt_of(7, 2), "max_tokens": 40}
    async with batcher(tiny_model("llama"), batch_size=2, batch_timeout=60_000.0) as bench:
        [plain, alone], _ = await gather(bench, [drawn, greedy])
        first_of = {token: index for index, token in reversed(list(enumerate(plain.token_ids)))}
        stop, index = next((token, index) for token, index in first_of.items() if 6 <= index < 15)
        seen: list[Token] = []
        results: dict[int, Result] = {}
        booked, before, token_of_loop = threading.Event(), bench.runner.forwards, trio.lowlevel.current_trio_token()
        # Both begin together, so that forward n draws both tokens n - 1: the one after the end waits until it is known.
        bench.runner.gate = lambda forward: forward - before == index + 2 and booked.wait(timeout=30)

        def watch(token: Token) -> None:
            seen.append(token)
            if token.token_id == stop:
                token_of_loop.run_sync_soon(booked.set)

        async def short() -> None:
            results[0] = await bench.generate(watch, stop_token_ids=[stop], **drawn)
            assert len(bench.actor.slots.sequences) == 1, "its slot is free when its caller reads the reply"

        async def long() -> None:
            results[1] = await bench.generate(**greedy)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(short)
            nursery.start_soon(long)
    assert results[0].token_ids == plain.token_ids[: index + 1]
    assert results[0].finish_reason == "stop"
    assert [token.token_id for token in seen] == results[0].token_ids
    assert results[1].token_ids == alone.token_ids


@pytest.mark.trio
@pytest.mark.parametrize("overlapped", [False, True])
async def test_a_caller_that_leaves_during_a_run_frees_its_sequence_and_harms_nobody(
    overlapped: bool, tiny_model: TinyModel
) -> None:
    async with batcher(tiny_model("llama"), overlapped=overlapped) as bench:
        want = await bench.generate(token_ids=prompt_of(6, 3), max_tokens=40)
        scope, results = trio.CancelScope(), []

        async def leaves() -> None:
            with scope:
                await bench.generate(
                    lambda token: scope.cancel() if token.index == 8 else None,
                    token_ids=prompt_of(8, 4),
                    max_tokens=200,
                )

        async def stays() -> None:
            results.append(await bench.generate(token_ids=prompt_of(6, 3), max_tokens=40))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaves)
            nursery.start_soon(stays)
        assert bench.actor.stats.finished == {"length": 2, "cancelled": 1}
        assert bench.actor.stats.steps < 100
    assert results[0].token_ids == want.token_ids


@pytest.mark.trio
async def test_a_deadline_ends_a_request_during_a_run(tiny_model: TinyModel, mock_clock: MockClock) -> None:
    handed_out = [threading.Event() for _ in range(60)]

    def watch(token: Token) -> None:
        if token.index == 8:
            mock_clock.jump(60.0)
        handed_out[token.index].set()

    async with batcher(tiny_model("llama"), batch_size=1) as bench:
        # The model is never ahead of the tokens, which would end the run, too.
        bench.runner.gate = lambda forward: forward < 2 or handed_out[forward - 2].wait(timeout=30)
        result = await bench.generate(watch, token_ids=prompt_of(8, 4), max_tokens=60, deadline_s=50.0)
    assert result.finish_reason == "deadline"
    assert len(result.token_ids) < 15  # the token of the step under way may be the last


@pytest.mark.trio
async def test_an_on_token_that_raises_ends_its_own_request_during_a_run(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        want = await bench.generate(token_ids=prompt_of(6, 3), max_tokens=30)
        results = []

        def broken(token: Token) -> None:
            if token.index == 9:
                raise ZeroDivisionError

        async def breaks() -> None:
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await bench.generate(broken, token_ids=prompt_of(8, 4), max_tokens=30)

        async def works() -> None:
            results.append(await bench.generate(token_ids=prompt_of(6, 3), max_tokens=30))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(breaks)
            nursery.start_soon(works)
    assert results[0].token_ids == want.token_ids


class EveryStep(RequestScheduler):
    """Somebody's own: must be asked before every step."""

    def __init__(self) -> None:
        self.asked = 0

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Set[int]) -> SchedulerOutput:
        self.asked += 1
        decoding, prefilling, pending = split_by_phase(active_requests)
        return SchedulerOutput([*prefilling, *pending], decoding, [])


@pytest.mark.trio
async def test_a_scheduler_of_ones_own_is_asked_before_every_step(tiny_model: TinyModel) -> None:
    scheduler = EveryStep()
    async with batcher(tiny_model("llama"), scheduler=scheduler) as bench:
        await bench.generate(token_ids=prompt_of(5, 1), max_tokens=15)
        assert scheduler.asked >= bench.actor.stats.steps == 15


@pytest.mark.trio
async def test_a_batcher_that_is_stopped_during_a_run_ends_at_once(tiny_model: TinyModel) -> None:
    model, running = tiny_model("llama"), trio.Event()
    runner = TracedRunner(model)
    async with trio.open_nursery() as nursery:
        actor = Batcher(lambda: Context(model, runner, n_ctx=512, n_parallel=8, n_held=4, block_size=4))
        ref = await start(nursery, actor, name="batcher")

        def reached(token: Token) -> None:
            if token.index == 5:
                running.set()

        async def call() -> None:
            request = GenerateRequest(token_ids=prompt_of(5, 1), max_tokens=240, ignore_eos=True)
            with pytest.raises(Unavailable):
                await ref.call(Generate(request, reached), timeout=None)

        nursery.start_soon(call)
        await running.wait()
        await ref.stop()
    assert runner.forwards < 30


@pytest.mark.trio
@pytest.mark.parametrize("overlapped", [False, True])
async def test_a_run_goes_on_when_a_sequence_ends_and_answers_it_meanwhile(
    overlapped: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of three lengths and one that a stop id ends: one run, and each has its answer and its slot back."""
    runs: list[RunAhead] = []
    evaluate = RunAhead.evaluate

    def note(run: RunAhead, *arguments: Any) -> Any:
        runs.append(run)
        return evaluate(run, *arguments)

    requests: list[dict[str, Any]] = [
        {"token_ids": prompt_of(5 + seed, seed), "temperature": 2.0, "seed": seed, "max_tokens": length}
        for seed, length in enumerate((50, 9, 20, 50))
    ]
    options: dict[str, Any] = {"batch_size": 4, "batch_timeout": 60_000.0, "overlapped": overlapped}
    async with batcher(tiny_model("llama"), async_batching=False, **options) as bench:
        want, _ = await gather(bench, requests)
    stop = next(token for token in want[3].token_ids[25:] if token not in want[3].token_ids[:25])
    requests[3]["stop_token_ids"] = [stop]
    monkeypatch.setattr(RunAhead, "evaluate", note)
    async with batcher(tiny_model("llama"), **options) as bench:
        at_answer: dict[int, tuple[int, int]] = {}  # the runs that had begun, and the sequences with a slot
        results: dict[int, Result] = {}
        # The tokens of a step are handed out before the next one ends, on a busy machine too.
        booked = [threading.Event() for _ in range(100)]

        def watch(token: Token) -> None:
            booked[token.index].set()

        bench.runner.gate = lambda step: step < 3 or booked[step - 3].wait(timeout=30)

        async def one(index: int) -> None:
            on_token = watch if index == 0 else None
            results[index] = await bench.generate(on_token, **requests[index])
            at_answer[index] = len(runs), len(bench.actor.slots.sequences)

        async with trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(one, index)
    for index in range(3):
        assert results[index].token_ids == want[index].token_ids
    assert results[3].token_ids == want[3].token_ids[: want[3].token_ids.index(stop) + 1]
    assert at_answer == {1: (1, 3), 2: (1, 2), 3: (1, 1), 0: (1, 0)}


@pytest.mark.trio
async def test_a_run_ends_with_a_sequence_if_another_one_waits_for_its_slot(tiny_model: TinyModel) -> None:
    options: dict[str, Any] = {"n_parallel": 2, "batch_size": 3, "batch_timeout": 60_000.0}
    async with batcher(tiny_model("llama"), **options) as bench:
        first_of_last = []
        long: list[Token] = []

        async def short() -> None:
            await bench.generate(token_ids=prompt_of(4, 2), max_tokens=5)

        async def waits() -> None:
            await bench.generate(lambda _: first_of_last.append(len(long)), token_ids=prompt_of(4, 3), max_tokens=2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: bench.generate(long.append, token_ids=prompt_of(4, 1), max_tokens=60))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(short)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(waits)
    assert 5 <= first_of_last[0] <= 10


@pytest.fixture
def booked(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released as often as the tokens of a run's step were handed out: a run ends where they are not in time."""
    semaphore, book = threading.Semaphore(0), RunAhead.booked

    def book_and_tell(run: RunAhead) -> None:
        book(run)
        semaphore.release()

    monkeypatch.setattr(RunAhead, "booked", book_and_tell)
    return semaphore


@pytest.mark.trio
async def test_h15_every_step_of_a_run_is_launched_before_the_one_before_is_read(
    tiny_model: TinyModel, booked: threading.Semaphore
) -> None:
    async with batcher(tiny_model("llama"), overlapped=True) as bench:
        bench.runner.gate = lambda launch: launch == 1 or booked.acquire(timeout=30)
        result = await bench.generate(token_ids=prompt_of(5, 1))
    assert len(result.token_ids) == 12  # the first is the prefill's
    order = [("launch", 1)]
    for step in range(1, 11):
        order += [("launch", step + 1), ("wait", step)]
    assert bench.runner.trace == [*order, ("wait", 11)]


@pytest.mark.trio
async def test_without_async_batching_nothing_is_launched_ahead(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), overlapped=True, async_batching=False) as bench:
        await bench.generate(token_ids=prompt_of(5, 1))
    assert bench.runner.launches == 0


@pytest.mark.trio
async def test_a_run_that_is_asked_to_end_takes_the_step_under_way_for_its_last(
    tiny_model: TinyModel, booked: threading.Semaphore
) -> None:
    """A second request comes while the seventh step is under way and the sixth is read: none is computed again."""
    hurried, begun, results = threading.Event(), trio.Event(), []
    async with batcher(tiny_model("llama"), overlapped=True, batch_timeout=0.0) as bench:
        hurry = bench.actor.stepper.hurry

        def gate(launch: int) -> None:
            if 1 < launch <= 6:
                booked.acquire(timeout=30)
            if launch == 6:
                hurried.wait(timeout=30)

        def watch(token: Token) -> None:
            if token.index == 5:
                begun.set()

        def hurry_and_tell() -> None:
            hurry()
            hurried.set()

        async def first() -> None:
            results.append(await bench.generate(watch, token_ids=prompt_of(6, 3), max_tokens=30))

        bench.runner.gate = gate
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await begun.wait()
            bench.actor.stepper.hurry = hurry_and_tell  # type: ignore[method-assign]
            await bench.generate(token_ids=prompt_of(4, 9), max_tokens=3)
        bench.runner.gate = lambda launch: None
        assert bench.runner.forwards == bench.actor.stats.steps
        [want], _ = await gather(bench, [{"token_ids": prompt_of(6, 3), "max_tokens": 30}])
    assert results[0].token_ids == want.token_ids
    trace = bench.runner.trace
    end = next(at for at in range(len(trace)) if trace[at][0] == trace[at + 1][0] == "wait")
    last = trace[end + 1][1]  # seven, unless something else was asked before
    expected = [("launch", last), ("wait", last - 1), ("wait", last), ("launch", last + 1)]
    assert trace[end - 1 :][:4] == expected


@pytest.mark.trio
async def test_a_row_that_is_not_finite_ends_its_own_request_while_steps_overlap(tiny_model: TinyModel) -> None:
    good, bad = {"token_ids": prompt_of(6, 3), "max_tokens": 30}, {"token_ids": prompt_of(8, 4), "max_tokens": 30}
    async with batcher(tiny_model("llama"), overlapped=True, batch_size=2, batch_timeout=60_000.0) as bench:
        [want, _], _ = await gather(bench, [good, bad])
        before, results = bench.runner.launches, []

        def spoil(launch: int, logits: Rows) -> None:
            if launch == before + 7:
                logits[1, 3] = float("inf")

        bench.runner.spoil = spoil

        async def fails() -> None:
            with pytest.raises(EngineError, match="not finite"):
                await bench.generate(**bad)

        async def works() -> None:
            results.append(await bench.generate(**good))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(works)
            await trio.testing.wait_all_tasks_blocked()  # so that the other one has the second row
            nursery.start_soon(fails)
    assert results[0].token_ids == want.token_ids


@pytest.mark.trio
async def test_a_device_that_fails_in_a_step_under_way_starts_the_engine_anew(tiny_model: TinyModel) -> None:
    model, broken = tiny_model("llama"), True

    def gate(launch: int) -> None:
        if broken and launch == 4:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def new_batcher() -> Batcher:
        runner = LaunchingTorchRunner(model)
        runner.gate = gate
        return Batcher(
            lambda: Context(model, runner, n_ctx=512, n_parallel=4, n_held=4, block_size=4),
            BatcherOptions(n_parallel=4, batch_timeout=1.0),
        )

    supervisor, reasons = Supervisor([ChildSpec("batcher", new_batcher)]), []

    def note(event: str, measurements: Any, metadata: Any) -> None:
        if event == "supervisor.child_exit":
            reasons.append(metadata["reason"])

    supervisor.telemetry.attach(note)
    request = GenerateRequest(token_ids=prompt_of(5, 1), max_tokens=12, ignore_eos=True)
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        ref = supervisor.registry.ref("batcher")
        with pytest.raises(Unavailable):
            await ref.call(Generate(request), timeout=None)
        broken = False
        while not reasons or not ref.alive:
            await a_moment()
        again = await ref.call(Generate(request), timeout=None)
        nursery.cancel_scope.cancel()
    assert len(again.token_ids) == 12
    assert isinstance(reasons[0], EngineFault)
    assert "unspecified launch failure" in str(reasons[0])


@pytest.mark.trio
async def test_a_prompt_that_goes_on_with_what_a_run_generated_finds_its_blocks(tiny_model: TinyModel) -> None:
    prompt = prompt_of(9, 5)
    async with batcher(tiny_model("llama"), overlapped=True) as bench:
        first = await bench.generate(token_ids=prompt, max_tokens=20, temperature=0.9, seed=4)
        goes_on = {"token_ids": [*prompt, *first.token_ids, 7], "max_tokens": 15}
        found = await bench.generate(**goes_on)
    async with batcher(tiny_model("llama"), async_batching=False) as bench:
        anew = await bench.generate(**goes_on)
    assert found.usage.cached_tokens == (len(prompt) + 19) // 4 * 4  # the last token drawn was never evaluated
    assert anew.usage.cached_tokens == 0
    assert found.token_ids == anew.token_ids
