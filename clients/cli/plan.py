"""`genbatch plan`: find the number of replicas and the router for a load."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from genbatch.clients.cli.command import BAD_INPUT, UsageError, print_error, with_flag_groups

if TYPE_CHECKING:
    from genbatch.actors.scheduling.plan import StepTime
    from genbatch.clients.plan.fleet_run import PlanRow, SimulatedFleet
    from genbatch.clients.plan.traces import Trace

_TRACE = "Trace"
_FLEET = "Fleet"
_TARGET = "Target"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """The load."""

    trace: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="A trace in Mooncake's format, one object in each line; or a generated trace: chat, agents or batch.",
            rich_help_panel=_TRACE,
        ),
    ]
    block_tokens: Annotated[
        int, typer.Option(min=1, help="The tokens of a hash id in the FILE.", rich_help_panel=_TRACE)
    ] = 512
    rate: Annotated[
        float | None,
        typer.Option(help="Generated traces: requests per second; the default is 10.", rich_help_panel=_TRACE),
    ] = None
    duration: Annotated[
        float | None, typer.Option(help="Generated traces: seconds; the default is 600.", rich_help_panel=_TRACE)
    ] = None
    scale: Annotated[
        float | None, typer.Option(help="Generated traces: multiply every length by this.", rich_help_panel=_TRACE)
    ] = None
    tenants: Annotated[
        int | None,
        typer.Option(min=1, help="Generated traces: tenants, which share no prompts.", rich_help_panel=_TRACE),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Generated traces: the seed.", rich_help_panel=_TRACE)] = None
    write_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the generated trace to this file.", rich_help_panel=_TRACE),
    ] = None

    def read(self) -> "Trace":
        """Return the trace.

        Raises:
            UsageError: flags of made traces beside a file.
            TraceError: the file cannot be read, or a value is out of range.
        """
        from genbatch.clients.plan.traces import MADE, TraceOptions, read_trace, write_trace

        options = {
            "rate": self.rate,
            "duration_s": self.duration,
            "scale": self.scale,
            "tenants": self.tenants,
            "seed": self.seed,
        }
        options = {name: value for name, value in options.items() if value is not None}
        if self.trace not in MADE:
            if options or self.write_trace is not None:
                name = next(iter(options), "write_trace").removesuffix("_s")
                raise UsageError(
                    f"{name}: only for a generated trace ({', '.join(MADE)}), not for the file {self.trace}"
                )
            return read_trace(Path(self.trace), self.block_tokens)
        trace = MADE[self.trace](TraceOptions(**options))  # type: ignore[arg-type]
        if self.write_trace is not None:
            write_trace(trace, self.write_trace)
        return trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFleetFlags:
    """The fleet."""

    bench: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="The measurements of one replica by `genbatch bench -w w5 --out FILE`.",
            rich_help_panel=_FLEET,
        ),
    ]  # fmt: skip
    replicas: Annotated[
        str, typer.Option(metavar="N|LOW:HIGH", help="The number of replicas, or its bounds.", rich_help_panel=_FLEET)
    ] = "1:64"
    router: Annotated[
        list[str] | None,
        typer.Option(
            help='round_robin, least_tokens, prefix or "module:Class"; may be repeated; the default is prefix.',
            rich_help_panel=_FLEET,
        ),
    ] = None
    scheduler: Annotated[str, typer.Option(help="fifo or prefill_first.", rich_help_panel=_FLEET)] = "fifo"
    n_parallel: Annotated[int, typer.Option(min=1, help="Slots of a replica.", rich_help_panel=_FLEET)] = 16
    n_ctx: Annotated[int, typer.Option(min=1, help="KV positions of a replica.", rich_help_panel=_FLEET)] = 32768
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a step.", rich_help_panel=_FLEET)
    ] = 512  # fmt: skip
    target_inter_token_latency_ms: Annotated[
        float, typer.Option(min=0.0, help="Time of a step with prompts; 0 is no limit.", rich_help_panel=_FLEET)
    ] = 12.0  # fmt: skip
    gateways: Annotated[
        int, typer.Option(min=1, help="Gateways, which do not communicate.", rich_help_panel=_FLEET)
    ] = 1
    report_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds between reports of a replica's load.", rich_help_panel=_FLEET)
    ] = 0.25

    tell_prefixes: Annotated[
        bool,
        typer.Option(
            "--tell-prefixes",
            help="Reports include a replica's prefixes; without this a gateway knows only its own requests.",
            rich_help_panel=_FLEET,
        ),
    ] = False

    def bounds(self) -> tuple[int, int]:
        """Return the smallest and the largest fleet.

        Raises:
            UsageError: the text is neither N nor LOW:HIGH.
        """
        low, colon, high = self.replicas.partition(":")
        try:
            bounds = int(low), int(high if colon else low)
        except ValueError:
            bounds = 0, 0
        if not 1 <= bounds[0] <= bounds[1]:
            raise UsageError(f"replicas: {self.replicas!r} is neither N nor LOW:HIGH, with numbers from 1")
        return bounds

    def options(self, replicas: int, router: str) -> "SimulatedFleet":
        """Return the fleet of one size."""
        from genbatch.clients.plan.fleet_run import SimulatedFleet

        return SimulatedFleet(
            replicas=replicas,
            router=router,
            scheduler=self.scheduler,
            n_parallel=self.n_parallel,
            n_ctx=self.n_ctx,
            max_batch_tokens=self.max_batch_tokens,
            target_inter_token_latency_ms=self.target_inter_token_latency_ms,
            gateways=self.gateways,
            report_s=self.report_s,
            tell_prefixes=self.tell_prefixes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """The target, and the output."""

    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS",
            help="The limits of a request; the default is ttft:2000 tpot:100.",
            rich_help_panel=_TARGET,
        ),
    ] = None
    share: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="The share of requests that must meet the target.", rich_help_panel=_TARGET
        ),
    ] = 0.95
    cost: Annotated[
        float | None, typer.Option(min=0.0, help="Cost of a replica for an hour.", rich_help_panel=_TARGET)
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw a plot to this PNG or SVG file; needs genbatch[plot].", rich_help_panel=_TARGET
        ),
    ] = None


@with_flag_groups
def plan(*, load: TraceFlags, fleet: SimulatedFleetFlags, options: PlanFlags) -> None:
    """Simulate a trace on fleets of several sizes, and find the smallest fleet that meets a target.

    The routers and schedulers are the real ones; the time of a step is fitted to what `genbatch bench` measured.

    Examples:

      genbatch bench -w w5 --batch 1 --batch 16 --context 128 --context 1024 --out w5.json

      genbatch plan --trace agents --rate 50 --bench w5.json --replicas 1:2000 --target "ttft:2000 tpot:100"

      genbatch plan --trace conversation.jsonl --bench w5.json --replicas 64 --router least_tokens --router prefix
    """
    from genbatch.actors.fleet.routing import RouterError
    from genbatch.clients.bench.runs import GoodputError
    from genbatch.clients.plan.fleet_run import PlotError
    from genbatch.clients.plan.step_time import StepTimeError
    from genbatch.clients.plan.traces import TraceError

    try:
        _plan(load, fleet, options)
    except (UsageError, RouterError, GoodputError, StepTimeError, TraceError, PlotError) as error:
        print_error(error)
        raise typer.Exit(BAD_INPUT) from error


def _plan(load: TraceFlags, fleet: SimulatedFleetFlags, options: PlanFlags) -> None:
    from genbatch.clients.bench.runs import Goodput
    from genbatch.clients.plan.fleet_run import plan_table, plot_plan, smallest
    from genbatch.clients.plan.step_time import read_step_time

    bounds = fleet.bounds()
    limits_s = Goodput.parse(options.target or ["ttft:2000 tpot:100"]).limits_s
    if not set(limits_s) <= {"ttft", "tpot"}:
        raise UsageError("target: must be ttft or tpot")
    measured, trace = read_step_time(fleet.bench), load.read()
    console = Console()
    count = len(trace.requests)
    prompt, output = (
        sum(getattr(request, name) for request in trace.requests) / count for name in ("prompt", "output")
    )
    console.print(
        f"{trace.name}: {count:,d} requests in {trace.duration_s:,.0f} s, "
        f"{prompt:,.0f} prompt and {output:,.0f} output tokens each"
    )
    console.print(measured.describe(), soft_wrap=True)
    for router in fleet.router or ["prefix"]:
        search = _Search(trace, measured.time, fleet, router, limits_s, options.cost or 0.0)
        rows = search.rows(*bounds, options.share)
        console.print(f"\n[bold]{router}")
        console.print(plan_table(rows, target_share=options.share, with_cost=options.cost is not None))
        least = smallest(rows, options.share)
        need = "no fleet within these bounds" if least is None else f"{least.replicas:,d} replicas"
        kept = " ".join(f"{name}:{1e3 * limit:g}" for name, limit in limits_s.items())
        console.print(f"{need}: {100 * options.share:g} % of the requests within {kept}")
        if options.plot is not None:
            path = options.plot
            if len(fleet.router or ()) > 1:
                path = path.with_stem(f"{path.stem}-{router.replace(':', '-')}")
            plot_plan(rows, path, title=f"{trace.name}, {router}", target_share=options.share)


@dataclass(frozen=True, slots=True)
class _Search:
    trace: "Trace"
    step_time: "StepTime"
    fleet: SimulatedFleetFlags
    router: str
    limits_s: Mapping[str, float]
    cost_hour: float

    def rows(self, low: int, high: int, share: float) -> list["PlanRow"]:
        """Simulate sizes that double, then sizes between the last that fails and the first that meets the target."""
        sizes = [low]
        while sizes[-1] < high:
            sizes.append(min(high, 2 * sizes[-1]))
        rows = []
        for size in track(sizes, description="fleets", console=Console(stderr=True), transient=True):
            rows.append(self.row(size))
            if rows[-1].good >= share:
                break  # more replicas are more of the same
        larger: list[PlanRow] = []
        while len(rows) > 1 and rows[-1].good >= share:
            below, above = rows[-2].replicas, rows[-1].replicas
            # The target's number of replicas is not known better than to some percent.
            if above - below <= max(1, above // 32):
                break
            middle = self.row((below + above) // 2)
            if middle.good >= share:
                larger.append(rows.pop())
                rows.append(middle)
            else:
                rows.insert(-1, middle)
        return rows + larger[::-1]

    def row(self, replicas: int) -> "PlanRow":
        """Simulate one size."""
        from genbatch.clients.plan.fleet_run import PlanRow, run_fleet

        run = run_fleet(self.trace, self.step_time, self.fleet.options(replicas, self.router))
        return PlanRow.of(run, self.limits_s, self.cost_hour)
