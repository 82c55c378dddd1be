"""FIFO: decodes, then contexts that have begun, then waiting requests in turn, within the budgets."""

from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.scheduling.plan import StepLimits
from genbatch.actors.scheduling.request import Phase
from genbatch.actors.scheduling.scheduler import (
    FIFOScheduler,
    GuaranteedNoEvictScheduler,
    SchedulerOutput,
    SimpleScheduler,
)
from tests.actors.scheduling.real_blocks import Loop, RealBlocks, decoding, prefilling, request

JOBS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12)


def scheduled(limits: StepLimits, *active):
    output = FIFOScheduler(limits).schedule(list(active), set())
    return [r.request_id for r in output.generation_requests], dict(output.chunk_sizes)


def loop_with(limits: StepLimits, num_blocks: int = 200, slots: int = 8) -> Loop:
    kv = RealBlocks(num_blocks, limits.block_size)
    return Loop(SimpleScheduler(GuaranteedNoEvictScheduler(slots, kv), FIFOScheduler(limits)), kv, limits)


def test_h05_decodes_then_active_prefills_then_waiting_requests_by_arrival() -> None:
    limits = StepLimits(max_batch_tokens=10, block_size=4)
    active = [
        prefilling(1, 8, 4),
        decoding(2),
        prefilling(3, 8, 6),
        decoding(4),
        request(5, 1),
        request(6, 9),
    ]
    assert scheduled(limits, *active) == ([2, 4], {1: 4, 3: 2, 5: 1, 6: 1})


def test_h05_a_lower_priority_value_is_served_first_then_arrival_decides() -> None:
    loop = loop_with(StepLimits(max_batch_tokens=4, block_size=4), slots=1)
    loop.add([request(1, 4, 1), request(2, 4, 1, priority=-1), request(3, 4, 1), request(4, 4, 1, priority=2)])
    loop.run()
    assert [one.request_id for one in loop.finished] == [2, 1, 3, 4]


def test_h05_nobody_overtakes_a_prefill_that_has_to_wait() -> None:
    limits = StepLimits(max_batch_tokens=8, block_size=4, enable_chunked_context=False)
    assert scheduled(limits, decoding(1), request(2, 8), request(3, 2)) == ([1], {})


@given(JOBS, JOBS, st.integers(1, 16))
def test_h02_decodes_never_stall_behind_a_prefill(first, second, tokens) -> None:
    loop = loop_with(StepLimits(max_batch_tokens=tokens, block_size=4))
    loop.add(request(number, *job) for number, job in enumerate(first))

    def check(plan: SchedulerOutput) -> None:
        assert len(plan.generation_requests) == min(tokens, decodes_before)

    later = [request(100 + number, *job) for number, job in enumerate(second)]
    while loop.running or loop.waiting:
        decodes_before = sum(one.phase is Phase.DECODING for one in loop.running)
        check(loop.tick())
        if len(loop.plans) == 3:
            loop.add(later)
            later = []
    assert len(loop.finished) == len(first) + len(second) - len(later)


@given(JOBS, st.integers(1, 16), st.booleans())
def test_h03_the_token_budget_is_never_exceeded_and_everyone_finishes(jobs, tokens, chunked) -> None:
    limits = StepLimits(max_batch_tokens=tokens, block_size=4, enable_chunked_context=chunked)
    loop = loop_with(limits)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    loop.run()
    assert all(plan.num_context_tokens + len(plan.generation_requests) <= tokens for plan in loop.plans)
    assert len(loop.finished) == len(jobs)
    assert sum(plan.num_context_tokens for plan in loop.plans) == sum(prompt for prompt, _ in jobs)


@given(JOBS, st.integers(1, 30), st.integers(1, 64), st.booleans())
def test_h04_the_cache_budget_is_never_exceeded_and_everyone_who_can_finishes(
    jobs, cache_budget, tokens, chunked
) -> None:
    limits = StepLimits(tokens, 4, cache_budget, chunked)
    loop = loop_with(limits)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    too_long = {one.request_id for one in loop.waiting if -(-one.max_positions // 4) > cache_budget}

    while loop.running or loop.waiting:
        before = {one.request_id: one.num_computed for one in [*loop.running, *loop.waiting]}
        plan = loop.tick()
        read = [before[one.request_id] + 1 for one in plan.generation_requests]
        read += [before[number] + size for number, size in plan.chunk_sizes.items()]
        assert sum(-(-positions // 4) for positions in read) <= cache_budget
        assert plan.num_scheduled or plan.never_fitting

    assert {one.request_id for one in loop.refused} == too_long


def test_h04_a_long_decode_is_passed_over_and_nothing_new_joins_in_its_place() -> None:
    limits = StepLimits(max_batch_tokens=16, block_size=4, cache_budget=6)
    active = [decoding(1, 8), decoding(2, 16), decoding(3, 8), request(4, 1)]
    assert scheduled(limits, *active) == ([1, 3], {})


def test_b24_without_chunked_context_a_prompt_is_prefilled_whole_or_waits() -> None:
    chunked, whole = (StepLimits(10, 4, enable_chunked_context=on) for on in (True, False))
    active = [decoding(1), request(2, 6), request(3, 6)]
    assert scheduled(chunked, *active) == ([1], {2: 6, 3: 3})
    assert scheduled(whole, *active) == ([1], {2: 6})


def test_b24_a_prompt_longer_than_the_budget_is_split_even_without_chunked_context() -> None:
    loop = loop_with(StepLimits(max_batch_tokens=10, block_size=4, enable_chunked_context=False))
    loop.add([request(1, 25, 2)])
    loop.run()
    assert [plan.num_context_tokens for plan in loop.plans] == [10, 10, 5, 0]


def test_h03_beams_that_no_step_has_tokens_or_blocks_for_can_never_run() -> None:
    limits = StepLimits(max_batch_tokens=4, block_size=4, cache_budget=12)
    wide, widest = request(1, 8, 1, width=4), request(2, 8, 1, width=5)
    assert [limits.can_ever_run(one) for one in (wide, widest)] == [True, False]
    assert [limits.can_ever_run(request(3, 12, new, width=4)) for new in (1, 2)] == [True, False]
    plan = FIFOScheduler(limits).schedule([widest, wide], set())
    assert (plan.never_fitting, plan.context_requests) == ([widest], [wide])
