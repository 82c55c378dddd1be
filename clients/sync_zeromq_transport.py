"""SyncZeroMQTransport: messages over a ZeroMQ DEALER, without an event loop."""

import time
from contextlib import suppress

import zmq

from genbatch.actors.runtime.zeromq_socket import set_defaults
from genbatch.clients.zeromq_keys import (
    CONNECTION_EVENTS,
    LINGER_MS,
    load_client_keys,
    no_answer,
    read_refusal,
    socket_options,
)
from genbatch.proto.errors import Unauthenticated, Unavailable


class SyncZeroMQTransport:
    """Implements `SyncTransport`; ZeroMQ itself connects, now and again.

    Args:
        address: ipc://PATH or tcp://HOST:PORT.
        client_key, server_key: see SyncZeroMQClient.

    Raises:
        KeyFileError: a file of keys is missing, faulty, or exposed to others.
    """

    def __init__(self, address: str, *, client_key: str | None = None, server_key: str | None = None) -> None:
        self.address = address
        self._keys = load_client_keys(client_key, server_key)
        self._refusal: Unauthenticated | None = None
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._socket: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes]

    def open(self) -> None:
        """See `SyncTransport.open`."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        set_defaults(self._socket)
        for option, value in socket_options(self.address, self._keys):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(CONNECTION_EVENTS)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise Unavailable(f"{self.address} is no address to connect to: {error}") from error

    def close(self) -> None:
        """See `SyncTransport.close`."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)
        self._context.term()

    def connect(self, timeout: float) -> None:
        """See `SyncTransport.connect`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        poller.register(self._monitor, zmq.POLLIN)
        end = time.monotonic() + timeout
        while self._refusal is None and time.monotonic() < end:
            ready = dict(poller.poll(max(0, round((end - time.monotonic()) * 1000))))
            if self._socket in ready:
                return
            if self._monitor in ready:
                self._read_monitor()
        raise self._refusal or Unavailable(no_answer(self.address, timeout, has_keys=self._keys is not None))

    def send(self, message: bytes) -> None:
        """See `SyncTransport.send`."""
        with suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)

    def receive(self, timeout: float) -> list[bytes]:
        """See `SyncTransport.receive`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(round(timeout * 1000)))
        if self._socket in ready:
            return self._take()
        if self._monitor in ready:  # after what was sent before the connection ended
            self._read_monitor()
            raise self._refusal or Unavailable(f"the connection to {self.address} was lost")
        return []

    def forget_losses(self) -> None:
        """See `SyncTransport.forget_losses`."""
        while self._monitor.poll(0):
            self._read_monitor()

    def _take(self) -> list[bytes]:
        messages: list[bytes] = []
        with suppress(zmq.Again):
            while True:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK)[-1])
        return messages

    def _read_monitor(self) -> None:
        event, *_ = self._monitor.recv_multipart()
        self._refusal = read_refusal(event, self.address, has_keys=self._keys is not None) or self._refusal
