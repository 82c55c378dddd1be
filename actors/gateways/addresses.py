"""Addresses of gateways: tcp://HOST:PORT, ipc://PATH (ZeroMQ) and unix://PATH (msgpack-RPC).

An address is checked before a model is loaded. A socket file is made where only its owner can reach it, and the stale
file of an ended service is removed.

The value of `--http` is checked here, too, without importing a web framework.
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
        port: the port; 0 for a free one.
    """

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def tcp(self) -> str:
        """The address in the form of the other gateways' addresses."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    def url(self, *, tls: bool) -> str:
        """Return the address as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if tls else 'http'}://{host}:{self.port}"


def parse_http_address(text: str) -> HTTPAddress:
    """Parse PORT, :PORT, HOST:PORT or [HOST]:PORT; the host is 127.0.0.1 for "localhost" and for no host.

    Raises:
        AddressError: the text has none of these forms.
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
    """Return the address at which the gateway may listen.

    Args:
        address: see parse_http_address.
        security: the access control, with the certificate.

    Raises:
        AddressError: the address is invalid, or strangers could reach it.
    """
    parsed = parse_http_address(address)
    check_bind("http", address, parsed.host, lacking=security.lacking_for_http)
    return parsed


def host_and_port(address: str, rest: str) -> tuple[str, int]:
    """Return the host, with brackets for IPv6, and the port in the `rest` of an address; the port "*" is 0.

    Raises:
        AddressError: the address has another form.
    """
    host, _, port = rest.rpartition(":")
    if host and port == "*":
        return host, 0
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise AddressError(address, "a tcp:// address is tcp://HOST:PORT")
    return host, int(port)


# The most bytes of a socket's path, by the operating system (108 with the terminating zero, 104 on some).
MAX_PATH_BYTES = 103


def socket_path(address: str, rest: str) -> Path:
    """Return the absolute path in the `rest` of an address.

    Raises:
        AddressError: the path is missing or too long.
    """
    if not rest:
        raise AddressError(address, "it needs the path of a file: the file's permissions keep others out")
    path = Path(rest).absolute()
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise AddressError(address, f"the path has more than {MAX_PATH_BYTES} bytes")
    return path


def prepare_socket_file(address: str, path: Path, *, must_be_private: bool = False) -> None:
    """Prepare for listening: make a missing private directory, and remove the stale file of an ended service.

    Args:
        must_be_private: the directory must belong to this user alone, since other users may have made it first.

    Raises:
        AddressError: another service listens there, or the file system refuses.
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
    """Raise AddressError for a directory that other users could have made, or may use."""
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
        except BlockingIOError:  # many clients connect, so its queue is full
            pass
    raise AddressError(address, "another service listens there")


# Connections that the kernel keeps until they are accepted. Above this, TCP clients wait for a second or more, and
# connections to a Unix socket fail at once (EAGAIN).
BACKLOG = 1024


# By option, the transport with a file and those with a port.
_TRANSPORTS = {"bind": ("ipc", ["tcp"]), "rpc_bind": ("unix", ["tcp", "rpc"])}


def check_address(option: str, address: str, *, lacking: Sequence[str]) -> Path | None:
    """Check an address without changing anything; return the path of an `ipc://` or `unix://` address.

    Args:
        option: "bind" (ZeroMQ) or "rpc_bind" (msgpack-RPC).
        lacking: see check_bind.

    Raises:
        AddressError: strangers could reach the address, or it is not valid.
    """
    with_file, with_port = _TRANSPORTS[option]
    transport, _, rest = address.partition("://")
    if transport in with_port:
        host, _ = host_and_port(address, rest)
        check_bind(option, address, host, lacking=lacking)
        return None
    if transport != with_file:
        raise AddressError(address, f"the address must start with {with_file}:// or tcp://")
    if transport == "ipc" and rest.startswith(("@", "*")):
        raise AddressError(address, "ipc:// needs the path of a file: the file's permissions keep others out")
    return socket_path(address, rest)


def check_nobody_listens(address: str) -> None:
    """Check that an address is free now; change nothing.

    Args:
        address: a checked address: tcp://HOST:PORT, rpc://HOST:PORT, ipc://PATH or unix://PATH.

    Raises:
        AddressError: another program listens there, or this machine has no such address.
    """
    transport, _, rest = address.partition("://")
    if transport in ("ipc", "unix"):
        if is_listening(socket_path(address, rest)):
            raise AddressError(address, f"another service listens there; stop it, {_OTHER_ADDRESS}")
        return
    host, port = host_and_port(address, rest)
    if not port:
        return  # the system will choose a free port
    host = host.removeprefix("[").removesuffix("]")
    try:
        candidates = socket.getaddrinfo("0.0.0.0" if host == "*" else host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in candidates:
            with socket.socket(family, kind, protocol) as probe:
                # Use the gateways' own option, so that connections in TIME_WAIT do not block a port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        if error.errno == errno.EADDRINUSE:
            reason = f"another program listens there; stop it, {_OTHER_ADDRESS}"
        raise AddressError(address, reason) from error


_OTHER_ADDRESS = "or take another address"


def is_listening(path: Path) -> bool:
    """Return whether a process accepts connections at a socket's file."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # many clients connect, so its queue is full
            return True
        except OSError:
            return False
    return True


def listen_at_file(path: Path) -> socket.socket:
    """Return a socket that listens at a file to which only its owner may connect.

    Raises:
        OSError: the file system refuses.
    """
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(umask)
    return listener


def runtime_directory() -> Path:
    """Return this user's own directory for sockets, the same at each call; it may not exist yet."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "genbatch" if runtime else Path(tempfile.gettempdir()) / f"genbatch-{os.getuid()}"


def default_address() -> str:
    """Return an `ipc://` address in this user's own directory, the same at each call."""
    return f"ipc://{runtime_directory() / 'zeromq.sock'}"
