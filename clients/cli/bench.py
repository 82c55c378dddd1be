"""`genbatch bench`: measure latency and throughput of a service under a load.

The flags say which workload; the target is a running service, a private one, or the batch manager.
"""

import json
import math
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from genbatch.clients.bench.runs import Goodput, GoodputError, Streams, machine, results_table, run_case
from genbatch.clients.bench.workloads import (
    CHAT_REQUESTS,
    DEFAULT_SEED,
    FIRST_TOKEN,
    FIXED_BATCHES,
    FIXED_CONTEXTS,
    POISSON_LOADS,
    Case,
    CaseOptions,
    LoadOptions,
    ScriptedLoad,
    Workload,
    arrival_times,
    cases_of,
    chat,
)
from genbatch.clients.cli.command import UsageError, run_command, with_flag_groups
from genbatch.clients.cli.connection import ConnectionFlags, LoadingBars, import_engine, open_client
from genbatch.clients.cli.option_flags import ModelFlags

DEFAULT_PARALLEL = 32

_LOAD = "Load"
_TRAFFIC = "Traffic"
_MEASURES = "Measures"

_CHATS = (Workload.W2, Workload.W3, Workload.W4)
# A flag that is not here is read by every workload.
_READ_BY = {
    "num_prompts": _CHATS,
    "no_sharing": (Workload.W3,),
    "batch": (Workload.W5,),
    "context": (Workload.W5,),
    "floor": (Workload.W5,),
    "load": (Workload.W4,),
    "capacity": (Workload.W4,),
    "request_rate": (Workload.W2, Workload.W3),
    "burstiness": _CHATS,
}


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """The load."""

    workload: Annotated[
        Workload,
        typer.Option(
            "--workload",
            "-w",
            help="w2: chat; w3: chat after a shared system prompt; w4: chat arriving at random; w5: fixed batches; "
            "w6: a long prompt amid answers.",
        ),
    ]
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help=f"Requests of w2, w3 and w4; the default is {CHAT_REQUESTS}.", rich_help_panel=_LOAD),
    ] = None
    scale: Annotated[
        float, typer.Option(help="Multiply every length by this; less than 1 for small models.", rich_help_panel=_LOAD)
    ] = 1.0
    seed: Annotated[int, typer.Option(help="The seed of lengths, tokens and arrivals.", rich_help_panel=_LOAD)] = (
        DEFAULT_SEED
    )
    salt: Annotated[
        int,
        typer.Option(
            help="Another salt changes only the tokens, so that the prefix cache of an earlier run does not help.",
            rich_help_panel=_LOAD,
        ),
    ] = 0
    no_sharing: Annotated[
        bool,
        typer.Option("--no-sharing", help="w3: give every request its own system prompt.", rich_help_panel=_LOAD),
    ] = False
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help=f"w5: requests at once; may be repeated; the default is {_listed(FIXED_BATCHES)}.",
            rich_help_panel=_LOAD,
        ),
    ] = None  # fmt: skip
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help=f"w5: tokens of a prompt; may be repeated; the default is {_listed(FIXED_CONTEXTS)}.",
            rich_help_panel=_LOAD,
        ),
    ] = None  # fmt: skip

    def options(self, vocab_size: int) -> LoadOptions:
        """Return the options of the workloads.

        Raises:
            UsageError: the scale is not above 0.
        """
        if not 0 < self.scale < math.inf:
            raise UsageError(f"scale: must be above 0, not {self.scale:g}")
        return LoadOptions(
            vocab_size=vocab_size,
            seed=self.seed,
            salt=self.salt,
            num_prompts=self.num_prompts or CHAT_REQUESTS,
            scale=self.scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFlags:
    """The arrival of requests."""

    request_rate: Annotated[
        float | None,
        typer.Option(help="w2, w3: requests per second; the default sends all at once.", rich_help_panel=_TRAFFIC),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(
            help="Shape of the gaps between requests: 1 is Poisson, less is burstier.", rich_help_panel=_TRAFFIC
        ),
    ] = None
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests at once.", rich_help_panel=_TRAFFIC)
    ] = None
    load: Annotated[
        list[float] | None,
        typer.Option(
            help=f"w4: share of the capacity; may be repeated; the default is {_listed(POISSON_LOADS)}.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None
    capacity: Annotated[
        float | None,
        typer.Option(
            help="w4: the service's requests per second; the default runs w2 first to measure it.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None

    def check(self) -> None:
        """Raise UsageError for a rate that is not above 0."""
        for name in ("request_rate", "burstiness", "capacity"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}: must be above 0, not {value:g}")
        if any(not 0 < share < math.inf for share in self.load or ()):
            raise UsageError("load: must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFlags:
    """The report."""

    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write all figures to this file, as JSON.")
    ] = None
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS",
            help="Count requests within this limit, such as ttft:500, tpot:50 or e2el:9000; may be repeated.",
            rich_help_panel=_MEASURES,
        ),
    ] = None

    def checked(self) -> Goodput:
        """Return the limits for requests that count.

        Raises:
            UsageError: a limit cannot be parsed, or the folder of `out` does not exist.
        """
        try:
            goodput = Goodput.parse(self.goodput or ())
        except GoodputError as error:
            raise UsageError(str(error)) from error
        if self.out is not None and not self.out.absolute().parent.is_dir():
            raise UsageError(f"out: there is no folder {self.out.absolute().parent}")
        return goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateFlags:
    """The options of a model in this process."""

    n_parallel: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Sequences that a private service decodes at once; the default is {DEFAULT_PARALLEL}."
        ),
    ] = None
    floor: Annotated[
        bool,
        typer.Option(
            "--floor", help="w5, private service: measure the kernels alone first, as 100 %.", rich_help_panel=_MEASURES
        ),
    ] = False
    return_context_logits: Annotated[
        bool,
        typer.Option(
            "--return-context-logits",
            help="Use the batch manager in this process, and return the logits of prompts.",
            rich_help_panel=_MEASURES,
        ),
    ] = False
    return_generation_logits: Annotated[
        bool,
        typer.Option(
            "--return-generation-logits",
            help="Use the batch manager in this process, and return the logits of generated tokens.",
            rich_help_panel=_MEASURES,
        ),
    ] = False

    @property
    def logits(self) -> dict[str, bool]:
        """The batch manager's options for logits; empty if no logits are returned."""
        options = {
            "gather_context_logits": self.return_context_logits,
            "gather_generation_logits": self.return_generation_logits,
        }
        return {name: True for name, value in options.items() if value}


def case_options(load: LoadFlags, traffic: TrafficFlags, private: PrivateFlags) -> CaseOptions:
    """Return the options of the workload's cases.

    Raises:
        UsageError: the workload does not read a flag, or a value is out of its range.
    """
    for name, value in (asdict(load) | asdict(traffic) | asdict(private)).items():
        readers = _READ_BY.get(name, tuple(Workload))
        if value not in (None, False) and load.workload not in readers:
            raise UsageError(f"{name}: {load.workload} has no such flag; {' and '.join(readers)} has")
    traffic.check()
    if traffic.burstiness is not None and traffic.request_rate is None and load.workload is not Workload.W4:
        raise UsageError("burstiness: needs --request-rate; without it all requests are sent at once")
    return CaseOptions(
        request_rate=traffic.request_rate or math.inf,
        sharing=not load.no_sharing,
        batches=load.batch or FIXED_BATCHES,
        contexts=load.context or FIXED_CONTEXTS,
        loads=traffic.load or POISSON_LOADS,
    )


# Flags that the batch manager has no counterpart of.
_NOT_THE_BATCH_MANAGERS = ("runner", "quantize", "n_threads", "n_ctx")


@dataclass(frozen=True, slots=True)
class Target:
    """The service under test.

    Raises:
        UsageError: a flag is only for a private service, or not for the batch manager.
    """

    connection: ConnectionFlags
    engine: ModelFlags
    private: PrivateFlags

    def __post_init__(self) -> None:
        if self.connection.connect is not None:
            self._refuse_flags_of_a_private_service(self.connection.connect)
        if self.private.logits:
            self._refuse_flags_beside_logits()

    @asynccontextmanager
    async def open(self, loads: Sequence[ScriptedLoad]) -> AsyncIterator[tuple[Streams, dict[str, Any]]]:
        """Open a client; yield it with the description of the model.

        Args:
            loads: the loads that must fit into a private service's KV pool.

        Raises:
            GenbatchError, ModelError, OptionError: the client or the service fails.
        """
        if self.private.logits:
            async with self._open_batch_manager(loads) as opened:
                yield opened
            return
        engine = self.engine if self.connection.connect is not None else self._roomy(loads)
        async with open_client(self.connection, engine, n_parallel=self._parallel) as client:
            yield client, msgspec.to_builtins((await client.models())[0])

    async def floors(self, cases: Sequence[Case]) -> list[float | None]:
        """Return the seconds of each case's step in the kernels alone; None without --floor."""
        if not self.private.floor:
            return [None for _ in cases]
        with LoadingBars() as bars:
            await import_engine(bars)
            return await trio.to_thread.run_sync(self._measure_floors, cases, abandon_on_cancel=True)

    def logits_of(self, client: Streams) -> dict[str, int]:
        """Return the rows and bytes of the last load's logits; an empty dict if no logits are returned."""
        if not self.private.logits:
            return {}
        from genbatch.clients.bench.in_process import GptManagerClient

        assert isinstance(client, GptManagerClient)
        seen = client.take_logits()
        return {
            "context_logits_rows": seen.context_rows,
            "generation_logits_rows": seen.generation_rows,
            "logits_bytes": seen.num_bytes,
        }

    @property
    def _parallel(self) -> int:
        return self.private.n_parallel or DEFAULT_PARALLEL

    def _measure_floors(self, cases: Sequence[Case]) -> list[float | None]:
        from genbatch.clients.bench.in_process import DecodeFloor

        floor = DecodeFloor(self.engine.options(self.connection.private_model))
        floors: list[float | None] = []
        for case in cases:
            assert case.batch is not None
            request = case.load.requests[0]
            floors.append(floor.measure(case.batch, len(request.prompt) + request.max_tokens // 2))
        return floors

    @asynccontextmanager
    async def _open_batch_manager(self, loads: Sequence[ScriptedLoad]) -> AsyncIterator[tuple[Streams, dict[str, Any]]]:
        with LoadingBars() as bars:
            await import_engine(bars)
            from genbatch.clients.bench.in_process import open_gpt_manager
            from genbatch.nif.models.model import load_model

            engine = self.engine.options(self.connection.private_model)
            load = partial(
                load_model,
                dtype=engine.dtype,
                n_gpu_layers=engine.n_gpu_layers,
                main_gpu=engine.main_gpu,
                progress=bars,
            )
            model = await trio.to_thread.run_sync(load, self.connection.private_model, abandon_on_cancel=True)
        async with open_gpt_manager(model, loads, self._parallel, **self.private.logits) as client:
            yield client, {"id": model.name, "vocab_size": model.vocab_size, "runner": "batch manager"}

    def _roomy(self, loads: Sequence[ScriptedLoad]) -> ModelFlags:
        """Return the engine's flags with a KV pool for all sequences at once, unless the flags set its size."""
        if "n_ctx" in self.engine.changed():
            return self.engine
        num_positions = max(load.positions_of(self._parallel) for load in loads)
        block = 64  # at least what the last block of a sequence holds
        n_ctx = max(self.engine.values["n_ctx"] or 0, num_positions + block * self._parallel)
        return ModelFlags(**{**self.engine.values, "n_ctx": n_ctx})

    def _refuse_flags_of_a_private_service(self, address: str) -> None:
        for name, value in asdict(self.private).items():
            if value:
                raise UsageError(f"{name}: only for a model in this process, not for the service at {address}")

    def _refuse_flags_beside_logits(self) -> None:
        for name in _NOT_THE_BATCH_MANAGERS:
            if name in self.engine.changed():
                raise UsageError(f"{name}: the batch manager, which returns the logits, has no such option")
        if self.private.floor:
            raise UsageError("floor: cannot be measured with the batch manager, which returns the logits")


@with_flag_groups
def bench(
    scripted: LoadFlags,
    report: ReportFlags,
    private: PrivateFlags,
    connection: ConnectionFlags,
    traffic: TrafficFlags,
    engine: ModelFlags,
) -> None:
    """Measure a running or a private service under a scripted load.

    Prompts are token ids, every answer has its scripted length, and the seed decides all of it.

    Examples:

      genbatch bench -w w2 --connect ipc:///tmp/genbatch/zeromq.sock --out w2.json

      genbatch bench -w w2 --request-rate 2 --goodput "ttft:500 tpot:50"

      genbatch bench -w w5 --batch 32 --context 128 --dtype bfloat16 --quantize int8 --floor
    """

    async def run() -> None:
        options = case_options(scripted, traffic, private)
        target = Target(connection, engine, private)
        goodput = report.checked()
        figures = await Bench(scripted, traffic, goodput, options, target).run()
        Console().print(results_table(figures["runs"]))
        if report.out is not None:
            report.out.write_text(json.dumps(figures, indent=2) + "\n")

    run_command(run)


@dataclass(frozen=True, slots=True)
class Bench:
    """One run of the command."""

    load: LoadFlags
    traffic: TrafficFlags
    goodput: Goodput
    options: CaseOptions
    target: Target

    async def run(self) -> dict[str, Any]:
        """Run every case, and return the report as plain data."""
        # The room that the cases need does not depend on the vocabulary, which is known only once the service runs.
        sizes = cases_of(self.load.workload, self.load.options(FIRST_TOKEN + 1), self.options)
        floors = await self.target.floors(sizes)
        begun = datetime.now(UTC)
        async with self.target.open([case.load for case in sizes]) as (client, model):
            load = self.load.options(model["vocab_size"])
            capacity = await self._capacity(client, model["vocab_size"])
            cases = cases_of(self.load.workload, load, self.options, capacity)
            runs = await self._run_all(client, cases, floors)
        return {
            "date": begun.isoformat(timespec="seconds"),
            "genbatch": version("genbatch"),
            "machine": machine(),
            "command": shlex.join(["genbatch", *sys.argv[1:]]),
            "address": self.target.connection.connect,
            "model": model,
            "load": asdict(load),
            "max_concurrency": self.traffic.max_concurrency,
            "burstiness": self.traffic.burstiness or 1.0,
            "runs": runs,
        }

    async def _capacity(self, client: Streams, vocab_size: int) -> float:
        """Return the requests per second of W4's chat when all are sent at once; 1 for other workloads."""
        if self.load.workload is not Workload.W4:
            return 1.0
        if self.traffic.capacity is not None:
            return self.traffic.capacity
        case = Case(load=chat(self.load.options(vocab_size), "W2 chat, for the capacity"))
        [figures] = await self._run_all(client, [case], [None])
        if not figures["completed"]:
            raise UsageError(f"capacity: no request of the load was answered: {figures['failed']}")
        rate: float = figures["request_throughput"]
        return rate

    async def _run_all(
        self, client: Streams, cases: Sequence[Case], floors: Sequence[float | None]
    ) -> list[dict[str, Any]]:
        runs = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            for case, floor_s in zip(cases, floors, strict=True):
                count, burstiness = len(case.load.requests), self.traffic.burstiness or 1.0
                task = progress.add_task(case.load.name, total=count)
                figures = await run_case(
                    client,
                    replace(case, floor_s=floor_s),
                    arrivals=arrival_times(count, case.request_rate, burstiness=burstiness, seed=self.load.seed),
                    max_concurrency=self.traffic.max_concurrency,
                    goodput=self.goodput,
                    on_end=lambda task=task: progress.advance(task),  # type: ignore[misc]
                )
                runs.append(figures | self.target.logits_of(client))
        return runs
