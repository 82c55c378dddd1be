"""The interfaces a scheduler implements, and SimpleScheduler, which joins the two usual halves.

    class Mine(CapacityScheduler):
        def schedule_request(self, active_requests):
            return [r for r in active_requests if self.can_hold(r)], []   # fitting, paused

    scheduler = SimpleScheduler(Mine(), FIFOScheduler(limits))
    context_requests, generation_requests, paused_requests = scheduler.schedule_request(active, set())

Every scheduler is given the active requests in one order: the running ones, longest admitted first, then the
waiting ones, next in turn first. So it may stop reading at the first that does not fit.
"""

from abc import ABC, abstractmethod
from collections.abc import Set

from genbatch.actors.scheduling.llm_request import LlmRequest, LlmRequestState, RequestList
from genbatch.actors.scheduling.scheduler_output import (
    CapacityOutput,
    MicroBatchOutput,
    PlainPlan,
    SchedulerError,
    SchedulerOutput,
    normalize_output,
)

__all__ = [
    "CapacityOutput",
    "CapacityScheduler",
    "LlmRequest",
    "LlmRequestState",
    "MicroBatchOutput",
    "MicroBatchScheduler",
    "RequestList",
    "RequestScheduler",
    "SchedulerError",
    "SchedulerOutput",
    "SimpleScheduler",
    "normalize_output",
]


class RequestScheduler(ABC):
    """Decides a step in one go; subclass it where two halves are unnecessary."""

    @abstractmethod
    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> SchedulerOutput | PlainPlan:
        """The plan of the next step.

        Args:
            active_requests: running ones, longest admitted first, then waiting ones in turn.
            inflight_request_ids: those that another step is computing now; not to be planned or paused.

        Returns:
            A SchedulerOutput, or the lists (context_requests, generation_requests, paused_requests).
        """


class CapacityScheduler(ABC):
    """Decides for which requests there is memory."""

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> CapacityOutput | tuple[RequestList, RequestList]:
        """The requests that memory is reserved for, and those to pause.

        Returns:
            A CapacityOutput, or the lists (fitting_requests, paused_requests).
        """


class MicroBatchScheduler(ABC):
    """Decides which of the fitting requests take part in a step, and with how many tokens."""

    @abstractmethod
    def schedule(
        self, fitting_requests: RequestList, inflight_request_ids: Set[int]
    ) -> MicroBatchOutput | tuple[RequestList, RequestList]:
        """The requests of the step; those left out skip the forward pass.

        Returns:
            A MicroBatchOutput, or the lists (context_requests, generation_requests).
        """


class SimpleScheduler(RequestScheduler):
    """First a CapacityScheduler, then a MicroBatchScheduler over what fits."""

    def __init__(self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler) -> None:
        super().__init__()
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Set[int]) -> SchedulerOutput:
        """See RequestScheduler.

        Blocks that a step in flight still writes cannot be released. When the capacity scheduler wants such a
        request paused or refused, nothing else is planned: the next plan does it, once the step has ended.
        """
        capacity = CapacityOutput.of(self.capacity_scheduler.schedule_request(active_requests))
        paused = _grounded(capacity.paused_requests, inflight_request_ids)
        refused = _grounded(capacity.never_fitting, inflight_request_ids)
        if len(paused) < len(capacity.paused_requests) or len(refused) < len(capacity.never_fitting):
            return SchedulerOutput([], [], paused, never_fitting=refused)
        step = self.micro_batch_scheduler.schedule(capacity.fitting_requests, inflight_request_ids)
        return MicroBatchOutput.of(step).as_plan(paused, refused)


def _grounded(requests: RequestList, inflight_request_ids: Set[int]) -> RequestList:
    return [request for request in requests if request.request_id not in inflight_request_ids]
