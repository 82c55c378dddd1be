"""RPCGateway: takes requests of msgpack-RPC clients over TCP and Unix sockets.

    gateway = RPCGateway(Dispatcher(batcher), "unix:///run/genbatch/rpc.sock")
    await nursery.start(gateway.run)
    print(gateway.address)

The same sessions, methods and limits as over ZeroMQ; here a connection's end tells at once that its client is gone. An
RPCConnection is one client on a byte stream, from its first byte to its end. Over TCP, and where tokens are asked for,
the first request is a `hello`, and nothing else is acted on before it: a web page can connect to a port of this
machine, too, but cannot say hello (ADR 32).
"""

import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import trio

from genbatch.actors.gateways.accepting import accept_from, has_hung_up
from genbatch.actors.gateways.addresses import check_rpc_address
from genbatch.actors.gateways.connection_limit import (
    MAX_HALF_MESSAGES,
    ConnectionLimit,
    MessageRoom,
    Seat,
    Share,
    max_connections,
)
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.listening import ListeningSockets, address_of, as_listeners
from genbatch.actors.gateways.peers import Peer, account_of_socket
from genbatch.actors.gateways.session import MAX_WAITING, CallHost, Outbox, RPCSession
from genbatch.actors.gateways.zeromq_gateway import MAX_LEASE_S
from genbatch.actors.security.security import Authenticate, Security
from genbatch.proto.codec import MAX_FEED_BYTES, MAX_TRANSPORT_BYTES, MessageSplitter, StreamBroken
from genbatch.proto.errors import Cancelled, GenbatchError, Unauthenticated, Unavailable
from genbatch.proto.messages import HelloRequest, check_type
from genbatch.proto.rpc import CallReceived, Refused, ServerConnection, error_message

logger = logging.getLogger(__name__)

# Nobody who has not said who they are may make the service hold more.
MAX_HELLO_BYTES = 4096


def read_hello(event: CallReceived | Refused) -> tuple[int | None, HelloRequest | None]:
    """The msgid of a request, and the request if it is a `hello`; None for what it is not."""
    if isinstance(event, Refused):
        return None, None
    if event.method != "hello":
        return event.msgid, None
    try:
        hello: HelloRequest = check_type(event.params, HelloRequest)
    except GenbatchError:
        return event.msgid, None
    return event.msgid, hello


# Seconds in which a client must end a message that it has begun, say who it is, and read something.
MESSAGE_S, HELLO_S, STALLED_S = 30.0, 5.0, 10.0
# Seconds in which the last messages may leave.
LINGER_S = 0.5
# Seconds between looks for clients that are silent or read nothing.
SWEEP_S = 0.5
# Seconds until the first look whether a client that has ended its side is gone; then twice as many, and so on.
PROBE_S = 0.01
# Bytes given to the kernel at once.
MAX_SEND_BYTES = 2**16
# Messages acted on before other tasks run.
MESSAGES_PER_TURN = 64
# Milliseconds after which a client may come again that found no room.
RETRY_AFTER_FULL_MS = 1000


class RPCConnection:
    """Reads and writes one stream.

    Args:
        stream: connected, and through with its TLS handshake where it has one.
        dispatcher: runs the methods.
        host: where calls run.
        room: what its half messages share with those of other connections.
        peer: its name and its account.
        authenticate: tells whose a token is; None lets everybody in who can reach the address.
        asks_for_hello: whether a `hello` must come before all else; so it is where a token is asked for.
        on_sense: called when the client has said hello, or its first message where nobody asks.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        dispatcher: Dispatcher,
        host: CallHost,
        *,
        room: MessageRoom,
        peer: Peer,
        authenticate: Authenticate | None = None,
        asks_for_hello: bool = False,
        on_sense: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = peer.name
        self._peer = peer
        self.last_heard = trio.current_time()
        self.session: RPCSession | None = None  # None before the client has said hello
        self._stream = stream
        self._dispatcher = dispatcher
        self._calls = host
        self._room = room
        self._authenticate = authenticate
        self._asks_for_hello = asks_for_hello or authenticate is not None
        self._hello_by = trio.current_time() + HELLO_S
        self._on_sense = on_sense
        self._token = ""
        self._outbox = Outbox()
        self._mail = trio.Event()  # there is something in the outbox
        self._sent = trio.Event()  # there is less in it
        self._is_sending = False
        self._reading = trio.CancelScope()
        # guard: size before the token
        self._splitter = MessageSplitter(MAX_HELLO_BYTES if self._asks_for_hello else MAX_TRANSPORT_BYTES)

    async def run(self) -> None:
        """Serves until the client is gone, makes no sense any more, or `stop`; its calls end with it."""
        if not self._asks_for_hello:
            self.session = self._new_session(None)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, nursery.cancel_scope)
                is_there = True
                with self._reading, self._room.share(self._give_up_message) as share:
                    is_there = await self._read(share)
                self._splitter.clear()  # at once: this object is garbage of a kind that is looked for seldom
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
        """Ends it after a last moment for what is still to be sent."""
        self._reading.cancel()

    def _give_up_message(self) -> None:
        """Others need the memory of the message that does not end."""
        error = Unavailable(
            f"messages that do not end have {self._room.max_bytes} bytes", retry_after_ms=RETRY_AFTER_FULL_MS
        )
        self.refuse(self._splitter.head(), error)
        self._splitter.clear()
        self.stop()

    def cancel_all(self, reason: GenbatchError) -> None:
        """Ends its calls."""
        if self.session is not None:
            self.session.cancel_all(reason)

    def refuse(self, head: bytes, error: GenbatchError) -> None:
        """Answers a message that was not received whole, or the connection as such.

        Args:
            head: the message's beginning.
        """
        if self.session is not None:
            self.session.refuse(head, error)
        else:
            self._turn_away(None, error)

    def _turn_away(self, msgid: int | None, error: GenbatchError) -> None:
        """Answers a client that has not said hello."""
        logger.info("turned client %s away: %s", self.client, error)
        self._outbox.post(error_message(msgid, error))
        self._wake()

    async def _part(self) -> None:
        """Lets the last messages arrive: a connection closed with something unread takes them back."""
        await self._wait_until_waiting(0)
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            try:
                await self._stream.send_eof()
                while await self._stream.receive_some(MAX_FEED_BYTES):
                    await self._calls.turn_to_end()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def _answer_the_last(self) -> None:
        """Waits for the open calls of a client that has ended its side, and may still read; not for one that is gone.

        Over TCP a client that is gone looks the same until something is sent, to which its machine then objects.
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
        """Acts on what comes until nothing can be understood; returns whether the client is still there."""
        while data := await self._receive_some():
            self.last_heard = trio.current_time()
            try:
                for count, message in enumerate(self._splitter.feed(data), 1):
                    if not self._act(message):
                        return True
                    if count % MESSAGES_PER_TURN == 0:
                        await trio.lowlevel.checkpoint()
                    # Reads no more from a client that leaves its answers unread: its requests wait there, not here.
                    await self._wait_until_waiting(MAX_WAITING // 2)
            except StreamBroken as broken:
                self.refuse(broken.head, broken.error)
                return True
            share.holds(self._splitter.num_held)
        return data is None

    async def _receive_some(self) -> bytes | None:
        """The next bytes; none at the client's end, None when it takes too long over what it has begun."""
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
        """Acts on a message; returns whether the connection goes on."""
        if self.session is None:
            return self._greet(message)
        # guard: tokens taken off the list
        if self._authenticate is not None and self._authenticate(self._token) != self.session.tenant:
            self.session.refuse(message, Unauthenticated("the token is no longer valid"))
            self.cancel_all(Unauthenticated("the token is no longer valid"))
            return False
        is_message = self.session.receive(message)
        if is_message:
            self._on_sense()
        return is_message

    def _greet(self, message: bytes) -> bool:
        event = ServerConnection(max_calls=1).receive(message)
        if not isinstance(event, CallReceived | Refused):
            return True  # a notification, which clients of Neovim's begin with
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
        self._on_sense()
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
        """Sends what there is, as much as there is at once; ends the connection when nobody takes it."""
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
        """Whether the client took it, in time."""
        with trio.move_on_after(STALLED_S):
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            return True
        return False

    async def _wait_until_waiting(self, count: int) -> None:
        """Waits until no more than `count` messages are to be sent; 0: until all of them have been."""
        while self._outbox.num_waiting > count or (count == 0 and self._is_sending):
            self._sent = trio.Event()
            await self._sent.wait()


# Seconds of silence after which the kernel asks whether the other machine is still there, and how often it does.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 5, 2, 3


class RPCGateway:
    """Listens at one address; `run` is a child for a supervisor.

    Args:
        dispatcher: what the methods do.
        address: unix://PATH, or tcp://HOST:PORT; a port of 0 or "*" is chosen.
        security: its `tokens` are asked for, and its `tls` encrypts TCP. Without both HOST must be this machine's own.
        sockets: where it listens; None opens a socket for this gateway alone.
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
        self._room = MessageRoom(MAX_HALF_MESSAGES)
        self._calls: CallHost

    @property
    def num_calls(self) -> int:
        """Calls that have not ended, of all clients."""
        return sum(connection.session.num_calls for connection in self._connections if connection.session)

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled, then ends every call with Unavailable; `started` with the address once it listens.

        Raises:
            AddressError: it cannot or must not listen there.
        """
        check_rpc_address(self.address, lacking=self._security.lacking_for_tokens)
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
        """Clients that are connected."""
        return len(self._connections)

    def retire(self) -> None:
        """Accept no more connections, and ask clients to open their next one: another service has the sockets."""
        self._accepting.cancel()
        self._calls.is_retiring = True
        for connection in self._connections:
            if connection.session is not None:
                connection.session.go_away()

    async def _end(self, stopping: trio.Event, calls_ended: trio.Event) -> None:
        """Waits to be cancelled, then ends calls, sends their finals, and ends connections."""
        try:
            await trio.sleep_forever()
        finally:
            if self._owns_sockets:  # before anything is waited for: the next service may be about to open its own
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
        """One client, from its connection to its end; raises nothing."""
        authenticate: Authenticate | None = None
        if self._security.tokens is not None:
            authenticate = self._security.tokens.tenant
        try:
            async with stream:
                # Pushed out before the client has said anything that makes sense: nothing is lost.
                with trio.CancelScope() as scope, self._limit.seat(partial(self._push_out, stream, scope)) as seat:
                    secured = await self._secured(stream)
                    if secured is None:
                        return
                    connection = RPCConnection(
                        secured,
                        self._dispatcher,
                        self._calls,
                        room=self._room,
                        peer=Peer(f"rpc:{next(self._names)}", account_of_socket(stream.socket)),
                        authenticate=authenticate,
                        # guard: a hello first, over TCP
                        asks_for_hello=stream.socket.family != socket.AF_UNIX,
                        on_sense=seat.settle,
                    )
                    await self._host(connection, seat)
        except Exception:  # our own bug ends one connection, not the gateway
            logger.exception("a connection failed")

    def _push_out(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        """Ends a connection that has said nothing yet; what it may be about to say it can say again."""
        if self._security.tls is None or stream.socket.family == socket.AF_UNIX:  # through TLS nothing is said at once
            _try_send(stream.socket.fileno(), error_message(None, self._full()))
        scope.cancel()

    def _full(self) -> Unavailable:
        reason = f"{self._limit.most} clients are connected, more are not taken"
        return Unavailable(reason, retry_after_ms=RETRY_AFTER_FULL_MS)

    async def _host(self, connection: RPCConnection, seat: Seat) -> None:
        """A connection that is through with its handshake, until its end."""
        self._connections.add(connection)
        try:
            if seat.is_refused:
                connection.refuse(b"", self._full())
                connection.stop()
            await connection.run()
        finally:
            self._connections.discard(connection)

    async def _secured(self, stream: trio.SocketStream) -> trio.abc.Stream | None:
        """The stream, encrypted where that is asked for; None if the client does not do its part of it."""
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
        """Cancels calls of clients that are silent or do not read, confirms those of others."""
        last = trio.current_time()
        while True:
            await trio.sleep(SWEEP_S)
            now = trio.current_time()
            late = now - last - SWEEP_S  # while the event loop was held up nobody could be heard
            last = now
            for connection in self._connections:
                connection.last_heard += late
                check_connection(connection, now)


async def _host(ending: trio.Event, ended: trio.Event, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """A nursery that outlives what is cancelled around it: until `ending`, and then until its tasks have ended."""
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
        session.cancel_all(Cancelled(f"the client was not heard for {lease_s:g} s"))
    else:
        session.heartbeat()


def _try_send(descriptor: int, data: bytes) -> None:
    """Sends what a connection takes without waiting; nothing if it is closed."""
    if descriptor < 0:
        return
    borrowed = socket.socket(fileno=descriptor)
    try:
        with suppress(OSError):
            borrowed.send(data, socket.MSG_DONTWAIT)
    finally:
        borrowed.detach()


def _keep_alive(stream: trio.SocketStream) -> None:
    """Lets the kernel find out about a machine that is gone without a word."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
    ):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
