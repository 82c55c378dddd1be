"""ZeroMQClient: the service over ZeroMQ, for trio.

    async with ZeroMQClient("ipc:///run/user/1000/genbatch/zeromq.sock") as client:
        print((await client.generate("Hello", max_tokens=8)).text)

Any number of tasks may use one client at once.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self, Unpack

import trio
import zmq

from genbatch.actors.gateways.zeromq_socket import ZeroMQSocket, open_socket, pumped
from genbatch.clients.errors import ClientClosed
from genbatch.clients.request import GenerateParams, MessageLike, build_request
from genbatch.clients.rpc_calls import RPCCalls
from genbatch.clients.token_stream import TokenStream
from genbatch.proto.codec import to_result, to_stats
from genbatch.proto.errors import Unavailable
from genbatch.proto.limits import RESPONSE_LIMITS
from genbatch.proto.messages import Result

# Seconds. How often the service hears of us while we have calls, and after what silence it may end them.
HEARTBEAT_S, LEASE_S = 1.0, 5.0
MESSAGES_PER_TURN = 64
# Milliseconds in which the last cancellations may leave.
LINGER_MS = 500


class ZeroMQClient:
    """A client of one service; has the interface of `Client`. Use it inside `async with`.

    Args:
        address: the service's, ipc://PATH or tcp://HOST:PORT.
        timeout: seconds of silence, not of work, after which the service counts as gone: while connecting, and
            while calls are open. How long a request may take is its own `deadline_s`.
    """

    def __init__(self, address: str, *, timeout: float = 10.0) -> None:
        self.address = address
        self.timeout = timeout
        self._calls = RPCCalls()
        self._last_heard = 0.0
        self._stack = AsyncExitStack()
        self._socket: ZeroMQSocket | None = None
        self._tasks: trio.Nursery
        self._busy = trio.Event()  # there are calls, so silence matters

    async def __aenter__(self) -> Self:
        socket = await self._stack.enter_async_context(open_socket(zmq.DEALER, linger_ms=LINGER_MS))
        socket.set(zmq.MAXMSGSIZE, RESPONSE_LIMITS.max_bytes)
        socket.set(zmq.RCVHWM, 0)  # as much as we asked for; a full queue would cut the connection off
        socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a service that may never come
        if self.address.startswith("tcp://["):
            socket.set(zmq.IPV6, 1)
        monitor = await self._stack.enter_async_context(pumped(socket.monitor(zmq.EVENT_DISCONNECTED)))
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            await self._stack.aclose()
            raise Unavailable(f"{self.address} is no address to connect to: {error}") from error
        self._manager = trio.open_nursery()
        self._tasks = await self._manager.__aenter__()
        self._socket = socket
        self._tasks.start_soon(self._receive, socket)
        self._tasks.start_soon(self._notice_disconnection, monitor)
        self._tasks.start_soon(self._beat, socket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The nursery is not shown the body's exception, which it would wrap in a group.
        self._fail_all(Unavailable("the client was closed"))
        self._socket = None
        self._tasks.cancel_scope.shield = True
        self._tasks.cancel_scope.cancel()
        await self._manager.__aexit__(None, None, None)
        await self._stack.aclose()

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Result:
        """See `Client.generate`."""
        async with self._call("generate", build_request(prompt, messages, params), to_result) as call:
            await call.ended()
            return call.result

    @asynccontextmanager
    async def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> AsyncIterator[TokenStream]:
        """See `Client.stream`."""
        async with self._call("stream", build_request(prompt, messages, params), to_result) as call:
            yield call

    async def stats(self) -> dict[str, Any]:
        """See `Client.stats`."""
        async with self._call("stats", {}, to_stats) as call:
            counters: dict[str, Any] = await call.ended()
            return counters

    @asynccontextmanager
    async def _call(self, method: str, params: object, read: Callable[[object], object]) -> AsyncIterator[TokenStream]:
        """An open call; one that has not ended when the body does is cancelled."""
        if self._socket is None:
            raise ClientClosed
        call = TokenStream()
        msgid, request = self._calls.open(method, params, call, read)
        is_sent = False
        try:
            await self._send_first(self._socket, request)
            is_sent = True
            self._watch()
            yield call
        finally:
            cancel = self._calls.close(msgid)
            if is_sent and cancel is not None and not self._try_send(cancel) and self._socket is not None:
                self._tasks.start_soon(self._socket.send, [cancel])

    async def _send_first(self, socket: ZeroMQSocket, request: bytes) -> None:
        """Waits for the connection if there is none yet. The service must know of the lease before it works for us."""
        with trio.move_on_after(self.timeout):
            await socket.send([self._calls.heartbeat(LEASE_S)])
            await socket.send([request])
            return
        raise Unavailable(f"no service answers at {self.address} within {self.timeout:g} s")

    def _watch(self) -> None:
        if not self._busy.is_set():
            self._last_heard = trio.current_time()
            self._busy.set()

    async def _receive(self, socket: ZeroMQSocket) -> None:
        while True:
            for frames in await socket.recv_many(MESSAGES_PER_TURN):
                self._last_heard = trio.current_time()
                self._calls.receive(frames[-1])
            await trio.lowlevel.checkpoint()

    async def _notice_disconnection(self, monitor: ZeroMQSocket) -> None:
        """What was asked over a connection that is lost will not be answered over the next one."""
        while True:
            await monitor.recv()
            self._fail_all(Unavailable(f"the connection to {self.address} was lost"))

    async def _beat(self, socket: ZeroMQSocket) -> None:
        """While there are calls, is heard by the service and listens for it."""
        while True:
            await self._busy.wait()
            started = trio.current_time()
            await trio.sleep(HEARTBEAT_S)
            if not self._calls:
                self._busy = trio.Event()
                continue
            now = trio.current_time()
            self._last_heard += now - started - HEARTBEAT_S  # while the event loop was held up nobody could be heard
            if now - self._last_heard > self.timeout:
                self._fail_all(Unavailable(f"the service at {self.address} was silent for {self.timeout:g} s"))
            else:
                socket.try_send([self._calls.heartbeat(LEASE_S)])

    def _fail_all(self, error: Unavailable) -> None:
        for cancel in self._calls.fail_all(error):
            self._try_send(cancel)  # if it can be sent at all; a service that hears nothing ends the calls by itself

    def _try_send(self, message: bytes) -> bool:
        return self._socket is not None and self._socket.try_send([message])
