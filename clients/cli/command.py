"""The shared parts of all commands: groups of flags, running a command, and printing text safely.

    @dataclass
    class Sampling:
        temperature: Annotated[float, typer.Option(help="...")] = 0.0

    @app.command()
    @with_flag_groups
    def generate(prompt: str, *, sampling: Sampling) -> None:
        run_command(partial(show_answer, prompt, sampling))

typer sees `generate(prompt, *, temperature)`; the function gets a `Sampling`. Signals cancel a command. Errors become
one line and an exit code: 0 is success, 1 a failure, 2 the caller's mistake, 128 + n the end by signal n. A terminal
obeys control characters, and a prompt may make a model print some: `printable` removes them.
"""

import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, TextIO, TypeVar, cast, get_type_hints

import trio
import typer

from genbatch.actors.fleet.routing import RouterError
from genbatch.actors.runtime.errors import ActorError, StartFailed
from genbatch.actors.scheduling.scheduler import SchedulerError
from genbatch.actors.security.key_files import AddressError, KeyFileError
from genbatch.clients.cli.option_flags import OptionFlags
from genbatch.clients.interface import ClientError
from genbatch.nif.errors import ModelError, NativeError, OptionError
from genbatch.proto.errors import GenbatchError, InvalidRequest, ModelNotFound, PromptTooLong


def with_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with a keyword parameter for each flag, in place of its groups of flags."""
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        flags = _flags(parameter.annotation)
        if flags is None:
            parameters.append(parameter)
        else:
            groups[parameter.name] = parameter.annotation, [flag.name for flag in flags]
            parameters.extend(flags)

    @wraps(command)
    def expanded(**values: Any) -> None:
        for name, (group, flags) in groups.items():
            values[name] = group(**{flag: values.pop(flag) for flag in flags})
        command(**values)

    keyword_only = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    expanded.__signature__ = Signature(keyword_only)  # type: ignore[attr-defined]  # what typer reads
    expanded.__annotations__ = {}
    return expanded


def _flags(group: Any) -> list[Parameter] | None:
    """Return the flags of a dataclass's fields or of a service's options; None for another type."""
    if not isinstance(group, type):
        return None
    if issubclass(group, OptionFlags):
        return group.parameters()
    if not is_dataclass(group):
        return None
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


# C0 without tab and newline, DEL, C1, and the characters that reorder or hide other text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str, *, is_terminal: bool) -> str:
    """Return `text` without control characters for a terminal; for a file or a pipe, return it unchanged."""
    return _CONTROL.sub("", text) if is_terminal else text


def lossy(file: TextIO) -> TextIO:
    """Return `file`, standard output or standard error, so that text that cannot be written is dropped.

    A service continues if the disk of its output is full or the reader of its output has ended.
    """
    return cast(TextIO, _LossyFile(file))


class _LossyFile:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
        except OSError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        if self._file is sys.stdout:  # Python would write its buffer again at the end of the process, and fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


FAILURE = 1
BAD_INPUT = 2


def _signals() -> list[signal.Signals]:
    """Return the signals that end a command. `nohup` starts a command with SIGHUP ignored, and it stays ignored."""
    ending = [signal.SIGINT, signal.SIGTERM]
    return ending if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*ending, signal.SIGHUP]


_CALLERS_MISTAKES = (
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    ModelError,
    OptionError,
    SchedulerError,
    RouterError,
    AddressError,
    KeyFileError,
)
_EXPECTED = (GenbatchError, NativeError, ActorError, SchedulerError, RouterError, ClientError)

_Command = TypeVar("_Command")


class UsageError(Exception):
    """Flags contradict each other; the message names them."""


def run_command(command: Callable[[], Awaitable[None]]) -> None:
    """Run `command` on trio; a signal cancels it.

    Raises:
        typer.Exit: with the exit code, unless it is 0.
    """
    run = _Run()
    code = _exit_code(run.until_signalled, command)
    if run.caught is not None and not code:
        code = 128 + run.caught
    _exit(code, run)


def run_service(command: Callable[[trio.Event], Awaitable[None]]) -> None:
    """Run a service on trio: the first signal sets its event, and is success; the second signal ends the process.

    Raises:
        typer.Exit: with the exit code, unless it is 0.
    """
    run = _Run()
    _exit(_exit_code(run.until_stopped, command), run)


def _exit_code(run: Callable[[_Command], Awaitable[None]], command: _Command) -> int:
    try:
        trio.run(run, command)
    except BaseException as error:
        return report(error)
    return 0


def _exit(code: int, run: "_Run") -> None:
    if run.left_threads:
        # Loading a model or reading the terminal cannot be interrupted, and an interpreter that shuts down
        # under such a thread may crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        raise typer.Exit(code)


def report(error: BaseException) -> int:
    """Print an expected error as one line, and return the exit code; raise any other error."""
    error = _root(error)
    if isinstance(error, KeyboardInterrupt):  # before signals were received
        return 128 + signal.SIGINT
    if not isinstance(error, (*_EXPECTED, UsageError)):
        raise error
    print_error(error)
    return BAD_INPUT if isinstance(error, (*_CALLERS_MISTAKES, UsageError)) else FAILURE


def print_error(error: BaseException, advice: str = "") -> None:
    """Print an error as a red line on standard error, with advice for the user."""
    from rich.console import Console  # imported late, since it is slow and most commands print no error
    from rich.text import Text

    console = Console(file=lossy(sys.stderr), soft_wrap=True)
    line = " ".join(f"error: {error}".split())
    console.print(Text(f"{line}; {advice}" if advice else line, style="bold red"))


def _root(error: BaseException) -> BaseException:
    """Return the first cause: an exception of a group, or the cause of a child's failed start."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, StartFailed) and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


class _Run:
    """One run of a command."""

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self.left_threads = False

    async def until_signalled(self, command: Callable[[], Awaitable[None]]) -> None:
        """Run `command` until it ends or a signal cancels it."""
        try:
            with trio.open_signal_receiver(*_signals()) as signals:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._cancel_on_signal, signals, nursery.cancel_scope)
                    await command()
                    nursery.cancel_scope.cancel()
        finally:
            # An abandoned thread keeps its token until it ends.
            self.left_threads = trio.to_thread.current_default_thread_limiter().borrowed_tokens > 0

    async def until_stopped(self, command: Callable[[trio.Event], Awaitable[None]]) -> None:
        """Run `command` until it ends; the first signal sets its event."""
        try:
            with trio.open_signal_receiver(*_signals()) as signals:
                async with trio.open_nursery() as nursery:
                    stopping = trio.Event()
                    nursery.start_soon(self._stop_on_signal, signals, stopping)
                    await command(stopping)
                    nursery.cancel_scope.cancel()
        finally:
            self.left_threads = trio.to_thread.current_default_thread_limiter().borrowed_tokens > 0

    async def _stop_on_signal(self, signals: AsyncIterator[int], stopping: trio.Event) -> None:
        async for number in signals:
            if stopping.is_set():
                # The second signal means: do not wait. The service's other processes end with this one.
                os._exit(128 + number)
            stopping.set()

    async def _cancel_on_signal(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for number in signals:
            self.caught = self.caught or signal.Signals(number)
            scope.cancel()
