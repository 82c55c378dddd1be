"""The Batcher's counters: totals, histograms, rates, each tenant's share, and the time of the last progress."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from genbatch.proto.service_messages import Health, HealthStatus


class Histogram:
    """Counts of values by range.

    Args:
        le: the upper ends of the ranges, inclusive and rising; larger values fall into one more range.
    """

    __slots__ = ("counts", "le", "sum")

    def __init__(self, le: Sequence[float]) -> None:
        self.le = tuple(le)
        self.counts = [0] * (len(self.le) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Book one value."""
        self.counts[bisect_left(self.le, value)] += 1
        self.sum += value

    def snapshot(self) -> dict[str, Any]:
        """Return plain data: `le`, `counts` (not cumulative, one more than `le`) and `sum`."""
        return {"le": list(self.le), "counts": list(self.counts), "sum": self.sum}


# The rate's window in whole seconds: long enough for a steady value, short enough to follow a change.
WINDOW_S = 10


class RecentRate:
    """A rate over recent seconds, kept as one count per second."""

    def __init__(self) -> None:
        self._counts: deque[list[int]] = deque(maxlen=WINDOW_S + 1)  # [second, count]
        self._since: float | None = None  # time of the first count after a silent window

    def add(self, now: float, count: int) -> None:
        """Book `count` at the time `now`, in seconds on a monotonic clock."""
        second = int(now)
        if self._since is None or not self._counts or self._counts[-1][0] < second - WINDOW_S:
            self._counts.clear()
            self._since = now
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1][1] += count
        else:
            self._counts.append([second, count])

    def per_second(self, now: float) -> float:
        """Return the mean rate since the window's start or the first count, if that is later; over at least 1 s."""
        if self._since is None:
            return 0.0
        start = max(self._since, int(now) - WINDOW_S)
        total = sum(count for second, count in self._counts if second >= int(now) - WINDOW_S)
        return total / max(now - start, 1.0)


# Clients choose the names, so their number is unbounded: tenants after the first 32 are counted together.
MAX_TENANTS = 32
OTHERS = "other"


@dataclass(slots=True)
class TenantShare:
    """One tenant's counters."""

    requests: int = 0
    running: int = 0  # requests accepted and not ended
    prompt_tokens: int = 0
    generation_tokens: int = 0


class TenantShares:
    """The shares by tenant; requests without a tenant are counted under the name ""."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}

    def of(self, tenant: str) -> TenantShare:
        """Return the share in which a tenant's requests are booked."""
        share = self._shares.get(tenant)
        if share is None:
            name = tenant if len(self._shares) < MAX_TENANTS else OTHERS
            share = self._shares.setdefault(name, TenantShare())
        return share

    def snapshot(self) -> dict[str, Any]:
        """Return plain data: {tenant: counters}."""
        return {name: asdict(share) for name, share in self._shares.items()}


# The number of recent requests in the reported quantiles.
RECENT = 256

# Upper ends of the ranges. They are vLLM's, with shorter times added: a step of a small model takes a millisecond.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
           160.0, 640.0, 2560.0)  # fmt: skip
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                  7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST_S = (0.005, 0.025, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
              120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_REQUEST_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))

HISTOGRAMS: dict[str, Sequence[float]] = {
    "time_to_first_token_seconds": _TTFT_S,
    "inter_token_latency_seconds": _INTER_TOKEN_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _REQUEST_S,
    "request_prefill_time_seconds": _REQUEST_S,
    "request_decode_time_seconds": _REQUEST_S,
    "request_prompt_tokens": _REQUEST_TOKENS,
    "request_generation_tokens": _REQUEST_TOKENS,
    "iteration_tokens_total": _STEP_TOKENS,
}


@dataclass(slots=True)
class BatcherStats:
    """Counters and histograms since the start, and recent measurements; times are in seconds."""

    steps: int = 0
    scheduled_entries: int = 0  # sequences in all steps together
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0  # prompt tokens not prefilled, thanks to seq_cp
    reused_tokens: int = 0  # prompt tokens not prefilled, thanks to the prefix cache
    generation_tokens: int = 0
    drafted_tokens: int = 0  # by prompt lookup or a draft model
    accepted_draft_tokens: int = 0  # of those, the correct ones: each saved a step
    embedded_texts: int = 0
    accepted: int = 0
    refused: int = 0
    refusals: dict[str, int] = field(default_factory=dict)  # of those, by error code
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    preemptions: int = 0  # sequences that lost their blocks
    swaps: int = 0  # of those, the sequences with KV kept in host memory
    step_seconds: float = 0.0
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    latency: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    service: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # from taking a slot to the end
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(le) for name, le in HISTOGRAMS.items()}
    )
    tenants: TenantShares = field(default_factory=TenantShares)
    decode_rate: RecentRate = field(default_factory=RecentRate)
    prefill_rate: RecentRate = field(default_factory=RecentRate)
    _rated: tuple[int, int] = (0, 0)  # generated and prefilled tokens already booked in the rates

    def count_step(self, num_entries: int, num_tokens: int, seconds: float) -> None:
        """Book one forward over `num_entries` sequences and `num_tokens` tokens."""
        self.steps += 1
        self.scheduled_entries += num_entries
        self.step_seconds += seconds
        self.histograms["iteration_tokens_total"].observe(num_tokens)

    def count_refused(self, code: str) -> None:
        """Book a request that was not accepted."""
        self.refused += 1
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def count_finished(self, reason: str, seconds: float) -> None:
        """Book a request's end after `seconds`."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.latency.append(seconds)
        self.histograms["e2e_request_latency_seconds"].observe(seconds)

    def median_service(self) -> float | None:
        """Return the median seconds from a request's slot to its end, over recent requests; None before the first."""
        return _quantile(self.service, 0.5)

    def update_rates(self, now: float) -> None:
        """Book the tokens counted since the last call in the rates."""
        generated, prefilled = self._rated
        if self.generation_tokens > generated:
            self.decode_rate.add(now, self.generation_tokens - generated)
        if self.prefilled_tokens > prefilled:
            self.prefill_rate.add(now, self.prefilled_tokens - prefilled)
        self._rated = self.generation_tokens, self.prefilled_tokens

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return all values as plain data at the time `now`: recent times as quantiles, rates in tokens per second."""
        self.update_rates(now)
        data = {name: getattr(self, name) for name in _COUNTERS}
        data["refusals"], data["finished"] = dict(self.refusals), dict(self.finished)
        for name, values in (("ttft", self.ttft), ("latency", self.latency), ("service", self.service)):
            data[f"{name}_p50"] = _quantile(values, 0.5)
            data[f"{name}_p99"] = _quantile(values, 0.99)
        data["mean_batch_size"] = self.scheduled_entries / self.steps if self.steps else 0.0
        data["decode_tokens_per_s"] = self.decode_rate.per_second(now)
        data["prefill_tokens_per_s"] = self.prefill_rate.per_second(now)
        data["histograms"] = {name: histogram.snapshot() for name, histogram in self.histograms.items()}
        data["tenants"] = self.tenants.snapshot()
        return data


_COUNTERS = tuple(field.name for field in fields(BatcherStats) if field.type in (int, float))


def _quantile(values: deque[float], share: float) -> float | None:
    """Return the value above `share` of the values; None for no values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


class StallWatch:
    """Measures the time since the Batcher's last progress.

    Args:
        stall_s: seconds without the end of a step, while work is pending, after which the Batcher counts as stuck.
        now: seconds on the event loop's clock.
    """

    def __init__(self, stall_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._since = now

    def restart(self, now: float) -> None:
        """Restart the watch after a step has ended, or when work arrives at an idle Batcher."""
        self._since = now

    def health(self, now: float, *, num_open: int, draining: bool, steps: int, running: int, waiting: int) -> Health:
        """Return the health of the service while `num_open` requests are open."""
        stalled_s = now - self._since if num_open else 0.0
        status: HealthStatus = "draining" if draining else "ready"
        if stalled_s > self._stall_s:
            status = "stuck"
        return Health(
            status=status,
            steps=steps,
            requests_running=running,
            requests_waiting=waiting,
            stalled_s=stalled_s,
        )
