"""ListeningSockets: the sockets at which a service listens. They outlive gateways, and pass to the service's successor.

    sockets = ListeningSockets()
    await sockets.open("http", "tcp://127.0.0.1:8000")
    HTTPGateway(dispatcher, address, sockets=sockets.copies("http"))

A copy shares the queue of connections that nobody has accepted yet. So two services may listen at one address, and no
connection is refused while the later one takes over (ADR 66).
"""

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import trio

from genbatch.actors.gateways.addresses import (
    BACKLOG,
    default_address,
    host_and_port,
    listen_at_file,
    prepare_socket_file,
    socket_path,
)
from genbatch.actors.security.key_files import AddressError

Door = Literal["zeromq", "rpc", "http", "metrics"]
DOORS: tuple[Door, ...] = get_args(Door)
# libzmq takes these for one address of IPv4.
_ZEROMQ_HOSTS = {"*": "0.0.0.0", "localhost": "127.0.0.1"}


class ListeningSockets:
    """The sockets of a service, by door.

    Args:
        addresses: where each door is to listen; none where each gateway says its own address.
        inherited: sockets of the service that this one takes the place of.
    """

    def __init__(
        self,
        addresses: Mapping[Door, str] | None = None,
        inherited: Mapping[Door, Sequence[socket.socket]] | None = None,
    ) -> None:
        self._owned: set[Door] = set()  # `close` removes the files of their Unix sockets
        self._addresses = dict(addresses or {})
        self._sockets = {door: list(sockets) for door, sockets in (inherited or {}).items()}

    def __iter__(self) -> Iterator[tuple[Door, socket.socket]]:
        """Each door and a socket of it, to be copied."""
        for door, sockets in self._sockets.items():
            for listening in sockets:
                yield door, listening

    def __contains__(self, door: Door) -> bool:
        return door in self._sockets

    @property
    def addresses(self) -> dict[Door, str]:
        """Where the open doors listen."""
        return {
            door: address_of(address, self._sockets[door][0])
            for door, address in self._addresses.items()
            if door in self._sockets
        }

    async def open_all(self) -> None:
        """Opens every door that has an address; raises as `open`."""
        for door, address in self._addresses.items():
            await self.open(door, address)

    async def open(self, door: Door, address: str) -> None:
        """Listens at an address that was checked, unless the door is open already.

        Raises:
            AddressError: the operating system refuses, or somebody else listens there.
        """
        if door not in self._sockets:
            self._owned.add(door)
            self._sockets[door] = await open_sockets(address, of_zeromq=door == "zeromq")

    def put(self, door: Door, listening: socket.socket) -> None:
        """Adds a socket that another process has opened."""
        self._sockets.setdefault(door, []).append(listening)

    def copies(self, door: Door) -> list[socket.socket]:
        """Sockets for a gateway, which closes them."""
        return [listening.dup() for listening in self._sockets[door]]

    def own(self) -> None:
        """Removes the files of all of its Unix sockets at the end: no other service has them now."""
        self._owned = {*self._sockets}

    def disown(self) -> None:
        """Leaves the files to another service that has copies."""
        self._owned.clear()

    def close(self) -> None:
        """Closes the sockets, and removes their files where it owns them: those that it opened, or those of `own`."""
        for door, listening in self:
            path = listening.getsockname() if listening.family == socket.AF_UNIX else ""
            listening.close()
            if path and door in self._owned:
                Path(path).unlink(missing_ok=True)
        self._sockets.clear()


async def open_sockets(address: str, *, of_zeromq: bool = False) -> list[socket.socket]:
    """Listens at an address that was checked; a host's name may stand for several.

    Raises:
        AddressError: the operating system refuses, or somebody else listens there.
    """
    transport, _, rest = address.partition("://")
    try:
        if transport in ("ipc", "unix"):
            path = socket_path(address, rest)
            prepare_socket_file(address, path, must_be_private=address == default_address())
            return [listen_at_file(path)]
        host, port = host_and_port(address, rest)
        host = host.removeprefix("[").removesuffix("]")
        if of_zeromq:
            host = _ZEROMQ_HOSTS.get(host, host)
        listeners = await trio.open_tcp_listeners(port, host=None if host == "*" else host, backlog=BACKLOG)
    except OSError as error:
        raise AddressError(address, str(error)) from error
    return [socket.socket(fileno=listener.socket.detach()) for listener in listeners]


def as_listeners(sockets: Sequence[socket.socket]) -> list[trio.SocketListener]:
    """The sockets as trio accepts from them."""
    return [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in sockets]


def address_of(address: str, listening: socket.socket) -> str:
    """The address with the port that was chosen, where it leaves the port open."""
    if listening.family == socket.AF_UNIX:
        return address
    return f"{address.rpartition(':')[0]}:{listening.getsockname()[1]}"


class LentSocket:
    """A listening socket that libzmq accepts from, and how to make libzmq stop.

    libzmq ends every connection that came by a socket when it unbinds the socket. So the descriptor is pointed at a
    socket to which nobody can connect, and back before libzmq closes it.

    Args:
        listening: is closed by `close`.
    """

    def __init__(self, listening: socket.socket) -> None:
        listening.setblocking(False)  # else libzmq's thread may wait for a connection that another process has accepted
        self._listening = listening
        self.descriptor = os.dup(listening.fileno())  # libzmq closes it
        self.endpoint = ""  # what libzmq calls it, once it is bound

    def stop_accepting(self) -> None:
        """Leaves new connections in the queue, for a process that has a copy of the socket.

        libzmq must poll the descriptor already: it has accepted a connection.
        """
        # In a folder of this user alone, and without a name once the folder is removed.
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as unreachable:
            unreachable.bind(f"{folder}/s")
            unreachable.listen(1)
            unreachable.setblocking(False)
            os.dup2(unreachable.fileno(), self.descriptor, inheritable=False)

    def give_up(self) -> None:
        """Libzmq closes the descriptor at any time."""
        self._listening.close()

    def close(self) -> None:
        """Makes the descriptor what libzmq polls. To be called before libzmq closes it."""
        os.dup2(self._listening.fileno(), self.descriptor, inheritable=False)
        self._listening.close()
