"""The two policies: nothing is evicted, or everything that fits runs and pauses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.scheduling.plan import StepLimits
from genbatch.actors.scheduling.request import LlmRequest, LlmRequestState, Phase
from genbatch.actors.scheduling.scheduler import (
    FIFOScheduler,
    GuaranteedNoEvictScheduler,
    MaxUtilizationScheduler,
    PauseOrder,
    SimpleScheduler,
)
from tests.actors.scheduling.real_blocks import Loop, RealBlocks, decoding, prefilling, request

LIMITS = StepLimits(max_batch_tokens=16, block_size=4)
JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12)


def ids(requests: list[LlmRequest]) -> list[int]:
    return [one.request_id for one in requests]


def held(kv: RealBlocks, *requests: LlmRequest) -> list[LlmRequest]:
    """The requests, with blocks for the positions they have computed."""
    for one in requests:
        computed, one.num_computed = one.num_computed, 0
        kv.allocate(one, computed)
        one.num_computed = computed
    return list(requests)


def loop_with(capacity_type: type, num_blocks: int, slots: int = 8, **options: object) -> Loop:
    kv = RealBlocks(num_blocks, LIMITS.block_size)
    return Loop(SimpleScheduler(capacity_type(slots, kv, **options), FIFOScheduler(LIMITS)), kv, LIMITS)


# GUARANTEED_NO_EVICT


def test_s05_running_requests_are_reserved_to_completion_before_waiting_ones() -> None:
    kv = RealBlocks(10, 4)
    active = held(kv, decoding(1, 8, 9), prefilling(2, 12, 4, 5))  # 4 blocks each at full length
    active += [request(3, 4, 5), request(4, 4, 1)]  # 2 blocks, 1 block
    assert ids(GuaranteedNoEvictScheduler(8, kv).schedule_request(active).fitting_requests) == [1, 2, 3]


def test_s05_the_first_misfit_ends_the_round_even_if_a_later_one_would_fit() -> None:
    kv = RealBlocks(10, 4)
    active = [*held(kv, decoding(1, 8, 21)), request(2, 20, 5), request(3, 1, 1)]
    assert ids(GuaranteedNoEvictScheduler(8, kv).schedule_request(active).fitting_requests) == [1]


def test_s05_no_more_than_max_num_requests_are_chosen() -> None:
    capacity = GuaranteedNoEvictScheduler(2, RealBlocks(100, 4))
    assert ids(capacity.schedule_request([request(n) for n in range(5)]).fitting_requests) == [0, 1]


def test_s05_the_states_that_may_be_scheduled_can_be_narrowed() -> None:
    class OnlyGeneration(GuaranteedNoEvictScheduler):
        no_schedule_until_state = LlmRequestState.GENERATION_IN_PROGRESS

    kv = RealBlocks(100, 4)
    active = [decoding(1), prefilling(2, 8, 4), request(3)]
    assert ids(OnlyGeneration(8, kv).schedule_request(active).fitting_requests) == [1]


def test_s05_what_can_never_fit_is_reported_and_holds_nobody_back() -> None:
    loop = loop_with(GuaranteedNoEvictScheduler, num_blocks=4)
    loop.add([request(0, 16, 2), request(1, 16, 1), request(2, 100, 1)])
    loop.run()
    assert (ids(loop.refused), ids(loop.finished)) == ([0, 2], [1])


@given(JOBS, st.integers(1, 30), st.integers(1, 5))
def test_b18_guaranteed_no_evict_never_pauses(jobs, num_blocks, slots) -> None:
    loop = loop_with(GuaranteedNoEvictScheduler, num_blocks, slots)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    everyone = list(loop.waiting)
    loop.run()
    assert all(one.num_pauses == 0 for one in everyone)
    assert all(not plan.paused_requests for plan in loop.plans)
    assert set(ids(loop.refused)) == {one.request_id for one in everyone if -(-one.max_positions // 4) > num_blocks}


@given(JOBS)
def test_s06_the_estimate_equals_the_allocation_seen_at_full_length(jobs) -> None:
    loop = loop_with(GuaranteedNoEvictScheduler, num_blocks=50)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    estimates = {one.request_id: loop.kv.get_needed_resource_to_completion(one) for one in loop.waiting}
    loop.run()
    assert loop.peak_blocks == estimates


# MAX_UTILIZATION


def test_b17_max_utilization_starts_more_requests_than_could_all_complete() -> None:
    jobs = [request(number, 4, 13) for number in range(4)]
    cautious, eager = (
        kind(8, RealBlocks(8, 4)).schedule_request(list(jobs))
        for kind in (GuaranteedNoEvictScheduler, MaxUtilizationScheduler)
    )
    assert (len(cautious.fitting_requests), len(eager.fitting_requests)) == (2, 4)


def test_b17_no_more_than_max_num_requests_run() -> None:
    capacity = MaxUtilizationScheduler(3, RealBlocks(100, 4))
    active = [decoding(1), prefilling(2, 8, 4), request(3), request(4)]
    assert ids(capacity.schedule_request(active).fitting_requests) == [1, 2, 3]


def test_b17_blocks_that_only_paused_requests_shared_are_counted_at_the_next_step() -> None:
    kv = RealBlocks(4, 4)
    [first] = held(kv, decoding(1, 16))
    sharing = [decoding(2, 16), decoding(3, 16)]
    for number, one in enumerate(sharing):  # releasing one alone frees nothing, as another reads the same blocks
        one.seq_id = number
        kv.kv.seq_cp(first.seq_id, number)
    output = MaxUtilizationScheduler(8, kv).schedule_request([first, *sharing])
    assert (ids(output.fitting_requests), ids(output.paused_requests)) == ([], [3, 2])
    assert output.never_fitting == []


def test_b17_a_full_pool_pauses_the_newest_and_never_the_oldest() -> None:
    kv = RealBlocks(6, 4)
    active = [*held(kv, decoding(1), decoding(2), decoding(3)), request(4, 1, 1)]
    fitting, paused = MaxUtilizationScheduler(8, kv).schedule_request(active)
    assert (ids(fitting), ids(paused)) == ([1, 2], [3])


def test_b17_what_fits_exactly_pauses_nobody_and_holds_no_refusal_back() -> None:
    kv = RealBlocks(6, 4)
    active = [*held(kv, decoding(1), decoding(2)), request(3, 100, 1)]  # each of the two begins its third block
    output = MaxUtilizationScheduler(8, kv, margin=0.0).schedule_request(active)
    assert (ids(output.fitting_requests), ids(output.paused_requests), ids(output.never_fitting)) == ([1, 2], [], [3])


def test_a_request_that_was_paused_twice_is_spared_while_there_is_another() -> None:
    kv = RealBlocks(6, 4)
    active = held(kv, decoding(1), decoding(2), decoding(3))
    active[2].num_pauses = 2
    assert ids(MaxUtilizationScheduler(8, kv).schedule_request(active).paused_requests) == [2]
    active[1].num_pauses = 2
    assert ids(MaxUtilizationScheduler(8, kv).schedule_request(active).paused_requests) == [3]


def test_a_newcomer_is_not_paused_for_the_client_that_has_most_requests_running() -> None:
    kv = RealBlocks(8, 4)
    active = held(kv, decoding(1), decoding(2), decoding(3), decoding(4))
    for one, account in zip(active, ("greedy", "greedy", "greedy", "newcomer"), strict=True):
        one.account = account
    capacity = MaxUtilizationScheduler(8, kv)
    assert ids(capacity.schedule_request(active).paused_requests) == [3, 2]
    active[2].num_pauses = 2
    assert ids(capacity.schedule_request(active).paused_requests) == [2, 3]  # of the greedy client the other first
    for one in active:
        one.account, one.num_pauses = str(one.request_id), 0
    assert ids(capacity.schedule_request(active).paused_requests) == [4, 3]


def test_b17_a_prefill_that_has_begun_keeps_the_blocks_it_still_needs() -> None:
    kv = RealBlocks(8, 4)
    active = [*held(kv, prefilling(1, 24, 4)), request(2, 12), request(3, 4)]
    assert ids(MaxUtilizationScheduler(8, kv, margin=0).schedule_request(active).fitting_requests) == [1]


@pytest.mark.parametrize("order", PauseOrder)
@given(jobs=JOBS, num_blocks=st.integers(1, 16), slots=st.integers(1, 6), margin=st.sampled_from([0, 0.2, 0.9]))
def test_b17_a_tiny_cache_makes_progress_until_everyone_has_finished(order, jobs, num_blocks, slots, margin) -> None:
    loop = loop_with(MaxUtilizationScheduler, num_blocks, slots, margin=margin, pause_order=order)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    everyone = list(loop.waiting)
    loop.run()
    assert all(one.num_generated == one.max_new_tokens for one in loop.finished)
    assert set(ids(loop.refused)) == {one.request_id for one in everyone if -(-one.max_positions // 4) > num_blocks}


@given(jobs=JOBS, num_blocks=st.integers(4, 16))
def test_b17_the_request_that_has_run_longest_is_never_paused(jobs, num_blocks) -> None:
    loop = loop_with(MaxUtilizationScheduler, num_blocks)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    while loop.running or loop.waiting:
        oldest = loop.running[:1]
        assert not set(oldest) & set(loop.tick().paused_requests)


def test_b17_a_tiny_cache_really_pauses() -> None:
    loop = loop_with(MaxUtilizationScheduler, num_blocks=8, margin=0)
    loop.add(request(number, 4, 20) for number in range(4))
    loop.run()
    assert len(loop.finished) == 4
    assert sum(one.num_pauses for one in loop.finished) > 0


def test_h09_a_request_that_does_not_fit_stays_pending_and_nothing_is_allocated() -> None:
    loop = loop_with(MaxUtilizationScheduler, num_blocks=8, margin=0)
    loop.add([request(0, 16, 8), request(1, 20, 4)])
    loop.tick()
    free = loop.kv.free_blocks
    loop.tick()
    second = loop.waiting[0]
    assert (second.request_id, second.phase, loop.kv.blocks_held(second)) == (1, Phase.PENDING, 0)
    assert free - loop.kv.free_blocks == 1
    loop.run()
    assert ids(loop.finished) == [0, 1]


def test_h10_below_the_margin_new_prefills_are_held_and_decodes_continue() -> None:
    kv = RealBlocks(20, 4)
    capacity = MaxUtilizationScheduler(8, kv)
    first = held(kv, decoding(1, 60), prefilling(2, 8, 4))  # 16 of 20 blocks; 2 more are spoken for
    output = capacity.schedule_request([*first, request(3, 1, 1)])
    assert (ids(output.fitting_requests), output.never_fitting) == ([1, 2], [])
    without_margin = MaxUtilizationScheduler(8, kv, margin=0).schedule_request([*first, request(3, 1, 1)])
    assert ids(without_margin.fitting_requests) == [1, 2, 3]


def test_h10_at_exactly_the_margin_a_new_prefill_may_start() -> None:
    kv = RealBlocks(20, 4)
    active = [*held(kv, decoding(1, 61)), request(2, 1, 1), request(3, 1, 1)]  # 16 held, 4 free
    assert ids(MaxUtilizationScheduler(8, kv).schedule_request(active).fitting_requests) == [1, 2]


def test_h10_the_margin_does_not_hold_back_the_only_request() -> None:
    kv = RealBlocks(10, 4)
    output = MaxUtilizationScheduler(8, kv, margin=0.99).schedule_request([request(1, 40, 1), request(2, 1, 1)])
    assert ids(output.fitting_requests) == [1]


def test_h10_the_margin_starts_the_first_request_even_if_blocks_are_held_by_nobody_running() -> None:
    kv = RealBlocks(20, 4)
    held(kv, request(9, num_computed=68))  # 17 of 20 blocks, as a shared prompt would hold them
    output = MaxUtilizationScheduler(8, kv).schedule_request([request(1, 8), request(2, 1)])
    assert (ids(output.fitting_requests), output.never_fitting) == ([1], [])


def test_h13_a_soft_reset_takes_the_oldest_and_the_newest_once_a_reset_blocks() -> None:
    kv = RealBlocks(6, 4)
    active = held(kv, decoding(1), decoding(2), decoding(3))
    capacity = MaxUtilizationScheduler(8, kv, pause_order=PauseOrder.OLDEST)
    assert ids(capacity.schedule_request(active).paused_requests) == [1]
    assert ids(capacity.schedule_request([*active, request(0, num_pauses=1)]).paused_requests) == [3]
    active[0].num_pauses = 1
    assert ids(capacity.schedule_request(active).paused_requests) == [3]


def test_b17_who_was_paused_often_is_paused_again_only_if_there_is_nobody_else() -> None:
    kv = RealBlocks(6, 4)
    active = held(kv, decoding(1), decoding(2), decoding(3))
    capacity = MaxUtilizationScheduler(8, kv, max_pauses=2)
    active[2].num_pauses = 1
    assert ids(capacity.schedule_request(active).paused_requests) == [3]
    active[2].num_pauses = 2
    assert ids(capacity.schedule_request(active).paused_requests) == [2]
    active[1].num_pauses = 2
    assert ids(capacity.schedule_request(active).paused_requests) == [3]
