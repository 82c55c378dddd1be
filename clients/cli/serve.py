"""`genbatch serve`: a service until a signal ends it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import trio
import typer
from rich.console import Console

from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.gateways.zeromq_address import default_address
from genbatch.clients.cli.banner import banner
from genbatch.clients.cli.batcher_flags import BatcherFlags
from genbatch.clients.cli.command import run_command
from genbatch.clients.cli.engine_flags import DEFAULT_MODEL, ModelFlags, PoolFlags, engine_options
from genbatch.clients.cli.flag_group import with_flag_groups
from genbatch.clients.cli.log_lines import log_event, log_telemetry, start_logging
from genbatch.clients.cli.progress import LoadingBars
from genbatch.clients.connection import import_engine

if TYPE_CHECKING:  # import torch, which takes seconds
    from genbatch.actors.service import Service
    from genbatch.nif.engine import EngineOptions


@with_flag_groups
def serve(
    model: Annotated[
        str, typer.Argument(help="A name, a Hugging Face directory or id, or a .gguf file.")
    ] = DEFAULT_MODEL,
    *,
    bind: Annotated[
        str | None,
        typer.Option(
            "--bind",
            "-b",
            metavar="ADDRESS",
            help="Where to listen: ipc://PATH or tcp://127.0.0.1:PORT; "
            "if not given, a socket in the user's runtime directory.",
        ),
    ] = None,
    engine: ModelFlags,
    pool: PoolFlags,
    batcher: BatcherFlags,
) -> None:
    """Serve a model to many callers over ZeroMQ, until Ctrl-C or SIGTERM.

    Examples:

      genbatch serve

      genbatch serve smollm2 --bind tcp://127.0.0.1:5555 --n-parallel 16

      genbatch serve ./my-model --dtype bfloat16 --system-prompt "You are terse."
    """

    async def run() -> None:
        options = batcher.options()  # before torch is imported: a mistake is told at once
        await _serve(partial(engine_options, model, engine, pool), options, bind or default_address())

    run_command(run, exit_on_sigterm=0)


async def _serve(engine: Callable[[], "EngineOptions"], batcher: BatcherOptions, address: str) -> None:
    ready = False
    try:
        async with _open_service(engine, batcher, address) as service:
            from genbatch.actors.batching.batcher_messages import GetStats

            stats = await service.batcher.call(GetStats())
            Console().print(banner(service.engine, stats, service.addresses))
            start_logging()
            log_telemetry(service.telemetry)
            log_event("ready", model=service.engine.model.name, addresses=",".join(service.addresses))
            ready = True
            try:
                await trio.sleep_forever()
            finally:
                log_event("stopping")
    finally:
        if ready:
            log_event("stopped")


@asynccontextmanager
async def _open_service(
    engine: Callable[[], "EngineOptions"], batcher: BatcherOptions, address: str
) -> AsyncIterator["Service"]:
    async with AsyncExitStack() as stack:
        with LoadingBars(Console(stderr=True)) as bars:
            await import_engine(bars)
            from genbatch.actors.service import open_service

            opening = open_service(engine(), batcher, bind=address, progress=bars)
            service = await stack.enter_async_context(opening)
        yield service
