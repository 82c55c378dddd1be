"""Runs that open with a step of prompts, where steps overlap; and when a run ends for sequences that wait for slots."""

import math
import threading
from collections.abc import Callable, Set
from typing import Any

import numpy as np
import pytest
import trio

from genbatch.actors.batcher.stepper import MAX_GATHER_S, Gathering
from genbatch.actors.scheduling.plan import PromptBudget
from genbatch.actors.scheduling.scheduler import SchedulerOutput
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import RaggedBatch, Rows
from genbatch.proto.errors import EngineError
from tests.actors.batcher.bench import Bench, batcher, gather, prompt_of
from tests.nif.launching_runner import LaunchingTorchRunner

TinyModel = Callable[[str], Model]

USUAL = {"ignore_eos": True, "max_tokens": 12}
# A pair of requests arrives at once: the window is no wait for them.
PAIR: dict[str, Any] = {"batch_size": 2, "batch_timeout": 60_000.0, "usual": USUAL}


def count_plans(bench: Bench) -> list[int]:
    """Return the numbers of entries of the plans to come."""
    plans, plan = [], bench.actor.planner.plan

    def note(inflight: Set[int], budget: PromptBudget | None) -> SchedulerOutput:
        output = plan(inflight, budget)
        plans.append(output.num_scheduled)
        return output

    bench.actor.planner.plan = note  # type: ignore[method-assign]
    return plans


def book_after_the_first_launch(bench: Bench) -> None:
    """Book the prompts' tokens once the decode step behind them was launched."""
    launched, opened = threading.Event(), bench.actor.stepper.opened
    bench.runner.gate = lambda launch: launched.set()

    def wait_and_book(message: Any) -> bool:
        assert launched.wait(timeout=30), "the first decode step waits until the prompts' tokens are booked"
        return opened(message)

    bench.actor.stepper.opened = wait_and_book  # type: ignore[method-assign]


@pytest.mark.trio
async def test_a_run_opens_with_the_prompts_and_decodes_before_their_tokens_are_booked(tiny_model: TinyModel) -> None:
    requests = [{"token_ids": prompt_of(6 + seed, seed)} for seed in range(2)]
    async with batcher(tiny_model("llama"), async_batching=False, **PAIR) as bench:
        want = await gather(bench, requests)
    async with batcher(tiny_model("llama"), new_runner=LaunchingTorchRunner, **PAIR) as bench:
        book_after_the_first_launch(bench)
        plans = count_plans(bench)
        results = await gather(bench, requests)
        assert bench.actor.stats.prefilled_tokens == 13
    assert [result.token_ids for result in results] == [result.token_ids for result in want]
    assert plans[0] == 2 and sum(map(bool, plans)) <= 3, "one plan, unless the event loop was late"


@pytest.mark.trio
async def test_without_steps_that_overlap_first_tokens_are_told_before_the_next_step(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), **PAIR) as bench:
        plans = count_plans(bench)
        await gather(bench, [{"token_ids": prompt_of(6, seed)} for seed in range(2)])
    assert plans[:2] == [2, 2], "a plan for the prompts, and one for the first run"


@pytest.mark.trio
async def test_a_sequence_that_ends_with_its_first_token_leaves_the_run_that_its_prompt_opened(
    tiny_model: TinyModel,
) -> None:
    """One ends by its length, one by a stop id; the third goes on."""
    options = {**PAIR, "batch_size": 3, "new_runner": LaunchingTorchRunner}
    async with batcher(tiny_model("llama"), **options) as bench:
        prompts = [{"token_ids": prompt_of(5 + seed, seed)} for seed in range(3)]
        want = [result.token_ids for result in await gather(bench, prompts)]
        results = await gather(
            bench, [{**prompts[0], "max_tokens": 1}, {**prompts[1], "stop_token_ids": want[1][:1]}, prompts[2]]
        )
        bench.assert_idle()
    assert [result.token_ids for result in results] == [want[0][:1], want[1][:1], want[2]]
    assert [result.finish_reason for result in results] == ["length", "stop", "length"]


@pytest.mark.trio
async def test_a_sequence_whose_first_token_is_its_last_is_in_no_further_step(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), new_runner=LaunchingTorchRunner, **PAIR) as bench:
        book_after_the_first_launch(bench)
        await gather(bench, [{"token_ids": prompt_of(5, 1), "max_tokens": 1}, {"token_ids": prompt_of(5, 2)}])
        assert bench.actor.stats.scheduled_entries == 2 + 11


class SpoilingRunner(LaunchingTorchRunner):
    """Spoils the logits of one row in every step with prompts, or raises there."""

    bad_row: int | None = None
    error: Exception | None = None

    def forward(self, batch: RaggedBatch) -> Rows:
        rows = super().forward(batch)
        if batch.max_query_len > 1 and self.error is not None:
            error, self.error = self.error, None
            raise error
        if batch.max_query_len > 1 and self.bad_row is not None and len(rows) > self.bad_row:
            assert isinstance(rows, np.ndarray)
            rows[self.bad_row] = np.inf
        return rows


@pytest.mark.trio
async def test_a_prompt_whose_draw_fails_ends_its_own_request_and_the_run_goes_on(tiny_model: TinyModel) -> None:
    good, bad = {"token_ids": prompt_of(6, 3)}, {"token_ids": prompt_of(8, 4)}
    async with batcher(tiny_model("llama"), new_runner=LaunchingTorchRunner, **PAIR) as bench:
        want, _ = await gather(bench, [good, bad])
    async with batcher(tiny_model("llama"), new_runner=SpoilingRunner, **PAIR) as bench:
        results = []

        async def works() -> None:
            results.append(await bench.generate(**good))

        async def fails() -> None:
            with pytest.raises(EngineError, match="not finite"):
                await bench.generate(**bad)

        bench.runner.bad_row = 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(works)
            await trio.testing.wait_all_tasks_blocked()  # so that the other one has the second row
            nursery.start_soon(fails)
    assert results[0].token_ids == want.token_ids


@pytest.mark.trio
async def test_a_step_of_prompts_that_fails_once_is_evaluated_again(tiny_model: TinyModel) -> None:
    requests = [{"token_ids": prompt_of(6 + seed, seed)} for seed in range(2)]
    async with batcher(tiny_model("llama"), new_runner=LaunchingTorchRunner, **PAIR) as bench:
        want = await gather(bench, requests)
    async with batcher(tiny_model("llama"), new_runner=SpoilingRunner, **PAIR) as bench:
        bench.runner.error = RuntimeError("a kernel failed")
        results = await gather(bench, requests)
        assert bench.runner.error is None, "raised once"
    assert [result.token_ids for result in results] == [result.token_ids for result in want]


@pytest.mark.trio
async def test_a_caller_that_leaves_while_its_prompt_opens_a_run_frees_its_slot(tiny_model: TinyModel) -> None:
    stays, leaves = {"token_ids": prompt_of(6, 1)}, {"token_ids": prompt_of(7, 2), "max_tokens": 90}
    inside, left = threading.Event(), threading.Event()

    class HeldUp(LaunchingTorchRunner):
        def forward(self, batch: RaggedBatch) -> Rows:
            if batch.max_query_len > 1:
                inside.set()
                assert left.wait(timeout=30)
            return super().forward(batch)

    async with batcher(tiny_model("llama"), new_runner=LaunchingTorchRunner, **PAIR) as bench:
        want, _ = await gather(bench, [stays, leaves])
    left.set()  # while the Batcher rehearses
    async with batcher(tiny_model("llama"), new_runner=HeldUp, **PAIR) as bench:
        left.clear()
        inside.clear()
        results = []

        async def stay() -> None:
            results.append(await bench.generate(**stays))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stay)
            async with trio.open_nursery() as callers:
                callers.start_soon(lambda: bench.generate(**leaves))
                assert await trio.to_thread.run_sync(inside.wait, 30)
                callers.cancel_scope.cancel()
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert len(bench.actor.slots.sequences) == 2, "the step still has both"
            left.set()
        assert bench.actor.stats.finished == {"cancelled": 1, "length": 1}
    assert results[0].token_ids == want.token_ids


# When a run ends for sequences that wait


def run_until_due(gathering: Gathering, ends: list[int], num_waiting: int, step_s: float = 0.01) -> int:
    """Return the number of steps after which the run ends."""
    for number, num_ended in enumerate(ends, 1):
        if gathering.is_due(num_ended, num_waiting, step_s):
            return number
    raise AssertionError("the run never ends")


def gathering(plan_s: float, ends_a_step: int, num_rows: int = 256) -> Gathering:
    """Return a Gathering that has seen many steps with that many ends, at the beginning of a run."""
    seen = Gathering()
    seen.plan_s = plan_s
    for _ in range(200):
        seen.is_due(ends_a_step, 0, 0.01)
    seen.begin(num_rows)
    return seen


def test_several_ends_are_gathered_until_free_slots_have_cost_a_plan() -> None:
    """Two more of 256 rows are idle after each step: after n steps n (n - 1) / 256 steps of 5 ms were lost."""
    assert run_until_due(gathering(0.0005, 2), [2] * 99, 1000, step_s=0.005) == 6
    assert run_until_due(gathering(0.001, 2), [2] * 99, 1000, step_s=0.005) == 8


def test_no_sequence_waits_longer_than_the_bound_for_a_free_slot() -> None:
    assert run_until_due(gathering(9.0, 2), [2] * 99, 1000, step_s=0.03) == 1 + math.ceil(MAX_GATHER_S / 0.03)


@pytest.mark.parametrize(
    ("plan_s", "ends_a_step", "num_rows", "num_waiting"),
    [
        (0.005, 2, 256, 1),  # all who wait have a slot
        (0.0, 2, 256, 1000),  # plans cost nothing
        (0.005, 0, 256, 1000),  # the next end is far away
        (0.001, 1, 8, 1000),  # a slot of few is dear
    ],
)
def test_a_run_ends_at_the_first_end_where_nothing_is_gained(
    plan_s: float, ends_a_step: int, num_rows: int, num_waiting: int
) -> None:
    assert run_until_due(gathering(plan_s, ends_a_step, num_rows), [0, 0, 1, 0], num_waiting) == 3


def test_a_run_goes_on_after_ends_while_nobody_waits() -> None:
    state = gathering(0.005, 2)
    assert not any(state.is_due(2, 0, 0.01) for _ in range(50))
    assert not state.is_on, "a request that arrives now ends the run"
    assert state.is_due(0, 1, 0.01)


@pytest.mark.trio
async def test_a_request_that_arrives_while_a_run_gathers_ends_does_not_end_the_run(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama"), new_runner=LaunchingTorchRunner, **PAIR) as bench:
        stepper, hurried = bench.actor.stepper, []
        stepper.hurry = lambda: hurried.append(True)  # type: ignore[method-assign]
        stepper._gathering.is_on = True
        stepper.arrived()
        assert not hurried
        stepper._gathering.is_on = False
        stepper.arrived()
        assert hurried


@pytest.mark.trio
async def test_many_short_requests_over_few_slots_have_the_same_tokens_with_and_without_runs(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are made dear, so that runs gather ends."""
    monkeypatch.setattr(Gathering, "plan_s", property(lambda _: 5.0, lambda *_: None), raising=False)
    requests = [
        {"token_ids": prompt_of(3 + index % 5, index), "max_tokens": 1 + index % 7, "ignore_eos": True}
        for index in range(24)
    ]
    options: dict[str, Any] = {"batch_size": 24, "batch_timeout": 60_000.0, "max_queue": 64}
    async with batcher(tiny_model("llama"), async_batching=False, **options) as bench:
        want = await gather(bench, requests)
    async with batcher(tiny_model("llama"), new_runner=LaunchingTorchRunner, **options) as bench:
        gathered = []
        is_due = bench.actor.stepper._gathering.is_due

        def note(*arguments: Any) -> bool:
            due = is_due(*arguments)
            gathered.append(bench.actor.stepper._gathering.is_on)
            return due

        bench.actor.stepper._gathering.is_due = note  # type: ignore[method-assign]
        results = await gather(bench, requests)
    assert any(gathered)
    assert [result.token_ids for result in results] == [result.token_ids for result in want]
