"""Runs a command to its end: signals cancel it, errors become one line and an exit code.

    def stats() -> None:
        run_command(partial(show_stats, connect))

0 is success, 1 a failure, 2 the caller's mistake, 128 + n the end by signal n.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import trio
import typer
from rich.console import Console
from rich.text import Text

from genbatch.actors.gateways.zeromq_address import AddressError
from genbatch.actors.runtime.errors import ActorError, StartFailed
from genbatch.actors.scheduling.scheduler import SchedulerError
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
)
_EXPECTED = (GenbatchError, NativeError, ActorError, SchedulerError, ClientError)


class UsageError(Exception):
    """Flags that contradict one another; the message names them."""


def run_command(command: Callable[[], Awaitable[None]], *, exit_on_sigterm: int | None = None) -> None:
    """Runs `command` on trio.

    Args:
        exit_on_sigterm: the exit code where SIGTERM is the ordinary end; None is 128 + 15.

    Raises:
        typer.Exit: with the exit code, unless it is 0.
    """
    run = _Run()
    try:
        trio.run(run.until_signalled, command)
    except BaseException as error:
        code = report(error)
    else:
        code = 0
    if run.caught is not None and not code:
        code = 128 + run.caught
        if run.caught == signal.SIGTERM and exit_on_sigterm is not None:
            code = exit_on_sigterm
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

    async def _cancel_on_signal(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for number in signals:
            self.caught = self.caught or signal.Signals(number)
            scope.cancel()
