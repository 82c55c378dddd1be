"""Every way for an actor to end: crash, stop, cancellation, and what terminate may do.

Any mix of calls, timeouts, cancellations, crashes and restarts: each call has one outcome, nothing is left.
"""

import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.runtime.actor import (
    NOREPLY,
    Down,
    Exit,
    From,
    GenServer,
    Mailbox,
    Monitor,
    Reason,
    reply,
    reply_error,
    start,
)
from genbatch.actors.runtime.errors import ActorDown, CallTimeout, MailboxFull
from genbatch.actors.runtime.supervisor import ChildSpec, Intensity, Supervisor
from genbatch.actors.runtime.telemetry import Telemetry
from tests.actors.runtime.probe import Probe, Watcher, ask, crash, events_of


@pytest.mark.trio
async def test_a_crash_fails_every_open_call_with_the_cause_and_is_raised_in_the_nursery() -> None:
    actor, gate = Probe(), trio.Event()
    outcomes: list[Any] = []

    async def crash_later(probe: Probe) -> None:
        await gate.wait()
        await crash(probe)

    async with trio.open_nursery() as callers:
        with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="a bug")):
            async with trio.open_nursery() as nursery:
                ref = await start(nursery, actor)
                for request in ("hold", crash_later, "waits in the mailbox"):
                    callers.start_soon(ask, ref, request, outcomes)
                    await wait_all_tasks_blocked()
                gate.set()
    (_, reason) = actor.log[-1]
    assert isinstance(reason, ValueError)
    assert [type(error) for error in outcomes] == [ActorDown] * 3
    assert all(error.__cause__ is reason for error in outcomes)
    with pytest.raises(ActorDown) as caught:
        ref.cast("late")
    assert caught.value.__cause__ is reason


@pytest.mark.trio
async def test_the_caller_whose_call_crashed_gets_actor_down_and_no_group() -> None:
    async def crash_in_nursery(_: Probe) -> None:
        async with trio.open_nursery():
            raise ValueError("inside")

    for bug, cause in [(crash, ValueError), (crash_in_nursery, ExceptionGroup)]:
        with pytest.raises(ExceptionGroup):
            async with trio.open_nursery() as nursery:
                ref = await start(nursery, Probe())
                with pytest.raises(ActorDown) as caught:
                    await ref.call(bug)
                assert type(caught.value.__cause__) is cause


@pytest.mark.trio
async def test_stop_lets_the_message_at_hand_finish_and_gives_the_reason(nursery: trio.Nursery) -> None:
    actor, gate = Probe(), trio.Event()
    ref = await start(nursery, actor)

    async def wait_for_gate(_: Probe) -> str:
        await gate.wait()
        return "finished"

    outcomes: list[Any] = []
    nursery.start_soon(ask, ref, wait_for_gate, outcomes)
    await wait_all_tasks_blocked()
    ref.cast("not handled any more")
    nursery.start_soon(ref.stop, Exit.SHUTDOWN)
    await wait_all_tasks_blocked()
    assert ref.alive
    gate.set()
    assert await ref.wait() is Exit.SHUTDOWN
    await wait_all_tasks_blocked()
    assert outcomes == ["finished"]
    assert actor.log == [("terminate", Exit.SHUTDOWN)]
    await ref.stop()  # it already has


@pytest.mark.trio
async def test_the_first_reason_to_stop_is_the_one_that_counts(nursery: trio.Nursery) -> None:
    async def stop_twice(probe: Probe) -> None:
        probe.stop(Exit.SHUTDOWN)
        probe.stop(Exit.NORMAL)

    ref = await start(nursery, Probe())
    await ref.call(stop_twice)
    assert await ref.wait() is Exit.SHUTDOWN


@pytest.mark.trio
async def test_stop_times_out_but_holds(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    ref = await start(nursery, Probe())

    async def work(_: Probe) -> None:
        await trio.sleep(10)

    ref.cast(work)
    await wait_all_tasks_blocked()
    with pytest.raises(CallTimeout):
        await ref.stop(timeout=1)
    assert await ref.wait() is Exit.NORMAL


@pytest.mark.trio
async def test_an_actor_that_stops_itself_still_replies(nursery: trio.Nursery) -> None:
    async def stop(probe: Probe) -> str:
        probe.stop()
        return "goodbye"

    ref = await start(nursery, Probe())
    assert await ref.call(stop) == "goodbye"
    assert await ref.wait() is Exit.NORMAL


@pytest.mark.trio
async def test_cancelling_an_actor_runs_terminate_shielded_before_anyone_is_told() -> None:
    class Careful(Watcher):
        async def terminate(self, reason: Reason) -> None:
            await wait_all_tasks_blocked()
            self.log.append(("terminate", reason, len(outcomes)))
            reply(self.held[0], "saved")

    actor = Careful()
    outcomes: list[Any] = []
    async with trio.open_nursery() as callers, trio.open_nursery() as nursery:
        ref = await start(nursery, actor)
        for _ in range(2):
            callers.start_soon(ask, ref, "hold", outcomes)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert actor.log == [("terminate", Exit.CANCELLED, 0)]
    assert outcomes[0] == "saved" or outcomes[1] == "saved"
    (down,) = (outcome for outcome in outcomes if outcome != "saved")
    assert down.reason is Exit.CANCELLED


@pytest.mark.trio
async def test_a_handler_cancelled_inside_its_own_nursery_counts_as_cancelled() -> None:
    actor = Probe()

    async def wait_in_nursery(_: Probe) -> None:
        async with trio.open_nursery() as inner:
            inner.start_soon(trio.sleep_forever)

    async with trio.open_nursery() as nursery:
        ref = await start(nursery, actor)
        ref.cast(wait_in_nursery)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert actor.log == [("terminate", Exit.CANCELLED)]


@pytest.mark.trio
async def test_terminate_is_cut_off_after_the_shutdown_time(autojump_clock: MockClock) -> None:
    class Stubborn(Probe):
        async def terminate(self, reason: Reason) -> None:
            await trio.sleep_forever()

    telemetry = Telemetry()
    events = events_of(telemetry)
    async with trio.open_nursery() as nursery:
        ref = await start(nursery, Stubborn(), shutdown_s=7, telemetry=telemetry)
        begun = trio.current_time()
        await ref.stop(timeout=None)
        assert trio.current_time() == begun + 7
    assert "actor.terminate_overdue" in events


@pytest.mark.trio
@pytest.mark.parametrize("crashed", [False, True])
async def test_a_failing_terminate_is_raised_unless_it_would_hide_the_crash(crashed: bool) -> None:
    class Sloppy(Probe):
        async def terminate(self, reason: Reason) -> None:
            raise KeyError("in terminate")

    telemetry = Telemetry()
    events = events_of(telemetry)
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            ref = await start(nursery, Sloppy(), telemetry=telemetry)
            ref.cast(crash if crashed else "fine")
            if not crashed:
                await ref.stop()
    (error,) = caught.value.exceptions
    assert isinstance(error, ValueError if crashed else KeyError)
    if crashed:
        assert error.__notes__ == ["terminate failed too: KeyError: 'in terminate'"]
    assert "actor.terminate_failed" in events
    assert not ref.alive


@pytest.mark.trio
async def test_an_exceptions_traceback_in_a_handler_reaches_the_bug() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            (await start(nursery, Probe())).cast(crash)
    frames = traceback.extract_tb(caught.value.exceptions[0].__traceback__)
    assert frames[-1].name == "crash"


@dataclass(frozen=True)
class Step:
    """One caller: when it calls (s), what for, and how it may give up (s after the call)."""

    at: int
    kind: str  # what the actor does with it
    delay: int  # until a late reply, or how long the handler is busy
    timeout: int | None
    cancelled_after: int | None
    control: bool


class Desk(GenServer):
    """Answers now, later, never, with an error, or by ending; writes down how each call it held came to an end."""

    def __init__(self, ends: list[str], mailboxes: list[Mailbox]) -> None:
        self.ends = ends
        self.mailboxes = mailboxes
        self.held: dict[Monitor, tuple[From[Any], Step]] = {}

    async def init(self) -> None:
        self.mailboxes.append(self.ref.lifetime)

    async def handle_call(self, request: Step, from_: From[Any]) -> Any:
        match request.kind:
            case "busy":
                await trio.sleep(request.delay)
            case "crash":
                raise ValueError("a crash")
            case "stop":
                self.stop()
            case "later" | "never" | "error":
                monitor = self.monitor(from_)
                self.held[monitor] = from_, request
                self.ends.append("held")
                if request.kind != "never":
                    self.send_after(request.delay, (monitor, request.kind))
                return NOREPLY
        return request

    async def handle_info(self, message: Any) -> None:
        if isinstance(message, Down):
            assert not message.target.alive
            del self.held[message.monitor]  # a KeyError if it came twice, or after the reply
            self.ends.append("down")
            return
        monitor, kind = message
        if monitor in self.held:
            from_, request = self.held[monitor]
            if not from_.alive:
                return  # its Down is behind this message
            del self.held[monitor]
            self.ends.append("replied")
            if kind == "later":
                reply(from_, request)
            else:
                reply_error(from_, KeyError("asked for"))

    async def terminate(self, reason: object) -> None:
        self.ends.extend("lost" for _ in self.held)


seconds = st.integers(0, 6)
steps = st.builds(
    Step,
    at=seconds,
    kind=st.sampled_from(["now", "busy", "later", "never", "error", "crash", "stop"]),
    delay=seconds,
    timeout=st.none() | seconds,
    cancelled_after=st.none() | seconds,
    control=st.booleans(),
)


async def call(supervisor: Supervisor, step: Step, outcomes: list[str]) -> None:
    await trio.sleep(step.at)
    ref = supervisor.registry.ref("desk")
    with trio.move_on_after(float("inf") if step.cancelled_after is None else step.cancelled_after) as scope:
        try:
            answer = await ref.call(step, timeout=step.timeout, control=step.control)
        except CallTimeout:
            assert step.timeout is not None
            outcomes.append("timeout")
        except KeyError:
            assert step.kind == "error"
            outcomes.append("error")
        except ActorDown:
            outcomes.append("down")
        except MailboxFull:
            assert not step.control
            outcomes.append("full")
        else:
            assert answer is step and step.kind in ("now", "busy", "later", "stop")
            outcomes.append("answer")
    if scope.cancelled_caught:
        outcomes.append("cancelled")


def remains(mailbox: Mailbox) -> int:
    """How many records of messages, calls, and monitors there are."""
    return len(mailbox) + len(mailbox.calls) + len(mailbox.monitors) + len(mailbox.watchers)


@settings(deadline=None)
@given(st.lists(steps, max_size=25))
def test_each_call_has_exactly_one_outcome_and_leaves_no_record(plan: list[Step]) -> None:
    outcomes: list[list[str]] = [[] for _ in plan]
    ends: list[str] = []
    mailboxes: list[Mailbox] = []

    async def scenario() -> None:
        spec = ChildSpec("desk", lambda: Desk(ends, mailboxes), mailbox_size=3)
        supervisor = Supervisor([spec], intensity=Intensity(max_restarts=len(plan), max_seconds=3600))
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            with trio.move_on_after(200):  # those who wait for ever are cancelled here
                async with trio.open_nursery() as callers:
                    for step, outcome in zip(plan, outcomes, strict=True):
                        callers.start_soon(call, supervisor, step, outcome)
            await trio.sleep(100)  # mocked; the actor finishes what it is busy with
            assert mailboxes[-1].closed is None
            assert not any(remains(mailbox) for mailbox in mailboxes)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
    for step, outcome in zip(plan, outcomes, strict=True):
        waits_for_ever = step.timeout is None and step.cancelled_after is None and step.kind == "never"
        assert len(outcome) == 1 or (not outcome and waits_for_ever)
    replies = [outcome for step, outcome in zip(plan, outcomes, strict=True) if step.kind in ("later", "error")]
    assert replies.count(["answer"]) + replies.count(["error"]) == ends.count("replied")
    assert ends.count("held") == ends.count("replied") + ends.count("down") + ends.count("lost")
