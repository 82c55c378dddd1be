"""The Batcher's counters in Prometheus' exposition format, under vLLM's metric names with our prefix.

    body, content_type = render(await batcher.call(StatsRequest(), control=True))

The stats may come from another process. So all metrics are computed from plain data, at the time of a scrape.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

PREFIX = "genbatch:"

# Metric -> (name in the stats, help). Prometheus adds _total to counters.
_GAUGES = {
    "num_requests_running": ("requests_running", "Sequences that hold a slot."),
    "num_requests_waiting": ("requests_waiting", "Sequences that wait for a slot."),
    "kv_blocks_free": ("kv_blocks_free", "KV blocks that can be allocated."),
    "prefix_kept_blocks": (
        "prefix_kept_blocks",
        "Free KV blocks that are evicted last, because requests asked for it.",
    ),
    "swapped_bytes": ("swapped_bytes", "Bytes of host memory that hold the KV of paused sequences."),
    "decode_tokens_per_second": ("decode_tokens_per_s", "Generated tokens per second, over the last 10 seconds."),
    "prefill_tokens_per_second": ("prefill_tokens_per_s", "Prompt tokens evaluated per second, over 10 seconds."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of accepted prompts."),
    "generation_tokens": ("generation_tokens", "Generated tokens."),
    "spec_decode_num_draft_tokens": ("drafted_tokens", "Tokens drafted by prompt lookup or a draft model."),
    "spec_decode_num_accepted_tokens": ("accepted_draft_tokens", "Drafted tokens that were accepted."),
    "embedded_texts": ("embedded_texts", "Texts that were embedded or scored."),
    "num_preemptions": ("preemptions", "Sequences that lost their KV blocks to others."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "shared_prompt_tokens": ("shared_tokens", "Prompt tokens shared with another sequence or a held prompt."),
    "steps": ("steps", "Forward passes."),
    "step_seconds": ("step_seconds", "Seconds in forward passes."),
}
_LABELLED_COUNTERS = {
    "request_success": ("finished", "finished_reason", "Ended requests, by finish reason."),
    "admission_rejections": ("refusals", "code", "Refused requests, by error code."),
    "prefix_disk_blocks": ("prefix_disk", "event", "Blocks of the prefix cache on disk: read, written; its faults."),
    "prefix_recomputed_tokens": ("prefix_recomputed", "cause", "Prompt tokens evaluated again, by cause."),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "From one token of a sequence to the next.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival to its slot.",
    "request_prefill_time_seconds": "From a request's slot to its first token.",
    "request_decode_time_seconds": "From a request's first token to its end.",
    "request_prompt_tokens": "Tokens of an ended request's prompt.",
    "request_generation_tokens": "Generated tokens of an ended request.",
    "iteration_tokens_total": "Tokens in a forward pass.",
}
# Counters of a service with its engine in another process; they stay while the engine is down.
_GATEWAY_COUNTERS = {
    "engine_restarts": ("engine_restarts", "Engines started after an engine had died."),
    "requests_replayed": ("requests_replayed", "Requests that continued on another engine."),
    "requests_lost": ("requests_lost", "Requests that ended with their engine's death."),
    "model_loads": ("loads", "Loads of a model that is served on demand."),
    "model_load_failures": ("failed_loads", "Loads that failed."),
}
_LABEL = "model_name"


def render(stats: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the exposition of a StatsRequest's reply, and its content type.

    Without an engine the exposition has only the gateway's metrics.
    """
    registry = CollectorRegistry()
    # Each of several models has its own series, with its name as the label.
    registry.register(_StatsCollector(list(stats.get("by_model", {"": stats}).values())))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _StatsCollector(Collector):
    """The metrics of one scrape.

    Args:
        of_models: the stats of each model.
    """

    def __init__(self, of_models: Sequence[Mapping[str, Any]]) -> None:
        self._of_models = of_models

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of every model."""
        families: dict[str, Metric] = {}
        for stats in self._of_models:
            for family in _ModelStats(stats).collect():
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        yield from families.values()


class _ModelStats:
    """One model's metrics."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats
        self._model = str(stats.get("model", ""))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics in the order of the tables above."""
        state = self._stats.get("engine")  # None if the engine is a thread
        if "loads" in self._stats:
            yield _gauge("model_loaded", "Whether a model on demand is loaded, 0 or 1.", self._model, state == "up")
        if state in ("up", "down"):
            yield _gauge("engine_up", "Whether there is an engine, 0 or 1.", self._model, state == "up")
        if state is not None:
            yield from self._counters(_GATEWAY_COUNTERS)
        if state in (None, "up"):
            yield from self._engine()

    def _engine(self) -> Iterator[Metric]:
        stats, model = self._stats, self._model
        usage = stats["kv_blocks_used"] / stats["kv_blocks_max"]
        yield _gauge("kv_cache_usage_perc", "Share of the KV blocks that are held, 0 to 1.", model, usage)
        for name, (key, text) in _GAUGES.items():
            yield _gauge(name, text, model, stats[key])
        yield from self._counters(_COUNTERS)
        for name, (key, label, text) in _LABELLED_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=[_LABEL, label])
            for value, count in stats[key].items():
                counter.add_metric([model, value], count)
            yield counter
        for name, text in _HISTOGRAMS.items():
            yield _histogram(name, text, model, stats["histograms"][name])

    def _counters(self, families: Mapping[str, tuple[str, str]]) -> Iterator[Metric]:
        for name, (key, text) in families.items():
            if key not in self._stats:
                continue  # a counter of an engine that is down
            counter = CounterMetricFamily(PREFIX + name, text, labels=[_LABEL])
            counter.add_metric([self._model], self._stats[key])
            yield counter


def _gauge(name: str, text: str, model: str, value: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(PREFIX + name, text, labels=[_LABEL])
    gauge.add_metric([model], value)
    return gauge


def _histogram(name: str, text: str, model: str, data: Mapping[str, Any]) -> HistogramMetricFamily:
    histogram = HistogramMetricFamily(PREFIX + name, text, labels=[_LABEL])
    ends = [*(str(float(end)) for end in data["le"]), "+Inf"]
    cumulative = [float(count) for count in accumulate(data["counts"])]
    histogram.add_metric([model], list(zip(ends, cumulative, strict=True)), data["sum"])
    return histogram
