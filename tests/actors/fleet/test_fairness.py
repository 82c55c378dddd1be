"""Fairness over a fleet: replicas are told what clients had elsewhere, and who waits for a replica takes turns."""

import math
from collections import Counter
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.fleet.fairness import Accounts, Line, Waiter
from genbatch.actors.scheduling.request import FairShare
from genbatch.proto.errors import EngineError, GenbatchError, QueueFull, Unavailable
from genbatch.proto.messages import TokenizeRequest
from tests.actors.fleet.test_fleet import CARD, Asked, Scripted, fleet_of

REPLICAS = ("r1", "r2", "r3")
STEPS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(REPLICAS), st.sampled_from("ab"), st.integers(0, 9)))


@given(STEPS)
def test_a_replica_that_is_told_by_all_gateways_knows_what_a_client_had_of_all_replicas(steps: list[Any]) -> None:
    gateways = (Accounts(), Accounts())
    known: Counter[tuple[str, str]] = Counter()  # by replica and client: told, and served there
    had: Counter[str] = Counter()
    for number, replica, client, tokens in steps:
        gateway = gateways[number]
        owed = gateway.tell(client, replica)
        if tokens:
            known[replica, client] += round(owed) + tokens
            had[client] += tokens
            gateway.book(client, replica, float(tokens))
        else:  # it was refused
            gateway.take_back(client, replica, owed)
    for replica in REPLICAS:
        for client in "ab":
            owed = sum(gateway.tell(client, replica) for gateway in gateways)
            assert known[replica, client] + owed == had[client]


def test_accounts_are_bounded_and_forget_the_replicas_that_are_gone() -> None:
    accounts = Accounts(max_accounts=10)
    for number in range(50):
        accounts.book(f"{number}", "r1", 5.0)
    assert len(accounts) == 10 and accounts.tell("49", "r1") == 0.0
    accounts.forget_replica("r1")
    assert accounts.tell("49", "r1") == 5.0


class Fleet:
    """Replicas of one slot each in which every request takes as many ticks as it counts for; two gateways."""

    def __init__(self, *, tell: bool) -> None:
        self.tell = tell
        self.gateways = (Accounts(), Accounts())
        self.shares = {name: FairShare() for name in REPLICAS[:2]}
        self.had: Counter[str] = Counter()

    def run(self, rounds: int) -> None:
        """The greedy client always waits at both replicas, by turns at each gateway; the modest one at the first."""
        waiting_at = {"r1": ["greedy", "modest"], "r2": ["greedy"]}
        for replica, waiting in waiting_at.items():
            for client in waiting:
                self.shares[replica].enter(client)
        for number in range(rounds):
            gateway = self.gateways[number % 2]
            for replica, fair in self.shares.items():
                for client in waiting_at[replica]:
                    owed = gateway.tell(client, replica)
                    if self.tell:
                        fair.owe(client, owed)
                turn = fair.in_turn(waiting_at[replica], str, lambda _: 100, {})[0]
                fair.charge(turn, prompt_tokens=100)
                gateway.book(turn, replica, 100.0)
                self.had[turn] += 100


def test_who_floods_both_replicas_gets_no_more_of_the_fleet_than_who_asks_one() -> None:
    fleet = Fleet(tell=True)
    fleet.run(400)
    assert fleet.had["greedy"] == pytest.approx(fleet.had["modest"], rel=0.02)
    alone = Fleet(tell=False)
    alone.run(400)
    assert alone.had["greedy"] == pytest.approx(3 * alone.had["modest"], rel=0.02)  # each replica is fair by itself


def test_what_was_had_elsewhere_is_forgiven_beyond_a_bound() -> None:
    fair = FairShare()
    fair.enter("b")
    fair.owe("a", 1e9)
    fair.enter("a")
    served = 0
    while fair.in_turn(["a", "b"], str, lambda _: 100, {})[0] == "b":
        fair.charge("b", prompt_tokens=100)
        served += 100
        assert served < 20_000
    assert served > 10_000


@pytest.mark.trio
async def test_requests_carry_their_clients_name_and_what_it_had_elsewhere(nursery: trio.Nursery) -> None:
    fleet, (one, two) = fleet_of("one", "two")
    fleet.name = "g"
    for number in range(2):
        Asked(fleet, nursery, prompt=f"{number}", client="alice")
    await wait_all_tasks_blocked()
    for replica in (one, two):
        assert [request.payer and (request.payer.name, request.payer.served) for request in replica.asked] == [
            ("g/alice", 0.0)
        ]
        replica.end()  # one token of a prompt of one
    await wait_all_tasks_blocked()
    for number in range(2):
        Asked(fleet, nursery, prompt=f"{number}", client="alice")
    await wait_all_tasks_blocked()
    for replica in (one, two):
        payer = replica.asked[1].payer
        assert payer is not None and payer.served == 3.0
    one.end(QueueFull("full", retry_after_ms=5))
    two.end(EngineError("it was begun"))
    await wait_all_tasks_blocked()
    # What was refused was not told: the next one says it again, and what each replica served meanwhile.
    assert fleet.accounts.tell("alice", "one") == 3.0 and fleet.accounts.tell("alice", "two") == 0.0
    Asked(fleet, nursery, client="alice", tenant="t")
    await wait_all_tasks_blocked()
    assert fleet.accounts.tell("t", "one") == 0.0  # the tenant's account, whoever asks in its name
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_while_there_is_no_replica_clients_take_turns_and_nobody_overtakes_the_line(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    fleet, _ = fleet_of()
    many = [Asked(fleet, nursery, prompt=f"a{number}", client="a", priority=int(number == 0)) for number in range(12)]
    await trio.sleep(0.1)
    few = Asked(fleet, nursery, prompt="b0", client="b")
    await trio.sleep(0.1)
    assert fleet.num_waiting == 13
    late = Scripted("late")
    fleet.join("late", late, CARD)  # ten requests at once
    newcomer = Asked(fleet, nursery, prompt="a12", client="a")
    await trio.sleep(0.1)
    sent = [request.prompt for request in late.asked]
    assert len(sent) == 10 and "b0" in sent
    assert "a0" not in sent and "a12" not in sent  # the least urgent of its client's, and who came later
    for place in range(4):
        late.end(place=place)
    await trio.sleep(0.1)
    assert len(late.asked) == 14 and fleet.num_waiting == 0
    for place in range(4, len(late.ends)):
        late.end(place=place)
    await trio.sleep(0.1)
    assert all(one.end.text == "late" for one in (*many, few, newcomer))
    fleet.check_integrity()


@pytest.mark.trio
@pytest.mark.parametrize(
    ("accounts", "waiting"), [("aaaa", "aa"), ("aaabb", "aab"), ("baaa", "ba"), ("aabcda", "aabc")]
)
async def test_one_client_may_fill_half_of_the_places_in_the_line_that_others_leave(
    accounts: str, waiting: str
) -> None:
    line = Line(limit=4, retry_ms=7)
    refused: list[GenbatchError] = []

    async def wait(account: str, number: int) -> None:
        try:
            await line.wait(Waiter(account, 10, (0, number)), math.inf)
        except QueueFull as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        for account in accounts:
            nursery.start_soon(wait, account, len(line))
            await wait_all_tasks_blocked()
        assert "".join(one.account for one in line._waiting) == waiting
        assert len(refused) == len(accounts) - len(waiting) and all(one.retry_after_ms == 7 for one in refused)
        nursery.cancel_scope.cancel()
    assert len(line) == 0


@pytest.mark.trio
async def test_a_question_waits_for_the_first_replica_and_says_when_none_comes(autojump_clock: MockClock) -> None:
    fleet, _ = fleet_of(default_deadline_s=5.0)
    with pytest.raises(Unavailable, match="no replica"):
        await fleet.call(TokenizeRequest(prompt="a"))
    async with trio.open_nursery() as nursery:

        async def join() -> None:
            await trio.sleep(1.0)
            fleet.join("late", Scripted("late"), CARD)

        nursery.start_soon(join)
        assert (await fleet.call(TokenizeRequest(prompt="a"))).token_ids == [1, 2]


@pytest.mark.trio
async def test_who_gives_up_in_the_line_has_had_nothing(autojump_clock: MockClock) -> None:
    line = Line(limit=4, retry_ms=7)
    assert not await line.wait(Waiter("a", 10, (0, 0)), trio.current_time() + 1)
    assert line._fair.served("a") == 0.0 and len(line) == 0
