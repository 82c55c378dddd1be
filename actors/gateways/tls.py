"""The certificate that a service shows over TLS, and what a client must trust to believe it."""

import ssl
from pathlib import Path

from genbatch.actors.gateways.errors import KeyFileError
from genbatch.actors.gateways.private_file import check_private


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A service's TLS: 1.2 or later.

    Args:
        certificate: PEM, the service's own first, then those that vouch for it.
        key: its private key, PEM, not encrypted.

    Raises:
        KeyFileError: a file cannot be read, the key is exposed to others, or the two do not belong together.
    """
    check_private(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passwords)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise KeyFileError(certificate, f"no certificate with the private key {key}: {error}") from None
    return context


def client_context(ca: Path | None = None) -> ssl.SSLContext:
    """A client's TLS: the service must show a certificate for the host name that was asked for.

    Args:
        ca: PEM certificates to trust instead of the system's, such as the service's own self-signed one.

    Raises:
        KeyFileError: the file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise KeyFileError(ca or Path(), f"no certificates to trust: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _refuse_passwords() -> str:
    """In the place of OpenSSL's question on the terminal, which would hold the service up."""
    raise ValueError("the key is encrypted")
