"""Any mix of calls, timeouts, cancellations, crashes and restarts: each call has one outcome, nothing is left."""

from dataclasses import dataclass
from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from genbatch.actors.runtime.errors import ActorDown, CallTimeout, MailboxFull
from genbatch.actors.runtime.genserver import NOREPLY, Down, From, GenServer, Monitor, reply, reply_error
from genbatch.actors.runtime.mailbox import Mailbox
from genbatch.actors.runtime.supervisor import ChildSpec, Supervisor


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
        self.held: dict[Monitor, From[Any]] = {}

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
                self.held[monitor] = from_
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
        if from_ := self.held.get(monitor):
            if not from_.alive:
                return  # its Down is behind this message
            del self.held[monitor]
            self.ends.append("replied")
            if kind == "later":
                reply(from_, from_.request)
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
        supervisor = Supervisor([spec], max_restarts=len(plan), max_seconds=3600)
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
