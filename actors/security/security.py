"""Security: what keeps strangers out of a service, read once at its start and shared by its gateways; and the one place
that decides who may be reached from where: this machine always, others only with what keeps strangers out.

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

# In whose name the owner of a token calls; None for a token that nobody has.
Authenticate = Callable[[str], str | None]


def check_bind(option: str, address: str, host: str, *, lacking: Sequence[str]) -> None:
    """Refuses to let other machines in without what keeps strangers out.

    Args:
        option: the option that has the address, such as "bind".
        address: what it has, for the message.
        host: the host in it; "*" and "" are all interfaces.
        lacking: of what this protocol needs on a network, the options that were not given; see Security.

    Raises:
        InsecureBind: others could reach the host, and something is lacking.
    """
    # guard: bind policy
    if lacking and not is_loopback(host):
        raise InsecureBind(option, address, lacking)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach the host.

    Names other than localhost are not looked up: they may mean another address the next time.
    """
    host = host.removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """What there is of it.

    Args:
        keys: ZeroMQ connections are encrypted by CURVE, and only clients with a key on the list get one.
        tokens: msgpack-RPC and HTTP clients must show a token of the file.
        tls: msgpack-RPC and HTTP over TCP are encrypted.
        http_insecure: HTTP may be on a network as it is: its operator says that something else keeps strangers out.
        allowed_hosts: names by which HTTP requests may call the service; where there are some, and on a loopback
            interface, no others.
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
        """The options that a ZeroMQ address on a network wants and that were not given."""
        return [] if self.keys else ["keys"]

    @property
    def lacking_for_tokens(self) -> list[str]:
        """The options that an msgpack-RPC or HTTP address on a network wants and that were not given."""
        lacking = [] if self.tokens else ["tokens"]
        return lacking if self.tls else [*lacking, "tls_cert", "tls_key"]

    @property
    def lacking_for_http(self) -> list[str]:
        """The same of an HTTP address, of which the operator may say that it needs nothing."""
        return [] if self.http_insecure else self.lacking_for_tokens


def open_security(
    *, keys: str | None = None, tokens: str | None = None, tls_cert: str | None = None, tls_key: str | None = None
) -> Security:
    """Reads the files that the options name; what was not given is not there.

    Raises:
        KeyFileError: a file is missing, faulty, or exposed to others.
    """
    from genbatch.actors.security.curve_keys import ServerKeys

    return Security(
        keys=ServerKeys(Path(keys)) if keys else None,
        tokens=TokenFile(Path(tokens)) if tokens else None,
        tls=server_context(Path(tls_cert), Path(tls_key)) if tls_cert and tls_key else None,
    )
