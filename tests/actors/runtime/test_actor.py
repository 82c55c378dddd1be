"""Mailbox: two lanes, a bound, and timers.

Monitor: `Down`, once, when a caller or an actor is gone.

ActorRef.call: timeouts and cancellation at every point of its way.

GenServer: init, calls, casts, replies that come later, timers.
"""

import traceback
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.runtime.actor import (
    MESSAGES_PER_TURN,
    ActorRef,
    Down,
    Exit,
    From,
    GenServer,
    Mailbox,
    Monitor,
    Timer,
    reply,
    reply_error,
    start,
)
from genbatch.actors.runtime.errors import ActorDown, CallTimeout, MailboxFull
from genbatch.actors.runtime.telemetry import Telemetry
from tests.actors.runtime.probe import Probe, Watcher, ask, events_of, records


def make_mailbox(max_size: int = 3) -> Mailbox:
    return Mailbox("box", max_size, Telemetry())


async def drain(mailbox: Mailbox) -> list[object]:
    return [await mailbox.get() for _ in range(len(mailbox))]


@pytest.mark.trio
async def test_messages_come_out_in_order_and_control_ones_first() -> None:
    mailbox = make_mailbox()
    mailbox.put("a")
    mailbox.put("x", control=True)
    mailbox.put("b")
    mailbox.put("y", control=True)
    assert await drain(mailbox) == ["x", "y", "a", "b"]


@pytest.mark.trio
async def test_a_full_mailbox_refuses_loses_nothing_and_lets_control_messages_pass() -> None:
    mailbox = make_mailbox(max_size=2)
    refused = []
    mailbox.telemetry.attach(lambda event, measurements, metadata: refused.append((event, *metadata.values())))
    mailbox.put("a")
    mailbox.put("b")
    with pytest.raises(MailboxFull):
        mailbox.put("c")
    for number in range(10):
        mailbox.put(number, control=True)
    assert refused == [("actor.mailbox_full", "box")]
    assert await drain(mailbox) == [*range(10), "a", "b"]
    mailbox.put("d")  # there is room again


@pytest.mark.trio
async def test_a_discarded_message_makes_room_and_is_not_handled() -> None:
    mailbox = make_mailbox(max_size=2)
    unwanted = object()
    mailbox.put(unwanted)
    mailbox.put("b")
    mailbox.discard(unwanted)
    mailbox.discard(unwanted)
    mailbox.put("c")
    assert await drain(mailbox) == ["b", "c"]


@pytest.mark.trio
async def test_a_closed_mailbox_refuses_even_control_messages_and_timers_do_nothing() -> None:
    mailbox = make_mailbox()
    mailbox.close(Exit.SHUTDOWN)
    for control in (False, True):
        with pytest.raises(ActorDown) as caught:
            mailbox.put("late", control=control)
        assert caught.value.reason is Exit.SHUTDOWN
    mailbox.put_after(0, "late")
    assert not mailbox._timers


@pytest.mark.trio
async def test_get_waits_for_a_message_and_can_be_cancelled(autojump_clock: MockClock) -> None:
    mailbox = make_mailbox()
    with trio.move_on_after(1) as scope:
        await mailbox.get()
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.get)
        await trio.testing.wait_all_tasks_blocked()
        mailbox.put("a")
    assert len(mailbox) == 0


@pytest.mark.trio
async def test_timers_come_due_by_deadline_and_in_order_among_equals(autojump_clock: MockClock) -> None:
    mailbox = make_mailbox()
    for delay_s, message in [(3, "third"), (1, "first"), (1, "second")]:
        mailbox.put_after(delay_s, message)
    arrivals = []
    for _ in range(3):
        timer = await mailbox.get()
        assert isinstance(timer, Timer)
        arrivals.append((trio.current_time(), timer.message))
    start = arrivals[0][0] - 1
    assert arrivals == [(start + 1, "first"), (start + 1, "second"), (start + 3, "third")]


@pytest.mark.trio
async def test_a_timer_set_while_the_actor_waits_wakes_it_in_time(autojump_clock: MockClock) -> None:
    mailbox = make_mailbox()
    mailbox.put_after(100, "late")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.get)
        await trio.testing.wait_all_tasks_blocked()
        start = trio.current_time()
        mailbox.put_after(1, "early")
    assert trio.current_time() == start + 1


@pytest.mark.trio
async def test_a_cancelled_timer_is_not_handled_even_if_it_was_due(autojump_clock: MockClock) -> None:
    mailbox = make_mailbox()
    first, second = mailbox.put_after(1, "first"), mailbox.put_after(1, "second")
    assert await mailbox.get() is first  # both are due now
    second.cancel()
    second.cancel()
    first.cancel()
    assert len(mailbox) == 0


@pytest.mark.trio
async def test_cancelled_timers_leave_no_record() -> None:
    mailbox = make_mailbox()
    timers = [mailbox.put_after(60, number) for number in range(100)]
    for timer in timers:
        timer.cancel()
    assert not mailbox._timers


@settings(deadline=None)
@given(st.lists(st.one_of(st.tuples(st.just("put"), st.booleans()), st.just(("get", False))), max_size=60))
def test_a_mailbox_is_two_queues_of_which_one_is_bounded(operations: list[tuple[str, bool]]) -> None:
    async def scenario() -> None:
        mailbox = make_mailbox(max_size=4)
        normal: list[int] = []
        urgent: list[int] = []
        for number, (operation, control) in enumerate(operations):
            if operation == "get":
                if normal or urgent:
                    assert await mailbox.get() == (urgent or normal).pop(0)
            elif control or len(normal) < 4:
                mailbox.put(number, control=control)
                (urgent if control else normal).append(number)
            else:
                with pytest.raises(MailboxFull):
                    mailbox.put(number)
            assert len(mailbox) == len(normal) + len(urgent)

    trio.run(scenario)


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


class Counter(GenServer):
    async def init(self) -> None:
        self.count = 0

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        return self.count

    async def handle_cast(self, message: Any) -> None:
        self.count += message


@pytest.mark.trio
async def test_the_example_works() -> None:
    async with trio.open_nursery() as nursery:
        counter = await start(nursery, Counter(), name="counter")
        counter.cast(2)
        assert await counter.call("value") == 2
        await counter.stop()
    assert not counter.alive


@pytest.mark.trio
async def test_a_failing_init_is_raised_by_start_as_it_is_and_nothing_terminates(nursery: trio.Nursery) -> None:
    class Broken(Probe):
        async def init(self) -> None:
            raise ValueError("no model")

    actor = Broken()
    with pytest.raises(ValueError, match="no model"):
        await start(nursery, actor)
    assert actor.log == []
    assert not actor.ref.alive


@pytest.mark.trio
async def test_a_reply_may_come_from_a_later_message(nursery: trio.Nursery) -> None:
    actor = Probe()
    ref = await start(nursery, actor)
    outcomes: list[Any] = []
    nursery.start_soon(ask, ref, "hold", outcomes)
    await wait_all_tasks_blocked()
    assert outcomes == []

    async def answer(probe: Probe) -> None:
        reply(probe.held.pop(), "at last")

    ref.cast(answer)
    await wait_all_tasks_blocked()
    assert outcomes == ["at last"]


@pytest.mark.trio
async def test_reply_error_raises_that_instance_with_a_fresh_traceback(nursery: trio.Nursery) -> None:
    actor = Probe()
    ref = await start(nursery, actor)
    outcomes: list[Any] = []
    for _ in range(2):
        nursery.start_soon(ask, ref, "hold", outcomes)
    await wait_all_tasks_blocked()
    try:
        raise KeyError("made elsewhere")
    except KeyError as error:
        for from_ in actor.held:
            reply_error(from_, error)
            await wait_all_tasks_blocked()
    assert outcomes[0] is outcomes[1]
    names = [frame.name for frame in traceback.extract_tb(outcomes[1].__traceback__)]
    assert names[:2] == ["ask", "call"]
    assert names.count("ask") == 1  # the first caller's frames are not in the second one's traceback
    assert ref.alive


@pytest.mark.trio
async def test_a_second_reply_is_a_bug_and_crashes_whoever_makes_it(nursery: trio.Nursery) -> None:
    actor = Probe()
    ref = await start(nursery, actor)
    nursery.start_soon(ask, ref, "hold", [])
    await wait_all_tasks_blocked()
    reply(actor.held[0], 1)
    with pytest.raises(AssertionError, match="second reply"):
        reply(actor.held[0], 2)


@pytest.mark.trio
async def test_a_call_to_itself_is_a_bug_and_does_not_hang(nursery: trio.Nursery) -> None:
    async def ask_itself(probe: Probe) -> str:
        with pytest.raises(AssertionError, match="wait for itself"):
            await probe.ref.call("x", timeout=None)
        with pytest.raises(AssertionError, match="wait for itself"):
            await probe.ref.stop()
        return "noticed"

    ref = await start(nursery, Probe())
    assert await ref.call(ask_itself) == "noticed"


@pytest.mark.trio
async def test_a_full_mailbox_refuses_calls_and_casts_but_control_messages_pass(nursery: trio.Nursery) -> None:
    actor = Probe()
    ref = await start(nursery, actor, mailbox_size=2)
    gate = trio.Event()

    async def wait_for_gate(_: Probe) -> None:
        await gate.wait()

    ref.cast(wait_for_gate)
    await wait_all_tasks_blocked()
    ref.cast("a")
    ref.info("b")
    with pytest.raises(MailboxFull):
        ref.cast("c")
    with pytest.raises(MailboxFull):
        await ref.call("c")
    ref.info("urgent", control=True)
    outcomes: list[Any] = []

    async def ask_urgently() -> None:
        outcomes.append(await ref.call("control call", control=True))

    nursery.start_soon(ask_urgently)
    await wait_all_tasks_blocked()
    gate.set()
    await wait_all_tasks_blocked()
    assert outcomes == ["control call"]
    assert actor.log[1:] == ["urgent", ("cast", "a"), "b"]


@pytest.mark.trio
async def test_a_caller_that_retries_in_a_loop_lets_the_actor_make_room(nursery: trio.Nursery) -> None:
    ref = await start(nursery, Probe(), mailbox_size=1)
    ref.cast("a")
    while True:
        try:
            assert await ref.call("b") == "b"
            break
        except MailboxFull:
            continue


@pytest.mark.trio
async def test_an_actor_that_never_runs_out_of_messages_lets_other_tasks_run(nursery: trio.Nursery) -> None:
    actor = Probe()
    ref = await start(nursery, actor, mailbox_size=10_000)
    for number in range(10_000):
        ref.cast(number)
    await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()
    assert 0 < len(actor.log) < 10_000


class Laborious(GenServer):
    """Each message takes as much time as it says."""

    def __init__(self, clock: MockClock) -> None:
        self.clock = clock
        self.num_handled = 0

    async def handle_cast(self, message: Any) -> None:
        self.clock.jump(message)
        self.num_handled += 1


@pytest.mark.trio
@pytest.mark.parametrize(("seconds", "most"), [(0.0, MESSAGES_PER_TURN), (0.0015, 2), (0.01, 1)])
async def test_messages_that_take_long_have_a_turn_of_their_own(
    nursery: trio.Nursery, mock_clock: MockClock, seconds: float, most: int
) -> None:
    actor = Laborious(mock_clock)
    ref = await start(nursery, actor, mailbox_size=1000)
    for _ in range(160):
        ref.cast(seconds)
    seen = [0]
    while seen[-1] < 160:
        await trio.lowlevel.checkpoint()
        seen.append(actor.num_handled)
    in_a_turn = [after - before for before, after in pairwise(seen)]
    assert max(in_a_turn) in (most, 2 * most)  # a turn of this task's may end between two of the actor's


@pytest.mark.trio
async def test_an_unknown_call_or_cast_crashes_and_an_unknown_info_is_reported() -> None:
    telemetry = Telemetry()
    events = events_of(telemetry)
    send: list[Callable[[ActorRef], object]] = [lambda ref: ref.cast("?"), lambda ref: ref.call("?")]
    for sending in send:
        with pytest.RaisesGroup(NotImplementedError):
            async with trio.open_nursery() as nursery:
                ref = await start(nursery, GenServer(), telemetry=telemetry)
                ref.info("?")
                sent = sending(ref)
                if isinstance(sent, Awaitable):
                    with pytest.raises(ActorDown):
                        await sent
    assert events.count("actor.unhandled_info") == 2


@pytest.mark.trio
async def test_send_after_arrives_on_time_passes_a_full_mailbox_and_can_be_cancelled(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    class Clocked(Probe):
        async def init(self) -> None:
            self.begun = trio.current_time()
            self.send_after(2, "two")
            self.send_after(1, "one")
            self.send_after(1.5, "never").cancel()

        async def handle_info(self, message: Any) -> None:
            self.log.append((trio.current_time() - self.begun, message))

    actor = Clocked()
    ref = await start(nursery, actor, mailbox_size=1)

    async def busy(_: Probe) -> None:
        await trio.sleep(1.5)

    ref.cast(busy)
    await trio.lowlevel.checkpoint()
    await trio.sleep(0.5)
    ref.cast("waits")
    await trio.sleep(5)
    assert [entry for entry in actor.log if entry[0] != "cast"] == [(1.5, "one"), (2, "two")]
    assert actor.log.index((1.5, "one")) < actor.log.index(("cast", "waits"))


@pytest.mark.trio
async def test_every_message_is_reported_to_whoever_listens(nursery: trio.Nursery) -> None:
    telemetry = Telemetry()
    seen: list[Any] = []
    telemetry.attach(lambda event, measurements, metadata: seen.append((event, metadata.get("kind"))))
    ref = await start(nursery, Probe(), name="probe", telemetry=telemetry)
    await ref.call(1)
    ref.cast(2)
    ref.info(3)
    await wait_all_tasks_blocked()
    await ref.stop()
    assert seen == [
        ("actor.start", None),
        *[("actor.message", kind) for kind in ("From", "Cast", "Info", "Stop")],
        ("actor.stop", None),
    ]


@pytest.mark.trio
async def test_an_actor_without_a_name_has_its_class_s(nursery: trio.Nursery) -> None:
    assert (await start(nursery, Counter())).name == "Counter"
    assert (await start(nursery, Counter(), name="mine")).name == "mine"
    nursery.cancel_scope.cancel()
