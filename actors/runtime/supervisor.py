"""Supervisor: starts children in order, restarts those that end, stops them in reverse.

    supervisor = Supervisor(
        [
            ChildSpec("batcher", lambda: Batcher(open_context, options), shutdown=30.0),
            ChildSpec("gateway", lambda: Gateway(supervisor.registry.ref("batcher")).run),
        ],
        strategy="rest_for_one",
    )
    await nursery.start(supervisor.run)
    await supervisor.registry.ref("batcher").call(StatsRequest())
    nursery.cancel_scope.cancel()      # stops the gateway, then the batcher

A child is a GenServer, or an async function that takes `task_status` and calls `task_status.started()`, as for
`trio.Nursery.start`. A supervisor's `run` is such a function. Once started, children are shielded from the supervisor's
own cancellation, so that it can stop them one by one.

Its registry has the actors under their ids, so that a ref outlives the actor behind it:

    counter = registry.ref("counter")    # looks the name up at each use
    await counter.call("value")          # raises ActorDown while no actor has the name
"""

import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import trio

from genbatch.actors.runtime.actor import ActorRef, Exit, GenServer, Mailbox, Reason, run_actor
from genbatch.actors.runtime.errors import ActorDown, ActorError, NameTaken, RestartLimit, StartFailed
from genbatch.actors.runtime.telemetry import Telemetry


class Registry:
    """The running actors by name."""

    def __init__(self) -> None:
        self._refs: dict[str, ActorRef] = {}

    def register(self, name: str, ref: ActorRef) -> None:
        """Give `name` to an actor; the name of an ended actor is free.

        Raises:
            NameTaken: a running actor has the name.
        """
        if self.whereis(name) is not None:
            raise NameTaken(name)
        self._refs[name] = ref

    def unregister(self, name: str, ref: ActorRef) -> None:
        """Free `name` if `ref` still has it."""
        if self._refs.get(name) is ref:
            del self._refs[name]

    def whereis(self, name: str) -> ActorRef | None:
        """Return the running actor with the name; None for none."""
        ref = self._refs.get(name)
        return ref if ref is not None and ref.alive else None

    def ref(self, name: str) -> ActorRef:
        """Return a ref that looks the name up at each use, and so survives restarts; the name may be free yet."""
        return ActorRef(name, partial(self._find, name))

    def _find(self, name: str) -> Mailbox:
        ref = self._refs.get(name)
        if ref is None:
            raise ActorDown(name)
        return ref.lifetime


Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
Restart = Literal["permanent", "transient", "temporary"]
Task = Callable[..., Awaitable[None]]  # takes task_status=


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start, restart and stop one child.

    Args:
        id: its name among the children and in the supervisor's registry.
        start: returns a new GenServer or an async function to run; called at every start.
        restart: "permanent" restarts the child always, "transient" after an exception, "temporary" never.
        shutdown: seconds after which a stopping actor is cancelled; its `terminate` may then take this time again. A
            task is cancelled at once, and counts as overdue after this time.
        mailbox_size: most messages in an actor's mailbox.
    """

    id: str
    start: Callable[[], GenServer | Task]
    restart: Restart = "permanent"
    shutdown: float = 5.0
    mailbox_size: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """The limit of restarts.

    Args:
        max_restarts, max_seconds: the most restarts within that many seconds.
        pause_s: seconds to wait before each restart above the limit; None gives up instead. Children that strangers can
            reach need a pause, or else strangers could make the supervisor give up.
    """

    max_restarts: int = 3
    max_seconds: float = 5.0
    pause_s: float | None = None


class Supervisor:
    """Keeps its children running.

    Args:
        children: in the order of their start; ids must differ.
        strategy: the children that restart with a child: none (one_for_one), all (one_for_all), or the children after
            it (rest_for_one). Temporary children among them are only stopped.
        intensity: the limit of restarts.
        registry: gets the actors under their ids; None makes a new one.
    """

    def __init__(
        self,
        children: Iterable[ChildSpec],
        *,
        strategy: Strategy = "one_for_one",
        intensity: Intensity = Intensity(),
        name: str = "supervisor",
        registry: Registry | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._specs = list(children)
        assert len({spec.id for spec in self._specs}) == len(self._specs), "two children have one id"
        self._strategy: Strategy = strategy
        self._intensity = intensity
        self._restarts: deque[float] = deque()  # the times of restarts within max_seconds
        self.name = name
        self.registry = registry or Registry()
        self.telemetry = telemetry or Telemetry()
        self._running: dict[str, _Child] = {}
        # Holds at most one message for each child that ended by itself, so it needs no limit of its own.
        self._ends, self._next_end = trio.open_memory_channel["_Child"](float("inf"))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled or out of restarts, then stop every child; `started` after every child has started.

        Raises:
            StartFailed: a child did not start; the children before it were stopped.
            RestartLimit: the limit of restarts was exceeded, and has no pause; every child was stopped.
        """
        failure: ActorError | None = None
        async with trio.open_nursery() as nursery:
            try:
                await self._start(self._specs, nursery)
                task_status.started()
                while True:
                    await self._handle_end(await self._next_end.receive(), nursery)
            except (StartFailed, RestartLimit) as error:
                failure = error
            finally:
                with trio.CancelScope(shield=True):
                    await self._stop(self._specs)
        if failure is not None:
            raise failure  # outside the nursery, which would wrap it in a group

    async def _handle_end(self, child: "_Child", nursery: trio.Nursery) -> None:
        """Restart the affected children until they run or the limit is reached."""
        spec, reason = child.spec, child.reason
        if self._running.get(spec.id) is not child:
            return  # another child's end has stopped it, and perhaps started it again
        self._emit("supervisor.child_exit", spec, reason=reason)
        del self._running[spec.id]
        if spec.restart == "temporary" or (spec.restart == "transient" and isinstance(reason, Exit)):
            return
        affected = self._affected(spec)
        while True:
            pause_s = self._count_restart(spec, reason)
            await self._stop(affected)
            await trio.sleep(pause_s)
            try:
                await self._start([other for other in affected if other.restart != "temporary"], nursery)
            except StartFailed as error:
                reason = error.__cause__ if isinstance(error.__cause__, Exception) else error
                self._emit("supervisor.start_failed", spec, child_id=error.child_id, reason=reason)
            else:
                return

    def _affected(self, spec: ChildSpec) -> list[ChildSpec]:
        if self._strategy == "one_for_one":
            return [spec]
        if self._strategy == "one_for_all":
            return self._specs
        return self._specs[self._specs.index(spec) :]

    def _count_restart(self, spec: ChildSpec, reason: Reason) -> float:
        """Return the seconds to wait before the restart.

        Raises:
            RestartLimit: there were too many restarts.
        """
        most, now = self._intensity, trio.current_time()
        self._restarts.append(now)
        while self._restarts[0] < now - most.max_seconds:
            self._restarts.popleft()
        is_too_often = len(self._restarts) > most.max_restarts
        if is_too_often and most.pause_s is None:
            self._emit("supervisor.gave_up", spec, reason=reason)
            cause = reason if isinstance(reason, BaseException) else None
            raise RestartLimit(self.name, spec.id, most.max_restarts, most.max_seconds, reason) from cause
        self._emit("supervisor.restart", spec, {"restarts": len(self._restarts)})
        return most.pause_s if is_too_often and most.pause_s is not None else 0.0

    async def _start(self, specs: Iterable[ChildSpec], nursery: trio.Nursery) -> None:
        for spec in specs:
            child = self._running[spec.id] = _Child(spec, self.registry)
            nursery.start_soon(self._run_child, child, name=f"{self.name}/{spec.id}")
            await child.settled.wait()
            if not child.is_started:
                await child.ended.wait()
                del self._running[spec.id]
                raise StartFailed(spec.id) from (child.reason if isinstance(child.reason, Exception) else None)
            self._emit("supervisor.child_start", spec)

    async def _stop(self, specs: Iterable[ChildSpec]) -> None:
        """Stop the running children, the last first; a cancelled call may be repeated."""
        for spec in reversed(list(specs)):
            child = self._running.get(spec.id)
            if child is None:
                continue
            child.is_stopping = True
            if child.ref is not None:
                with trio.move_on_after(spec.shutdown):
                    await child.ref.stop(Exit.SHUTDOWN, timeout=None)
                    await child.ended.wait()
            child.scope.cancel()
            with trio.move_on_after(spec.shutdown):
                await child.ended.wait()
            if not child.ended.is_set():
                self._emit("supervisor.child_overdue", spec, {"shutdown_s": spec.shutdown})
                await child.ended.wait()  # a task cannot be killed
            del self._running[spec.id]

    async def _run_child(self, child: "_Child") -> None:
        """Run a child until its end; every exception becomes its reason."""
        try:
            with child.scope:
                await self._execute(child)
            if child.scope.cancelled_caught:
                child.reason = Exit.CANCELLED
            elif not child.is_started:
                child.reason = RuntimeError(f"{child.spec.id!r} ended without calling task_status.started()")
        except Exception as error:
            child.reason = error
            if child.is_started:
                _keep_traceback_as_text(error)
        finally:
            child.end()
            if child.is_started and not child.is_stopping:
                self._ends.send_nowait(child)

    async def _execute(self, child: "_Child") -> None:
        runnable = child.spec.start()
        if isinstance(runnable, GenServer):
            await run_actor(
                runnable,
                name=child.spec.id,
                mailbox_size=child.spec.mailbox_size,
                shutdown_s=child.spec.shutdown,
                telemetry=self.telemetry,
                task_status=child,
            )
        else:
            await runnable(task_status=child)

    def _emit(
        self, event: str, spec: ChildSpec, measurements: dict[str, float] | None = None, **metadata: object
    ) -> None:
        labels = {"name": self.name, "child_id": spec.id, **metadata}
        self.telemetry.execute(event, measurements or {}, labels)


class _Child:
    """One life of a child, from its start to its end; also its `task_status`."""

    def __init__(self, spec: ChildSpec, registry: Registry) -> None:
        self.spec = spec
        self.scope = trio.CancelScope()
        self.ref: ActorRef | None = None  # of an actor that started
        self.reason: Reason = Exit.NORMAL
        self.is_started = False
        self.is_stopping = False
        self.settled = trio.Event()  # started or ended
        self.ended = trio.Event()
        self._registry = registry

    def started(self, value: object = None) -> None:
        """Note the start; from here on only the supervisor cancels the child."""
        assert not self.is_started, f"{self.spec.id!r} called started() twice"
        if isinstance(value, ActorRef):
            self.ref = value
            self._registry.register(self.spec.id, value)
        self.scope.shield = True
        self.is_started = True
        self.settled.set()

    def end(self) -> None:
        if self.ref is not None:
            self._registry.unregister(self.spec.id, self.ref)
        self.ended.set()
        self.settled.set()


def _keep_traceback_as_text(error: BaseException) -> None:
    """Replace tracebacks, also those of causes, by a note.

    Refs, monitors and `ActorDown` keep the reason of an end, perhaps for long. The frames of its traceback would keep
    the dead actor's whole state.
    """
    error.add_note("".join(traceback.format_exception(error)))
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = None
        pending += (link.__cause__, link.__context__)
        if isinstance(link, BaseExceptionGroup):
            pending += link.exceptions


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """Open a nursery that is cancelled when the body ends.

    The body's own exception is raised as it is, and so is the only exception of a background task. So users of the
    block need not handle exception groups.
    """
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except Exception as error:
                failure = error
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if failure is None and len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    if failure is not None:
        raise failure
