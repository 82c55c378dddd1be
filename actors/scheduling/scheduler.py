"""The schedulers, side by side: two policies on KV memory, and three orders of filling a step.

`build_scheduler` makes the scheduler that the options name.
"""

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from itertools import islice, takewhile
from typing import TypeVar

from genbatch.actors.scheduling.plan import (
    BatchingType,
    CapacityOutput,
    MicroBatchOutput,
    PlainPlan,
    SchedulerError,
    SchedulerOutput,
    StepLimits,
    StepPlan,
    as_output,
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
        capacity = as_output(CapacityOutput, self.capacity_scheduler.schedule_request(active_requests))
        paused = _grounded(capacity.paused_requests, inflight_request_ids)
        refused = _grounded(capacity.never_fitting, inflight_request_ids)
        if len(paused) < len(capacity.paused_requests) or len(refused) < len(capacity.never_fitting):
            return SchedulerOutput([], [], paused, never_fitting=refused)
        step = self.micro_batch_scheduler.schedule(capacity.fitting_requests, inflight_request_ids)
        return as_output(MicroBatchOutput, step).as_plan(paused, refused)


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
            # guard: requests that never fit
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
        # guard: the first request is never paused
        newest_first = range(len(running) - 1, 0, -1)
        num_running = Counter(request.account for request in running)
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
        if self._add_running(step, decoding, prefilling):
            step.add_contexts(pending)
        return MicroBatchOutput(step.context_requests, step.generation_requests, step.chunk_sizes, step.never_fitting)

    def _add_running(self, step: StepPlan, decoding: RequestList, prefilling: RequestList) -> bool:
        return step.add_decodes(decoding) and step.add_contexts(prefilling)


class PrefillFirstScheduler(FIFOScheduler):
    """Completes split contexts before decodes resume.

    Waiting requests come last, so a steady stream of prompts cannot starve the decodes.
    """

    def _add_running(self, step: StepPlan, decoding: RequestList, prefilling: RequestList) -> bool:
        return step.add_contexts(prefilling) and step.add_decodes(decoding)


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
            capacity = as_output(CapacityOutput, self.capacity_scheduler.schedule_request(active_requests))
            if capacity.paused_requests:
                raise SchedulerError("V1 batching needs a capacity scheduler that does not pause requests")
            group, refused = capacity.fitting_requests, capacity.never_fitting
            self._group = frozenset(request.request_id for request in group)
        contexts = [request for request in group if request.state is LlmRequestState.CONTEXT_INIT]
        step = as_output(MicroBatchOutput, self.micro_batch_scheduler.schedule(contexts or group, inflight_request_ids))
        return step.as_plan([], refused)


T = TypeVar("T")

STEP_ORDERS: dict[str, type[FIFOScheduler] | type[PrefillFirstScheduler]] = {
    "fifo": FIFOScheduler,
    "prefill_first": PrefillFirstScheduler,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """The options of a scheduler.

    Args:
        max_num_requests: most requests running at once.
        policy: BatcherOptions' scheduler_policy.
        scheduler, batching_type, max_batch_tokens, cache_budget, enable_chunked_context, margin, pause_order,
            max_pauses: as in BatcherOptions.

    Raises:
        SchedulerError: a value is out of range, or no scheduler reads it; the message names it.
    """

    scheduler: str | RequestScheduler = "fifo"
    policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION
    batching_type: BatchingType = BatchingType.INFLIGHT_FUSED_BATCHING
    max_num_requests: int = 8
    max_batch_tokens: int = 512
    cache_budget: int | None = None
    enable_chunked_context: bool = True
    margin: float | None = None
    pause_order: PauseOrder | None = None
    max_pauses: int = DEFAULT_MAX_PAUSES

    def __post_init__(self) -> None:
        for name in ("max_num_requests", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise SchedulerError(f"{name}: {getattr(self, name)} is less than 1")
        if self.max_pauses < 0:
            raise SchedulerError(f"max_pauses: {self.max_pauses} is less than 0")
        if self.cache_budget is not None and self.cache_budget < 1:
            raise SchedulerError(f"cache_budget: {self.cache_budget} is less than 1")
        if self.margin is not None and not 0 <= self.margin < 1:
            raise SchedulerError(f"margin: {self.margin} is not in 0 <= margin < 1")
        if self.never_pauses:
            for name in ("margin", "pause_order"):
                if getattr(self, name) is not None:
                    raise SchedulerError(f"{name}: only MAX_UTILIZATION with in-flight batching has this option")
        if self.batching_type is BatchingType.V1 and self.max_num_requests > self.max_batch_tokens:
            raise SchedulerError(
                f"max_num_requests: a V1 group of {self.max_num_requests} cannot decode in lockstep "
                f"with max_batch_tokens {self.max_batch_tokens}"
            )

    @property
    def never_pauses(self) -> bool:
        """True if a request starts only when all of it fits."""
        return self.policy is SchedulerPolicy.GUARANTEED_NO_EVICT or self.batching_type is BatchingType.V1

    @property
    def decodes_first(self) -> bool:
        """True if decodes continue while prompts are evaluated, so that a step's time is a gap between tokens."""
        return self.batching_type is not BatchingType.V1 and self.scheduler != "prefill_first"

    def limits(self, block_size: int) -> StepLimits:
        """Return the budgets of a step over blocks of `block_size` positions."""
        return StepLimits(
            max_batch_tokens=self.max_batch_tokens,
            block_size=block_size,
            cache_budget=self.cache_budget,
            enable_chunked_context=self.enable_chunked_context,
        )


def build_scheduler(
    options: SchedulerOptions, kv_cache_manager: KVResources, limits: StepLimits | None = None
) -> RequestScheduler:
    """Return the scheduler that `options` describe.

    A CapacityScheduler or a RequestScheduler class is called with (max_num_requests, kv_cache_manager). A
    MicroBatchScheduler class is called with the StepLimits. A CapacityScheduler replaces the policy, a
    MicroBatchScheduler replaces FIFO, and a RequestScheduler replaces both. Two names with a comma between them are the
    two halves, in any order. An object gets the KV cache by its `open`.

    Args:
        options: name the scheduler.
        kv_cache_manager: the scheduler's view of the memory.
        limits: the budgets of its steps, with a changing time for prompts; None for the options' budgets.

    Raises:
        SchedulerError: a name leads to no scheduler class, a constructor takes other arguments, or two names are not
            one of each half.
    """
    if isinstance(options.scheduler, RequestScheduler):
        options.scheduler.open(kv_cache_manager)
        return options.scheduler
    limits = limits or options.limits(kv_cache_manager.block_size)
    capacity: CapacityScheduler | None = None
    micro_batch: MicroBatchScheduler | None = None
    for named in _named(options.scheduler):
        if issubclass(named, MicroBatchScheduler):
            micro_batch = _construct(named, limits)
            continue
        scheduler = _construct(named, options.max_num_requests, kv_cache_manager)
        if isinstance(scheduler, CapacityScheduler):
            capacity = scheduler
            continue
        if options.batching_type is BatchingType.V1:
            raise SchedulerError(
                f"scheduler {options.scheduler!r}: V1 batching takes no RequestScheduler, since it decides who joins"
            )
        return scheduler
    return _join(options, capacity or _policy(options, kv_cache_manager), micro_batch or FIFOScheduler(limits))


def check_scheduler(names: str) -> None:
    """Check that one name or two lead to a scheduler, before there is a KV cache.

    Raises:
        SchedulerError: a name leads to no scheduler class, or two names are not one of each half.
    """
    _named(names)


def _named(names: str) -> list[type[RequestScheduler] | type[CapacityScheduler] | type[MicroBatchScheduler]]:
    """Return the named classes."""
    classes = [STEP_ORDERS.get(name) or _load(name) for name in (part.strip() for part in names.split(","))]
    halves = [half for half in (CapacityScheduler, MicroBatchScheduler) for kind in classes if issubclass(kind, half)]
    if len(classes) > 1 and sorted(half.__name__ for half in halves) != ["CapacityScheduler", "MicroBatchScheduler"]:
        raise SchedulerError(
            f"scheduler {names!r}: of two names, one must be a CapacityScheduler and one a MicroBatchScheduler"
        )
    return classes


def _policy(options: SchedulerOptions, kv: KVResources) -> CapacityScheduler:
    if options.never_pauses:
        return GuaranteedNoEvictScheduler(options.max_num_requests, kv)
    return MaxUtilizationScheduler(
        options.max_num_requests,
        kv,
        margin=DEFAULT_MARGIN if options.margin is None else options.margin,
        pause_order=options.pause_order or PauseOrder.NEWEST,
        max_pauses=options.max_pauses,
    )


def _join(options: SchedulerOptions, capacity: CapacityScheduler, micro_batch: MicroBatchScheduler) -> RequestScheduler:
    if options.batching_type is BatchingType.V1:
        return LockstepScheduler(capacity, micro_batch)
    return SimpleScheduler(capacity, micro_batch)


def _load(name: str) -> type[RequestScheduler] | type[CapacityScheduler] | type[MicroBatchScheduler]:
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        known = ", ".join(map(repr, STEP_ORDERS))
        raise SchedulerError(f'scheduler {name!r}: neither one of {known} nor "module:Class"')
    try:
        module = import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise SchedulerError(f"scheduler {name!r}: module {module_name!r} cannot be imported: {error}") from error
    named = getattr(module, class_name, None)
    if named is None:
        raise SchedulerError(f"scheduler {name!r}: module {module_name!r} has no {class_name!r}")
    kinds = (RequestScheduler, CapacityScheduler, MicroBatchScheduler)
    if not (inspect.isclass(named) and issubclass(named, kinds)):
        expected = ", ".join(kind.__name__ for kind in kinds)
        raise SchedulerError(f"scheduler {name!r}: {class_name} is not a subclass of one of {expected}")
    if inspect.isabstract(named):
        raise SchedulerError(
            f"scheduler {name!r}: {class_name} is abstract, because it does not define its scheduling method"
        )
    return named


def _construct(named: type[T], *arguments: object) -> T:
    try:
        return named(*arguments)
    except TypeError as error:  # another signature
        raise SchedulerError(f"scheduler class {named.__qualname__} cannot be built: {error}") from error
