"""Transports: carry a client's messages to a service and back, over ZeroMQ or msgpack-RPC, behind one interface."""

import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import trio
import zmq

from genbatch.actors.runtime.zeromq_socket import ZeroMQSocket, monitored, open_socket
from genbatch.actors.security.curve_keys import ClientKeys
from genbatch.proto.codec import MAX_FEED_BYTES, RESPONSE_LIMITS, MessageSplitter, StreamBroken, decode, encode
from genbatch.proto.errors import ErrorInfo, GenbatchError, MalformedMessage, Unauthenticated, Unavailable, from_wire
from genbatch.proto.rpc import WIRE_VERSION
from genbatch.proto.service_messages import HelloRequest
from genbatch.proto.validation import check_type


class ConnectionLost(Unavailable):
    """The connection ended while calls were open; the service may have worked on them."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the connection to {address} was lost")


OnMessage = Callable[[bytes, int], None]
OnLost = Callable[[GenbatchError, int], None]


class Transport(Protocol):
    """A transport for trio. It connects at the first send, and reconnects after a connection was lost.

    Connections are numbered from 1. One connection takes new requests; connections that were left stay for old calls.
    """

    address: str

    async def run(
        self, on_message: OnMessage, on_lost: OnLost, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the transport until cancelled.

        Args:
            on_message: called with each message and its connection; it must not block or raise.
            on_lost: called when a connection is lost, so that its calls get no answer; it must not block or raise.
            task_status: started once `send` may be called.

        Raises:
            Unavailable: the address is malformed.
        """

    async def send(self, messages: Sequence[bytes]) -> int:
        """Wait for a connection and send all messages; if cancelled, none is sent. Returns the connection's number.

        Raises:
            Unauthenticated: the service rejects this client.
        """
        ...

    def try_send(self, message: bytes, connection: int) -> bool:
        """Send over a connection without waiting; returns whether the message was sent."""

    def leave(self, connection: int) -> None:
        """Send new messages over another connection from now on; this connection stays open until `close`."""

    def close(self, connection: int) -> None:
        """Close a connection that was left."""

    def no_answer(self, timeout: float) -> str:
        """Return the error text for a `send` that timed out after `timeout` seconds."""


class SyncTransport(Protocol):
    """A transport without an event loop, for one thread."""

    address: str

    def open(self) -> None:
        """Prepare the transport; `connect` connects.

        Raises:
            Unavailable: the address is malformed.
        """

    def close(self) -> None:
        """Close the connection, after a short wait for the last messages to leave."""

    def reopen(self) -> None:
        """Close the connection, so that the next request opens a new one."""

    def unread(self) -> list[bytes]:
        """Return the messages that have arrived, without waiting."""
        ...

    def forget_losses(self) -> None:
        """Do not report connections lost so far, because no call is open."""

    def connect(self, timeout: float) -> None:
        """Wait for a connection.

        Raises:
            Unavailable: connecting timed out after `timeout` seconds, or the earlier connection is lost.
            Unauthenticated: the service rejects this client.
        """

    def send(self, message: bytes) -> None:
        """Send a message; if the connection does not take it, the service is not reading and a timeout will follow."""

    def receive(self, timeout: float) -> list[bytes]:
        """Return the messages that have arrived; waits up to `timeout` seconds for one.

        Raises:
            GenbatchError: the connection was lost and its last messages were returned, so open calls get no answer.
        """


@dataclass(frozen=True, slots=True)
class RPCAddress:
    """A Unix socket's file, or a host and a port."""

    path: str | None = None
    host: str = ""
    port: int = 0


def read_rpc_address(address: str) -> RPCAddress:
    """Parse unix://PATH, rpc://HOST:PORT or tcp://HOST:PORT.

    Raises:
        Unavailable: the address has another form.
    """
    transport, _, rest = address.partition("://")
    if transport == "unix" and rest:
        return RPCAddress(path=rest)
    host, _, port = rest.rpartition(":")
    if transport in ("rpc", "tcp") and host and port.isascii() and port.isdecimal() and int(port) < 2**16:
        return RPCAddress(host=host.removeprefix("[").removesuffix("]"), port=int(port))
    raise no_address(address, "unix://PATH or rpc://HOST:PORT")


def no_address(address: str, expected: str) -> Unavailable:
    """Return the error for a malformed address, with a hint at the right form.

    Args:
        address: the malformed address.
        expected: the forms that the client accepts.
    """
    scheme, separator, _ = address.partition("://")
    if scheme in ("http", "https"):
        reason = (
            "HTTP is for OpenAI's clients (base_url) and browsers; this client takes what the service's --bind says "
            "(ipc://PATH or tcp://HOST:PORT) or its --rpc-bind (unix://PATH or rpc://HOST:PORT)"
        )
    elif separator:
        reason = f"it must be {expected}"
    elif address.startswith(("/", ".", "~")):
        reason = f"it has no scheme; ipc://{address} is a service's --bind, unix://{address} its --rpc-bind"
    elif address.rpartition(":")[2].isdecimal():
        reason = f"it has no scheme; tcp://{address} is a service's --bind, rpc://{address} its --rpc-bind"
    else:
        reason = f"it must be {expected}"
    return Unavailable(f"{address} is not an address of a service: {reason}")


ZEROMQ_ADDRESSES = "ipc://PATH or tcp://HOST:PORT"


# Calls are counted from 1.
HELLO_MSGID = 0


class RPCLink:
    """Splits received bytes into messages, and provides the greeting.

    A client must send the greeting first over TCP, and elsewhere if it has a token.

    Args:
        address: the service's address.
        token: the client's token; None if the service needs none.
    """

    def __init__(self, address: str, token: str | None) -> None:
        self._address = address
        self._splitter = MessageSplitter(RESPONSE_LIMITS.max_bytes)
        says_hello = token is not None or not address.startswith("unix://")
        self._awaits_welcome = says_hello
        self.greeting = encode([0, HELLO_MSGID, "hello", [HelloRequest(token=token)]]) if says_hello else b""

    def receive(self, data: bytes) -> list[bytes]:
        """Return the messages that end in `data`, without the answer to the greeting.

        Raises:
            Unauthenticated: the service does not know the token.
            Unavailable: the service has no room for another client now.
            MalformedMessage, FrameTooLarge: the service does not speak the protocol.
        """
        try:
            messages = self._split(data)
            if messages and messages[0][0] & 0xF0 != _SHORT_ARRAY:
                raise MalformedMessage("the message is neither a response nor a notification")
            return self._take_welcome(messages) if self._awaits_welcome else messages
        except MalformedMessage as fault:
            raise MalformedMessage(
                f"what answers at {self._address} does not speak msgpack-RPC ({fault}): it is no service's --rpc-bind"
            ) from None

    def _split(self, data: bytes) -> list[bytes]:
        messages: list[bytes] = []
        try:
            for start in range(0, len(data), MAX_FEED_BYTES):
                messages += self._splitter.feed(data[start : start + MAX_FEED_BYTES])
        except StreamBroken as broken:
            raise broken.error from None
        return messages

    def _take_welcome(self, messages: list[bytes]) -> list[bytes]:
        others = []
        for message in messages:
            if self._awaits_welcome and _is_welcome(message):
                self._awaits_welcome = False
            else:
                others.append(message)
        return others


_SHORT_ARRAY = 0x90  # the first byte of every msgpack-RPC message; ZeroMQ, HTTP and TLS begin with other bytes


def _is_welcome(message: bytes) -> bool:
    """Return whether the message answers the greeting and accepts the client.

    Raises:
        Unauthenticated, Unavailable: the service rejects the client.
        MalformedMessage: the service does not speak the protocol.
    """
    match decode(message, RESPONSE_LIMITS):
        case [1, 0, None, dict(hello)]:
            if (version := hello.get("version", WIRE_VERSION)) != WIRE_VERSION:
                raise MalformedMessage(
                    f"the service speaks version {version} of the wire, this client knows {WIRE_VERSION}"
                )
            return True
        case [1, 0 | None, dict(error), None]:
            refusal: GenbatchError = from_wire(check_type(error, ErrorInfo))
            raise refusal if isinstance(refusal, Unauthenticated | Unavailable) else Unauthenticated(str(refusal))
    return False


# Seconds between attempts to connect, and the timeout for sending the last cancellations.
RECONNECT_S, LINGER_S = 0.05, 0.5
MAX_RECEIVE_BYTES = 2**16


class _Connection:
    """A stream and its outgoing bytes."""

    def __init__(self, number: int, stream: trio.abc.Stream, link: RPCLink) -> None:
        self.number = number
        self.scope = trio.CancelScope()
        self.stream = stream
        self.link = link
        self.mail = trio.Event()
        self.outgoing = bytearray()

    def post(self, message: bytes) -> None:
        self.outgoing += message
        self.mail.set()

    async def write(self) -> None:
        """Write until the connection breaks; `_read` reports the break."""
        while True:
            await self.mail.wait()
            self.mail = trio.Event()
            await self.flush()

    async def flush(self) -> None:
        while self.outgoing:
            data, self.outgoing = self.outgoing, bytearray()
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return


class RPCTransport:
    """Implements `Transport`.

    Args:
        address: unix://PATH or rpc://HOST:PORT.
        token, tls: see RPCClient.
    """

    def __init__(self, address: str, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self._token = token
        self._tls = tls
        self._refusal: Unauthenticated | None = None
        self._connection: _Connection | None = None
        self._left: dict[int, _Connection] = {}
        self._numbers = count(1)
        self._connecting = trio.Lock()
        self._tasks: trio.Nursery
        self._on_message: OnMessage
        self._on_lost: OnLost

    async def run(
        self, on_message: OnMessage, on_lost: OnLost, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """See `Transport.run`."""
        self._where = read_rpc_address(self.address)
        self._on_message, self._on_lost = on_message, on_lost
        async with trio.open_nursery() as self._tasks:
            task_status.started()
            await trio.sleep_forever()

    async def send(self, messages: Sequence[bytes]) -> int:
        """See `Transport.send`."""
        async with self._connecting:
            connection = self._connection or await self._connect()
        if self._refusal is not None:
            raise self._refusal
        for message in messages:
            connection.post(message)
        return connection.number

    def try_send(self, message: bytes, connection: int) -> bool:
        """See `Transport.try_send`."""
        current = self._connection
        there = current if current is not None and current.number == connection else self._left.get(connection)
        if there is None:
            return False
        there.post(message)
        return True

    def leave(self, connection: int) -> None:
        """See `Transport.leave`."""
        if self._connection is not None and self._connection.number == connection:
            self._left[connection] = self._connection
            self._connection = None

    def close(self, connection: int) -> None:
        """See `Transport.close`."""
        if connection in self._left:
            self._left.pop(connection).scope.cancel()

    def no_answer(self, timeout: float) -> str:
        """See `Transport.no_answer`."""
        return f"no service answers at {self.address} within {timeout:g} s"

    async def _connect(self) -> _Connection:
        while True:
            try:
                stream = await self._open_stream()
                break
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(RECONNECT_S)
        self._refusal = None
        connection = _Connection(next(self._numbers), stream, RPCLink(self.address, self._token))
        connection.post(connection.link.greeting)
        self._connection = connection
        self._tasks.start_soon(self._serve, connection)
        return connection

    async def _open_stream(self) -> trio.abc.Stream:
        where = self._where
        if where.path is not None:
            return await _open_unix_stream(where.path)
        plain = await trio.open_tcp_stream(where.host, where.port)
        if self._tls is None:
            return plain
        encrypted = trio.SSLStream(plain, self._tls, server_hostname=where.host, https_compatible=True)
        try:
            await encrypted.do_handshake()
        except BaseException as error:
            await trio.aclose_forcefully(encrypted)
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                raise Unauthenticated(f"the service at {self.address} is not trusted: {error.__cause__}") from None
            raise
        return encrypted

    async def _serve(self, connection: _Connection) -> None:
        with connection.scope:
            await self._serve_until_lost(connection)

    async def _serve_until_lost(self, connection: _Connection) -> None:
        """Read until the connection ends. If the client is closed, write the remaining bytes first."""
        lost: GenbatchError = ConnectionLost(self.address)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.write)
                try:
                    await self._read(connection)
                except GenbatchError as error:
                    lost = error
                nursery.cancel_scope.cancel()
        except trio.Cancelled:
            with trio.move_on_after(LINGER_S, shield=True):
                await connection.flush()
            raise
        finally:
            if self._connection is connection:
                self._connection = None
            self._left.pop(connection.number, None)
            await trio.aclose_forcefully(connection.stream)
        if isinstance(lost, Unauthenticated):
            self._refusal = lost
        self._on_lost(lost, connection.number)

    async def _read(self, connection: _Connection) -> None:
        while True:
            try:
                data = await connection.stream.receive_some(MAX_RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            for message in connection.link.receive(bytes(data)):
                self._on_message(message, connection.number)


async def _open_unix_stream(path: str) -> trio.SocketStream:
    """Connect to a Unix socket's file.

    Raises:
        OSError: no service listens there, or the queue of connecting clients is full.
    """
    stream = await trio.open_unix_socket(path)
    try:
        # If the listener's queue is full, a Unix socket does not connect at all (EAGAIN). Trio treats this as a pending
        # connection and then as an established one, so check the peer here.
        stream.socket.getpeername()
    except OSError:
        await trio.aclose_forcefully(stream)
        raise
    return stream


# Milliseconds for sending the last cancellations.
LINGER_MS = 500
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# The monitor events for a client: a connection is established, a connection ends, the service rejects the client.
CONNECTION_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSALS
_EVENT = struct.Struct("=HI")  # the event's kind; a descriptor, a status or a reason


def load_client_keys(client_key: str | None, server_key: str | None) -> ClientKeys | None:
    """Load the keys from these files; returns None if no file is given.

    Raises:
        KeyFileError: a file is missing, faulty, or exposed to others.
        ValueError: a server key without a client key.
    """
    if client_key is not None:
        return ClientKeys.load(client_key, server_key)
    if server_key is not None:
        raise ValueError("server_key without client_key: a service with keys requires the client's keys, too")
    return None


def socket_options(address: str, keys: ClientKeys | None) -> Iterator[tuple[int, Any]]:
    """Yield a DEALER's own socket options, to be set before it connects."""
    yield zmq.MAXMSGSIZE, RESPONSE_LIMITS.max_bytes
    yield zmq.RCVHWM, 0  # no limit: answers are bounded by our requests, and a full queue would cut the connection
    yield zmq.IMMEDIATE, 1  # queue nothing before the connection is established
    yield zmq.IPV6, int(address.startswith("tcp://["))
    if keys is not None:
        yield from keys.options()


def is_connected(event: bytes) -> bool:
    """Return whether the monitor's event reports an established connection."""
    kind, _ = _EVENT.unpack(event)
    return bool(kind == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def read_refusal(event: bytes, address: str, *, has_keys: bool) -> Unauthenticated | None:
    """Return the error if the monitor's event reports that the service rejects this client; else None."""
    kind, _ = _EVENT.unpack(event)
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Unauthenticated(f"the service at {address} does not have this client's key on its list")
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if has_keys:
            return Unauthenticated(
                f"the service at {address} has no keys: connect without one, if you trust the network"
            )
        return Unauthenticated(f"the service at {address} asks for a key: give client_key (--client-key FILE)")
    return None


def no_answer(address: str, timeout: float, *, has_keys: bool) -> str:
    """Return the error text for a connection that timed out."""
    other = "another service than the server key belongs to" if has_keys else "one that asks for a key"
    hint = f", or it is {other}, or the address is no --bind" if has_keys or address.startswith("tcp://") else ""
    return f"no service answers at {address} within {timeout:g} s{hint}"


MESSAGES_PER_TURN = 64


class _ZeroMQConnection:
    """A socket and its connection; ZeroMQ reconnects it after a loss."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.scope = trio.CancelScope()
        self.socket: ZeroMQSocket | None = None  # None before its task begins and after it ends
        # ZeroMQ accepts messages between two connections and loses them, so wait for this event before sending.
        self.connected = trio.Event()


class ZeroMQTransport:
    """Implements `Transport`; ZeroMQ itself connects and reconnects.

    Args:
        address: ipc://PATH or tcp://HOST:PORT.
        keys: the client's keys, for a service that requires keys.
    """

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        self.address = address
        self._keys = keys
        self._refusal: Unauthenticated | None = None
        self._connecting: set[trio.CancelScope] = set()
        self._current = _ZeroMQConnection(1)
        self._left: dict[int, _ZeroMQConnection] = {}
        self._is_closed = False
        self._tasks: trio.Nursery
        self._on_message: OnMessage
        self._on_lost: OnLost

    async def run(
        self, on_message: OnMessage, on_lost: OnLost, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """See `Transport.run`."""
        self._on_message, self._on_lost = on_message, on_lost
        try:
            async with trio.open_nursery() as self._tasks:
                await self._tasks.start(self._serve, self._current)
                task_status.started()
        except* Unavailable as group:
            raise group.exceptions[0] from None
        finally:
            self._is_closed = True
            self._current.connected.set()  # wake the waiting senders, which then raise Unavailable

    async def send(self, messages: Sequence[bytes]) -> int:
        """See `Transport.send`."""
        with trio.CancelScope() as scope:
            self._connecting.add(scope)
            try:
                if self._refusal is None:
                    connection = await self._connected()
                    for message in messages:
                        assert connection.socket is not None
                        await connection.socket.send([message])
                    return connection.number
            finally:
                self._connecting.remove(scope)
        assert self._refusal is not None
        raise self._refusal

    async def _connected(self) -> _ZeroMQConnection:
        """Wait until the connection for new messages is established, and return it."""
        while True:
            connection = self._current
            await connection.connected.wait()
            if self._is_closed:
                raise Unavailable(f"the connection to {self.address} was closed")
            if connection is self._current:
                return connection

    def try_send(self, message: bytes, connection: int) -> bool:
        """See `Transport.try_send`."""
        there = self._current if self._current.number == connection else self._left.get(connection)
        return there is not None and there.socket is not None and there.socket.try_send([message])

    def leave(self, connection: int) -> None:
        """See `Transport.leave`."""
        if self._current.number == connection:
            self._left[connection] = self._current
            self._current = _ZeroMQConnection(connection + 1)
            self._tasks.start_soon(self._serve, self._current)

    def close(self, connection: int) -> None:
        """See `Transport.close`."""
        if connection in self._left:
            self._left.pop(connection).scope.cancel()

    def no_answer(self, timeout: float) -> str:
        """See `Transport.no_answer`."""
        return no_answer(self.address, timeout, has_keys=self._keys is not None)

    async def _serve(
        self, connection: _ZeroMQConnection, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the connection until it is closed."""
        with connection.scope:
            async with open_socket(zmq.DEALER, linger_ms=LINGER_MS) as socket:
                for option, value in socket_options(self.address, self._keys):
                    socket.set(option, value)
                async with monitored(socket, CONNECTION_EVENTS) as monitor:
                    try:
                        socket.connect(self.address)
                    except zmq.ZMQError as error:
                        raise no_address(self.address, ZEROMQ_ADDRESSES) from error
                    connection.socket = socket
                    task_status.started()
                    try:
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(self._notice_disconnection, connection, monitor)
                            await self._receive(connection, socket)
                    finally:
                        connection.socket = None

    async def _notice_disconnection(self, connection: _ZeroMQConnection, monitor: ZeroMQSocket) -> None:
        while True:
            event, *_ = await monitor.recv()
            if is_connected(event):
                connection.connected.set()
                continue
            if connection.connected.is_set():
                connection.connected = trio.Event()
            self._refusal = read_refusal(event, self.address, has_keys=self._keys is not None) or self._refusal
            lost = self._refusal or ConnectionLost(self.address)
            self._on_lost(lost, connection.number)
            if self._refusal is not None:  # ZeroMQ does not try again
                for scope in self._connecting:
                    scope.cancel()

    async def _receive(self, connection: _ZeroMQConnection, socket: ZeroMQSocket) -> None:
        while True:
            for frames in await socket.recv_many(MESSAGES_PER_TURN):
                self._on_message(frames[-1], connection.number)
            await trio.lowlevel.checkpoint()
