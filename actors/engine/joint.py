"""Joint: keeps an engine and a gateway joined: a new socketpair whenever either of them is new.

Only an engine may ask for another link: that it asks shows that it lives. If a gateway did, requests would be replayed
on the engine of whose death it has just learned, and the second death of that engine would be counted as theirs.
"""

import socket
from contextlib import suppress
from typing import Protocol

from genbatch.actors.engine.control_messages import Join
from genbatch.proto.service_messages import Models


class Side(Protocol):
    """A process, or a part of this one, that can be given its end of a link."""

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        """Gives it the socket, or closes that; OSError if the side is gone, which its own end will tell."""


class Joint:
    """Knows the two sides that live."""

    def __init__(self) -> None:
        self._engine: Side | None = None
        self._gateway: Side | None = None
        self._models = Models(models=())
        self._number = 0

    async def engine_is_ready(self, side: Side, models: Models) -> None:
        """An engine has started."""
        self._engine, self._models = side, models
        await self._join()

    async def gateway_is_ready(self, side: Side) -> None:
        """A gateway has started."""
        self._gateway = side
        await self._join()

    def engine_is_gone(self, side: Side) -> None:
        """It is not joined any more; fine if another has taken its place."""
        if self._engine is side:
            self._engine = None

    def gateway_is_gone(self, side: Side) -> None:
        """The same of a gateway."""
        if self._gateway is side:
            self._gateway = None

    async def unjoined(self, number: int) -> None:
        """The engine says that the link with this number is closed."""
        if number == self._number:
            await self._join()

    async def _join(self) -> None:
        if self._engine is None or self._gateway is None:
            return
        self._number += 1
        join = Join(self._number, self._models)
        ends = list(socket.socketpair())
        try:
            for side in (self._engine, self._gateway):
                with suppress(OSError):
                    await side.send(join, ends.pop())
        finally:  # a service that is being stopped may be cancelled here
            for end in ends:
                end.close()
