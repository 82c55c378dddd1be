"""Addresses that gateways listen at: tcp://HOST:PORT, ipc://PATH (ZeroMQ) and unix://PATH (msgpack-RPC).

An address is checked before a model is loaded; a socket file is made where only its owner can reach it, and one that
a dead service left is taken away.

So is what is written after `--http`, without importing a web framework.
"""

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from genbatch.actors.security.key_files import AddressError
from genbatch.actors.security.security import Security, check_bind, is_loopback
from genbatch.nif.trusted_files import NotOurs, check_ours

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class HTTPAddress:
    """A host and a port.

    Args:
        host: an IP address or a name; "0.0.0.0" and "::" are all interfaces.
        port: 0 is one that is free.
    """

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine can reach it."""
        return is_loopback(self.host)

    @property
    def tcp(self) -> str:
        """The address as those of other gateways are written."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    def url(self, *, tls: bool) -> str:
        """The address as a browser takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if tls else 'http'}://{host}:{self.port}"


def parse_http_address(text: str) -> HTTPAddress:
    """The address in PORT, :PORT, HOST:PORT or [HOST]:PORT; without a host it is 127.0.0.1, and so is localhost.

    Raises:
        AddressError: it is none of these.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= MAX_PORT):
        raise AddressError(text, "an HTTP address is :PORT or HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "/" in host:
        raise AddressError(text, "an HTTP address is :PORT or HOST:PORT; an IPv6 address stands in brackets")
    if host == "*":
        host = "0.0.0.0"
    return HTTPAddress(LOOPBACK if host in ("", "localhost") else host, int(port))


def check_http(address: str, security: Security) -> HTTPAddress:
    """Where the gateway is to listen.

    Args:
        address: see parse_http_address.
        security: who is let in, and the certificate.

    Raises:
        AddressError: it is no address, or one that strangers could reach.
    """
    wanted = parse_http_address(address)
    check_bind("http", address, wanted.host, lacking=security.lacking_for_http)
    return wanted


def host_and_port(address: str, rest: str) -> tuple[str, int]:
    """The host, an IPv6 one in its brackets, and the port in the `rest` of an address; "*" is a port to be chosen, 0.

    Raises:
        AddressError: it has not that form.
    """
    host, _, port = rest.rpartition(":")
    if host and port == "*":
        return host, 0
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise AddressError(address, "a tcp:// address is tcp://HOST:PORT")
    return host, int(port)


# Bytes of a socket's path, a limit of the operating system (108 with the terminating zero, 104 on some).
MAX_PATH_BYTES = 103


def socket_path(address: str, rest: str) -> Path:
    """The absolute path in the `rest` of an address.

    Raises:
        AddressError: the path is missing or too long.
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
            check_private(address, path.parent)
        check_ours(path.parent)
        _remove_stale(address, path)
    except (OSError, NotOurs) as error:
        raise AddressError(address, str(error)) from error


def check_private(address: str, directory: Path) -> None:
    """Raises AddressError for a directory that others could have made, or may use."""
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
        except BlockingIOError:  # so many connect that its queue is full
            pass
    raise AddressError(address, "another service listens there")


# Connections that the kernel keeps until they are accepted. Beyond it TCP's wait for a second or more, and those to a
# Unix socket fail at once (EAGAIN); it is as long as the wait for a place in it should be at most.
BACKLOG = 1024


def check_rpc_address(address: str, *, lacking: Sequence[str]) -> Path | None:
    """Checks an address without touching anything; returns the path of a `unix://` address.

    Args:
        lacking: see check_bind.

    Raises:
        AddressError: strangers could reach the address, or it is not valid.
    """
    transport, _, rest = address.partition("://")
    if transport == "unix":
        return socket_path(address, rest)
    if transport not in ("tcp", "rpc"):
        raise AddressError(address, "the address must start with unix:// or tcp://")
    host, _ = host_and_port(address, rest)
    check_bind("rpc_bind", address, host, lacking=lacking)
    return None


def check_nobody_listens(address: str) -> None:
    """Looks whether an address is free now, and leaves everything as it was.

    Args:
        address: one that was checked: tcp://HOST:PORT, rpc://HOST:PORT, ipc://PATH or unix://PATH.

    Raises:
        AddressError: somebody listens there, or this machine has no such address.
    """
    transport, _, rest = address.partition("://")
    if transport in ("ipc", "unix"):
        if is_listening(socket_path(address, rest)):
            raise AddressError(address, f"another service listens there; stop it, {_OTHER_ADDRESS}")
        return
    host, port = host_and_port(address, rest)
    if not port:
        return  # the system will choose a free one
    host = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo("0.0.0.0" if host == "*" else host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                # As the gateways listen: connections that are only dying do not hold a port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        if error.errno == errno.EADDRINUSE:
            reason = f"another program listens there; stop it, {_OTHER_ADDRESS}"
        raise AddressError(address, reason) from error


_OTHER_ADDRESS = "or take another address"


def is_listening(path: Path) -> bool:
    """Whether a process accepts connections at the file of a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # so many connect that its queue is full
            return True
        except OSError:
            return False
    return True


def listen_at_file(path: Path) -> socket.socket:
    """A socket that listens at a file which only its owner may connect to.

    Raises:
        OSError: the file system refuses.
    """
    made = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        made.bind(str(path))
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    finally:
        os.umask(umask)
    return made


def runtime_directory() -> Path:
    """A directory of this user's own, the same at each call; it may not be there yet."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "genbatch" if runtime else Path(tempfile.gettempdir()) / f"genbatch-{os.getuid()}"


def default_address() -> str:
    """`ipc://` in a directory of this user's own, the same at each call."""
    return f"ipc://{runtime_directory() / 'zeromq.sock'}"


def check_address(address: str, *, lacking: Sequence[str]) -> Path | None:
    """Checks an address without touching anything; returns the path of an `ipc://` address.

    Args:
        lacking: see check_bind.

    Raises:
        AddressError: others could reach the address, or it is not valid.
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
