"""The arithmetic of latencies, rates and goodput, over times given by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.clients.bench.goodput import Goodput, GoodputError
from genbatch.clients.bench.load import Load, LoadRequest
from genbatch.clients.bench.load_run import LoadRun
from genbatch.clients.bench.percentile import percentile
from genbatch.clients.bench.request_times import RequestTimes
from genbatch.clients.bench.summary import decode_rate, disturbance, latencies, prefill_rate, summary


def times(sent_at: float, *token_at: float, ended_at: float | None = None, error: str | None = None) -> RequestTimes:
    end = ended_at if ended_at is not None else (token_at or (sent_at,))[-1]
    return RequestTimes(10, len(token_at), sent_at, list(token_at), end, cached_tokens=4, error=error)


def run_of(*requests: RequestTimes, duration_s: float = 10.0) -> LoadRun:
    load = Load("by hand", tuple(LoadRequest((1,) * one.prompt_tokens, max(one.max_tokens, 1)) for one in requests))
    return LoadRun(load, requests, duration_s)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


def test_a_percentile_of_nothing_or_beyond_100_is_refused() -> None:
    for values, percent in (([], 50.0), ([1.0], 101.0), ([1.0], math.nan)):
        with pytest.raises(ValueError, match="percentile"):
            percentile(values, percent)


def test_the_latencies_are_what_their_names_say() -> None:
    one = times(1.0, 1.5, 1.6, 1.9, ended_at=2.1)
    assert one.ttft == pytest.approx(0.5)
    assert one.itl == pytest.approx([0.1, 0.3])
    assert one.e2el == pytest.approx(1.1)
    assert one.tpot == pytest.approx((1.1 - 0.5) / 2)
    assert times(1.0, 1.5).tpot is None


def test_a_summary_counts_what_did_not_fail() -> None:
    figures = summary(
        run_of(times(0.0, 0.1, 0.2), times(0.0, 0.3, 0.4, 0.5), times(0.0, 9.0, error="queue_full"), duration_s=2.0)
    )
    assert (figures["completed"], figures["failed"]) == (2, {"queue_full": 1})
    assert (figures["total_input_tokens"], figures["total_output_tokens"], figures["cached_tokens"]) == (20, 5, 8)
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 2.5
    assert figures["total_token_throughput"] == 12.5
    assert figures["ttft_ms"] == pytest.approx({"mean": 200, "p50": 200, "p99": 298})
    assert figures["itl_ms"]["p50"] == pytest.approx(100)


def test_a_summary_of_failures_alone_has_no_latencies() -> None:
    figures = summary(run_of(times(0.0, error="unavailable")))
    assert (figures["completed"], figures["output_throughput"], figures["ttft_ms"]) == (0, 0.0, None)


def test_single_tokens_have_no_gaps() -> None:
    found = latencies([times(0.0, 1.0)])
    assert (found["itl_ms"], found["tpot_ms"]) == (None, None)
    assert found["ttft_ms"]["p99"] == pytest.approx(1000)


def test_goodput_counts_requests_that_keep_every_promise() -> None:
    kept = times(0.0, 0.1, 0.15, ended_at=0.2)
    slow_start = times(0.0, 0.6, 0.65, ended_at=0.7)
    slow_tokens = times(0.0, 0.1, 0.5, ended_at=0.9)
    failed = times(0.0, 0.1, error="engine_error")
    run = run_of(kept, slow_start, slow_tokens, failed, times(0.0, 0.2), duration_s=4.0)
    assert summary(run, Goodput.parse(["ttft:500 tpot:200"]))["request_goodput"] == 0.5
    assert summary(run, Goodput.parse(["ttft:500", "e2el:150"]))["request_goodput"] == 0.0
    assert "request_goodput" not in summary(run)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "itl:5", "ttft:0", "ttft:nan", "ttft:inf", "ttft:5 ttft:6", "a:b"])
def test_a_promise_that_cannot_be_read_is_refused_by_name(text: str) -> None:
    with pytest.raises(GoodputError, match="goodput"):
        Goodput.parse([text])


def test_the_decode_rate_is_taken_while_everybody_decodes() -> None:
    # From 1.0, the second one's first token, to 2.0, the first one's last: three tokens of each but the bounds.
    first = times(0.0, 0.2, 0.6, 1.0, 1.5, 2.0)
    second = times(0.0, 1.0, 1.4, 1.8, 2.2)
    assert decode_rate([first, second]) == pytest.approx(4 / 1.0)
    assert decode_rate([times(0.0, 0.5, 1.5)]) == pytest.approx(1.0)


def test_there_is_no_decode_rate_if_one_ended_before_another_began_or_failed() -> None:
    assert decode_rate([times(0.0, 0.1, 0.2), times(0.0, 0.3, 0.4)]) is None
    assert decode_rate([times(0.0, 0.1, 0.2), times(0.0, error="cancelled")]) is None
    assert prefill_rate([]) is None


def test_the_prefill_rate_leaves_out_what_was_cached() -> None:
    assert prefill_rate([times(1.0, 2.0), times(1.0, 3.0)]) == pytest.approx(2 * (10 - 4) / 2.0)


def test_the_disturbance_is_told_from_the_time_before() -> None:
    other = times(0.0, 1.0, 1.1, 1.2, 1.9, 2.6, 2.7)  # the gap that ends at 2.6 began during the prefill
    found = disturbance([other, times(1.5, 2.5)])
    assert found["itl_before_ms"] == pytest.approx({"mean": 100, "p50": 100, "p99": 100})
    assert found["itl_during_ms"] == pytest.approx({"mean": 700, "p50": 700, "p99": 700})
    assert disturbance([other, times(1.5, error="prompt_too_long")])["itl_during_ms"] is None
