"""Mailbox: what waits for one actor: messages in two lanes, timers, and the calls it has not answered.

The normal lane is bounded: a message that does not fit is refused, never dropped. The control lane is served
first and passes a full normal lane. It has no limit of its own because what is in it is limited elsewhere: a
`Down` per monitor and a timer per `send_after` that the actor itself asked for, a control call or a stop per
waiting task. Whoever sends control casts and infos must likewise have a bounded number under way.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import trio

from genbatch.actors.runtime.errors import ActorDown, MailboxFull
from genbatch.actors.runtime.monitor import Lifetime, Monitor, Reason
from genbatch.actors.runtime.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from genbatch.actors.runtime.ref import From


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """A message for `handle_cast`."""

    message: object


@dataclass(frozen=True, slots=True, eq=False)
class Info:
    """A message for `handle_info`."""

    message: object


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """Asks the actor to end after the message it is handling."""

    reason: Reason


@dataclass(frozen=True, slots=True, eq=False)
class Timer:
    """A message for `handle_info` at `deadline` (seconds on the event loop's clock)."""

    mailbox: "Mailbox"
    message: object
    deadline: float

    def cancel(self) -> None:
        """Takes the message back, even if it is due already; fine if it was handled."""
        self.mailbox.discard(self)


class Mailbox(Lifetime):
    """Bounded mailbox of one actor; its lifetime is the actor's."""

    __slots__ = (
        "_control",
        "_normal",
        "_reader",
        "_timers",
        "calls",
        "closed",
        "ended",
        "max_size",
        "monitors",
        "name",
        "owner",
        "telemetry",
    )

    def __init__(self, name: str, max_size: int, telemetry: Telemetry) -> None:
        super().__init__()
        assert max_size > 0, max_size
        self.name = name
        self.max_size = max_size
        self.telemetry = telemetry
        self.owner: trio.lowlevel.Task | None = None
        self.calls: dict[From[Any], None] = {}  # delivered or waiting here, not answered; a dict, for its order
        self.monitors: dict[Monitor, None] = {}  # what the actor watches
        self.closed: Reason | None = None
        self.ended = trio.Event()
        self._normal: deque[object] = deque()
        self._control: deque[object] = deque()
        self._timers: list[Timer] = []  # by deadline
        self._reader: trio.lowlevel.Task | None = None  # the actor, while it waits in `get`

    def __len__(self) -> int:
        return len(self._normal) + len(self._control)

    def put(self, envelope: object, *, control: bool = False) -> None:
        """Adds at the end of a lane.

        Raises:
            ActorDown: the actor ended or is ending.
            MailboxFull: the normal lane is full.
        """
        if self.closed is not None:
            raise ActorDown(self.name, self.closed)
        if control:
            self._control.append(envelope)
        elif len(self._normal) < self.max_size:
            self._normal.append(envelope)
        else:
            self.telemetry.execute("actor.mailbox_full", {"max_size": self.max_size}, {"name": self.name})
            raise MailboxFull(self.name, self.max_size)
        self._wake()

    def put_after(self, delay_s: float, message: object) -> Timer:
        """Puts `message` on the control lane `delay_s` seconds from now."""
        assert delay_s >= 0, delay_s
        timer = Timer(self, message, trio.current_time() + delay_s)
        if self.closed is None:
            insort(self._timers, timer, key=attrgetter("deadline"))
            self._wake()
        return timer

    async def get(self) -> object:
        """The next message; only the actor's own task may wait here. Returns at once when there is one."""
        while True:
            if self._timers:
                self._move_due_timers()
            if self._control:
                return self._control.popleft()
            if self._normal:
                return self._normal.popleft()
            self._reader = trio.lowlevel.current_task()
            if self._timers:
                with trio.CancelScope(deadline=self._timers[0].deadline):
                    await trio.lowlevel.wait_task_rescheduled(self._abort_get)
            else:  # a scope costs as much as all the rest
                await trio.lowlevel.wait_task_rescheduled(self._abort_get)

    def discard(self, envelope: object) -> None:
        """Removes a message nobody wants handled any more; fine if it is not here."""
        lanes: tuple[MutableSequence[Any], ...] = (self._timers, self._control, self._normal)
        for lane in lanes:
            if envelope in lane:
                lane.remove(envelope)

    def close(self, reason: Reason) -> None:
        """Refuses messages from now on, forgets timers and monitors; open calls stay open until `end`."""
        self.closed = reason
        self._timers.clear()
        for monitor in tuple(self.monitors):
            monitor.cancel()

    def end(self, reason: Reason) -> None:
        """The actor is gone: every open call gets `ActorDown`, every monitor a `Down`."""
        assert self.closed is not None
        for from_ in tuple(self.calls):
            from_.fail(ActorDown(self.name, reason))
        self._normal.clear()
        self._control.clear()
        super().end(reason)
        self.owner = None
        self.ended.set()

    def _move_due_timers(self) -> None:
        now = trio.current_time()
        while self._timers and self._timers[0].deadline <= now:
            self._control.append(self._timers.pop(0))

    def _wake(self) -> None:
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None

    def _abort_get(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED
