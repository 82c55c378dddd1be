"""PrefillFirst: contexts that have begun are completed before decodes resume."""

from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.scheduling.plan import StepLimits
from genbatch.actors.scheduling.scheduler import (
    FIFOScheduler,
    GuaranteedNoEvictScheduler,
    MaxUtilizationScheduler,
    PrefillFirstScheduler,
    SimpleScheduler,
)
from tests.actors.scheduling.real_blocks import Loop, RealBlocks, decoding, prefilling, request


def test_h06_a_split_prefill_goes_before_decodes_and_waiting_requests_come_last() -> None:
    active = [decoding(1), prefilling(2, 8, 4), decoding(3), request(4, 9)]
    wide = PrefillFirstScheduler(StepLimits(max_batch_tokens=10, block_size=4)).schedule(active, set())
    assert [r.request_id for r in wide.generation_requests] == [1, 3]
    assert wide.chunk_sizes == {2: 4, 4: 4}
    narrow = PrefillFirstScheduler(StepLimits(max_batch_tokens=4, block_size=4)).schedule(active, set())
    assert (narrow.generation_requests, narrow.chunk_sizes) == ([], {2: 4})


def recorded(step_order: type[FIFOScheduler] | type[PrefillFirstScheduler]) -> list[tuple[int, int]]:
    """(decodes, context tokens) of each step while a long prompt joins a running decode."""
    limits, kv = StepLimits(max_batch_tokens=8, block_size=4), RealBlocks(64, 4)
    loop = Loop(SimpleScheduler(GuaranteedNoEvictScheduler(4, kv), step_order(limits)), kv, limits)
    loop.add([request(1, 4, 6)])
    loop.tick()
    loop.add([request(2, 23, 2)])
    loop.run()
    return [(len(plan.generation_requests), plan.num_context_tokens) for plan in loop.plans]


def test_h06_the_recorded_order_differs_from_fifo() -> None:
    assert recorded(FIFOScheduler) == [(0, 4), (1, 7), (1, 7), (1, 7), (1, 2), (2, 0)]
    assert recorded(PrefillFirstScheduler) == [(0, 4), (1, 7), (0, 8), (0, 8), (2, 0), (1, 0), (1, 0), (1, 0)]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(1, 16),
    st.integers(20, 40),
    st.one_of(st.none(), st.integers(15, 30)),
    st.booleans(),
)
def test_h06_nobody_starves_under_prefill_first(jobs, tokens, num_blocks, cache_budget, evicts) -> None:
    limits, kv = StepLimits(tokens, 4, cache_budget), RealBlocks(num_blocks, 4)
    capacity = MaxUtilizationScheduler(6, kv) if evicts else GuaranteedNoEvictScheduler(6, kv)
    loop = Loop(SimpleScheduler(capacity, PrefillFirstScheduler(limits)), kv, limits)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    loop.run()
    assert len(loop.finished) == len(jobs)


def test_h06_a_steady_stream_of_prompts_does_not_keep_the_decodes_out() -> None:
    limits, kv = StepLimits(max_batch_tokens=8, block_size=4), RealBlocks(400, 4)
    loop = Loop(SimpleScheduler(GuaranteedNoEvictScheduler(16, kv), PrefillFirstScheduler(limits)), kv, limits)
    first = request(0, 4, 10)
    loop.add([first])
    for number in range(1, 60):
        loop.add([request(number, 16, 4)])
        loop.tick()
    assert first in loop.finished
