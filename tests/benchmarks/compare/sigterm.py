"""SIGTERM ends the comparison by SystemExit, so that what was measured is written first."""

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from genbatch.actors.runtime.supervisor import background

T = TypeVar("T")


def exit_on_sigterm() -> None:
    """From now on the signal raises SystemExit."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def run_trio(work: Callable[[], Awaitable[T]]) -> T:
    """What `work` returns, run by trio, whose own code must not be interrupted: the signal cancels `work` first.

    Raises:
        SystemExit: it came.
    """
    return trio.run(_run, work)


async def _run(work: Callable[[], Awaitable[T]]) -> T:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with background() as nursery:

            async def cancel() -> None:
                await anext(signals)
                nursery.cancel_scope.cancel()

            nursery.start_soon(cancel)
            return await work()
    sys.exit(128 + signal.SIGTERM)
