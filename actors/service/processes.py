"""The supervisor of `genbatch serve`: it runs an engine process and a gateway process, and restarts each when it dies.

    async with open_processes(engine_options, batcher_options, options) as processes:
        print(processes.addresses)
        await trio.sleep_forever()

    supervisor process
      |-- EngineRunner  -- engine process  --+
      |                                      | a socketpair, which the Joint makes again when either process is new
      |-- GatewayRunner -- gateway process --+

The supervisor process does nothing else and imports no torch, so that crashes happen in the other processes.
"""

import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol

import msgspec
import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import (
    EXIT_S,
    AddModel,
    ChildProcess,
    DrainAndStop,
    EngineReady,
    EngineStopped,
    GatewayReady,
    Hung,
    Join,
    Listening,
    ManagedModel,
    PrepareEngine,
    ProcessDied,
    ServingChanged,
    ShowModel,
    StartEngine,
    StartGateway,
    SwitchEngine,
    Unjoined,
    encode_options,
)
from genbatch.actors.engine.freed_memory import oom_kills
from genbatch.actors.gateways.listening import ListeningSockets
from genbatch.actors.runtime.errors import StartFailed
from genbatch.actors.runtime.supervisor import ChildSpec, Intensity, Restart, Supervisor, Task, background
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.service.gateway_process import check_start
from genbatch.actors.service.on_demand import (
    EngineOnDemand,
    ModelCatalog,
    ModelOnDemand,
    check_budget,
    model_bytes,
    watch_models,
)
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.served_models import BY_MODEL, unknown_card
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.service_messages import Models


class Side(Protocol):
    """A process, or a part of this process, that takes one end of a link."""

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        """Hand over the socket, or close it; raise OSError if the side has ended, which its own channel also shows."""


class Joint:
    """Joins the current engine and the current gateway with a link.

    Args:
        place: the index of the engine among several.
    """

    def __init__(self, place: int = 0) -> None:
        self._place = place
        self._engine: Side | None = None
        self._gateway: Side | None = None
        self._models = Models(models=())
        self._num_bytes = 0
        self._number = 0
        self._was_killed = False

    async def engine_is_ready(self, side: Side, models: Models, num_bytes: int = 0) -> None:
        """Take an engine that has started, and takes so many bytes."""
        self._engine, self._models, self._num_bytes = side, models, num_bytes
        await self._join()

    async def gateway_is_ready(self, side: Side) -> None:
        """Take a gateway that has started."""
        self._gateway = side
        await self._join()

    def serving_changed(self, side: Side, models: Models) -> None:
        """Note changed models of an engine, for the next gateways."""
        if self._engine is side:
            self._models = models

    def engine_is_gone(self, side: Side, *, was_killed: bool = False) -> None:
        """Forget an engine that has ended, unless another engine has replaced it; see Join."""
        if self._engine is side:
            self._engine, self._was_killed = None, was_killed

    def gateway_is_gone(self, side: Side) -> None:
        """Forget a gateway that has ended, unless another gateway has replaced it."""
        if self._gateway is side:
            self._gateway = None

    async def unjoined(self, number: int) -> None:
        """Make a new link after the engine closed the link with this number."""
        if number == self._number:
            await self._join()

    async def _join(self) -> None:
        if self._engine is None or self._gateway is None:
            return
        self._number += 1
        join = Join(self._number, self._models, self._place, self._num_bytes, self._was_killed)
        self._was_killed = False  # another link to this engine follows no death
        ends = list(socket.socketpair())
        try:
            for side in (self._engine, self._gateway):
                with suppress(OSError):
                    await side.send(join, ends.pop())
        finally:  # a stopping service may be cancelled here
            for end in ends:
                end.close()


logger = logging.getLogger(__name__)

# Seconds for a stopping engine to free its memory.
ENGINE_STOP_S = 5.0


# Seconds from an engine's start to the start of a spare one, which must not delay the first requests.
SPARE_DELAY_S = 5.0


class SpareEngine:
    """Keeps a spare process that has imported an engine's libraries and has no model.

    A starting engine takes the spare process. These imports are more than half of a native engine's start.

    Args:
        needs_torch: returns whether an engine needs torch and transformers' modules, too.
    """

    def __init__(self, needs_torch: Callable[[], bool]) -> None:
        self._needs_torch = needs_torch
        self._child: ChildProcess | None = None
        self._taken = trio.Event()

    @property
    def pid(self) -> int | None:
        """The process id of the spare process; None if there is none."""
        return None if self._child is None else self._child.pid

    def take(self) -> ChildProcess:
        """Return a process for an engine: the spare process, or a new one without a spare."""
        child, self._child = self._child, None
        self._taken.set()
        if child is not None and child.is_running:
            return child
        if child is not None:
            child.close()
        return new_engine()

    async def run(self) -> None:
        """Prepare one spare process after another, until cancelled."""
        try:
            while True:
                self._taken = trio.Event()
                await trio.sleep(SPARE_DELAY_S)
                if not self._taken.is_set():
                    self._child = child = new_engine()
                    with suppress(OSError):  # `take` notices a process that has ended
                        await child.channel.send(PrepareEngine(self._needs_torch()))
                    await self._taken.wait()
        finally:
            if self._child is not None:
                with trio.CancelScope(shield=True):
                    await self._child.end()


def new_engine() -> ChildProcess:
    """Start a process that waits for StartEngine."""
    return ChildProcess("engine", "genbatch.actors.engine.engine_process")


class EngineRunner:
    """Runs engine processes, one after another.

    Args:
        start: the start message for each process.
        joint: joins each process to the gateway.
        progress: called as progress(stage, done, total) while one loads.
        new_process: makes the process of an engine.
    """

    def __init__(
        self,
        start: StartEngine,
        joint: Joint,
        progress: Callable[[str, int, int], None],
        new_process: Callable[[], ChildProcess] = new_engine,
    ) -> None:
        self.ready: EngineReady | None = None  # the last engine's message
        self._start = start
        self._joint = joint
        self._progress = progress
        self._new_process = new_process
        self._child: ChildProcess | None = None
        self._is_up = False

    @property
    def pid(self) -> int | None:
        """The process id of the engine that runs or loads; None if there is none."""
        return None if self._child is None else self._child.pid

    @property
    def needs_torch(self) -> bool:
        """Whether the last engine was not a native one."""
        return self.ready is not None and not self.ready.stats.get("runner", "").startswith("native")

    def kill(self, reason: str) -> None:
        """Kill a hanging engine; an engine that still loads is not the hanging one."""
        if self._child is not None and self._is_up:
            logger.error("killing the engine process %d: %s", self._child.pid, reason)
            self._joint.engine_is_gone(self._child.channel)
            self._child.kill()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start a process and run until it ends; `started` is called when the Batcher runs.

        Raises:
            ModelError, OptionError, SchedulerError: the reason why it did not start.
            ProcessFailed: it did not start, for another reason.
            ProcessDied: it ended.
        """
        child = self._child = self._new_process()
        async with child.ended_with_body(ENGINE_STOP_S):
            try:
                await child.channel.send(self._start)
                self.ready = await child.wait_until_ready(EngineReady, self._progress)
                self._start = msgspec.structs.replace(self._start, rehearsed=self.ready.rehearsed)
                self._is_up, num_oom_kills = True, oom_kills()
                task_status.started()
                await self._joint.engine_is_ready(child.channel, self.ready.models, self.ready.num_bytes)
                await self._follow(child)
                code = await child.end(EXIT_S)
                # guard: a kill for its memory is not from outside
                was_killed = code == -signal.SIGKILL and num_oom_kills is not None and oom_kills() == num_oom_kills
                self._joint.engine_is_gone(child.channel, was_killed=was_killed)
                raise ProcessDied("engine", code)
            finally:
                self._joint.engine_is_gone(child.channel)
                self._is_up = False
                self._child = None

    async def _follow(self, child: ChildProcess) -> None:
        """Handle the messages of a running engine until it ends."""
        while (message := await child.channel.receive()) is not None:
            match message:
                case Unjoined(number):
                    await self._joint.unjoined(number)
                case ServingChanged(models, adapters):
                    self._start = msgspec.structs.replace(self._start, adapters=adapters)
                    self._joint.serving_changed(child.channel, models)


# Seconds for a stopping gateway's last messages to leave.
GATEWAY_STOP_S = 2.0


class GatewayRunner:
    """Runs gateway processes, one after another, until one was drained.

    Args:
        start: the start message for each process.
        joints: join each process to the engines; one joint per engine.
        kill_engine: called with the reason and the engine's index when a gateway reports that it hangs.
        sockets: the listening sockets of all processes, so that no connection is refused between two of them. None lets
            each process open its own.
        switch_engine: called when a gateway wants a model's engine, or wants it no longer.
    """

    def __init__(
        self,
        start: StartGateway,
        joints: list[Joint],
        kill_engine: Callable[[str, int], None],
        sockets: ListeningSockets | None = None,
        switch_engine: Callable[[SwitchEngine], None] | None = None,
    ) -> None:
        self._sockets = sockets
        self._switch_engine = switch_engine
        self.addresses: tuple[str, ...] = ()
        self._start = start
        self._joints = joints
        self._kill_engine = kill_engine
        self._child: ChildProcess | None = None
        self._has_start = False  # whether the running process has the start message
        self._is_stopping = False
        self._stopped = trio.Event()

    @property
    def pid(self) -> int | None:
        """The process id of the running gateway; None if there is none."""
        return None if self._child is None else self._child.pid

    async def drain(self, timeout_s: float, *, retires: bool = False) -> None:
        """Make the gateway refuse new requests, end its open ones, and stop; return after that.

        Args:
            retires: see DrainAndStop.
        """
        self._is_stopping = True
        if self._child is None:
            return
        if await self._child.stop(DrainAndStop(timeout_s, retires)):
            await self._stopped.wait()

    async def tell(self, message: EngineStopped | AddModel | ShowModel) -> None:
        """Tell the running gateway, if there is one."""
        if self._child is not None:
            await self._child.stop(message)

    async def add(self, model: ManagedModel, joint: Joint) -> None:
        """Serve one more model on demand, in the running gateway and in later ones."""
        names, managed = (*self._start.models, model.name), (*self._start.on_demand, model)
        self._start = msgspec.structs.replace(self._start, models=names, on_demand=managed)
        self._joints.append(joint)
        if self._child is not None and self._has_start:
            await self.tell(AddModel(model))
            await joint.gateway_is_ready(self._child.channel)

    async def show(self, name: str, is_there: bool) -> None:
        """Show a model on demand to clients or hide it, in the running gateway and in later ones."""
        models = [
            msgspec.structs.replace(model, is_there=is_there) if model.name == name else model
            for model in self._start.on_demand
        ]
        self._start = msgspec.structs.replace(self._start, on_demand=tuple(models))
        if self._has_start:
            await self.tell(ShowModel(name, is_there))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start a process and run until it ends; `started` is called when the gateway listens.

        Raises:
            AddressError, KeyFileError: the reason why it cannot listen.
            ProcessFailed: it did not start, for another reason.
            ProcessDied: it ended without a request to stop.
        """
        if self._sockets is not None:
            await self._sockets.open_all()
        child = self._child = ChildProcess("gateway", "genbatch.actors.service.gateway_process")
        self._stopped = trio.Event()
        async with child.ended_with_body(GATEWAY_STOP_S):
            try:
                await self._start_child(child)
                self.addresses = (await child.wait_until_ready(GatewayReady)).addresses
                task_status.started()
                while (message := await child.channel.receive()) is not None:
                    match message:
                        case Hung(reason, engine):
                            self._kill_engine(reason, engine)
                        case SwitchEngine() if self._switch_engine is not None:
                            self._switch_engine(message)
                code = await child.end(EXIT_S)
                if not self._is_stopping:
                    raise ProcessDied("gateway", code)
            finally:
                for joint in self._joints:
                    joint.gateway_is_gone(child.channel)
                self._child, self._has_start = None, False
                self._stopped.set()

    async def _start_child(self, child: ChildProcess) -> None:
        """Start the process; join it to the running engines before it listens."""
        for kind, listening in self._sockets or ():
            await child.channel.send(Listening(kind), listening.dup())
        start = self._start
        await child.channel.send(start)
        self._has_start = True
        for model in self._start.on_demand[len(start.on_demand) :]:  # added meanwhile
            await child.channel.send(AddModel(model))
        for before, model in zip(start.on_demand, self._start.on_demand, strict=False):
            if before.is_there != model.is_there:
                await child.channel.send(ShowModel(model.name, model.is_there))
        for joint in self._joints:
            await joint.gateway_is_ready(child.channel)


# Seconds; longer than a runner takes to see its process end.
SHUTDOWN_S = 10.0
# Seconds before the restart of a gateway above the allowed rate of restarts.
PAUSE_S = 1.0


class ServiceProcesses:
    """A service with its parts in processes of their own.

    Args:
        catalog: the models.
        batcher_options, options, progress, of_fleet, sockets: see open_processes.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        batcher_options: BatcherOptions,
        options: ServiceOptions,
        progress: Callable[[str, int, int], None] | None,
        *,
        of_fleet: bool,
        sockets: ListeningSockets | None,
    ) -> None:
        self.telemetry = Telemetry()
        self.take_over_refusal = ""  # why no other service can take its place; "" if one can
        self._options = options
        self._progress = progress or _ignore
        self._spare = SpareEngine(self._needs_torch) if options.spare_engine else None
        self._find_on_demand = catalog.find_on_demand
        self._on_demand = [each for each in catalog.models if isinstance(each, ModelOnDemand)]
        models = [_options_of(each, batcher_options) for each in catalog.models]
        for engine, batcher in models:
            check_start(engine, batcher, options, sockets)
        is_named = len(models) > 1 or self._on_demand
        self._names = tuple([engine.served_model_name for engine, _ in models]) if is_named else ()
        assert all(self._names) and len(set(self._names)) == len(self._names), self._names
        self._num_kept = len(models) - len(self._on_demand)
        self.engines: list[EngineRunner] = []
        joints = [self._add_engine(*each) for each in models]
        managed = tuple([each.managed(self._num_kept + index) for index, each in enumerate(self._on_demand)])
        check_budget(managed, options.model_memory)
        self._switches: dict[int, EngineOnDemand] = {}  # by the engine's index
        budget = model_bytes(options.model_memory, models[0][0].max_memory_percent) if managed else 0
        self.gateway = GatewayRunner(
            StartGateway(
                encode_options(options), encode_options(batcher_options), of_fleet, self._names, managed, budget
            ),
            joints,
            lambda reason, place: self.engines[place].kill(reason),
            sockets,
            lambda message: self._switches[message.engine].switch(message),
        )
        for each in managed:
            self._add_switch(each)

    @property
    def engine(self) -> EngineRunner:
        """The first model's engine."""
        return self.engines[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses for clients."""
        return self.gateway.addresses

    async def describe(self) -> tuple[Models, dict[str, Any]]:
        """Return the served models, and the stats at the engine's start; for several models by name."""
        ready = [engine.ready for engine in self.engines if engine.ready is not None]
        cards = [card for engine in ready for card in engine.models.models]
        models = Models(models=(*cards, *[unknown_card(name) for name in self._names[self._num_kept :]]))
        if len(ready) == 1:
            return models, ready[0].stats
        return models, {BY_MODEL: {engine.models.models[0].id: engine.stats for engine in ready}}

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, end the open ones within `timeout_s` seconds, and return."""
        await self.gateway.drain(timeout_s)

    async def retire(self, timeout_s: float) -> None:
        """Serve the connected clients until they leave, for `timeout_s` seconds at most, and return."""
        await self.gateway.drain(timeout_s, retires=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start all processes, and keep them running while the body runs."""
        async with AsyncExitStack() as stack:
            for place, engine in enumerate(self.engines[: self._num_kept]):
                name = f"engine of {self._names[place]}" if self._names else "engine"
                await stack.enter_async_context(kept_running(name, engine.run, self._options, self.telemetry))
            await stack.enter_async_context(
                kept_running(
                    "gateway", self.gateway.run, self._options, self.telemetry, restart="transient", pause_s=PAUSE_S
                )
            )
            nursery = await stack.enter_async_context(background())
            for switch in self._switches.values():
                nursery.start_soon(switch.run)
            if self._spare is not None:
                nursery.start_soon(self._spare.run)
            if self._find_on_demand is not None:
                add = partial(self._add_model, nursery)
                nursery.start_soon(
                    watch_models, self._find_on_demand, self._names, self._on_demand, add, self.gateway.show
                )
            yield

    async def _add_model(self, nursery: trio.Nursery, model: ModelOnDemand) -> None:
        """Serve one more model on demand."""
        managed = model.managed(len(self.engines))
        joint = self._add_engine(model.engine, model.batcher)
        nursery.start_soon(self._add_switch(managed).run)
        await self.gateway.add(managed, joint)

    def _add_engine(self, engine: EngineOptions, batcher: BatcherOptions) -> Joint:
        """Add an engine that does not run yet; return its joint."""
        joint = Joint(len(self.engines))
        start = StartEngine(encode_options(engine), encode_options(batcher))
        new_process = new_engine if self._spare is None else self._spare.take
        self.engines.append(EngineRunner(start, joint, self._progress, new_process))
        return joint

    def _add_switch(self, model: ManagedModel) -> EngineOnDemand:
        """Add the switch of an engine on demand."""
        switch = EngineOnDemand(model.engine, self.engines[model.engine].run, self.gateway.tell)
        self._switches[model.engine] = switch
        return switch

    def _needs_torch(self) -> bool:
        return any(engine.needs_torch for engine in self.engines)


@asynccontextmanager
async def open_processes(
    model: EngineOptions | ModelCatalog,
    batcher_options: BatcherOptions,
    options: ServiceOptions,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    of_fleet: bool = False,
    sockets: ListeningSockets | None = None,
) -> AsyncIterator[ServiceProcesses]:
    """Start all processes and keep them running for as long as the body runs.

    Args:
        model: the options of the one model, or several models.
        batcher_options: those of the models that have none of their own.
        of_fleet: whether this service is a replica, called by the gateways of a fleet; see Dispatcher.
        progress: called as progress(stage, done, total) while the model loads.
        sockets: see GatewayRunner.

    Raises:
        AddressError, KeyFileError, ModelError, OptionError, SchedulerError: before any request is taken.
        RestartLimit: an engine died too often. A gateway has no limit: strangers reach it, and may cause its crashes.
    """
    catalog = ModelCatalog([model]) if isinstance(model, EngineOptions) else model
    processes = ServiceProcesses(catalog, batcher_options, options, progress, of_fleet=of_fleet, sockets=sockets)
    async with processes.running():
        yield processes


def _options_of(
    model: EngineOptions | ModelOnDemand, batcher_options: BatcherOptions
) -> tuple[EngineOptions, BatcherOptions]:
    return (model.engine, model.batcher) if isinstance(model, ModelOnDemand) else (model, batcher_options)


def _ignore(stage: str, done: int, total: int) -> None:
    pass


@asynccontextmanager
async def kept_running(
    name: str,
    task: Task,
    options: ServiceOptions,
    telemetry: Telemetry,
    *,
    restart: Restart = "permanent",
    pause_s: float | None = None,
) -> AsyncIterator[None]:
    """Run one task under a supervisor of its own, so that its slow start does not delay other restarts.

    Args:
        pause_s: the supervisor's pause at the options' restart limit; see Intensity.
    """
    most = Intensity(max_restarts=options.max_restarts, max_seconds=options.restart_window_s, pause_s=pause_s)
    supervisor = Supervisor(
        [ChildSpec(name, lambda: task, restart=restart, shutdown=SHUTDOWN_S)],
        intensity=most,
        name=name,
        telemetry=telemetry,
    )
    async with background() as nursery:
        try:
            await nursery.start(supervisor.run)
        except StartFailed as error:
            raise (error.__cause__ or error) from None
        yield
