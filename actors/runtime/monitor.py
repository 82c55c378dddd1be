"""Monitor: tells one actor, once, that a caller or another actor is gone.

    monitor = self.monitor(from_)         # in handle_call, before returning NOREPLY
    ...
    async def handle_info(self, message):
        if isinstance(message, Down):     # message.monitor is monitor, message.target is from_
            ...                           # the caller was cancelled or timed out: free what it holds

A record goes away by itself: when it fires, when the call is answered, when either side ends. `cancel` is for
losing interest earlier.
"""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genbatch.actors.runtime.mailbox import Mailbox
    from genbatch.actors.runtime.ref import ActorRef, From


class Exit(enum.Enum):
    """Why an actor or a caller ended, when no exception did it."""

    NORMAL = "normal"
    SHUTDOWN = "shutdown"  # its supervisor told it to stop
    CANCELLED = "cancelled"  # its cancel scope was cancelled
    TIMEOUT = "timeout"  # a caller's patience ended


Reason = Exit | BaseException


class Monitor:
    """One actor's watch over one target."""

    __slots__ = ("_down", "_lifetime", "_mailbox", "target")

    def __init__(self, target: "From[Any] | ActorRef", lifetime: "Lifetime", mailbox: "Mailbox") -> None:
        self.target = target
        self._lifetime = lifetime
        self._mailbox = mailbox  # of the watching actor
        self._down: Down | None = None
        mailbox.monitors[self] = None
        if lifetime.reason is None:
            lifetime.watchers[self] = None
        else:
            self.fire(lifetime.reason)

    def cancel(self) -> None:
        """Stops watching; no `Down` of this monitor is handled any more, not even one already on its way."""
        self.release()
        if self._down is not None:
            self._mailbox.discard(self._down)

    def fire(self, reason: Reason) -> None:
        """Puts `Down` on the watching actor's control lane."""
        self.release()
        self._down = Down(self, self.target, reason)
        self._mailbox.put(self._down, control=True)

    def release(self) -> None:
        """Removes the record on both sides."""
        self._lifetime.watchers.pop(self, None)
        self._mailbox.monitors.pop(self, None)


@dataclass(frozen=True, slots=True, eq=False)
class Down:
    """What `handle_info` gets when a monitored target is gone."""

    monitor: Monitor
    target: "From[Any] | ActorRef"
    reason: Reason


class Lifetime:
    """What can be monitored: it lives until it ends, once, with a reason."""

    __slots__ = ("reason", "watchers")

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.watchers: dict[Monitor, None] = {}  # a dict, for its order

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.reason is None

    def end(self, reason: Reason) -> None:
        """Ends it and tells every monitor."""
        assert self.reason is None
        self.reason = reason
        for monitor in tuple(self.watchers):
            monitor.fire(reason)
