"""Where the HTTP gateway listens, as it is written after `--http`, and whether it can and may be started.

Both are told before a model is loaded, so nothing of the extra `genbatch[http]` is imported here.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from genbatch.actors.security.errors import AddressError
from genbatch.actors.security.security import Security, check_bind, is_loopback
from genbatch.nif.errors import OptionError
from genbatch.nif.extras import how_to_install

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


NEEDED = ("starlette", "hypercorn", "prometheus_client")


def check_http(address: str, security: Security) -> HTTPAddress:
    """Where the gateway is to listen.

    Args:
        address: see parse_http_address.
        security: who is let in, and the certificate.

    Raises:
        AddressError: it is no address, or one that strangers could reach.
        OptionError: the extra is not installed.
    """
    wanted = parse_http_address(address)
    check_bind("http", address, wanted.host, lacking=security.lacking_for_http)
    check_extra("http")
    return wanted


def check_extra(option: str) -> None:
    """Raises:
    OptionError: the libraries that HTTP needs are not installed; it says how to get them.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise OptionError(option, f"needs {', '.join(missing)}; {how_to_install('http')}")
