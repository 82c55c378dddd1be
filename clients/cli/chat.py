"""`genbatch chat`: a conversation in the terminal."""

import re
import signal
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import trio
import typer
from rich.console import Console

from genbatch.clients.cli.command import print_error, run_command
from genbatch.clients.cli.conversation_store import ConversationStore
from genbatch.clients.cli.engine_flags import ModelFlags
from genbatch.clients.cli.flag_group import with_flag_groups
from genbatch.clients.cli.sampling_flags import SamplingFlags
from genbatch.clients.cli.session_file import Session, SessionFile
from genbatch.clients.cli.terminal_text import printable
from genbatch.clients.connection import ConnectionFlags, open_client
from genbatch.clients.interface import Client
from genbatch.clients.request import GenerateParams
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import Message

_PROMPT = "you> "
_HINT = "Ctrl-C cancels an answer, Ctrl-D leaves; /help lists the commands."
_HELP = """/new    start over
/help   this list
/quit   leave, as Ctrl-D does"""


@with_flag_groups
def chat(
    *,
    system: Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system prompt.")] = None,
    session: Annotated[
        Path | None,
        typer.Option(
            "--session", metavar="FILE", dir_okay=False, help="Keep the conversation here, and go on with it."
        ),
    ] = None,
    connection: ConnectionFlags,
    sampling: SamplingFlags,
    engine: ModelFlags,
) -> None:
    """Talk with the model.

    Ctrl-C cancels the running answer only, Ctrl-D leaves, /new starts over, /help lists the commands.

    A session's file holds what was said, and the model's state after it, so that the next run goes on at once; with
    --connect what was said only.

    Examples:

      genbatch chat --system "You are terse."

      genbatch chat --session notes.chat

      genbatch chat --connect tcp://127.0.0.1:5555 --temperature 0.7
    """

    parameters = sampling.parameters()

    async def talk() -> None:
        file = None if session is None else SessionFile(session)
        saved = Session() if file is None else file.read()  # what is wrong with it shows before a model is loaded
        async with open_client(connection, engine) as client:
            store = None if file is None else ConversationStore(file, saved, client)
            with _terminal_restored():
                await Conversation(client, system, parameters, store).run()

    run_command(talk)


class Conversation:
    """Turns of a person and a model; each answer is given all the turns before it.

    Args:
        client: who answers.
        system: the system prompt.
        parameters: of every request.
        store: where it is kept; what it holds already is gone on with.
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
        """Asks and answers until the input ends."""
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
        """What the person enters, until the end of it; read on a thread, since reading blocks."""
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
        """Streams one answer; what was said of a cancelled one stays part of the conversation."""
        asked = [*self._turns, Message(role="user", content=text)]
        told = [] if self._system is None else [Message(role="system", content=self._system)]
        said: list[str] = []
        with trio.CancelScope() as self._answering:
            try:
                async with self._client.stream(messages=[*told, *asked], **self._parameters) as stream:
                    async for token in stream:
                        said.append(token.text)
                        sys.stdout.write(printable(token.text, is_terminal=self._to_terminal))
                        sys.stdout.flush()
            except GenbatchError as error:
                print_error(error)
        if self._answering.cancelled_caught:
            sys.stdout.write(" [cancelled]")
        self._answering = None
        if said:
            sys.stdout.write("\n\n" if self._is_terminal else "\n")
            self._turns = [*asked, Message(role="assistant", content="".join(said))]
            self._keep()

    async def _cancel_answers(self, interrupts: AsyncIterator[int]) -> None:
        async for _ in interrupts:
            if self._answering is not None:
                self._answering.cancel()
            elif self._is_terminal:
                # The thread goes on reading: show again what it has.
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
    """What stands in the line being edited."""
    try:
        import readline
    except ImportError:
        return ""
    return readline.get_line_buffer()


@contextmanager
def _terminal_restored() -> Iterator[None]:
    """Puts the terminal back as it was: a thread still reading a line would leave it without echo."""
    if not sys.stdin.isatty():
        yield
        return
    settings = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)
