"""GenServer: init, calls, casts, replies that come later, timers."""

import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.runtime.errors import ActorDown, MailboxFull
from genbatch.actors.runtime.genserver import (
    ActorRef,
    From,
    GenServer,
    reply,
    reply_error,
    start,
)
from genbatch.actors.runtime.telemetry import Telemetry
from tests.actors.runtime.probe import Probe, ask, events_of


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
async def test_what_happens_in_init_comes_before_any_message(nursery: trio.Nursery) -> None:
    class Eager(Probe):
        async def init(self) -> None:
            self.ref.cast("first message")
            self.continue_with(1)
            self.continue_with(2)

    actor = Eager()
    await start(nursery, actor)
    await wait_all_tasks_blocked()
    assert actor.log == [("continue", 1), ("continue", 2), ("cast", "first message")]


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
