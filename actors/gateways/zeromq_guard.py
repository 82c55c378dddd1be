"""ZeroMQGuard: who gets a connection to the ZeroMQ gateway, how many there are, and which have ended.

    async with open_guard(socket, keys) as guard:
        address = socket.bind(...)
        nursery.start_soon(guard.run, on_ended)

ZeroMQConnections: a ROUTER tells nothing of its connections. Its monitor does: an event at each one's start and end,
with the file descriptor, which each message carries too. An end is told before another client can take the identity
that became free by it.

ZAPHandler: tells libzmq which clients' keys are on the list (ZeroMQ RFC 27). libzmq asks over a socket inside the
process, at each handshake, before it lets one frame of the client in. The key that was shown comes with every message
afterwards, as its User-Id.
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

from genbatch.actors.gateways.connection_limit import max_connections
from genbatch.actors.gateways.unfinished_messages import UnfinishedMessages
from genbatch.actors.runtime.zeromq_socket import Frames, ZeroMQSocket, monitored, pumped
from genbatch.actors.security.curve_keys import ServerKeys

logger = logging.getLogger(__name__)

# What one client may send while there is always something left to take: far more than 256 open calls have to say.
MAX_MESSAGES_AT_ONCE, MAX_BYTES_AT_ONCE = 16384, 2**28
# A share of the limit that may come beyond it until what has come is taken.
SPARE = 4
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=HI")  # what happened; the file descriptor


class ZeroMQConnections:
    """The connections of one socket, by file descriptor, as of the last look.

    Args:
        monitor: receives EVENTS of the socket.
        limit: most connections. With more, those that have been silent longest are ended: a flood of
            connections that never speak pushes itself out, and whoever speaks at once gets in.
        has_unread: whether messages have come that nobody has taken yet: who counts as silent may have sent one.
        is_encrypted: whether they use CURVE.
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
        self.has_accepted = False  # there was a connection
        self._name: int | str | None = None
        self._taken: dict[int, list[int]] = {}  # messages and bytes that came by it since the queue was last empty
        self.unfinished = UnfinishedMessages(self.end, has_unread, is_encrypted=is_encrypted)
        self._open: set[int] = set()
        self._silent: dict[int, None] = {}  # no message has come yet, oldest first
        self._ending: set[int] = set()  # we have ended it, libzmq has not said so yet

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: int) -> bool:
        return connection in self._open and connection not in self._ending

    def listens_at(self, address: str) -> None:
        """The socket is bound; until then nothing is limited."""
        transport, _, rest = address.partition("://")
        self._name = int(rest.rpartition(":")[2]) if transport == "tcp" else rest

    def took(self, connection: int, frames: Sequence[bytes]) -> bool:
        """Counts a message that came by it; returns whether it may send more, or else ends it.

        libzmq's own bound on a client's queue is not used (see RCVHWM), so a flood must be cut off.
        """
        self.unfinished.took(connection, frames)
        counts = self._taken.setdefault(connection, [0, 0])
        counts[0] += 1
        counts[1] += sum(map(len, frames))
        # guard: flood of messages
        if counts[0] <= MAX_MESSAGES_AT_ONCE and counts[1] <= MAX_BYTES_AT_ONCE:
            return True
        if connection in self:
            logger.warning("a client sent %d messages and %d bytes at once, and was cut off", *counts)
            self.end(connection)
        return False

    def emptied(self) -> None:
        """All that had come was taken: nobody floods, and who is silent has said nothing."""
        self._taken.clear()
        self._keep_limit()

    def heard(self, connection: int) -> None:
        """A message came by it, so its client has passed the handshake."""
        self._silent.pop(connection, None)

    async def changed(self) -> list[int]:
        """Waits until connections begin or end; returns those that have ended, in their order."""
        ended = self._take(await self._monitor.recv_many(1024))
        self._keep_limit()
        return ended

    def ended(self) -> list[int]:
        """Connections that have ended since the last look."""
        return self._take(self._monitor.try_recv_many(1024))

    def _take(self, messages: list[Frames]) -> list[int]:
        ended = []
        for event, _address in messages:
            kind, connection = _EVENT.unpack(event)
            if kind == zmq.EVENT_ACCEPTED:
                self.has_accepted = True
                self._open.add(connection)
                self._silent[connection] = None
                if isinstance(self._name, int):  # where the socket is a file only its owner can connect
                    self.unfinished.begin(connection)
            else:
                self._open.discard(connection)
                self._silent.pop(connection, None)
                self._ending.discard(connection)
                self._taken.pop(connection, None)
                self.unfinished.forget(connection)
                ended.append(connection)
        return ended

    def _keep_limit(self) -> None:
        """Once all is taken that has come. Who sends without a pause cannot put it off for ever."""
        limit = self._limit + self._limit // SPARE if self._has_unread() else self._limit
        while self._silent and len(self._open) - len(self._ending) > limit:
            self.end(next(iter(self._silent)))

    def end(self, connection: int) -> None:
        """Ends a connection; libzmq tells when it has."""
        self._silent.pop(connection, None)
        self._ending.add(connection)
        self.unfinished.forget(connection)
        if self._name is not None:
            _shut_down(connection, self._name)


def _shut_down(connection: int, name: int | str) -> None:
    """Ends a connection that libzmq owns, which then notices and closes it.

    libzmq may just have closed it, and something else have its descriptor; then it must be left alone, unless that is
    another of our connections, whose client connects again by itself.

    Args:
        name: the port, or the path, that the connection came in at.
    """
    with contextlib.suppress(OSError):  # no socket, or no longer connected
        borrowed = socket.socket(fileno=connection)
        try:
            borrowed.getpeername()  # a socket that listens has none
            local = borrowed.getsockname()
            if name == (local[1] if isinstance(local, tuple) else local):
                borrowed.shutdown(socket.SHUT_RDWR)
        finally:
            borrowed.detach()


ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"genbatch"
VERSION = b"1.0"


class ZAPHandler:
    """Answers the questions of one context; made by `open_zap_handler`.

    Args:
        socket: bound to the address where libzmq asks.
        keys: the list.
    """

    def __init__(self, socket: ZeroMQSocket, keys: ServerKeys) -> None:
        self._socket = socket
        self._keys = keys

    async def run(self) -> None:
        """Answers until cancelled."""
        while True:
            question = await self._socket.recv()
            await self._socket.send(self._answer(question))

    def _answer(self, question: Frames) -> Frames:
        """[version, request id, status, text, user id, metadata], each of which libzmq checks."""
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
    """Makes a socket, before it is bound, let in only clients whose keys are on the list.

    Args:
        socket: the service's.
        keys: the service's own, and the list.
    """
    async with pumped(socket.context.socket(zmq.REP)) as answers:
        answers.bind(ADDRESS)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.pair.secret)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody gets in, rather than everybody
        yield ZAPHandler(answers, keys)


OnEnded = Callable[[list[int]], None]


class ZeroMQGuard:
    """Stands at one listening socket; made by `open_guard`.

    Args:
        connections: of the socket.
        keys: None lets everybody in who can reach the address.
        zap: answers for `keys`.
    """

    def __init__(self, connections: ZeroMQConnections, keys: ServerKeys | None, zap: ZAPHandler | None) -> None:
        self.connections = connections
        self._keys = keys
        self._zap = zap

    @property
    def asks_for_keys(self) -> bool:
        """Whether messages carry the key of who sent them."""
        return self._keys is not None

    def is_welcome(self, key: str) -> bool:
        """Whether a key, in Z85, is still on the list; true of everybody where no keys are asked for."""
        return self._keys is None or self._keys.client_name(key) is not None

    def tenant(self, key: str) -> str | None:
        """In whose name the owner of a key calls: "" if it is not on the list; None where no keys are asked for."""
        return None if self._keys is None else self._keys.client_name(key) or ""

    async def run(self, on_ended: OnEnded) -> None:
        """Stands there until cancelled; `on_ended` gets the file descriptors of connections that have ended."""
        async with trio.open_nursery() as nursery:
            if self._zap is not None:
                nursery.start_soon(self._zap.run)
            nursery.start_soon(self.connections.unfinished.watch)
            while True:
                on_ended(await self.connections.changed())


@asynccontextmanager
async def open_guard(socket: ZeroMQSocket, keys: ServerKeys | None) -> AsyncIterator[ZeroMQGuard]:
    """Puts a guard at a ROUTER that is not bound yet.

    Args:
        keys: the service's own and its clients'; None lets everybody in who can reach the address.
    """
    async with AsyncExitStack() as stack:
        # A socket with a domain refuses the greetings of ZMTP 1.0 and 2.0, which can show no key. Any first byte but
        # 0xFF, such as that of a web page's POST, is taken for a greeting of ZMTP 1.0.
        # guard: old greetings
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        monitor = await stack.enter_async_context(monitored(socket, EVENTS))
        zap = await stack.enter_async_context(open_zap_handler(socket, keys)) if keys is not None else None
        connections = ZeroMQConnections(monitor, max_connections(), socket.has_messages, is_encrypted=keys is not None)
        yield ZeroMQGuard(connections, keys, zap)
