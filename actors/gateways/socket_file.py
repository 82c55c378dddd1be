"""The file of a Unix socket: where it may be, and that nobody else has it."""

import os
import socket
import stat
from pathlib import Path

from genbatch.actors.gateways.errors import AddressError

# Bytes of a socket's path, a limit of the operating system (108 with the terminating zero, 104 on some).
MAX_PATH_BYTES = 103


def socket_path(address: str, rest: str) -> Path:
    """The absolute path in the `rest` of an address.

    Raises:
        AddressError: there is none, or it is too long.
    """
    if not rest:
        raise AddressError(address, "it needs the path of a file, whose permissions keep others out")
    path = Path(rest).absolute()
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise AddressError(address, f"the path has more than {MAX_PATH_BYTES} bytes")
    return path


def prepare_socket_file(address: str, path: Path, *, must_be_private: bool = False) -> None:
    """Makes ready to listen: makes a missing directory for the user alone, removes a file that a dead service left.

    Args:
        must_be_private: the directory must be this user's alone, since others may have made it first.

    Raises:
        AddressError: somebody listens there, or the file system refuses.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if must_be_private:
            _check_private(address, path.parent)
        _remove_stale(address, path)
    except OSError as error:
        raise AddressError(address, str(error)) from error


def _check_private(address: str, directory: Path) -> None:
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
