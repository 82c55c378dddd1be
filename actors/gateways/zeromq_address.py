"""Where a gateway may listen: files only their owner can open, and this machine's own network interface."""

import ipaddress
import os
import socket
import stat
import tempfile
from pathlib import Path

from genbatch.actors.runtime.errors import ActorError

# Bytes of a socket's path, a limit of the operating system (108 with the terminating zero, 104 on some).
MAX_PATH_BYTES = 103


class AddressError(ActorError):
    """The service cannot or must not listen at the address; the message names it and the reason."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen at {address}: {reason}")
        self.address = address
        self.reason = reason


def default_address() -> str:
    """`ipc://` in a directory of this user's own, the same at each call."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime) / "genbatch" if runtime else Path(tempfile.gettempdir()) / f"genbatch-{os.getuid()}"
    return f"ipc://{directory / 'zeromq.sock'}"


def prepare_address(address: str) -> Path | None:
    """Makes ready to listen; returns the path of an `ipc://` address.

    A missing directory is made for the user alone. A socket file that a dead service left is removed.

    Raises:
        AddressError: others could reach the address, somebody listens there, or it is none.
    """
    transport, _, rest = address.partition("://")
    if transport == "tcp":
        _check_loopback(address, rest)
        return None
    if transport != "ipc":
        raise AddressError(address, "the address must start with ipc:// or tcp://")
    if not rest or rest.startswith(("@", "*")):
        raise AddressError(address, "ipc:// needs the path of a file, whose permissions keep others out")
    path = Path(rest).absolute()
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise AddressError(address, f"the path has more than {MAX_PATH_BYTES} bytes")
    try:
        _prepare_directory(address, path.parent)
        _remove_stale(address, path)
    except OSError as error:
        raise AddressError(address, str(error)) from error
    return path


def _check_loopback(address: str, rest: str) -> None:
    host, _, port = rest.rpartition(":")
    if not (port == "*" or port.isdecimal()):
        raise AddressError(address, "a tcp:// address is tcp://HOST:PORT")
    host = host.removeprefix("[").removesuffix("]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise AddressError(address, "only 127.0.0.1, [::1] and localhost are allowed: nothing here keeps others out")


def _prepare_directory(address: str, directory: Path) -> None:
    """The default one stands where others may make it first, so it must be ours; one that the user chose may be any."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if address != default_address():
        return
    status = directory.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise AddressError(address, f"{directory} is not a directory of this user alone (mode 0700)")


def _remove_stale(address: str, path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressError(address, "the file exists and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise AddressError(address, "another service listens there")
