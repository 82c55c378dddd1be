"""Which models are loaded: every rule of LoadedModels on a clock of numbers, and random histories over all of them."""

import math
import random

import pytest

from genbatch.actors.service.loaded_models import (
    BACK_OFF_S,
    LIVED_S,
    MAX_BACK_OFF_S,
    LoadedModels,
    OnDemandModel,
    Plan,
    Residence,
    Ticket,
)
from genbatch.proto.errors import QueueFull, Unavailable


class World:
    """LoadedModels with engines that obey at once or when they are told to, on a clock of numbers."""

    def __init__(self, budget: int = 100, max_waiting: int = 4, **sizes: int) -> None:
        models = [OnDemandModel(name, size, 10.0, max_waiting) for name, size in sizes.items()]
        self.models = LoadedModels(models, budget)
        self.now = 0.0
        self.log: list[str] = []

    def __getitem__(self, name: str) -> OnDemandModel:
        return self.models.models[name]

    def plan(self) -> Plan:
        plan = self.models.plan(self.now)
        self.log += [f"unload {model.name}" for model in plan.unload] + [f"load {model.name}" for model in plan.load]
        for model in plan.unload:
            assert model.num_open == 0, "a model goes with open requests"
        return plan

    def enter(self, name: str) -> Ticket:
        ticket = self.models.enter(name, 1, self.now)
        self.plan()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self.models.leave(ticket, self.now)
        self.plan()

    def ready(self, name: str, *, after: float = 1.0, num_bytes: int = 0) -> None:
        self.now += after
        self.models.engine_is_ready(name, num_bytes, self.now)
        self.plan()

    def ended(self, name: str, reason: str = "") -> None:
        self.models.engine_has_ended(name, reason, self.now)
        self.plan()

    def at(self, now: float) -> None:
        self.now = now
        self.plan()

    def use(self, name: str) -> None:
        """Loads a model by a request that ends at once."""
        ticket = self.enter(name)
        self.ready(name)
        self.leave(ticket)


def test_the_first_request_loads_a_model_and_the_requests_meanwhile_wait_for_the_same_load() -> None:
    world = World(a=10, b=10)
    first, second = world.enter("a"), world.enter("a")
    assert world.log == ["load a"] and not first.is_admitted and world["a"].state(0.0) == "loading"
    world.ready("a")
    assert first.is_admitted and second.is_admitted and world.enter("a").is_admitted
    assert world.log == ["load a"] and world["a"].num_open == 3 and world["b"].phase is Residence.UNLOADED


def test_models_are_loaded_one_after_another() -> None:
    world = World(a=10, b=10)
    world.enter("a")
    world.enter("b")
    assert world.log == ["load a"]
    world.ready("a")
    assert world.log == ["load a", "load b"]


def test_an_idle_model_is_unloaded_after_keep_alive_and_not_before() -> None:
    world = World(a=10)
    ticket = world.enter("a")
    world.ready("a")
    world.at(500.0)
    assert world.log == ["load a"]  # it has an open request
    world.leave(ticket)
    assert world.models.plan(509.9).wake_at == 510.0
    assert world.log == ["load a"]
    world.at(510.0)
    assert world.log == ["load a", "unload a"]
    waiting = world.enter("a")  # while it goes
    assert world.log == ["load a", "unload a"]
    world.ended("a")
    assert world.log == ["load a", "unload a", "load a"]
    world.ready("a")
    assert waiting.is_admitted


@pytest.mark.parametrize(("keep_alive", "unloads_at"), [(0.0, 1.0), (-1.0, math.inf), (5.0, 6.0)])
def test_keep_alive_0_unloads_at_once_and_a_negative_one_keeps(keep_alive: float, unloads_at: float) -> None:
    world = World(a=10)
    ticket = world.enter("a")
    world.ready("a")
    world["a"].keep_alive = keep_alive
    world.plan()
    assert world.log == ["load a"]
    world.leave(ticket)
    assert ("unload a" in world.log) is (unloads_at == 1.0)
    if unloads_at > 1.0:
        assert world.models.plan(world.now).wake_at == unloads_at
    else:
        world.ended("a")
        assert world["a"].keep_alive == 10.0  # it was for that load


def test_the_least_recently_used_models_make_room() -> None:
    world = World(budget=30, a=10, b=10, c=10, d=10, large=25)
    for name in "abc":
        world.use(name)
    ticket = world.enter("a")
    world.at(5.0)
    world.leave(ticket)  # so that b is the least recently used one
    world.enter("d")
    assert world.log[-1] == "unload b"
    world.ended("b")
    assert world.log[-1] == "load d"
    world.ready("d")
    world.at(9.0)
    world.enter("large")
    assert world.log[-2:] == ["unload a", "unload c"] and world["d"].phase is not Residence.UNLOADING  # d has a request
    world.ended("a")
    world.ended("c")
    assert world.log[-1] == "unload c" and world["d"].is_closing


def test_a_busy_model_takes_no_newcomers_once_another_one_waits_for_its_room() -> None:
    world = World(budget=15, a=10, b=10)
    first = world.enter("a")
    world.ready("a")
    other = world.enter("b")
    second = world.enter("a")
    assert second.is_admitted  # its turn lasts as long as its load took
    world.at(2.0)
    late = world.enter("a")
    assert not late.is_admitted and world.log == ["load a"]
    world.leave(first)
    assert world.log == ["load a"]
    world.leave(second)
    assert world.log == ["load a", "unload a"]
    world.ended("a")
    world.ready("b", after=3.0)
    assert other.is_admitted and not late.is_admitted
    world.leave(other)
    assert world.log == ["load a", "unload a", "load b"]  # b's turn: three seconds
    assert world.models.plan(world.now).wake_at == world.now + 3.0
    world.at(world.now + 3.0)
    world.ended("b")
    world.ready("a")
    assert late.is_admitted
    assert world.log == ["load a", "unload a", "load b", "unload b", "load a"]


def test_a_model_takes_newcomers_again_when_nobody_waits_for_its_room_any_more() -> None:
    world = World(budget=15, a=10, b=10)
    world.enter("a")
    world.ready("a")
    other = world.enter("b")
    world.at(5.0)
    late = world.enter("a")
    assert not late.is_admitted
    world.leave(other)
    assert late.is_admitted and world.log == ["load a"]


def test_a_load_that_nobody_waits_for_goes_on_until_another_model_is_wanted() -> None:
    world = World(budget=15, a=10, b=10)
    first, second = world.enter("a"), world.enter("a")
    world.leave(first)
    world.enter("b")
    assert world.log == ["load a"] and not second.is_admitted  # others wait for this load
    world.leave(second)
    assert world.log == ["load a", "unload a"]
    world.ended("a")
    assert world.log == ["load a", "unload a", "load b"]
    alone = World(a=10)
    alone.leave(alone.enter("a"))
    alone.ready("a")
    assert alone.log == ["load a"] and alone["a"].phase is Residence.LOADED


def test_a_failed_load_ends_its_requests_and_is_tried_again_after_a_bounded_pause() -> None:
    world = World(a=10, b=10)
    pauses = []
    for _ in range(9):
        ticket = world.enter("a")
        assert world.log[-1] == "load a"
        plan_error = world.models.engine_has_ended("a", "no such file", world.now)
        plan = world.plan()
        assert plan.settled == [ticket] and isinstance(plan_error, Unavailable)
        assert "the model a could not be loaded" in str(ticket.error)
        assert "no such file" not in str(ticket.error)  # a path is for the log
        assert world["a"].state(world.now) == "failed"
        with pytest.raises(Unavailable, match="the model a could not be loaded") as refused:
            world.enter("a")
        assert refused.value.retry_after_ms is not None
        pauses.append(refused.value.retry_after_ms / 1000)
        world.use("b")  # the others are served
        world.now = world["a"].retry_at
    assert pauses[:3] == [BACK_OFF_S, 2 * BACK_OFF_S, 4 * BACK_OFF_S] and pauses[-1] == MAX_BACK_OFF_S
    assert world["a"].num_failed_loads == 9


def test_a_model_whose_engine_died_with_requests_is_loaded_again_before_others() -> None:
    world = World(budget=15, a=10, b=10)
    ticket = world.enter("a")
    world.ready("a")
    world.enter("b")
    world.ended("a", "was killed")
    assert world.log == ["load a", "load a"] and world["a"].num_open == 1
    world.ready("a")
    world.ended("a", "was killed")
    assert world.log == ["load a", "load a", "load b"]  # the second death costs a pause
    assert world["a"].num_deaths == 2 and world["a"].retry_at == world.now + BACK_OFF_S
    world.leave(ticket)
    other = World(a=10)
    other.enter("a")
    other.ready("a")
    for _ in range(3):
        other.now += LIVED_S
        other.ended("a", "was killed")
        other.ready("a")
    assert other["a"].failures == 1 and other.log == ["load a"] * 4


def test_a_model_that_never_fits_is_refused_and_one_that_was_measured_larger_is_served_alone() -> None:
    world = World(budget=30, a=31, b=10, c=10)
    with pytest.raises(Unavailable, match=r"the model \w+ takes .* GiB, .*model_memory") as refused:
        world.enter("a")
    assert refused.value.retry_after_ms is None
    world.use("b")
    ticket = world.enter("c")
    world.ready("c", num_bytes=100)
    world.at(5.0)
    assert world.log[-1] == "unload b" and ticket.is_admitted and world["c"].phase is Residence.LOADED
    world.ended("b")
    world.leave(ticket)
    world.enter("b")
    world.ended("c")
    assert world.log[-2:] == ["unload c", "load b"]


def test_requests_that_wait_for_a_load_are_bounded() -> None:
    world = World(a=10, max_waiting=2)
    tickets = [world.enter("a"), world.enter("a")]
    with pytest.raises(QueueFull, match="2 requests wait for the model a to load") as full:
        world.enter("a")
    assert full.value.retry_after_ms
    world.leave(tickets[0])
    world.enter("a")
    large = World(a=10, max_waiting=2)
    large.models.enter("a", 9, 0.0)  # an only request gets room, whatever its size; its engine checks that


def test_a_draining_service_loads_nothing_more_and_refuses_who_waits() -> None:
    world = World(a=10, b=10)
    world.use("b")
    ticket = world.enter("a")
    world.models.drain()
    plan = world.plan()
    assert plan.settled == [ticket] and isinstance(ticket.error, Unavailable) and ticket.error.retry_after_ms
    for name in "ab":
        with pytest.raises(Unavailable, match="draining"):
            world.enter(name)
    world.ready("a")
    assert world.log == ["load b", "load a"]


def test_a_new_gateway_learns_of_engines_that_run_and_of_ends_that_it_did_not_ask_for() -> None:
    world = World(a=10)
    world.ready("a")
    assert world.enter("a").is_admitted and world.log == []
    fresh = World(a=10)
    fresh.ended("a")
    fresh.ended("a", "an old failure")
    ticket = fresh.enter("a")
    fresh.ended("a")  # of an unload that the gateway before had asked for
    assert fresh.log == ["load a"] and fresh["a"].phase is Residence.LOADING
    fresh.ready("a")
    assert ticket.is_admitted


@pytest.mark.parametrize("seed", range(40))
def test_no_request_is_forgotten_and_no_memory_is_taken_twice_in_random_histories(seed: int) -> None:
    """Callers come and leave, loads take their time and fail, engines die; in the end everybody has an answer."""
    draw = random.Random(seed)
    names = "abcde"[: draw.randint(2, 5)]
    world = World(budget=20, max_waiting=50, **{name: draw.choice([5, 10, 20]) for name in names})
    open_tickets: list[Ticket] = []
    for step in range(400):
        world.now += draw.choice([0.0, 0.1, 1.0, 5.0])
        if draw.random() < 0.5 and step < 300:
            try:
                open_tickets.append(world.models.enter(draw.choice(names), 1, world.now))
            except Unavailable as error:
                assert error.retry_after_ms
        if open_tickets and draw.random() < 0.5:
            world.models.leave(open_tickets.pop(draw.randrange(len(open_tickets))), world.now)
        obey(world, draw, faulty=True)
        world.plan()
        open_tickets = [ticket for ticket in open_tickets if ticket.error is None]
        taken = [model for model in world.models.models.values() if model.takes_memory]
        assert len(taken) < 2 or sum(model.num_bytes for model in taken) <= 20
    for _ in range(200):  # from now on nothing fails
        world.now += 70.0
        obey(world, draw, faulty=False)
        world.plan()
        for ticket in [ticket for ticket in open_tickets if ticket.is_admitted]:
            world.models.leave(ticket, world.now)
            open_tickets.remove(ticket)
    assert not open_tickets, "a request waits for ever"
    assert all(model.num_open == 0 and not model.waiting for model in world.models.models.values())
    assert all(model.phase is Residence.UNLOADED for model in world.models.models.values())


def obey(world: World, draw: random.Random, *, faulty: bool) -> None:
    """Lets some of the engines start, end, fail or die."""
    for name, model in world.models.models.items():
        if faulty and draw.random() < 0.5:
            continue
        if model.phase is Residence.UNLOADING:
            world.models.engine_has_ended(name, "", world.now)
        elif model.phase is Residence.LOADING and faulty and draw.random() < 0.2:
            world.models.engine_has_ended(name, "broken", world.now)
        elif model.phase is Residence.LOADING:
            world.models.engine_is_ready(name, 0, world.now)
        elif model.phase is Residence.LOADED and faulty and draw.random() < 0.05:
            world.models.engine_has_ended(name, "killed", world.now)
