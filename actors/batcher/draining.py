"""Draining: refuse new requests, and reply to every `Drain` call once the open requests have ended.

This file imports no torch, since the gateway process drains, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from genbatch.actors.runtime.actor import From, reply
from genbatch.proto.errors import Unavailable
from genbatch.proto.messages import Drained

DRAINING = "the service is draining: it takes no new requests"
# Milliseconds. Another process of the service may answer within this time; a restart takes longer.
RETRY_AFTER_DRAIN_MS = 1000


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The timeout of a `Drain` call has passed."""


class Draining:
    """The state of draining: it begins with the first `Drain` call, and every caller gets a reply at its end.

    Args:
        num_open: returns the number of requests that have not ended.
        send_after: sends DrainOver to the drained actor after a number of seconds.
    """

    def __init__(self, num_open: Callable[[], int], send_after: Callable[[float, DrainOver], object]) -> None:
        self.has_begun = False
        self.num_cancelled = 0  # requests cancelled at the timeout
        self._num_open = num_open
        self._send_after = send_after
        self._callers: list[From[Any]] = []

    def check(self) -> None:
        """Refuse new requests while draining.

        Raises:
            Unavailable: draining has begun.
        """
        if self.has_begun:
            raise Unavailable(DRAINING, retry_after_ms=RETRY_AFTER_DRAIN_MS)

    def ask(self, from_: "From[Any]", timeout_s: float) -> None:
        """Begin to drain, and reply to the caller at the end."""
        self.has_begun = True
        self._callers.append(from_)
        if self._num_open():
            self._send_after(timeout_s, DrainOver())
        else:
            self.settle()

    def settle(self) -> None:
        """Reply to the callers if no request is open any more."""
        if not self._num_open():
            callers, self._callers = self._callers, []
            for from_ in callers:
                reply(from_, Drained(num_cancelled=self.num_cancelled))
