"""Admission of connections: accept a gateway's connections, bound them, and name the account that each is charged to.

    limit = ConnectionLimit(max_connections())
    await accept_from(listeners, serve, handlers)       # serves each connection as a task of the nursery

    with trio.CancelScope() as scope, limit.seat(scope.cancel) as seat:
        ...  # the handshake
        seat.settle()
        ...  # the client is served

    budget = MessageBudget(MAX_HALF_MESSAGES)           # the memory of unfinished messages
    with budget.share(give_up) as share:
        share.holds(1000)

Accepting: a connection costs a gateway half a millisecond, mostly for tasks and scopes. A client that connects and
hangs up pays a tenth of that. So a flood of such clients could fill the kernel's queue and keep honest clients out. One
check shows that a client in the queue has hung up. It takes some microseconds, so dozens are dropped at once. One of
the other connections is accepted per turn, so that tokens are sent in between. A new client's first message is then
read long before other clients could push the client out (ConnectionLimit).

A client that has closed its sending side may still read, or may be gone: only an answer shows which. Such clients wait
in Leftovers and are served while no other client waits. So a flood of clients that connect, send a request and
disappear costs one check each, and these clients delay only each other.

Accounts: a connection costs a client nothing, so neither connections nor gateways have shares of their own.
HTTP, RPC and ZeroMQ clients of one machine share one account (ADR 43). Clients with a key or a token have their
tenant's account instead (`Caller.payer`).

    process:4711      over a Unix socket: the process that connected
    user:1000         over a Unix socket, from another container: the user, since process ids differ there
    host:10.0.0.7     over TCP: the machine; with IPv6 its network of 64 bits; all loopback addresses are one
"""

import errno
import ipaddress
import logging
import os
import resource
import select
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

import trio

from genbatch.actors.scheduling.request import LOCALHOST

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


MOST = 4096
# Each gateway may use a quarter of the descriptors. Three gateways then leave a quarter for all other uses.
SHARE = 4

# The least file descriptors of a service. libzmq 4.3.5 aborts the process if none is left for a connection to an ipc://
# address, so a gateway process reserves far more than its connections may use.
LEAST_FILES, AMPLE_FILES = 256, 2**16


def allow_files(count: int) -> int:
    """Raise the process's own limit of open files to `count`, as far as the system allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # the system has a further limit
        return soft
    return most


def max_connections() -> int:
    """Return the most connections of one gateway, including connections without a hello."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(1, min(MOST, soft // SHARE))


class Seat:
    """One connection's place; made by `ConnectionLimit.seat`.

    Args:
        push_out: ends the connection soon.
    """

    __slots__ = ("_newcomers", "is_refused", "push_out")

    def __init__(self, newcomers: "dict[Seat, None]", push_out: Callable[[], None]) -> None:
        self.push_out = push_out
        self.is_refused = False  # all seats belong to settled clients
        self._newcomers = newcomers

    def settle(self) -> None:
        """Settle the client after its first valid message: it is not pushed out any more."""
        self._newcomers.pop(self, None)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Protect the client for as long as the body runs; after that it counts as silent from now on."""
        self.settle()
        try:
            yield
        finally:
            self._newcomers[self] = None


class ConnectionLimit:
    """Bounds the connections: a new one above the limit pushes out the longest silent one.

    So a flood of silent connections pushes itself out, and a client that speaks at once gets in.

    Args:
        most: the number of seats.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken = 0
        self._newcomers: dict[Seat, None] = {}  # not settled, oldest first

    def __len__(self) -> int:
        return self._taken

    @contextmanager
    def seat(self, push_out: Callable[[], None]) -> Iterator[Seat]:
        """Take a place for as long as the body runs.

        Args:
            push_out: called when another client needs the place and this client has not settled; ends the connection
                soon.
        """
        seat = Seat(self._newcomers, push_out)
        self._newcomers[seat] = None
        self._taken += 1
        try:
            # guard: connections of strangers
            if self._taken > self.most:
                oldest = next(iter(self._newcomers))
                oldest.settle()  # so that it is pushed out only once
                if oldest is seat:
                    seat.is_refused = True
                else:
                    oldest.push_out()
            yield seat
        finally:
            seat.settle()
            self._taken -= 1


# The most bytes of unfinished messages, of all connections of a gateway. They take up to three times as much memory.
MAX_HALF_MESSAGES = 32 * 2**20


class Share:
    """The unfinished message of one connection; made by `MessageBudget.share`.

    Args:
        give_up: drops the connection's unfinished message at once, and ends the connection soon.
    """

    __slots__ = ("_budget", "give_up")

    def __init__(self, budget: "MessageBudget", give_up: Callable[[], None]) -> None:
        self._budget = budget
        self.give_up = give_up

    def holds(self, num_bytes: int) -> None:
        """Set the bytes of the connection's unfinished message."""
        self._budget.put(self, num_bytes)


class MessageBudget:
    """Bounds the unfinished messages of all connections: above the limit, the longest unchanged ones are given up.

    So a flood of endless messages pushes itself out, and a message that arrives without a pause gets in.

    Args:
        max_bytes: the limit for all unfinished messages together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes_of: dict[Share, int] = {}  # the last one has grown most recently
        self.num_bytes = 0

    @contextmanager
    def share(self, give_up: Callable[[], None]) -> Iterator[Share]:
        """Take an empty share for as long as the body runs."""
        share = Share(self, give_up)
        try:
            yield share
        finally:
            self.put(share, 0)

    def put(self, share: Share, num_bytes: int) -> None:
        """Set the bytes of a share; this may call the `give_up` of other shares, or its own."""
        self.num_bytes += num_bytes - self._bytes_of.pop(share, 0)
        if num_bytes:
            self._bytes_of[share] = num_bytes
        # guard: half messages of strangers
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self._bytes_of))
            self.num_bytes -= self._bytes_of.pop(oldest)
            oldest.give_up()


# The account of a connection that ended before its peer was read.
GONE = "host:gone"
# A Unix socket's credentials of its peer: Linux's `struct ucred` (process, user, group), macOS's LOCAL_PEERPID.
_UCRED: Final = struct.Struct("=3i")
_SOL_LOCAL, _LOCAL_PEERPID = 0, 2
_NETWORK_BITS = 64  # of an IPv6 address: a machine can use any address below them


class AnySocket(Protocol):
    """A socket of the standard library or of trio."""

    @property
    def family(self) -> int: ...

    def getpeername(self) -> object: ...

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection.

    Args:
        name: the connection's name, for logs and for the names of its requests.
        account: the client's name for shares and turns.
    """

    name: str
    account: str


def account_of_socket(connection: AnySocket) -> str:
    """Return the account of a connected socket's peer."""
    try:
        if connection.family == socket.AF_UNIX:
            return _account_of_process(connection)
        match connection.getpeername():
            case (str(host), *_):
                return account_of_host(host)
    except OSError:
        pass
    return GONE


def account_of_descriptor(descriptor: int) -> str:
    """Return the account of a connection that libzmq owns."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:  # libzmq has just closed it
        return GONE
    try:
        return account_of_socket(borrowed)
    finally:
        borrowed.detach()


def account_of_host(host: str) -> str:
    """Return the account of a machine by its address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return f"host:{host}"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None and not address.is_loopback:
            return f"host:{ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False)}"
        address = address.ipv4_mapped or address
    return LOCALHOST if address.is_loopback else f"host:{address}"


def _account_of_process(connection: AnySocket) -> str:
    if not hasattr(socket, "SO_PEERCRED"):
        process = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, 4)
        return f"process:{int.from_bytes(process, 'little')}"
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    process_id, user_id, _ = _UCRED.unpack(credentials)
    return f"process:{process_id}" if process_id else f"user:{user_id}"
