"""Take-over: a starting service gets the addresses of a running one, which then serves its last clients and ends.

    async with find_predecessor(addresses) as predecessor:          # the service that starts
        sockets = ListeningSockets(addresses, predecessor.sockets)
        ...                                                         # it loads, warms and listens
        await predecessor.leave()

    succession = Succession(sockets)                                # the service that runs
    await nursery.start(succession.run)
    await succession.leaving.wait()

    later service                          earlier service
                       <- EarlierService   at once: its addresses
    AskForSockets      ->
                       <- Listening        for each socket, which comes with it
                       <- Offered          from now on both may accept connections
    Leave              ->                  once the later one listens
                       <- Leaving          the earlier one accepts no more

If the later service ends before it sends Leave, the earlier service continues as before. They meet at a Unix socket in
a directory of this user alone, and each checks that the other's process belongs to this user.
"""

import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from genbatch.actors.engine.child_process import ChannelError, ControlChannel, Listening
from genbatch.actors.gateways.addresses import check_private, listen_at_file, prepare_socket_file, runtime_directory
from genbatch.actors.gateways.listening import GatewayKind, ListeningSockets
from genbatch.actors.security.key_files import AddressError

logger = logging.getLogger(__name__)

# The timeout for the other service's answers, in seconds.
ANSWER_S = 10.0
_FILES = "serve-*.sock"
_UCRED: Final = struct.Struct("=3i")  # Linux's: process, user, group


class EarlierService(msgspec.Struct, frozen=True, tag="running"):
    """The earlier service's process, and the address of each of its gateways.

    Args:
        refusal: why it cannot be taken over; "" if it can.
    """

    pid: int
    addresses: dict[str, str]
    refusal: str = ""


class AskForSockets(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for copies of the sockets."""


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """All sockets have been sent."""


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """Another service is taking over already."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The later service listens, so the earlier one must accept no more."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The earlier service accepts no more from now on."""


ToEarlier = AskForSockets | Leave
ToLater = EarlierService | Listening | Offered | Busy | Leaving


class Succession:
    """Offers this service's sockets to a later service.

    Args:
        sockets: this service's listening sockets.
        refusal: why no service can take over this one; "" if one can.
    """

    def __init__(self, sockets: ListeningSockets, refusal: str = "") -> None:
        self._refusal = refusal
        self.leaving = trio.Event()  # set once a later service has taken over
        self._sockets = sockets
        self._successor: ControlChannel[Any] | None = None
        self._accepting = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait for later services until one has taken over; without a socket file, log a warning and return."""
        path = runtime_directory() / f"serve-{os.getpid()}.sock"
        try:
            prepare_socket_file(str(path), path, must_be_private=True)
            listening = listen_at_file(path)
        except (AddressError, OSError) as error:
            logger.warning("this service cannot be taken over: %s", error)
            task_status.started()
            return
        async with trio.open_nursery() as nursery:
            task_status.started()
            try:
                with trio.socket.from_stdlib_socket(listening) as accepting, self._accepting:
                    while True:
                        connection, _ = await accepting.accept()
                        nursery.start_soon(self._serve, socket.socket(fileno=connection.detach()))
            finally:
                path.unlink(missing_ok=True)

    async def _serve(self, end: socket.socket) -> None:
        channel: ControlChannel[Any] = ControlChannel(end, ToEarlier)
        try:
            # guard: only the same user takes over
            if _user_of(end) != os.getuid():
                return
            await self._talk(channel)
        except (OSError, ChannelError) as error:
            logger.warning("a service that wanted to take over is gone: %s", error)
        finally:
            if self._successor is channel and not self.leaving.is_set():
                self._successor = None
                self._sockets.own()
            channel.close()

    async def _talk(self, channel: ControlChannel[Any]) -> None:
        addresses = {str(kind): address for kind, address in self._sockets.addresses.items()}
        await channel.send(EarlierService(os.getpid(), addresses, self._refusal))
        while (message := await channel.receive()) is not None:
            if self.leaving.is_set() or self._refusal:
                return  # the addresses are the later service's, or remain this one's
            if isinstance(message, AskForSockets):
                # guard: one service takes over at a time
                if self._successor is not None:
                    await channel.send(Busy())
                    return
                self._successor = channel
                self._sockets.disown()
                for kind, listening in self._sockets:
                    await channel.send(Listening(kind), listening.dup())
                await channel.send(Offered())
            elif self._successor is channel:
                self.leaving.set()
                self._accepting.cancel()
                await channel.send(Leaving())


class Predecessor:
    """A running service that this service replaces.

    Args:
        pid: its process id.
        sockets: copies of its sockets at the addresses that both services have.
        channel: the channel to it.
    """

    def __init__(
        self, pid: int, sockets: Mapping[GatewayKind, list[socket.socket]], channel: ControlChannel[Any]
    ) -> None:
        self.pid = pid
        self.sockets = sockets
        self._channel = channel

    async def leave(self) -> None:
        """Tell it to accept no more connections; it may already have ended by itself."""
        with suppress(OSError), trio.move_on_after(ANSWER_S):
            await self._channel.send(Leave())
            await self._channel.receive()


@asynccontextmanager
async def find_predecessor(addresses: Mapping[GatewayKind, str]) -> AsyncIterator[Predecessor | None]:
    """Yield the running service that has one of these addresses, or None. It keeps running until `leave`.

    Raises:
        AddressError: it has the address for another protocol, it cannot be replaced, or another service is doing so.
    """
    directory = runtime_directory()
    if not directory.is_dir():
        yield None
        return
    check_private(str(directory), directory)
    for path in sorted(directory.glob(_FILES)):
        channel = _connect(path)
        if channel is None:
            continue
        try:
            predecessor = await _ask(channel, addresses)
            if predecessor is not None:
                yield predecessor
                return
        finally:
            channel.close()
    yield None


def _connect(path: Path) -> ControlChannel[Any] | None:
    """Return a channel to the service at this file; None if no service of this user listens there."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(str(path))
    except OSError:
        end.close()
        return None
    if _user_of(end) != os.getuid():
        end.close()
        return None
    return ControlChannel(end, ToLater)


async def _ask(channel: ControlChannel[Any], addresses: Mapping[GatewayKind, str]) -> Predecessor | None:
    """Return the service at the other end of the channel, if it shares an address; else None."""
    with suppress(OSError, ChannelError), trio.move_on_after(ANSWER_S):
        running = await channel.receive()
        if not isinstance(running, EarlierService):
            return None
        shared = _shared_kinds(running, addresses)
        if not shared:
            return None
        if running.refusal:
            address = next(iter(shared.values()))
            raise AddressError(address, f"process {running.pid} cannot be taken over: {running.refusal}")
        await channel.send(AskForSockets())
        sockets: dict[GatewayKind, list[socket.socket]] = {}
        while True:
            match await channel.receive():
                case Listening(kind):
                    listening = channel.take_socket()
                    if kind in shared:
                        sockets.setdefault(kind, []).append(listening)  # type: ignore[arg-type]  # a key of ours
                    else:
                        listening.close()
                case Offered():
                    return Predecessor(running.pid, sockets, channel)
                case Busy():
                    address = next(iter(shared.values()))
                    raise AddressError(address, f"another service is taking the place of process {running.pid}")
                case _:
                    return None
    return None


def _shared_kinds(running: EarlierService, addresses: Mapping[GatewayKind, str]) -> dict[str, str]:
    """Return the kinds of gateways that both services have at the same address.

    Raises:
        AddressError: the running service has an address for another protocol.
    """
    shared: dict[str, str] = {}
    for kind, address in addresses.items():
        for other, taken in running.addresses.items():
            if address == taken and other != kind:
                raise AddressError(address, f"process {running.pid} serves {other} there, which cannot become {kind}")
        if running.addresses.get(kind) == address:
            shared[kind] = address
    return shared


def _user_of(connection: socket.socket) -> int:
    """Return the user of the process at the other end; without SO_PEERCRED the directory's permissions must suffice."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()
    _, user, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(user)
