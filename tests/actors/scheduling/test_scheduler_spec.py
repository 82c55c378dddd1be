"""Schedulers from a configuration: by name, by "module:Class", or as an object."""

import sys
from types import ModuleType

import pytest

from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import (
    FIFOScheduler,
    GuaranteedNoEvictScheduler,
    LockstepScheduler,
    MaxUtilizationScheduler,
    PauseOrder,
    PrefillFirstScheduler,
    RequestScheduler,
    SchedulerError,
    SchedulerOptions,
    SchedulerPolicy,
    SimpleScheduler,
    build_scheduler,
    check_scheduler,
)
from tests.actors.scheduling.real_blocks import Loop, RealBlocks, request


class Whole(RequestScheduler):
    def __init__(self, max_num_requests, kv_cache_manager) -> None:
        self.built_with = (max_num_requests, kv_cache_manager)

    def schedule_request(self, active_requests, inflight_request_ids):
        first = active_requests[0]
        return ([first], [], []) if first.state.name == "CONTEXT_INIT" else ([], [first], [])


class Odd(Whole):
    def __init__(self) -> None:
        """Takes none of the documented arguments."""


class Cautious(GuaranteedNoEvictScheduler):
    """A user's capacity scheduler."""


class Reversed(FIFOScheduler):
    """A user's micro batch scheduler: the last that fits goes first."""

    def schedule(self, fitting_requests, inflight_request_ids):
        return super().schedule(fitting_requests[::-1], inflight_request_ids)


@pytest.fixture(autouse=True)
def users_module(monkeypatch) -> ModuleType:
    module = ModuleType("users_schedulers")
    vars(module).update(Whole=Whole, Cautious=Cautious, Reversed=Reversed, Odd=Odd, number=7, Dict=dict)
    monkeypatch.setitem(sys.modules, "users_schedulers", module)
    return module


def run(**options: object) -> Loop:
    kv, options = RealBlocks(40, 4), SchedulerOptions(max_batch_tokens=16, **options)
    loop = Loop(build_scheduler(options, kv), kv, options.limits(kv.block_size))
    loop.add(request(number, 10, 3) for number in range(5))
    loop.run()
    return loop


@pytest.mark.parametrize(("name", "step_order"), [("fifo", FIFOScheduler), ("prefill_first", PrefillFirstScheduler)])
def test_s07_h05_h06_a_step_order_is_chosen_by_name(name: str, step_order: type) -> None:
    scheduler = build_scheduler(SchedulerOptions(scheduler=name), RealBlocks(8, 4))
    assert isinstance(scheduler, SimpleScheduler)
    assert type(scheduler.micro_batch_scheduler) is step_order


def test_s07_the_policy_decides_the_capacity_scheduler_and_gets_its_options() -> None:
    kv = RealBlocks(8, 4)
    cautious = build_scheduler(SchedulerOptions(policy=SchedulerPolicy("GUARANTEED_NO_EVICT")), kv)
    assert type(cautious.capacity_scheduler) is GuaranteedNoEvictScheduler
    eager = build_scheduler(
        SchedulerOptions(margin=0.5, pause_order=PauseOrder.OLDEST, max_num_requests=3), kv
    ).capacity_scheduler
    assert type(eager) is MaxUtilizationScheduler
    assert (eager.margin, eager.pause_order, eager.max_num_requests) == (0.5, PauseOrder.OLDEST, 3)
    default = build_scheduler(SchedulerOptions(), kv).capacity_scheduler
    assert (default.margin, default.pause_order) == (0.2, PauseOrder.NEWEST)


def test_s07_swapping_the_scheduler_changes_the_order_and_nothing_else() -> None:
    ends = {name: run(scheduler=name) for name in ("fifo", "users_schedulers:Reversed", "users_schedulers:Whole")}
    orders = {name: [one.request_id for one in loop.finished] for name, loop in ends.items()}
    assert orders["fifo"] == [0, 1, 2, 3, 4] != orders["users_schedulers:Reversed"]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders.values())
    assert [len(loop.plans) for loop in ends.values()][2] == 5 * 3, "Whole serves one at a time"


def test_s07_a_named_capacity_scheduler_is_called_as_documented_and_joined_with_fifo() -> None:
    scheduler = build_scheduler(
        SchedulerOptions(scheduler="users_schedulers:Cautious", max_num_requests=2), RealBlocks(8, 4)
    )
    assert type(scheduler.capacity_scheduler) is Cautious
    assert scheduler.capacity_scheduler.max_num_requests == 2
    assert type(scheduler.micro_batch_scheduler) is FIFOScheduler


def test_s07_a_scheduler_object_is_used_as_it_is() -> None:
    kv = RealBlocks(8, 4)
    mine = Whole(1, kv)
    assert build_scheduler(SchedulerOptions(scheduler=mine), kv) is mine


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("lifo", "'lifo': neither one of 'fifo', 'prefill_first' nor \"module:Class\""),
        (":Whole", "neither one of"),
        ("users_schedulers:", "neither one of"),
        ("no_such_module_here:Whole", "module 'no_such_module_here' cannot be imported"),
        ("users_schedulers:Missing", "module 'users_schedulers' has no 'Missing'"),
        ("users_schedulers:number", "number is not a subclass of one of RequestScheduler, CapacityScheduler"),
        ("users_schedulers:Dict", "Dict is not a subclass of one of"),
        ("genbatch.actors.scheduling.scheduler:RequestScheduler", "RequestScheduler is abstract"),
        ("users_schedulers:Odd", "scheduler class Odd cannot be built: .*argument"),
    ],
)
def test_s07_a_name_that_leads_to_no_scheduler_is_refused_with_the_reason(name: str, fault: str) -> None:
    with pytest.raises(SchedulerError, match=fault):
        build_scheduler(SchedulerOptions(scheduler=name), RealBlocks(8, 4))


def test_b15_v1_gives_a_lockstep_scheduler_that_reserves_whatever_the_policy() -> None:
    kv = RealBlocks(8, 4)
    scheduler = build_scheduler(SchedulerOptions(batching_type=BatchingType("V1")), kv)
    assert isinstance(scheduler, LockstepScheduler)
    assert type(scheduler.capacity_scheduler) is GuaranteedNoEvictScheduler
    assert len(run(batching_type=BatchingType.V1, max_num_requests=2).finished) == 5
    with pytest.raises(SchedulerError, match="V1"):
        build_scheduler(SchedulerOptions(scheduler="users_schedulers:Whole", batching_type=BatchingType.V1), kv)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_num_requests", {"max_num_requests": 0}),
        ("max_batch_tokens", {"max_batch_tokens": 0}),
        ("cache_budget", {"cache_budget": 0}),
        ("margin", {"margin": 1.0}),
        ("margin", {"margin": float("nan")}),
        ("margin", {"margin": 0.1, "policy": SchedulerPolicy.GUARANTEED_NO_EVICT}),
        ("margin", {"margin": 0.1, "batching_type": BatchingType.V1}),
        ("pause_order", {"pause_order": PauseOrder.NEWEST, "policy": SchedulerPolicy.GUARANTEED_NO_EVICT}),
        (
            "max_num_requests",
            {"max_num_requests": 9, "max_batch_tokens": 8, "batching_type": BatchingType.V1},
        ),
    ],
)
def test_an_option_out_of_range_or_unread_is_refused_by_name(field: str, options: dict) -> None:
    with pytest.raises(SchedulerError, match=rf"^{field}: "):
        SchedulerOptions(**options)


@pytest.mark.parametrize(
    ("names", "micro_batch"),
    [
        ("users_schedulers:Cautious,users_schedulers:Reversed", Reversed),
        ("users_schedulers:Reversed, users_schedulers:Cautious", Reversed),
        ("users_schedulers:Cautious,prefill_first", PrefillFirstScheduler),
    ],
)
def test_s07_both_halves_are_named_with_a_comma(names: str, micro_batch: type) -> None:
    scheduler = build_scheduler(SchedulerOptions(scheduler=names), RealBlocks(8, 4))
    assert isinstance(scheduler, SimpleScheduler)
    assert type(scheduler.capacity_scheduler) is Cautious
    assert type(scheduler.micro_batch_scheduler) is micro_batch
    assert len(run(scheduler=names).finished) == 5


@pytest.mark.parametrize(
    "names",
    [
        "fifo,prefill_first",
        "users_schedulers:Cautious,users_schedulers:Cautious",
        "users_schedulers:Whole,fifo",
        "users_schedulers:Cautious,fifo,users_schedulers:Reversed",
    ],
)
def test_s07_two_names_that_are_not_the_two_halves_are_refused(names: str) -> None:
    with pytest.raises(SchedulerError, match="one must be a CapacityScheduler and one a MicroBatchScheduler"):
        check_scheduler(names)


def test_s04_an_object_is_told_of_the_kv_cache_before_it_plans() -> None:
    class Told(Whole):
        def open(self, kv_cache_manager) -> None:
            self.blocks = kv_cache_manager.get_max_resource_count()

        def schedule_request(self, active_requests, inflight_request_ids):
            assert self.blocks
            return super().schedule_request(active_requests, inflight_request_ids)

    assert len(run(scheduler=Told(0, None)).finished) == 5
