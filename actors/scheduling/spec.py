"""Builds the scheduler that the options name."""

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
                    raise SchedulerError(f"{name}: only MAX_UTILIZATION in in-flight batching has one")
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
            raise SchedulerError(f"scheduler {options.scheduler!r}: a RequestScheduler decides joining, V1 forbids it")
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
    found = [STEP_ORDERS.get(name) or _load(name) for name in (part.strip() for part in names.split(","))]
    halves = [half for half in (CapacityScheduler, MicroBatchScheduler) for one in found if issubclass(one, half)]
    if len(found) > 1 and sorted(half.__name__ for half in halves) != ["CapacityScheduler", "MicroBatchScheduler"]:
        raise SchedulerError(f"scheduler {names!r}: two names are a CapacityScheduler and a MicroBatchScheduler")
    return found


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
