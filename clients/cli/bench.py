"""`genbatch bench`: what the callers of a service see under a load."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from genbatch.clients.bench.case import Case, CaseOptions, cases_of
from genbatch.clients.bench.case_run import run_case
from genbatch.clients.bench.goodput import Goodput, GoodputError
from genbatch.clients.bench.load import FIRST_TOKEN
from genbatch.clients.bench.load_run import Streams
from genbatch.clients.bench.machine import machine
from genbatch.clients.bench.results_table import results_table
from genbatch.clients.bench.workloads import Workload, chat
from genbatch.clients.cli.bench_flags import LoadFlags, MeasureFlags, TrafficFlags, case_options
from genbatch.clients.cli.bench_target import DEFAULT_PARALLEL, Target
from genbatch.clients.cli.command import UsageError, run_command
from genbatch.clients.cli.engine_flags import ModelFlags
from genbatch.clients.cli.flag_group import with_flag_groups
from genbatch.clients.connection import ConnectionFlags


@with_flag_groups
def bench(
    *,
    workload: Annotated[
        Workload,
        typer.Option(
            "--workload",
            "-w",
            help="w2: chat; w3: chat after a shared system prompt; w4: chat arriving at random; w5: fixed batches; "
            "w6: a long prompt amid answers.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write all figures there, as JSON.")
    ] = None,
    n_parallel: Annotated[
        int | None,
        typer.Option(min=1, help=f"Sequences that a private service decodes at once; {DEFAULT_PARALLEL} if not given."),
    ] = None,
    connection: ConnectionFlags,
    scripted: LoadFlags,
    traffic: TrafficFlags,
    measures: MeasureFlags,
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
        options = case_options(workload, scripted, traffic, measures)
        target = Target(connection, engine, n_parallel, measures)
        try:
            goodput = Goodput.parse(measures.goodput or ())
        except GoodputError as error:
            raise UsageError(str(error)) from error
        if out is not None and not out.absolute().parent.is_dir():
            raise UsageError(f"out: there is no folder {out.absolute().parent}")
        report = await Bench(workload, scripted, traffic, goodput, options, target).run()
        Console().print(results_table(report["runs"]))
        if out is not None:
            out.write_text(json.dumps(report, indent=2) + "\n")

    run_command(run)


@dataclass(frozen=True, slots=True)
class Bench:
    """One run of the command."""

    workload: Workload
    load: LoadFlags
    traffic: TrafficFlags
    goodput: Goodput
    options: CaseOptions
    target: Target

    async def run(self) -> dict[str, Any]:
        """Runs every case and returns the report, ready for JSON."""
        # What room they need does not depend on the vocabulary, which is known once the service is there.
        sizes = cases_of(self.workload, self.load.options(FIRST_TOKEN + 1), self.options)
        floors = await self.target.floors(sizes)
        begun = datetime.now(UTC)
        async with self.target.open([case.load for case in sizes]) as (client, model):
            load = self.load.options(model["vocab_size"])
            capacity = await self._capacity(client, model["vocab_size"])
            cases = cases_of(self.workload, load, self.options, capacity)
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
        if self.workload is not Workload.W4:
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
                task = progress.add_task(case.load.name, total=len(case.load.requests))
                figures = await run_case(
                    client,
                    case,
                    seed=self.load.seed,
                    burstiness=self.traffic.burstiness or 1.0,
                    max_concurrency=self.traffic.max_concurrency,
                    goodput=self.goodput,
                    floor_s=floor_s,
                    on_end=lambda task=task: progress.advance(task),  # type: ignore[misc]
                )
                runs.append(figures | self.target.logits_of(client))
        return runs
