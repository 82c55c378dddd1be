"""The figures of a benchmark as a table for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "itl_before_ms", "itl_during_ms")
_NAMES = {
    "request_throughput": "requests/s",
    "request_goodput": "goodput, requests/s",
    "output_throughput": "output tok/s",
    "total_token_throughput": "tok/s, prompts too",
    "prefill_tok_s": "prefill tok/s",
    "decode_tok_s": "decode tok/s",
    "percent_of_floor": "% of the floor",
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "e2el_ms": "E2EL",
    "itl_before_ms": "ITL before the prefill",
    "itl_during_ms": "ITL during it",
    "context_logits_rows": "rows of context logits",
    "generation_logits_rows": "rows of generation logits",
}


def results_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each run; latencies in milliseconds, p50 and p99."""
    table = Table(caption="latencies in ms: p50 / p99", header_style="bold")
    table.add_column()
    for run in runs:
        table.add_column(run["workload"], justify="right")
    table.add_row("completed", *(f"{run['completed']} of {run['num_prompts']}" for run in runs))
    if any(run["failed"] for run in runs):
        table.add_row("[red]failed", *(", ".join(f"{code} {n}" for code, n in run["failed"].items()) for run in runs))
    table.add_row("seconds", *(f"{run['duration_s']:.1f}" for run in runs))
    for name, title in _NAMES.items():
        if any(run.get(name) is not None for run in runs):
            table.add_row(title, *(_plain(name, run.get(name)) for run in runs))
    return table


def _plain(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in _LATENCIES:
        return f"{value['p50']:,.1f} / {value['p99']:,.1f}"
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"
