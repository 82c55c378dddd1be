"""The files that keep strangers out: private keys that nobody else may read, lists that are read again when they
change, tokens, and certificates.

    check_private(path)                                  # KeyFileError: others could read it
    tokens = TokenFile(Path("tokens"))                   # notices tomorrow's changes
    name = tokens.tenant(token)                          # None: nobody has it

The errors say why a service does not start to listen: its address, or its keys.
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

# The options that keep strangers out, and how to get what they want.
_HOW = {
    "keys": "--keys DIR, made by `genbatch keys new DIR`",
    "tokens": "--tokens FILE, made by `genbatch keys token NAME`",
    "tls_cert": "--tls-cert FILE, the service's certificate",
    "tls_key": "--tls-key FILE, the certificate's private key",
}


class AddressError(ActorError):
    """The service cannot or must not listen at the address; the message names it and the reason."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen at {address}: {reason}")
        self.address = address
        self.reason = reason


class InsecureBind(AddressError):
    """Other machines could reach the address, and something that would keep strangers out is missing.

    Args:
        option: the option that has the address.
        address: what it has.
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
    """Raises:
    KeyFileError: the file is missing, or others than its owner may read or write it.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise KeyFileError(path, error.strerror or str(error)) from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(path, "others may open this secret; run chmod 600 on it")


def make_private_directory(path: Path) -> None:
    """Makes the directory, for its owner alone, unless it is there.

    Raises:
        KeyFileError: it cannot be made, or is no directory.
    """
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        raise KeyFileError(path, error.strerror or str(error)) from None


def write_new(path: Path, text: str) -> None:
    """Writes a file that only its owner can open, and that was not there.

    Raises:
        KeyFileError: it was, or cannot be written.
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
    """Puts a file, that only its owner can open, in the place of another at one stroke.

    Raises:
        KeyFileError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    write_new(new, text)
    new.replace(path)


logger = logging.getLogger(__name__)

T = TypeVar("T")
SETTLED_NS = 1_000_000_000
# Device, inode, modification time in nanoseconds, size: replacing a file changes the inode, writing to it the others.
_Stamp = tuple[int, int, int, int]
# What a file says apart from its first fault, and that.
Parsed = tuple[T, KeyFileError | None]


class WatchedFile(Generic[T]):
    """A parsed file; a look at an unchanged one costs one system call.

    Args:
        path: a file, or a directory whose entries are added and removed, not written in place.
        parse: reads it.
        nothing: what a file says that cannot be read, or that others than its owner may write.
    """

    def __init__(self, path: Path, parse: Callable[[Path], Parsed[T]], nothing: T) -> None:
        self.path = path
        self._parse = parse
        self._nothing = nothing
        self._stamp: _Stamp | None = None
        self._parsed: Parsed[T] = (nothing, None)

    def read(self) -> T:
        """What it says now.

        Raises:
            KeyFileError: it cannot be read, it is faulty, or others than its owner may write it.
        """
        said, fault = self._look()
        if fault is not None:
            raise fault
        return said

    def watch(self) -> T:
        """What it says now apart from its faults, which are logged once: one bad entry locks nobody else out."""
        before = str(self._parsed[1])
        said, fault = self._look()
        if fault is not None and str(fault) != before:
            logger.error("left out: %s", fault)
        return said

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
            # What changed just now may change again without a later time: a file system's clock ticks in milliseconds.
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


PREFIX = "genbatch_"  # lets secret scanners find one that was committed
TOKEN_BYTES = 32
# A header or a message with more is no token; it is not hashed.
MAX_TOKEN_LENGTH = 512
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}) ([0-9a-f]{64})")


class TokenFile:
    """The tokens of a file, which is read again whenever it has changed.

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
        """The name that goes with `token`; None if there is none.

        Takes the same time for every token: all hashes are compared, each in constant time. While the file cannot be
        read nobody is known; a faulty line is left out.
        """
        if len(token) > MAX_TOKEN_LENGTH:
            return None
        given = hash_token(token)
        found = None
        for name, known in self._file.watch().items():
            # guard: tokens are compared in constant time
            if hmac.compare_digest(given, known):
                found = name
        return found


def new_token() -> str:
    """A token that nobody has."""
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def hash_token(token: str) -> str:
    """What a token file holds of it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def bearer_token(authorization: str | None) -> str | None:
    """The token of an HTTP `Authorization: Bearer …` header; None where there is none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def read_tokens(path: Path) -> dict[str, str]:
    """The hash of each name's token, by name.

    Raises:
        KeyFileError: as TokenFile.
    """
    return _watch(path).read()


def _watch(path: Path) -> WatchedFile[dict[str, str]]:
    return WatchedFile(path, _parse, {})


def _parse(path: Path) -> Parsed[dict[str, str]]:
    hashes: dict[str, str] = {}
    fault = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = _LINE.fullmatch(line.strip())
        if match is not None and match[1] not in hashes:
            hashes[match[1]] = match[2]
        elif line.strip() and not line.startswith("#"):
            reason = "is no name and SHA-256" if match is None else f"has the name {match[1]!r} again"
            fault = fault or KeyFileError(path, f"line {number} {reason}")
    return hashes, fault


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
