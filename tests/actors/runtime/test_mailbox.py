"""Mailbox: two lanes, a bound, and timers."""

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from genbatch.actors.runtime.errors import ActorDown, MailboxFull
from genbatch.actors.runtime.mailbox import Mailbox, Timer
from genbatch.actors.runtime.monitor import Exit
from genbatch.actors.runtime.telemetry import Telemetry


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
