"""A flood of newcomers pushes itself out; who has settled stays."""

import resource
from contextlib import ExitStack
from functools import partial

import pytest

from genbatch.actors.gateways.accepting import ConnectionLimit, MessageBudget, max_connections


def test_a_newcomer_pushes_out_the_one_that_was_silent_longest() -> None:
    limit = ConnectionLimit(3)
    pushed: list[int] = []
    with ExitStack() as stack:
        seats = []
        for index in range(6):
            seats.append(stack.enter_context(limit.seat(partial(pushed.append, index))))
            seats[0].settle()
        assert pushed == [1, 2, 3]
        assert not any(seat.is_refused for seat in seats)
        assert len(limit) == 6  # those that were pushed out are still on their way
    assert len(limit) == 0


def test_a_newcomer_among_the_settled_is_refused() -> None:
    limit = ConnectionLimit(2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(limit.seat(pytest.fail)).settle()
        with limit.seat(pytest.fail) as seat:
            assert seat.is_refused
    with limit.seat(pytest.fail) as seat:
        assert not seat.is_refused


def test_who_was_busy_is_a_newcomer_again_and_the_last_to_go() -> None:
    limit = ConnectionLimit(2)
    pushed: list[int] = []
    with ExitStack() as stack:
        first, _ = (stack.enter_context(limit.seat(partial(pushed.append, index))) for index in range(2))
        with first.busy():
            stack.enter_context(limit.seat(partial(pushed.append, 2)))
            stack.enter_context(limit.seat(partial(pushed.append, 3)))
            assert pushed == [1, 2]
        stack.enter_context(limit.seat(pytest.fail))
        assert pushed == [1, 2, 3]
        stack.enter_context(limit.seat(pytest.fail))
        assert pushed == [1, 2, 3, 0]


def test_the_half_message_that_has_not_grown_for_longest_makes_room_for_others() -> None:
    room = MessageBudget(100)
    pushed: list[int] = []
    with ExitStack() as stack:
        shares = [stack.enter_context(room.share(partial(pushed.append, index))) for index in range(4)]
        for share in shares[:3]:
            share.holds(30)
        shares[0].holds(40)  # it grows, so the second is the oldest
        assert not pushed and room.num_bytes == 100
        shares[3].holds(10)
        assert pushed == [1] and room.num_bytes == 80
        shares[2].holds(0)  # it has ended
        shares[3].holds(90)
        assert pushed == [1, 0] and room.num_bytes == 90
        shares[3].holds(101)  # it is the only one
        assert pushed == [1, 0, 3] and room.num_bytes == 0
        shares[0].holds(50)
    assert room.num_bytes == 0


@pytest.mark.parametrize(("soft", "most"), [(1024, 256), (10**6, 4096), (3, 1), (resource.RLIM_INFINITY, 4096)])
def test_a_gateway_takes_a_share_of_the_descriptors(monkeypatch: pytest.MonkeyPatch, soft: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
    assert max_connections() == most
