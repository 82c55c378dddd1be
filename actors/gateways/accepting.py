"""accept_from: new connections of a gateway, one a turn of the event loop, without those who have hung up meanwhile.

    handlers: trio.Nursery
    await accept_from(listeners, serve, handlers)

A connection costs a gateway half a millisecond, most of it for tasks and scopes. A client that connects and hangs up
costs itself a tenth of that, so a flood of such clients fills the kernel's queue, and who means well finds no place
there. One look tells that somebody in the queue has hung up: that takes some microseconds, and they are thrown away
by the dozen. Of the others one is taken a turn, so that tokens pass in between, and so that what a newcomer has said
is read long before enough others have come to push it out (`ConnectionLimit`).
"""

import errno
import logging
import os
import select
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import trio

logger = logging.getLogger(__name__)

Serve = Callable[[trio.SocketStream], Awaitable[object]]

# Connections looked at in one turn.
LOOKS_PER_TURN = 64
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


async def _accept_from(listener: trio.SocketListener, serve: Serve, handlers: trio.Nursery) -> None:
    async with listener:
        with socket.socket(fileno=os.dup(listener.socket.fileno())) as queue:
            queue.setblocking(False)
            while True:
                await trio.lowlevel.wait_readable(queue)
                try:
                    connection = _next_of(queue)
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    logger.error("cannot accept connections now: %s", error)
                    await trio.sleep(NO_ROOM_S)
                    continue
                if connection is not None:
                    handlers.start_soon(_serve, serve, trio.SocketStream(trio.socket.from_stdlib_socket(connection)))


async def _serve(serve: Serve, stream: trio.SocketStream) -> None:
    try:
        await serve(stream)
    finally:
        await trio.aclose_forcefully(stream)


def _next_of(queue: socket.socket) -> socket.socket | None:
    """The next connection that is still there, if it is among those that may be looked at.

    Raises:
        OSError: the system has no room for one more, or the queue is no more.
    """
    for _ in range(LOOKS_PER_TURN):
        try:
            connection, _ = queue.accept()
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionError:  # it ended in the queue
            continue
        if not has_hung_up(connection):
            return connection
        connection.close()
    return None


def has_hung_up(connection: socket.socket | trio.socket.SocketType) -> bool:
    """Whether nobody is there to read an answer, as far as is known. A client that sends no more may be there."""
    look = select.poll()
    look.register(connection, 0)  # of an end in both directions it tells unasked
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in look.poll(0))
