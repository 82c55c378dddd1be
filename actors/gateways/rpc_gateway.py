"""RPCGateway: takes requests of msgpack-RPC clients over TCP and Unix sockets.

    gateway = RPCGateway(Dispatcher(batcher), "unix:///run/genbatch/rpc.sock")
    await nursery.start(gateway.run)
    print(gateway.address)

Sessions, methods and limits are the same as over ZeroMQ. Here the end of a connection shows at once that its client is
gone. An RPCConnection is one client on a byte stream, from its first byte to its end. Over TCP, and where tokens are
required, the first request must be a `hello`. A web page can connect to a port of this machine, too, but cannot send a
hello (ADR 32).
"""

import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

import trio

from genbatch.actors.gateways.accepting import (
    MAX_HALF_MESSAGES,
    ConnectionLimit,
    MessageBudget,
    Peer,
    Seat,
    Share,
    accept_from,
    account_of_socket,
    has_hung_up,
    max_connections,
)
from genbatch.actors.gateways.addresses import check_address
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.listening import ListeningSockets, address_of, as_listeners
from genbatch.actors.gateways.session import MAX_WAITING, CallHost, Outbox, RPCSession, lease_over
from genbatch.actors.gateways.zeromq_gateway import MAX_LEASE_S
from genbatch.actors.security.security import Authenticate, Security
from genbatch.proto.codec import MAX_FEED_BYTES, MAX_TRANSPORT_BYTES, MessageSplitter, StreamBroken
from genbatch.proto.errors import Cancelled, GenbatchError, Unauthenticated, Unavailable
from genbatch.proto.rpc import CallReceived, Refused, ServerConnection, error_message
from genbatch.proto.service_messages import HelloRequest
from genbatch.proto.validation import check_type

logger = logging.getLogger(__name__)

# A client without a hello may use at most this much memory.
MAX_HELLO_BYTES = 4096


def read_hello(event: CallReceived | Refused) -> tuple[int | None, HelloRequest | None]:
    """Return the msgid of a request, and the request if it is a `hello`; None for each that is missing."""
    if isinstance(event, Refused):
        return None, None
    if event.method != "hello":
        return event.msgid, None
    try:
        hello: HelloRequest = check_type(event.params, HelloRequest)
    except GenbatchError:
        return event.msgid, None
    return event.msgid, hello


# A client's timeouts in seconds: to finish a message, to send its hello, and to read.
MESSAGE_S, HELLO_S, STALLED_S = 30.0, 5.0, 10.0
# Seconds for the last messages to leave.
LINGER_S = 0.5
# Seconds between checks for silent clients and for clients that do not read.
SWEEP_S = 0.5
# Seconds until the first check whether a half-closed client is gone; the pause doubles after each check.
PROBE_S = 0.01
# The most bytes passed to the kernel at once.
MAX_SEND_BYTES = 2**16
# Messages handled before other tasks run.
MESSAGES_PER_TURN = 64
# The retry hint for a client that found no room, in milliseconds.
RETRY_AFTER_FULL_MS = 1000


@dataclass(frozen=True, slots=True)
class HelloRules:
    """The rules for the first message of a connection.

    Args:
        authenticate: returns the tenant of a token; None admits every client that can reach the address.
        asks_for_hello: whether a `hello` must come first; a required token implies it.
        on_valid_message: called after the hello, or after the first valid message where no hello is required.
    """

    authenticate: Authenticate | None = None
    asks_for_hello: bool = False
    on_valid_message: Callable[[], None] = lambda: None


NO_HELLO = HelloRules()


class RPCConnection:
    """Reads and writes one stream.

    Args:
        stream: a connected stream, after its TLS handshake if it has one.
        dispatcher: runs the methods.
        host: hosts the calls' tasks.
        budget: bounds its unfinished messages, together with other connections.
        peer: its name and its account.
        rules: how its client gets in.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        dispatcher: Dispatcher,
        host: CallHost,
        *,
        budget: MessageBudget,
        peer: Peer,
        rules: HelloRules = NO_HELLO,
    ) -> None:
        self.client = peer.name
        self._peer = peer
        self.last_heard = trio.current_time()
        self.session: RPCSession | None = None  # None before the hello
        self._stream = stream
        self._dispatcher = dispatcher
        self._calls = host
        self._budget = budget
        self._authenticate = rules.authenticate
        self._asks_for_hello = rules.asks_for_hello or rules.authenticate is not None
        self._hello_by = trio.current_time() + HELLO_S
        self._on_valid_message = rules.on_valid_message
        self._token = ""
        self._outbox = Outbox()
        self._mail = trio.Event()  # set when the outbox has a message
        self._sent = trio.Event()  # set when the outbox has shrunk
        self._is_sending = False
        self._reading = trio.CancelScope()
        # guard: size before the token
        self._splitter = MessageSplitter(MAX_HELLO_BYTES if self._asks_for_hello else MAX_TRANSPORT_BYTES)

    async def run(self) -> None:
        """Serve until the client is gone, breaks the protocol, or `stop` is called; its calls end, too."""
        if not self._asks_for_hello:
            self.session = self._new_session(None)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, nursery.cancel_scope)
                is_there = True
                with self._reading, self._budget.share(self._give_up_message) as share:
                    is_there = await self._read(share)
                self._splitter.clear()  # now, since this object would be freed late
                if is_there:
                    with trio.move_on_after(LINGER_S):
                        await self._part()
                else:
                    await self._answer_the_last()
                    await self._calls.turn_to_end()
                nursery.cancel_scope.cancel()
        finally:
            self._outbox.clear()
            self.cancel_all(Cancelled("the client is gone"))
            await trio.aclose_forcefully(self._stream)

    def stop(self) -> None:
        """End the connection after a short time for the last messages."""
        self._reading.cancel()

    def _give_up_message(self) -> None:
        """Drop an endless message, since other connections need its memory."""
        error = Unavailable(
            f"unfinished messages take {self._budget.max_bytes} bytes", retry_after_ms=RETRY_AFTER_FULL_MS
        )
        self.refuse(self._splitter.head(), error)
        self._splitter.clear()
        self.stop()

    def cancel_all(self, reason: GenbatchError) -> None:
        """End its calls."""
        if self.session is not None:
            self.session.cancel_all(reason)

    def refuse(self, head: bytes, error: GenbatchError) -> None:
        """Answer a message that was not received whole, or refuse the connection.

        Args:
            head: the message's beginning.
        """
        if self.session is not None:
            self.session.refuse(head, error)
        else:
            self._turn_away(None, error)

    def _turn_away(self, msgid: int | None, error: GenbatchError) -> None:
        """Answer a client without a hello."""
        logger.info("turned client %s away: %s", self.client, error)
        self._outbox.post(error_message(msgid, error))
        self._wake()

    async def _part(self) -> None:
        """Wait until the last messages have arrived; closing a connection with unread data would discard them."""
        await self._wait_until_waiting(0)
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            try:
                await self._stream.send_eof()
                while await self._stream.receive_some(MAX_FEED_BYTES):
                    await self._calls.turn_to_end()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def _answer_the_last(self) -> None:
        """Wait for the open calls of a half-closed client, which may still read; do not wait for one that is gone.

        Over TCP, a client that is gone looks the same until its machine rejects a message. So heartbeats are sent.
        """
        session, stream, pause_s = self.session, self._stream, PROBE_S
        if session is None or not isinstance(stream, trio.SocketStream):
            return
        while (session.num_calls or self._outbox or self._is_sending) and not has_hung_up(stream.socket):
            if stream.socket.family != socket.AF_UNIX and not self._outbox:
                session.heartbeat()
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, SWEEP_S)

    def _new_session(self, tenant: str | None) -> RPCSession:
        return RPCSession(self._dispatcher, self._calls, self._outbox, self._wake, peer=self._peer, tenant=tenant)

    # Reading

    async def _read(self, share: Share) -> bool:
        """Handle messages until the stream ends or breaks the protocol; return whether the client is still there."""
        while data := await self._receive_some():
            self.last_heard = trio.current_time()
            try:
                for count, message in enumerate(self._splitter.feed(data), 1):
                    if not self._act(message):
                        return True
                    if count % MESSAGES_PER_TURN == 0:
                        await trio.lowlevel.checkpoint()
                    # Stop reading from a client that leaves its answers unread, so that its requests wait on its side.
                    await self._wait_until_waiting(MAX_WAITING // 2)
            except StreamBroken as broken:
                self.refuse(broken.head, broken.error)
                return True
            share.holds(self._splitter.num_held)
        return data is None

    async def _receive_some(self) -> bytes | None:
        """Return the next bytes; empty at the client's end, None after a timeout of the hello or of a message."""
        with trio.CancelScope() as scope:
            if self.session is None:
                scope.deadline = self._hello_by
            elif self._splitter.is_inside_message:
                scope.deadline = trio.current_time() + MESSAGE_S
            try:
                return bytes(await self._stream.receive_some(MAX_FEED_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return b""
        if self.session is None:
            self.refuse(b"", Unauthenticated(f"no hello came within {HELLO_S:g} s"))
        else:
            self.refuse(b"", Unavailable(f"the rest of a message did not come within {MESSAGE_S:g} s"))
        return None

    def _act(self, message: bytes) -> bool:
        """Handle a message; return whether the connection continues."""
        if self.session is None:
            return self._greet(message)
        # guard: tokens taken off the list
        if self._authenticate is not None and self._authenticate(self._token) != self.session.tenant:
            self.session.refuse(message, Unauthenticated("the token is no longer valid"))
            self.cancel_all(Unauthenticated("the token is no longer valid"))
            return False
        is_message = self.session.receive(message)
        if is_message:
            self._on_valid_message()
        return is_message

    def _greet(self, message: bytes) -> bool:
        event = ServerConnection(max_calls=1).receive(message)
        if not isinstance(event, CallReceived | Refused):
            return True  # a notification, which Neovim's clients send first
        msgid, hello = read_hello(event)
        if hello is None and self._authenticate is None:
            self._turn_away(msgid, Unauthenticated("over TCP the first request must be a hello"))
            return False
        token = None if hello is None else hello.token
        tenant = self._authenticate(token) if self._authenticate is not None and token is not None else None
        # guard: token before anything, msgpack-RPC
        if self._authenticate is not None and tenant is None:
            asks = "the service asks for a token (--token), in a hello before all else"
            fault = "the token is not known" if token else asks
            error = Unauthenticated(f"{fault}; its operator makes one with `genbatch keys token NAME`")
            self._turn_away(msgid, error)
            return False
        self._on_valid_message()
        self._token = token or ""
        self._splitter.max_bytes = MAX_TRANSPORT_BYTES
        self.session = self._new_session(tenant)
        self.session.receive(message)
        return True

    # Writing

    def _wake(self) -> None:
        self._mail.set()
        if self._is_sending and self._outbox.is_full:
            self._outbox.drop_tokens()
            self.cancel_all(Cancelled(f"the client leaves more than {MAX_WAITING} messages unread"))

    async def _write(self, scope: trio.CancelScope) -> None:
        """Send waiting messages, as many as fit at once; end the connection if the client does not take them."""
        while True:
            await self._mail.wait()
            self._mail = trio.Event()
            while data := self._outbox.take_all(MAX_SEND_BYTES):
                self._is_sending = True
                if not await self._send(data):
                    scope.cancel()
                    return
                self._is_sending = False
                self._sent.set()

    async def _send(self, data: bytes) -> bool:
        """Return whether the client took the data in time."""
        with trio.move_on_after(STALLED_S):
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            return True
        return False

    async def _wait_until_waiting(self, count: int) -> None:
        """Wait until at most `count` messages are unsent; with 0, until all were sent."""
        while self._outbox.num_waiting > count or (count == 0 and self._is_sending):
            self._sent = trio.Event()
            await self._sent.wait()


# Seconds of silence before the kernel probes the other machine, seconds between probes, and their number.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 5, 2, 3


class RPCGateway:
    """Listens at one address; `run` is a child for a supervisor.

    Args:
        dispatcher: runs the methods.
        address: unix://PATH, or tcp://HOST:PORT; a port of 0 or "*" is chosen.
        security: clients need one of its `tokens`, and its `tls` encrypts TCP. Without both, HOST must be loopback.
        sockets: the listening sockets; None opens a socket for this gateway alone.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        address: str,
        security: Security | None = None,
        *,
        sockets: ListeningSockets | None = None,
    ) -> None:
        self.address = address
        self._sockets = ListeningSockets() if sockets is None else sockets
        self._owns_sockets = sockets is None
        self._accepting = trio.CancelScope()
        self._dispatcher = dispatcher
        self._security = security or Security()
        self._connections: set[RPCConnection] = set()
        self._names = count(1)
        self._limit = ConnectionLimit(max_connections())
        self._budget = MessageBudget(MAX_HALF_MESSAGES)
        self._calls: CallHost

    @property
    def num_calls(self) -> int:
        """The number of open calls, of all clients."""
        return sum(connection.session.num_calls for connection in self._connections if connection.session)

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, then end every call with Unavailable; `started` with the address once it listens.

        Raises:
            AddressError: it cannot or must not listen there.
        """
        check_address("rpc_bind", self.address, lacking=self._security.lacking_for_tokens)
        await self._sockets.open("rpc", self.address)
        listening = self._sockets.copies("rpc")
        self.address = address_of(self.address, listening[0]).replace("tcp://", "rpc://")
        async with trio.open_nursery() as nursery:
            stopping = trio.Event()
            calls_ended = trio.Event()
            self._calls = CallHost(await nursery.start(_host, stopping, calls_ended))
            handlers = await nursery.start(_host, calls_ended, trio.Event())
            nursery.start_soon(self._end, stopping, calls_ended)
            nursery.start_soon(self._sweep)
            task_status.started(self.address)
            with self._accepting:
                await accept_from(as_listeners(listening), self._serve, handlers)

    @property
    def num_connections(self) -> int:
        """The number of connected clients."""
        return len(self._connections)

    def retire(self) -> None:
        """Accept no more connections, and tell clients to reconnect, since another service has the sockets."""
        self._accepting.cancel()
        self._calls.is_retiring = True
        for connection in self._connections:
            if connection.session is not None:
                connection.session.go_away()

    def hand_over(self) -> None:
        """End the open calls after `retire`; clients continue them at the other service."""
        for connection in self._connections:
            if connection.session is not None:
                connection.session.hand_over()

    async def _end(self, stopping: trio.Event, calls_ended: trio.Event) -> None:
        """Wait to be cancelled, then end calls, send their finals, and end connections."""
        try:
            await trio.sleep_forever()
        finally:
            if self._owns_sockets:  # first: the next service may be about to open its own
                self._sockets.close()
            with trio.CancelScope(shield=True):
                self._calls.closing = Unavailable("the service is stopping")
                for connection in self._connections:
                    connection.cancel_all(self._calls.closing)
                stopping.set()
                await calls_ended.wait()
                for connection in self._connections:
                    connection.stop()

    async def _serve(self, stream: trio.SocketStream) -> None:
        """Serve one client from its connection to its end; this method raises nothing."""
        authenticate: Authenticate | None = None
        if self._security.tokens is not None:
            authenticate = self._security.tokens.tenant
        try:
            async with stream:
                # A client is pushed out only before its first valid message, so no work is lost.
                with trio.CancelScope() as scope, self._limit.seat(partial(self._push_out, stream, scope)) as seat:
                    secured = await self._secured(stream)
                    if secured is None:
                        return
                    rules = HelloRules(
                        authenticate,
                        # guard: a hello first, over TCP
                        asks_for_hello=stream.socket.family != socket.AF_UNIX,
                        on_valid_message=seat.settle,
                    )
                    peer = Peer(f"rpc:{next(self._names)}", account_of_socket(stream.socket))
                    connection = RPCConnection(
                        secured, self._dispatcher, self._calls, budget=self._budget, peer=peer, rules=rules
                    )
                    await self._host(connection, seat)
        except Exception:  # a bug of ours ends one connection, not the gateway
            logger.exception("a connection failed")

    def _push_out(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        """End a silent connection; its client can connect and send again."""
        if self._security.tls is None or stream.socket.family == socket.AF_UNIX:  # TLS cannot send before its handshake
            _try_send(stream.socket.fileno(), error_message(None, self._full()))
        scope.cancel()

    def _full(self) -> Unavailable:
        reason = f"{self._limit.most} clients are connected, and no more may connect"
        return Unavailable(reason, retry_after_ms=RETRY_AFTER_FULL_MS)

    async def _host(self, connection: RPCConnection, seat: Seat) -> None:
        """Serve a connection after its handshake, until its end."""
        self._connections.add(connection)
        try:
            if seat.is_refused:
                connection.refuse(b"", self._full())
                connection.stop()
            await connection.run()
        finally:
            self._connections.discard(connection)

    async def _secured(self, stream: trio.SocketStream) -> trio.abc.Stream | None:
        """Return the stream, encrypted if TLS is required; None if the client's handshake fails."""
        if stream.socket.family == socket.AF_UNIX:
            return stream
        _keep_alive(stream)
        if self._security.tls is None:
            return stream
        encrypted = trio.SSLStream(stream, self._security.tls, server_side=True, https_compatible=True)
        with trio.move_on_after(HELLO_S):
            try:
                await encrypted.do_handshake()
            except (trio.BrokenResourceError, ssl.SSLError, ssl.CertificateError):
                return None
            return encrypted
        return None

    async def _sweep(self) -> None:
        """Cancel calls of clients that are silent or do not read, and confirm other clients' calls."""
        last = trio.current_time()
        while True:
            await trio.sleep(SWEEP_S)
            now = trio.current_time()
            late = now - last - SWEEP_S  # a delayed event loop heard no client
            last = now
            for connection in self._connections:
                connection.last_heard += late
                check_connection(connection, now)


async def _host(ending: trio.Event, ended: trio.Event, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Run a nursery that outlives a surrounding cancel: until `ending`, and then until its tasks have ended."""
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await ending.wait()
    ended.set()


def check_connection(connection: RPCConnection, now: float) -> None:
    session = connection.session
    if session is None:
        return
    session.check_stalled(now)
    if session.lease_s is None or not session.num_calls:
        return
    lease_s = min(session.lease_s, MAX_LEASE_S)
    # guard: lease, msgpack-RPC
    if now - connection.last_heard > lease_s:
        session.cancel_all(lease_over(lease_s))
    else:
        session.heartbeat()


def _try_send(descriptor: int, data: bytes) -> None:
    """Send as much as a connection takes without waiting; do nothing if it is closed."""
    if descriptor < 0:
        return
    borrowed = socket.socket(fileno=descriptor)
    try:
        with suppress(OSError):
            borrowed.send(data, socket.MSG_DONTWAIT)
    finally:
        borrowed.detach()


def _keep_alive(stream: trio.SocketStream) -> None:
    """Let the kernel detect a machine that has gone without a message."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
    ):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
