"""RemoteClient: a service at an address, for trio, whatever carries the messages."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import trio

from genbatch.clients.call_result import CallResult
from genbatch.clients.deadline import Deadline
from genbatch.clients.errors import ClientClosed
from genbatch.clients.remote_stream import RemoteStream
from genbatch.clients.request import GenerateParams, MessageLike, build_request
from genbatch.clients.retry import Retry
from genbatch.clients.rpc_calls import RPCCalls
from genbatch.clients.service_calls import Params, ServiceCalls
from genbatch.clients.token_stream import TokenStream
from genbatch.clients.transport import Transport
from genbatch.proto.codec import to_answer
from genbatch.proto.errors import GenbatchError, Unavailable
from genbatch.proto.messages import Result
from genbatch.proto.rpc import PLAIN_STREAM, StreamOptions

# Seconds. How often the service hears of us while we have calls, and after what silence it may end them.
HEARTBEAT_S, LEASE_S = 1.0, 5.0
# Tokens of a stream that the service may be ahead of its reader.
WINDOW = 1024


class RemoteClient(ServiceCalls):
    """Has the interface of `Client`. Use it inside `async with`; any number of tasks may use one at once.

    Args:
        transport: carries the messages.
        timeout: seconds of silence, not of work, after which the service counts as gone: while connecting, and
            while calls are open. How long a request may take is its own `deadline_s`.
        retry: what is done about requests that are refused for now.
    """

    def __init__(self, transport: Transport, *, timeout: float, retry: Retry | None) -> None:
        self.address = transport.address
        self.timeout = timeout
        self.retry = retry or Retry()
        self._transport = transport
        self._calls = RPCCalls()
        self._unsent: set[int] = set()  # calls that wait for a connection
        self._is_open = False
        self._last_heard = 0.0
        self._tasks: trio.Nursery
        self._busy = trio.Event()  # there are calls, so silence matters

    async def __aenter__(self) -> Self:
        self._manager = trio.open_nursery()
        self._tasks = await self._manager.__aenter__()
        try:
            await self._tasks.start(self._transport.run, self._receive, self._fail_all)
        except BaseException as error:
            self._tasks.cancel_scope.cancel()
            await self._manager.__aexit__(None, None, None)
            raise error
        self._is_open = True
        self._tasks.start_soon(self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The nursery is not shown the body's exception, which it would wrap in a group.
        self._fail_all(Unavailable("the client was closed"))
        self._is_open = False
        self._tasks.cancel_scope.shield = True
        self._tasks.cancel_scope.cancel()
        await self._manager.__aexit__(None, None, None)

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Result:
        """See `Client.generate`."""
        request = build_request(prompt, messages, params)
        deadline = Deadline(request, trio.current_time, trio.current_effective_deadline())
        result: Result = await self._ask_again("generate", deadline.remaining_request, Result)
        return result

    @asynccontextmanager
    async def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> AsyncIterator[TokenStream]:
        """See `Client.stream`."""
        request = build_request(prompt, messages, params)
        deadline = Deadline(request, trio.current_time, trio.current_effective_deadline())
        options = StreamOptions(credit=WINDOW, coalesce=True)
        msgid = 0

        async def open_call() -> None:
            nonlocal msgid
            read = partial(to_answer, wanted=Result)
            msgid = await self._open("stream", deadline.remaining_request(), stream, read, options)

        def grant(count: int) -> None:
            if self._is_open:
                self._transport.try_send(self._calls.credit(msgid, count))

        stream = RemoteStream(open_call, grant, window=WINDOW, retry=self.retry)
        await open_call()
        try:
            yield stream
        finally:
            self._close(msgid)

    async def _ask(self, method: str, params: Params, wanted: Any) -> Any:
        return await self._ask_again(method, lambda: params, wanted)

    async def _ask_again(self, method: str, params: Callable[[], Params], wanted: Any) -> Any:
        """The answer, after as many tries as it takes or are made."""
        async for attempt in self.retry.attempts():
            with attempt:
                call = TokenStream()
                msgid = await self._open(method, params(), call, partial(to_answer, wanted=wanted))
                try:
                    return await call.ended()
                finally:
                    self._close(msgid)
        raise AssertionError("the last attempt returns or raises")

    async def _open(
        self,
        method: str,
        params: Params,
        call: CallResult,
        read: Callable[[object], object],
        options: StreamOptions = PLAIN_STREAM,
    ) -> int:
        """Sends a request and returns its msgid; waits for the connection if there is none yet.

        The service must know of the lease before it works for us.
        """
        if not self._is_open:
            raise ClientClosed
        msgid, request = self._calls.open(method, params, call, read, options)
        is_sent = False
        self._unsent.add(msgid)
        try:
            with trio.move_on_after(self.timeout):
                await self._transport.send([self._calls.heartbeat(LEASE_S), request])
                is_sent = True
        finally:
            self._unsent.remove(msgid)
            if not is_sent:
                self._calls.close(msgid)
        if not is_sent:
            raise Unavailable(self._transport.no_answer(self.timeout))
        self._watch()
        return msgid

    def _close(self, msgid: int) -> None:
        """Forgets a call; one that has not ended is cancelled."""
        cancel = self._calls.close(msgid)
        if cancel is not None and self._is_open and not self._transport.try_send(cancel):
            self._tasks.start_soon(self._transport.send, [cancel])

    def _watch(self) -> None:
        if not self._busy.is_set():
            self._last_heard = trio.current_time()
            self._busy.set()

    def _receive(self, message: bytes) -> None:
        self._last_heard = trio.current_time()
        self._calls.receive(message)

    async def _beat(self) -> None:
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
                self._transport.try_send(self._calls.heartbeat(LEASE_S))

    def _fail_all(self, error: GenbatchError) -> None:
        """Ends all calls: what was asked over a connection that is lost will not be answered over the next one.

        What has not been asked yet will be.
        """
        for cancel in self._calls.fail_all(error, spared=self._unsent):
            self._transport.try_send(cancel)  # if it can be sent at all; a service that hears nothing ends them itself
