"""What is said of a machine, read from the text that Linux gives.

The arithmetic of latencies, rates and goodput, over times given by hand.

Sending a load: when, how many at once, and what becomes of failures; over a mocked clock.
"""

import io
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from genbatch.actors.runtime.supervisor import background
from genbatch.clients.bench.runs import (
    INCOMPLETE,
    Goodput,
    GoodputError,
    LoadRun,
    RequestTimes,
    decode_rate,
    disturbance,
    latencies,
    machine,
    percentile,
    prefill_rate,
    results_table,
    run_load,
    summary,
)
from genbatch.clients.bench.workloads import LoadRequest, ScriptedLoad
from genbatch.clients.interface import TokenStream
from genbatch.proto.errors import QueueFull
from genbatch.proto.messages import Result, Token, Usage

CPUINFO = """processor\t: 0
model name\t: A Fast CPU @ 3.0GHz
flags\t\t: fpu sse avx2 avx512f avx512_vnni amx_tile

processor\t: 1
model name\t: Another
"""


def test_the_machine_is_named_with_its_cores_and_the_instructions_that_matter(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    text = machine(tmp_path / "cpuinfo")
    assert text.endswith("of A Fast CPU @ 3.0GHz (avx2, avx512f, avx512_vnni)")
    assert text.startswith(str(len(os.sched_getaffinity(0))))


def test_a_system_that_does_not_tell_is_named_by_what_python_knows(tmp_path: Path) -> None:
    assert " of " in machine(tmp_path / "missing")


def times(sent_at: float, *token_at: float, ended_at: float | None = None, error: str | None = None) -> RequestTimes:
    end = ended_at if ended_at is not None else (token_at or (sent_at,))[-1]
    return RequestTimes(10, len(token_at), sent_at, list(token_at), end, cached_tokens=4, error=error)


def run_of(*requests: RequestTimes, duration_s: float = 10.0) -> LoadRun:
    load = ScriptedLoad(
        "by hand", tuple(LoadRequest((1,) * one.prompt_tokens, max(one.max_tokens, 1)) for one in requests)
    )
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
    assert decode_rate([times(0.0, 1.0, 2.0, 5.0)]) == pytest.approx(2 / 4.0)


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


STEP_S = 1.0


class SteadyService:
    """Answers each request with a token a second; prompts that start with 0 are refused, with 1 cut short."""

    def __init__(self) -> None:
        self.running = self.most_running = 0
        self.begun: dict[tuple[int, ...], float] = {}

    @asynccontextmanager
    async def stream(self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool) -> AsyncIterator[TokenStream]:
        assert ignore_eos
        self.begun[tuple(prompt)] = trio.current_time()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        stream = TokenStream()
        if prompt[0] == 0:
            stream.fail(QueueFull("full"))
        async with background() as nursery:
            nursery.start_soon(self._answer, stream, len(prompt), max_tokens - (prompt[0] == 1))
            try:
                yield stream
            finally:
                self.running -= 1

    async def _answer(self, stream: TokenStream, prompt_tokens: int, count: int) -> None:
        for index in range(count):
            await trio.sleep(STEP_S)
            stream.push(Token(text="", token_id=9, index=index))
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=count, cached_tokens=2)
        stream.finish(Result(text="", token_ids=[9] * count, finish_reason="length", usage=usage))


def load_of(*requests: tuple[int, int], after: int = 0) -> ScriptedLoad:
    """(first token, answer length) of each; the last one waits for `after` tokens of the others."""
    made = [LoadRequest((first, 7, 7), length) for first, length in requests]
    made[-1] = LoadRequest(made[-1].prompt, made[-1].max_tokens, after_tokens=after)
    return ScriptedLoad("by hand", tuple(made))


@pytest.mark.trio
async def test_tokens_are_timed_as_they_come(autojump_clock: trio.testing.MockClock) -> None:
    run = await run_load(SteadyService(), load_of((5, 3), (6, 1)))
    first, second = run.times
    assert [at - first.sent_at for at in first.token_at] == pytest.approx([1, 2, 3])
    assert first.ttft == pytest.approx(1)
    assert second.e2el == pytest.approx(1)
    assert run.duration_s == pytest.approx(3)
    assert first.cached_tokens == 2
    assert first.error is second.error is None


@pytest.mark.trio
async def test_requests_are_sent_at_their_times(autojump_clock: trio.testing.MockClock) -> None:
    service = SteadyService()
    started_at = trio.current_time()
    run = await run_load(service, load_of((5, 1), (6, 1), (7, 1)), arrivals=[0.0, 2.5, 2.5])
    assert [at - started_at for at in service.begun.values()] == pytest.approx([0, 2.5, 2.5])
    assert run.duration_s == pytest.approx(3.5)


@pytest.mark.trio
async def test_no_more_than_max_concurrency_are_under_way_and_waiting_counts_for_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    service = SteadyService()
    run = await run_load(service, load_of((5, 2), (6, 2), (7, 2)), max_concurrency=2)
    assert service.most_running == 2
    assert run.duration_s == pytest.approx(4)
    assert [one.ttft for one in run.times] == pytest.approx([1, 1, 1])


@pytest.mark.trio
async def test_a_refusal_and_a_short_answer_are_told_from_the_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ended = []
    run = await run_load(SteadyService(), load_of((0, 2), (1, 3), (5, 2)), on_end=lambda: ended.append(1))
    assert [one.error for one in run.times] == ["queue_full", INCOMPLETE, None]
    assert len(ended) == 3


@pytest.mark.trio
async def test_a_request_waits_for_tokens_of_all_the_others(autojump_clock: trio.testing.MockClock) -> None:
    service = SteadyService()
    started_at = trio.current_time()
    await run_load(service, load_of((5, 9), (6, 9), (7, 1), after=4))
    assert service.begun[7, 7, 7] - started_at == pytest.approx(4)


@pytest.mark.trio
async def test_a_request_that_failed_holds_nobody_up(autojump_clock: trio.testing.MockClock) -> None:
    run = await run_load(SteadyService(), load_of((0, 9), (6, 9), (7, 1), after=4))
    assert run.times[-1].error is None
    assert run.times[-1].sent_at - run.times[1].sent_at == pytest.approx(4)


def test_the_table_has_a_column_for_each_run_and_a_row_for_what_any_of_them_says() -> None:
    first = {"workload": "w1", "completed": 7, "num_prompts": 8, "failed": {"queue_full": 1}, "duration_s": 2.25}
    first |= {"request_throughput": 3.456, "ttft_ms": {"p50": 1234.5, "p99": 2000.0}, "context_logits_rows": 1200}
    second = {"workload": "w2", "completed": 8, "num_prompts": 8, "failed": {}, "duration_s": 1.0, "decode_tok_s": 99.6}
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(results_table([first, second]))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in console.export_text().splitlines()]
    assert [row for row in rows if len(row) == 3] == [
        ["completed", "7 of 8", "8 of 8"],
        ["failed", "queue_full 1", ""],
        ["seconds", "2.2", "1.0"],
        ["requests/s", "3.46", "-"],
        ["decode tok/s", "-", "100"],
        ["TTFT", "1,234.5 / 2,000.0", "-"],
        ["rows of context logits", "1,200", "-"],
    ]
