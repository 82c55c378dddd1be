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

UnfinishedMessages bounds the memory that libzmq uses for messages of all TCP connections. libzmq delivers whole
messages only. It keeps the frames of a message until the message ends, and bounds neither their number nor their bytes.
The kernel reports the received bytes of a connection, and the bytes that libzmq has not read. The difference, less the
delivered messages, is in libzmq's memory: messages and heartbeats.

Heartbeats look like frames here, and their bytes are never delivered. So a connection may hold as many bytes as its
heartbeats. It is ended only if the room is full and no connection holds more than heartbeats.

libzmq also keeps the whole messages of a connection that has ended. They count until the queue is empty. While they
fill the room, the gateway accepts no new connections: a peer cannot fill more memory by connecting again.
"""

import array
import contextlib
import errno
import fcntl
import logging
import math
import os
import select
import socket
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import trio
import trio.lowlevel
import zmq
from zmq.utils import z85

from genbatch.actors.gateways.accepting import max_connections
from genbatch.actors.runtime import zeromq_socket
from genbatch.actors.runtime.zeromq_socket import Frames, ZeroMQSocket, monitored, pumped
from genbatch.actors.security.curve_keys import ServerKeys
from genbatch.proto.codec import MAX_TRANSPORT_BYTES

logger = logging.getLogger(__name__)

# The limit of one connection. A message that is merely too large must arrive, so that its sender gets an error.
MAX_BYTES_BETWEEN = 2 * MAX_TRANSPORT_BYTES
# The limit of all connections. Frames without content take 33 times as much memory: 64 bytes for two on the wire.
MAX_UNFINISHED = 16 * 2**20
# While whole messages wait to be taken, they count, too. So the limit is higher by this factor.
SPARE_FOR_WHOLE = 4
# The bytes that each whole frame costs in addition to its content: libzmq takes 64, and taking the frame takes time. So
# 32,768 small messages fill the room, twice as many as one client may send at once.
FRAME_COST = 2048
# A client with at most SMALL bytes in libzmq's queue is not ended because of other clients' messages. If messages of
# ended connections fill the room, ending more connections makes no room. So then a client may have LARGE bytes: before
# its first message is taken, a prompt of 6 KiB may count as much.
SMALL, LARGE = 2**16, 2**22
# Seconds between two checks while bytes arrive, and while they arrive faster than they are taken: libzmq reads 100,000
# small messages in 0.01 s.
LOOK_S, HURRY_S = 0.01, 0.001
# After a pause, at least so many connections are accepted, or for so many seconds, even if the first ones fill the room
# at once. The queue keeps its order, so a client behind 15 others that flood gets in. A connection brings at most the
# bytes that the kernel holds.
LEAST_ACCEPTED, ACCEPTING_S = 16, 0.2
# The most bytes of an honest peer in addition to messages: the handshake, and at each interval a PING and a PONG (16
# bytes, or 82 with CURVE).
HANDSHAKE_BYTES, HEARTBEAT_BYTES = 1024, 128
# CURVE adds the command's name, nonce, code and flags to each frame.
CURVE_BYTES = 33
# In Linux's `struct tcp_info`: tcpi_bytes_received.
_TCP_INFO_BYTES, _BYTES_RECEIVED = 136, 128


@dataclass(slots=True)
class HeldBytes:
    """The bytes of one connection.

    Args:
        copy: a second descriptor of the connection, whose counts can be read after libzmq has closed its own.
        since: when its last whole message was taken, or when it began; seconds on the event loop's clock.
        taken: a lower bound of its bytes that belong to whole messages.
        read: the bytes that libzmq had read at the last check.
        settled: the bytes that libzmq had read at the last check without a waiting whole message.
        grew: the time of the last check that found more bytes.
        weight: the cost of a byte in a whole message that waits; None before the connection's first message was taken.
        is_ending: whether the gateway has ended the connection, and libzmq has not noticed yet.
    """

    copy: socket.socket
    since: float
    taken: int = 0
    read: int = 0
    settled: int = 0
    grew: float = 0.0
    weight: float | None = None
    is_ending: bool = False

    @property
    def num_held(self) -> int:
        """The bytes that libzmq may hold, including heartbeats."""
        return max(0, self.read - self.taken)

    def excess(self, now: float) -> int:
        """Return the bytes that libzmq holds in excess of the heartbeats that were due."""
        intervals = (now - self.since) * 1000 / (zeromq_socket.HEARTBEAT_IVL or 1000)
        return self.num_held - HANDSHAKE_BYTES - int(HEARTBEAT_BYTES * (intervals + 1))


class UnfinishedMessages:
    """Ends connections that hold too many bytes; inactive on systems without the kernel's counts (not Linux).

    Args:
        end: ends a connection soon.
        has_unread: whether whole messages have arrived that were not taken yet.
        is_encrypted: whether the connections use CURVE.

    Attributes:
        full: set while new connections must wait.
        fits: set while they may be accepted.
    """

    def __init__(self, end: Callable[[int], None], has_unread: Callable[[], bool], *, is_encrypted: bool) -> None:
        self._end = end
        self._has_unread = has_unread
        self._frame_bytes = CURVE_BYTES if is_encrypted else 0
        self._arrived: dict[int, HeldBytes] = {}
        self._connections: dict[int, int] = {}  # by descriptor of the copy
        self._unread: set[int] = set()  # connections with bytes that libzmq had not read at the last check
        self._left = 0  # the cost of waiting messages of ended connections
        self._weight = 1.0  # the mean weight of messages that were taken lately
        self._num_accepted, self._accepts_until = 0, -math.inf  # since new connections were let in again
        self.full, self.fits = trio.Event(), trio.Event()
        self.fits.set()
        # Reports connections with new bytes, even after libzmq has read them.
        self._news = select.epoll() if hasattr(select, "epoll") and hasattr(socket, "TCP_INFO") else None

    @property
    def num_held(self) -> int:
        """The bytes that libzmq may hold, of all connections."""
        return sum(arrived.num_held for arrived in self._arrived.values())

    def begin(self, connection: int) -> None:
        """Watch a new TCP connection."""
        if self._news is None:
            return
        try:
            copy = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(connection))
        except OSError as fault:
            # EBADF: the connection has ended, as libzmq will report, and the next one may get its descriptor any time.
            # guard: descriptor of an ended connection
            if fault.errno != errno.EBADF:  # no descriptor is left to watch it
                self._end(connection)
            return
        self.ended(connection)
        self._num_accepted += 1
        self._arrived[connection] = HeldBytes(copy, since=trio.current_time())
        self._connections[copy.fileno()] = connection
        # A new connection is writable, which is an event: it is checked at once, even if bytes came before.
        self._news.register(copy, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)

    def shut_down(self, connection: int) -> bool:
        """Shut a connection down, so that libzmq closes it; return False for a connection that is not watched.

        This drops the bytes that libzmq has not read, because libzmq would make messages of them.
        """
        if (arrived := self._arrived.get(connection)) is None:
            return False
        arrived.is_ending = True
        with suppress(OSError):  # the client was faster
            arrived.copy.shutdown(socket.SHUT_RDWR)
            arrived.taken += discard(arrived.copy)
        return True

    def ended(self, connection: int) -> None:
        """Forget a connection that libzmq has closed; its whole messages still wait."""
        arrived = self._arrived.pop(connection, None)
        if arrived is None:
            return
        arrived.read = max(arrived.read, bytes_read(arrived.copy)[0])
        del self._connections[arrived.copy.fileno()]
        if self._news is not None:
            self._news.unregister(arrived.copy)  # closing is not enough while libzmq has its own descriptor open
        arrived.copy.close()
        # guard: messages of ended connections
        if self._has_unread():
            self._left += self._cost(arrived)
            self._check_full(MAX_UNFINISHED * SPARE_FOR_WHOLE)

    def took(self, connection: int | None, frames: Sequence[bytes]) -> None:
        """Book a whole message that was taken; the connection is unknown if it has ended.

        A message of more bytes than the connection has sent was left by an earlier one with the same descriptor.
        """
        size = 0
        for frame in frames:
            length = len(frame)
            size += length + self._frame_bytes + (2 if length < 256 else 9)
        cost = size + FRAME_COST * len(frames)
        weight = cost / max(1, size)
        self._weight += (weight - self._weight) / 16
        arrived = None if connection is None else self._arrived.get(connection)
        if arrived is None or not self._has_read(arrived, arrived.taken + size):
            self._left -= cost if cost < self._left else self._left
            return
        # While no message waited, this message had not ended, so all bytes until then came before its end.
        arrived.taken = max(arrived.taken + size, arrived.settled)
        arrived.since, arrived.weight = trio.current_time(), weight

    def dropped(self, num_frames: int, num_bytes: int) -> None:
        """Book the frames of ended connections that were dropped."""
        self._left -= min(self._left, num_bytes + num_frames * (2 + self._frame_bytes + FRAME_COST))

    def has_read(self, connection: int, num_bytes: int) -> bool:
        """Return whether libzmq has read so many bytes of a connection; True if the connection is not watched."""
        arrived = self._arrived.get(connection)
        return arrived is None or self._has_read(arrived, num_bytes)

    def _has_read(self, arrived: HeldBytes, num_bytes: int) -> bool:
        if arrived.read < num_bytes:
            arrived.read = max(arrived.read, bytes_read(arrived.copy)[0])
        return arrived.read >= num_bytes

    def emptied(self) -> None:
        """Note that all whole messages were taken."""
        self._left = 0
        if self.full.is_set():
            self._check_full(MAX_UNFINISHED * SPARE_FOR_WHOLE)

    async def watch(self) -> None:
        """Check the bytes that arrive, until cancelled."""
        if self._news is None:
            return
        try:
            fits = True
            while True:
                if fits and not self._unread:
                    await trio.lowlevel.wait_readable(self._news)
                news = {self._connections[copy] for copy, _ in self._news.poll(0) if copy in self._connections}
                news |= self._unread
                self._unread.clear()
                fits = self._look([*news])
                is_filling = self._has_unread() and self._queued() > MAX_UNFINISHED
                await trio.sleep(min(LOOK_S, HURRY_S) if is_filling else LOOK_S)
        finally:
            self._news.close()
            self._news = None
            for arrived in self._arrived.values():
                arrived.copy.close()
            self._arrived.clear()

    def _look(self, connections: Sequence[int]) -> bool:
        """Check these connections' bytes; return whether all bytes fit within the usual limit."""
        now = trio.current_time()
        known = [(connection, self._arrived[connection]) for connection in connections if connection in self._arrived]
        for connection, arrived in known:
            read, is_unread = bytes_read(arrived.copy)
            arrived.read, arrived.grew = max(arrived.read, read), now
            if is_unread:  # there will be no event when libzmq reads the rest
                self._unread.add(connection)
        has_unread = self._has_unread()  # after the counts: an ended message waits, or was taken
        for connection, arrived in known:
            if not has_unread:
                arrived.settled = arrived.read
            # guard: message without an end
            if arrived.excess(now) > MAX_BYTES_BETWEEN and not has_unread:
                self._cut_off(connection)
        if has_unread:
            self._keep_queue_short(MAX_UNFINISHED * SPARE_FOR_WHOLE)
        else:
            self._left = 0
            self._keep_room(now, MAX_UNFINISHED)
        self._check_full(MAX_UNFINISHED * SPARE_FOR_WHOLE)
        return not self.full.is_set() and self.num_held <= MAX_UNFINISHED

    def _keep_room(self, now: float, room: int) -> None:
        """End connections until the others fit: first those with the longest unchanged message."""
        open_ones = {
            connection: unfinished for connection, unfinished in self._arrived.items() if not unfinished.is_ending
        }
        excess = sum(unfinished.num_held for unfinished in open_ones.values()) - room
        # guard: unfinished messages of strangers
        if excess <= 0:
            return

        def rank(connection: int) -> tuple[bool, float]:
            arrived = open_ones[connection]
            is_quiet = arrived.excess(now) <= 0
            return is_quiet, -arrived.num_held if is_quiet else arrived.grew

        for connection in sorted(open_ones, key=rank):
            excess -= open_ones[connection].num_held
            self._cut_off(connection)
            if excess <= 0:
                return

    def _keep_queue_short(self, room: int) -> None:
        """End connections until the waiting messages fit, those with most messages first."""
        costs = {
            connection: self._cost(unfinished)
            for connection, unfinished in self._arrived.items()
            if not unfinished.is_ending
        }
        excess = sum(costs.values()) - room
        is_full = self._left + sum(costs.values()) > room
        for connection in sorted(costs, key=costs.__getitem__, reverse=True):
            # guard: whole messages of strangers
            if costs[connection] <= (SMALL if excess > 0 else LARGE) or not is_full:
                return
            excess -= costs[connection]
            self._cut_off(connection)

    def _cost(self, arrived: HeldBytes) -> int:
        """Return the cost of a connection's bytes in libzmq's queue, as if all of them were whole messages."""
        if arrived.weight is None:  # its handshake is no message
            return int(max(0, arrived.num_held - HANDSHAKE_BYTES) * self._weight)
        return int(arrived.num_held * arrived.weight)

    def _queued(self) -> int:
        return self._left + sum(map(self._cost, self._arrived.values()))

    def _check_full(self, room: int) -> None:
        """Let new connections wait while the queue is full, and until half of it was taken."""
        is_full = self.full.is_set()
        if (self._has_unread() and self._queued() > (room // 2 if is_full else room)) == is_full:
            return
        if is_full:
            self._num_accepted, self._accepts_until = 0, trio.current_time() + ACCEPTING_S
            self.full = trio.Event()
            self.fits.set()
        elif self._num_accepted >= LEAST_ACCEPTED or trio.current_time() > self._accepts_until:
            logger.warning("more messages wait than fit, so new ZeroMQ connections are not accepted for now")
            self.fits = trio.Event()
            self.full.set()

    def _cut_off(self, connection: int) -> None:
        num_held = self._arrived[connection].num_held
        logger.warning("a client sent %d bytes that cannot be taken yet, and was cut off", num_held)
        self._arrived[connection].is_ending = True
        self._end(connection)


def bytes_read(connection: socket.socket) -> tuple[int, bool]:
    """Return the bytes that were read from a TCP connection, and whether unread bytes have arrived."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        unread = array.array("i", [0])
        fcntl.ioctl(connection, termios.FIONREAD, unread)
    except OSError:  # no TCP: the descriptor was another file's when it was copied
        return 0, False
    return int.from_bytes(info[_BYTES_RECEIVED:_TCP_INFO_BYTES], sys.byteorder) - unread[0], unread[0] > 0


def discard(connection: socket.socket) -> int:
    """Read and drop the bytes that a connection has received, before libzmq reads them; return their number."""
    num_bytes = 0
    with suppress(OSError):  # no more are there, or the client has reset the connection
        while data := connection.recv(2**18, socket.MSG_DONTWAIT):
            num_bytes += len(data)
    return num_bytes


# The most that one client may send while unread messages remain: far more than 256 open calls need.
MAX_MESSAGES_AT_ONCE, MAX_BYTES_AT_ONCE = 16384, 2**28
# A TCP connection has a second descriptor, by which its bytes are counted.
DESCRIPTORS = 2
# The guard drops the messages of at most so many clients. The room for connections is smaller, so it suffices.
MAX_IGNORED = 16384
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
        ignored: gets the identities of clients whose messages are to be dropped.
    """

    def __init__(
        self,
        monitor: ZeroMQSocket,
        limit: int,
        has_unread: Callable[[], bool] = lambda: False,
        *,
        is_encrypted: bool = False,
        ignored: dict[bytes, None] | None = None,
    ) -> None:
        self._monitor = monitor
        self._ignored = {} if ignored is None else ignored
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
            self.ignore(identity)  # the client is gone, so no answer is needed
            return False
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

    def ignore(self, identity: bytes) -> None:
        """Drop the other messages that an ended connection has left, ten times faster than they are taken.

        A client with an identity of its own may be back, and have another connection.
        """
        if is_numbered(identity):
            self._ignored[identity] = None
            if len(self._ignored) > MAX_IGNORED:
                del self._ignored[next(iter(self._ignored))]

    def emptied(self) -> None:
        """Reset the counts, since all received messages were taken; silent clients have sent nothing."""
        self._taken.clear()
        self._ignored.clear()
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
        ended = []
        # guard: all events before a message
        while events := self._monitor.try_recv_many(1024):
            ended += self._take(events)
        return ended

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
                if (identity := self._identities.pop(connection, None)) is not None:
                    self.ignore(identity)
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


def is_numbered(identity: bytes) -> bool:
    """Return whether libzmq chose an identity: a zero byte, and four bytes that count up for each connection."""
    return len(identity) == 5 and identity[0] == 0


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
            monitor,
            max_connections() // DESCRIPTORS,
            socket.has_messages,
            is_encrypted=keys is not None,
            ignored=socket.ignored,
        )
        yield ZeroMQGuard(connections, keys, zap)
