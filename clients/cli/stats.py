"""`genbatch stats`: what a service has counted."""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from genbatch.clients.cli.command import UsageError, run_command, with_flag_groups
from genbatch.clients.cli.connection import AddressFlags, address_of, remote_client
from genbatch.nif.extras import how_to_install

# Heading -> {name in the stats: what a person reads}; whatever else a service counts comes last, as it is.
_SECTIONS = {
    "Service": {"model": "model", "runner": "runner", "n_parallel": "sequences at once"},
    "Requests": {
        "requests_running": "running",
        "requests_waiting": "waiting",
        "accepted": "accepted",
        "refused": "refused",
        "refusals": "refused, by code",
        "finished": "finished",
        "preemptions": "paused",
        "swaps": "paused, KV in host memory",
    },
    "Tokens": {
        "prompt_tokens": "of prompts",
        "prefilled_tokens": "prefilled",
        "shared_tokens": "shared (seq_cp)",
        "reused_tokens": "reused (prefix cache)",
        "generation_tokens": "generated",
        "drafted_tokens": "drafted (prompt lookup)",
        "accepted_draft_tokens": "of those, right",
    },
    "Steps": {
        "steps": "steps",
        "mean_batch_size": "mean batch size",
        "step_seconds": "seconds in steps",
        "decode_tokens_per_s": "tok/s decoded, lately",
        "prefill_tokens_per_s": "tok/s prefilled, lately",
        "ttft_p50": "median TTFT, s",
        "ttft_p99": "99th percentile, s",
        "latency_p50": "median latency, s",
        "latency_p99": "99th percentile, s",
        "service_p50": "median time with a slot, s",
        "service_p99": "99th percentile, s",
    },
    "KV cache": {
        "kv_block_size": "positions a block",
        "kv_blocks_max": "blocks",
        "kv_blocks_used": "used",
        "kv_blocks_free": "free",
        "kv_bytes": "bytes",
        "prefix_cache_queries": "prompt tokens looked up",
        "prefix_cache_hits": "of those, found",
        "swapped_bytes": "bytes swapped out",
        "held_prompts": "system prompts held",
    },
}
# Said by another row already, or for programs and `genbatch top`.
_LEFT_OUT = {"scheduled_entries", "histograms", "slots", "tenants"}


@with_flag_groups
def stats(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print them as /metrics does; needs the extra genbatch[http].")
    ] = False,
    service: AddressFlags,
) -> None:
    """Show what a running service has counted.

    Examples:

      genbatch stats

      genbatch stats --connect tcp://127.0.0.1:5555
    """
    run_command(partial(_stats, json, prometheus, service))


async def _stats(json: bool, prometheus: bool, service: AddressFlags) -> None:
    async with remote_client(address_of(service), service) as client:
        counted = await client.stats()
    if prometheus:
        sys.stdout.write(_exposition(counted))
    elif json:
        sys.stdout.write(msgspec.json.encode(counted).decode() + "\n")
    else:
        for model, own in counted.get("by_model", {"": counted}).items():
            if model:
                Console().rule(model)
            Console().print(stats_table(own))


def _exposition(counted: Mapping[str, Any]) -> str:
    try:
        from genbatch.actors.observing.metrics import render
    except ImportError as error:
        raise UsageError(f"prometheus: {error.name} is not installed; {how_to_install('http')}") from error
    return render(counted)[0].decode()


def stats_table(counted: Mapping[str, Any]) -> Table:
    """The counters in sections."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="cyan")
    table.add_column(justify="right")
    shown = set(_LEFT_OUT)
    for heading, names in _SECTIONS.items():
        table.add_row(f"[bold white]{heading}")
        for name, title in names.items():
            if name in counted:
                table.add_row(f"  {title}", _plain(counted[name]))
        shown |= names.keys()
    others = {name: value for name, value in counted.items() if name not in shown}
    if others:
        table.add_row("[bold white]Others")
        for name, value in others.items():
            table.add_row(f"  {name}", _plain(value))
    return table


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "-"
    return f"{value:,}" if isinstance(value, int) else str(value)
