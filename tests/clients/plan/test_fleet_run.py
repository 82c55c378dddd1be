"""The simulated fleet: single requests to the millisecond, totals that add up, and routers that make a difference."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from genbatch.actors.scheduling.plan import StepTime
from genbatch.clients.plan.fleet_run import PlanRow, SimulatedFleet, plan_table, plot_plan, run_fleet, smallest
from genbatch.clients.plan.traces import MADE, Trace, TraceError, TraceOptions, TraceRequest
from tests.clients.plan.measured import MACHINE

SIMPLE = StepTime(base=0.010, decode=0.001, key=0.0, prefill=0.002, prefill_key=0.0)


def asked(at: float, prompt: int, output: int, blocks: Sequence[int] = ()) -> TraceRequest:
    return TraceRequest(at=at, prompt=prompt, output=output, blocks=tuple(blocks))


def trace(*requests: TraceRequest) -> Trace:
    return Trace("test", 64, requests)


def fleet(replicas: int = 1, router: str = "least_tokens", **options: float) -> SimulatedFleet:
    chosen: dict[str, Any] = {"target_inter_token_latency_ms": 0.0, **options}
    return SimulatedFleet(replicas=replicas, router=router, batch_timeout_s=0.0, report_s=0.0, **chosen)


def test_a_request_alone_takes_its_steps() -> None:
    run = run_fleet(trace(asked(1.0, 600, 11)), SIMPLE, fleet())
    # 512 and 88 tokens in two steps, then ten decodes.
    assert run.ttft_s == [pytest.approx(2 * 0.010 + 600 * 0.002)]
    assert run.tpot_s == [pytest.approx(0.011)]
    assert run.duration_s == pytest.approx(1.0 + 1.22 + 10 * 0.011)
    assert run.busy_s == pytest.approx(1.22 + 0.11)


def test_an_arrival_waits_for_the_step_under_way_and_no_longer() -> None:
    run = run_fleet(trace(asked(0.0, 10, 1000), asked(1.0, 10, 2)), SIMPLE, fleet())
    # The first answers at 0.03 and decodes every 11 ms: a step ends at 0.03 + 89 * 0.011 = 1.009.
    assert min(run.ttft_s) == pytest.approx(0.03)
    # Then a step of one decode and ten prompt tokens.
    assert max(run.ttft_s) == pytest.approx(0.009 + 0.010 + 0.001 + 0.020)


def test_keys_make_a_run_of_steps_slower_step_by_step() -> None:
    growing = StepTime(base=0.0, decode=0.0, key=1e-3, prefill=0.0, prefill_key=0.0)
    run = run_fleet(trace(asked(0.0, 100, 51)), growing, fleet())
    assert run.duration_s == pytest.approx(1e-3 * sum(range(101, 151)))


@pytest.mark.parametrize(("at", "steps"), [(0.05, 1), (1.0549, 10), (1.0551, 11)])
def test_an_arrival_cuts_a_run_of_steps_that_grow_slower_at_the_end_of_the_step_under_way(
    at: float, steps: int
) -> None:
    growing = StepTime(base=0.0, decode=0.0, key=1e-3, prefill=0.0, prefill_key=0.0)
    run = run_fleet(trace(asked(0.0, 100, 1000), asked(at, 10, 2)), growing, fleet())
    # Steps of 101, 102, ... ms: the tenth ends at 1.055 s. The next evaluates the newcomer's prompt, too.
    ends = 1e-3 * sum(range(101, 101 + steps))
    assert run.ttft_s == [pytest.approx(ends - at + 1e-3 * (101 + steps)), 0.0]  # in the order of their ends


def test_between_two_reports_a_gateway_counts_what_it_has_sent_itself() -> None:
    requests = [asked(0.0, 500, 2), *[asked(0.0, 100, 2)] * 4]
    unheard = SimulatedFleet(replicas=2, router="least_tokens", batch_timeout_s=0.0, report_s=60.0)
    assert run_fleet(trace(*requests), SIMPLE, unheard).most_of_one == pytest.approx(2 * 4 / 5)
    # Four places each: the fourth and fifth of the long beginning's replica would be refused.
    full = SimulatedFleet(replicas=2, router="prefix", n_parallel=2, max_queue=2, report_s=60.0)
    same = [asked(0.0, 640, 2, blocks=range(10))] * 8
    run = run_fleet(trace(*same), SIMPLE, full)
    assert run.refused == 0 and run.most_of_one == pytest.approx(1.0)
    # Once it is cached the beginning draws them all to one replica, whose places the gateway has to count.
    later = [asked(5.0, 640, 2, blocks=range(10))] * 6
    assert run_fleet(trace(same[0], *later), SIMPLE, full).refused == 0


def test_who_finds_no_slot_waits_and_who_finds_no_place_is_refused() -> None:
    run = run_fleet(trace(*[asked(0.0, 10, 10)] * 9), SIMPLE, fleet(n_parallel=2, max_queue=3))
    assert len(run.ttft_s) == 5 and run.refused == 4
    assert max(run.ttft_s) > 0.2 > min(run.ttft_s)


def test_a_request_waits_for_kv_of_others() -> None:
    tight = run_fleet(trace(*[asked(0.0, 500, 100)] * 2), SIMPLE, fleet(n_ctx=1000))
    roomy = run_fleet(trace(*[asked(0.0, 500, 100)] * 2), SIMPLE, fleet(n_ctx=2000))
    assert tight.duration_s > roomy.duration_s
    with pytest.raises(TraceError, match="n_ctx: 500 positions are too few for a request of 600"):
        run_fleet(trace(asked(0.0, 500, 100)), SIMPLE, fleet(n_ctx=500))


def test_a_beginning_that_is_there_is_not_computed_again() -> None:
    blocks = range(8)  # 512 tokens
    run = run_fleet(trace(asked(0.0, 522, 1, blocks), asked(9.0, 532, 1, blocks)), SIMPLE, fleet())
    assert run.cached_tokens == 512
    assert run.ttft_s[1] == pytest.approx(0.010 + 20 * 0.002)
    other = run_fleet(trace(asked(0.0, 522, 1, blocks), asked(9.0, 532, 1, range(100, 108))), SIMPLE, fleet())
    assert other.cached_tokens == 0


def test_a_turns_answer_is_there_for_the_next() -> None:
    first = TraceRequest(at=0.0, prompt=128, output=64, blocks=(1, 2), answered=(3,))
    run = run_fleet(trace(first, asked(9.0, 200, 1, (1, 2, 3))), SIMPLE, fleet())
    assert run.cached_tokens == 3 * 64


def test_what_is_given_away_first_was_used_longest_ago() -> None:
    one, two, three = range(8), range(10, 18), range(20, 28)
    order = [one, two, one, three, one]  # a pool of 1,200 positions holds two of these and a little
    requests = [asked(9.0 * place, 522, 1, blocks) for place, blocks in enumerate(order)]
    assert run_fleet(trace(*requests), SIMPLE, fleet(n_ctx=1200)).cached_tokens == 2 * 512


def test_turns_go_to_the_next_replica_and_affinity_to_the_same() -> None:
    requests = [asked(9.0 * place, 522, 1, range(8)) for place in range(6)]
    assert run_fleet(trace(*requests), SIMPLE, fleet(3, "round_robin")).cached_tokens == 3 * 512
    assert run_fleet(trace(*requests), SIMPLE, fleet(3, "prefix")).cached_tokens == 5 * 512


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 3), st.integers(1, 900), st.integers(1, 60), st.integers(0, 5), st.sampled_from([1, 2, 3])
        ),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from(["round_robin", "least_tokens", "prefix"]),
    st.sampled_from(["fifo", "prefill_first"]),
    st.sampled_from([1000, 2000, 100_000]),
    st.sampled_from([0.0, 0.25]),
)
def test_every_request_ends_once_and_nothing_is_made_up(
    drawn: list[tuple[float, int, int, int, int]], router: str, scheduler: str, n_ctx: int, report_s: float
) -> None:
    requests = sorted(
        (
            asked(at, prompt, output, range(100 * family, 100 * family + prompt // 64))
            for at, prompt, output, family, _ in drawn
        ),
        key=lambda request: request.at,
    )
    options = SimulatedFleet(
        replicas=drawn[0][4],
        router=router,
        scheduler=scheduler,
        n_parallel=4,
        n_ctx=n_ctx,
        gateways=drawn[-1][4],
        report_s=report_s,
    )
    run = run_fleet(trace(*requests), MACHINE, options)
    assert len(run.ttft_s) + run.refused == len(requests)
    assert min(run.ttft_s) > 0 and run.busy_s <= options.replicas * run.duration_s * (1 + 1e-9)
    if not run.refused:
        assert run.output_tokens == sum(request.output for request in requests)
        assert run.prompt_tokens == sum(request.prompt for request in requests)
        # A token after the first is in one gap.
        assert sum(count for _, count in run.gaps) == run.output_tokens - len(requests)
    assert 0 <= run.cached_tokens < run.prompt_tokens


def test_agents_with_shared_prompts_need_fewer_replicas_behind_the_prefix_router() -> None:
    agents = MADE["agents"](TraceOptions(rate=3.0, duration_s=60.0, scale=0.25))
    runs = {
        router: run_fleet(agents, MACHINE, SimulatedFleet(replicas=6, router=router))
        for router in ("round_robin", "prefix")
    }
    hits = {router: run.cached_tokens / run.prompt_tokens for router, run in runs.items()}
    assert hits["prefix"] > 1.5 * hits["round_robin"]
    assert sum(runs["prefix"].ttft_s) < 0.5 * sum(runs["round_robin"].ttft_s)


def test_gateways_that_hear_of_each_others_prefixes_compute_less() -> None:
    agents = MADE["agents"](TraceOptions(rate=3.0, duration_s=60.0, scale=0.25))
    alone, told = (
        run_fleet(agents, MACHINE, SimulatedFleet(replicas=6, gateways=6, tell_prefixes=tells))
        for tells in (False, True)
    )
    assert told.cached_tokens / told.prompt_tokens > 1.1 * alone.cached_tokens / alone.prompt_tokens


@pytest.mark.parametrize("with_cost", [False, True])
def test_the_table_has_a_row_for_each_size_and_marks_the_smallest_that_meets_the_target(with_cost: bool) -> None:
    requests = trace(*[asked(0.0, 10, 10)] * 9)
    runs = [run_fleet(requests, SIMPLE, fleet(replicas, n_parallel=2, max_queue=3)) for replicas in (1, 2, 3)]
    rows = [PlanRow.of(run, {}, 1.5) for run in runs]
    console = Console(width=200, file=io.StringIO(), force_terminal=True)
    console.print(plan_table(rows, target_share=0.9, with_cost=with_cost))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    shown = [line for line in lines if line.rstrip("\x1b[0m ") and "%" in line]
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line).split("│")[1:3] for line in shown] == [
        [f" {row.replicas:8d} ", f" {row.refused:7d} "] for row in rows
    ]
    assert ["1;32m" in line for line in shown] == [row is smallest(rows, 0.9) for row in rows]
    assert ("cost/Mtok" in console.file.getvalue()) == with_cost  # type: ignore[attr-defined]


def test_a_plot_names_each_of_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    runs = [run_fleet(trace(asked(0.0, 10, 10)), SIMPLE, fleet(replicas)) for replicas in (1, 2)]
    rows = [PlanRow.of(run, {"ttft": 1.0, "tpot": 1.0}, 1.0) for run in runs]
    plot_plan(rows, tmp_path / "plan.png", title="agents", target_share=0.99)
    legends = [axes.get_legend() for axes in drawn[0].axes]
    assert [[text.get_text() for text in legend.get_texts()] for legend in legends] == [
        ["TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"],
        ["requests within the target", "prompt tokens from the cache", "replicas' time used"],
    ]
