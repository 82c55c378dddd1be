"""ZeroMQGuard: admits connections to the ZeroMQ gateway, bounds their number, and reports those that have ended.

    async with open_guard(socket, keys) as guard:
        address = socket.bind(...)
        nursery.start_soon(guard.run, on_ended)

ZeroMQConnections: a ROUTER reports nothing about its connections, but its monitor does. The monitor sends an event at
the start and the end of each connection, with the file descriptor, which each message carries, too. The event of an
end comes before another client can take the identity of the ended connection.

ZAPHandler: tells libzmq which clients' keys are on the list (ZeroMQ RFC 27). libzmq asks at each handshake, over a
socket inside the process, before it accepts a frame of the client. After that, every message carries the client's key
as its User-Id.
"""

import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import trio
import zmq
from zmq.utils import z85

from genbatch.actors.gateways.accepting import max_connections
from genbatch.actors.gateways.unfinished_messages import UnfinishedMessages
from genbatch.actors.runtime.zeromq_socket import Frames, ZeroMQSocket, monitored, pumped
from genbatch.actors.security.curve_keys import ServerKeys

logger = logging.getLogger(__name__)

# The most that one client may send while unread messages remain: far more than 256 open calls need.
MAX_MESSAGES_AT_ONCE, MAX_BYTES_AT_ONCE = 16384, 2**28
# A TCP connection has a second descriptor, by which its bytes are counted.
DESCRIPTORS = 2
# The share by which connections may exceed the limit until all received messages are taken.
SPARE = 4
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=HI")  # the event; the file descriptor


class ZeroMQConnections:
    """The connections of one socket, by file descriptor, as of the last monitor events.

    Args:
        monitor: receives EVENTS of the socket.
        limit: most connections. Above the limit, the longest silent ones are ended: a flood of silent connections
            pushes itself out, and a client that speaks at once gets in.
        has_unread: whether messages have arrived that were not taken yet: a silent client may have sent one of them.
        is_encrypted: whether the connections use CURVE.
    """

    def __init__(
        self,
        monitor: ZeroMQSocket,
        limit: int,
        has_unread: Callable[[], bool] = lambda: False,
        *,
        is_encrypted: bool = False,
    ) -> None:
        self._monitor = monitor
        self._limit = limit
        self._has_unread = has_unread
        self.has_accepted = False  # set at the first connection
        self._name: int | str | None = None
        # By identity: messages and bytes since the queue was last empty.
        self._taken: dict[bytes, list[int]] = {}
        self._identities: dict[int, bytes] = {}  # of the clients that were heard
        self.unfinished = UnfinishedMessages(self.end, has_unread, is_encrypted=is_encrypted)
        self._open: set[int] = set()
        self._silent: dict[int, None] = {}  # without a message so far, oldest first
        self._ending: set[int] = set()  # ended by us, and not yet reported by libzmq

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: int) -> bool:
        return connection in self._open and connection not in self._ending

    def listens_at(self, address: str) -> None:
        """Note the address of the bound socket; before that, no connection is ended."""
        transport, _, rest = address.partition("://")
        self._name = int(rest.rpartition(":")[2]) if transport == "tcp" else rest

    def took(self, connection: int | None, identity: bytes, frames: Sequence[bytes]) -> bool:
        """Count a message; return whether to read it, or else end the client's connection.

        libzmq's own bound on a client's queue is not used (see RCVHWM), so a flood must be cut off here.
        """
        self.unfinished.took(connection, frames)
        if connection is None or connection not in self:
            return False  # the client is gone, so no answer is needed
        counts = self._taken.setdefault(identity, [0, 0])
        counts[0] += 1
        counts[1] += sum(map(len, frames))
        # guard: flood of messages
        if counts[0] <= MAX_MESSAGES_AT_ONCE and counts[1] <= MAX_BYTES_AT_ONCE:
            return True
        # Messages that an ended connection has left carry the descriptor of the connection that has it now.
        # guard: leftovers beside a new connection
        if self._identities.get(connection) == identity and self.unfinished.has_read(connection, sum(counts)):
            logger.warning("a client sent %d messages and %d bytes at once, and was cut off", *counts)
            self.end(connection)
        return False

    def emptied(self) -> None:
        """Reset the counts, since all received messages were taken; silent clients have sent nothing."""
        self._taken.clear()
        self.unfinished.emptied()
        self._keep_limit()

    def heard(self, connection: int, identity: bytes) -> None:
        """Note a connection's first message, which shows that its client has passed the handshake."""
        self._silent.pop(connection, None)
        self._identities[connection] = identity

    async def changed(self) -> list[int]:
        """Wait until connections begin or end; return the ended ones in order."""
        ended = self._take(await self._monitor.recv_many(1024))
        self._keep_limit()
        return ended

    def ended(self) -> list[int]:
        """Return the connections that have ended since the last call."""
        return self._take(self._monitor.try_recv_many(1024))

    def _take(self, messages: list[Frames]) -> list[int]:
        ended = []
        for event, _address in messages:
            kind, connection = _EVENT.unpack(event)
            if kind == zmq.EVENT_ACCEPTED:
                self.has_accepted = True
                self._open.add(connection)
                self._silent[connection] = None
                if isinstance(self._name, int):  # only the owner can connect to a socket file
                    self.unfinished.begin(connection)
            else:
                self._open.discard(connection)
                self._silent.pop(connection, None)
                self._ending.discard(connection)
                self._identities.pop(connection, None)
                self.unfinished.ended(connection)
                ended.append(connection)
        return ended

    def _keep_limit(self) -> None:
        """End silent connections above the limit; unread messages raise the limit, and cannot disable it."""
        limit = self._limit + self._limit // SPARE if self._has_unread() else self._limit
        while self._silent and len(self._open) - len(self._ending) > limit:
            self.end(next(iter(self._silent)))

    def end(self, connection: int) -> None:
        """End a connection; libzmq reports the end later."""
        self._silent.pop(connection, None)
        self._ending.add(connection)
        if not self.unfinished.shut_down(connection) and self._name is not None:
            _shut_down(connection, self._name)


def _shut_down(connection: int, name: int | str) -> None:
    """End a connection that libzmq owns; libzmq then notices and closes it.

    libzmq may have closed the connection just now, and its descriptor may belong to another file. Such a file must not
    be touched. Another connection of ours may be ended, since its client reconnects by itself.

    Args:
        name: the port or the path at which the connection came in.
    """
    with contextlib.suppress(OSError):  # no socket, or no longer connected
        borrowed = socket.socket(fileno=connection)
        try:
            borrowed.getpeername()  # fails for a listening socket
            local = borrowed.getsockname()
            if name == (local[1] if isinstance(local, tuple) else local):
                borrowed.shutdown(socket.SHUT_RDWR)
        finally:
            borrowed.detach()


ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"genbatch"
VERSION = b"1.0"


class ZAPHandler:
    """Answers libzmq's questions for one context; made by `open_zap_handler`.

    Args:
        socket: bound to the address at which libzmq asks.
        keys: the service's keys, with the list.
    """

    def __init__(self, socket: ZeroMQSocket, keys: ServerKeys) -> None:
        self._socket = socket
        self._keys = keys

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            question = await self._socket.recv()
            await self._socket.send(self._answer(question))

    def _answer(self, question: Frames) -> Frames:
        """Return [version, request id, status, text, user id, metadata]; libzmq checks each part."""
        match question:
            case [version, request_id, domain, address, _identity, mechanism, *credentials]:
                pass
            case _:
                return [VERSION, b"", b"500", b"not a question", b"", b""]
        if (version, domain, mechanism, len(credentials)) != (VERSION, DOMAIN, b"CURVE", 1):
            return [VERSION, request_id, b"500", b"not a question of this service's", b"", b""]
        key = z85.encode(credentials[0])
        name = self._keys.client_name(key.decode())
        # guard: list of keys
        if name is None:
            logger.info("refused a ZeroMQ client at %s: its key %s is not on the list", address.decode(), key.decode())
            return [VERSION, request_id, b"400", b"the key is not on the list", b"", b""]
        return [VERSION, request_id, b"200", b"OK", key, b""]


@asynccontextmanager
async def open_zap_handler(socket: ZeroMQSocket, keys: ServerKeys) -> AsyncIterator[ZAPHandler]:
    """Make an unbound socket admit only clients with keys on the list.

    Args:
        socket: the service's socket.
        keys: the service's own keys, and the list.
    """
    async with pumped(socket.context.socket(zmq.REP)) as answers:
        answers.bind(ADDRESS)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.pair.secret)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer, libzmq admits no client
        yield ZAPHandler(answers, keys)


OnEnded = Callable[[list[int]], None]


class ZeroMQGuard:
    """Guards one listening socket; made by `open_guard`.

    Args:
        connections: the socket's connections.
        keys: the list; None admits every client that can reach the address.
        zap: answers for `keys`.
    """

    def __init__(self, connections: ZeroMQConnections, keys: ServerKeys | None, zap: ZAPHandler | None) -> None:
        self.connections = connections
        self._keys = keys
        self._zap = zap

    @property
    def asks_for_keys(self) -> bool:
        """True if messages carry their senders' keys."""
        return self._keys is not None

    def is_welcome(self, key: str) -> bool:
        """Return whether a key, in Z85, is still on the list; always True without keys."""
        return self._keys is None or self._keys.client_name(key) is not None

    def tenant(self, key: str) -> str | None:
        """Return the tenant of a key: "" if the key is not on the list; None without keys."""
        return None if self._keys is None else self._keys.client_name(key) or ""

    async def run(self, on_ended: OnEnded) -> None:
        """Guard the socket until cancelled; `on_ended` gets the file descriptors of ended connections."""
        async with trio.open_nursery() as nursery:
            if self._zap is not None:
                nursery.start_soon(self._zap.run)
            nursery.start_soon(self.connections.unfinished.watch)
            while True:
                on_ended(await self.connections.changed())


@asynccontextmanager
async def open_guard(socket: ZeroMQSocket, keys: ServerKeys | None) -> AsyncIterator[ZeroMQGuard]:
    """Put a guard at a ROUTER that is not bound yet.

    Args:
        keys: the service's own keys and the list; None admits every client that can reach the address.
    """
    async with AsyncExitStack() as stack:
        # A socket with a domain refuses the greetings of ZMTP 1.0 and 2.0, which cannot show a key. libzmq takes any
        # first byte but 0xFF, such as that of a web page's POST, for a greeting of ZMTP 1.0.
        # guard: old greetings
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        monitor = await stack.enter_async_context(monitored(socket, EVENTS))
        zap = await stack.enter_async_context(open_zap_handler(socket, keys)) if keys is not None else None
        connections = ZeroMQConnections(
            monitor, max_connections() // DESCRIPTORS, socket.has_messages, is_encrypted=keys is not None
        )
        yield ZeroMQGuard(connections, keys, zap)
