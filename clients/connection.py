"""The client that a command works with: of a service at an address, or of a private one in this process."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

import trio
import typer
from rich.console import Console

from genbatch.clients.cli.command import UsageError
from genbatch.clients.cli.engine_flags import DEFAULT_MODEL, ModelFlags
from genbatch.clients.cli.progress import LoadingBars
from genbatch.clients.interface import Client


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFlags:
    """Where the service is, or which model a private one loads."""

    connect: Annotated[
        str | None,
        typer.Option(
            "--connect", "-c", metavar="ADDRESS", help="A running service; if not given, a private one is started."
        ),
    ] = None
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A name, a Hugging Face directory or id, or a .gguf file."),
    ] = DEFAULT_MODEL


@asynccontextmanager
async def open_client(connection: ConnectionFlags, engine: ModelFlags, *, n_parallel: int = 1) -> AsyncIterator[Client]:
    """A client for as long as the body runs; progress of a private service's start goes to standard error.

    Raises:
        UsageError: an address, and flags that only a private service reads.
        GenbatchError, ModelError, OptionError: as the client or the service raises.
    """
    async with AsyncExitStack() as stack:
        if connection.connect is not None:
            _refuse_flags_of_a_private_service(connection, engine)
            from genbatch.clients.zeromq import ZeroMQClient

            yield await stack.enter_async_context(ZeroMQClient(connection.connect))
            return
        with LoadingBars(Console(stderr=True)) as bars:
            await import_engine(bars)
            from genbatch.clients.batcher import open_batcher

            # All callers are ours: there is nobody to wait for.
            batcher = open_batcher(
                connection.model, **engine.by_name(), n_parallel=n_parallel, batch_timeout=0.0, progress=bars
            )
            client = await stack.enter_async_context(batcher)
        yield client


async def import_engine(bars: LoadingBars) -> None:
    """Imports torch and transformers on a thread: seconds, in which the bars move and Ctrl-C is heard."""
    bars("start", 0, 0)
    await trio.to_thread.run_sync(import_module, "genbatch.actors.service", abandon_on_cancel=True)


def _refuse_flags_of_a_private_service(connection: ConnectionFlags, engine: ModelFlags) -> None:
    ours, default = engine.by_name(), ModelFlags().by_name()
    given = [name for name in ours if ours[name] != default[name]]
    if connection.model != DEFAULT_MODEL:
        given.insert(0, "model")
    if given:
        raise UsageError(f"{given[0]}: the service at {connection.connect} has its own; give it to `genbatch serve`")
