"""The class printed in TensorRT-LLM's scheduler document runs against our interfaces as a user pastes it."""

import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.scheduling.scheduler import GuaranteedNoEvictScheduler, SchedulerOptions, build_scheduler
from tests.actors.scheduling.real_blocks import Loop, RealBlocks, request

# The document's text, its indentation restored and one import put before it; nothing else is changed.
PASTED = """
from genbatch.actors.scheduling.scheduler import CapacityScheduler, LlmRequest, LlmRequestState, RequestList

class GuaranteedNoEvictScheduler(CapacityScheduler):
    # only schedule requests has no_schedule_until_state <= state < no_schedule_after_state
    no_schedule_until_state = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state = LlmRequestState.GENERATION_COMPLETE
    def __init__(self, max_num_requests: int, kv_cache_manager):
        super(GuaranteedNoEvictScheduler, self).__init__()
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager
    def schedule_request(
        self, active_requests: RequestList
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        scheduled_requests = []
        pending_requests = []
        reserved_blocks = 0
        max_blocks = self.kv_cache_manager.get_max_resource_count()
        for request in active_requests:
            req_state = request.state
            # if request cannot be scheduled yet or request should no longer be scheduled, skip
            if req_state.value < self.no_schedule_until_state.value or req_state.value >= self.no_schedule_after_state.value:
                continue
            if len(scheduled_requests
                   ) >= self.max_num_requests or reserved_blocks >= max_blocks:
                break
            elif req_state == LlmRequestState.GENERATION_IN_PROGRESS or req_state == LlmRequestState.GENERATION_TO_COMPLETE:
                scheduled_requests.append(request)
                reserved_blocks += self.kv_cache_manager.get_needed_resource_to_completion(
                    request)
            else:
                pending_requests.append(request)
        avaiable_blocks = max_blocks - reserved_blocks
        for request in pending_requests:
            req_state = request.state
            if len(scheduled_requests) >= self.max_num_requests:
                break
            elif req_state == LlmRequestState.CONTEXT_INIT:
                needed_blocks = self.kv_cache_manager.get_needed_resource_to_completion(
                    request)
                if needed_blocks <= avaiable_blocks:
                    scheduled_requests.append(request)
                    avaiable_blocks -= needed_blocks
                elif needed_blocks > avaiable_blocks:
                    # If one requests fails to be scheduled, break
                    break
        assert len(scheduled_requests) > 0, (
            "no pending request can get enough resource to complete, "
            "please increase KV cache pool size.")
        return scheduled_requests, []
"""  # noqa: E501

JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12)


@pytest.fixture(scope="module", autouse=True)
def pasted_module():
    module = ModuleType("pasted_scheduler")
    exec(PASTED, vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def loop_with(scheduler: str | None, kv: RealBlocks, slots: int) -> Loop:
    name = scheduler or "fifo"
    options = SchedulerOptions(scheduler=name, max_num_requests=slots, max_batch_tokens=16)
    return Loop(build_scheduler(options, kv), kv, options.limits(kv.block_size))


@given(JOBS, st.integers(15, 40), st.integers(1, 6))
def test_s05_the_documents_class_pasted_by_a_user_serves_everyone(jobs, num_blocks, slots) -> None:
    loop = loop_with("pasted_scheduler:GuaranteedNoEvictScheduler", RealBlocks(num_blocks, 4), slots)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    loop.run()
    assert len(loop.finished) == len(jobs)
    assert all(one.num_pauses == 0 for one in loop.finished)


@given(jobs=JOBS, num_blocks=st.integers(15, 40), slots=st.integers(1, 6))
def test_s05_it_chooses_what_ours_chooses_at_every_step(pasted_module, jobs, num_blocks, slots) -> None:
    kv = RealBlocks(num_blocks, 4)
    loop = loop_with("pasted_scheduler:GuaranteedNoEvictScheduler", kv, slots)
    ours = GuaranteedNoEvictScheduler(slots, kv)
    theirs = pasted_module.GuaranteedNoEvictScheduler(slots, kv)
    loop.add(request(number, *job) for number, job in enumerate(jobs))
    while loop.running or loop.waiting:
        active = [*loop.running, *loop.waiting]
        assert set(ours.schedule_request(active).fitting_requests) == set(theirs.schedule_request(active)[0])
        loop.tick()


def test_s05_where_the_document_asserts_ours_reports_the_request() -> None:
    kv = RealBlocks(2, 4)
    build = sys.modules["pasted_scheduler"].GuaranteedNoEvictScheduler
    too_long = request(1, 20, 1)
    with pytest.raises(AssertionError, match="no pending request can get enough resource"):
        build(4, kv).schedule_request([too_long])
    assert GuaranteedNoEvictScheduler(4, kv).schedule_request([too_long]).never_fitting == [too_long]
