"""The supervision tree: the Batcher, and after it a gateway for every address of the service.

    options = ServiceOptions(bind="ipc://...")
    async with open_service(EngineOptions(model_path="smollm2"), BatcherOptions(), options) as service:
        await service.batcher.call(StatsRequest())

rest_for_one: a crashed Batcher restarts over the model in memory, and then the gateways restart. A crashed gateway
restarts alone. With an engine process, a RemoteBatcher takes the Batcher's place, and a crash in the engine process is
restarted there.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.parts import context_factory
from genbatch.actors.engine.child_process import StartEngine, encode_options
from genbatch.actors.gateways.dispatcher import Callee
from genbatch.actors.gateways.listening import ListeningSockets
from genbatch.actors.recording.recorder import open_flight
from genbatch.actors.runtime.errors import StartFailed
from genbatch.actors.runtime.supervisor import ChildSpec, Registry, Supervisor, background
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.service.gateway_process import LAST_WORDS_S, LinkedGateways, Listeners, check_start, retire
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.processes import EngineRunner, Joint, kept_running
from genbatch.nif.context.engine import Engine, load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.hub import Progress
from genbatch.proto.service_messages import DrainRequest, Models, ModelsRequest, StatsRequest

# The step in flight ends first. A long prefill chunk of a large model takes seconds on a CPU.
BATCHER_SHUTDOWN_S = 30.0
# Callers wait in the mailbox only while a message is handled; the request queue has its own bound.
MAILBOX_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Service:
    """A running tree.

    Args:
        batcher: answers the Batcher's calls, here or in an engine process; it survives restarts.
        listeners: the gateways.
        engine: the loaded model; None if another process has it.
        take_over_refusal: why no other service can take its place; "" if one can.
    """

    batcher: Callee
    telemetry: Telemetry
    listeners: Listeners
    engine: Engine | None = None
    take_over_refusal: str = ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the gateways."""
        return self.listeners.addresses

    async def describe(self) -> tuple[Models, dict[str, Any]]:
        """Return the served models and the stats."""
        return await self.batcher.call(ModelsRequest()), await self.batcher.call(StatsRequest())

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, end the open ones within `timeout_s` seconds, and return."""
        await self.batcher.call(DrainRequest(timeout_s=timeout_s), timeout=None, control=True)
        await trio.sleep(LAST_WORDS_S)

    async def retire(self, timeout_s: float) -> None:
        """Serve the connected clients until they leave, for `timeout_s` seconds at most, and return."""
        await retire(self.listeners, self.batcher, timeout_s)


@asynccontextmanager
async def open_service(
    engine_options: EngineOptions,
    batcher_options: BatcherOptions,
    options: ServiceOptions,
    *,
    progress: Progress | None = None,
    sockets: ListeningSockets | None = None,
) -> AsyncIterator[Service]:
    """Load the model and run the tree for as long as the body runs.

    Args:
        options: the addresses and the options of the processes.
        progress: called on another thread as progress(stage, done, total).
        sockets: see Listeners.

    Raises:
        AddressError, KeyFileError, ModelError, OptionError, SchedulerError, StartFailed: before any request is taken.
    """
    check_start(engine_options, batcher_options, options, sockets)
    if options.engine == "process":
        opening = _open_process(engine_options, batcher_options, options, progress)
    else:
        opening = _open_thread(engine_options, batcher_options, options, progress, sockets)
    async with opening as service:
        yield service


@asynccontextmanager
async def _open_thread(
    engine_options: EngineOptions,
    batcher_options: BatcherOptions,
    options: ServiceOptions,
    progress: Progress | None,
    sockets: ListeningSockets | None,
) -> AsyncIterator[Service]:
    # Loading cannot be interrupted; a cancelled caller does not wait for its end.
    engine = await trio.to_thread.run_sync(load_engine, engine_options, progress, abandon_on_cancel=True)
    telemetry, registry = Telemetry(), Registry()
    batcher = registry.ref("batcher")
    open_context = context_factory(engine, batcher_options)
    children = [
        ChildSpec(
            "batcher",
            lambda: Batcher(open_context, batcher_options, open_flight=open_flight),
            shutdown=BATCHER_SHUTDOWN_S,
            mailbox_size=MAILBOX_SIZE,
        )
    ]
    listeners = Listeners(batcher, options, telemetry, sockets=sockets)
    children.append(listeners.child())
    supervisor = Supervisor(children, strategy="rest_for_one", name="service", registry=registry, telemetry=telemetry)
    async with background() as nursery:
        try:
            await nursery.start(supervisor.run)
        except StartFailed as error:
            # An option that is found wrong only here is still the caller's mistake, so the original error is raised.
            raise (error.__cause__ or error) from None
        yield Service(batcher, telemetry, listeners, engine)


@asynccontextmanager
async def _open_process(
    engine_options: EngineOptions, batcher_options: BatcherOptions, options: ServiceOptions, progress: Progress | None
) -> AsyncIterator[Service]:
    joint = Joint()
    start = StartEngine(encode_options(engine_options), encode_options(batcher_options))
    runner = EngineRunner(start, joint, progress or (lambda stage, done, total: None))
    gateways = LinkedGateways(batcher_options, options, on_hung=lambda reason, _: runner.kill(reason))
    async with kept_running("engine", runner.run, options, gateways.telemetry), background() as nursery:
        try:
            await nursery.start(gateways.supervisor.run)
        except StartFailed as error:
            raise (error.__cause__ or error) from None
        await joint.gateway_is_ready(gateways.links[0])
        yield Service(gateways.links[0], gateways.telemetry, gateways.listeners)
