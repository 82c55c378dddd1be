"""`genbatch bench`: what the callers of a service see under a load.

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
    """What is asked of the service."""

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
        typer.Option(min=1, help=f"Requests of w2, w3 and w4; {CHAT_REQUESTS} if not given.", rich_help_panel=_LOAD),
    ] = None
    scale: Annotated[
        float, typer.Option(help="Multiplies every length; less than 1 fits a small model.", rich_help_panel=_LOAD)
    ] = 1.0
    seed: Annotated[int, typer.Option(help="Decides lengths, tokens and arrivals.", rich_help_panel=_LOAD)] = (
        DEFAULT_SEED
    )
    salt: Annotated[
        int,
        typer.Option(
            help="Another one changes the tokens and nothing else: an earlier run's are in the prefix cache.",
            rich_help_panel=_LOAD,
        ),
    ] = 0
    no_sharing: Annotated[
        bool,
        typer.Option("--no-sharing", help="w3: every request has a system prompt of its own.", rich_help_panel=_LOAD),
    ] = False
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help=f"w5: requests at once; may be given again; else {_listed(FIXED_BATCHES)}.",
            rich_help_panel=_LOAD,
        ),
    ] = None  # fmt: skip
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help=f"w5: tokens of a prompt; may be given again; else {_listed(FIXED_CONTEXTS)}.",
            rich_help_panel=_LOAD,
        ),
    ] = None  # fmt: skip

    def options(self, vocab_size: int) -> LoadOptions:
        """What the workloads are made from.

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
    """When it is asked."""

    request_rate: Annotated[
        float | None,
        typer.Option(help="w2, w3: requests a second; all at once if not given.", rich_help_panel=_TRAFFIC),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(
            help="Shape of the gaps between requests: 1 is Poisson, less is burstier.", rich_help_panel=_TRAFFIC
        ),
    ] = None
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests under way at once.", rich_help_panel=_TRAFFIC)
    ] = None
    load: Annotated[
        list[float] | None,
        typer.Option(
            help=f"w4: share of the capacity; may be given again; else {_listed(POISSON_LOADS)}.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None
    capacity: Annotated[
        float | None,
        typer.Option(
            help="w4: requests a second that the service answers; else w2 is run first to see.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None

    def check(self) -> None:
        """Raises:
        UsageError: a rate is not above 0, or a flag does nothing without another one.
        """
        for name in ("request_rate", "burstiness", "capacity"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}: must be above 0, not {value:g}")
        if any(not 0 < share < math.inf for share in self.load or ()):
            raise UsageError("load: a share of the capacity is above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFlags:
    """What is told of it."""

    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write all figures there, as JSON.")
    ] = None
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS",
            help="Count requests that keep to it, such as ttft:500, tpot:50 or e2el:9000; may be given again.",
            rich_help_panel=_MEASURES,
        ),
    ] = None

    def checked(self) -> Goodput:
        """What a request must keep to in order to be counted.

        Raises:
            UsageError: it cannot be read, or `out` could not be written.
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
    """What only a model in this process is asked for."""

    n_parallel: Annotated[
        int | None,
        typer.Option(min=1, help=f"Sequences that a private service decodes at once; {DEFAULT_PARALLEL} if not given."),
    ] = None
    floor: Annotated[
        bool,
        typer.Option(
            "--floor", help="w5, private service: time the kernels alone first, as 100 %.", rich_help_panel=_MEASURES
        ),
    ] = False
    return_context_logits: Annotated[
        bool,
        typer.Option(
            "--return-context-logits",
            help="Through the batch manager in this process: responses bring the prompt's logits.",
            rich_help_panel=_MEASURES,
        ),
    ] = False
    return_generation_logits: Annotated[
        bool,
        typer.Option(
            "--return-generation-logits",
            help="Through the batch manager in this process: responses bring the logits of generated tokens.",
            rich_help_panel=_MEASURES,
        ),
    ] = False

    @property
    def logits(self) -> dict[str, bool]:
        """The batch manager's options for the logits asked for; empty if there are none."""
        wanted = {
            "gather_context_logits": self.return_context_logits,
            "gather_generation_logits": self.return_generation_logits,
        }
        return {name: True for name, value in wanted.items() if value}


def case_options(load: LoadFlags, traffic: TrafficFlags, private: PrivateFlags) -> CaseOptions:
    """What sets the workload's cases apart.

    Raises:
        UsageError: a flag that this workload does not read, or a value out of its range.
    """
    for name, value in (asdict(load) | asdict(traffic) | asdict(private)).items():
        readers = _READ_BY.get(name, tuple(Workload))
        if value not in (None, False) and load.workload not in readers:
            raise UsageError(f"{name}: {load.workload} does not read it, only {' and '.join(readers)}")
    traffic.check()
    if traffic.burstiness is not None and traffic.request_rate is None and load.workload is not Workload.W4:
        raise UsageError("burstiness: without a request_rate all requests are sent at once")
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
    """Where the flags lead to.

    Raises:
        UsageError: flags that only a private service reads, or that the batch manager does not.
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
        """A client, and what is known of the model.

        Args:
            loads: what a private service needs room for.

        Raises:
            GenbatchError, ModelError, OptionError: as the client or the service raises.
        """
        if self.private.logits:
            async with self._open_batch_manager(loads) as opened:
                yield opened
            return
        engine = self.engine if self.connection.connect is not None else self._roomy(loads)
        async with open_client(self.connection, engine, n_parallel=self._parallel) as client:
            yield client, msgspec.to_builtins((await client.models())[0])

    async def floors(self, cases: Sequence[Case]) -> list[float | None]:
        """Seconds of each case's step by the kernels alone; None where it is not asked for."""
        if not self.private.floor:
            return [None for _ in cases]
        with LoadingBars() as bars:
            await import_engine(bars)
            return await trio.to_thread.run_sync(self._measure_floors, cases, abandon_on_cancel=True)

    def logits_of(self, client: Streams) -> dict[str, int]:
        """Logits that came with the last load, in rows and bytes; nothing where none are asked for."""
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
        found: list[float | None] = []
        for case in cases:
            assert case.batch is not None
            request = case.load.requests[0]
            found.append(floor.measure(case.batch, len(request.prompt) + request.max_tokens // 2))
        return found

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
        """The engine's flags with a KV pool in which no sequence waits for memory, unless its size was given."""
        if "n_ctx" in self.engine.changed():
            return self.engine
        wanted = max(load.positions_of(self._parallel) for load in loads)
        block = 64  # at least what the last block of a sequence holds
        n_ctx = max(self.engine.values["n_ctx"] or 0, wanted + block * self._parallel)
        return ModelFlags(**{**self.engine.values, "n_ctx": n_ctx})

    def _refuse_flags_of_a_private_service(self, address: str) -> None:
        for name, value in asdict(self.private).items():
            if value:
                raise UsageError(f"{name}: only of a model in this process, not of the service at {address}")

    def _refuse_flags_beside_logits(self) -> None:
        for name in _NOT_THE_BATCH_MANAGERS:
            if name in self.engine.changed():
                raise UsageError(f"{name}: logits come from the batch manager, which does not read it")
        if self.private.floor:
            raise UsageError("floor: logits come from the batch manager, whose steps have no measured floor")


@with_flag_groups
def bench(
    scripted: LoadFlags,
    report: ReportFlags,
    private: PrivateFlags,
    connection: ConnectionFlags,
    traffic: TrafficFlags,
    engine: ModelFlags,
) -> None:
    """Measure a running service, or a private one, under a scripted load.

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
        """Runs every case and returns the report, ready for JSON."""
        # What room they need does not depend on the vocabulary, which is known once the service is there.
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
        """Requests a second of W4's chat when all come at once; 1 for a workload that does not ask."""
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
