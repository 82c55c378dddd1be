"""BatcherStats: what the Batcher counts."""

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

# Requests whose times make up the reported medians.
RECENT = 256


@dataclass(slots=True)
class BatcherStats:
    """Counters since the start, and the times of recent requests in seconds."""

    steps: int = 0
    scheduled_entries: int = 0  # sequences in all steps together
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0  # prompt tokens not prefilled, thanks to seq_cp
    reused_tokens: int = 0  # prompt tokens not prefilled, thanks to the prefix cache
    generation_tokens: int = 0
    accepted: int = 0
    refused: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    preemptions: int = 0  # sequences whose blocks were taken
    swaps: int = 0  # of those, the ones whose KV was kept in host memory
    step_seconds: float = 0.0
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    latency: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def count_step(self, num_entries: int, seconds: float) -> None:
        """Books one forward over `num_entries` sequences."""
        self.steps += 1
        self.scheduled_entries += num_entries
        self.step_seconds += seconds

    def count_finished(self, reason: str, seconds: float) -> None:
        """Books a request's end after `seconds`."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.latency.append(seconds)

    def median_latency(self) -> float | None:
        """Seconds from acceptance to the end, over recent requests; None before the first."""
        return _median(self.latency)

    def snapshot(self) -> dict[str, Any]:
        """The counters as plain data, the times as medians."""
        data = asdict(self)
        data["ttft_p50"] = _median(self.ttft)
        data["latency_p50"] = _median(self.latency)
        del data["ttft"], data["latency"]
        data["mean_batch_size"] = self.scheduled_entries / self.steps if self.steps else 0.0
        return data


def _median(values: deque[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None
