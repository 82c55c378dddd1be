"""ZeroMQClient and RPCClient: a service at an address, for trio.

    async with ZeroMQClient("ipc:///run/user/1000/genbatch/zeromq.sock") as client:
        print((await client.generate("Hello", max_tokens=8)).text)

    async with RPCClient("unix:///run/user/1000/genbatch/rpc.sock") as client:
        ...

Any number of tasks may use one client at once. It connects again by itself, sends a refused request again when the
service said when (Retry), and tells the service how long its callers wait (Deadline).

    RemoteClient -- RPCCalls -- bytes -- Transport -- the service
         |
    RemoteStream: grants credit as its tokens are read
"""

import math
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, cast

import msgspec
import stamina
import trio

from genbatch.actors.gateways.addresses import default_address
from genbatch.clients.bridge import AsyncCalls, hosted, runs_on_asyncio
from genbatch.clients.interface import CallResult, ClientClosed, TokenStream, asked_method
from genbatch.clients.transports import RPCTransport, Transport, ZeroMQTransport, load_client_keys
from genbatch.proto.codec import to_answer
from genbatch.proto.errors import FrameTooLarge, GenbatchError, MalformedMessage, QueueFull, Unavailable
from genbatch.proto.messages import GenerateRequest, Result, Token
from genbatch.proto.methods import METHODS, Method
from genbatch.proto.rpc import (
    PLAIN_STREAM,
    CallAnswered,
    CallFailed,
    ClientConnection,
    GoAway,
    StreamOptions,
    TokenReceived,
    TokensReceived,
)
from genbatch.proto.validation import RequestLimits

# A service takes no longer ones unless its operator says so; a caller who waits for longer waits for ever.
MAX_DEADLINE_S = RequestLimits().max_deadline_s


class Deadline:
    """Tells the service when nobody waits any more, so that it need not find out.

    Args:
        request: as the caller wrote it; its own `deadline_s` counts from now.
        now: the clock, in seconds.
        scope_ends: when the caller stops waiting, on that clock; infinite if it does not say.
    """

    def __init__(self, request: GenerateRequest, now: Callable[[], float], scope_ends: float = math.inf) -> None:
        self._request = request
        self._now = now
        ends = math.inf if request.deadline_s is None else now() + request.deadline_s
        if scope_ends - now() <= MAX_DEADLINE_S:
            ends = min(ends, scope_ends)
        self._ends = ends

    def remaining_request(self) -> GenerateRequest:
        """The request with the time that is left; one that has none left is for the service to refuse."""
        asked = self._request.deadline_s
        if math.isinf(self._ends) or (asked is not None and not asked > 0):
            return self._request
        left = max(self._ends - self._now(), 0.001)
        return msgspec.structs.replace(self._request, deadline_s=left)


# Refusals that follow one another make the waits longer by this factor, and by a share of up to this much at random,
# so that those who were refused together do not come back together.
GROWTH, JITTER = 1.5, 0.25


class Attempt(Protocol):
    """One try; as a context manager it decides about the next when its body raises."""

    @property
    def num(self) -> int:
        """1, 2, ..."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> bool | None: ...


class Attempts(Protocol):
    """`for attempt in attempts` waits between tries, or `async for`."""

    def __iter__(self) -> Iterator[Attempt]: ...

    def __aiter__(self) -> AsyncIterator[Attempt]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often a refused request is sent again.

    Only a request that the service refused, saying when to come back (`retry_after_ms`), and of which no token has
    arrived; never one whose fate is not known.

    Args:
        max_attempts: tries in all; 1 gives every refusal to the caller.
        timeout_s: seconds after which no further try begins.
    """

    max_attempts: int = 5
    timeout_s: float = 30.0

    def attempts(self) -> Attempts:
        """The tries of one request, as its body raises or not."""
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")
        wait = _Wait()
        found = stamina.retry_context(on=wait, attempts=self.max_attempts, timeout=self.timeout_s)
        return cast(Attempts, found)


class _Wait:
    """Seconds until the next try after an error; False for errors that another try does not mend."""

    def __init__(self) -> None:
        self._factor = 1.0

    def __call__(self, error: Exception) -> bool | float:
        if not isinstance(error, QueueFull | Unavailable) or error.retry_after_ms is None:
            return False
        wait_s = error.retry_after_ms / 1000 * self._factor * (1 + JITTER * random.random())
        self._factor *= GROWTH
        return wait_s


class RemoteStream(TokenStream):
    """Read by one task.

    Args:
        reopen: sends the request again.
        grant: lets the service send so many tokens more.
        window: tokens that the service may be ahead of the reader.
        retry: which refusals are not final.
    """

    __slots__ = ("_grant", "_has_begun", "_num_read", "_reopen", "_retry", "_window")

    def __init__(
        self, reopen: Callable[[], Awaitable[None]], grant: Callable[[int], None], *, window: int, retry: Retry
    ) -> None:
        super().__init__()
        self._reopen = reopen
        self._grant = grant
        self._window = window
        self._retry = retry
        self._has_begun = False
        self._num_read = 0  # since credit was granted last

    async def __anext__(self) -> Token:
        if not self._has_begun:
            await self._begin()
        token = await super().__anext__()
        self._num_read += 1
        if self._num_read * 2 >= self._window:
            if self.final is None:
                self._grant(self._num_read)
            self._num_read = 0
        return token

    async def _begin(self) -> None:
        """Waits for the first token or the final. Nothing has come yet, so a refused request may be sent again."""
        async for attempt in self._retry.attempts():
            with attempt:
                if attempt.num > 1:
                    self.final = None
                    await self._reopen()
                while not self.tokens and self.final is None:
                    await self._wait()
                if not self.tokens:
                    self.unwrap()
        self._has_begun = True


class RPCCalls:
    """Which call's result goes where."""

    def __init__(self) -> None:
        self._connection = ClientConnection()
        self._results: dict[int, CallResult] = {}
        self._methods: dict[int, Method] = {}
        self._carriers: dict[int, int] = {}  # by msgid the connection that a call was sent over

    def __len__(self) -> int:
        return len(self._results)

    def open(
        self,
        method: Method,
        request: msgspec.Struct,
        result: CallResult,
        options: StreamOptions = PLAIN_STREAM,
    ) -> tuple[int, bytes]:
        """Opens a call; returns its msgid and the message to send.

        Args:
            result: where tokens and the final go.
            options: how a stream's tokens are to come.

        Raises:
            FrameTooLarge: the service would not take it.
        """
        msgid, message = self._connection.request(method.name, request, options)
        self._results[msgid] = result
        self._methods[msgid] = method
        return msgid, message

    def sent(self, msgid: int, connection: int) -> None:
        """The call went over this connection."""
        if msgid in self._results:
            self._carriers[msgid] = connection

    def connection_of(self, msgid: int) -> int:
        """The connection that a call was sent over; 0 where there is none."""
        return self._carriers.get(msgid, 0)

    def connections(self) -> set[int]:
        """Those that carry open calls."""
        return {*self._carriers.values()}

    def close(self, msgid: int) -> bytes | None:
        """Forgets a call; returns the message that cancels it, if it had not ended."""
        if msgid not in self._results:
            return None
        self._take(msgid)
        return self._connection.cancel(msgid)

    def credit(self, msgid: int, count: int) -> bytes:
        """The message that lets the service send `count` more tokens of a stream."""
        return self._connection.credit(msgid, count)

    def heartbeat(self, lease_s: float) -> bytes:
        """The message that keeps the open calls for another `lease_s` seconds."""
        return self._connection.heartbeat(lease_s)

    def receive(self, message: bytes) -> bool:
        """Hands a message's content to its call; a message that breaks the protocol ends every call.

        Returns whether it asks the client to leave the connection.
        """
        try:
            event = self._connection.receive(message)
        except (FrameTooLarge, MalformedMessage) as fault:
            self.fail_all(fault)
            return False
        self._act(event)
        return isinstance(event, GoAway)

    def fail_all(
        self, error: GenbatchError, *, spared: Container[int] = (), connection: int | None = None
    ) -> list[tuple[bytes, int]]:
        """Ends open calls with `error`; returns the messages that cancel them, and their connections.

        Args:
            spared: calls that go on.
            connection: only calls that were sent over it; None is any.
        """
        cancels = []
        for msgid in [msgid for msgid in self._results if msgid not in spared]:
            carrier = self.connection_of(msgid)
            if connection is not None and connection != carrier:
                continue
            self._results[msgid].fail(error)
            cancel = self.close(msgid)
            if cancel is not None:
                cancels.append((cancel, carrier))
        return cancels

    def _act(self, event: object) -> None:
        match event:
            case TokenReceived(msgid, token) if msgid in self._results:
                self._results[msgid].push(token)
            case TokensReceived(tokens):
                for received in tokens:
                    if received.msgid in self._results:
                        self._results[received.msgid].push(received.token)
            case CallAnswered(msgid, value) if msgid in self._results:
                result, method = self._take(msgid)
                try:
                    result.finish(to_answer(value, method.answer))
                except MalformedMessage as fault:
                    result.fail(fault)
            case CallFailed(None, error):
                self.fail_all(error)
            case CallFailed(int(msgid), error) if msgid in self._results:
                self._take(msgid)[0].fail(error)

    def _take(self, msgid: int) -> tuple[CallResult, Method]:
        self._carriers.pop(msgid, None)
        return self._results.pop(msgid), self._methods.pop(msgid)


# Seconds. How often the service hears of us while we have calls, and after what silence it may end them.
HEARTBEAT_S, LEASE_S = 1.0, 5.0
# Tokens of a stream that the service may be ahead of its reader.
WINDOW = 1024


class RemoteClient(AsyncCalls):
    """Has the interface of `Client`, on trio and on asyncio. Use it inside `async with`.

    Any number of tasks may use one client at once.

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
        self._left: set[int] = set()  # connections that carry no new calls
        self._is_open = False
        self._last_heard = 0.0
        self._tasks: trio.Nursery
        self._busy = trio.Event()  # there are calls, so silence matters

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            if runs_on_asyncio():
                self._thread, _ = await exits.enter_async_context(hosted(self._opened()))
            else:
                await exits.enter_async_context(self._opened())
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._exits.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """The client, ready for calls on trio."""
        manager = trio.open_nursery()
        self._tasks = await manager.__aenter__()
        try:
            await self._tasks.start(self._transport.run, self._receive, self._fail_all)
        except BaseException as error:
            self._tasks.cancel_scope.cancel()
            await manager.__aexit__(None, None, None)
            raise error
        self._is_open = True
        self._tasks.start_soon(self._beat)
        try:
            yield
        finally:
            # The nursery is not shown the body's exception, which it would wrap in a group.
            self._fail_all(Unavailable("the client was closed"))
            self._is_open = False
            self._tasks.cancel_scope.shield = True
            self._tasks.cancel_scope.cancel()
            await manager.__aexit__(None, None, None)

    async def _generate(self, request: GenerateRequest) -> Result:
        deadline = Deadline(request, trio.current_time, trio.current_effective_deadline())
        result: Result = await self._ask_again(METHODS["generate"], deadline.remaining_request)
        return result

    @asynccontextmanager
    async def _stream(self, request: GenerateRequest) -> AsyncIterator[TokenStream]:
        deadline = Deadline(request, trio.current_time, trio.current_effective_deadline())
        options = StreamOptions(credit=WINDOW, coalesce=True)
        msgid = 0

        async def open_call() -> None:
            nonlocal msgid
            msgid = await self._open(METHODS["stream"], deadline.remaining_request(), stream, options)

        def grant(count: int) -> None:
            if self._is_open:
                self._transport.try_send(self._calls.credit(msgid, count), self._calls.connection_of(msgid))

        stream = RemoteStream(open_call, grant, window=WINDOW, retry=self.retry)
        await open_call()
        try:
            yield stream
        finally:
            self._close(msgid)

    async def _ask(self, request: msgspec.Struct) -> Any:
        return await self._ask_again(asked_method(request), lambda: request)

    async def _ask_again(self, method: Method, request: Callable[[], msgspec.Struct]) -> Any:
        """The answer, after as many tries as it takes or are made."""
        async for attempt in self.retry.attempts():
            with attempt:
                call = TokenStream()
                msgid = await self._open(method, request(), call)
                try:
                    return await call.ended()
                finally:
                    self._close(msgid)
        raise AssertionError("the last attempt returns or raises")

    async def _open(
        self,
        method: Method,
        request: msgspec.Struct,
        call: CallResult,
        options: StreamOptions = PLAIN_STREAM,
    ) -> int:
        """Sends a request and returns its msgid; waits for the connection if there is none yet.

        The service must know of the lease before it works for us.
        """
        if not self._is_open:
            raise ClientClosed
        msgid, message = self._calls.open(method, request, call, options)
        is_sent = False
        self._unsent.add(msgid)
        try:
            with trio.move_on_after(self.timeout):
                connection = await self._transport.send([self._calls.heartbeat(LEASE_S), message])
                self._calls.sent(msgid, connection)
                is_sent = True
        finally:
            self._unsent.remove(msgid)
            if not is_sent:
                self._calls.close(msgid)
            self._part()
        if not is_sent:
            raise Unavailable(self._transport.no_answer(self.timeout))
        self._watch()
        return msgid

    def _close(self, msgid: int) -> None:
        """Forgets a call; one that has not ended is cancelled."""
        connection = self._calls.connection_of(msgid)
        cancel = self._calls.close(msgid)
        if cancel is not None and self._is_open and not self._transport.try_send(cancel, connection):
            self._tasks.start_soon(self._transport.send, [cancel])
        self._part()

    def _watch(self) -> None:
        if not self._busy.is_set():
            self._last_heard = trio.current_time()
            self._busy.set()

    def _receive(self, message: bytes, connection: int) -> None:
        self._last_heard = trio.current_time()
        if self._calls.receive(message):
            self._left.add(connection)
            self._transport.leave(connection)
        self._part()

    def _part(self) -> None:
        """Closes the connections that were left and carry no call any more."""
        if self._left and not self._unsent:  # what is being sent may go over any of them
            for connection in self._left - self._calls.connections():
                self._left.remove(connection)
                self._transport.close(connection)

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
                for connection in self._calls.connections():
                    self._transport.try_send(self._calls.heartbeat(LEASE_S), connection)

    def _fail_all(self, error: GenbatchError, connection: int | None = None) -> None:
        """Ends all calls: what was asked over a connection that is lost will not be answered over the next one.

        What has not been asked yet will be.

        Args:
            connection: the one that is lost; None where nothing is expected of any.
        """
        for cancel, carrier in self._calls.fail_all(error, spared=self._unsent, connection=connection):
            # If it can be sent at all; a service that hears nothing ends them itself.
            self._transport.try_send(cancel, carrier)
        self._part()


class RPCClient(RemoteClient):
    """A client of one service; has the interface of `Client`. Use it inside `async with`.

    Args:
        address: the service's, unix://PATH or rpc://HOST:PORT.
        timeout, retry: see RemoteClient.
        token: what the service knows this client by, where it asks for one.
        tls: how to trust a service that encrypts TCP, such as `tls.client_context()`; None: it does not.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 10.0,
        retry: Retry | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(RPCTransport(address, token=token, tls=tls), timeout=timeout, retry=retry)


class ZeroMQClient(RemoteClient):
    """A client of one service; has the interface of `Client`. Use it inside `async with`.

    Args:
        address: the service's, ipc://PATH or tcp://HOST:PORT; None is where `genbatch serve` listens by default.
        timeout, retry: see RemoteClient.
        client_key: file with this client's keys, for a service that asks for them.
        server_key: the service's public key, or its file; None where the client's file has it too.

    Raises:
        KeyFileError: a file of keys is missing, faulty, or exposed to others.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = 10.0,
        retry: Retry | None = None,
        client_key: str | None = None,
        server_key: str | None = None,
    ) -> None:
        where = default_address() if address is None else address
        transport = ZeroMQTransport(where, load_client_keys(client_key, server_key))
        super().__init__(transport, timeout=timeout, retry=retry)
