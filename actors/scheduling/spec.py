"""Builds the scheduler that a configuration names."""

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from genbatch.actors.scheduling.plan import BatchingType, StepLimits
from genbatch.actors.scheduling.request import KVResources
from genbatch.actors.scheduling.scheduler import (
    DEFAULT_MARGIN,
    DEFAULT_MAX_PAUSES,
    CapacityScheduler,
    FIFOScheduler,
    GuaranteedNoEvictScheduler,
    LockstepScheduler,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    PauseOrder,
    PrefillFirstScheduler,
    RequestScheduler,
    SchedulerError,
    SchedulerPolicy,
    SimpleScheduler,
)

T = TypeVar("T")

STEP_ORDERS: dict[str, type[FIFOScheduler] | type[PrefillFirstScheduler]] = {
    "fifo": FIFOScheduler,
    "prefill_first": PrefillFirstScheduler,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """What a scheduler is built from.

    Args:
        scheduler: "fifo", "prefill_first", "module:Class", or a RequestScheduler, which is used as it is.
        policy: of the in-flight batching types. V1 reserves its whole group, as nobody could be paused alone.
        batching_type: see BatchingType.
        max_num_requests: most requests running at once.
        max_batch_tokens: most tokens of one step.
        cache_budget: most blocks read in one step; None: only the pool bounds it.
        enable_chunked_context: see StepLimits.
        margin: share of free blocks below which MAX_UTILIZATION holds new requests; None: 0.2.
        pause_order: whom MAX_UTILIZATION pauses; None: the newest.
        max_pauses: how often MAX_UTILIZATION pauses a request while it can pause another instead.

    Raises:
        SchedulerError: a value out of range, or one that nothing would read; the message names it.
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
        never_pauses = SchedulerPolicy.GUARANTEED_NO_EVICT, BatchingType.V1
        if self.policy in never_pauses or self.batching_type in never_pauses:
            for name in ("margin", "pause_order"):
                if getattr(self, name) is not None:
                    raise SchedulerError(f"{name}: only MAX_UTILIZATION in in-flight batching has one")
        if self.batching_type is BatchingType.V1 and self.max_num_requests > self.max_batch_tokens:
            raise SchedulerError(
                f"max_num_requests: a V1 group of {self.max_num_requests} cannot decode in lockstep "
                f"with max_batch_tokens {self.max_batch_tokens}"
            )

    def limits(self, block_size: int) -> StepLimits:
        """The budgets of a step over blocks of `block_size` positions."""
        return StepLimits(
            max_batch_tokens=self.max_batch_tokens,
            block_size=block_size,
            cache_budget=self.cache_budget,
            enable_chunked_context=self.enable_chunked_context,
        )


def build_scheduler(options: SchedulerOptions, kv_cache_manager: KVResources) -> RequestScheduler:
    """The scheduler that `options` describe.

    A named class is called as the documents call it: a CapacityScheduler and a RequestScheduler with
    (max_num_requests, kv_cache_manager), a MicroBatchScheduler with the StepLimits. A CapacityScheduler
    takes the policy's place, a MicroBatchScheduler FIFO's, a RequestScheduler the place of both.

    Raises:
        SchedulerError: the name leads nowhere, or to something that is no scheduler, or its constructor
            takes other arguments.
    """
    if isinstance(options.scheduler, RequestScheduler):
        return options.scheduler
    limits = options.limits(kv_cache_manager.block_size)
    if options.scheduler in STEP_ORDERS:
        step_order = STEP_ORDERS[options.scheduler](limits)
        return _join(options, _policy(options, kv_cache_manager), step_order)
    named = _load(options.scheduler)
    if issubclass(named, MicroBatchScheduler):
        micro_batch_scheduler = _construct(named, limits)
        return _join(options, _policy(options, kv_cache_manager), micro_batch_scheduler)
    scheduler = _construct(named, options.max_num_requests, kv_cache_manager)
    if isinstance(scheduler, CapacityScheduler):
        return _join(options, scheduler, FIFOScheduler(limits))
    if options.batching_type is BatchingType.V1:
        raise SchedulerError(f"scheduler {options.scheduler!r}: a RequestScheduler decides joining, V1 forbids it")
    return scheduler


def _policy(options: SchedulerOptions, kv: KVResources) -> CapacityScheduler:
    if options.policy is SchedulerPolicy.GUARANTEED_NO_EVICT or options.batching_type is BatchingType.V1:
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
    except Exception as error:  # whatever the user's module raises while it is imported
        raise SchedulerError(f"scheduler {name!r}: module {module_name!r} cannot be imported: {error}") from error
    named = getattr(module, class_name, None)
    if named is None:
        raise SchedulerError(f"scheduler {name!r}: module {module_name!r} has no {class_name!r}")
    kinds = (RequestScheduler, CapacityScheduler, MicroBatchScheduler)
    if not (inspect.isclass(named) and issubclass(named, kinds)):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise SchedulerError(f"scheduler {name!r}: {class_name} is not a subclass of one of {wanted}")
    if inspect.isabstract(named):
        raise SchedulerError(f"scheduler {name!r}: {class_name} is abstract, it lacks its method")
    return named


def _construct(named: type[T], *arguments: object) -> T:
    try:
        return named(*arguments)
    except TypeError as error:  # another signature
        raise SchedulerError(f"scheduler class {named.__qualname__} cannot be built: {error}") from error
