"""SessionFile: a conversation that survives the program: its turns as JSON, and its KV so that it goes on at once.

The first line is JSON, the rest is the KV as `Context.seq_save` gives it (safetensors). Nothing in it is executed.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from genbatch.clients.errors import ClientError
from genbatch.nif.trusted_files import NotOurs, check_ours
from genbatch.proto.messages import Message

FORMAT = "genbatch-chat-1"
MAX_HEAD_BYTES = 64 * 2**20


class SessionFileError(ClientError):
    """The file is no session, or cannot be read or written."""


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    system: str | None
    turns: list[Message]
    state_bytes: int
    state_sha256: str


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What was said.

    Args:
        system: the system prompt.
        turns: without it.
        state: the KV of their beginning; empty where there is none.
        is_damaged: whether there was a state that is not what was written.
    """

    system: str | None = None
    turns: list[Message] = []
    state: bytes = b""
    is_damaged: bool = False


class SessionFile:
    """One conversation's file, readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Session:
        """What is in the file; nothing if there is none yet.

        Raises:
            SessionFileError: it is not a session, so it is not to be written over either.
        """
        try:
            with self.path.open("rb") as file:
                check_ours(self.path)  # its KV may say anything of what the model was told
                line = file.readline(MAX_HEAD_BYTES)
                head = msgspec.json.decode(line, type=_Head)
                if head.format != FORMAT:
                    raise SessionFileError(f"{self.path} has the format {head.format!r}, not {FORMAT}")
                state = file.read()
        except FileNotFoundError:
            return Session()
        except NotOurs as error:
            raise SessionFileError(str(error)) from error
        except OSError as error:
            raise SessionFileError(f"{self.path} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SessionFileError(f"{self.path} is not a session of genbatch chat: {error}") from error
        intact = len(state) == head.state_bytes and hashlib.sha256(state).hexdigest() == head.state_sha256
        return Session(system=head.system, turns=head.turns, state=state if intact else b"", is_damaged=not intact)

    def write(self, session: Session) -> None:
        """Replaces the file as a whole: whoever is interrupted leaves the old one or the new one.

        Raises:
            SessionFileError: it cannot be written.
        """
        head = _Head(
            format=FORMAT,
            system=session.system,
            turns=session.turns,
            state_bytes=len(session.state),
            state_sha256=hashlib.sha256(session.state).hexdigest(),
        )
        try:
            # Made with mode 0600; in the same folder, so that replacing is one step.
            descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        except OSError as error:
            raise SessionFileError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(head) + b"\n")
                file.write(session.state)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except BaseException as error:
            Path(name).unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise SessionFileError(f"{self.path} cannot be written: {error.strerror}") from error
            raise
