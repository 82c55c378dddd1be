"""ConversationStore: keeps a conversation in its file, with its KV where the service is this program's own."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rich.console import Console

from genbatch.clients.cli.session_file import Session, SessionFile
from genbatch.clients.request import MessageLike
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import Message


@runtime_checkable
class KeepsState(Protocol):
    """A client whose service gives KV away and takes it back."""

    async def save_session(self, messages: Sequence[MessageLike], *, tenant: str = "") -> bytes: ...

    async def load_session(self, state: bytes, *, tenant: str = "") -> int: ...


class ConversationStore:
    """What is not worth failing for is told on standard error: without its KV a conversation goes on all the same.

    Args:
        file: where.
        saved: what is in it.
        client: who answers; only one that KeepsState saves evaluating the conversation again.
    """

    def __init__(self, file: SessionFile, saved: Session, client: object) -> None:
        self._file = file
        self.saved = saved
        self._client = client if isinstance(client, KeepsState) else None
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    async def resume(self) -> None:
        """Gives the service the KV back, and says what there is."""
        if self._client is None:
            self._tell("The service is not this program's own: the session keeps what was said, and no KV.")
        if not self.saved.turns:
            return
        length = await self._load()
        known = f", of which {length} tokens are evaluated already" if length else ""
        self._tell(f"{self._file.path}: going on after {len(self.saved.turns)} turns{known}.")

    def keep(self, system: str | None, turns: Sequence[Message]) -> None:
        """Writes what was said, for the case that the program does not come to its end.

        Raises:
            SessionFileError: as `SessionFile.write`.
        """
        self._file.write(Session(system=system, turns=list(turns)))

    async def close(self, system: str | None, turns: Sequence[Message]) -> None:
        """Writes what was said, and its KV.

        Raises:
            SessionFileError: as `SessionFile.write`.
        """
        state = b""
        if self._client is not None and turns:
            told = [] if system is None else [Message(role="system", content=system)]
            try:
                state = await self._client.save_session([*told, *turns])
            except GenbatchError as error:
                self._warn(f"its KV is not kept: {error}")
        self._file.write(Session(system=system, turns=list(turns), state=state))

    async def _load(self) -> int:
        """Positions that the service took over."""
        if self.saved.is_damaged:
            self._warn("its KV is damaged; the conversation is evaluated again")
        if self._client is None or not self.saved.state:
            return 0
        try:
            return await self._client.load_session(self.saved.state)
        except GenbatchError as error:
            self._warn(f"its KV is of no use here, the conversation is evaluated again: {error.message}")
            return 0

    def _tell(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def _warn(self, text: str) -> None:
        self._console.print(f"warning: {self._file.path}: {text}", style="yellow", markup=False)
