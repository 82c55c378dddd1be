"""Security: a service's access control, read once at its start and shared by its gateways, and the rule for addresses.

Only this file decides which machines may reach an address. This machine always may; others only with keys or tokens.

    security = open_security(keys=..., tokens=...)
    check_bind("bind", "tcp://0.0.0.0:5555", "0.0.0.0", lacking=security.lacking_for_zeromq)  # raises InsecureBind
"""

import ipaddress
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from genbatch.actors.security.key_files import InsecureBind, TokenFile, server_context

if TYPE_CHECKING:  # imports zmq, which a command that only prints its help does without
    from genbatch.actors.security.curve_keys import ServerKeys

# Returns the tenant of a token; None for an unknown token.
Authenticate = Callable[[str], str | None]


def check_bind(option: str, address: str, host: str, *, lacking: Sequence[str]) -> None:
    """Refuse an address that other machines can reach without access control.

    Args:
        option: the option with the address, such as "bind".
        address: the option's value, for the message.
        host: the host in the address; "*" and "" are all interfaces.
        lacking: the missing options that this protocol needs on a network; see Security.

    Raises:
        InsecureBind: other machines could reach the host, and an option is missing.
    """
    # guard: bind policy
    if lacking and not is_loopback(host):
        raise InsecureBind(option, address, lacking)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host.

    Names other than localhost are not looked up, since their addresses may change.
    """
    host = host.removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The access control of a service.

    Args:
        keys: ZeroMQ connections are encrypted by CURVE, and only clients with a key on the list can connect.
        tokens: msgpack-RPC and HTTP clients must show a token of the file.
        tls: msgpack-RPC and HTTP over TCP are encrypted.
        http_insecure: HTTP may be on a network without tokens and TLS: its operator keeps strangers out by other means.
        allowed_hosts: names by which HTTP requests may call the service. With any name here, and on a loopback
            interface, other names are refused.
        allowed_origins: web pages of other origins that may use it over HTTP, such as "https://chat.example".
    """

    keys: "ServerKeys | None" = None
    tokens: TokenFile | None = None
    tls: ssl.SSLContext | None = None
    http_insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()

    @property
    def lacking_for_zeromq(self) -> list[str]:
        """The missing options that a ZeroMQ address on a network needs."""
        return [] if self.keys else ["keys"]

    @property
    def lacking_for_tokens(self) -> list[str]:
        """The missing options that an msgpack-RPC or HTTP address on a network needs."""
        lacking = [] if self.tokens else ["tokens"]
        return lacking if self.tls else [*lacking, "tls_cert", "tls_key"]

    @property
    def lacking_for_http(self) -> list[str]:
        """The missing options that an HTTP address on a network needs; none with `http_insecure`."""
        return [] if self.http_insecure else self.lacking_for_tokens


def open_security(
    *, keys: str | None = None, tokens: str | None = None, tls_cert: str | None = None, tls_key: str | None = None
) -> Security:
    """Read the files that the options name; an option that is not given leaves its field empty.

    Raises:
        KeyFileError: a file is missing, faulty, or exposed to others.
    """
    from genbatch.actors.security.curve_keys import ServerKeys

    return Security(
        keys=ServerKeys(Path(keys)) if keys else None,
        tokens=TokenFile(Path(tokens)) if tokens else None,
        tls=server_context(Path(tls_cert), Path(tls_key)) if tls_cert and tls_key else None,
    )
