"""SyncZeroMQClient: the service over ZeroMQ, without an event loop or threads.

    with SyncZeroMQClient("ipc:///run/user/1000/genbatch/zeromq.sock") as client:
        print(client.generate("Hello", max_tokens=8).text)

One thread uses a client; several streams may be open at once and be read in turns.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, Unpack

import zmq

from genbatch.actors.gateways.zeromq_socket import set_defaults
from genbatch.clients.call_result import CallResult
from genbatch.clients.errors import ClientClosed
from genbatch.clients.request import GenerateParams, MessageLike, build_request
from genbatch.clients.rpc_calls import RPCCalls
from genbatch.proto.codec import to_result, to_stats
from genbatch.proto.errors import Unavailable
from genbatch.proto.limits import RESPONSE_LIMITS
from genbatch.proto.messages import Result, Token

# Seconds. Heartbeats leave only while a method waits, so the lease covers what a program does between two tokens.
HEARTBEAT_S, LEASE_S = 1.0, 60.0
LINGER_MS = 500


class SyncTokenStream(CallResult):
    """A call's tokens for a plain `for`, then its result."""

    __slots__ = ("_client",)

    def __init__(self, client: "SyncZeroMQClient") -> None:
        super().__init__()
        self._client = client

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        self._client.wait_for(lambda: bool(self.tokens) or self.final is not None)
        if self.tokens:
            return self.tokens.popleft()
        self.unwrap()
        raise StopIteration

    @property
    def result(self) -> Result:
        """What the stream ended with.

        Raises:
            GenbatchError: the error that ended it.
            StreamNotEnded: it has not ended.
        """
        result: Result = self.unwrap()
        return result

    def ended(self) -> Any:
        """Waits for the final, whatever tokens come before it, and returns or raises it."""
        self._client.wait_for(lambda: self.final is not None)
        return self.unwrap()


class SyncZeroMQClient:
    """A client of one service; has the interface of `SyncClient`. Use it inside `with`.

    Args:
        address: the service's, ipc://PATH or tcp://HOST:PORT.
        timeout: seconds of silence, not of work, after which the service counts as gone.
    """

    def __init__(self, address: str, *, timeout: float = 10.0) -> None:
        self.address = address
        self.timeout = timeout
        self._calls = RPCCalls()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes]
        self._last_beat = 0.0

    def __enter__(self) -> Self:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        set_defaults(self._socket)
        self._socket.setsockopt(zmq.MAXMSGSIZE, RESPONSE_LIMITS.max_bytes)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # as much as we asked for; a full queue would cut the connection off
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a service that may never come
        self._socket.setsockopt(zmq.IPV6, int(self.address.startswith("tcp://[")))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self._close()
            raise Unavailable(f"{self.address} is no address to connect to: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fail_all(Unavailable("the client was closed"))
        self._close()

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Result:
        """See `Client.generate`."""
        with self._call("generate", build_request(prompt, messages, params), to_result) as call:
            call.ended()
            return call.result

    @contextmanager
    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Iterator[SyncTokenStream]:
        """See `Client.stream`."""
        with self._call("stream", build_request(prompt, messages, params), to_result) as call:
            yield call

    def stats(self) -> dict[str, Any]:
        """See `Client.stats`."""
        with self._call("stats", {}, to_stats) as call:
            counters: dict[str, Any] = call.ended()
            return counters

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Receives messages until `is_true()`; a stream's `for` waits here."""
        if is_true():
            return
        if self._context is None:
            raise ClientClosed
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        last_heard = time.monotonic()
        while not is_true():
            self._beat()
            ready = dict(poller.poll(round(HEARTBEAT_S * 1000)))
            if self._socket in ready:
                self._receive()
                last_heard = time.monotonic()
            elif self._monitor in ready:  # after what was sent before the connection ended
                self._monitor.recv_multipart()
                self._fail_all(Unavailable(f"the connection to {self.address} was lost"))
            elif time.monotonic() - last_heard > self.timeout:
                self._fail_all(Unavailable(f"the service at {self.address} was silent for {self.timeout:g} s"))

    @contextmanager
    def _call(self, method: str, params: object, read: Callable[[object], object]) -> Iterator[SyncTokenStream]:
        """An open call; one that has not ended when the body does is cancelled."""
        if self._context is None:
            raise ClientClosed
        call = SyncTokenStream(self)
        msgid, request = self._calls.open(method, params, call, read)
        try:
            self._connect()
            self._send(request)
            yield call
        finally:
            cancel = self._calls.close(msgid)
            if cancel is not None:
                self._send(cancel)

    def _connect(self) -> None:
        """Waits until messages can be sent. The service must know of the lease before it works for us."""
        if not self._socket.poll(int(self.timeout * 1000), zmq.POLLOUT):
            raise Unavailable(f"no service answers at {self.address} within {self.timeout:g} s")
        if len(self._calls) == 1:  # the one being opened
            while self._monitor.poll(0):  # connections lost while nobody asked for anything
                self._monitor.recv_multipart()
        self._last_beat = 0.0
        self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            self._send(self._calls.heartbeat(LEASE_S))

    def _receive(self) -> None:
        try:
            while True:
                self._calls.receive(self._socket.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            return

    def _fail_all(self, error: Unavailable) -> None:
        for cancel in self._calls.fail_all(error):
            self._send(cancel)

    def _send(self, message: bytes) -> None:
        """Sends what ZeroMQ takes at once; what it does not take has nobody to read it, which silence will tell."""
        if self._context is None:
            return
        with suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)

    def _close(self) -> None:
        assert self._context is not None
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)
        self._context.term()
        self._context = None
