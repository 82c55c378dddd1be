"""Monitor: `Down`, once, when a caller or an actor is gone."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.runtime.genserver import (
    Down,
    Exit,
    From,
    Monitor,
    reply,
    start,
)
from genbatch.actors.runtime.telemetry import Telemetry
from tests.actors.runtime.probe import Probe, Watcher, ask


@pytest.mark.trio
@pytest.mark.parametrize("how", ["cancelled", "timed out", "sibling crashed"])
async def test_a_monitor_fires_once_when_the_caller_is_gone(how: str, autojump_clock: MockClock) -> None:
    actor = Watcher()
    async with trio.open_nursery() as nursery:
        ref = await start(nursery, actor)
        outcomes: list[Any] = []
        try:
            async with trio.open_nursery() as scope:
                scope.start_soon(ask, ref, "hold", outcomes, 5.0)
                await wait_all_tasks_blocked()
                if how == "cancelled":
                    scope.cancel_scope.cancel()
                elif how == "sibling crashed":
                    raise KeyError("the caller's sibling")
        except* KeyError:
            pass
        await wait_all_tasks_blocked()
        (down,) = actor.log
        assert isinstance(down, Down)
        assert down.target is actor.held[0]
        assert down.reason is (Exit.TIMEOUT if how == "timed out" else Exit.CANCELLED)
        assert not ref.lifetime.calls and not ref.lifetime.monitors
        reply(actor.held[0], "late")
        await ref.stop()
    assert len(outcomes) == 1


@pytest.mark.trio
async def test_a_monitor_on_a_caller_that_left_while_its_call_was_handled_fires_at_once(
    nursery: trio.Nursery,
) -> None:
    class Slow(Watcher):
        async def handle_call(self, request: Any, from_: From[Any]) -> Any:
            await gate.wait()
            return await super().handle_call(request, from_)

    actor, gate = Slow(), trio.Event()
    ref = await start(nursery, actor)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as callers:
            callers.start_soon(ask, ref, "hold", [])
            await wait_all_tasks_blocked()
            scope.cancel()
    gate.set()
    await wait_all_tasks_blocked()
    assert [type(message) for message in actor.log] == [Down]


@pytest.mark.trio
async def test_an_answered_call_fires_no_monitor_and_leaves_no_record(nursery: trio.Nursery) -> None:
    actor = Watcher()
    ref = await start(nursery, actor)
    outcomes: list[Any] = []
    nursery.start_soon(ask, ref, "hold", outcomes)
    await wait_all_tasks_blocked()
    reply(actor.held[0], "done")
    await wait_all_tasks_blocked()
    assert (outcomes, actor.log) == (["done"], [])
    assert not ref.lifetime.calls and not ref.lifetime.monitors


@pytest.mark.trio
async def test_a_monitor_on_an_actor_tells_why_it_ended_also_when_it_already_has(nursery: trio.Nursery) -> None:
    watcher, telemetry = Probe(), Telemetry()
    watching = await start(nursery, watcher, telemetry=telemetry)
    other = await start(nursery, Probe())

    async def watch(probe: Probe) -> Monitor:
        return probe.monitor(other)

    first = await watching.call(watch)
    await wait_all_tasks_blocked()
    assert watcher.log == []
    await other.stop(Exit.SHUTDOWN)
    second = await watching.call(watch)
    await wait_all_tasks_blocked()
    assert [(down.monitor, down.reason) for down in watcher.log] == [
        (first, Exit.SHUTDOWN),
        (second, Exit.SHUTDOWN),
    ]


@pytest.mark.trio
async def test_a_cancelled_monitor_is_silent_even_if_its_down_is_under_way(nursery: trio.Nursery) -> None:
    watcher = Probe()
    watching = await start(nursery, watcher)
    others = [await start(nursery, Probe()) for _ in range(2)]

    async def lose_interest(probe: Probe) -> None:
        early, late = (probe.monitor(other) for other in others)
        early.cancel()
        for other in others:
            await other.stop()
        late.cancel()

    await watching.call(lose_interest)
    await wait_all_tasks_blocked()
    assert watcher.log == []
    assert not watching.lifetime.monitors


@pytest.mark.trio
async def test_an_actor_that_ends_takes_its_monitors_along(nursery: trio.Nursery) -> None:
    watching, other = await start(nursery, Probe()), await start(nursery, Probe())

    async def watch(probe: Probe) -> None:
        probe.monitor(other)

    await watching.call(watch)
    assert len(other.lifetime.watchers) == 1
    await watching.stop()
    assert not other.lifetime.watchers
