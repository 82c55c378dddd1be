"""Draining: the Batcher's last phase, in which it takes no new requests and waits for the end of those it has."""

from typing import Any

from genbatch.actors.runtime.genserver import From, reply
from genbatch.proto.service_messages import Drained


class Draining:
    """From the first `Drain` call on; answers all who asked once nothing is left."""

    def __init__(self) -> None:
        self.num_cancelled = 0  # requests that did not end in time
        self._callers: list[From[Any]] = []

    def ask(self, from_: "From[Any]") -> None:
        """Takes a caller in, to be told of the end."""
        self._callers.append(from_)

    def end(self) -> None:
        """Nothing is open: answers."""
        callers, self._callers = self._callers, []
        for from_ in callers:
            reply(from_, Drained(num_cancelled=self.num_cancelled))
