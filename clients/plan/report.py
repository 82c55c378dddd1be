"""What a plan says: a row for each size of the fleet, as a table and as a plot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from genbatch.clients.plan.fleet_run import FleetRun
from genbatch.nif.extras import how_to_install


class PlotError(Exception):
    """A plot cannot be drawn; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A run of a trace on a fleet of one size, in figures; latencies are (p50, p99) in milliseconds."""

    replicas: int
    completed: int
    refused: int
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    itl_ms: tuple[float, float]
    good: float  # share of all requests that were answered within the target
    goodput: float  # requests a second that were
    output_tok_s: float
    hit_rate: float  # share of the prompt tokens that were not computed
    busy: float  # share of the replicas' time
    most_of_one: float  # what the replica with most requests had, as a multiple of an even share
    route_us: float
    cost_hour: float
    cost_million: float  # of a million output tokens

    @classmethod
    def of(cls, run: FleetRun, limits_s: Mapping[str, float], cost_hour: float) -> "PlanRow":
        """The figures of a run.

        Args:
            limits_s: the target, of "ttft" and "tpot".
            cost_hour: of one replica.
        """
        ttft, tpot = np.array(run.ttft_s), np.array(run.tpot_s)
        # A single token has no TPOT and breaks no promise of it.
        kept = (ttft <= limits_s.get("ttft", math.inf)) & ~(tpot > limits_s.get("tpot", math.inf))
        count = len(ttft) + run.refused
        cost = cost_hour * run.replicas
        return cls(
            replicas=run.replicas,
            completed=len(ttft),
            refused=run.refused,
            ttft_ms=_spread(ttft),
            tpot_ms=_spread(tpot[~np.isnan(tpot)]),
            itl_ms=_weighted_spread(run.gaps),
            good=float(kept.sum()) / count,
            goodput=float(kept.sum()) / run.duration_s,
            output_tok_s=run.output_tokens / run.duration_s,
            hit_rate=run.cached_tokens / run.prompt_tokens,
            busy=run.busy_s / (run.duration_s * run.replicas),
            most_of_one=run.most_of_one,
            route_us=run.route_us,
            cost_hour=cost,
            cost_million=cost * run.duration_s / 3600 / run.output_tokens * 1e6,
        )


def plan_table(rows: Sequence[PlanRow], *, target_share: float, with_cost: bool) -> Table:
    """A row for each size; the smallest that meets the target is marked."""
    table = Table(header_style="bold", caption="latencies in ms: p50 / p99")
    columns = ["replicas", "refused", "TTFT", "TPOT", "ITL", "good", "goodput/s", "tok/s", "hits", "busy", "max/even"]
    for title in [*columns, *(["cost/h", "cost/Mtok"] if with_cost else [])]:
        table.add_column(title, justify="right", no_wrap=True)
    chosen = smallest(rows, target_share)
    for row in rows:
        cells = [
            f"{row.replicas:,d}",
            f"{row.refused:,d}",
            *(f"{low:,.0f} / {high:,.0f}" for low, high in (row.ttft_ms, row.tpot_ms, row.itl_ms)),
            f"{100 * row.good:.1f}%",
            f"{row.goodput:,.1f}",
            f"{row.output_tok_s:,.0f}",
            f"{100 * row.hit_rate:.0f}%",
            f"{100 * row.busy:.0f}%",
            f"{row.most_of_one:.2f}",
        ]
        if with_cost:
            cells += [f"{row.cost_hour:,.2f}", f"{row.cost_million:,.2f}"]
        table.add_row(*cells, style="bold green" if row is chosen else None)
    return table


def smallest(rows: Sequence[PlanRow], target_share: float) -> PlanRow | None:
    """The smallest fleet of which at least `target_share` of all requests keep the target; None if none does."""
    return min((row for row in rows if row.good >= target_share), key=lambda row: row.replicas, default=None)


def plot_plan(rows: Sequence[PlanRow], path: Path, *, title: str, target_share: float) -> None:
    """Draws TTFT, TPOT and the share of good requests over the number of replicas.

    Raises:
        PlotError: matplotlib is not there, or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"plot: needs matplotlib; {how_to_install('plot')}") from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    sizes = [row.replicas for row in rows]
    for name, values in (("TTFT", [row.ttft_ms for row in rows]), ("TPOT", [row.tpot_ms for row in rows])):
        [line] = above.plot(sizes, [p50 for p50, _ in values], marker="o", label=f"{name} p50")
        above.plot(sizes, [p99 for _, p99 in values], marker="o", ls="--", c=line.get_color(), label=f"{name} p99")
    above.set(title=title, ylabel="ms", xscale="log", yscale="log")
    above.legend()
    below.plot(sizes, [100 * row.good for row in rows], marker="o", label="requests within the target")
    below.plot(sizes, [100 * row.hit_rate for row in rows], marker="s", label="prompt tokens from the cache")
    below.plot(sizes, [100 * row.busy for row in rows], marker="^", label="replicas' time used")
    below.axhline(100 * target_share, ls=":", c="grey")
    below.set(xlabel="replicas", ylabel="%")
    below.legend()
    for axes in (above, below):
        axes.grid(visible=True, which="both", alpha=0.2)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"plot: {path}: {error}") from error


def _spread(seconds: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    if not len(seconds):
        return math.nan, math.nan
    low, high = np.percentile(seconds, [50, 99])
    return 1e3 * float(low), 1e3 * float(high)


def _weighted_spread(gaps: Sequence[tuple[float, int]]) -> tuple[float, float]:
    if not gaps:
        return math.nan, math.nan
    values, counts = (np.array(column) for column in zip(*gaps, strict=True))
    order = values.argsort()
    places = counts[order].cumsum()
    low, high = (order[np.searchsorted(places, share * places[-1])] for share in (0.5, 0.99))
    return 1e3 * float(values[low]), 1e3 * float(values[high])
