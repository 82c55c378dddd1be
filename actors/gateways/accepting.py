"""accept_from: new connections of a gateway, one a turn of the event loop, without those who have hung up meanwhile.

    handlers: trio.Nursery
    await accept_from(listeners, serve, handlers)

A connection costs a gateway half a millisecond, most of it for tasks and scopes. A client that connects and hangs up
costs itself a tenth of that, so a flood of such clients fills the kernel's queue, and who means well finds no place
there. One look tells that somebody in the queue has hung up: that takes some microseconds, and they are thrown away
by the dozen. Of the others one is taken a turn, so that tokens pass in between, and so that what a newcomer has said
is read long before enough others have come to push it out (`ConnectionLimit`).

A client that sends no more may read on, or may be gone: nothing tells before it is answered. Such clients wait aside
(`Leftovers`) and are served while no other client waits. So a flood of clients that connect, send a request and
disappear costs a look each, and delays each other.
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

# Connections looked at in one turn.
LOOKS_PER_TURN = 64
# Connections that wait aside.
MAX_LEFTOVERS = 128
# The system has no room for one more connection now; seconds until the next look.
_NO_ROOM, NO_ROOM_S = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)), 0.1


async def accept_from(listeners: Sequence[trio.SocketListener], serve: Serve, handlers: trio.Nursery) -> NoReturn:
    """Accepts until cancelled, then closes the listeners.

    Args:
        serve: one connection's life, begun in `handlers`; its stream is closed when it ends.
    """
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(_accept_from, listener, serve, handlers)
    raise AssertionError("accepting ends only when it is cancelled")


class Leftovers:
    """Connections that have sent all that they will send, oldest first. One that finds no room is closed."""

    def __init__(self) -> None:
        self._waiting: deque[socket.socket] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, connection: socket.socket) -> None:
        """Lets a connection wait."""
        if len(self._waiting) < MAX_LEFTOVERS:
            self._waiting.append(connection)
        else:
            connection.close()

    def take(self) -> socket.socket | None:
        """The connection that has waited for longest, if its client may still be there."""
        while self._waiting:
            connection = self._waiting.popleft()
            if not has_hung_up(connection):
                return connection
            connection.close()
        return None

    def close(self) -> None:
        """Closes all of them."""
        while self._waiting:
            self._waiting.popleft().close()


async def _accept_from(listener: trio.SocketListener, serve: Serve, handlers: trio.Nursery) -> None:
    async with listener:
        with socket.socket(fileno=os.dup(listener.socket.fileno())) as queue, closing(Leftovers()) as leftovers:
            queue.setblocking(False)
            try:
                await _accept_one_by_one(queue, leftovers, serve, handlers)
            finally:  # they were accepted, so nobody else can serve them
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
    """The next connection that is still there, if it is among those that may be looked at.

    Raises:
        OSError: the system has no room for one more, or the queue is no more.
    """
    for _ in range(LOOKS_PER_TURN):
        try:
            connection, _ = queue.accept()
        except (BlockingIOError, InterruptedError):
            return leftovers.take()  # no other client waits
        except ConnectionError:  # it ended in the queue
            continue
        if has_hung_up(connection):
            connection.close()
        elif _sends_no_more(connection):
            leftovers.put(connection)
        else:
            return connection
    return None


def has_hung_up(connection: socket.socket | trio.socket.SocketType) -> bool:
    """Whether nobody is there to read an answer, as far as is known. A client that sends no more may be there."""
    return _has_event(connection, select.POLLHUP | select.POLLERR)  # of both poll tells unasked


def _sends_no_more(connection: socket.socket) -> bool:
    return _has_event(connection, select.POLLRDHUP)


def _has_event(connection: socket.socket | trio.socket.SocketType, events: int) -> bool:
    look = select.poll()
    look.register(connection, events)
    return any(event & events for _, event in look.poll(0))
