"""UnfinishedMessages: bounds the memory that libzmq uses for unfinished messages of all TCP connections.

    unfinished = UnfinishedMessages(end, has_unread, is_encrypted=False)
    nursery.start_soon(unfinished.watch)
    unfinished.begin(connection)
    unfinished.took(connection, frames)

libzmq delivers whole messages only. It keeps the frames of a message until the message ends, and bounds neither their
number nor their bytes. The kernel reports the received bytes of a connection, and the bytes that libzmq has not read.
The difference, less the delivered messages, is in libzmq's memory: unfinished messages and heartbeats.

Heartbeats look like frames here, and their bytes are never delivered. So a connection may hold as many bytes as its
heartbeats. It is ended only if the room is full and no connection holds more than heartbeats.
"""

import array
import fcntl
import logging
import select
import socket
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio
import trio.lowlevel

from genbatch.actors.runtime import zeromq_socket
from genbatch.proto.codec import MAX_TRANSPORT_BYTES

logger = logging.getLogger(__name__)

# The limit of one connection. A message that is merely too large must arrive, so that its sender gets an error.
MAX_BYTES_BETWEEN = 2 * MAX_TRANSPORT_BYTES
# The limit of all connections. Frames without content take 33 times as much memory: 64 bytes for two on the wire.
MAX_UNFINISHED = 16 * 2**20
# Whole messages that wait to be taken count, too, so the limit is this much higher meanwhile.
SPARE_FOR_WHOLE = 4
# Seconds between two checks while bytes arrive.
LOOK_S = 0.02
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
        since: when its last whole message was taken, or when it began; seconds on the event loop's clock.
        ended: a lower bound of its bytes that belong to whole messages.
        read: the bytes that libzmq had read at the last check.
        settled: the bytes that libzmq had read at the last check without a waiting whole message.
        grew: the time of the last check that found more bytes.
    """

    since: float
    ended: int = 0
    read: int = 0
    settled: int = 0
    grew: float = 0.0

    @property
    def num_held(self) -> int:
        """The bytes that libzmq may hold, including heartbeats."""
        return max(0, self.read - self.ended)

    def excess(self, now: float) -> int:
        """Return the bytes that libzmq holds beyond the heartbeats of the time."""
        intervals = (now - self.since) * 1000 / (zeromq_socket.HEARTBEAT_IVL or 1000)
        return self.num_held - HANDSHAKE_BYTES - int(HEARTBEAT_BYTES * (intervals + 1))


class UnfinishedMessages:
    """Ends connections that hold too many bytes; inactive on systems without the kernel's counts (not Linux).

    Args:
        end: ends a connection soon.
        has_unread: whether whole messages have arrived that were not taken yet.
        is_encrypted: whether the connections use CURVE.
    """

    def __init__(self, end: Callable[[int], None], has_unread: Callable[[], bool], *, is_encrypted: bool) -> None:
        self._end = end
        self._has_unread = has_unread
        self._frame_bytes = CURVE_BYTES if is_encrypted else 0
        self._arrived: dict[int, HeldBytes] = {}
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
            # A new connection is writable, which is an event: it is checked at once, even if bytes came before.
            self._news.register(connection, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        except FileExistsError:  # an earlier connection had this descriptor
            pass
        except OSError:  # it has ended, as libzmq will report
            return
        self._arrived[connection] = HeldBytes(since=trio.current_time())

    def forget(self, connection: int) -> None:
        """Forget a connection that has ended or will end soon."""
        self._arrived.pop(connection, None)

    def took(self, connection: int, frames: Sequence[bytes]) -> None:
        """Book a whole message of the connection that was taken."""
        arrived = self._arrived.get(connection)
        if arrived is None:
            return
        sizes = [len(frame) + self._frame_bytes for frame in frames]
        arrived.ended += sum(size + (2 if size < 256 else 9) for size in sizes)
        # While no message waited, this message had not ended, so all bytes until then came before its end.
        arrived.ended = max(arrived.ended, arrived.settled)
        arrived.since = trio.current_time()

    async def watch(self) -> None:
        """Check the bytes that arrive, until cancelled."""
        if self._news is None:
            return
        with self._news:
            fits = True
            while True:
                if fits:
                    await trio.lowlevel.wait_readable(self._news)
                fits = self._look([connection for connection, _ in self._news.poll(0)])
                await trio.sleep(LOOK_S)

    def _look(self, connections: Sequence[int]) -> bool:
        """Check these connections' bytes; return whether all bytes fit within the usual limit."""
        now = trio.current_time()
        known = [(connection, self._arrived[connection]) for connection in connections if connection in self._arrived]
        for connection, arrived in known:
            arrived.read, arrived.grew = max(arrived.read, bytes_read(connection)), now
        has_unread = self._has_unread()  # after the counts: an ended message waits, or was taken
        for connection, arrived in known:
            if not has_unread:
                arrived.settled = arrived.read
            # guard: message without an end
            if arrived.excess(now) > MAX_BYTES_BETWEEN and not has_unread:
                self._cut_off(connection)
        self._keep_room(now, MAX_UNFINISHED * (SPARE_FOR_WHOLE if has_unread else 1))
        return self.num_held <= MAX_UNFINISHED

    def _keep_room(self, now: float, room: int) -> None:
        """End connections until the others fit: first those with the longest unchanged message."""
        excess = self.num_held - room
        # guard: unfinished messages of strangers
        if excess <= 0:
            return

        def rank(connection: int) -> tuple[bool, float]:
            arrived = self._arrived[connection]
            is_quiet = arrived.excess(now) <= 0
            return is_quiet, -arrived.num_held if is_quiet else arrived.grew

        for connection in sorted(self._arrived, key=rank):
            excess -= self._arrived[connection].num_held
            self._cut_off(connection)
            if excess <= 0:
                return

    def _cut_off(self, connection: int) -> None:
        num_held = self._arrived[connection].num_held
        logger.warning("a client sent %d bytes without the end of a message, and was cut off", num_held)
        self.forget(connection)
        self._end(connection)


def bytes_read(connection: int) -> int:
    """Return the bytes that libzmq has read from a TCP connection; 0 if the connection has ended."""
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=connection)
    except OSError:
        return 0
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        unread = array.array("i", [0])
        fcntl.ioctl(connection, termios.FIONREAD, unread)
    except OSError:  # libzmq has just closed it
        return 0
    finally:
        borrowed.detach()
    return int.from_bytes(info[_BYTES_RECEIVED:_TCP_INFO_BYTES], sys.byteorder) - unread[0]
