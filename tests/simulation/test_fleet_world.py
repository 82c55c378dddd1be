"""Fleets in simulated time: a few of the worlds that `make sim` runs, and how a fleet grows, shrinks and is renewed."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.fleet import fleet as fleet_module
from genbatch.actors.fleet.fleet import Fleet, Replica, ReplicaPhase
from genbatch.actors.fleet.routing import ScaleRule
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.errors import QueueFull
from tests.simulation.fleet_world import FleetWorld

TinyModel = Callable[[str], Model]
SEEDS = 40
SHARE = 10
# `make test` draws the first of them.
FIRSTS = [pytest.param(first, marks=[pytest.mark.long] if first >= SHARE else []) for first in range(0, SEEDS, SHARE)]


@pytest.fixture
def model(tiny_model: TinyModel) -> Iterator[Model]:
    logging.disable(logging.ERROR)  # of faults that are planted
    yield tiny_model("llama")
    logging.disable(logging.NOTSET)


class Simulated(NamedTuple):
    """What a world left: its events, and how many requests were sent to another replica."""

    events: list[str]
    replayed: int


@pytest.fixture(scope="module")
def simulated(tiny_model: TinyModel) -> Callable[[int], Simulated]:
    """simulated(7) is that world after its end; each is simulated once for all tests of this file."""
    worlds: dict[int, Simulated] = {}

    def simulate(seed: int) -> Simulated:
        if seed not in worlds:
            world = FleetWorld(seed, tiny_model("llama"))
            world.simulate()
            worlds[seed] = Simulated(world.events, world.replayed)
        return worlds[seed]

    return simulate


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("first", FIRSTS)
def test_every_promise_holds_when_replicas_nodes_ways_and_gateways_fail(
    simulated: Callable[[int], Simulated], first: int
) -> None:
    for seed in range(first, first + SHARE):
        try:
            simulated(seed)
        except BaseException as error:
            error.add_note(f"replay: FleetWorld({seed}, model).simulate()")
            raise


def test_a_seed_gives_the_same_fleet_again(model: Model, simulated: Callable[[int], Simulated]) -> None:
    for seed in range(4):
        again = FleetWorld(seed, model)
        again.simulate()
        assert again.events == simulated(seed).events


def fails(model: Model) -> bool:
    for seed in range(SEEDS):
        try:
            FleetWorld(seed, model).simulate()
        except BaseException:
            return True
    return False


@pytest.mark.long
@pytest.mark.usefixtures("model")
def test_requests_are_sent_to_another_replica_in_these_worlds(simulated: Callable[[int], Simulated]) -> None:
    assert sum(simulated(seed).replayed for seed in range(SEEDS)) > 3


def test_a_request_that_is_not_sent_to_another_replica_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "MAX_TRIES", 1)  # and so nothing is sent to another one
    world = FleetWorld(0, model, ScaleRule(min_replicas=2, max_replicas=2))

    async def story(world: FleetWorld) -> None:
        while len(world.ready()) < 2:  # noqa: ASYNC110 - time is simulated
            await trio.sleep(0.5)
        await trio.sleep(1.0)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(world.ask, 0)
            world.kill(world.ready()[0])

    with pytest.raises(BaseExceptionGroup):
        world.simulate(story)


def test_a_request_that_stays_counted_when_its_replica_is_lost_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = Fleet._move

    def forgetful(self: Fleet, replica: Replica, phase: ReplicaPhase) -> None:
        if phase is ReplicaPhase.SUSPECT:
            replica.num_own += 1
        move(self, replica, phase)

    monkeypatch.setattr(Fleet, "_move", forgetful)
    assert fails(model)


def test_an_idle_fleet_shrinks_to_nothing_and_the_next_request_waits_for_the_start(model: Model) -> None:
    world = FleetWorld(1, model, ScaleRule(min_replicas=0, max_replicas=3, tokens_per_replica=16, idle_s=2.0))

    async def story(world: FleetWorld) -> None:
        for _ in range(2):
            assert not world.replicas
            await world.ask(0)
            async with trio.open_nursery() as nursery:
                for _ in range(5):  # of which each takes most of what may wait for a replica
                    nursery.start_soon(world.ask, 0, 60)
                await trio.sleep(1.1)
                assert 2 <= len(world.replicas) <= 3, "it grows by what waits"
            sizes = []
            while world.replicas:
                sizes.append(len(world.replicas))
                await trio.sleep(0.5)
            assert sizes == sorted(sizes, reverse=True) and 1 in sizes, "one after the other"

    world.simulate(story)


def test_another_version_takes_the_place_of_the_one_before_and_every_request_is_answered(model: Model) -> None:
    world = FleetWorld(2, model, ScaleRule(min_replicas=2, max_replicas=2), num_gateways=2)

    async def story(world: FleetWorld) -> None:
        async def keep_asking() -> None:
            while True:
                await world.ask(0)

        await world.ask(0)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(keep_asking)
                world.start_version(1, 1)
                seen = set()
                while {name.split(" ")[0] for name in world.replicas} != {"1"}:
                    seen.add(len(world.replicas))
                    await trio.sleep(0.1)
                assert 4 in seen, "the old ones go when the new ones are there"
                await trio.sleep(5.0)
                scope.cancel()

    world.simulate(story)


@pytest.mark.parametrize(("router", "num_gateways"), [("least_tokens", 1), ("prefix", 2), ("round_robin", 2)])
def test_polite_clients_get_their_share_beside_a_greedy_one(model: Model, router: str, num_gateways: int) -> None:
    """Four slots at two replicas, five clients with a request each, and one that has 24 open."""
    options = BatcherOptions(n_parallel=2, batch_timeout=0.0)
    rule = ScaleRule(min_replicas=2, max_replicas=2)
    world = FleetWorld(3, model, rule, num_gateways, router=router, options=options)
    tokens, served = 16, Counter[str]()
    refused = Counter[str]()

    async def story(world: FleetWorld) -> None:
        async def ask_on(client: str, gateway: int, pause_s: float) -> None:
            while True:
                try:
                    await world.ask(gateway, tokens, client)
                    served[client] += 1
                except QueueFull as error:
                    refused[client] += 1
                    assert error.retry_after_ms is not None
                    await trio.sleep(pause_s or error.retry_after_ms / 1000)

        await world.ask(0)
        await trio.sleep(5.0)  # both replicas are there
        async with trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(ask_on, "greedy", number % num_gateways, 0.25)
            await trio.sleep(2.0)
            served.clear()
            for number in range(5):
                nursery.start_soon(ask_on, f"polite {number}", number % num_gateways, 0.0)
            await trio.sleep(6.0)
            nursery.cancel_scope.cancel()

    world.simulate(story)
    polite = [served[f"polite {number}"] for number in range(5)]
    # Two gateways do not see each other's newest requests, so a polite client may meet a full queue now and then.
    assert refused["greedy"] and refused["greedy"] >= (0.98 if num_gateways > 1 else 1.0) * refused.total(), refused
    # A polite client has one request at a time, so that its slot is another's between two of them.
    assert min(polite) >= served.total() / 6 / 2, served
