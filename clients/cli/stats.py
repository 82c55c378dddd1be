"""`genbatch stats`, `top` and `adapters`: show the counters of a running service, and change its adapters.

`genbatch stats` prints the counters.

`genbatch top` shows them live, on a screen of the terminal's size, with the changes since the last request.
"""

import os
import sys
import termios
import tty
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio
import typer
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from genbatch.clients.cli.command import UsageError, printable, run_command, with_flag_groups
from genbatch.clients.cli.connection import AddressFlags, address_of, remote_client
from genbatch.clients.interface import Client
from genbatch.nif.models.model_names import written_path
from genbatch.proto.errors import GenbatchError

# Heading -> {name in the stats: its label}. Other counters follow at the end under their own names.
_SECTIONS = {
    "Service": {"model": "model", "runner": "runner", "n_parallel": "sequences at once"},
    "On demand": {
        "state": "state",
        "unload_in_s": "seconds until it is unloaded",
        "model_bytes": "bytes",
        "loads": "loads",
        "failed_loads": "failed loads",
        "requests_waiting_for_load": "requests that wait for it",
    },
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
        "drafted_tokens": "drafted",
        "accepted_draft_tokens": "accepted drafts",
    },
    "Steps": {
        "steps": "steps",
        "mean_batch_size": "mean batch size",
        "step_seconds": "seconds in steps",
        "decode_tokens_per_s": "recent decode, tok/s",
        "prefill_tokens_per_s": "recent prefill, tok/s",
        "ttft_p50": "TTFT, median, s",
        "ttft_p99": "TTFT, 99th percentile, s",
        "latency_p50": "latency, median, s",
        "latency_p99": "latency, 99th percentile, s",
        "service_p50": "time with a slot, median, s",
        "service_p99": "time with a slot, 99th percentile, s",
    },
    "KV cache": {
        "kv_block_size": "positions of a block",
        "kv_blocks_max": "blocks",
        "kv_blocks_used": "used",
        "kv_blocks_free": "free",
        "kv_bytes": "bytes",
        "prefix_cache_queries": "prefix cache: tokens looked up",
        "prefix_cache_hits": "prefix cache: tokens found",
        "prefix_kept_blocks": "prefix cache: blocks kept on request",
        "swapped_bytes": "bytes swapped out",
        "held_prompts": "shared system prompts",
    },
}
# Counters that repeat another row, or that are for programs and `genbatch top`.
_LEFT_OUT = {"scheduled_entries", "histograms", "slots", "tenants"}


@with_flag_groups
def stats(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print them in Prometheus' format, as /metrics.")
    ] = False,
    service: AddressFlags,
) -> None:
    """Show the counters of a running service.

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
    from genbatch.actors.observing.metrics import render

    return render(counted)[0].decode()


def stats_table(counted: Mapping[str, Any]) -> Table:
    """Return the counters in sections."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="cyan")
    table.add_column(justify="right")
    shown = set(_LEFT_OUT)
    for heading, names in _SECTIONS.items():
        if heading == "On demand" and "loads" not in counted:
            continue
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


# The number of kept rates: the columns of a sparkline on a wide terminal.
MAX_LOOKS = 240


class TopHistory:
    """The stats of a service over time; `stats` is the last report."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}
        self.others: list[str] = []  # the service's other models
        self.rates: deque[float] = deque(maxlen=MAX_LOOKS)  # generated tokens per second, one rate for each update
        self.shares: list[tuple[str, float]] = []  # (tenant, its share of the tokens since the last update)
        self._at = 0.0

    def add(self, stats: Mapping[str, Any], now: float) -> None:
        """Add the stats at the time `now`, in seconds on a monotonic clock."""
        before, seconds = self.stats, now - self._at
        self.stats, self._at = stats, now
        if not before or stats["generation_tokens"] < before["generation_tokens"]:  # the first update, or a restart
            self.shares = _shares(stats["tenants"], {})
            return
        if seconds > 0:
            self.rates.append((stats["generation_tokens"] - before["generation_tokens"]) / seconds)
        self.shares = _shares(stats["tenants"], before["tenants"]) or self.shares


def _shares(tenants: Mapping[str, Any], before: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the tenants with tokens, the largest first."""
    grown = {
        name: counted["generation_tokens"] - before.get(name, {}).get("generation_tokens", 0)
        for name, counted in tenants.items()
    }
    total = sum(grown.values())
    if not total:
        return []
    return sorted(((name, count / total) for name, count in grown.items() if count), key=lambda pair: -pair[1])


# From this width on there is room for the tenants beside the slots.
_WIDE = 110
_TENANTS_WIDTH = 34
_SUMMARY_LINES = 7
_BAR_WIDTH, _NARROW_BAR_WIDTH = 28, 14
_LABEL_WIDTH = 9
_CAPTION_WIDTH = 16  # behind a bar
_PROGRESS_WIDTH = 12
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PHASES = {"prefilling": "yellow", "decoding": "green"}


def top_screen(history: TopHistory, address: str, width: int, height: int, *, error: str = "") -> RenderableType:
    """Return the whole screen; `error` is the reason for missing new numbers."""
    layout = Layout()
    body: Layout = Layout(name="body")
    layout.split_column(
        Layout(_title(history.stats, address, error), size=1),
        Layout(_summary(history, width), size=_SUMMARY_LINES),
        body,
        Layout(Text(_foot(history.others), style="dim", no_wrap=True, overflow="ellipsis"), size=1),
    )
    room = height - _SUMMARY_LINES - 2
    slots = _slots(history.stats, room, wide=width >= _WIDE)
    if width >= _WIDE:
        body.split_row(Layout(slots), Layout(_tenants(history.shares, room), size=_TENANTS_WIDTH))
    else:
        body.update(slots)
    return layout


def _foot(others: Sequence[str]) -> str:
    return " q quits" + (f" · --model shows another: {_safe(', '.join(others))}" if others else "")


def _title(stats: Mapping[str, Any], address: str, error: str) -> Text:
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(" genbatch ", style="bold black on cyan")
    if stats:
        title.append(f" {_safe(stats['model'])}", style="bold").append(f" · {_safe(stats['runner'])}", style="dim")
    title.append(f" · {address}", style="dim")
    if error:
        title.append(f"  {_safe(error)}", style="bold red")
    return title


def _summary(history: TopHistory, width: int) -> Panel:
    """Return bars on the left, and speeds on the right."""
    stats = history.stats
    if not stats:
        return Panel(Text("waiting for the service", style="dim"), border_style="dim")
    bar = _BAR_WIDTH if width >= _WIDE else _NARROW_BAR_WIDTH
    left = _LABEL_WIDTH + bar + _CAPTION_WIDTH
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(width=left)
    grid.add_column(ratio=1)
    grid.add_row(_gauges(stats, bar), _pace(history, width - left - 6))
    return Panel(grid, border_style="cyan", padding=(0, 1))


def _gauges(stats: Mapping[str, Any], bar: int) -> Text:
    running, slots, waiting = stats["requests_running"], stats["n_parallel"], stats["requests_waiting"]
    used, blocks = stats["kv_blocks_used"], stats["kv_blocks_max"]
    finished = stats["finished"]
    ended = ", ".join(f"{count} {reason}" for reason, count in finished.items()) or "none"
    text = Text(no_wrap=True, overflow="ellipsis")
    _append_bar(text, "slots", running, slots, bar, f"{running}/{slots}")
    text.append(f"{'queue':{_LABEL_WIDTH}}", style="cyan").append(f"{waiting} waiting", style="bold" if waiting else "")
    text.append(f", {stats['refused']} refused\n", style="yellow" if stats["refused"] else "dim")
    _append_bar(text, "KV", used, blocks, bar, f"{used}/{blocks} blocks")
    text.append(f"{'ended':{_LABEL_WIDTH}}", style="cyan").append(f"{ended}\n")
    text.append(f"{'paused':{_LABEL_WIDTH}}", style="cyan").append(
        f"{stats['preemptions']} times, {stats['swaps']} to host memory"
    )
    return text


def _append_bar(text: Text, label: str, value: int, whole: int, width: int, caption: str) -> None:
    share = value / whole if whole else 0.0
    filled = round(share * width)
    style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    text.append(f"{label:{_LABEL_WIDTH}}", style="cyan")
    text.append("█" * filled, style=style).append("░" * (width - filled), style="dim")
    text.append(f" {caption}\n")


def _pace(history: TopHistory, width: int) -> Text:
    stats = history.stats
    rate = history.rates[-1] if history.rates else stats["decode_tokens_per_s"]
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{rate:,.0f}", style="bold green").append(" tok/s decoded\n", style="cyan")
    text.append(_sparkline(list(history.rates)[-max(width, 1) :]) + "\n", style="green")
    text.append(f"{stats['prefill_tokens_per_s']:,.0f}", style="bold").append(" tok/s prefilled\n", style="cyan")
    for label, name in (("TTFT", "ttft"), ("latency", "latency")):
        text.append(f"{label:8}", style="cyan")
        text.append(f"p50 {_seconds(stats[f'{name}_p50'])} p99 {_seconds(stats[f'{name}_p99'])}\n")
    text.rstrip()
    return text


def _sparkline(values: Sequence[float]) -> str:
    top = max(values, default=0.0)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(steps, -int(-value * steps // top))] if top else _BLOCKS[0] for value in values)


def _slots(stats: Mapping[str, Any], room: int, *, wide: bool) -> Panel:
    """Return a row for each busy slot, as many as fit."""
    table = Table(box=None, expand=True, padding=(0, 1), header_style="bold")
    table.add_column("slot", justify="right", width=4)
    table.add_column("phase", width=10)
    table.add_column("progress", min_width=_PROGRESS_WIDTH, ratio=1)
    for title in ("prompt", "out", "tok/s", "age"):
        table.add_column(title, justify="right", min_width=5, no_wrap=True)
    for title in ("client", "tenant") if wide else ("tenant",):
        table.add_column(title, max_width=24 if wide else 14, no_wrap=True, overflow="ellipsis")
    slots = stats.get("slots", [])
    lines = room - 3
    shown = slots if len(slots) <= lines else slots[: max(lines - 1, 0)]
    for slot in shown:
        table.add_row(*_slot_row(slot, wide=wide))
    more = stats.get("requests_running", 0) - len(shown)
    parts: list[RenderableType] = [table]
    if more > 0:
        parts.append(Text(f"  and {more} more", style="dim"))
    elif not slots:
        parts.append(Text("  nothing runs", style="dim"))
    return Panel(Group(*parts), title="slots", title_align="left", border_style="dim", padding=0)


def _slot_row(slot: Mapping[str, Any], *, wide: bool) -> list[RenderableType]:
    phase, generated, most = slot["phase"], slot["generated_tokens"], slot["max_tokens"]
    rate = slot["tokens_per_s"]
    prefilling = phase == "prefilling"
    done, whole = (slot["computed_tokens"], slot["prompt_tokens"]) if prefilling else (generated, most)
    tenant = Text(_safe(slot["tenant"]) or "-", style="" if slot["tenant"] else "dim")
    return [
        str(slot["slot"]),
        Text(phase, style=_PHASES.get(phase, "")),
        _progress(done / whole if whole else 0.0, _PHASES.get(phase, "")),
        str(slot["prompt_tokens"]),
        f"{generated}/{most}",
        "-" if rate is None else f"{rate:.1f}",
        _seconds(slot["seconds"]),
        *([Text(_safe(slot["client"]) or "-"), tenant] if wide else [tenant]),
    ]


def _progress(share: float, style: str) -> Text:
    filled = min(_PROGRESS_WIDTH, round(share * _PROGRESS_WIDTH))
    return Text("━" * filled, style=style).append("─" * (_PROGRESS_WIDTH - filled), style="dim")


def _tenants(shares: Sequence[tuple[str, float]], room: int) -> Panel:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(width=12)
    table.add_column(justify="right", width=4)
    for name, share in shares[: max(room - 2, 0)]:
        filled = round(share * 12)
        bar = Text("█" * filled, style="magenta").append("░" * (12 - filled), style="dim")
        table.add_row(Text(_safe(name) or "(no tenant)"), bar, f"{share:.0%}")
    return Panel(table, title="tenants' tokens", title_align="left", border_style="dim")


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _safe(text: object) -> str:
    """Remove control characters from a name, since clients choose names."""
    return printable(str(text), is_terminal=True).replace("\n", " ").replace("\t", " ")


# Seconds after which the screen shows that the service does not answer.
ANSWER_S = 5.0


@with_flag_groups
def top(
    *,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, metavar="SECONDS", help="Seconds between two updates.")
    ] = 1.0,
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="NAME", help="The model to watch, of several; the default is the first."),
    ] = "",
    service: AddressFlags,
) -> None:
    """Watch a service: slots, queue, KV memory, speed and tenants. Leave with q or Ctrl-C.

    Examples:

      genbatch top

      genbatch top --connect tcp://127.0.0.1:5555 --interval 0.5
    """
    run_command(partial(_top, service, interval, model))


async def _top(service: AddressFlags, interval: float, model: str) -> None:
    if not _is_terminal():
        raise UsageError("genbatch top needs a terminal; programs can use `genbatch stats --json`")
    address = address_of(service)
    console, history = Console(), TopHistory()
    async with remote_client(address, service) as client:
        with _keys_at_once(), Live(console=console, screen=True, auto_refresh=False) as live:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_quit_on_q, nursery.cancel_scope)
                while True:
                    error = await _look(client, history, model)
                    width, height = console.size
                    live.update(top_screen(history, address, width, height, error=error), refresh=True)
                    await trio.sleep(interval)


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


async def _look(client: Client, history: TopHistory, model: str = "") -> str:
    """Add the stats of a model ("" is the first); return an error's text, or "" for none."""
    try:
        with trio.fail_after(ANSWER_S):
            stats = await client.stats()
            by_model = stats.get("by_model") or {stats.get("model", ""): stats}
            if model and model not in by_model:
                return f"no model {model} is served; there are {', '.join(by_model)}"
            stats = by_model[model] if model else next(iter(by_model.values()))
            history.others = [name for name in by_model if name != (model or next(iter(by_model)))]
            if stats.get("engine") == "down":
                return "the engine is down"
            if stats.get("engine", "up") != "up":
                return f"{stats['model']} is {stats['engine']}; a request loads it"
            history.add(stats, trio.current_time())
    except GenbatchError as error:
        return str(error)
    except trio.TooSlowError:
        return "the service does not answer"
    return ""


async def _quit_on_q(scope: trio.CancelScope) -> None:
    while True:
        await trio.lowlevel.wait_readable(sys.stdin.fileno())
        pressed = os.read(sys.stdin.fileno(), 64)
        if not pressed or pressed[:1] in b"qQ":
            scope.cancel()
            return


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Let the terminal deliver each key at once, and not show it."""
    settings = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


adapters = typer.Typer(
    name="adapters",
    help="Load, list and unload the LoRA adapters of a running service.",
    no_args_is_help=True,
    add_completion=False,
)
_NAME = Annotated[str, typer.Argument(metavar="NAME", help="The name that requests set as their model.")]


@adapters.command()
@with_flag_groups
def load(
    name: _NAME,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder in PEFT's format, on the service's machine.")
    ],
    *,
    service: AddressFlags,
) -> None:
    """Load a LoRA adapter into a service.

    Example:

      genbatch adapters load sql ./sql-lora --connect ipc:///run/genbatch/zeromq.sock
    """
    run_command(partial(_load, name, written_path(directory).absolute(), service))


@adapters.command()
@with_flag_groups
def unload(
    name: _NAME,
    *,
    timeout_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds after which open requests are cancelled.")
    ] = 30.0,
    service: AddressFlags,
) -> None:
    """Unload a LoRA adapter: refuse new requests for it, and wait for open requests."""
    run_command(partial(_unload, name, timeout_s, service))


@adapters.command("list")
@with_flag_groups
def list_adapters(*, service: AddressFlags) -> None:
    """Print the names of a service's adapters."""
    run_command(partial(_list, service))


async def _load(name: str, directory: Path, service: AddressFlags) -> None:
    async with remote_client(address_of(service), service) as client:
        await client.load_adapter(name, str(directory))
    typer.echo(f"{name} is loaded")


async def _unload(name: str, timeout_s: float, service: AddressFlags) -> None:
    async with remote_client(address_of(service), service) as client:
        ended = await client.unload_adapter(name, timeout_s)
    cancelled = f", {ended.num_cancelled} requests were cancelled" if ended.num_cancelled else ""
    typer.echo(f"{name} is unloaded{cancelled}")


async def _list(service: AddressFlags) -> None:
    async with remote_client(address_of(service), service) as client:
        for card in await client.models():
            if card.parent is not None:
                typer.echo(card.id)
