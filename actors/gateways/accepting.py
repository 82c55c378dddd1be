"""accept_from: accepts a gateway's connections, one per turn of the event loop, and skips clients that have hung up.

    handlers: trio.Nursery
    await accept_from(listeners, serve, handlers)

A connection costs a gateway half a millisecond, mostly for tasks and scopes. A client that connects and hangs up pays
a tenth of that. So a flood of such clients could fill the kernel's queue and keep honest clients out. One check shows
that a client in the queue has hung up. It takes some microseconds, so dozens are dropped at once. One of the other
connections is accepted per turn, so that tokens are sent in between. A new client's first message is then read long
before other clients could push the client out (`ConnectionLimit`).

A client that has closed its sending side may still read, or may be gone: only an answer shows which. Such clients wait
in `Leftovers` and are served while no other client waits. So a flood of clients that connect, send a request and
disappear costs one check each, and these clients delay only each other.
"""

import errno
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import NoReturn

import trio

logger = logging.getLogger(__name__)

Serve = Callable[[trio.SocketStream], Awaitable[object]]

# Connections checked in one turn.
LOOKS_PER_TURN = 64
# The most connections in `Leftovers`.
MAX_LEFTOVERS = 128
# The errors of a system without room for one more connection, and the seconds until the next try.
_NO_ROOM, NO_ROOM_S = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)), 0.1


async def accept_from(listeners: Sequence[trio.SocketListener], serve: Serve, handlers: trio.Nursery) -> NoReturn:
    """Accept until cancelled, then close the listeners.

    Args:
        serve: serves one connection, as a task in `handlers`; its stream is closed at the end.
    """
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(_accept_from, listener, serve, handlers)
    raise AssertionError("accepting ends only when it is cancelled")


class Leftovers:
    """Connections of half-closed clients, oldest first; above the limit a connection is closed."""

    def __init__(self) -> None:
        self._waiting: deque[socket.socket] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, connection: socket.socket) -> None:
        """Add a connection, or close it above the limit."""
        if len(self._waiting) < MAX_LEFTOVERS:
            self._waiting.append(connection)
        else:
            connection.close()

    def take(self) -> socket.socket | None:
        """Return the oldest connection with a client that may still be there; None for none."""
        while self._waiting:
            connection = self._waiting.popleft()
            if not has_hung_up(connection):
                return connection
            connection.close()
        return None

    def close(self) -> None:
        """Close all connections."""
        while self._waiting:
            self._waiting.popleft().close()


async def _accept_from(listener: trio.SocketListener, serve: Serve, handlers: trio.Nursery) -> None:
    async with listener:
        with socket.socket(fileno=os.dup(listener.socket.fileno())) as queue, closing(Leftovers()) as leftovers:
            queue.setblocking(False)
            try:
                await _accept_one_by_one(queue, leftovers, serve, handlers)
            finally:  # they were accepted, so no other process can serve them
                while (connection := leftovers.take()) is not None:
                    _start(serve, connection, handlers)


async def _accept_one_by_one(
    queue: socket.socket, leftovers: Leftovers, serve: Serve, handlers: trio.Nursery
) -> NoReturn:
    while True:
        if leftovers:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.wait_readable(queue)
        try:
            connection = _next_of(queue, leftovers)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            logger.error("cannot accept connections now: %s", error)
            await trio.sleep(NO_ROOM_S)
            continue
        if connection is not None:
            _start(serve, connection, handlers)


def _start(serve: Serve, connection: socket.socket, handlers: trio.Nursery) -> None:
    handlers.start_soon(_serve, serve, trio.SocketStream(trio.socket.from_stdlib_socket(connection)))


async def _serve(serve: Serve, stream: trio.SocketStream) -> None:
    try:
        await serve(stream)
    finally:
        await trio.aclose_forcefully(stream)


def _next_of(queue: socket.socket, leftovers: Leftovers) -> socket.socket | None:
    """Return the next connection with a client that is still there; None if this turn's checks find none.

    Raises:
        OSError: the system has no room for one more, or the queue is closed.
    """
    for _ in range(LOOKS_PER_TURN):
        try:
            connection, _ = queue.accept()
        except (BlockingIOError, InterruptedError):
            return leftovers.take()  # no other client waits
        except ConnectionError:  # the client hung up in the queue
            continue
        if has_hung_up(connection):
            connection.close()
        elif _sends_no_more(connection):
            leftovers.put(connection)
        else:
            return connection
    return None


def has_hung_up(connection: socket.socket | trio.socket.SocketType) -> bool:
    """Return whether the client certainly reads no answer. A client that has closed its sending side may still read."""
    return _has_event(connection, select.POLLHUP | select.POLLERR)  # poll reports both without a request


def _sends_no_more(connection: socket.socket) -> bool:
    return _has_event(connection, select.POLLRDHUP)


def _has_event(connection: socket.socket | trio.socket.SocketType, events: int) -> bool:
    look = select.poll()
    look.register(connection, events)
    return any(event & events for _, event in look.poll(0))
