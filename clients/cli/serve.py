"""`genbatch serve`: run a service until a signal, and show a banner with its model, addresses and memory.

FleetFlags set the number of replicas, and the routing of requests among them.
"""

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import trio
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.listening import ListeningSockets
from genbatch.actors.observing.observe import log_event, observe, start_logging, start_tracing
from genbatch.actors.runtime.supervisor import background
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.service.gateway_process import check_start, gateway_addresses
from genbatch.actors.service.on_demand import ModelCatalog, ModelOnDemand
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.take_over import Predecessor, Succession, find_predecessor
from genbatch.clients.cli.command import UsageError, lossy, run_service, with_flag_groups
from genbatch.clients.cli.connection import LoadingBars, import_engine
from genbatch.clients.cli.option_flags import DEFAULT_MODEL, ServiceFlags
from genbatch.clients.cli.settings import ConfigFlags, models_on_demand, settings_of
from genbatch.nif.engine_options import EngineOptions, is_torchrun, torchrun_rank
from genbatch.nif.host import multiplies_int8
from genbatch.nif.models.model_names import written_path
from genbatch.proto.service_messages import ModelCard, Models

if TYPE_CHECKING:
    from genbatch.actors.fleet.routing import ScaleRule


_REPLICAS = "Replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFlags:
    """A fleet of replicas on Ray; without these flags there is one engine, and no Ray."""

    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="The number of replicas on Ray; needs genbatch\\[ray].", rich_help_panel=_REPLICAS),
    ] = None
    min_replicas: Annotated[
        int | None,
        typer.Option(
            min=0, help="Fewest replicas; with 0, the first request waits for a start.", rich_help_panel=_REPLICAS
        ),
    ] = None
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Most replicas; more are started as requests wait.", rich_help_panel=_REPLICAS),
    ] = None
    replica_cpus: Annotated[
        float, typer.Option(min=0.0, help="CPUs that Ray reserves for a replica.", rich_help_panel=_REPLICAS)
    ] = 1.0
    replica_gpus: Annotated[
        float, typer.Option(min=0.0, help="GPUs that Ray reserves for a replica.", rich_help_panel=_REPLICAS)
    ] = 0.0
    router: Annotated[
        str | None,
        typer.Option(
            help='prefix, least_tokens, round_robin or "module:Class"; the default is prefix.',
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster to join; the default is this machine's, or a new one. local starts a new one.",
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    fleet: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Gateways with the same name share the replicas; the default is the model's name.",
            rich_help_panel=_REPLICAS,
        ),
    ] = None

    @property
    def is_wanted(self) -> bool:
        """Whether the flags ask for a fleet.

        Raises:
            UsageError: a flag of fleets without the number of replicas.
        """
        is_fleet = (self.replicas, self.min_replicas, self.max_replicas) != (None, None, None)
        for name in ("router", "ray_address", "fleet"):
            if not is_fleet and getattr(self, name) is not None:
                raise UsageError(f"{name}: there are no replicas; set --replicas or --max-replicas")
        return is_fleet

    def rule(self) -> "ScaleRule":
        """Return the rule for the number of replicas.

        Raises:
            UsageError: both a number and bounds are set.
            RouterError: the bounds allow no number.
        """
        from genbatch.actors.fleet.routing import ScaleRule

        if self.replicas is not None:
            if self.min_replicas is not None or self.max_replicas is not None:
                raise UsageError("replicas: set either --replicas, or --min-replicas and --max-replicas")
            return ScaleRule(min_replicas=self.replicas, max_replicas=self.replicas)
        low = 1 if self.min_replicas is None else self.min_replicas
        return ScaleRule(min_replicas=low, max_replicas=max(low, 1) if self.max_replicas is None else self.max_replicas)


_MEBIBYTE = 2**20
# Measured on CPUs that multiply bytes in vectors: docs/measurements.md has the speeds, docs/lab the perplexities.
INT8_GAIN = "--quantize int8: some 1.5 times as fast for one caller, twice for many; 0.1 to 0.6 % more perplexity"


def on_demand_banner(names: Sequence[str], addresses: Sequence[str], options: ServiceOptions) -> Panel:
    """Show the models that are loaded on demand."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="cyan")
    rows.add_column()
    rows.add_row("on demand", ", ".join(names))
    rows.add_row("keep alive", f"{options.keep_alive:g} s" if options.keep_alive >= 0 else "for good")
    for address in addresses:
        rows.add_row("listening", address)
    return Panel(rows, title="genbatch", title_align="left", border_style="cyan", expand=False)


def banner(card: ModelCard, stats: Mapping[str, Any], addresses: Sequence[str], adapters: Sequence[str] = ()) -> Panel:
    """Return the banner of a service."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="cyan")
    rows.add_column()
    rows.add_row("model", card.id)
    rows.add_row("device", f"{card.device}, {card.dtype}")
    rows.add_row("kernels", card.runner)
    rows.add_row("quantize", card.quantize)
    if card.quantize == "none" and card.runner.startswith("native") and multiplies_int8():
        rows.add_row("", INT8_GAIN)
    rows.add_row("KV cache", _kv_size(stats))
    if adapters:
        rows.add_row("adapters", ", ".join(adapters))
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
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]MODEL...",
            help="A name, a Hugging Face directory or id, or a .gguf file; several models share one address, each "
            "under its name.",
            show_default=DEFAULT_MODEL,
        ),
    ] = None,
    *,
    file: ConfigFlags,
    flags: ServiceFlags,
    fleet: FleetFlags,
) -> None:
    """Serve models to many callers until Ctrl-C or SIGTERM. A second signal does not wait for open requests.

    Examples:

      genbatch serve

      genbatch serve smollm2 --bind tcp://127.0.0.1:5555 --n-parallel 16

      genbatch serve --config ./genbatch.toml

      genbatch serve ./my-model --dtype bfloat16 --system-prompt "You are terse."

      genbatch serve smollm2 minilm=./all-MiniLM-L6-v2 --http :8000

      genbatch serve --models ./models --keep-alive 600 --http :8000
    """

    async def run(stopping: trio.Event) -> None:
        # Checked before the engine is imported, so that a mistake is reported at once.
        named = named_models(model or [])
        settings = settings_of(context, named[0][1] if named else DEFAULT_MODEL, file, flags)
        engine, batcher, options = settings.engine(), settings.batcher(), settings.service()
        engines: list[EngineOptions | ModelOnDemand] = []
        if options.models is None:
            engines += engines_of(engine, named)
        else:
            kept = engines_of(engine, named) if named else []
            engines += [replace(model, served_model_name=name_of(model)) for model in kept]
            engines += models_on_demand(written_path(options.models), engine, batcher, options.keep_alive)
        if len(engines) > 1 or options.models is not None:
            _check_several(engine, options, fleet, [name_of(engine_options) for engine_options in engines])
        catalog = ModelCatalog(engines)
        if options.models is not None and (folder := written_path(options.models)).is_dir():
            find = partial(models_on_demand, folder, engine, batcher, options.keep_alive, may_be_none=True)
            catalog = ModelCatalog(engines, find_on_demand=find)
        engine = engines[0].engine if isinstance(engines[0], ModelOnDemand) else engines[0]
        if engine.tensor_parallel > 1 and is_torchrun():
            if rank := torchrun_rank(engine):
                await _follow(engine, rank, stopping)
                return
            # torchrun restarts all ranks or none.
            options = replace(options, max_restarts=0)
        opening = partial(_open_service, catalog, batcher, options)
        if fleet.is_wanted:
            opening = partial(_open_fleet, engine, batcher, options, fleet)
        async with _listening(options) as (sockets, predecessor):
            await _serve(partial(opening, sockets), sockets, predecessor, options, stopping)

    run_service(run)


def named_models(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, model) for each argument; the name is "" if the argument has none.

    Raises:
        UsageError: a name is empty.
    """
    models = []
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals or written_path(argument).exists():  # a path may contain the sign
            name, path = "", argument
        elif not (name and path):
            raise UsageError(f"model: {argument!r} is not NAME=MODEL")
        models.append((name, path))
    return models


def engines_of(engine: EngineOptions, named: Sequence[tuple[str, str]]) -> list[EngineOptions]:
    """Return the engine's options for each model; several models get equal shares of the memory.

    Args:
        engine: the configured options of the first model.
        named: (name, model) of each model; empty if the configuration names the model.

    Raises:
        UsageError: two models have the same name.
    """
    if len(named) < 2:
        return [engine if not named or not named[0][0] else replace(engine, served_model_name=named[0][0])]
    names = [name or default_name(path) for name, path in named]
    _check_names(names)
    share = engine.max_memory_percent / len(named)
    return [
        replace(engine, model_path=path, served_model_name=name, max_memory_percent=share)
        for name, (_, path) in zip(names, named, strict=True)
    ]


def default_name(model: str) -> str:
    """Return the default name of a model, without reading the model."""
    path = written_path(model)
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.suffix.lower() == ".gguf" else model


def name_of(model: EngineOptions | ModelOnDemand) -> str:
    """Return the name of a model for clients; without a given name, the name of its path."""
    engine = model.engine if isinstance(model, ModelOnDemand) else model
    return engine.served_model_name or default_name(engine.model_path)


def _check_names(names: Sequence[str]) -> None:
    """Raise UsageError for two models with the same name."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"model: two models have the name {twice[0]}; write NAME=MODEL")


def _check_several(engine: EngineOptions, options: ServiceOptions, fleet: FleetFlags, names: Sequence[str]) -> None:
    """Raise UsageError for options of a single model if there are several."""
    _check_names(names)
    if engine.served_model_name:
        raise UsageError("served_model_name: with several models write NAME=MODEL for each")
    if engine.chat_template:
        raise UsageError("chat_template: belongs to one model, and several are served")
    if engine.lora:
        raise UsageError("lora: an adapter belongs to one model, and several are served")
    if options.engine == "thread":
        raise UsageError("engine: each of several models has a process; thread is for one model")
    if fleet.is_wanted:
        raise UsageError("replicas: a fleet serves one model")
    if engine.tensor_parallel > 1 and is_torchrun():
        raise UsageError("tensor_parallel: torchrun's ranks serve one model")


class Running(Protocol):
    """A service, in one process or several."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses for clients."""

    @property
    def telemetry(self) -> Telemetry:
        """The events of the service."""

    @property
    def take_over_refusal(self) -> str:
        """Why no other service can take its place; "" if one can."""

    async def describe(self) -> tuple[Models, dict[str, Any]]:
        """Return the served models, and the stats."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and let open requests end for at most `timeout_s` seconds."""

    async def retire(self, timeout_s: float) -> None:
        """Serve the connected clients until they have left, for at most `timeout_s` seconds."""


@asynccontextmanager
async def _listening(options: ServiceOptions) -> AsyncIterator[tuple[ListeningSockets, Predecessor | None]]:
    """Open the listening sockets; with `take_over`, get them from the service that runs already."""
    addresses = gateway_addresses(options)
    async with AsyncExitStack() as stack:
        predecessor = await stack.enter_async_context(find_predecessor(addresses)) if options.take_over else None
        inherited = None if predecessor is None else predecessor.sockets
        yield stack.enter_context(closing(ListeningSockets(addresses, inherited))), predecessor


async def _serve(
    opening: Callable[[], AbstractAsyncContextManager[Running]],
    sockets: ListeningSockets,
    predecessor: Predecessor | None,
    options: ServiceOptions,
    stopping: trio.Event,
) -> None:
    ready = trio.Event()
    start_logging(options.log_format, options.log_level)
    if options.otel:
        start_tracing()
    async with background() as nursery:
        nursery.start_soon(_give_up_start, stopping, ready, nursery.cancel_scope)
        async with opening() as service:
            models, stats = await service.describe()
            by_model = stats.get("by_model", {})
            on_demand = [card.id for card in models.models if card.state != "loaded"]
            console = Console(file=lossy(sys.stdout))
            if on_demand:
                console.print(on_demand_banner(on_demand, service.addresses, options))
            for card in models.models:  # empty while a fleet has no replica
                if card.parent is None and card.id not in on_demand:
                    adapters = [other.id for other in models.models if other.parent == card.id]
                    console.print(banner(card, by_model.get(card.id, stats), service.addresses, adapters))
            await nursery.start(observe, service.telemetry)
            names = ",".join(card.id for card in models.models)
            if predecessor is not None:
                await predecessor.leave()
                sockets.own()
                log_event("took_over", process=predecessor.pid)
            succession = Succession(sockets, service.take_over_refusal)
            await nursery.start(succession.run)
            log_event("ready", model=names, addresses=",".join(service.addresses))
            ready.set()
            await _until_either(stopping, succession.leaving)
            if succession.leaving.is_set():
                log_event("retiring", timeout_s=options.shutdown_timeout_s)
                await service.retire(options.shutdown_timeout_s)
            else:
                log_event("stopping", timeout_s=options.shutdown_timeout_s)
                await service.drain(options.shutdown_timeout_s)
        log_event("stopped")


async def _until_either(*events: trio.Event) -> None:
    async def wait(event: trio.Event) -> None:
        await event.wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for event in events:
            nursery.start_soon(wait, event)


async def _follow(engine: EngineOptions, rank: int, stopping: trio.Event) -> None:
    """Run one of the ranks that torchrun has started: it has no addresses, and ends with rank 0."""
    ranks = await trio.to_thread.run_sync(import_module, "genbatch.nif.context.tensor_parallel")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.to_thread.run_sync, ranks.follow, engine, rank, abandon_on_cancel=True))
        await stopping.wait()
        nursery.cancel_scope.cancel()


async def _give_up_start(stopping: trio.Event, ready: trio.Event, scope: trio.CancelScope) -> None:
    """Cancel the start at a signal, since no request is open yet."""
    await stopping.wait()
    if not ready.is_set():
        scope.cancel()


@asynccontextmanager
async def _open_service(
    catalog: ModelCatalog,
    batcher: BatcherOptions,
    options: ServiceOptions,
    sockets: ListeningSockets,
) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        with LoadingBars() as bars:
            if options.engine == "process":
                from genbatch.actors.service.processes import open_processes

                bars("start", 0, 0)  # of the engine's process
                opening: AbstractAsyncContextManager[Running] = open_processes(
                    catalog, batcher, options, progress=bars, sockets=sockets
                )
            else:
                [engine] = catalog.models
                assert isinstance(engine, EngineOptions), "models on demand have processes"
                check_start(engine, batcher, options, sockets)
                await import_engine(bars)
                from genbatch.actors.service.service import open_service

                opening = open_service(engine, batcher, options, progress=bars, sockets=sockets)
            service = await stack.enter_async_context(opening)
        yield service


@asynccontextmanager
async def _open_fleet(
    engine: EngineOptions,
    batcher: BatcherOptions,
    options: ServiceOptions,
    flags: FleetFlags,
    sockets: ListeningSockets,
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
    async with open_fleet(replicas, kept, options, sockets) as service:
        yield service
