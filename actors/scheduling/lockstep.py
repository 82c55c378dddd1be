"""V1 batching: a group of requests runs in lockstep, and nobody joins until all of it is complete."""

from collections.abc import Set

from genbatch.actors.scheduling.llm_request import LlmRequestState, RequestList
from genbatch.actors.scheduling.scheduler import (
    CapacityOutput,
    CapacityScheduler,
    MicroBatchOutput,
    MicroBatchScheduler,
    RequestScheduler,
    SchedulerError,
    SchedulerOutput,
)


class LockstepScheduler(RequestScheduler):
    """Forms a group of what fits, prefills all of it, then decodes all of it together.

    Args:
        capacity_scheduler: chooses the group; it must not pause, as the group waits for each member.
        micro_batch_scheduler: spreads the group's contexts over steps; its budgets must hold the whole group.
    """

    def __init__(self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler) -> None:
        super().__init__()
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler
        self._group: frozenset[int] = frozenset()  # ids, some of them complete by now

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Set[int]) -> SchedulerOutput:
        """See RequestScheduler.

        Raises:
            SchedulerError: the capacity scheduler paused a request.
        """
        group = [request for request in active_requests if request.request_id in self._group]
        refused: RequestList = []
        if not group:
            capacity = CapacityOutput.of(self.capacity_scheduler.schedule_request(active_requests))
            if capacity.paused_requests:
                raise SchedulerError("V1 batching needs a capacity scheduler that does not pause requests")
            group, refused = capacity.fitting_requests, capacity.never_fitting
            self._group = frozenset(request.request_id for request in group)
        contexts = [request for request in group if request.state is LlmRequestState.CONTEXT_INIT]
        step = MicroBatchOutput.of(self.micro_batch_scheduler.schedule(contexts or group, inflight_request_ids))
        return step.as_plan([], refused)
