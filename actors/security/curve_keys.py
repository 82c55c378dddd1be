"""CURVE keys in files: a service's own and the list of those it lets in; a client's own and its service's.

    service = ServerKeys(Path("keys"))
    client = ClientKeys.load("alice.key_secret")

Files are zmq.auth's certificates. A folder of keys holds

    server.key         the service's public key, for clients
    server.key_secret  its secret half
    authorised/        the list: NAME.key, a client's public key
    clients/           clients' own files, made here to be carried to them: NAME.key_secret
    tokens             hashes of tokens

KeyStore: makes, lists and takes back the keys and tokens of a service; what `genbatch keys` works with.
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
        raise KeyFileError(path, "the public key is not valid")
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


# What may stand in a file's name and in a line of the token file.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who is let in, in either way.

    Args:
        name: in whose name requests are made.
        public_key: of the CURVE key on the list, in Z85.
        has_token: whether there is a token for it.
    """

    name: str
    public_key: str | None
    has_token: bool


class KeyStore:
    """A folder of keys; see genbatch.actors.security.curve_keys for what is in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server_key = directory / f"server{PUBLIC_SUFFIX}"
        self.tokens = directory / "tokens"
        self._authorised = directory / "authorised"
        self._clients = directory / "clients"

    def new_server(self) -> Path:
        """Makes the service's keys; returns the public one's file.

        Raises:
            KeyFileError: there are some, or the folder cannot be written.
        """
        for directory in (self.directory, self._authorised, self._clients):
            make_private_directory(directory)
        self._make("server", self.directory, self.directory, {})
        return self.server_key

    def new_client(self, name: str) -> Path:
        """Makes a client's keys and puts them on the list; returns the file that the client needs.

        Raises:
            KeyFileError: the name is taken or none, or there are no keys of the service.
        """
        self._check_name(name)
        server = read_public_key(str(self.server_key))
        return self._make(name, self._authorised, self._clients, {SERVER_KEY: server})

    def authorise(self, name: str, public_key: str) -> None:
        """Puts a key on the list that was made elsewhere.

        Args:
            name: in whose name its requests are made.
            public_key: in Z85, or its file.

        Raises:
            KeyFileError: the name is taken or none, the key is on the list or none.
        """
        self._check_name(name)
        key = read_public_key(public_key)
        known = read_authorised(self._authorised)
        if key in known:
            raise KeyFileError(self._authorised, f"the key is on the list already, as {known[key]!r}")
        write_new(self._authorised / f"{name}{PUBLIC_SUFFIX}", f'metadata\ncurve\n    public-key = "{key}"\n')

    def new_token(self, name: str) -> str:
        """Makes a token for a name; it is not kept, only its hash.

        Raises:
            KeyFileError: the name has a token already, or is not a name.
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
        """Takes a name's key and token off; a running service forgets them at once.

        Raises:
            KeyFileError: it has neither.
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
        """Who is let in, by name.

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
        """Makes both halves where nobody can look, then shows them under their names; returns the secret one's file."""
        targets = (public / f"{name}{PUBLIC_SUFFIX}", secret / f"{name}{SECRET_SUFFIX}")
        for target in targets:
            if target.exists():
                raise KeyFileError(target, "exists already; nothing was changed")
        try:
            with tempfile.TemporaryDirectory(dir=self.directory) as hidden:  # mode 0700
                for made, target in zip(zmq.auth.create_certificates(hidden, name, metadata), targets, strict=True):
                    Path(made).chmod(PRIVATE_FILE)
                    target.hardlink_to(made)  # fails where a file is
        except OSError as error:
            raise KeyFileError(self.directory, str(error)) from None
        return targets[1]

    def _check_name(self, name: str) -> None:
        if _NAME.fullmatch(name) is None:
            raise KeyFileError(
                self.directory, f"{name!r} is no name: 1 to 64 of A-Z, a-z, 0-9, dot, dash and underscore"
            )
