"""What strangers share of a gateway: its connections, and the memory of messages that have begun and not ended.

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
# Of the descriptors, for each gateway; three of them leave a quarter to everything else.
SHARE = 4

# File descriptors that a service needs at least. libzmq 4.3.5 aborts the process where none is left for a connection to
# an ipc:// address, so a gateway process takes far more than its connections may have.
LEAST_FILES, AMPLE_FILES = 256, 2**16


def allow_files(wanted: int) -> int:
    """Raises the process's own limit of open files to `wanted`, as far as the system lets it; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # the system has another limit besides
        return soft
    return most


def max_connections() -> int:
    """Most connections of one gateway, those that have not said who they are included."""
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
        self.is_refused = False  # all seats are taken, by clients who have settled
        self._newcomers = newcomers

    def settle(self) -> None:
        """The client has said who it is, or at least something that makes sense: it is pushed out no longer."""
        self._newcomers.pop(self, None)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """For as long as the body runs the client is not pushed out; then its silence begins anew."""
        self.settle()
        try:
            yield
        finally:
            self._newcomers[self] = None


class ConnectionLimit:
    """Who comes when all seats are taken pushes out the one that has said nothing for longest.

    So a flood of connections that never speak pushes itself out, and whoever speaks at once gets in.

    Args:
        most: seats.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken = 0
        self._newcomers: dict[Seat, None] = {}  # not settled, oldest first

    def __len__(self) -> int:
        return self._taken

    @contextmanager
    def seat(self, push_out: Callable[[], None]) -> Iterator[Seat]:
        """A place for as long as the body runs.

        Args:
            push_out: called when another needs the place and this client has not settled; ends the connection soon.
        """
        seat = Seat(self._newcomers, push_out)
        self._newcomers[seat] = None
        self._taken += 1
        try:
            # guard: connections of strangers
            if self._taken > self.most:
                oldest = next(iter(self._newcomers))
                oldest.settle()  # it is pushed out only once
                if oldest is seat:
                    seat.is_refused = True
                else:
                    oldest.push_out()
            yield seat
        finally:
            seat.settle()
            self._taken -= 1


# Bytes of messages that have begun and not ended, of all connections of a gateway. They take up to three times as much
# of memory.
MAX_HALF_MESSAGES = 32 * 2**20


class Share:
    """What one connection holds; made by `MessageRoom.share`.

    Args:
        give_up: ends the connection soon, and its half message at once.
    """

    __slots__ = ("_room", "give_up")

    def __init__(self, room: "MessageRoom", give_up: Callable[[], None]) -> None:
        self._room = room
        self.give_up = give_up

    def holds(self, num_bytes: int) -> None:
        """The connection's half message has so many bytes now."""
        self._room.put(self, num_bytes)


class MessageRoom:
    """Has the connections give up that are in the middle of a message for longest without a byte more of it.

    So a flood of messages that do not end pushes itself out, and a message that arrives without a pause gets in.

    Args:
        max_bytes: of all half messages together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[Share, int] = {}  # the one that has grown last comes last
        self.num_bytes = 0

    @contextmanager
    def share(self, give_up: Callable[[], None]) -> Iterator[Share]:
        """A share for as long as the body runs, of nothing at first."""
        share = Share(self, give_up)
        try:
            yield share
        finally:
            self.put(share, 0)

    def put(self, share: Share, num_bytes: int) -> None:
        """Changes what a share holds; the others' `give_up` may be called, or its own."""
        self.num_bytes += num_bytes - self._held.pop(share, 0)
        if num_bytes:
            self._held[share] = num_bytes
        # guard: half messages of strangers
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self._held))
            self.num_bytes -= self._held.pop(oldest)
            oldest.give_up()
