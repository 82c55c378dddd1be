"""Security: what keeps strangers out of a service, read once at its start and shared by its gateways."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from genbatch.actors.gateways.curve_keys import ServerKeys
from genbatch.actors.gateways.tls import server_context
from genbatch.actors.gateways.token_file import TokenFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """What there is of it.

    Args:
        keys: ZeroMQ connections are encrypted by CURVE, and only clients with a key on the list get one.
        tokens: msgpack-RPC and HTTP clients must show a token of the file.
        tls: msgpack-RPC and HTTP over TCP are encrypted.
    """

    keys: ServerKeys | None = None
    tokens: TokenFile | None = None
    tls: ssl.SSLContext | None = None

    @property
    def lacking_for_zeromq(self) -> list[str]:
        """The options that a ZeroMQ address on a network wants and that were not given."""
        return [] if self.keys else ["keys"]

    @property
    def lacking_for_tokens(self) -> list[str]:
        """The options that an msgpack-RPC or HTTP address on a network wants and that were not given."""
        lacking = [] if self.tokens else ["tokens"]
        return lacking if self.tls else [*lacking, "tls_cert", "tls_key"]


def open_security(
    *, keys: str | None = None, tokens: str | None = None, tls_cert: str | None = None, tls_key: str | None = None
) -> Security:
    """Reads what the options name; what was not given is not there.

    Raises:
        KeyFileError: a file is missing, faulty, or exposed to others.
    """
    return Security(
        keys=ServerKeys(Path(keys)) if keys else None,
        tokens=TokenFile(Path(tokens)) if tokens else None,
        tls=server_context(Path(tls_cert), Path(tls_key)) if tls_cert and tls_key else None,
    )
