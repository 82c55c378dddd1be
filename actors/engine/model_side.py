"""The part of an engine process that opens the Batcher; it is imported only once the process runs."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import trio

from genbatch.actors.batcher.arrivals import PrepareGrammars
from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.parts import context_factory
from genbatch.actors.engine.child_process import AdapterSource, StartEngine, decode_options
from genbatch.actors.observing.observe import observe
from genbatch.actors.recording.recorder import open_flight
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.actor import start as start_actor
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.scheduling.plan import RehearsedStep
from genbatch.nif.context.engine import Engine, load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import AdapterError
from genbatch.proto.service_messages import Models

logger = logging.getLogger(__name__)

# Callers wait in the mailbox only while a message is handled; the request queue has its own bound.
MAILBOX_SIZE = 4096
# Seconds that a stopping Batcher may wait for a step in progress.
SHUTDOWN_S = 4.0


async def open_batcher(
    nursery: trio.Nursery,
    start: StartEngine,
    progress: Callable[[str, int, int], None],
    on_models: Callable[[Models, list[AdapterSource]], None],
) -> tuple[ActorRef, tuple[RehearsedStep, ...]]:
    """Load the model and start the Batcher in `nursery`, so that a crash of the Batcher ends the nursery.

    Returns the Batcher's ref, and the steps that were rehearsed.

    Args:
        on_models: called with the served models and the adapters for the next engine, whenever they change.

    Raises:
        ModelError, OptionError, SchedulerError: see `load_engine` and Batcher.
    """
    engine_options = decode_options(start.engine_options, EngineOptions)
    options = decode_options(start.batcher_options, BatcherOptions)
    token = trio.lowlevel.current_trio_token()

    def tell(stage: str, done: int, total: int) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(progress, stage, done, total)

    if start.adapters is not None:
        engine_options = replace(engine_options, lora=())
    engine = await trio.to_thread.run_sync(load_engine, engine_options, tell, abandon_on_cancel=True)
    await trio.to_thread.run_sync(_load_again, engine, start.adapters or (), abandon_on_cancel=True)

    def tell_models(models: Models) -> None:
        sources = [
            AdapterSource(adapter.name, str(adapter.path), adapter.digest) for adapter in engine.adapters.serving()
        ]
        on_models(models, sources)

    factory = context_factory(engine, options)
    batcher = Batcher(factory, options, open_flight=open_flight, on_models=tell_models, rehearsed=start.rehearsed)
    telemetry = Telemetry()
    await nursery.start(observe, telemetry)
    ref = await start_actor(
        nursery, batcher, name="batcher", mailbox_size=MAILBOX_SIZE, telemetry=telemetry, shutdown_s=SHUTDOWN_S
    )
    return ref, batcher.rehearsed


def prepare_rest(batcher: ActorRef) -> None:
    """Build what only some requests need, now that the service is ready."""
    batcher.info(PrepareGrammars())


def _load_again(engine: Engine, adapters: Sequence[AdapterSource]) -> None:
    """Load the adapters of the previous engine, except adapters that have changed since or cannot be read.

    A request must not continue with another adapter than it began with. The other adapters need not wait for it.
    """
    for source in adapters:
        try:
            adapter = engine.adapters.read(source.name, Path(source.path))
            if adapter.digest != source.digest:
                raise AdapterError(source.name, f"{source.path} has changed since the adapter was loaded")
            engine.adapters.add(adapter)
        except AdapterError as error:
            logger.error("an adapter could not be loaded again: %s", error)
