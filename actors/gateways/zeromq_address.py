"""ZeroMQ addresses: files only their owner can open, and network interfaces as far as the bind policy allows."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from genbatch.actors.gateways.bind_policy import check_bind
from genbatch.actors.gateways.errors import AddressError
from genbatch.actors.gateways.host_and_port import host_and_port
from genbatch.actors.gateways.socket_file import prepare_socket_file, socket_path


def default_address() -> str:
    """`ipc://` in a directory of this user's own, the same at each call."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime) / "genbatch" if runtime else Path(tempfile.gettempdir()) / f"genbatch-{os.getuid()}"
    return f"ipc://{directory / 'zeromq.sock'}"


def prepare_address(address: str, *, lacking: Sequence[str]) -> Path | None:
    """Makes ready to listen; returns the path of an `ipc://` address.

    A missing directory is made for the user alone. A socket file that a dead service left is removed.

    Args:
        lacking: see check_bind.

    Raises:
        AddressError: others could reach the address, somebody listens there, or it is none.
    """
    path = check_address(address, lacking=lacking)
    if path is None:
        return None
    prepare_socket_file(address, path, must_be_private=address == default_address())
    return path


def check_address(address: str, *, lacking: Sequence[str]) -> Path | None:
    """Checks an address without touching anything; returns the path of an `ipc://` address.

    Args:
        lacking: see check_bind.

    Raises:
        AddressError: others could reach the address, or it is none.
    """
    transport, _, rest = address.partition("://")
    if transport == "tcp":
        host, _ = host_and_port(address, rest)
        check_bind("bind", address, host, lacking=lacking)
        return None
    if transport != "ipc":
        raise AddressError(address, "the address must start with ipc:// or tcp://")
    if rest.startswith(("@", "*")):
        raise AddressError(address, "ipc:// needs the path of a file, whose permissions keep others out")
    return socket_path(address, rest)
