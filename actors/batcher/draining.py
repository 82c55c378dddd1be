"""Draining: no new requests, and an answer to all who asked for it once the open ones have ended.

No torch: the gateway's process drains, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from genbatch.actors.runtime.actor import From, reply
from genbatch.proto.errors import Unavailable
from genbatch.proto.messages import Drained

DRAINING = "the service is draining: it takes no new requests"
# Milliseconds. Another process of the service may be there at once; one that starts again takes longer.
RETRY_AFTER_DRAIN_MS = 1000


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The time that a `Drain` call gave is over."""


class Draining:
    """Begins with the first `Drain` call; all who asked are answered once nothing is left.

    Args:
        num_open: how many requests have not ended.
        send_after: of the actor that is drained; brings it DrainOver after so many seconds.
    """

    def __init__(self, num_open: Callable[[], int], send_after: Callable[[float, DrainOver], object]) -> None:
        self.has_begun = False
        self.num_cancelled = 0  # requests that did not end in time
        self._num_open = num_open
        self._send_after = send_after
        self._callers: list[From[Any]] = []

    def check(self) -> None:
        """Raises:
        Unavailable: no new requests are taken.
        """
        if self.has_begun:
            raise Unavailable(DRAINING, retry_after_ms=RETRY_AFTER_DRAIN_MS)

    def ask(self, from_: "From[Any]", timeout_s: float) -> None:
        """Takes a caller in, to be told of the end."""
        self.has_begun = True
        self._callers.append(from_)
        if self._num_open():
            self._send_after(timeout_s, DrainOver())
        else:
            self.settle()

    def settle(self) -> None:
        """Some requests have ended: answers if these were the last."""
        if not self._num_open():
            callers, self._callers = self._callers, []
            for from_ in callers:
                reply(from_, Drained(num_cancelled=self.num_cancelled))
