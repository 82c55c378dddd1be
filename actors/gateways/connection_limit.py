"""The limits that all clients of a gateway share: its connections, and the memory of unfinished messages.

limit = ConnectionLimit(max_connections())
with trio.CancelScope() as scope, limit.seat(scope.cancel) as seat:
    ...  # the handshake
    seat.settle()
    ...  # the client is served

room = MessageRoom(MAX_HALF_MESSAGES)
with room.share(give_up) as share:
    share.holds(1000)
"""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST = 4096
# Each gateway may use a quarter of the descriptors. Three gateways then leave a quarter for all other uses.
SHARE = 4

# The least file descriptors of a service. libzmq 4.3.5 aborts the process if none is left for a connection to an ipc://
# address, so a gateway process reserves far more than its connections may use.
LEAST_FILES, AMPLE_FILES = 256, 2**16


def allow_files(wanted: int) -> int:
    """Raise the process's own limit of open files to `wanted`, as far as the system allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
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


# The most bytes of unfinished messages, of all connections of a gateway. These bytes take up to three times as much
# memory.
MAX_HALF_MESSAGES = 32 * 2**20


class Share:
    """The unfinished message of one connection; made by `MessageRoom.share`.

    Args:
        give_up: ends the connection soon, and drops its unfinished message at once.
    """

    __slots__ = ("_room", "give_up")

    def __init__(self, room: "MessageRoom", give_up: Callable[[], None]) -> None:
        self._room = room
        self.give_up = give_up

    def holds(self, num_bytes: int) -> None:
        """Set the bytes of the connection's unfinished message."""
        self._room.put(self, num_bytes)


class MessageRoom:
    """Bounds the unfinished messages of all connections: above the limit, the longest unchanged ones are given up.

    So a flood of endless messages pushes itself out, and a message that arrives without a pause gets in.

    Args:
        max_bytes: the limit for all unfinished messages together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[Share, int] = {}  # the last one has grown most recently
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
        self.num_bytes += num_bytes - self._held.pop(share, 0)
        if num_bytes:
            self._held[share] = num_bytes
        # guard: half messages of strangers
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self._held))
            self.num_bytes -= self._held.pop(oldest)
            oldest.give_up()
