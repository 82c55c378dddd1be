"""Addresses of msgpack-RPC gateways: unix://PATH, and tcp://HOST:PORT as far as the bind policy allows."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import trio

from genbatch.actors.gateways.bind_policy import check_bind
from genbatch.actors.gateways.errors import AddressError
from genbatch.actors.gateways.host_and_port import host_and_port
from genbatch.actors.gateways.socket_file import prepare_socket_file, socket_path

# Connections that the kernel keeps until they are accepted.
BACKLOG = 128


def check_rpc_address(address: str, *, lacking: Sequence[str]) -> Path | None:
    """Checks an address without touching anything; returns the path of a `unix://` address.

    Args:
        lacking: see check_bind.

    Raises:
        AddressError: strangers could reach the address, or it is none.
    """
    transport, _, rest = address.partition("://")
    if transport == "unix":
        return socket_path(address, rest)
    if transport not in ("tcp", "rpc"):
        raise AddressError(address, "the address must start with unix:// or tcp://")
    host, _ = host_and_port(address, rest)
    check_bind("rpc_bind", address, host, lacking=lacking)
    return None


async def listen(address: str, path: Path | None) -> list[trio.SocketListener]:
    """Listens at an address that was checked.

    Raises:
        AddressError: the operating system refuses, or somebody else listens there.
    """
    try:
        if path is not None:
            prepare_socket_file(address, path)
            return [_listen_at_file(path)]
        host, port = host_and_port(address, address.partition("://")[2])
        host = host.removeprefix("[").removesuffix("]")
        return await trio.open_tcp_listeners(port, host=None if host == "*" else host, backlog=BACKLOG)
    except OSError as error:
        raise AddressError(address, str(error)) from error


def listening_address(address: str, listener: trio.SocketListener) -> str:
    """The address for clients, with the port that was chosen."""
    if address.startswith("unix://"):
        return address
    host = address.partition("://")[2].rpartition(":")[0]
    return f"rpc://{host}:{listener.socket.getsockname()[1]}"


def _listen_at_file(path: Path) -> trio.SocketListener:
    made = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)  # only its owner may connect to the file
    try:
        made.bind(str(path))
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    finally:
        os.umask(umask)
    return trio.SocketListener(trio.socket.from_stdlib_socket(made))
