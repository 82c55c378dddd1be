"""ActorRef.call: timeouts and cancellation at every point of its way."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.runtime.errors import ActorDown, CallTimeout
from genbatch.actors.runtime.genserver import (
    reply,
    start,
)
from genbatch.actors.runtime.telemetry import Telemetry
from tests.actors.runtime.probe import Probe, Watcher, ask, events_of, records


@pytest.mark.trio
async def test_a_call_times_out_and_its_late_reply_is_dropped(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    actor, telemetry = Probe(), Telemetry()
    events = events_of(telemetry)
    ref = await start(nursery, actor, telemetry=telemetry)
    begun = trio.current_time()
    with pytest.raises(CallTimeout):
        await ref.call("hold", timeout=3)
    assert trio.current_time() == begun + 3
    assert not actor.held[0].alive
    reply(actor.held[0], "late")
    assert await ref.call("still there") == "still there"
    assert "actor.reply_dropped" in events


@pytest.mark.trio
async def test_a_call_in_a_cancelled_scope_sends_nothing(nursery: trio.Nursery) -> None:
    actor = Probe()
    ref = await start(nursery, actor)
    with trio.CancelScope() as scope:
        scope.cancel()
        await ref.call("hold")
    await wait_all_tasks_blocked()
    assert scope.cancelled_caught
    assert actor.held == []


@pytest.mark.trio
@pytest.mark.parametrize("control", [False, True])
async def test_a_call_cancelled_before_it_is_handled_leaves_the_mailbox_at_once(
    nursery: trio.Nursery, control: bool
) -> None:
    actor, gate = Probe(), trio.Event()
    ref = await start(nursery, actor, mailbox_size=1)

    async def wait_for_gate(_: Probe) -> None:
        await gate.wait()

    ref.cast(wait_for_gate)
    await wait_all_tasks_blocked()
    for _ in range(3):  # a mailbox of one message has room for each in turn
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as callers:
                callers.start_soon(lambda: ref.call("hold", control=control))
                await wait_all_tasks_blocked()
                scope.cancel()
    gate.set()
    await wait_all_tasks_blocked()
    assert actor.held == []
    assert not ref.lifetime.calls


@pytest.mark.trio
@pytest.mark.parametrize("first", ["reply", "cancellation"])
async def test_of_a_reply_and_a_cancellation_in_one_turn_the_first_wins(nursery: trio.Nursery, first: str) -> None:
    actor = Watcher()
    ref = await start(nursery, actor)
    outcomes: list[Any] = []
    async with trio.open_nursery() as callers:
        callers.start_soon(ask, ref, "hold", outcomes)
        await wait_all_tasks_blocked()
        steps = [lambda: reply(actor.held[0], "done"), callers.cancel_scope.cancel]
        for step in steps if first == "reply" else reversed(steps):
            step()
    await wait_all_tasks_blocked()
    assert outcomes == ["done" if first == "reply" else "cancelled"]
    assert len(actor.log) == (0 if first == "reply" else 1)


@pytest.mark.trio
async def test_calls_leave_nothing_behind_however_they_end(autojump_clock: MockClock) -> None:
    before = records()
    with pytest.RaisesGroup(ValueError):
        async with trio.open_nursery() as nursery:
            ref = await start(nursery, Watcher())
            async with trio.open_nursery() as callers:
                for timeout in (1.0, 2.0, None, None):
                    callers.start_soon(ask, ref, "hold", [], timeout)
                await wait_all_tasks_blocked()
                callers.cancel_scope.deadline = trio.current_time() + 1.5
            outcomes: list[Any] = []
            nursery.start_soon(ask, ref, "hold", outcomes)
            await wait_all_tasks_blocked()
            await ref.stop(ValueError("a crash"))
    assert isinstance(outcomes[0], ActorDown)
    del outcomes, ref, nursery, callers
    assert records() == before
