"""A few of the worlds that `make sim` runs by the thousand."""

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import trio

from genbatch.actors.engine.accepted_requests import AcceptedRequest, AcceptedRequests
from genbatch.actors.engine.remote_batcher import RemoteBatcher
from genbatch.nif.context import runs
from genbatch.nif.models.loaded_model import Model
from tests.simulation.__main__ import judge_script, world_fails
from tests.simulation.faults import shrink
from tests.simulation.history_runner import HistoryRunner
from tests.simulation.seeded_loop import run_seeded
from tests.simulation.world import World

TinyModel = Callable[[str], Model]
SEEDS = 240
SHARE = 20
# `make test` draws the first of them.
FIRSTS = [
    pytest.param(first, marks=[pytest.mark.long] if first >= 3 * SHARE else []) for first in range(0, SEEDS, SHARE)
]


@pytest.fixture
def model(tiny_model: TinyModel) -> Iterator[Model]:
    made = tiny_model("llama")
    gc.freeze()  # a world that runs out of memory collects garbage: not that of all other tests
    yield made
    gc.unfreeze()


@pytest.mark.parametrize("first", FIRSTS)
def test_every_promise_holds_in_worlds_full_of_faults(model: Model, first: int) -> None:
    for seed in range(first, first + SHARE):
        try:
            World(seed, model).simulate()
        except BaseException as error:
            error.add_note(f"replay: python -m tests.simulation --first {seed} --seeds 1 --trace")
            raise


def test_a_seed_gives_the_same_world_again(model: Model) -> None:
    for seed in range(SHARE // 2):
        first, second = World(seed, model), World(seed, model)
        first.simulate()
        second.simulate()
        assert first.events == second.events


def test_whom_a_cancellation_reaches_first_depends_on_no_address() -> None:
    reached: list[int] = []

    async def wait(number: int) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            reached.append(number)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(wait, number)
                await trio.sleep(1.0)
            nursery.cancel_scope.cancel()

    run_seeded(main, 0)
    assert reached == list(range(64))


def fails(model: Model) -> bool:
    for seed in range(SEEDS):
        try:
            World(seed, model).simulate()
        except BaseException:
            return True
    return False


def test_a_block_that_is_not_copied_before_it_is_written_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HistoryRunner, "copy_blocks", lambda self, group, pairs: None)
    assert fails(model)


def test_a_block_that_comes_back_from_the_host_without_its_content_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HistoryRunner, "write_blocks", lambda self, group, blocks, content: None)
    assert fails(model)


def test_a_request_that_is_forgotten_when_its_engine_dies_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose = AcceptedRequests.lose

    def forgetful(self: AcceptedRequests, now: float) -> list[tuple[AcceptedRequest, Exception]]:
        return lose(self, now)[1:]

    monkeypatch.setattr(AcceptedRequests, "lose", forgetful)
    assert fails(model)


def test_a_draw_that_depends_on_how_its_step_was_planned_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = runs.choose

    def choose_elsewhere(logits: Any, largest: Any, states: Any, positions: Any) -> Any:
        return choose(logits, largest, states, [position + 1 for position in positions])

    monkeypatch.setattr(runs, "choose", choose_elsewhere)
    assert fails(model)


def test_a_drain_that_waits_for_longer_than_it_was_told_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(self: RemoteBatcher, deadline: float) -> None:
        await self._all_ended()

    monkeypatch.setattr(RemoteBatcher, "_cancel_open", wait)
    monkeypatch.setattr(World, "drain_rate", 1.0)
    assert fails(model)


# Liveness, and short scripts of faults


def test_a_request_that_never_ends_is_noticed_once_the_faults_have_stopped_and_needs_one_kill(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the last request of a dead engine is not sent to the next one."""

    def forget_one(self: AcceptedRequests) -> list[AcceptedRequest]:
        due = send_due(self)
        return [entry for entry in due if not (entry.deaths and entry.id == max(one.id for one in self))]

    send_due = AcceptedRequests.due
    monkeypatch.setattr(AcceptedRequests, "due", forget_one)
    found = (seed for seed in range(SEEDS) if "something has not ended" in fault_of(World(seed, model)))
    verdict = judge_script(next(found), model)
    assert verdict.script is not None and len(verdict.script) == 1 and verdict.script[0][:4] in ("kill", "hang", "harm")
    assert world_fails(verdict.seed, model, verdict.script) and not world_fails(verdict.seed, model, [])


def fault_of(world: World) -> str:
    try:
        world.simulate()
    except BaseException as error:
        return "".join(traceback.format_exception(error))
    return ""


def test_a_script_is_shrunk_to_the_faults_that_are_needed() -> None:
    tried: list[list[str]] = []

    def fails(script: Sequence[str]) -> bool:
        tried.append(list(script))
        return {"c", "k"} <= {*script}

    assert shrink("abcdefghijklm", fails) == ["c", "k"]
    assert len(tried) < 40
    assert shrink("abc", lambda script: True) == []
