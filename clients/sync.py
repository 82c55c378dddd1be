"""SyncZeroMQClient and SyncRPCClient: a service at an address, for programs without an event loop.

with SyncZeroMQClient("ipc:///run/user/1000/genbatch/zeromq.sock") as client:
    print(client.generate("Hello", max_tokens=8).text)
"""

import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from genbatch.actors.gateways.addresses import default_address
from genbatch.actors.runtime.zeromq_socket import set_defaults
from genbatch.clients.interface import CallResult, ClientClosed, ClientError, SyncClient, asked_method
from genbatch.clients.remote import Deadline, Retry, RPCCalls, check_drawn, is_interrupted
from genbatch.clients.transports import (
    CONNECTION_EVENTS,
    LINGER_MS,
    ZEROMQ_ADDRESSES,
    ConnectionLost,
    RPCLink,
    SyncTransport,
    is_connected,
    load_client_keys,
    no_address,
    no_answer,
    read_refusal,
    read_rpc_address,
    socket_options,
)
from genbatch.proto.errors import GenbatchError, Unauthenticated, Unavailable
from genbatch.proto.messages import GenerateRequest, ShownTokens, Token, replayable
from genbatch.proto.methods import METHODS, Method
from genbatch.proto.rpc import PLAIN_STREAM, StreamOptions
from genbatch.proto.service_messages import HelloRequest


class SyncTokenStream(CallResult):
    """A stream from a service, for one reading thread.

    Args:
        wait_for: receives messages until its argument, called without arguments, is true.
        reopen: sends the request again.
        grant: grants the service credit for so many more tokens.
        window: most tokens that the service may send ahead of the reader.
        retry: the retry policy for refusals and lost connections.
        shown: keeps the received tokens; None for a call without tokens.
    """

    __slots__ = ("_grant", "_has_begun", "_num_read", "_reopen", "_retry", "_shown", "_wait_for", "_window")

    def __init__(
        self,
        wait_for: Callable[[Callable[[], bool]], None],
        reopen: Callable[[], None],
        grant: Callable[[int], None],
        *,
        window: int,
        retry: Retry,
        shown: ShownTokens | None = None,
    ) -> None:
        super().__init__()
        self._shown = shown
        self._wait_for = wait_for
        self._reopen = reopen
        self._grant = grant
        self._window = window
        self._retry = retry
        self._has_begun = False
        self._num_read = 0  # since credit was granted last

    def __iter__(self) -> Iterator[Token]:
        return self

    def push(self, token: Token) -> None:
        """See `CallResult.push`."""
        if self._shown is not None:
            self._shown.add(token)
        super().push(token)

    def __next__(self) -> Token:
        if not self._has_begun:
            self._begin()
        self._wait_for(self._has_something)
        while not self.tokens and is_interrupted(self.final):
            self._begin()
        if not self.tokens:
            self.unwrap()
            raise StopIteration
        self._num_read += 1
        if self._num_read * 2 >= self._window:
            if self.final is None:
                self._grant(self._num_read)
            self._num_read = 0
        return self.tokens.popleft()

    def ended(self) -> Any:
        """Wait for the result, skip all tokens before it, and return or raise it."""
        self._wait_for(lambda: self.final is not None)
        return self.unwrap()

    def _begin(self) -> None:
        """Wait for the next token or the result. A refused request is sent again, and so is an interrupted one."""
        for attempt in self._retry.sync_attempts():
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    self.final = None
                    self._num_read = 0
                    self._reopen()
                self._wait_for(self._has_something)
                if not self.tokens:
                    self.unwrap()
        self._has_begun = True

    def _has_something(self) -> bool:
        return bool(self.tokens) or self.final is not None


# Seconds. Heartbeats are sent only while a method waits, so the lease covers the program's work between two tokens.
HEARTBEAT_S, LEASE_S = 1.0, 60.0
# Most tokens of a stream that the service may send ahead of the reader.
WINDOW = 1024


class SyncRemoteClient(SyncClient):
    """A client of a service, with the interface of `SyncClient`. Use it inside `with`.

    Each thread opens a client of its own; several streams may be open at once and be read in turns.

    Args:
        transport: carries the messages.
        timeout: seconds of silence after which the service counts as gone; it does not limit a request's duration.
        retry: the retry policy for refused requests.
    """

    def __init__(self, transport: SyncTransport, *, timeout: float, retry: Retry | None) -> None:
        self.address = transport.address
        self.timeout = timeout
        self.retry = retry or Retry()
        self._transport = transport
        self._calls = RPCCalls()
        self._in_use = RLock()
        self._opener: int | None = None  # the id of the process; a fork of it shares the connection, and may not use it
        self._is_to_leave = False  # the service asks for another connection
        self._last_beat = 0.0

    def __enter__(self) -> Self:
        self._transport.open()
        self._opener = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_open = self._is_open
        self._fail_all(Unavailable("the client was closed"))
        self._opener = None
        if is_open:
            self._transport.close()

    @property
    def _is_open(self) -> bool:
        return self._opener == os.getpid()

    @contextmanager
    def open_stream(self, request: GenerateRequest) -> Iterator[SyncTokenStream]:
        """See `Client.open_stream`."""
        request = replayable(request)
        deadline = Deadline(request, time.monotonic)
        with self._call(METHODS["stream"], deadline.remaining_request, ShownTokens(request)) as call:
            yield call

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Receive messages until `is_true()`; a stream's `for` waits here."""
        if is_true():
            return
        if not self._is_open:
            raise ClientClosed
        with self._exclusive():
            self._receive_until(is_true)

    def _receive_until(self, is_true: Callable[[], bool]) -> None:
        last_heard = time.monotonic()
        while not is_true():
            self._beat()
            try:
                messages = self._transport.receive(HEARTBEAT_S)
            except GenbatchError as lost:
                self._fail_all(lost)
                continue
            for message in messages:
                self._is_to_leave |= self._calls.receive(message)
                last_heard = time.monotonic()
            if time.monotonic() - last_heard > self.timeout:
                self._fail_all(Unavailable(f"the service at {self.address} was silent for {self.timeout:g} s"))

    def ask(self, request: msgspec.Struct) -> Any:
        """See `Client.ask`."""
        method = asked_method(request)
        if not isinstance(request, GenerateRequest):
            return self._ask_again(method, lambda: request)
        return self._ask_again(method, Deadline(request, time.monotonic).remaining_request)

    def _ask_again(self, method: Method, request: Callable[[], msgspec.Struct]) -> Any:
        """Send a request, retry it by the policy, and return its answer."""
        with self._exclusive():
            for attempt in self.retry.sync_attempts(repeats=not method.is_operators):
                with attempt, self._call(method, request) as call:
                    return call.ended()
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _call(
        self, method: Method, request: Callable[[], msgspec.Struct], shown: ShownTokens | None = None
    ) -> Iterator[SyncTokenStream]:
        """Open a call for the body's duration, and cancel it if it has not ended by then."""
        msgid = 0

        def open_call() -> None:
            nonlocal msgid
            options = PLAIN_STREAM
            if shown is not None:
                options = StreamOptions(credit=WINDOW, coalesce=True, drawn=shown.drawn())
            if options.drawn:
                check_drawn(self.ask(HelloRequest()))
            msgid, message = self._calls.open(method, request(), call, options)
            try:
                self._connect()
            except BaseException:
                self._calls.close(msgid)
                raise
            self._transport.send(message)

        def grant(count: int) -> None:
            if self._is_open:
                self._transport.send(self._calls.credit(msgid, count))

        if not self._is_open:
            raise ClientClosed
        call = SyncTokenStream(self.wait_for, open_call, grant, window=WINDOW, retry=self.retry, shown=shown)
        with self._exclusive():
            open_call()
        try:
            yield call
        finally:
            if self._is_open:
                with self._in_use:
                    cancel = self._calls.close(msgid)
                    if cancel is not None:
                        self._transport.send(cancel)
                    if not self._calls:
                        self._leave()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Refuse a second thread: a connection mixes up the messages of two."""
        if not self._in_use.acquire(blocking=False):
            raise ClientError("another thread is using this client: open a client in each thread")
        try:
            yield
        finally:
            self._in_use.release()

    def _leave(self) -> None:
        """Close the connection if the service asked for that and no call is open."""
        for message in self._transport.unread():
            self._is_to_leave |= self._calls.receive(message)
        if self._is_to_leave:
            self._is_to_leave = False
            self._transport.reopen()

    def _connect(self) -> None:
        """Wait until messages can be sent. A heartbeat goes first, so that the service knows the lease."""
        if len(self._calls) == 1:  # only the call that is being opened
            self._leave()
            self._transport.forget_losses()
        try:
            self._transport.connect(self.timeout)
        except GenbatchError as error:
            self._fail_all(error)
            raise
        self._last_beat = 0.0
        self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            self._transport.send(self._calls.heartbeat(LEASE_S))

    def _fail_all(self, error: GenbatchError) -> None:
        for cancel, _ in self._calls.fail_all(error):
            if self._is_open:
                self._transport.send(cancel)


# Seconds between attempts to connect, and the timeout for sending the last cancellations.
RECONNECT_S, LINGER_S = 0.05, 0.5
MAX_BYTES = 2**16

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SyncRPCTransport:
    """Implements `SyncTransport`.

    Args:
        address: unix://PATH or rpc://HOST:PORT.
        token, tls: see RPCClient.
    """

    def __init__(self, address: str, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self._token = token
        self._tls = tls
        self._socket: socket.socket | None = None
        self._link: RPCLink
        self._outgoing = bytearray()
        self._incoming: list[bytes] = []
        self._lost: GenbatchError | None = None  # raised after the connection's last messages were returned

    def open(self) -> None:
        """See `SyncTransport.open`."""
        self._where = read_rpc_address(self.address)

    def close(self) -> None:
        """See `SyncTransport.close`."""
        end = time.monotonic() + LINGER_S
        while self._socket is not None and self._outgoing and time.monotonic() < end:
            self._exchange(LINGER_S)
        self._disconnect()

    def reopen(self) -> None:
        """See `SyncTransport.reopen`."""
        self.close()
        self._lost = None

    def unread(self) -> list[bytes]:
        """See `SyncTransport.unread`."""
        self._exchange(0)
        messages, self._incoming = self._incoming, []
        return messages

    def forget_losses(self) -> None:
        """See `SyncTransport.forget_losses`."""
        self._lost = None

    def connect(self, timeout: float) -> None:
        """See `SyncTransport.connect`."""
        end = time.monotonic() + timeout
        self._exchange(0)  # notice a connection that ended while no method waited
        if self._lost is not None:  # other calls must get this error
            lost, self._lost = self._lost, None
            raise lost
        while self._socket is None:
            try:
                self._socket = self._connect(max(0.001, end - time.monotonic()))
            except ssl.SSLCertVerificationError as error:
                raise Unauthenticated(f"the service at {self.address} is not trusted: {error}") from None
            except OSError as error:
                if time.monotonic() + RECONNECT_S > end:
                    raise Unavailable(f"no service answers at {self.address} within {timeout:g} s") from error
                time.sleep(RECONNECT_S)
            else:
                self._link = RPCLink(self.address, self._token)
                self._outgoing = bytearray(self._link.greeting)

    def send(self, message: bytes) -> None:
        """See `SyncTransport.send`. Bytes that cannot be sent at once are sent during later receives."""
        if self._socket is not None:
            self._outgoing += message
            self._exchange(0)

    def receive(self, timeout: float) -> list[bytes]:
        """See `SyncTransport.receive`."""
        if not self._incoming and self._lost is None:
            self._exchange(timeout)
        messages, self._incoming = self._incoming, []
        if not messages and self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        return messages

    def _connect(self, timeout: float) -> socket.socket:
        where = self._where
        if where.path is not None:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout)
            try:
                connection.connect(where.path)
            except OSError:
                connection.close()
                raise
        else:
            connection = socket.create_connection((where.host, where.port), timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=where.host)
        connection.setblocking(False)
        return connection

    def _exchange(self, timeout: float) -> None:
        """Send and receive as much as possible; waits up to `timeout` seconds until something is possible."""
        if self._socket is None:
            return
        try:
            if not self._has_pending():
                with selectors.DefaultSelector() as selector:
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
                    selector.register(self._socket, events)
                    selector.select(timeout)
            self._write(self._socket)
            self._read(self._socket)
        except OSError:
            self._lose(ConnectionLost(self.address))
        except GenbatchError as error:
            self._lose(error)

    def _has_pending(self) -> bool:
        """Return whether TLS holds decrypted bytes, which the operating system's selector does not report."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _write(self, connection: socket.socket) -> None:
        while self._outgoing:
            try:
                sent = connection.send(memoryview(self._outgoing)[:MAX_BYTES].tobytes())
            except _NOT_NOW:
                return
            del self._outgoing[:sent]

    def _read(self, connection: socket.socket) -> None:
        while True:
            try:
                data = connection.recv(MAX_BYTES)
            except _NOT_NOW:
                return
            if not data:
                raise ConnectionResetError
            self._incoming += self._link.receive(data)

    def _lose(self, error: GenbatchError) -> None:
        self._lost = error
        self._disconnect()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._outgoing.clear()


class SyncZeroMQTransport:
    """Implements `SyncTransport`; ZeroMQ itself connects and reconnects.

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
        self._is_connected = False

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
            raise no_address(self.address, ZEROMQ_ADDRESSES) from error

    def close(self) -> None:
        """See `SyncTransport.close`."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)
        self._context.term()

    def connect(self, timeout: float) -> None:
        """See `SyncTransport.connect`."""
        end = time.monotonic() + timeout
        while self._refusal is None and time.monotonic() < end:
            poller = zmq.Poller()
            poller.register(self._monitor, zmq.POLLIN)
            if self._is_connected:  # otherwise ZeroMQ may accept messages for a connection that has ended
                poller.register(self._socket, zmq.POLLOUT)
            ready = dict(poller.poll(max(0, round((end - time.monotonic()) * 1000))))
            if self._monitor in ready:
                self._read_monitor()
            elif self._socket in ready:
                return
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
        if self._monitor in ready and not self._read_monitor():  # after the last messages
            raise self._refusal or ConnectionLost(self.address)
        return []

    def reopen(self) -> None:
        """See `SyncTransport.reopen`."""
        self.close()
        self._is_connected = False
        self.open()

    def unread(self) -> list[bytes]:
        """See `SyncTransport.unread`."""
        return self._take()

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

    def _read_monitor(self) -> bool:
        """Read one event; returns whether it reports an established connection."""
        event, *_ = self._monitor.recv_multipart()
        self._is_connected = is_connected(event)
        if not self._is_connected:
            self._refusal = read_refusal(event, self.address, has_keys=self._keys is not None) or self._refusal
        return self._is_connected


class SyncRPCClient(SyncRemoteClient):
    """A client of one service; has the interface of `SyncClient`. Use it inside `with`.

    Args:
        address: the service's, unix://PATH or rpc://HOST:PORT.
        timeout, retry: see SyncRemoteClient.
        token, tls: see RPCClient.
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
        super().__init__(SyncRPCTransport(address, token=token, tls=tls), timeout=timeout, retry=retry)


class SyncZeroMQClient(SyncRemoteClient):
    """A client of one service; has the interface of `SyncClient`. Use it inside `with`.

    Args:
        address: the service's ipc://PATH or tcp://HOST:PORT; None means the default address of `genbatch serve`.
        timeout, retry: see SyncRemoteClient.
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
        transport = SyncZeroMQTransport(where, client_key=client_key, server_key=server_key)
        super().__init__(transport, timeout=timeout, retry=retry)
