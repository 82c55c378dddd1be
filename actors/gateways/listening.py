"""ListeningSockets: the listening sockets of a service. They outlive gateways, and pass to the service's successor.

    sockets = ListeningSockets()
    await sockets.open("http", "tcp://127.0.0.1:8000")
    HTTPGateway(dispatcher, address, sockets=sockets.copies("http"))

A copy shares the queue of connections that are not accepted yet. So two services may listen at one address, and no
connection is refused while the later service takes over (ADR 66).
"""

import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

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

GatewayKind = Literal["zeromq", "rpc", "http", "metrics"]
# Seconds. libzmq polls a queue although it cannot accept its connections now. Without a wait, this would fill a core.
HOLD_S = 0.004
_TIMEVAL = struct.Struct("@ll")
# libzmq resolves each of these names to one IPv4 address.
_ZEROMQ_HOSTS = {"*": "0.0.0.0", "localhost": "127.0.0.1"}


class ListeningSockets:
    """The sockets of a service, by the kind of their gateway.

    Args:
        addresses: the address of each kind; None if each gateway gives its own address.
        inherited: sockets of the service that this one replaces.
    """

    def __init__(
        self,
        addresses: Mapping[GatewayKind, str] | None = None,
        inherited: Mapping[GatewayKind, Sequence[socket.socket]] | None = None,
    ) -> None:
        self._owned: set[GatewayKind] = set()  # `close` removes the files of their Unix sockets
        self._addresses = dict(addresses or {})
        self._sockets = {kind: list(sockets) for kind, sockets in (inherited or {}).items()}

    def __iter__(self) -> Iterator[tuple[GatewayKind, socket.socket]]:
        """Yield each kind with each of its sockets, to be copied."""
        for kind, sockets in self._sockets.items():
            for listening in sockets:
                yield kind, listening

    def __contains__(self, kind: GatewayKind) -> bool:
        return kind in self._sockets

    @property
    def addresses(self) -> dict[GatewayKind, str]:
        """The addresses that are open."""
        return {
            kind: address_of(address, self._sockets[kind][0])
            for kind, address in self._addresses.items()
            if kind in self._sockets
        }

    async def open_all(self) -> None:
        """Open every address; raises as `open` does."""
        for kind, address in self._addresses.items():
            await self.open(kind, address)

    async def open(self, kind: GatewayKind, address: str) -> None:
        """Listen at a checked address, unless this kind has sockets already.

        Raises:
            AddressError: the operating system refuses, or another program listens there.
        """
        if kind not in self._sockets:
            self._owned.add(kind)
            self._sockets[kind] = await open_sockets(address, of_zeromq=kind == "zeromq")

    def put(self, kind: GatewayKind, listening: socket.socket) -> None:
        """Add a socket that another process has opened."""
        self._sockets.setdefault(kind, []).append(listening)

    def copies(self, kind: GatewayKind) -> list[socket.socket]:
        """Return copies of the sockets for a gateway, which closes them."""
        return [listening.dup() for listening in self._sockets[kind]]

    def own(self) -> None:
        """Own the files of all Unix sockets, so that `close` removes them: no other service uses them now."""
        self._owned = {*self._sockets}

    def disown(self) -> None:
        """Leave the files to another service that has copies."""
        self._owned.clear()

    def close(self) -> None:
        """Close the sockets, and remove the files of owned Unix sockets."""
        for kind, listening in self:
            path = listening.getsockname() if listening.family == socket.AF_UNIX else ""
            listening.close()
            if path and kind in self._owned:
                Path(path).unlink(missing_ok=True)
        self._sockets.clear()


async def open_sockets(address: str, *, of_zeromq: bool = False) -> list[socket.socket]:
    """Listen at a checked address; the name of a host may have several addresses.

    Raises:
        AddressError: the operating system refuses, or another program listens there.
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
            if host == "::":  # clients of IPv4 too, as libzmq listens
                both = socket.create_server((host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
                both.setblocking(False)
                return [both]
        listeners = await trio.open_tcp_listeners(port, host=None if host == "*" else host, backlog=BACKLOG)
    except OSError as error:
        raise AddressError(address, str(error)) from error
    return [socket.socket(fileno=listener.socket.detach()) for listener in listeners]


def as_listeners(sockets: Sequence[socket.socket]) -> list[trio.SocketListener]:
    """Return the sockets as trio's listeners."""
    return [trio.SocketListener(trio.socket.from_stdlib_socket(listener)) for listener in sockets]


def address_of(address: str, listening: socket.socket) -> str:
    """Return the address, with the actual port in place of an open one."""
    if listening.family == socket.AF_UNIX:
        return address
    return f"{address.rpartition(':')[0]}:{listening.getsockname()[1]}"


class LentSocket:
    """A listening socket that libzmq accepts from, and a way to make libzmq stop.

    When libzmq unbinds a socket, it ends every connection that came through it. So the descriptor is redirected to an
    unreachable socket, and redirected back before libzmq closes it.

    Args:
        listening: the socket; it is closed by `close`.
    """

    def __init__(self, listening: socket.socket) -> None:
        listening.setblocking(False)  # libzmq must not block on another process's connection
        self._listening = listening
        self.descriptor = os.dup(listening.fileno())  # libzmq closes this copy
        self.endpoint = ""  # libzmq's name for it, once it is bound
        self._has_stopped = False

    def stop_accepting(self) -> None:
        """Leave new connections in the queue, for a process that has a copy of the socket.

        libzmq must poll the descriptor already: it must have accepted a connection.
        """
        self._has_stopped = True
        self._redirect()

    async def hold(self) -> None:
        """Leave new connections in the queue, until cancelled; they are accepted afterwards, in their order.

        libzmq must have accepted a connection.
        """
        self._redirect(wait_s=HOLD_S)
        try:
            await trio.sleep_forever()
        finally:
            if not self._has_stopped:
                os.dup2(self._listening.fileno(), self.descriptor, inheritable=False)

    def _redirect(self, wait_s: float = 0.0) -> None:
        """Redirect the descriptor to a socket without connections; each `accept` of libzmq waits there for `wait_s`."""
        # The socket lies in a folder of this user alone, and has no name once the folder is removed.
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as unreachable:
            unreachable.bind(f"{folder}/s")
            unreachable.listen(1)
            unreachable.setblocking(wait_s > 0)
            unreachable.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, round(1e6 * wait_s)))
            os.dup2(unreachable.fileno(), self.descriptor, inheritable=False)

    def give_up(self) -> None:
        """Close our socket, since libzmq may close its descriptor at any time."""
        self._listening.close()

    def close(self) -> None:
        """Redirect the descriptor back to the socket that libzmq polls; call this before libzmq closes it."""
        os.dup2(self._listening.fileno(), self.descriptor, inheritable=False)
        self._listening.close()
