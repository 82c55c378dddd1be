"""Worker: a thread for blocking calls that must all run on the same thread.

    worker = Worker("model")
    text = await worker.run(context.detokenize, token_ids)                # returns the result
    worker.submit(context.step, batch, on_done=lambda result: ...)        # does not wait
    await worker.close()

Jobs run one at a time, in order. A job cannot be interrupted.

SharedWorker lets the jobs of several clients take turns on one worker.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio

from genbatch.actors.runtime.errors import ActorDown, WorkerClosed

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Job = Callable[[], None]


class Worker:
    """A thread that starts here and ends with `close`, or with the event loop.

    Make and use a worker on an event loop's thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._token = trio.lowlevel.current_trio_token()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closing = trio.Event()
        self._ended = trio.Event()
        self._thread = threading.Thread(target=self._work, name=name)
        self._thread.start()
        trio.lowlevel.spawn_system_task(self._end_thread, name=f"end of worker {name}")

    async def run(self, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return the result of `job(*args)`, or raise its exception.

        If the waiting task is cancelled, the job still runs to its end, and its outcome is dropped.

        Raises:
            WorkerClosed: `close` was called.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        waiting: trio.lowlevel.Task | None = trio.lowlevel.current_task()

        def deliver(result: outcome.Outcome[T]) -> None:
            if waiting is not None:
                trio.lowlevel.reschedule(waiting, result)

        def abort(_: object) -> trio.lowlevel.Abort:
            nonlocal waiting
            waiting = None
            return trio.lowlevel.Abort.SUCCEEDED

        self.submit(job, *args, on_done=deliver)
        value: T = await trio.lowlevel.wait_task_rescheduled(abort)
        return value

    def submit(self, job: Callable[[*Ts], T], *args: *Ts, on_done: Callable[["outcome.Outcome[T]"], object]) -> None:
        """Queue `job(*args)`; `on_done` gets its outcome on the event loop's thread.

        The event loop itself calls `on_done`, so it must be quick and must not raise. It may send to an actor or to a
        worker that has ended; that is no error. Any other exception is a bug, and is logged: it would otherwise end the
        whole program.

        Raises:
            WorkerClosed: `close` was called.
        """
        if self._closing.is_set():
            raise WorkerClosed(self.name)

        def deliver(result: outcome.Outcome[T]) -> None:
            _call_back(self.name, on_done, result)

        self._jobs.put(lambda: self._tell(deliver, outcome.capture(job, *args)))

    def tell(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call `callback(*args)` on the event loop's thread, from within a job and before its `on_done`.

        The rules of `on_done` in `submit` apply.
        """
        self._tell(lambda: _call_back(self.name, callback, *args))

    @staticmethod
    def wait(job: Callable[[float], T], timeout_s: float) -> T:
        """Return `job(timeout_s)`, which blocks the calling thread. In a simulation such a job never waits."""
        return job(timeout_s)

    @staticmethod
    def now() -> float:
        """Return the time in seconds, for measuring parts of a job."""
        return time.perf_counter()

    async def close(self) -> None:
        """Refuse new jobs, wait for the queued ones, and end the thread (even if this call is cancelled)."""
        self._closing.set()
        await self._ended.wait()
        self._thread.join()

    async def _end_thread(self) -> None:
        """End the thread; a system task, so that the end of the event loop ends it, too."""
        try:
            await self._closing.wait()
        finally:
            self._closing.set()
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # its arguments must not live until the next job
        self._tell(self._ended.set)

    def _tell(self, callback: Callable[..., Any], *args: object) -> None:
        with suppress(trio.RunFinishedError):  # the event loop has ended, and nothing waits for the outcome
            self._token.run_sync_soon(callback, *args)


class SharedWorker:
    """Runs one job of each client in turn, so that a client with many jobs delays another client by one job.

    shared = SharedWorker(worker)
    shared.submit("alice", job, on_done=...)

    Args:
        worker: runs the jobs; its owner closes it. Closing drops the jobs that wait here.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._is_busy = False
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by client, in the order of their turns

    def submit(self, client: str, job: Callable[[], T], *, on_done: Callable[["outcome.Outcome[T]"], object]) -> None:
        """Run `job` in this client's turn; see `Worker.submit` for `on_done`.

        Raises:
            WorkerClosed: the worker was closed.
        """
        if self._is_busy:
            self._waiting.setdefault(client, deque()).append(lambda: self._begin(job, on_done))
        else:
            self._begin(job, on_done)

    def _begin(self, job: Callable[[], T], on_done: Callable[["outcome.Outcome[T]"], object]) -> None:
        def done(result: "outcome.Outcome[T]") -> None:
            self._is_busy = False
            try:
                on_done(result)
            except ActorDown:
                self._waiting.clear()  # the actor that waits for them has ended
                raise
            finally:
                self._next()

        self._worker.submit(job, on_done=done)
        self._is_busy = True

    def _next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        client = next(iter(self._waiting))
        jobs = self._waiting.pop(client)
        begin = jobs.popleft()
        if jobs:
            self._waiting[client] = jobs  # behind all other clients
        begin()


def _call_back(worker: str, callback: Callable[..., object], *args: object) -> None:
    """Run a callback for the event loop, which must not get an exception."""
    try:
        callback(*args)
    except (ActorDown, WorkerClosed):
        pass  # the receiver has ended
    except Exception:
        logger.exception("a callback of worker %s failed", worker)
