"""Runs a load: sends it to a service, records the times of all tokens, and summarizes them in vLLM's terms.

    run = await run_load(client, load, arrivals=arrival_times(64, 2.5, seed=1))
    print(len(run.times), run.duration_s)

RequestTimes are the times of one request on the client's clock. Goodput is the number of requests per second that met
every target. The summary is plain data, ready for JSON.
"""

import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import trio
from rich.table import Table

from genbatch.clients.bench.workloads import Case, LoadRequest, ScriptedLoad
from genbatch.clients.interface import Stream
from genbatch.proto.errors import GenbatchError

# The CPU flags that determine the speed of any engine's CPU kernels.
_NOTABLE = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "i8mm")
_CPUINFO = Path("/proc/cpuinfo")


def machine(cpuinfo: Path = _CPUINFO) -> str:
    """Return the CPU's name, the number of cores for this process, and the CPU's relevant instruction sets."""
    fields = _first_processor(cpuinfo)
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    notable = [flag for flag in _NOTABLE if flag in flags]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = "1 core" if cores == 1 else f"{cores} cores"
    return f"{count} of {name}" + (f" ({', '.join(notable)})" if notable else "")


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    try:
        text = cpuinfo.read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of `values`, with linear interpolation between two neighbours.

    Raises:
        ValueError: there are no values, or `percent` is not within 0 to 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"no percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the client's clock.

    Args:
        prompt_tokens, max_tokens: the request's numbers of tokens.
        sent_at: the time at which the client began to send the request.
        token_at: the time at which each token reached the caller.
        ended_at: the time at which the result reached the caller.
        cached_tokens: prompt tokens that the service did not evaluate.
        error: the error's code if the request failed; else None.
    """

    prompt_tokens: int
    max_tokens: int
    sent_at: float
    token_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Return the time to the first token."""
        return self.token_at[0] - self.sent_at

    @property
    def e2el(self) -> float:
        """Return the time from sending to the result."""
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Return the mean time per token after the first; None with one token."""
        count = len(self.token_at)
        return (self.e2el - self.ttft) / (count - 1) if count > 1 else None

    @property
    def itl(self) -> list[float]:
        """Return the times between consecutive tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_at)]


METRICS = ("ttft", "tpot", "e2el")


class GoodputError(ValueError):
    """A goodput target cannot be parsed; the message names it."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"goodput: {text!r} is not METRIC:MILLISECONDS, such as ttft:500; metrics are {', '.join(METRICS)}"
        )


@dataclass(frozen=True, slots=True)
class Goodput:
    """Latency targets in seconds, by metric."""

    limits_s: Mapping[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Goodput":
        """Parse targets such as "ttft:500", in milliseconds. One text may hold several, separated by spaces.

        Raises:
            GoodputError: a target cannot be parsed, or its metric appears twice.
        """
        limits: dict[str, float] = {}
        for text in " ".join(texts).split():
            name, _, value = text.partition(":")
            try:
                limit = float(value)
            except ValueError:
                raise GoodputError(text) from None
            if name not in METRICS or name in limits or not 0 < limit < math.inf:
                raise GoodputError(text)
            limits[name] = limit / 1e3
        return cls(limits)

    def keeps(self, times: RequestTimes) -> bool:
        """Return whether a request succeeded and met every target. An answer of one token cannot miss the TPOT."""
        if times.error is not None:
            return False
        values = {name: getattr(times, name) for name in self.limits_s}
        return all(value is None or value <= self.limits_s[name] for name, value in values.items())


INCOMPLETE = "incomplete"
"""The error of a request that ended with fewer tokens than were asked for."""


class Streams(Protocol):
    """The part of a client that a load needs."""

    def stream(
        self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool
    ) -> AbstractAsyncContextManager[Stream]:
        """See `Client.stream`."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A load that has been sent.

    Args:
        times: each request's times, in the load's order.
        duration_s: seconds from the first request's start to the last request's end.
    """

    load: ScriptedLoad
    times: Sequence[RequestTimes]
    duration_s: float


async def run_load(
    client: Streams,
    load: ScriptedLoad,
    *,
    arrivals: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> LoadRun:
    """Send every request at its arrival time, and read its tokens as they arrive.

    Args:
        arrivals: seconds from the start for each request; None sends all at once.
        max_concurrency: most requests under way at once. A request that waits for others is sent late, and its
            latencies count from its start, as in vLLM.
        on_end: called as each request ends.
    """
    run = _Run(client, load, trio.CapacityLimiter(max_concurrency or len(load.requests)), on_end)
    started_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for index, request in enumerate(load.requests):
            if arrivals is not None:
                await trio.sleep_until(started_at + arrivals[index])
            nursery.start_soon(run.send, index, request)
    sent_at = min(times.sent_at for times in run.times)
    return LoadRun(load, run.times, max(times.ended_at for times in run.times) - sent_at)


class _Run:
    def __init__(
        self, client: Streams, load: ScriptedLoad, slots: trio.CapacityLimiter, on_end: Callable[[], None]
    ) -> None:
        self._client = client
        self._slots = slots
        self._on_end = on_end
        self.times = [RequestTimes(len(request.prompt), request.max_tokens, 0.0) for request in load.requests]
        # Count tokens only if a request waits for the others' tokens.
        self._awaited = max(request.after_tokens for request in load.requests)
        self._ended: set[int] = set()
        self._others = [index for index, request in enumerate(load.requests) if not request.after_tokens]
        self._reached = trio.Event()

    async def send(self, index: int, request: LoadRequest) -> None:
        times = self.times[index]
        if request.after_tokens:
            await self._reached.wait()
        async with self._slots:
            times.sent_at = trio.current_time()
            try:
                await self._read(times, request)
            except GenbatchError as error:
                times.error = error.code
            times.ended_at = trio.current_time()
        self._ended.add(index)
        if self._awaited:
            self._count()
        self._on_end()

    async def _read(self, times: RequestTimes, request: LoadRequest) -> None:
        async with self._client.stream(request.prompt, max_tokens=request.max_tokens, ignore_eos=True) as stream:
            async for _ in stream:
                times.token_at.append(trio.current_time())
                if len(times.token_at) == self._awaited:
                    self._count()
        times.cached_tokens = stream.result.usage.cached_tokens
        if len(times.token_at) != request.max_tokens:
            times.error = INCOMPLETE

    def _count(self) -> None:
        """Start the waiting request once every other request has enough tokens or has ended."""
        if all(len(self.times[index].token_at) >= self._awaited or index in self._ended for index in self._others):
            self._reached.set()


LATENCIES = ("ttft", "tpot", "itl", "e2el")


def summary(run: LoadRun, goodput: Goodput | None = None) -> dict[str, Any]:
    """Return throughputs per second and latencies in milliseconds (mean, p50, p99) of the successful requests."""
    good = [times for times in run.times if times.error is None]
    failures = Counter(times.error for times in run.times if times.error is not None)
    output = sum(len(times.token_at) for times in good)
    prompts = sum(times.prompt_tokens for times in good)
    figures: dict[str, Any] = {
        "workload": run.load.name,
        "num_prompts": len(run.times),
        "completed": len(good),
        "failed": dict(failures),
        "duration_s": run.duration_s,
        "total_input_tokens": prompts,
        "total_output_tokens": output,
        "cached_tokens": sum(times.cached_tokens for times in good),
        "request_throughput": len(good) / run.duration_s,
        "output_throughput": output / run.duration_s,
        "total_token_throughput": (prompts + output) / run.duration_s,
    }
    if goodput is not None and goodput.limits_s:
        figures["request_goodput"] = sum(map(goodput.keeps, run.times)) / run.duration_s
        figures["goodput_limits_ms"] = {name: limit * 1e3 for name, limit in goodput.limits_s.items()}
    return figures | latencies(good)


def latencies(times: Sequence[RequestTimes]) -> dict[str, Any]:
    """Return the latencies of these requests; None if a metric has no value, such as the ITL of single tokens."""
    values = {
        "ttft": [timed.ttft for timed in times],
        "tpot": [timed.tpot for timed in times if timed.tpot is not None],
        "itl": [gap for timed in times for gap in timed.itl],
        "e2el": [timed.e2el for timed in times],
    }
    return {f"{name}_ms": spread_ms(values[name]) for name in LATENCIES}


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean, p50 and p99 in milliseconds."""
    if not seconds:
        return None
    return {
        "mean": fmean(seconds) * 1e3,
        "p50": percentile(seconds, 50) * 1e3,
        "p99": percentile(seconds, 99) * 1e3,
    }


def decode_rate(times: Sequence[RequestTimes]) -> float | None:
    """Return tokens per second of all requests while every one decodes; None if there is no such time.

    The time lasts from the latest first token to the earliest last token.
    """
    if not times or any(request.error is not None for request in times):
        return None
    begin = max(request.token_at[0] for request in times)
    end = min(request.token_at[-1] for request in times)
    if end <= begin:
        return None
    return sum(begin < at <= end for request in times for at in request.token_at) / (end - begin)


def prefill_rate(times: Sequence[RequestTimes]) -> float | None:
    """Return prompt tokens per second until every request has its first token; early decodes share that time."""
    if not times or any(request.error is not None for request in times):
        return None
    elapsed = max(request.token_at[0] for request in times) - min(request.sent_at for request in times)
    return sum(request.prompt_tokens - request.cached_tokens for request in times) / elapsed


def disturbance(times: Sequence[RequestTimes]) -> dict[str, Any]:
    """Return W6's ITL of all requests but the last: before the last was sent, and until its first token."""
    *others, last = times
    if last.error is not None:
        return {"itl_before_ms": None, "itl_during_ms": None}
    before: list[float] = []
    during: list[float] = []
    for request in others:
        for at, gap in zip(request.token_at[1:], request.itl, strict=True):
            if at <= last.sent_at:
                before.append(gap)
            elif at - gap < last.token_at[0]:
                during.append(gap)
    return {"itl_before_ms": spread_ms(before), "itl_during_ms": spread_ms(during)}


async def run_case(
    client: Streams,
    case: Case,
    *,
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    goodput: Goodput | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run a case and return its figures, see `summary`.

    A fixed batch adds its rates. A long prefill adds its disturbance of the other requests.

    Args:
        arrivals, max_concurrency, on_end: see `run_load`.
    """
    run = await run_load(client, case.load, arrivals=arrivals, max_concurrency=max_concurrency, on_end=on_end)
    figures = summary(run, goodput)
    figures["request_rate"] = None if math.isinf(case.request_rate) else case.request_rate
    if case.batch is not None:
        rate = decode_rate(run.times)
        figures |= {"prefill_tok_s": prefill_rate(run.times), "decode_tok_s": rate}
        if case.floor_s is not None:
            figures["floor_tok_s"] = case.batch / case.floor_s
            figures["percent_of_floor"] = None if rate is None else 100 * rate * case.floor_s / case.batch
    if any(request.after_tokens for request in case.load.requests):
        figures |= disturbance(run.times)
    return figures


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
    """Format a column for each run; latencies are p50 and p99 in milliseconds."""
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
