"""`genbatch serve`: a service until a signal ends it; its banner says what runs, where, and how much it can hold."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Protocol

import trio
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.observing.observe import log_event, observe, start_logging, start_tracing
from genbatch.actors.runtime.supervisor import background
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.cli.batcher_flags import BatcherFlags
from genbatch.clients.cli.command import run_service, with_flag_groups
from genbatch.clients.cli.config import ConfigFlags, settings_of
from genbatch.clients.cli.connection import LoadingBars, import_engine
from genbatch.clients.cli.engine_flags import DEFAULT_MODEL, ModelFlags, PoolFlags
from genbatch.clients.cli.fleet_flags import FleetFlags
from genbatch.clients.cli.service_flags import ServiceFlags
from genbatch.nif.engine_options import EngineOptions, is_torchrun, torchrun_rank
from genbatch.proto.messages import ModelCard, Models

_MEBIBYTE = 2**20


def banner(card: ModelCard, stats: Mapping[str, Any], addresses: Sequence[str]) -> Panel:
    """The banner of a service of this model with these stats, reachable at `addresses`."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="cyan")
    rows.add_column()
    rows.add_row("model", card.id)
    rows.add_row("device", f"{card.device}, {card.dtype}")
    rows.add_row("kernels", card.runner)
    rows.add_row("quantize", card.quantize)
    rows.add_row("KV cache", _kv_size(stats))
    rows.add_row("sequences", f"{card.n_parallel} at once, of {card.n_ctx} positions at most")
    for address in addresses:
        rows.add_row("listening", address)
    return Panel(rows, title="genbatch", title_align="left", border_style="cyan", expand=False)


def _kv_size(stats: Mapping[str, Any]) -> str:
    blocks, block_size = stats["kv_blocks_max"], stats["kv_block_size"]
    size = f"{blocks * block_size} positions in {blocks} blocks of {block_size}"
    return f"{size}, {stats['kv_bytes'] / _MEBIBYTE:.0f} MiB" if "kv_bytes" in stats else size


@with_flag_groups
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A name, a Hugging Face directory or id, or a .gguf file.")
    ] = DEFAULT_MODEL,
    *,
    file: ConfigFlags,
    model_flags: ModelFlags,
    pool: PoolFlags,
    batcher: BatcherFlags,
    service: ServiceFlags,
    fleet: FleetFlags,
) -> None:
    """Serve a model to many callers, until Ctrl-C or SIGTERM; a second one does not wait for open requests.

    Examples:

      genbatch serve

      genbatch serve smollm2 --bind tcp://127.0.0.1:5555 --n-parallel 16

      genbatch serve --config ./genbatch.toml

      genbatch serve ./my-model --dtype bfloat16 --system-prompt "You are terse."
    """

    async def run(stopping: trio.Event) -> None:
        # Before torch is imported anywhere: a mistake is told at once.
        settings = settings_of(context, model, file, model_flags, pool, batcher, service)
        engine, options = settings.engine(), settings.service()
        if engine.tensor_parallel > 1 and is_torchrun():
            if rank := torchrun_rank(engine):
                await _follow(engine, rank, stopping)
                return
            # torchrun starts all ranks anew, or none.
            options = replace(options, max_restarts=0)
        opening = partial(_open_service, engine, settings.batcher(), options)
        if fleet.is_wanted:
            opening = partial(_open_fleet, engine, settings.batcher(), options, fleet)
        await _serve(opening, options, stopping)

    run_service(run)


class Running(Protocol):
    """A service, in one process or several."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients can connect."""

    @property
    def telemetry(self) -> Telemetry:
        """Its events."""

    async def describe(self) -> tuple[Models, dict[str, Any]]:
        """What is served, and the stats."""

    async def drain(self, timeout_s: float) -> None:
        """Refuses what is new, ends what is open within `timeout_s` seconds, and returns."""


async def _serve(
    opening: Callable[[], AbstractAsyncContextManager[Running]], options: ServiceOptions, stopping: trio.Event
) -> None:
    ready = trio.Event()
    start_logging(options.log_format, options.log_level)
    if options.otel:
        start_tracing()
    async with background() as nursery:
        nursery.start_soon(_give_up_start, stopping, ready, nursery.cancel_scope)
        async with opening() as service:
            models, stats = await service.describe()
            for card in models.models:  # none, while a fleet has no replica
                Console().print(banner(card, stats, service.addresses))
            await nursery.start(observe, service.telemetry)
            names = ",".join(card.id for card in models.models)
            log_event("ready", model=names, addresses=",".join(service.addresses))
            ready.set()
            await stopping.wait()
            log_event("stopping", timeout_s=options.shutdown_timeout_s)
            await service.drain(options.shutdown_timeout_s)
        log_event("stopped")


async def _follow(engine: EngineOptions, rank: int, stopping: trio.Event) -> None:
    """One rank of several that torchrun has started: it has no addresses, and ends with rank 0."""
    ranks = await trio.to_thread.run_sync(import_module, "genbatch.nif.runners.tensor_parallel")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.to_thread.run_sync, ranks.follow, engine, rank, abandon_on_cancel=True))
        await stopping.wait()
        nursery.cancel_scope.cancel()


async def _give_up_start(stopping: trio.Event, ready: trio.Event, scope: trio.CancelScope) -> None:
    """There is nothing to drain yet."""
    await stopping.wait()
    if not ready.is_set():
        scope.cancel()


@asynccontextmanager
async def _open_service(
    engine: EngineOptions, batcher: BatcherOptions, options: ServiceOptions
) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        with LoadingBars(Console(stderr=True)) as bars:
            if options.engine == "process":
                from genbatch.actors.service.processes import open_processes

                bars("start", 0, 0)  # over there
                opening: AbstractAsyncContextManager[Running] = open_processes(engine, batcher, options, progress=bars)
            else:
                await import_engine(bars)
                from genbatch.actors.service.service import open_service

                opening = open_service(engine, batcher, options, progress=bars)
            service = await stack.enter_async_context(opening)
        yield service


@asynccontextmanager
async def _open_fleet(
    engine: EngineOptions, batcher: BatcherOptions, options: ServiceOptions, flags: FleetFlags
) -> AsyncIterator[Running]:
    from genbatch.actors.fleet.fleet import FleetLimits
    from genbatch.clients.fleet.gateway import FleetOptions, open_fleet
    from genbatch.clients.fleet.ray_replicas import RayReplicas, ReplicaOptions

    kept = FleetOptions(
        router=flags.router or "prefix",
        rule=flags.rule(),
        limits=FleetLimits(default_deadline_s=batcher.default_deadline_s, limits=batcher.limits),
    )
    replica = ReplicaOptions(engine=engine, batcher=batcher, cpus=flags.replica_cpus, gpus=flags.replica_gpus)
    name = flags.fleet or engine.model_path
    replicas = await trio.to_thread.run_sync(RayReplicas, name, replica, flags.ray_address)
    async with open_fleet(replicas, kept, options) as service:
        yield service
