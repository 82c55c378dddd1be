"""Worker: one thread of its own for blocking calls that must all come from the same thread.

    worker = Worker("model")
    text = await worker.run(context.detokenize, token_ids)                # waits for the result
    worker.submit(context.step, batch, on_done=lambda result: ...)        # does not
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
    """The thread starts here and ends with `close`, or with the event loop if nobody closed it.

    Must be made and used on an event loop's thread.
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
        """The result of `job(*args)`, or its exception.

        If the waiting task is cancelled the job still runs to its end, and its outcome is dropped.

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
        """Queues `job(*args)`; `on_done` gets its outcome on the event loop's thread.

        `on_done` is called from the event loop itself: it must be quick and must not raise. It may send to an actor or
        to another worker that has ended meanwhile: then nobody is left to be told. Anything else that it raises is a
        bug, which is logged: raised there it would end the whole program.

        Raises:
            WorkerClosed: `close` was called.
        """
        if self._closing.is_set():
            raise WorkerClosed(self.name)

        def deliver(result: outcome.Outcome[T]) -> None:
            _call_back(self.name, on_done, result)

        self._jobs.put(lambda: self._tell(deliver, outcome.capture(job, *args)))

    def tell(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """From within a job: calls `callback(*args)` on the event loop's thread, before the job's own `on_done`.

        What `submit` says of `on_done` holds for it.
        """

        self._tell(lambda: _call_back(self.name, callback, *args))

    @staticmethod
    def wait(job: Callable[[float], T], timeout_s: float) -> T:
        """`job(timeout_s)`, here and now: it blocks the event loop. In a simulation nothing it waits for is late."""
        return job(timeout_s)

    @staticmethod
    def now() -> float:
        """The clock for how long something in a job takes, in seconds."""
        return time.perf_counter()

    async def close(self) -> None:
        """Refuses new jobs, waits for those taken, ends the thread (even if this is cancelled)."""
        self._closing.set()
        await self._ended.wait()
        self._thread.join()

    async def _end_thread(self) -> None:
        """A system task, so that the loop's end reaches a worker that nobody closed."""
        try:
            await self._closing.wait()
        finally:
            self._closing.set()
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # its arguments must not live until the next one comes
        self._tell(self._ended.set)

    def _tell(self, callback: Callable[..., Any], *args: object) -> None:
        with suppress(trio.RunFinishedError):  # then nobody is left who could want the outcome
            self._token.run_sync_soon(callback, *args)


class SharedWorker:
    """Runs one job of each client in turn, so that a client with many jobs delays another client's by one of them.

    shared = SharedWorker(worker)
    shared.submit("alice", job, on_done=...)

    Args:
        worker: runs the jobs; whoever made it closes it. Jobs that still wait then are dropped.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._is_busy = False
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by client, in the order of their turns

    def submit(self, client: str, job: Callable[[], T], *, on_done: Callable[["outcome.Outcome[T]"], object]) -> None:
        """Runs `job` when it is this client's turn; see `Worker.submit` for `on_done`.

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
                self._waiting.clear()  # nobody is left to be told
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
            self._waiting[client] = jobs  # behind all others
        begin()


def _call_back(worker: str, callback: Callable[..., object], *args: object) -> None:
    """Called by the event loop itself, to which nothing may be raised."""
    try:
        callback(*args)
    except (ActorDown, WorkerClosed):
        pass  # nobody is left to be told
    except Exception:
        logger.exception("what a job of worker %s had to tell was not understood", worker)
