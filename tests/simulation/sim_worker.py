"""SimWorker: the Worker of a simulation: jobs run on the event loop, and take simulated time."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import outcome
import trio

from genbatch.actors.runtime.errors import ActorDown, WorkerClosed


class SimWorker:
    """Has the methods of a Worker.

    Args:
        nursery: dies with the process that is simulated.
        rng: draws how long a job takes.
        seconds: most that one takes.
        hang: asked before each job; true: it never ends.
    """

    def __init__(
        self, nursery: trio.Nursery, rng: random.Random, seconds: float, hang: Callable[[], bool] = lambda: False
    ) -> None:
        self._rng = rng
        self._seconds = seconds
        self._hang = hang
        self._told: list[Callable[[], object]] = []
        self._jobs, jobs = trio.open_memory_channel[Any](1024)
        nursery.start_soon(self._work, jobs)

    async def run(self, job: Callable[..., Any], *args: object) -> Any:
        ended = trio.Event()
        results: list[outcome.Outcome[Any]] = []

        def done(result: outcome.Outcome[Any]) -> None:
            results.append(result)
            ended.set()

        self.submit(job, *args, on_done=done)
        await ended.wait()
        return results[0].unwrap()

    def submit(self, job: Callable[..., Any], *args: object, on_done: Callable[[Any], object]) -> None:
        try:
            self._jobs.send_nowait((job, args, on_done))
        except trio.ClosedResourceError:
            raise WorkerClosed("simulated") from None

    def tell(self, callback: Callable[..., object], *args: object) -> None:
        self._told.append(lambda: callback(*args))

    def wait(self, job: Callable[[float | None], Any], timeout_s: float) -> Any:
        return job(None)

    def now(self) -> float:
        return trio.current_time()

    async def close(self) -> None:
        self._jobs.close()
        await trio.lowlevel.checkpoint()

    async def _work(self, jobs: "trio.MemoryReceiveChannel[Any]") -> None:
        async for job, args, on_done in jobs:
            await self._pass_time()
            if self._hang():
                await trio.sleep_forever()
            result = capture(job, *args)
            for callback in self._told:
                with suppress(ActorDown):
                    callback()
                await self._pass_time()  # what happens between a thread's message and its end
            self._told.clear()
            with suppress(ActorDown, WorkerClosed):
                on_done(result)

    async def _pass_time(self) -> None:
        await trio.sleep(self._rng.random() * self._seconds)


def capture(job: Callable[..., Any], *args: object) -> outcome.Outcome[Any]:
    """As outcome.capture, but what ends a process is not an outcome."""
    try:
        return outcome.Value(job(*args))
    except Exception as error:
        return outcome.Error(error)
