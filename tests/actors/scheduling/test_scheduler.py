"""SimpleScheduler joins its halves, and every plan is normalised and checked in one place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.scheduling.plan import BatchingType, StepLimits, forwards
from genbatch.actors.scheduling.scheduler import (
    CapacityOutput,
    CapacityScheduler,
    FIFOScheduler,
    GuaranteedNoEvictScheduler,
    LockstepScheduler,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    RequestScheduler,
    SchedulerError,
    SchedulerOutput,
    SimpleScheduler,
    normalize_output,
)
from tests.actors.scheduling.real_blocks import Loop, RealBlocks, decoding, prefilling, request

LIMITS = StepLimits(max_batch_tokens=16, block_size=4)


class Everything(CapacityScheduler):
    """Every request fits, the plain way of the document."""

    def schedule_request(self, active_requests):
        return list(active_requests), []


class OneOfEach(MicroBatchScheduler):
    """One context and one decode, the plain way of the document."""

    def schedule(self, fitting_requests, inflight_request_ids):
        free = [r for r in fitting_requests if r.request_id not in inflight_request_ids]
        contexts = [r for r in free if r.state.name == "CONTEXT_INIT"]
        return contexts[:1], [r for r in free if r not in contexts][:1]


def loop_of(scheduler: RequestScheduler, num_blocks: int = 64, limits: StepLimits = LIMITS) -> Loop:
    return Loop(scheduler, RealBlocks(num_blocks, limits.block_size), limits)


def sizes(draw_from: int = 30) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(1, draw_from), st.integers(1, draw_from)), min_size=1, max_size=12)


def test_s01_s02_a_users_two_halves_run_to_the_end_as_plain_tuples() -> None:
    loop = loop_of(SimpleScheduler(Everything(), OneOfEach()))
    loop.add(request(number, prompt=10, max_new=3) for number in range(6))
    loop.run()
    assert [one.request_id for one in loop.finished] == list(range(6))
    assert all(len(plan.context_requests) <= 1 for plan in loop.plans)


def test_s02_requests_in_flight_are_left_out_of_the_step() -> None:
    active = [decoding(1), decoding(2), prefilling(3, 8, 4), request(4)]
    context, generation = FIFOScheduler(LIMITS).schedule(active, {2, 3})
    assert ([r.request_id for r in context], [r.request_id for r in generation]) == ([4], [1])


def test_s03_simple_scheduler_asks_for_capacity_first_and_passes_only_what_fits() -> None:
    kv = RealBlocks(4, 4)
    scheduler = SimpleScheduler(GuaranteedNoEvictScheduler(8, kv), FIFOScheduler(LIMITS))
    context, generation, paused = scheduler.schedule_request([request(1, 8, 5), request(2, 8, 5)], set())
    assert ([r.request_id for r in context], generation, paused) == ([1], [], [])


def test_s03_a_pause_that_a_step_in_flight_forbids_is_put_off() -> None:
    class PausesBoth(CapacityScheduler):
        def schedule_request(self, active_requests):
            return active_requests[:1], active_requests[1:]

    active = [decoding(1), decoding(2), decoding(3)]
    plan = SimpleScheduler(PausesBoth(), FIFOScheduler(LIMITS)).schedule_request(active, {3})
    plan = normalize_output(plan, active, {3}, LIMITS)
    assert ([r.request_id for r in plan.paused_requests], plan.num_scheduled) == ([2], 0)


@given(sizes(), st.integers(8, 40), st.integers(1, 20), st.booleans(), st.booleans())
def test_s04_plans_are_disjoint_subsets_within_the_budgets(jobs, num_blocks, tokens, evicts, chunked) -> None:
    limits = StepLimits(max_batch_tokens=tokens, block_size=4, enable_chunked_context=chunked)
    kv = RealBlocks(num_blocks, 4)
    capacity = MaxUtilizationScheduler(8, kv) if evicts else GuaranteedNoEvictScheduler(8, kv)
    loop = Loop(SimpleScheduler(capacity, FIFOScheduler(limits)), kv, limits)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    known = list(loop.waiting)

    def check(plan: SchedulerOutput) -> None:
        ids = [r.request_id for part in (*plan, plan.never_fitting) for r in part]
        assert len(ids) == len(set(ids))
        assert set(ids) <= {r.request_id for r in known}
        assert plan.num_context_tokens + len(plan.generation_requests) <= tokens

    loop.run(each_tick=check)
    assert len(loop.finished) + len(loop.refused) == len(jobs)


def test_s04_a_request_scheduler_of_three_plain_lists_runs() -> None:
    class LastInFirstOut(RequestScheduler):
        def schedule_request(self, active_requests, inflight_request_ids):
            last = active_requests[-1]
            return ([], [last], []) if last.state.name.startswith("GENERATION") else ([last], [], [])

    loop = loop_of(LastInFirstOut())
    loop.add(request(number, prompt=40, max_new=2) for number in range(3))
    loop.run()
    assert {one.request_id for one in loop.finished} == {0, 1, 2}
    assert [plan.num_context_tokens for plan in loop.plans[:3]] == [16, 16, 16]


def test_missing_chunk_sizes_fill_the_budget_in_order() -> None:
    active = [decoding(1), prefilling(2, 30, 20), request(3, 20), request(4)]
    plan = normalize_output((active[1:], active[:1], []), active, set(), LIMITS)
    assert plan.chunk_sizes == {2: 10, 3: 5}
    assert [r.request_id for r in plan.context_requests] == [2, 3]


ACTIVE = [decoding(1), decoding(2), prefilling(3, 8, 4), request(4), *(decoding(n) for n in range(10, 30))]
ONE, TWO, THREE, FOUR, *MANY = ACTIVE
OFFENCES = {
    "neither SchedulerOutput nor 3 lists": [None, ([], []), ([], [], None), [[], [], []]],
    "request 1 is in the plan twice": [([], [ONE, ONE], []), SchedulerOutput([], [ONE], [ONE])],
    "not among the active requests: 99": [([request(99)], [], [])],
    "already in flight: 2": [([], [TWO], []), ([], [], [TWO])],
    "planned as generation but not decoding: 3, 4": [([], [THREE, FOUR, ONE], [])],
    "planned as context but not pending or prefilling: 1": [([ONE], [], [])],
    "paused but not running: 4": [([], [], [FOUR])],
    "20 generation requests exceed": [([FOUR], MANY, [])],
    "the plan has 20 tokens, and max_batch_tokens is 16": [([], MANY, [])],
    "request 3 has a chunk of 5 tokens; 4 of its context are left": [SchedulerOutput([THREE], [], [], {3: 5})],
    "request 4 has a chunk of 0 tokens": [SchedulerOutput([THREE, FOUR], [], [], {3: 1})],
    r"not in the context list: \[7\]": [SchedulerOutput([THREE], [], [], {3: 1, 7: 1})],
    # 3 blocks for each decode over 9 positions, 2 for the chunk that ends at 5
    "the plan reads 8 blocks, and cache_budget is 7": [SchedulerOutput([THREE], [ONE, MANY[0]], [], {3: 1})],
}


@pytest.mark.parametrize(
    ("offence", "output"), [(offence, output) for offence, outputs in OFFENCES.items() for output in outputs]
)
def test_a_plan_that_cannot_be_run_is_refused_by_name(offence: str, output: object) -> None:
    limits = StepLimits(max_batch_tokens=16, block_size=4, cache_budget=7 if "cache" in offence else None)
    with pytest.raises(SchedulerError, match=offence):
        normalize_output(output, ACTIVE, {2}, limits)


@pytest.mark.parametrize("answer", [None, ([],), CapacityOutput])
def test_a_capacity_scheduler_that_returns_something_else_is_named(answer: object) -> None:
    class Odd(CapacityScheduler):
        def schedule_request(self, active_requests):
            return answer

    with pytest.raises(SchedulerError, match="neither CapacityOutput nor 2 lists"):
        SimpleScheduler(Odd(), FIFOScheduler(LIMITS)).schedule_request([request(1)], set())


def test_b12_context_and_generation_requests_make_up_the_scheduled_ones() -> None:
    loop = loop_of(SimpleScheduler(Everything(), FIFOScheduler(LIMITS)))
    loop.add(request(number, prompt=10, max_new=5) for number in range(4))
    loop.run()
    for plan in loop.plans:
        assert plan.num_scheduled == len(plan.context_requests) + len(plan.generation_requests)
    assert sum(plan.num_context_tokens for plan in loop.plans) == 4 * 10


def num_forwards(batching_type: BatchingType, loop: Loop) -> int:
    return sum(len(forwards(batching_type, plan)) for plan in loop.plans)


def staggered(scheduler: RequestScheduler) -> Loop:
    loop = loop_of(scheduler)
    loop.add(request(number, prompt=12, max_new=2 + 3 * number) for number in range(4))
    loop.tick()
    loop.add(request(number, prompt=12, max_new=4) for number in range(4, 8))
    loop.run()
    return loop


def test_b15_fused_mixes_prefill_and_decode_and_so_runs_fewer_forwards() -> None:
    loop = staggered(SimpleScheduler(Everything(), FIFOScheduler(LIMITS)))
    fused = num_forwards(BatchingType.INFLIGHT_FUSED_BATCHING, loop)
    apart = num_forwards(BatchingType.INFLIGHT_BATCHING, loop)
    assert fused == len(loop.plans) < apart
    for plan in loop.plans:
        parts = forwards(BatchingType.INFLIGHT_BATCHING, plan)
        assert all(not (part.context_requests and part.generation_requests) for part in parts)
        assert [r for part in parts for r in part.context_requests] == plan.context_requests
        assert [r for part in parts for r in part.generation_requests] == plan.generation_requests
        assert [r for part in parts for r in part.paused_requests] == plan.paused_requests
        assert sum(part.num_context_tokens for part in parts) == plan.num_context_tokens


def test_b15_v1_runs_a_group_in_lockstep_and_nobody_joins_before_it_is_complete() -> None:
    kv = RealBlocks(64, 4)
    loop = Loop(LockstepScheduler(GuaranteedNoEvictScheduler(4, kv), FIFOScheduler(LIMITS)), kv, LIMITS)
    loop.add(request(number, prompt=12, max_new=2 + 3 * number) for number in range(4))
    loop.tick()
    loop.add(request(number, prompt=12, max_new=4) for number in range(4, 8))
    groups: list[set[int]] = []

    def record(plan: SchedulerOutput) -> None:
        groups.append({r.request_id for part in plan for r in part})
        assert not (plan.context_requests and plan.generation_requests)

    loop.run(each_tick=record)
    first = [group for group in groups if group & set(range(4))]
    assert groups[: len(first)] == first, "the second group started before the first was complete"
    decodes = [plan.generation_requests for plan in loop.plans if plan.generation_requests]
    assert [len(batch) for batch in decodes[:4]] == [4, 3, 3, 3]
    assert len(loop.finished) == 8


def test_b15_v1_refuses_a_capacity_scheduler_that_pauses() -> None:
    class Pauses(CapacityScheduler):
        def schedule_request(self, active_requests):
            return [], list(active_requests)

    with pytest.raises(SchedulerError, match="V1 batching"):
        LockstepScheduler(Pauses(), FIFOScheduler(LIMITS)).schedule_request([decoding(1)], set())


@given(sizes(), st.integers(1, 4), st.integers(4, 20))
def test_b15_v1_finishes_every_group(jobs, slots, num_blocks) -> None:
    kv = RealBlocks(num_blocks, 4)
    loop = Loop(LockstepScheduler(GuaranteedNoEvictScheduler(slots, kv), FIFOScheduler(LIMITS)), kv, LIMITS)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    loop.run()
    assert len(loop.finished) + len(loop.refused) == len(jobs)
