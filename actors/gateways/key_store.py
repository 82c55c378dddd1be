"""KeyStore: makes, lists and takes back the keys and tokens of a service; what `genbatch keys` works with."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq.auth

from genbatch.actors.gateways.curve_keys import (
    PUBLIC_SUFFIX,
    SECRET_SUFFIX,
    SERVER_KEY,
    read_authorised,
    read_public_key,
)
from genbatch.actors.gateways.errors import KeyFileError
from genbatch.actors.gateways.private_file import PRIVATE_FILE, make_private_directory, replace, write_new
from genbatch.actors.gateways.token_file import hash_token, new_token, read_tokens

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
    """A folder of keys; see genbatch.actors.gateways.curve_keys for what is in it."""

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
            KeyFileError: the name has one or is none.
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
            KeyFileError: the folder has a faulty file, or is none.
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
