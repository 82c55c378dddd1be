"""Runs a command to its end: signals cancel it, errors become one line and an exit code.

    def stats() -> None:
        run_command(partial(show_stats, connect))

0 is success, 1 a failure, 2 the caller's mistake, 128 + n the end by signal n.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import trio
import typer
from rich.console import Console
from rich.text import Text

from genbatch.actors.runtime.errors import ActorError, StartFailed
from genbatch.actors.scheduling.scheduler import SchedulerError
from genbatch.actors.security.errors import AddressError, KeyFileError
from genbatch.clients.errors import ClientError
from genbatch.nif.errors import ModelError, NativeError, OptionError
from genbatch.proto.errors import GenbatchError, InvalidRequest, ModelNotFound, PromptTooLong

FAILURE = 1
BAD_INPUT = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_CALLERS_MISTAKES = (
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    ModelError,
    OptionError,
    SchedulerError,
    AddressError,
    KeyFileError,
)
_EXPECTED = (GenbatchError, NativeError, ActorError, SchedulerError, ClientError)

_Command = TypeVar("_Command")


class UsageError(Exception):
    """Flags that contradict one another; the message names them."""


def run_command(command: Callable[[], Awaitable[None]]) -> None:
    """Runs `command` on trio; a signal cancels it.

    Raises:
        typer.Exit: with the exit code, unless it is 0.
    """
    run = _Run()
    code = _exit_code(run.until_signalled, command)
    if run.caught is not None and not code:
        code = 128 + run.caught
    _exit(code, run)


def run_service(command: Callable[[trio.Event], Awaitable[None]]) -> None:
    """Runs on trio what ends by a signal: the first sets the event, and is success; the second ends the process.

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
    """Prints an expected error as one line and returns the exit code; raises any other one."""
    error = _root(error)
    if isinstance(error, KeyboardInterrupt):  # before the signals had a receiver
        return 128 + signal.SIGINT
    if not isinstance(error, (*_EXPECTED, UsageError)):
        raise error
    print_error(error)
    return BAD_INPUT if isinstance(error, (*_CALLERS_MISTAKES, UsageError)) else FAILURE


def print_error(error: BaseException) -> None:
    """One red line on standard error."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(Text(f"error: {' '.join(str(error).split())}", style="bold red"))


def _root(error: BaseException) -> BaseException:
    """What went wrong first: out of groups of exceptions, and behind a child that did not start."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, StartFailed) and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


class _Run:
    """One run of a command, and what is known of its end."""

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self.left_threads = False

    async def until_signalled(self, command: Callable[[], Awaitable[None]]) -> None:
        """Runs `command` until it ends or a signal cancels it."""
        try:
            with trio.open_signal_receiver(*_SIGNALS) as signals:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._cancel_on_signal, signals, nursery.cancel_scope)
                    await command()
                    nursery.cancel_scope.cancel()
        finally:
            # An abandoned thread keeps its token until it ends.
            self.left_threads = trio.to_thread.current_default_thread_limiter().borrowed_tokens > 0

    async def until_stopped(self, command: Callable[[trio.Event], Awaitable[None]]) -> None:
        """Runs `command` until it ends, told of the first signal."""
        try:
            with trio.open_signal_receiver(*_SIGNALS) as signals:
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
                # Whoever asks twice does not want to wait for anything. Processes of ours end with this one.
                os._exit(128 + number)
            stopping.set()

    async def _cancel_on_signal(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for number in signals:
            self.caught = self.caught or signal.Signals(number)
            scope.cancel()
