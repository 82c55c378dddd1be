"""TokenFile: who may call over msgpack-RPC and HTTP, and in whose name; the file holds hashes, never a token.

    tokens = TokenFile(Path("keys/tokens"))
    tokens.tenant("genbatch_…")  # "alice", or None

A line is a name, a space, and the SHA-256 of a token in hexadecimal. Tokens are 32 random bytes, so that a plain hash
keeps them secret; whoever chooses one by hand must not choose a short one.
"""

import hashlib
import hmac
import re
import secrets
from pathlib import Path

from genbatch.actors.gateways.errors import KeyFileError
from genbatch.actors.gateways.watched_file import Parsed, WatchedFile

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
        KeyFileError: it cannot be read, others may write it, or it has a line that is none.
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
