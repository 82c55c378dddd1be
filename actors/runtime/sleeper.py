"""Sleeper: one task sleeps until another task wakes it, at hardly more than the cost of a turn of trio's scheduler.

    sleeper = Sleeper()
    await sleeper          # in one task
    sleeper.wake()         # in any other task; it does nothing while no task sleeps

A `trio.Event` can wake a task only once, and takes three times as long.
"""

from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeVar

import outcome
import trio

T = TypeVar("T")


class Wake(outcome.Outcome[None]):
    """The outcome of a sleep. One object serves all of them, since making one takes as long as the rest of a wake."""

    def unwrap(self) -> None:
        """Return None."""

    def send(self, gen: Generator[T, None, Any]) -> T:
        """See `outcome.Outcome`."""
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[T, None]) -> T:
        """See `outcome.Outcome`."""
        return await agen.asend(None)


WAKE = Wake()


class Sleeper:
    """A place where one task at a time sleeps. Sleeping is a checkpoint; a wake after a cancellation is lost.

    A second task that would sleep gets a `trio.BusyResourceError`.
    """

    __slots__ = ("_message", "_task")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        # The message that suspends a task. It can be sent again and again, so no sleep makes a coroutine.
        coroutine = trio.lowlevel.wait_task_rescheduled(self._abort)  # noqa: ASYNC105
        self._message = coroutine.send(None)
        coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        if self._task is not None:
            raise trio.BusyResourceError("another task sleeps here")
        self._task = trio.lowlevel.current_task()
        (yield self._message).unwrap()

    def wake(self) -> None:
        """Wake the task that sleeps here, if there is one."""
        if self._task is not None:
            trio.lowlevel.reschedule(self._task, WAKE)
            self._task = None

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
