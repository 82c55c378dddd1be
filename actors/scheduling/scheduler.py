"""The schedulers, side by side: two policies on KV memory, and three orders of filling a step."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Set
from enum import Enum
from itertools import islice, takewhile

from genbatch.actors.scheduling.plan import (
    CapacityOutput,
    MicroBatchOutput,
    PlainPlan,
    SchedulerError,
    SchedulerOutput,
    StepLimits,
    StepPlan,
    normalize_output,
)
from genbatch.actors.scheduling.request import (
    Blocks,
    KVResources,
    LlmRequest,
    LlmRequestState,
    Phase,
    RequestList,
    split_by_phase,
    total,
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
    """Plans a whole step; subclass it to replace both halves at once."""

    def open(self, kv_cache_manager: KVResources) -> None:  # noqa: B027  # most need nothing of it
        """Take the KV cache before the first plan; called for a scheduler that is given as an object.

        A named class gets the KV cache as an argument of its constructor.
        """

    @abstractmethod
    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> SchedulerOutput | PlainPlan:
        """Return the plan of the next step.

        Args:
            active_requests: running requests, longest admitted first, then waiting requests in turn.
            inflight_request_ids: requests that another step is computing now; they must not be planned or paused.

        Returns:
            A SchedulerOutput, or the lists (context_requests, generation_requests, paused_requests).
        """


class CapacityScheduler(ABC):
    """Chooses the requests that get memory."""

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> CapacityOutput | tuple[RequestList, RequestList]:
        """Return the requests to reserve memory for, and the requests to pause.

        Returns:
            A CapacityOutput, or the lists (fitting_requests, paused_requests).
        """


class MicroBatchScheduler(ABC):
    """Chooses the fitting requests that take part in a step, and the tokens of each."""

    @abstractmethod
    def schedule(
        self, fitting_requests: RequestList, inflight_request_ids: Set[int]
    ) -> MicroBatchOutput | tuple[RequestList, RequestList]:
        """Return the requests of the step; the other requests skip the forward.

        Returns:
            A MicroBatchOutput, or the lists (context_requests, generation_requests).
        """


class SimpleScheduler(RequestScheduler):
    """Asks a CapacityScheduler first, and then a MicroBatchScheduler about the fitting requests."""

    def __init__(self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler) -> None:
        super().__init__()
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Set[int]) -> SchedulerOutput:
        """See RequestScheduler.

        Blocks that a step in flight still writes cannot be released. If the capacity scheduler pauses or refuses such a
        request, the plan runs no other request. The next plan pauses or refuses it, once the step has ended.
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


# Below this share of free blocks, transformers' continuous batching admits no new prompts.
DEFAULT_MARGIN = 0.2
# Each pause evaluates a request again and delays its caller, so the number of its pauses is bounded.
DEFAULT_MAX_PAUSES = 2


class SchedulerPolicy(Enum):
    """TensorRT-LLM's names of the two policies."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"


class PauseOrder(Enum):
    """The order in which MAX_UTILIZATION pauses requests when the pool is full."""

    NEWEST = "newest"  # the last admitted; the longest running one is never paused
    OLDEST = "oldest"  # transformers' soft reset: the oldest, or the newest if a reset already blocks new requests


class GuaranteedNoEvictScheduler(CapacityScheduler):
    """Admits a request only with enough blocks for its full length, so that no request is ever paused.

    Running requests are reserved first. The first waiting request that does not fit ends the round, so that no later
    request overtakes it. A request that exceeds the whole pool is reported as never fitting.

    Args:
        max_num_requests: most requests running at once.
        kv_cache_manager: see KVResources.
    """

    # The scheduler plans only requests with no_schedule_until_state <= state < no_schedule_after_state.
    no_schedule_until_state = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state = LlmRequestState.GENERATION_COMPLETE

    def __init__(self, max_num_requests: int, kv_cache_manager: KVResources) -> None:
        super().__init__()
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager

    def schedule_request(self, active_requests: RequestList) -> CapacityOutput:
        """See CapacityScheduler."""
        kv = self.kv_cache_manager
        needed_to_completion = kv.get_needed_resource_to_completion
        max_blocks = kv.get_max_resource_count()
        running = _running(active_requests)
        available = max_blocks - total(map(needed_to_completion, running), kv.no_blocks)
        schedulable = self._schedulable_states()
        fitting = [request for request in running if request.state in schedulable]
        never_fitting: RequestList = []
        for request in islice(active_requests, len(running), None):
            if len(fitting) >= self.max_num_requests:
                break
            if request.state not in schedulable:
                continue
            needed = needed_to_completion(request)
            if needed <= available:
                fitting.append(request)
                available -= needed
            # guard: what never fits
            elif needed > max_blocks:
                never_fitting.append(request)
            else:
                break
        return CapacityOutput(fitting, [], never_fitting)

    def _schedulable_states(self) -> list[LlmRequestState]:
        first, end = self.no_schedule_until_state.value, self.no_schedule_after_state.value
        return [state for state in LlmRequestState if first <= state.value < end]


class MaxUtilizationScheduler(CapacityScheduler):
    """Admits a request as soon as its context fits; pauses running ones when the pool is full.

    The uncomputed context of running requests counts as taken, so a prefill that has begun always finds its blocks.
    Below the margin of free blocks, new requests wait while running ones continue. The margin never holds back the only
    request.

    Args:
        max_num_requests: most requests running at once.
        kv_cache_manager: see KVResources.
        margin: share of the pool, 0 <= margin < 1; 0 turns it off.
        pause_order: see PauseOrder. In either order, requests of the account with most running requests go first.
        max_pauses: after this many pauses a request is paused only if its account has no other request to pause.
    """

    def __init__(
        self,
        max_num_requests: int,
        kv_cache_manager: KVResources,
        *,
        margin: float = DEFAULT_MARGIN,
        pause_order: PauseOrder = PauseOrder.NEWEST,
        max_pauses: int = DEFAULT_MAX_PAUSES,
    ) -> None:
        super().__init__()
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager
        self.margin = margin
        self.pause_order = pause_order
        self.max_pauses = max_pauses

    def schedule_request(self, active_requests: RequestList) -> CapacityOutput:
        """See CapacityScheduler."""
        kv = self.kv_cache_manager
        running = _running(active_requests)
        needs = [kv.blocks_for_step(request, request.context_remaining) for request in running]
        left = kv.free_blocks - total(needs, kv.no_blocks)
        if left < 0 and len(running) > 1:
            return self._make_room(active_requests, running, needs, left)
        return self._admit(active_requests, running, left)

    def _make_room(
        self, active_requests: RequestList, running: RequestList, needs: list[Blocks], left: Blocks
    ) -> CapacityOutput:
        """Pause running requests, all but one at most, until the others fit; admit no request."""
        waiting = islice(active_requests, len(running), None)
        reset_blocks = any(request.num_pauses for request in waiting)
        paused: RequestList = []
        while left < 0 and len(running) > 1:
            victim = self._victim(running, reset_blocks or bool(paused))
            request = running.pop(victim)
            left += needs.pop(victim) + self.kv_cache_manager.blocks_held(request)
            paused.append(request)
        # Blocks shared by paused requests only become free in addition; the next plan counts them.
        return CapacityOutput(running if left >= 0 else [], paused)

    def _victim(self, running: RequestList, reset_blocks: bool) -> int:
        # Each request is reset as the oldest at most once, so that a steady stream of new requests does not starve it.
        if self.pause_order is PauseOrder.OLDEST and not reset_blocks and not running[0].num_pauses:
            return 0
        # The first request is never paused, so the longest running one always completes.
        # guard: the first is never paused
        newest_first = range(len(running) - 1, 0, -1)
        num_running = Counter(one.account for one in running)
        most = max(num_running[running[index].account] for index in newest_first)
        # A new client's request is not paused for a client with several running requests.
        # guard: pauses of the client with most
        of_most = tuple(index for index in newest_first if num_running[running[index].account] == most)
        # guard: pauses of one request
        spared = (index for index in of_most if running[index].num_pauses < self.max_pauses)
        return next(spared, of_most[0])

    def _admit(self, active_requests: RequestList, running: RequestList, left: Blocks) -> CapacityOutput:
        kv = self.kv_cache_manager
        max_blocks = kv.get_max_resource_count()
        margin_blocks = self.margin * kv.num_blocks
        never_fitting: RequestList = []
        fitting = running
        for request in islice(active_requests, len(running), None):
            if len(fitting) >= self.max_num_requests or (fitting and left < margin_blocks):
                break
            if kv.get_needed_resource_to_completion(request) > max_blocks:
                never_fitting.append(request)
                continue
            needed = kv.blocks_for_step(request, request.context_remaining)
            # A request that runs alone gets the whole pool: held prompts give back their blocks for it.
            if fitting and needed > left:
                break
            fitting.append(request)
            left -= needed
        return CapacityOutput(fitting, [], never_fitting)


def _running(active_requests: RequestList) -> RequestList:
    pending = Phase.PENDING
    return list(takewhile(lambda request: request.phase is not pending, active_requests))


class FIFOScheduler(MicroBatchScheduler):
    """Completes running requests before it starts waiting ones; decodes never stall behind a prefill.

    Args:
        limits: the budgets of a step.
    """

    def __init__(self, limits: StepLimits) -> None:
        super().__init__()
        self.limits = limits

    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Set[int]) -> MicroBatchOutput:
        """See MicroBatchScheduler; a later class gets budget only after the earlier classes got all they need."""
        decoding, prefilling, pending = split_by_phase(fitting_requests, inflight_request_ids)
        step = StepPlan(self.limits)
        if step.add_decodes(decoding) and step.add_contexts(prefilling):
            step.add_contexts(pending)
        return MicroBatchOutput(step.context_requests, step.generation_requests, step.chunk_sizes, step.never_fitting)


class PrefillFirstScheduler(MicroBatchScheduler):
    """Completes split contexts before decodes resume.

    Waiting requests come last, so a steady stream of prompts cannot starve the decodes.

    Args:
        limits: the budgets of a step.
    """

    def __init__(self, limits: StepLimits) -> None:
        super().__init__()
        self.limits = limits

    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Set[int]) -> MicroBatchOutput:
        """See MicroBatchScheduler; a later class gets budget only after the earlier classes got all they need."""
        decoding, prefilling, pending = split_by_phase(fitting_requests, inflight_request_ids)
        step = StepPlan(self.limits)
        if step.add_contexts(prefilling) and step.add_decodes(decoding):
            step.add_contexts(pending)
        return MicroBatchOutput(step.context_requests, step.generation_requests, step.chunk_sizes, step.never_fitting)


class LockstepScheduler(RequestScheduler):
    """Forms a group of fitting requests, prefills the whole group, then decodes it in lockstep.

    Args:
        capacity_scheduler: chooses the group; it must not pause, since the group waits for each member.
        micro_batch_scheduler: spreads the group's contexts over steps; its budgets must hold the whole group.
    """

    def __init__(self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler) -> None:
        super().__init__()
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler
        self._group: frozenset[int] = frozenset()  # ids; some requests may be complete

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
