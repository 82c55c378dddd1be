"""What only an engine process needs, and only once it runs: torch, and all that is imported with it."""

from collections.abc import Callable
from contextlib import suppress

import trio

from genbatch.actors.batcher.batcher import Batcher, context_factory
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import StartEngine, decode_options
from genbatch.actors.observing.observe import observe
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.actor import start as start_actor
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.nif.engine import load_engine
from genbatch.nif.engine_options import EngineOptions

# Callers wait in the mailbox only while a message is being handled; the queue proper has its own bound.
MAILBOX_SIZE = 4096
# When it is told to stop, nobody waits for a step that takes longer.
SHUTDOWN_S = 4.0


async def open_batcher(
    nursery: trio.Nursery, start: StartEngine, progress: Callable[[str, int, int], None]
) -> ActorRef:
    """Loads the model and starts the Batcher in `nursery`, where its crash shows.

    Raises:
        ModelError, OptionError, SchedulerError: as they do.
    """
    engine_options = decode_options(start.engine_options, EngineOptions)
    options = decode_options(start.batcher_options, BatcherOptions)
    token = trio.lowlevel.current_trio_token()

    def tell(stage: str, done: int, total: int) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(progress, stage, done, total)

    engine = await trio.to_thread.run_sync(load_engine, engine_options, tell, abandon_on_cancel=True)
    batcher = Batcher(context_factory(engine, options), options)
    telemetry = Telemetry()
    await nursery.start(observe, telemetry)
    return await start_actor(
        nursery, batcher, name="batcher", mailbox_size=MAILBOX_SIZE, telemetry=telemetry, shutdown_s=SHUTDOWN_S
    )
