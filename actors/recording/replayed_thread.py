"""ReplayedThread: has the methods of a Worker, and runs on the event loop what the record says, when it says so."""

from collections.abc import Callable
from typing import Any

import outcome
import trio


class ReplayedThread:
    """Steps wait until their end is played; everything else is done at once."""

    def __init__(self) -> None:
        self._step: tuple[tuple[Any, ...], Callable[[outcome.Outcome[Any]], object]] | None = None

    async def run(self, job: Callable[..., Any], *args: object) -> Any:
        await trio.lowlevel.checkpoint()
        return job(*args)

    def submit(self, job: Callable[..., Any], *args: object, on_done: Callable[[Any], object]) -> None:
        """Takes a step; its forward is not the one to be run."""
        self._step = args, on_done

    def end_step(self, evaluate: Callable[..., Any]) -> None:
        """Ends the step under way with what `evaluate` gives for its arguments; nothing if there is none."""
        if self._step is None:
            return  # a replay that differs: its ticks will tell
        (args, on_done), self._step = self._step, None
        on_done(outcome.capture(evaluate, *args))

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()
