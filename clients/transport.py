"""What carries a client's messages to a service and back: the one interface that ZeroMQ and byte streams have here."""

from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from genbatch.proto.errors import GenbatchError

OnMessage = Callable[[bytes], None]
OnLost = Callable[[GenbatchError], None]


class Transport(Protocol):
    """For trio. It connects when there is something to send, and again after a connection was lost."""

    address: str

    async def run(
        self, on_message: OnMessage, on_lost: OnLost, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Works until cancelled.

        Args:
            on_message: called with each message that arrives; must not block or raise.
            on_lost: called when nothing will be answered of what was sent so far; the same.
            task_status: started once `send` may be called.

        Raises:
            Unavailable: the address is none.
        """

    async def send(self, messages: Sequence[bytes]) -> None:
        """Sends, as soon as there is a connection: all of them or, if cancelled, none.

        Raises:
            Unauthenticated: the service does not let this client in.
        """

    def try_send(self, message: bytes) -> bool:
        """Sends if that needs no waiting; whether it did."""

    def no_answer(self, timeout: float) -> str:
        """What to say when `send` did not get through within `timeout` seconds."""


class SyncTransport(Protocol):
    """Without an event loop; used by one thread."""

    address: str

    def open(self) -> None:
        """Makes ready; connects later.

        Raises:
            Unavailable: the address is none.
        """

    def close(self) -> None:
        """Ends the connection, after a moment for what was sent last."""

    def forget_losses(self) -> None:
        """Nobody has asked for anything: connections that were lost until now are not told of."""

    def connect(self, timeout: float) -> None:
        """Waits until there is a connection.

        Raises:
            Unavailable: none came about within `timeout` seconds, or the one that there was is lost.
            Unauthenticated: the service does not let this client in.
        """

    def send(self, message: bytes) -> None:
        """Sends what the connection takes; what it does not take has nobody to read it, which silence will tell."""

    def receive(self, timeout: float) -> list[bytes]:
        """The messages that have arrived; waits for one, up to `timeout` seconds.

        Raises:
            GenbatchError: the connection was lost, once its last messages were taken: nothing more will be answered
                of what was sent so far.
        """
