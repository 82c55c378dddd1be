"""CURVE keys in files: a service's own keys with its list of clients, and a client's own keys with its service's key.

    service = ServerKeys(Path("keys"))
    client = ClientKeys.load("alice.key_secret")

Files are zmq.auth's certificates. A folder of keys holds

    server.key         the service's public key, for clients
    server.key_secret  its secret half
    authorised/        the list: NAME.key, a client's public key
    clients/           clients' own files, to be copied to the clients: NAME.key_secret
    tokens             hashes of tokens

KeyStore makes, lists and revokes the keys and tokens of a service, for `genbatch keys`.
"""

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq
import zmq.auth
from zmq.utils import z85

from genbatch.actors.security.key_files import (
    PRIVATE_FILE,
    KeyFileError,
    Parsed,
    WatchedFile,
    check_private,
    hash_token,
    make_private_directory,
    new_token,
    read_tokens,
    replace,
    write_new,
)

PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"
# The service's key is stored in a client's own file, so that the client needs only this file.
SERVER_KEY = "server-key"
Z85_LENGTH = 40  # for the 32 bytes of a key


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both halves of a key, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


class ServerKeys:
    """A service's keys, and its clients' keys, which may be added and removed while it runs.

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
        """Return the name of a client's key, in Z85, on the list; None if the key is not on the list.

        An unreadable list counts as empty, and faulty files are ignored.
        """
        return self._authorised.watch().get(public_key)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's keys.

    Args:
        server: the service's public key, in Z85: no other service can answer in its place.
        pair: the client's own keys.
    """

    server: bytes
    pair: KeyPair

    @classmethod
    def load(cls, client_key: str, server_key: str | None = None) -> Self:
        """Read a client's keys.

        Args:
            client_key: the client's file with both halves.
            server_key: the service's public key, in Z85 or a file; None if the client's file has it, too.

        Raises:
            KeyFileError: a file is missing, faulty, or exposed to others, or names no service.
        """
        path = Path(client_key)
        pair = _read_pair(path)
        server = read_public_key(server_key) if server_key is not None else _read_server_key(path)
        return cls(server.encode(), pair)

    def options(self) -> list[tuple[int, bytes]]:
        """Return the ZeroMQ options, with their values, with which a socket's later connections use the keys."""
        return [
            (zmq.CURVE_SERVERKEY, self.server),
            (zmq.CURVE_PUBLICKEY, self.pair.public),
            (zmq.CURVE_SECRETKEY, self.pair.secret),
        ]


def read_public_key(source: str) -> str:
    """Return the public key, in Z85, that `source` itself is, or that the file `source` contains.

    Raises:
        KeyFileError: there is no such key.
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
    """Return the names of the clients on a list, by public key in Z85.

    Raises:
        KeyFileError: a file is faulty, or repeats another file's key.
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
        raise KeyFileError(path, "the public key is not valid")
    return public, secret


def _read_server_key(path: Path) -> str:
    for line in path.read_text(encoding="utf-8-sig", errors="replace").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == SERVER_KEY and _is_key(value.strip().encode()):
            return value.strip()
    raise KeyFileError(path, "does not name the service's public key; give that too (--server-key)")


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == Z85_LENGTH and len(z85.decode(text)) == 32
    except (ValueError, KeyError, OverflowError):  # characters outside Z85, or a number beyond 32 bits
        return False


# The characters allowed in a file's name and in a line of the token file.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with access by key, by token, or both.

    Args:
        name: the tenant of the requests.
        public_key: the tenant's CURVE key on the list, in Z85.
        has_token: whether there is a token for it.
    """

    name: str
    public_key: str | None
    has_token: bool


class KeyStore:
    """A folder of keys; the docstring of genbatch.actors.security.curve_keys lists its contents."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server_key = directory / f"server{PUBLIC_SUFFIX}"
        self.tokens = directory / "tokens"
        self._authorised = directory / "authorised"
        self._clients = directory / "clients"

    def new_server(self) -> Path:
        """Make the service's keys; return the public key's file.

        Raises:
            KeyFileError: there are keys already, or the folder cannot be written.
        """
        for directory in (self.directory, self._authorised, self._clients):
            make_private_directory(directory)
        self._make("server", self.directory, self.directory, {})
        return self.server_key

    def new_client(self, name: str) -> Path:
        """Make a client's keys and add the client to the list; return the client's file.

        Raises:
            KeyFileError: the name is taken or invalid, or the service has no keys.
        """
        self._check_name(name)
        server = read_public_key(str(self.server_key))
        return self._make(name, self._authorised, self._clients, {SERVER_KEY: server})

    def authorise(self, name: str, public_key: str) -> None:
        """Add a key that was made elsewhere to the list.

        Args:
            name: the tenant of its requests.
            public_key: the key in Z85, or its file.

        Raises:
            KeyFileError: the name is taken or invalid, or the key is on the list already or invalid.
        """
        self._check_name(name)
        key = read_public_key(public_key)
        known = read_authorised(self._authorised)
        if key in known:
            raise KeyFileError(self._authorised, f"the key is on the list already, as {known[key]!r}")
        write_new(self._authorised / f"{name}{PUBLIC_SUFFIX}", f'metadata\ncurve\n    public-key = "{key}"\n')

    def new_token(self, name: str) -> str:
        """Make a token for a name; only the token's hash is stored.

        Raises:
            KeyFileError: the name has a token already, or is invalid.
        """
        self._check_name(name)
        hashes = self._token_hashes()
        if name in hashes:
            raise KeyFileError(self.tokens, f"{name!r} has a token; revoke it first")
        token = new_token()
        make_private_directory(self.directory)
        self._write_tokens(hashes | {name: hash_token(token)})
        return token

    def revoke(self, name: str) -> None:
        """Remove a name's key and token; a running service refuses them at once.

        Raises:
            KeyFileError: the name has neither.
        """
        self._check_name(name)
        hashes = self._token_hashes()
        public = self._authorised / f"{name}{PUBLIC_SUFFIX}"
        if name not in hashes and not public.exists():
            raise KeyFileError(self.directory, f"there is no key or token of {name!r}")
        public.unlink(missing_ok=True)
        (self._clients / f"{name}{SECRET_SUFFIX}").unlink(missing_ok=True)
        if hashes.pop(name, None) is not None:
            self._write_tokens(hashes)

    def tenants(self) -> list[Tenant]:
        """Return the tenants with access, by name.

        Raises:
            KeyFileError: the folder has a faulty file, or is not a key store.
        """
        if not self.directory.is_dir():
            raise KeyFileError(self.directory, "there are no keys; `genbatch keys new` makes some")
        hashes = self._token_hashes()
        keys = {name: key for key, name in read_authorised(self._authorised).items()}
        return [Tenant(name, keys.get(name), name in hashes) for name in sorted(hashes.keys() | keys)]

    def _token_hashes(self) -> dict[str, str]:
        return read_tokens(self.tokens) if self.tokens.exists() else {}

    def _write_tokens(self, hashes: dict[str, str]) -> None:
        replace(self.tokens, "".join(f"{name} {token_hash}\n" for name, token_hash in sorted(hashes.items())))

    def _make(self, name: str, public: Path, secret: Path, metadata: dict[str, str]) -> Path:
        """Make both halves in a private folder, then link them under their names; return the secret key's file."""
        targets = (public / f"{name}{PUBLIC_SUFFIX}", secret / f"{name}{SECRET_SUFFIX}")
        for target in targets:
            if target.exists():
                raise KeyFileError(target, "exists already; nothing was changed")
        try:
            with tempfile.TemporaryDirectory(dir=self.directory) as hidden:  # mode 0700
                for file, target in zip(zmq.auth.create_certificates(hidden, name, metadata), targets, strict=True):
                    Path(file).chmod(PRIVATE_FILE)
                    target.hardlink_to(file)  # fails if the file exists
        except OSError as error:
            raise KeyFileError(self.directory, str(error)) from None
        return targets[1]

    def _check_name(self, name: str) -> None:
        if _NAME.fullmatch(name) is None:
            raise KeyFileError(
                self.directory, f"{name!r} is no name: 1 to 64 of A-Z, a-z, 0-9, dot, dash and underscore"
            )
