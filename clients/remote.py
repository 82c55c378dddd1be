"""ZeroMQClient and RPCClient: a service at an address, for trio.

    async with ZeroMQClient("ipc:///run/user/1000/genbatch/zeromq.sock") as client:
        print((await client.generate("Hello", max_tokens=8)).text)

    async with RPCClient("unix:///run/user/1000/genbatch/rpc.sock") as client:
        ...

Any number of tasks may use one client at once. The client reconnects by itself. It retries a refused request if the
service gave a time for that (Retry). It sends the callers' timeouts to the service (Deadline). After a lost connection
a stream continues with its next token (ShownTokens).

    RemoteClient -- RPCCalls -- bytes -- Transport -- the service
         |
    RemoteStream: grants credit as its tokens are read
"""

import logging
import math
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
import outcome
import tenacity
import trio

from genbatch.actors.gateways.addresses import default_address
from genbatch.clients.bridge import hosted, runs_on_asyncio
from genbatch.clients.interface import CallResult, Client, ClientClosed, TokenStream, asked_method
from genbatch.clients.transports import (
    RECONNECT_S,
    ConnectionLost,
    RPCTransport,
    Transport,
    ZeroMQTransport,
    load_client_keys,
)
from genbatch.proto.codec import to_answer
from genbatch.proto.errors import FrameTooLarge, GenbatchError, MalformedMessage, QueueFull, Unavailable
from genbatch.proto.messages import DrawnTokens, GenerateRequest, ShownTokens, Token, replayable
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
from genbatch.proto.service_messages import Hello, HelloRequest
from genbatch.proto.validation import RequestLimits

log = logging.getLogger("genbatch")

# The longest deadline that a service accepts by default. A longer timeout counts as no timeout.
MAX_DEADLINE_S = RequestLimits().max_deadline_s


class Deadline:
    """Converts the caller's timeout to the request's `deadline_s`, so that the service can stop in time.

    Args:
        request: the caller's request; its own `deadline_s` counts from now.
        now: returns the clock's time in seconds.
        scope_ends: the end of the caller's cancel scope on that clock; infinite without a timeout.
    """

    def __init__(self, request: GenerateRequest, now: Callable[[], float], scope_ends: float = math.inf) -> None:
        self._request = request
        self._now = now
        ends = math.inf if request.deadline_s is None else now() + request.deadline_s
        if scope_ends - now() <= MAX_DEADLINE_S:
            ends = min(ends, scope_ends)
        self._ends = ends

    def remaining_request(self) -> GenerateRequest:
        """Return the request with the remaining time. An expired deadline becomes 1 ms, and the service refuses it."""
        asked = self._request.deadline_s
        if math.isinf(self._ends) or (asked is not None and not asked > 0):
            return self._request
        left = max(self._ends - self._now(), 0.001)
        return msgspec.structs.replace(self._request, deadline_s=left)


def check_drawn(hello: Hello) -> None:
    """Check that the service can continue a stream after its tokens.

    Raises:
        Unavailable: the service's release is too old.
    """
    if "drawn" not in hello.stream_options:
        raise Unavailable("the stream was lost, and the service's release cannot continue streams")


def is_interrupted(final: outcome.Outcome[Any] | None) -> bool:
    """Return whether a call ended because its connection or its gateway was lost, so that it may be sent again."""
    match final:
        case outcome.Error(Unavailable() as error):
            return isinstance(error, ConnectionLost) or error.retry_after_ms is not None
    return False


# Each further refusal makes the wait longer by the factor GROWTH. A random share up to JITTER is added, so that clients
# that were refused together do not return together.
GROWTH, JITTER = 1.5, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The retry policy for refused requests and for lost connections.

    A refused request is retried if the service gave a `retry_after_ms`. After a lost connection a request is sent
    again, and a stream continues after its last token. The operator's calls, such as `drain`, are not repeated.

    Args:
        max_attempts: number of attempts without a new token; 1 passes every refusal and every loss to the caller.
        timeout_s: seconds after which no further attempt begins.
    """

    max_attempts: int = 5
    timeout_s: float = 30.0

    def attempts(self, *, repeats: bool = True) -> tenacity.AsyncRetrying:
        """Return the attempts of one request on trio; `async for` over them waits between attempts.

        Args:
            repeats: whether a request that the service may have run is sent again.
        """
        return tenacity.AsyncRetrying(trio.sleep, **self._policy(repeats))

    def sync_attempts(self, *, repeats: bool = True) -> tenacity.Retrying:
        """Return the attempts of one request for a plain `for`; see `attempts`."""
        return tenacity.Retrying(**self._policy(repeats))

    def _policy(self, repeats: bool) -> dict[str, Any]:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")
        return {
            "retry": tenacity.retry_if_exception(partial(_is_retried, repeats=repeats)),
            "wait": _wait_s,
            "stop": tenacity.stop_after_attempt(self.max_attempts) | tenacity.stop_before_delay(self.timeout_s),
            "before_sleep": _log_retry,
            "reraise": True,
        }


def _log_retry(state: tenacity.RetryCallState) -> None:
    error = state.outcome and state.outcome.exception()
    log.warning("the request is sent again in %.2f s: %s", state.upcoming_sleep, error)


def _is_retried(error: BaseException, *, repeats: bool) -> bool:
    if isinstance(error, ConnectionLost):
        return repeats
    return isinstance(error, QueueFull | Unavailable) and error.retry_after_ms is not None


def _wait_s(state: tenacity.RetryCallState) -> float:
    """Return the seconds until the next attempt."""
    error = state.outcome and state.outcome.exception()
    if not isinstance(error, QueueFull | Unavailable) or error.retry_after_ms is None:
        return RECONNECT_S  # the attempt itself waits for the connection
    return error.retry_after_ms / 1000 * GROWTH ** (state.attempt_number - 1) * (1 + JITTER * random.random())


class RemoteStream(TokenStream):
    """A stream from a service, for one reading task.

    Args:
        reopen: sends the request again.
        grant: grants the service credit for so many more tokens.
        shown: keeps the received tokens.
        window: most tokens that the service may send ahead of the reader.
        retry: the retry policy for refusals and lost connections.
    """

    __slots__ = ("_grant", "_has_begun", "_num_read", "_reopen", "_retry", "_shown", "_window")

    def __init__(
        self,
        reopen: Callable[[], Awaitable[None]],
        grant: Callable[[int], None],
        shown: ShownTokens,
        *,
        window: int,
        retry: Retry,
    ) -> None:
        super().__init__()
        self._shown = shown
        self._reopen = reopen
        self._grant = grant
        self._window = window
        self._retry = retry
        self._has_begun = False
        self._num_read = 0  # since credit was granted last

    def push(self, token: Token) -> None:
        """See `CallResult.push`."""
        self._shown.add(token)
        super().push(token)

    async def __anext__(self) -> Token:
        if not self._has_begun:
            await self._begin()
        while not self.tokens and (self.final is None or is_interrupted(self.final)):
            if self.final is None:
                await self._reader
            else:
                await self._begin()
        token = await super().__anext__()
        self._num_read += 1
        if self._num_read * 2 >= self._window:
            if self.final is None:
                self._grant(self._num_read)
            self._num_read = 0
        return token

    async def _begin(self) -> None:
        """Wait for the next token or the result. A refused request is sent again, and so is an interrupted one."""
        async for attempt in self._retry.attempts():
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    self.final = None
                    self._num_read = 0
                    await self._reopen()
                while not self.tokens and self.final is None:
                    await self._reader
                if not self.tokens:
                    self.unwrap()
        self._has_begun = True


class RPCCalls:
    """The open calls, and the routing of received messages to their results."""

    def __init__(self) -> None:
        self._connection = ClientConnection()
        self._results: dict[int, CallResult] = {}
        self._methods: dict[int, Method] = {}
        self._carriers: dict[int, int] = {}  # by msgid, the connection of each sent call

    def __len__(self) -> int:
        return len(self._results)

    def open(
        self,
        method: Method,
        request: msgspec.Struct,
        result: CallResult,
        options: StreamOptions = PLAIN_STREAM,
    ) -> tuple[int, bytes]:
        """Open a call; returns its msgid and the message to send.

        Args:
            result: receives the call's tokens and its result.
            options: the stream's options.

        Raises:
            FrameTooLarge: the message exceeds the service's limit.
        """
        msgid, message = self._connection.request(method.name, request, options)
        self._results[msgid] = result
        self._methods[msgid] = method
        return msgid, message

    def sent(self, msgid: int, connection: int) -> None:
        """Record the connection that a call was sent over."""
        if msgid in self._results:
            self._carriers[msgid] = connection

    def connection_of(self, msgid: int) -> int:
        """Return the connection of a sent call; 0 if the call was not sent."""
        return self._carriers.get(msgid, 0)

    def connections(self) -> set[int]:
        """Return the connections that carry open calls."""
        return {*self._carriers.values()}

    def close(self, msgid: int) -> bytes | None:
        """Remove a call; returns the message that cancels it, or None if the call has ended."""
        if msgid not in self._results:
            return None
        self._take(msgid)
        return self._connection.cancel(msgid)

    def credit(self, msgid: int, count: int) -> bytes:
        """Return the message that grants the service credit for `count` more tokens of a stream."""
        return self._connection.credit(msgid, count)

    def heartbeat(self, lease_s: float) -> bytes:
        """Return the message that extends the lease of the open calls to `lease_s` seconds from now."""
        return self._connection.heartbeat(lease_s)

    def receive(self, message: bytes) -> bool:
        """Pass a message's content to its call. A message that breaks the protocol ends every call.

        Returns whether the message asks the client to leave the connection.
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
        """End open calls with `error`; returns the messages that cancel them, and their connections.

        Args:
            spared: calls that continue.
            connection: end only the calls of this connection; None ends those of all connections.
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
                for msgid, token in tokens:
                    if msgid in self._results:
                        self._results[msgid].push(token)
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


# Seconds between heartbeats while calls are open, and the lease after which the service may cancel silent calls.
HEARTBEAT_S, LEASE_S = 1.0, 5.0
# Most tokens of a stream that the service may send ahead of the reader.
WINDOW = 1024


class RemoteClient(Client):
    """A client of a service, with the interface of `Client`, on trio and on asyncio. Use it inside `async with`.

    Any number of tasks may use one client at once.

    Args:
        transport: carries the messages.
        timeout: seconds of silence after which the service counts as gone, while connecting and while calls are open.
            It does not limit a request's duration; the request's `deadline_s` does.
        retry: the retry policy for refused requests.
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
        """Run the client on trio while the body runs."""
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
            # Do not pass the body's exception to the nursery, which would wrap it in a group.
            self._fail_all(Unavailable("the client was closed"))
            self._is_open = False
            self._tasks.cancel_scope.shield = True
            self._tasks.cancel_scope.cancel()
            await manager.__aexit__(None, None, None)

    def _open_stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[TokenStream]:
        return self.continued(request)

    @asynccontextmanager
    async def continued(
        self, request: GenerateRequest, drawn: tuple[DrawnTokens, ...] = ()
    ) -> AsyncIterator[TokenStream]:
        """Open a stream on trio that continues after `drawn`, the tokens of an earlier stream of this request."""
        request = replayable(request)
        deadline = Deadline(request, trio.current_time, trio.current_effective_deadline())
        shown = ShownTokens(request, drawn)
        msgid = 0

        async def open_call() -> None:
            nonlocal msgid
            options = StreamOptions(credit=WINDOW, coalesce=True, drawn=shown.drawn())
            if options.drawn:
                check_drawn(await self._ask(HelloRequest()))
            msgid = await self._open(METHODS["stream"], deadline.remaining_request(), stream, options)

        def grant(count: int) -> None:
            if self._is_open:
                self._transport.try_send(self._calls.credit(msgid, count), self._calls.connection_of(msgid))

        stream = RemoteStream(open_call, grant, shown, window=WINDOW, retry=self.retry)
        await open_call()
        try:
            yield stream
        finally:
            self._close(msgid)

    async def _ask(self, request: msgspec.Struct) -> Any:
        method = asked_method(request)
        if not isinstance(request, GenerateRequest):
            return await self._ask_again(method, lambda: request)
        deadline = Deadline(request, trio.current_time, trio.current_effective_deadline())
        return await self._ask_again(method, deadline.remaining_request)

    async def _ask_again(self, method: Method, request: Callable[[], msgspec.Struct]) -> Any:
        """Send a request, retry it by the policy, and return its answer."""
        async for attempt in self.retry.attempts(repeats=not method.is_operators):
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
        """Send a request and return its msgid; waits for the connection if there is none yet.

        The heartbeat goes first, so that the service knows the lease before it runs the request.
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
        """Remove a call, and cancel it if it has not ended."""
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
        """Close the left connections that carry no call."""
        if self._left and not self._unsent:  # an unsent call may still go over any connection
            for connection in self._left - self._calls.connections():
                self._left.remove(connection)
                self._transport.close(connection)

    async def _beat(self) -> None:
        """Send heartbeats while calls are open, and end the calls if the service is silent for too long."""
        while True:
            await self._busy.wait()
            started = trio.current_time()
            await trio.sleep(HEARTBEAT_S)
            if not self._calls:
                self._busy = trio.Event()
                continue
            now = trio.current_time()
            self._last_heard += now - started - HEARTBEAT_S  # do not count time in which the event loop was blocked
            if now - self._last_heard > self.timeout:
                self._fail_all(Unavailable(f"the service at {self.address} was silent for {self.timeout:g} s"))
            else:
                for connection in self._calls.connections():
                    self._transport.try_send(self._calls.heartbeat(LEASE_S), connection)

    def _fail_all(self, error: GenbatchError, connection: int | None = None) -> None:
        """End all sent calls, because a new connection does not answer a lost connection's calls.

        Unsent calls continue.

        Args:
            connection: the lost connection; None ends the calls of all connections.
        """
        for cancel, carrier in self._calls.fail_all(error, spared=self._unsent, connection=connection):
            # The message may be lost. Then the service ends the call when the lease runs out.
            self._transport.try_send(cancel, carrier)
        self._part()


class RPCClient(RemoteClient):
    """A client of one service; has the interface of `Client`. Use it inside `async with`.

    Args:
        address: the service's, unix://PATH or rpc://HOST:PORT.
        timeout, retry: see RemoteClient.
        token: the client's token, for a service that requires one.
        tls: the TLS context for a service that encrypts TCP, such as `tls.client_context()`; None means no TLS.
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
        address: the service's ipc://PATH or tcp://HOST:PORT; None means the default address of `genbatch serve`.
        timeout, retry: see RemoteClient.
        client_key: the file with this client's keys, for a service that requires keys.
        server_key: the service's public key, or its file; None if the client's file holds it, too.

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
