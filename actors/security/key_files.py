"""The files of access control: private keys that only their owner may read, watched lists, tokens, and certificates.

    check_private(path)                                  # KeyFileError: others could read it
    tokens = TokenFile(Path("tokens"))                   # reads the file again after changes
    name = tokens.tenant(token)                          # None for an unknown token

The errors name the reason why a service does not start to listen: its address, or its keys.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import ssl
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from genbatch.actors.runtime.errors import ActorError

# The options of access control, and how to make their values.
_HOW = {
    "keys": "--keys DIR, made by `genbatch keys new DIR`",
    "tokens": "--tokens FILE, made by `genbatch keys token NAME`",
    "tls_cert": "--tls-cert FILE, the service's certificate",
    "tls_key": "--tls-key FILE, the certificate's private key",
}


class AddressError(ActorError):
    """The service cannot or must not listen at the address; the message names the address and the reason."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen at {address}: {reason}")
        self.address = address
        self.reason = reason


class InsecureBind(AddressError):
    """Other machines could reach the address, and the options that would keep strangers out are missing.

    Args:
        option: the option with the address.
        address: the option's value.
        lacking: the options that are missing: of keys, tokens, tls_cert and tls_key.
    """

    def __init__(self, option: str, address: str, lacking: Sequence[str]) -> None:
        needed = " and ".join(_HOW[name] for name in lacking)
        trusted = "; in a network where something else keeps strangers out: --http-insecure" if option == "http" else ""
        super().__init__(
            address,
            f"{option}: other machines could reach it, and nothing would keep strangers out; "
            f"listen on 127.0.0.1, [::1], localhost or a file, or also give {needed}{trusted}",
        )
        self.option = option
        self.lacking = tuple(lacking)


class KeyFileError(ActorError):
    """A file of keys, tokens or certificates is missing, faulty, exposed to others, or in the way."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700


def check_private(path: Path) -> None:
    """Check that only its owner can open a file.

    Raises:
        KeyFileError: the file is missing, or others than its owner may read or write it.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise KeyFileError(path, error.strerror or str(error)) from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(path, "others may open this secret; run chmod 600 on it")


def make_private_directory(path: Path) -> None:
    """Make a directory for its owner alone, unless it exists.

    Raises:
        KeyFileError: it cannot be made, or is not a directory.
    """
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        raise KeyFileError(path, error.strerror or str(error)) from None


def write_new(path: Path, text: str) -> None:
    """Write a new file that only its owner can open.

    Raises:
        KeyFileError: the file exists already, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    except FileExistsError:
        raise KeyFileError(path, "exists already; nothing was changed") from None
    except OSError as error:
        raise KeyFileError(path, error.strerror or str(error)) from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def replace(path: Path, text: str) -> None:
    """Replace a file atomically by one that only its owner can open.

    Raises:
        KeyFileError: the file cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    write_new(new, text)
    new.replace(path)


logger = logging.getLogger(__name__)

T = TypeVar("T")
SETTLED_NS = 1_000_000_000
# Device, inode, modification time in nanoseconds, size. Replacing a file changes the inode; writing changes the others.
_Stamp = tuple[int, int, int, int]
# The valid content of a file, and its first fault.
Parsed = tuple[T, KeyFileError | None]


class WatchedFile(Generic[T]):
    """A parsed file; checking an unchanged file costs one system call.

    Args:
        path: a file, or a directory with entries that are added and removed, not written in place.
        parse: reads the file.
        nothing: the content of a file that cannot be read, or that others than its owner may write.
    """

    def __init__(self, path: Path, parse: Callable[[Path], Parsed[T]], nothing: T) -> None:
        self.path = path
        self._parse = parse
        self._nothing = nothing
        self._stamp: _Stamp | None = None
        self._parsed: Parsed[T] = (nothing, None)

    def read(self) -> T:
        """Return the current content.

        Raises:
            KeyFileError: it cannot be read, it is faulty, or others than its owner may write it.
        """
        content, fault = self._look()
        if fault is not None:
            raise fault
        return content

    def watch(self) -> T:
        """Return the current content without its faulty entries, which are logged once and lock out no one else."""
        before = str(self._parsed[1])
        content, fault = self._look()
        if fault is not None and str(fault) != before:
            logger.error("left out: %s", fault)
        return content

    def _look(self) -> Parsed[T]:
        try:
            status = self.path.stat()
        except OSError as error:
            self._stamp = None
            self._parsed = self._nothing, KeyFileError(self.path, error.strerror or str(error))
            return self._parsed
        stamp = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            self._parsed = self._read(status)
            # A file system's clock ticks in milliseconds, so a recent change may be followed by another with the same
            # time.
            is_settled = time.time_ns() - status.st_mtime_ns > SETTLED_NS
            self._stamp = stamp if is_settled else None
        return self._parsed

    def _read(self, status: os.stat_result) -> Parsed[T]:
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return self._nothing, KeyFileError(self.path, "others may write it; run chmod go-w on it")
        try:
            return self._parse(self.path)
        except (OSError, ValueError) as error:
            return self._nothing, KeyFileError(self.path, str(error))


PREFIX = "genbatch_"  # lets secret scanners find a committed token
TOKEN_BYTES = 32
# A longer header or message is not a token, and is not hashed.
MAX_TOKEN_LENGTH = 512
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}) ([0-9a-f]{64})")


class TokenFile:
    """The tokens of a file, which is read again after each change.

    Args:
        path: the file.

    Raises:
        KeyFileError: it cannot be read, others may write it, or a line of it is not a token.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _watch(path)
        self._file.read()

    def tenant(self, token: str) -> str | None:
        """Return the name of a token; None for an unknown token.

        The method takes the same time for every token: it compares all hashes, each in constant time. An unreadable
        file counts as empty, and faulty lines are ignored.
        """
        if len(token) > MAX_TOKEN_LENGTH:
            return None
        digest = hash_token(token)
        tenant = None
        for name, known in self._file.watch().items():
            # guard: tokens are compared in constant time
            if hmac.compare_digest(digest, known):
                tenant = name
        return tenant


def new_token() -> str:
    """Return a new random token."""
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def hash_token(token: str) -> str:
    """Return the hash of a token, as the token file stores it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def bearer_token(authorization: str | None) -> str | None:
    """Return the token of an HTTP `Authorization: Bearer …` header; None without one."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def read_tokens(path: Path) -> dict[str, str]:
    """Return the hash of each name's token, by name.

    Raises:
        KeyFileError: see TokenFile.
    """
    return _watch(path).read()


def _watch(path: Path) -> WatchedFile[dict[str, str]]:
    return WatchedFile(path, _parse, {})


def _parse(path: Path) -> Parsed[dict[str, str]]:
    hashes: dict[str, str] = {}
    fault = None
    # A line with other bytes than UTF-8 is named like any other wrong line.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        match = _LINE.fullmatch(line.strip())
        if match is not None and match[1] not in hashes:
            hashes[match[1]] = match[2]
        elif line.strip() and not line.startswith("#"):
            reason = "is no name and SHA-256" if match is None else f"has the name {match[1]!r} again"
            fault = fault or KeyFileError(path, f"line {number} {reason}")
    return hashes, fault


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a service's TLS context, for version 1.2 or later.

    Args:
        certificate: PEM, the service's own certificate first, then its issuers' certificates.
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
    """Return a client's TLS context: the service must show a certificate for the requested host name.

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
    """Raise instead of OpenSSL's password prompt on the terminal, which would block the service."""
    raise ValueError("the key is encrypted")
