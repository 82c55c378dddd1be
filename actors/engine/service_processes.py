"""The supervisor of `genbatch serve`: an engine process and a gateway process, joined, each started anew when it dies.

    async with open_processes(engine_options, batcher_options, options) as processes:
        print(processes.addresses)
        await trio.sleep_forever()

This process does nothing else, and imports no torch: what crashes, crashes elsewhere.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.engine.control_messages import StartEngine, StartGateway
from genbatch.actors.engine.engine_runner import EngineRunner
from genbatch.actors.engine.gateway_runner import GatewayRunner
from genbatch.actors.engine.joint import Joint
from genbatch.actors.engine.wire_options import encode_options
from genbatch.actors.gateways.listeners import check_listeners
from genbatch.actors.runtime.errors import StartFailed
from genbatch.actors.runtime.supervisor import ChildSpec, Restart, Supervisor, Task, background
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.service_options import ServiceOptions
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.service_messages import Models

# Seconds; more than a runner takes to see its process end.
SHUTDOWN_S = 10.0


@dataclass(frozen=True, slots=True)
class ServiceProcesses:
    """A service whose parts are processes of their own."""

    engine: EngineRunner
    gateway: GatewayRunner
    telemetry: Telemetry

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients can connect."""
        return self.gateway.addresses

    async def describe(self) -> tuple[Models, dict[str, Any]]:
        """What is served, and the stats at the engine's start."""
        assert self.engine.ready is not None
        return self.engine.ready.models, self.engine.ready.stats

    async def drain(self, timeout_s: float) -> None:
        """Refuses what is new, ends what is open within `timeout_s` seconds, and returns."""
        await self.gateway.drain(timeout_s)


@asynccontextmanager
async def open_processes(
    engine_options: EngineOptions,
    batcher_options: BatcherOptions,
    options: ServiceOptions,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> AsyncIterator[ServiceProcesses]:
    """Starts both and keeps them running for as long as the body runs.

    Args:
        progress: called as progress(stage, done, total) while the model loads.

    Raises:
        AddressError, KeyFileError, ModelError, OptionError, SchedulerError: before any request is taken.
        RestartLimit: one of them died too often.
    """
    check_listeners(options)
    joint, telemetry = Joint(), Telemetry()
    batcher = encode_options(batcher_options)
    engine = EngineRunner(StartEngine(encode_options(engine_options), batcher), joint, progress or _ignore)
    gateway = GatewayRunner(StartGateway(encode_options(options), batcher), joint, engine.kill)
    async with (
        kept_running("engine", lambda: engine.run, options, telemetry),
        kept_running("gateway", lambda: gateway.run, options, telemetry, restart="transient"),
    ):
        yield ServiceProcesses(engine, gateway, telemetry)


def _ignore(stage: str, done: int, total: int) -> None:
    pass


@asynccontextmanager
async def kept_running(
    name: str,
    start: Callable[[], Task],
    options: ServiceOptions,
    telemetry: Telemetry,
    *,
    restart: Restart = "permanent",
) -> AsyncIterator[None]:
    """Runs one child under a supervisor of its own: while it starts, which may take long, others can be restarted."""
    supervisor = Supervisor(
        [ChildSpec(name, start, restart=restart, shutdown=SHUTDOWN_S)],
        max_restarts=options.max_restarts,
        max_seconds=options.restart_window_s,
        name=name,
        telemetry=telemetry,
    )
    async with background() as nursery:
        try:
            await nursery.start(supervisor.run)
        except StartFailed as error:
            raise (error.__cause__ or error) from None
        yield
