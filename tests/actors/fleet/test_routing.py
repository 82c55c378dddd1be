"""Routers: pure, even, faithful to prefixes within a bound, and silent about other tenants."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.fleet.routing import (
    MAX_BLOCKS,
    MAX_HOLDERS,
    ROUTERS,
    PrefixAffinity,
    PrefixMap,
    ReplicaView,
    Roster,
    Router,
    RouteRequest,
    RouterError,
    build_router,
    content_blocks,
)
from genbatch.proto.messages import GenerateRequest, Message

LONG = "You are an assistant of the harbour office. " * 100


class Last(Router):
    """A user's own."""

    def route(self, request: RouteRequest, replicas: Roster) -> ReplicaView:
        return replicas[-1]


class NeedsMore(Last):
    def __init__(self, port: int) -> None:
        self.port = port


def roster(*loads: int) -> Roster:
    return Roster(ReplicaView(f"r{place}", load) for place, load in enumerate(loads))


def prompted(text: str, tenant: str = "", number: int = 0) -> RouteRequest:
    seen = content_blocks(GenerateRequest(prompt=text), tenant)
    return RouteRequest(number, seen.blocks, seen.prompt_tokens, seen.block_tokens)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_route_is_a_function_of_what_is_asked_and_known(name: str) -> None:
    router, replicas = build_router(name), roster(*range(100))
    router.learn("r7", prompted(LONG).blocks)
    requests = [prompted(LONG[: 17 * number] * 2, number=number) for number in range(50)]
    first = [router.route(request, replicas).name for request in requests]
    assert [router.route(request, replicas).name for request in requests] == first


@pytest.mark.parametrize("name", ROUTERS)
def test_nobody_is_routed_to_who_takes_no_requests(name: str) -> None:
    router = build_router(name)
    replicas = Roster([ReplicaView("draining", takes_requests=False), ReplicaView("open", 10_000)])
    router.learn("draining", prompted(LONG).blocks)
    assert router.route(prompted(LONG), replicas).name == "open"
    with pytest.raises(RouterError, match="no replica takes requests"):
        router.route(prompted(LONG), Roster())


def test_round_robin_takes_turns() -> None:
    names = [build_router("round_robin").route(prompted("a", number=i), roster(9, 0, 0)).name for i in range(6)]
    assert names == ["r0", "r1", "r2"] * 2


def test_the_least_work_wins_and_equals_take_turns() -> None:
    router = build_router("least_tokens")
    assert router.route(prompted("a"), roster(50, 7, 90)).name == "r1"
    assert {router.route(prompted("a", number=i), roster(7, 50, 7)).name for i in range(9)} == {"r0", "r2"}
    busy = Roster([ReplicaView("slots taken", 0, num_open=32), ReplicaView("a prompt", 300)])
    assert router.route(prompted("a"), busy).name == "a prompt"


@pytest.mark.parametrize("name", ["least_tokens", "prefix"])
def test_a_full_replica_is_asked_only_when_all_are_full(name: str) -> None:
    router = build_router(name)
    router.learn("full", prompted(LONG).blocks)
    full, busy = ReplicaView("full", room=0), ReplicaView("busy", 100_000)
    assert router.route(prompted(LONG), Roster([full, busy])).name == "busy"
    busy.room = 0
    assert router.route(prompted(LONG), Roster([full, busy])).name == "full"


@pytest.mark.parametrize("name", ["least_tokens", "prefix"])
def test_of_a_thousand_replicas_a_few_are_looked_at_and_work_stays_even(name: str) -> None:
    router, replicas = build_router(name), roster(*[0] * 1000)
    for number in range(20_000):
        router.route(prompted("short", number=number), replicas).tokens_waiting += 100
    loads = [replica.tokens_waiting for replica in replicas]
    assert sum(loads) == 2_000_000
    assert max(loads) <= 2000 + 400 and min(loads) >= 2000 - 600


def test_a_prompt_follows_its_beginning() -> None:
    router = PrefixAffinity()
    router.learn("r2", prompted(LONG).blocks)
    router.learn("r1", prompted(LONG[:1000]).blocks)
    assert router.route(prompted(LONG + "How deep is it?"), roster(0, 0, 10)).name == "r2"
    assert router.route(prompted(LONG[:1200] + "?" * 3000), roster(300, 0, 300)).name == "r1"
    assert router.route(prompted("Another thing" * 100), roster(0, 10, 10)).name == "r0"


def test_a_replica_that_is_gone_is_not_followed() -> None:
    router = PrefixAffinity()
    router.learn("gone", prompted(LONG).blocks)
    router.learn("r2", prompted(LONG[:1000]).blocks)
    assert router.route(prompted(LONG), roster(0, 5, 10)).name == "r2"


def test_tenants_never_share() -> None:
    router = PrefixAffinity()
    router.learn("r1", prompted(LONG, "alice").blocks)
    for stranger in ("bob", "", "alice "):
        assert router.route(prompted(LONG, stranger), roster(0, 1)).name == "r0"
        assert not set(prompted(LONG, stranger).blocks) & set(prompted(LONG, "alice").blocks)
    assert router.route(prompted(LONG, "alice"), roster(0, 1)).name == "r1"


def test_a_hot_prefix_does_not_drown_one_replica() -> None:
    """Every request has the same long prompt, and nobody ever gets anything done: the worst there is."""
    router, replicas = PrefixAffinity(), roster(*[0] * 8)
    hot = prompted(LONG)
    for _ in range(800):
        chosen = router.route(hot, replicas)
        router.learn(chosen.name, hot.blocks)
        chosen.tokens_waiting += hot.prompt_tokens
    counts = [replica.tokens_waiting // hot.prompt_tokens for replica in replicas]
    assert sum(counts) == 800 and max(counts) - min(counts) <= 3


def test_a_cold_prefix_stays_where_it_is() -> None:
    """Sixty prompts on four replicas, each answered before the next comes: each is computed about once."""
    router, replicas, draw = PrefixAffinity(), roster(0, 0, 0, 0), random.Random(1)
    placed: dict[int, set[str]] = {}
    for number in range(2000):
        topic = draw.randrange(60)
        request = prompted(f"{topic} " * 400, number=number)
        chosen = router.route(request, replicas)
        router.learn(chosen.name, request.blocks)
        placed.setdefault(topic, set()).add(chosen.name)
        chosen.num_open = (chosen.num_open + 1) % 4
    assert sum(map(len, placed.values())) == 60


@given(
    st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 60), max_size=12, unique=True)), max_size=60),
    st.lists(st.integers(0, 60), unique=True),
)
def test_the_map_is_bounded_and_says_nothing_that_was_not_learned(
    steps: list[tuple[int, list[int]]], asked: list[int]
) -> None:
    known, learned = PrefixMap(max_names=25), dict[str, set[int]]()
    for place, blocks in steps:
        known.learn(f"r{place}", blocks)
        learned.setdefault(f"r{place}", set()).update(blocks)
        assert len(known) <= 25
        assert not blocks or known.depths(blocks)[f"r{place}"] == len(blocks)
    for name, depth in known.depths(asked).items():
        assert asked[depth - 1] in learned[name]


def test_the_map_keeps_beginnings_longest_and_few_holders() -> None:
    known = PrefixMap(max_names=4)
    known.learn("a", [1, 2, 3, 4])
    known.learn("b", [9])
    assert known.depths([1, 2, 3, 4]) == {"a": 3}
    for place in range(3 * MAX_HOLDERS):
        known.learn(f"r{place}", [1])
    assert list(known.depths([1])) == [f"r{place}" for place in range(2 * MAX_HOLDERS, 3 * MAX_HOLDERS)]


def test_names_are_of_content_and_of_all_before_it() -> None:
    one, two = prompted("a" * 512 + "b" * 256), prompted("c" * 512 + "b" * 256)
    assert len(one.blocks) == 3 and not set(one.blocks) & set(two.blocks)
    assert prompted("a" * 600).blocks == one.blocks[:2]
    assert len(prompted("x" * 100_000).blocks) == MAX_BLOCKS and prompted("x" * 100_000).prompt_tokens == 25_000
    ids = content_blocks(GenerateRequest(token_ids=list(range(200))), "")
    assert len(ids.blocks) == 3 and ids.prompt_tokens == 200
    content_blocks(GenerateRequest(token_ids=[-1, 2**40] * 64), "")  # refused by the engine, named all the same
    split = content_blocks(GenerateRequest(messages=[Message(role="user", content=LONG)]), "")
    joined = content_blocks(
        GenerateRequest(messages=[Message(role="user", content=LONG[:300]), Message(role="user", content=LONG[300:])]),
        "",
    )
    assert not set(split.blocks) & set(joined.blocks)


def test_a_users_own_router_is_named_by_module_and_class() -> None:
    router = build_router(f"{__name__}:Last")
    assert router.route(prompted("a"), roster(0, 9)).name == "r1"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fastest", "neither one of 'round_robin', 'least_tokens', 'prefix'"),
        ("no_such_module:Router", "cannot be imported"),
        (f"{__name__}:Missing", "no subclass of Router"),
        (f"{__name__}:roster", "no subclass of Router"),
        ("genbatch.actors.fleet.routing:Router", "no subclass of Router with a route"),
        (f"{__name__}:NeedsMore", "cannot be built without arguments"),
    ],
)
def test_a_name_that_leads_to_no_router_is_refused(name: str, said: str) -> None:
    with pytest.raises(RouterError, match=said):
        build_router(name)


def test_of_a_prompt_that_is_all_there_the_last_token_is_evaluated_still() -> None:
    router = PrefixAffinity()
    router.learn("r0", [1, 2])
    request = RouteRequest(0, (1, 2), 128, 64)
    saved = int(router.saved_weight * 127)
    assert router.route(request, roster(saved - 1, 0)).name == "r0"
    assert router.route(request, roster(saved + 1, 0)).name == "r1"
