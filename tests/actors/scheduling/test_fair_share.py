"""FairShare: who was served least is next, whatever the others pile up."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.scheduling.request import MAX_AWAY, OUTPUT_WEIGHT, PROMPT_WEIGHT, FairShare


@dataclass(frozen=True)
class Waiting:
    client: str
    prompt_tokens: int = 10
    output_tokens: int = 20


def in_turn(fair: FairShare, waiting: list[Waiting], running: dict[str, int] | None = None) -> list[Waiting]:
    return fair.in_turn(waiting, lambda one: one.client, lambda one: one.prompt_tokens, running or {})


def serve_all(fair: FairShare, waiting: list[Waiting]) -> list[Waiting]:
    """Serves one after another, each whole, and asks anew for every next one."""
    for one in waiting:
        fair.enter(one.client)
    served = []
    while waiting:
        one = in_turn(fair, waiting)[0]
        waiting.remove(one)
        fair.charge(one.client, prompt_tokens=one.prompt_tokens)
        fair.leave(one.client, output_tokens=one.output_tokens)
        served.append(one)
    return served


def test_one_client_is_served_in_the_order_it_came() -> None:
    waiting = [Waiting("a", size) for size in (5, 1, 9)]
    assert serve_all(FairShare(), list(waiting)) == waiting


def test_a_client_with_two_requests_does_not_wait_behind_one_with_twenty() -> None:
    served = serve_all(FairShare(), [Waiting("many")] * 20 + [Waiting("few")] * 2)
    assert [one.client for one in served[:4]] == ["many", "few", "many", "few"]


def test_long_answers_cost_turns() -> None:
    served = serve_all(FairShare(), [Waiting("long", 10, 300)] * 5 + [Waiting("short", 10, 100)] * 15)
    first = [one.client for one in served[:12]]
    assert 2 * first.count("long") < first.count("short")


def test_what_runs_counts_before_it_has_ended() -> None:
    fair = FairShare()
    for client in ("a", "b"):
        fair.enter(client)
    waiting = [Waiting("a"), Waiting("b")]
    assert in_turn(fair, waiting)[0].client == "a"
    assert in_turn(fair, waiting, {"a": 1})[0].client == "b"


def test_nobody_saves_up_a_claim_by_staying_away() -> None:
    fair = FairShare()
    fair.enter("busy")
    fair.charge("busy", prompt_tokens=10_000)
    fair.enter("back")
    assert fair.served("back") == fair.served("busy")


def test_a_client_that_left_when_all_had_gone_does_not_start_anew_below_the_next() -> None:
    fair = FairShare()
    fair.enter("first")
    fair.leave("first", output_tokens=500)
    fair.enter("second")
    assert fair.served("second") == 500 * OUTPUT_WEIGHT


def test_a_prompt_alone_is_charged_as_a_prompt() -> None:
    fair = FairShare()
    fair.enter("a")
    fair.charge("a", prompt_tokens=10)
    assert fair.served("a") == 10 * PROMPT_WEIGHT
    fair.charge("a", output_tokens=10)
    assert fair.served("a") == 10 * PROMPT_WEIGHT + 10 * OUTPUT_WEIGHT


def test_while_few_are_away_what_each_was_served_is_remembered() -> None:
    fair = FairShare()
    for number in range(2 * MAX_AWAY):
        fair.enter(str(number))
        fair.leave(str(number), output_tokens=1)
    assert all(fair.served(str(number)) >= OUTPUT_WEIGHT for number in range(2 * MAX_AWAY))


def test_clients_that_come_once_are_forgotten() -> None:
    fair = FairShare()
    for number in range(5 * MAX_AWAY):
        fair.enter(str(number))
        fair.leave(str(number), output_tokens=1)
    assert len(fair._served) <= 2 * MAX_AWAY + 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=60))
def test_while_two_clients_wait_neither_gets_ahead_by_more_than_its_largest_requests(
    asked: list[tuple[str, int, int]],
) -> None:
    fair = FairShare()
    waiting = [Waiting(*one) for one in asked]
    for one in waiting:
        fair.enter(one.client)
    most = max(one.prompt_tokens + OUTPUT_WEIGHT * one.output_tokens for one in waiting)
    while waiting:
        one = in_turn(fair, waiting)[0]
        waiting.remove(one)
        fair.charge(one.client, prompt_tokens=one.prompt_tokens)
        fair.leave(one.client, output_tokens=one.output_tokens)
        served = [fair.served(client) for client in {other.client for other in waiting}]
        assert not served or max(served) - min(served) <= most


@given(st.lists(st.sampled_from("abcd"), max_size=30))
def test_the_order_is_a_permutation_that_keeps_each_clients_own(clients: list[str]) -> None:
    fair = FairShare()
    waiting = [Waiting(client, number) for number, client in enumerate(clients)]
    for one in waiting:
        fair.enter(one.client)
    order = in_turn(fair, waiting)
    assert sorted(order, key=lambda one: one.prompt_tokens) == waiting
    for client in set(clients):
        own = [one.prompt_tokens for one in order if one.client == client]
        assert own == sorted(own)
