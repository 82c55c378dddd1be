"""`genbatch chat`: a conversation in the terminal, which can be kept in a file.

A SessionFile has the turns as JSON in the first line. If the service is private, the rest of the file is the KV in the
format of `Context.seq_save` (safetensors), so that the conversation continues at once. No part of it is executed.
"""

import fcntl
import glob
import hashlib
import os
import re
import signal
import sys
import tempfile
import termios
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

import msgspec
import trio
import typer
from rich.console import Console

from genbatch.clients.cli.command import print_error, printable, run_command, with_flag_groups
from genbatch.clients.cli.connection import ConnectionFlags, open_client
from genbatch.clients.cli.generate import SamplingFlags, check_request
from genbatch.clients.cli.option_flags import ModelFlags, is_given
from genbatch.clients.interface import Client, ClientError, GenerateParams, MessageLike
from genbatch.nif.trusted_files import NotOurs, check_ours
from genbatch.proto.errors import GenbatchError, PromptTooLong
from genbatch.proto.messages import Message

FORMAT = "genbatch-chat-1"
MAX_HEAD_BYTES = 64 * 2**20


class SessionFileError(ClientError):
    """The file is not a session, or cannot be read or written."""


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    system: str | None
    turns: list[Message]
    state_bytes: int
    state_sha256: str


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation.

    Args:
        system: the system prompt.
        turns: the other messages.
        state: the KV of the beginning of the turns; may be empty.
        is_damaged: whether the file's state is damaged.
    """

    system: str | None = None
    turns: list[Message] = []
    state: bytes = b""
    is_damaged: bool = False


class SessionFile:
    """The file of a conversation; only its owner can read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Session:
        """Return the conversation in the file; an empty one if the file does not exist.

        Raises:
            SessionFileError: the file is not a session, so it must not be overwritten.
        """
        try:
            with self.path.open("rb") as file:
                check_ours(self.path)  # a forged KV could claim other messages
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
        # guard: digest of a session file
        intact = len(state) == head.state_bytes and hashlib.sha256(state).hexdigest() == head.state_sha256
        return Session(system=head.system, turns=head.turns, state=state if intact else b"", is_damaged=not intact)

    def write(self, session: Session) -> None:
        """Replace the whole file; a kill meanwhile leaves the old or the new file.

        Raises:
            SessionFileError: the file cannot be written.
        """
        head = _Head(
            format=FORMAT,
            system=session.system,
            turns=session.turns,
            state_bytes=len(session.state),
            state_sha256=hashlib.sha256(session.state).hexdigest(),
        )
        try:
            # Its mode is 0600. It is in the same folder, so that replacing is one step.
            descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        except OSError as error:
            raise SessionFileError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._remove_unfinished()
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

    def _remove_unfinished(self) -> None:
        """Remove the unfinished files of killed programs; a program that still writes has locked its file."""
        for path in self.path.parent.glob(f".{glob.escape(self.path.name)}.????????"):
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


@runtime_checkable
class KeepsState(Protocol):
    """A client that can save and load KV."""

    async def save_session(self, messages: Sequence[MessageLike], *, tenant: str = "") -> bytes: ...

    async def load_session(self, state: bytes, *, tenant: str = "") -> int: ...


class ConversationStore:
    """Keeps a conversation and its KV in a file. Faults of the KV are warnings, since the KV only saves time.

    Args:
        file: the file.
        saved: the conversation in the file.
        client: answers; only a client that KeepsState need not evaluate the conversation again.
    """

    def __init__(self, file: SessionFile, saved: Session, client: object) -> None:
        self._file = file
        self.saved = saved
        self._client = client if isinstance(client, KeepsState) else None
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    async def resume(self) -> None:
        """Load the KV into the service, and print the state of the session."""
        if self._client is None:
            self._tell("The service is not private, so the session keeps the messages without their KV.")
        if not self.saved.turns:
            return
        length = await self._load()
        known = f", of which {length} tokens are already evaluated" if length else ""
        self._tell(f"{self._file.path}: continuing after {len(self.saved.turns)} turns{known}.")

    def keep(self, system: str | None, turns: Sequence[Message]) -> None:
        """Write the turns, in case the program is killed later.

        Raises:
            SessionFileError: as `SessionFile.write`.
        """
        self._file.write(Session(system=system, turns=list(turns)))

    async def close(self, system: str | None, turns: Sequence[Message]) -> None:
        """Write the turns and their KV.

        Raises:
            SessionFileError: as `SessionFile.write`.
        """
        state = b""
        if self._client is not None and turns:
            opening = [] if system is None else [Message(role="system", content=system)]
            try:
                state = await self._client.save_session([*opening, *turns])
            except GenbatchError as error:
                self._warn(f"the KV is not kept: {error}")
        self._file.write(Session(system=system, turns=list(turns), state=state))

    async def _load(self) -> int:
        """Load the KV, and return the number of its positions."""
        if self.saved.is_damaged:
            self._warn("the KV is damaged; the conversation is evaluated again")
        if self._client is None or not self.saved.state:
            return 0
        try:
            return await self._client.load_session(self.saved.state)
        except GenbatchError as error:
            self._warn(f"the KV cannot be used here; the conversation is evaluated again: {error.message}")
            return 0

    def _tell(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def _warn(self, text: str) -> None:
        self._console.print(f"warning: {self._file.path}: {text}", style="yellow", markup=False)


# The most tokens of an answer without --max-tokens, since a small model may generate without end.
MAX_ANSWER_TOKENS = 1024
_PROMPT = "you> "
_HINT = "Ctrl-C cancels an answer, Ctrl-D leaves; /help lists the commands."
_HELP = """/new    start over
/help   this list
/quit   leave, as Ctrl-D does"""


@with_flag_groups
def chat(
    context: typer.Context,
    *,
    system: Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system prompt.")] = None,
    session: Annotated[
        Path | None,
        typer.Option(
            "--session", metavar="FILE", dir_okay=False, help="Keep the conversation in this file, and continue it."
        ),
    ] = None,
    connection: ConnectionFlags,
    sampling: SamplingFlags,
    engine: ModelFlags,
) -> None:
    """Talk with the model.

    Ctrl-C cancels the running answer only, Ctrl-D leaves, /new starts over, /help lists the commands.

    A session's file has the messages and the model's state after them, so that the next run continues at once. With
    --connect it has the messages only.

    Examples:

      genbatch chat --system "You are terse."

      genbatch chat --session notes.chat

      genbatch chat --connect tcp://127.0.0.1:5555 --temperature 0.7
    """

    parameters = sampling.request_params()

    async def talk() -> None:
        file = None if session is None else SessionFile(session)
        # Faults of the session or of the parameters are reported before a model is loaded.
        saved = Session() if file is None else file.read()
        check_request(None, [{"role": "user", "content": ""}], parameters)
        # A shared service keeps no KV for a session, so a session needs a private one.
        async with open_client(connection, engine, finds_running=file is None) as client:
            await _tell_models_own(client, context)
            store = None if file is None else ConversationStore(file, saved, client)
            with _terminal_restored():
                await Conversation(client, system, parameters, store).run()

    run_command(talk)


async def _tell_models_own(client: Client, context: typer.Context) -> None:
    """Print the sampling parameters in the model's files, unless flags set them."""
    cards = await client.models()  # none, while a fleet has no replica
    own = {name: value for card in cards[:1] for name, value in card.sampling.items() if not is_given(context, name)}
    if own and sys.stdin.isatty():
        settings = ", ".join(f"{name} {value:g}" for name, value in own.items())
        Console(stderr=True, highlight=False).print(
            f"sampling as the model's authors recommend: {settings}", style="dim"
        )


class Conversation:
    """Turns of a person and a model; each answer follows all turns before it.

    Args:
        client: answers the requests.
        system: the system prompt.
        parameters: the parameters of every request.
        store: keeps the conversation; a conversation in it continues.
    """

    def __init__(
        self,
        client: Client,
        system: str | None,
        parameters: GenerateParams,
        store: ConversationStore | None = None,
    ) -> None:
        self._client = client
        self._parameters = parameters
        self._store = store
        self._system = store.saved.system if system is None and store is not None else system
        self._turns: list[Message] = [] if store is None else list(store.saved.turns)
        self._answering: trio.CancelScope | None = None
        self._console = Console(highlight=False)
        self._is_terminal = sys.stdin.isatty()
        self._to_terminal = sys.stdout.isatty()

    async def run(self) -> None:
        """Read and answer until the input ends."""
        if self._store is not None:
            await self._store.resume()
        if self._is_terminal:
            self._console.print(_HINT, style="dim")
        await self._talk()
        if self._store is not None:
            await self._store.close(self._system, self._turns)

    async def _talk(self) -> None:
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(signal.SIGINT) as interrupts:
                nursery.start_soon(self._cancel_answers, interrupts)
                async for text in self._inputs():
                    if re.fullmatch("/[a-z]*", text):
                        self._command(text)
                    elif text:
                        await self._answer(text)
                nursery.cancel_scope.cancel()

    def _command(self, text: str) -> None:
        if text == "/new":
            self._turns.clear()
            self._keep()
            self._console.print("A new conversation.", style="dim")
        elif text == "/help":
            self._console.print(_HELP, style="dim")
        else:
            self._console.print(f"There is no command {text}.\n{_HELP}", style="dim")

    def _keep(self) -> None:
        if self._store is not None:
            self._store.keep(self._system, self._turns)

    async def _inputs(self) -> AsyncIterator[str]:
        """Yield the lines of input; a thread reads them, since reading blocks."""
        while True:
            try:
                line = await trio.to_thread.run_sync(_read_line, self._is_terminal, abandon_on_cancel=True)
            except EOFError:
                if self._is_terminal:
                    self._console.print()
                return
            if line.strip() == "/quit":
                return
            yield line.strip()

    async def _answer(self, text: str) -> None:
        """Stream an answer; the text of a cancelled answer stays in the conversation."""
        asked = [*self._turns, Message(role="user", content=text)]
        opening = [] if self._system is None else [Message(role="system", content=self._system)]
        texts: list[str] = []
        with trio.CancelScope() as self._answering:
            try:
                note = await self._say([*opening, *asked], texts)
            except PromptTooLong as error:
                print_error(error, advice="/new starts a new conversation")
            except GenbatchError as error:
                print_error(error)
            else:
                sys.stdout.write(note)
        if self._answering.cancelled_caught:
            sys.stdout.write(" [cancelled]")
        self._answering = None
        if texts:
            sys.stdout.write("\n\n" if self._is_terminal else "\n")
            self._turns = [*asked, Message(role="assistant", content="".join(texts))]
            self._keep()

    async def _say(self, messages: list[Message], texts: list[str]) -> str:
        """Write an answer as it comes, and add it to `said`; return the note to print after it."""
        limit = self._parameters.get("max_tokens") or MAX_ANSWER_TOKENS
        parameters: GenerateParams = {**self._parameters, "max_tokens": limit}
        async with self._client.stream(messages=messages, **parameters) as stream:
            async for token in stream:
                texts.append(token.text)
                sys.stdout.write(printable(token.text, is_terminal=self._to_terminal))
                sys.stdout.flush()
        if stream.result.finish_reason != "length":
            return ""
        if stream.result.usage.completion_tokens < limit:
            return " [cut short: the context is full; /new starts a new conversation]"
        return " [cut short: --max-tokens allows more]"

    async def _cancel_answers(self, interrupts: AsyncIterator[int]) -> None:
        async for _ in interrupts:
            if self._answering is not None:
                self._answering.cancel()
            elif self._is_terminal:
                # The thread continues reading, so show its line again.
                sys.stdout.write(f"\n{_HINT}\n{_PROMPT}{_entered()}")
                sys.stdout.flush()


def _read_line(is_terminal: bool) -> str:
    if not is_terminal:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line
    with suppress(ImportError):  # gives input() editing and a history; not on every platform
        import readline  # noqa: F401
    return input(_PROMPT)


def _entered() -> str:
    """Return the text of the line that is being edited."""
    try:
        import readline
    except ImportError:
        return ""
    return readline.get_line_buffer()


@contextmanager
def _terminal_restored() -> Iterator[None]:
    """Restore the terminal's settings, since a thread that still reads a line leaves it without echo."""
    if not sys.stdin.isatty():
        yield
        return
    settings = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)
