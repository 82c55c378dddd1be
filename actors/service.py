"""The supervision tree: the Batcher, and behind it a gateway for every address it is reachable at.

    async with open_service(EngineOptions(model_path="smollm2"), BatcherOptions(), bind="ipc://...") as service:
        await service.batcher.call(GetStats())

rest_for_one: a Batcher that crashed is started anew over the model in memory, and the gateways after it; a gateway
that crashed is started anew alone.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

from genbatch.actors.batching.batcher import Batcher
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.background import background
from genbatch.actors.runtime.errors import StartFailed
from genbatch.actors.runtime.ref import ActorRef
from genbatch.actors.runtime.registry import Registry
from genbatch.actors.runtime.supervisor import ChildSpec, Supervisor, Task
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.nif.context import Context
from genbatch.nif.engine import Engine, EngineOptions, load_engine
from genbatch.nif.models.quiet_transformers import Progress

# The step in flight ends first; a long prefill chunk of a large model on a CPU takes seconds.
BATCHER_SHUTDOWN_S = 30.0
# Callers wait in the mailbox only while a message is being handled; the queue proper has its own bound.
MAILBOX_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Service:
    """A running tree.

    Args:
        batcher: a ref that survives restarts.
        engine: the loaded model.
        addresses: where the gateways are reachable.
    """

    batcher: ActorRef
    engine: Engine
    telemetry: Telemetry
    addresses: tuple[str, ...] = ()


@asynccontextmanager
async def open_service(
    engine_options: EngineOptions,
    batcher_options: BatcherOptions,
    *,
    bind: str | None = None,
    progress: Progress | None = None,
) -> AsyncIterator[Service]:
    """Loads the model and runs the tree for as long as the body runs.

    Args:
        bind: a ZeroMQ address to listen at; None for callers in this program only.
        progress: called on another thread as progress(stage, done, total).

    Raises:
        ModelError, OptionError, StartFailed: before any request is taken.
    """
    # Loading cannot be interrupted; who gives up waiting need not wait for its end.
    engine = await trio.to_thread.run_sync(load_engine, engine_options, progress, abandon_on_cancel=True)
    telemetry, registry = Telemetry(), Registry()
    batcher = registry.ref("batcher")
    open_context = context_factory(engine, batcher_options)
    children = [
        ChildSpec(
            "batcher",
            lambda: Batcher(open_context, batcher_options),
            shutdown=BATCHER_SHUTDOWN_S,
            mailbox_size=MAILBOX_SIZE,
        )
    ]
    gateways: list[ZeroMQGateway] = []

    def new_gateway() -> Task:
        assert bind is not None
        gateways[:] = [ZeroMQGateway(Dispatcher(batcher), bind)]
        return gateways[0].run

    if bind is not None:
        children.append(ChildSpec("zeromq", new_gateway))
    supervisor = Supervisor(children, strategy="rest_for_one", name="service", registry=registry, telemetry=telemetry)
    async with background() as nursery:
        try:
            await nursery.start(supervisor.run)
        except StartFailed as error:
            # An option that only showed to be wrong here is still the caller's own mistake.
            raise (error.__cause__ or error) from None
        yield Service(batcher, engine, telemetry, tuple(gateway.address for gateway in gateways))


def context_factory(engine: Engine, options: BatcherOptions) -> Callable[[], Context]:
    """What a Batcher opens its context with, at its start and at each restart."""
    return partial(
        engine.open_context,
        n_parallel=options.n_parallel,
        n_held=options.max_held_prompts,
        n_batch=options.max_batch_tokens,
    )
