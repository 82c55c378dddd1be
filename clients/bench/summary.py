"""Summary: a load's run in figures, under vLLM's names. Plain data, ready for JSON."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from genbatch.clients.bench.goodput import Goodput
from genbatch.clients.bench.load_run import LoadRun
from genbatch.clients.bench.percentile import percentile
from genbatch.clients.bench.request_times import RequestTimes

LATENCIES = ("ttft", "tpot", "itl", "e2el")


def summary(run: LoadRun, goodput: Goodput | None = None) -> dict[str, Any]:
    """Throughputs a second and latencies in milliseconds (mean, p50, p99) of the requests that did not fail."""
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
    """The latencies of these requests; None where there is none, as of the ITL of single tokens."""
    found = {
        "ttft": [one.ttft for one in times],
        "tpot": [one.tpot for one in times if one.tpot is not None],
        "itl": [gap for one in times for gap in one.itl],
        "e2el": [one.e2el for one in times],
    }
    return {f"{name}_ms": spread_ms(found[name]) for name in LATENCIES}


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50 and p99 in milliseconds."""
    if not seconds:
        return None
    return {
        "mean": fmean(seconds) * 1e3,
        "p50": percentile(seconds, 50) * 1e3,
        "p99": percentile(seconds, 99) * 1e3,
    }


def decode_rate(times: Sequence[RequestTimes]) -> float | None:
    """Tokens a second of all requests together while every one of them decodes; None if there is no such time.

    That is from the last one's first token to the first one's last token.
    """
    if not times or any(one.error is not None for one in times):
        return None
    begin = max(one.token_at[0] for one in times)
    end = min(one.token_at[-1] for one in times)
    if end <= begin:
        return None
    return sum(begin < at <= end for one in times for at in one.token_at) / (end - begin)


def prefill_rate(times: Sequence[RequestTimes]) -> float | None:
    """Prompt tokens a second until every request has its first token; what the first ones decode then is in it."""
    if not times or any(one.error is not None for one in times):
        return None
    elapsed = max(one.token_at[0] for one in times) - min(one.sent_at for one in times)
    return sum(one.prompt_tokens - one.cached_tokens for one in times) / elapsed


def disturbance(times: Sequence[RequestTimes]) -> dict[str, Any]:
    """W6: the ITL of all requests but the last, before the last one was sent and until its first token came."""
    *others, last = times
    if last.error is not None:
        return {"itl_before_ms": None, "itl_during_ms": None}
    before: list[float] = []
    during: list[float] = []
    for one in others:
        for at, gap in zip(one.token_at[1:], one.itl, strict=True):
            if at <= last.sent_at:
                before.append(gap)
            elif at - gap < last.token_at[0]:
                during.append(gap)
    return {"itl_before_ms": spread_ms(before), "itl_during_ms": spread_ms(during)}
