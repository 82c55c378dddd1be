"""ZeroMQTransport: messages over a ZeroMQ DEALER, for trio."""

from collections.abc import Sequence

import trio
import zmq

from genbatch.actors.runtime.zeromq_socket import ZeroMQSocket, monitored, open_socket
from genbatch.clients.transport import OnLost, OnMessage
from genbatch.clients.zeromq_keys import (
    CONNECTION_EVENTS,
    LINGER_MS,
    load_client_keys,
    no_answer,
    read_refusal,
    socket_options,
)
from genbatch.proto.errors import Unauthenticated, Unavailable

MESSAGES_PER_TURN = 64


class ZeroMQTransport:
    """Implements `Transport`; ZeroMQ itself connects, now and again.

    Args:
        address: ipc://PATH or tcp://HOST:PORT.
        client_key, server_key: see ZeroMQClient.

    Raises:
        KeyFileError: a file of keys is missing, faulty, or exposed to others.
    """

    def __init__(self, address: str, *, client_key: str | None = None, server_key: str | None = None) -> None:
        self.address = address
        self._keys = load_client_keys(client_key, server_key)
        self._refusal: Unauthenticated | None = None
        self._connecting: set[trio.CancelScope] = set()
        self._socket: ZeroMQSocket | None = None

    async def run(
        self, on_message: OnMessage, on_lost: OnLost, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """See `Transport.run`."""
        async with open_socket(zmq.DEALER, linger_ms=LINGER_MS) as socket:
            for option, value in socket_options(self.address, self._keys):
                socket.set(option, value)
            async with monitored(socket, CONNECTION_EVENTS) as monitor:
                try:
                    socket.connect(self.address)
                except zmq.ZMQError as error:
                    raise Unavailable(f"{self.address} is no address to connect to: {error}") from error
                self._socket = socket
                task_status.started()
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._notice_disconnection, monitor, on_lost)
                        await _receive(socket, on_message)
                finally:
                    self._socket = None

    async def send(self, messages: Sequence[bytes]) -> None:
        """See `Transport.send`."""
        assert self._socket is not None
        with trio.CancelScope() as scope:
            self._connecting.add(scope)
            try:
                if self._refusal is None:
                    for message in messages:
                        await self._socket.send([message])
                    return
            finally:
                self._connecting.remove(scope)
        assert self._refusal is not None
        raise self._refusal

    def try_send(self, message: bytes) -> bool:
        """See `Transport.try_send`."""
        return self._socket is not None and self._socket.try_send([message])

    def no_answer(self, timeout: float) -> str:
        """See `Transport.no_answer`."""
        return no_answer(self.address, timeout, has_keys=self._keys is not None)

    async def _notice_disconnection(self, monitor: ZeroMQSocket, on_lost: OnLost) -> None:
        while True:
            event, *_ = await monitor.recv()
            self._refusal = read_refusal(event, self.address, has_keys=self._keys is not None) or self._refusal
            on_lost(self._refusal or Unavailable(f"the connection to {self.address} was lost"))
            if self._refusal is not None:  # ZeroMQ does not try again
                for scope in self._connecting:
                    scope.cancel()


async def _receive(socket: ZeroMQSocket, on_message: OnMessage) -> None:
    while True:
        for frames in await socket.recv_many(MESSAGES_PER_TURN):
            on_message(frames[-1])
        await trio.lowlevel.checkpoint()
