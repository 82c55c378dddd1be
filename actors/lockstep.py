"""V1 batching: a group of requests runs in lockstep, and nobody joins until all of it is complete."""

from collections.abc import Set

from genbatch.actors.llm_request import LlmRequestState, RequestList
from genbatch.actors.scheduler import (
    CapacityScheduler,
    MicroBatchScheduler,
    RequestScheduler,
    SchedulerOutput,
    SimpleScheduler,
)


class LockstepScheduler(RequestScheduler):
    """Forms a group of what fits, prefills all of it, then decodes all of it together.

    Args:
        capacity_scheduler: chooses the group; it must not pause, as the group waits for each member.
        micro_batch_scheduler: splits the group's contexts over steps.
    """

    def __init__(
        self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler
    ) -> None:
        super().__init__()
        self._scheduler = SimpleScheduler(capacity_scheduler, micro_batch_scheduler)
        self._group: frozenset[int] = frozenset()

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> SchedulerOutput:
        """See RequestScheduler."""
        members = [request for request in active_requests if request.request_id in self._group]
        if not members:
            members, _ = self._scheduler.capacity_scheduler.schedule_request(active_requests)
            self._group = frozenset(request.request_id for request in members)
        contexts = [request for request in members if request.state is LlmRequestState.CONTEXT_INIT]
        if not self._group:
            return self._scheduler.schedule_request(active_requests, inflight_request_ids)
        step = self._scheduler.micro_batch_scheduler.schedule(contexts or members, inflight_request_ids)
        return SchedulerOutput(*step, [])
