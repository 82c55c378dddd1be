"""CURVE keys in files: a service's own and the list of those it lets in; a client's own and its service's.

    service = ServerKeys(Path("keys"))
    client = ClientKeys.load("alice.key_secret")

Files are zmq.auth's certificates. A folder of keys holds

    server.key         the service's public key, for clients
    server.key_secret  its secret half
    authorised/        the list: NAME.key, a client's public key
    clients/           clients' own files, made here to be carried to them: NAME.key_secret
    tokens             hashes of tokens
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq
import zmq.auth
from zmq.utils import z85

from genbatch.actors.gateways.errors import KeyFileError
from genbatch.actors.gateways.private_file import check_private
from genbatch.actors.gateways.watched_file import Parsed, WatchedFile

PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"
# Beside a client's own keys in its file, so that this one file is all it needs.
SERVER_KEY = "server-key"
Z85_LENGTH = 40  # of the 32 bytes of a key


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both halves, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


class ServerKeys:
    """A service's keys, and its clients', who may come and go while it runs.

    Args:
        directory: a folder that `genbatch keys new` made.

    Raises:
        KeyFileError: a key is missing, faulty, or exposed to others.
    """

    def __init__(self, directory: Path) -> None:
        self.pair = _read_pair(directory / f"server{SECRET_SUFFIX}")
        self._authorised = _watch(directory / "authorised")
        self._authorised.read()

    def client_name(self, public_key: str) -> str | None:
        """Under which name a client's key, in Z85, is on the list; None if it is not.

        While the list cannot be read nobody is on it; a faulty file is left out.
        """
        return self._authorised.watch().get(public_key)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs.

    Args:
        server: the service's public key, in Z85: nobody else can answer in its place.
        pair: the client's own.
    """

    server: bytes
    pair: KeyPair

    @classmethod
    def load(cls, client_key: str, server_key: str | None = None) -> Self:
        """Reads a client's keys.

        Args:
            client_key: its file with both halves.
            server_key: the service's public key, in Z85 or a file; None: the client's file has it too.

        Raises:
            KeyFileError: a file is missing, faulty, or exposed to others, or names no service.
        """
        path = Path(client_key)
        pair = _read_pair(path)
        server = read_public_key(server_key) if server_key is not None else _read_server_key(path)
        return cls(server.encode(), pair)

    def options(self) -> list[tuple[int, bytes]]:
        """The ZeroMQ options, with their values, that make a socket's later connections use the keys."""
        return [
            (zmq.CURVE_SERVERKEY, self.server),
            (zmq.CURVE_PUBLICKEY, self.pair.public),
            (zmq.CURVE_SECRETKEY, self.pair.secret),
        ]


def read_public_key(source: str) -> str:
    """The public key, in Z85, that `source` is, or that the file of this name has.

    Raises:
        KeyFileError: there is none.
    """
    if len(source) == Z85_LENGTH and "/" not in source and _is_key(source.encode()):
        return source
    path = Path(source)
    if path.is_file():
        return _load(path)[0].decode()
    if len(source) == Z85_LENGTH and _is_key(source.encode()):
        return source
    raise KeyFileError(path, f"is neither a file nor a key of {Z85_LENGTH} characters")


def read_authorised(directory: Path) -> dict[str, str]:
    """The names of the clients on a list, by public key in Z85.

    Raises:
        KeyFileError: a file of it is faulty, or has another's key.
    """
    return _watch(directory).read()


def _watch(directory: Path) -> WatchedFile[dict[str, str]]:
    return WatchedFile(directory, _parse_authorised, {})


def _parse_authorised(directory: Path) -> Parsed[dict[str, str]]:
    names: dict[str, str] = {}
    fault = None
    for path in sorted(directory.glob(f"*{PUBLIC_SUFFIX}")):
        try:
            public = _load(path)[0].decode()
        except KeyFileError as error:
            fault = fault or error
            continue
        if public in names:
            fault = fault or KeyFileError(path, f"has the key of {names[public]!r} again")
        names.setdefault(public, path.stem)
    return names, fault


def _read_pair(path: Path) -> KeyPair:
    check_private(path)
    public, secret = _load(path)
    if secret is None or not _is_key(secret):
        raise KeyFileError(path, "has no secret key")
    if zmq.curve_public(secret) != public:
        raise KeyFileError(path, "the public key does not belong to the secret key")
    return KeyPair(public, secret)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        raise KeyFileError(path, error.strerror or "cannot be read") from None
    except ValueError:
        raise KeyFileError(path, "has no public key") from None
    if not _is_key(public):
        raise KeyFileError(path, "the public key is none")
    return public, secret


def _read_server_key(path: Path) -> str:
    for line in path.read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() == SERVER_KEY and _is_key(value.strip().encode()):
            return value.strip()
    raise KeyFileError(path, "does not name the service's public key; give that too (--server-key)")


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == Z85_LENGTH and len(z85.decode(text)) == 32
    except (ValueError, KeyError, OverflowError):  # characters that are not Z85's, or a number beyond 32 bits
        return False
