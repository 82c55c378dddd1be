"""Admission: bounded queues with room for newcomers, shares, hopeless deadlines refused at once."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from genbatch.actors.batcher.open_requests import Admission, Load
from genbatch.proto.errors import DeadlineExceeded, InvalidRequest, QueueFull

ADMISSION = Admission(n_parallel=4, max_queue=16, max_client_queue_share=0.5, max_client_open=2.0)


def load(**changes: Any) -> Load:
    return Load(**{"free_slots": 0, "waiting": 0, "waiting_of": {}, "open_of": {}, "service_s": None, **changes})


def check(num_sequences: int = 1, client: str = "a", patience_s: float | None = None, **changes: Any) -> None:
    ADMISSION.check(num_sequences=num_sequences, client=client, patience_s=patience_s, load=load(**changes))


def test_the_queue_holds_max_queue_and_what_free_slots_take_at_once() -> None:
    check(num_sequences=16)
    check(num_sequences=20, free_slots=4)
    with pytest.raises(QueueFull):
        check(num_sequences=17)
    with pytest.raises(QueueFull):
        check(waiting=16)


@pytest.mark.parametrize(
    ("in_turn", "there", "slots"),
    [
        pytest.param(True, {"waiting": 16}, 1, id="full"),
        pytest.param(True, {"waiting": 16, "num_sequences": 3}, 3, id="full, several answers"),
        pytest.param(True, {"waiting": 8, "waiting_of": {"a": 8}, "open_of": {"a": 12}}, 1, id="its share alone"),
        pytest.param(True, {"waiting": 11, "waiting_of": {"a": 5, "b": 6}, "open_of": {"a": 7, "b": 8}}, 2, id="turns"),
        pytest.param(
            False, {"waiting": 11, "waiting_of": {"a": 5, "b": 6}, "open_of": {"a": 7, "b": 8}}, 2.2, id="one line"
        ),
        pytest.param(True, {"open_of": {"a": 8, "b": 1}}, 0.5, id="open"),  # 8 run, and one must end
    ],
)
def test_a_refused_client_comes_again_when_a_place_for_it_is_likely_free(
    in_turn: bool, there: dict[str, Any], slots: float
) -> None:
    changes = dict(there)
    num_sequences = changes.pop("num_sequences", 1)
    for service_s, pace_ms in ((2.0, 500), (None, 50)):
        with pytest.raises(QueueFull) as refused:
            replace(ADMISSION, in_turn=in_turn).check(
                num_sequences=num_sequences, client="a", patience_s=None, load=load(service_s=service_s, **changes)
            )
        assert refused.value.retry_after_ms == round(pace_ms * slots)


def test_a_place_that_is_there_is_for_a_client_with_none_waiting() -> None:
    small = replace(ADMISSION, max_queue=1)
    small.check(num_sequences=1, client="a", patience_s=None, load=load(open_of={"a": 4}))
    for waiting_of in ({"a": 1}, {"b": 1}):
        with pytest.raises(QueueFull):
            small.check(
                num_sequences=1,
                client="a",
                patience_s=None,
                load=load(waiting=1, waiting_of=waiting_of, open_of={"a": 4}),
            )


def test_a_client_alone_may_fill_half_the_queue() -> None:
    check(waiting=7, waiting_of={"a": 7}, open_of={"a": 11})
    with pytest.raises(QueueFull, match="this client has 8 waiting requests; at most 8 may wait"):
        check(waiting=8, waiting_of={"a": 8}, open_of={"a": 12})


def test_what_free_slots_take_at_once_is_no_share_of_the_queue() -> None:
    alone: dict[str, Any] = {"free_slots": 4, "waiting": 11, "waiting_of": {"a": 11}, "open_of": {"a": 11}}
    check(**alone)
    with pytest.raises(QueueFull, match="this client"):
        check(num_sequences=2, **alone)


def test_a_client_may_fill_a_share_of_the_places_that_others_leave() -> None:
    others: dict[str, Any] = {"open_of": {"a": 5, "b": 6}}
    check(waiting=10, waiting_of={"a": 4, "b": 6}, **others)
    with pytest.raises(QueueFull, match="this client has 5 waiting requests; at most 5 may wait"):
        check(waiting=11, waiting_of={"a": 5, "b": 6}, **others)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("num_greedy", [1, 2, 3, 7])
def test_whatever_greedy_clients_ask_there_is_room_for_a_newcomer(num_greedy: int, share: float) -> None:
    admission = Admission(n_parallel=4, max_queue=32, max_client_queue_share=share, max_client_open=99.0)
    waiting = dict.fromkeys(map(str, range(num_greedy)), 0)
    for _ in range(64):
        for name in waiting:
            with suppress(QueueFull):
                there = load(waiting=sum(waiting.values()), waiting_of=waiting, open_of=waiting)
                admission.check(num_sequences=1, client=name, patience_s=None, load=there)
                waiting[name] += 1
    there = load(waiting=sum(waiting.values()), waiting_of=waiting, open_of=waiting)
    admission.check(num_sequences=1, client="newcomer", patience_s=None, load=there)
    most, fewest = max(waiting.values()), min(waiting.values())
    assert most <= max(1, share * 32) and most - fewest <= 1


def test_a_client_with_nothing_open_needs_a_place_and_no_share() -> None:
    full: dict[str, Any] = {"waiting": 15, "waiting_of": {"b": 15}, "open_of": {"b": 19}}
    check(**full)
    check(num_sequences=8, waiting=8, waiting_of={"b": 8}, open_of={"b": 12})
    with pytest.raises(QueueFull):
        check(num_sequences=2, **full)


def test_more_answers_than_ever_fit_are_refused_for_good() -> None:
    check(num_sequences=20, free_slots=4)
    with pytest.raises(InvalidRequest, match="21 answers never fit") as refused:
        check(num_sequences=21, free_slots=4)
    assert refused.value.field == "n"


def test_beside_others_a_client_has_two_sequences_a_slot_open() -> None:
    check(open_of={"a": 7, "b": 1})
    with pytest.raises(QueueFull, match="has 8 open requests"):
        check(open_of={"a": 8, "b": 1})


def test_the_program_that_runs_the_batcher_has_no_share_only_the_queue() -> None:
    check(client="", waiting=15, waiting_of={"": 15}, open_of={"": 19, "b": 1})
    with pytest.raises(QueueFull):
        check(client="", waiting=16)


@pytest.mark.parametrize("client", ["a", ""])
def test_a_deadline_before_its_turn_is_refused_at_once(client: str) -> None:
    there: dict[str, Any] = {"client": client, "service_s": 1.0, "patience_s": 2.0}
    check(waiting=7, waiting_of={"a": 7}, **there)
    with pytest.raises(DeadlineExceeded) as refused:
        check(waiting=8, waiting_of={"a": 8}, **there)
    assert refused.value.retry_after_ms == 250  # then the wait is short enough


def test_a_deadline_is_measured_by_this_clients_turn_and_not_by_all_that_wait() -> None:
    there = load(waiting=12, waiting_of={"b": 10, "c": 2}, service_s=1.0)
    for num_sequences in (1, 2):  # as many of each of the two others go before it
        ADMISSION.check(num_sequences=num_sequences, client="a", patience_s=1.5, load=there)
    with pytest.raises(DeadlineExceeded, match=r"wait is 2\.0 s"):
        ADMISSION.check(num_sequences=3, client="a", patience_s=1.5, load=there)
    with pytest.raises(DeadlineExceeded, match=r"wait is 3\.2 s"):
        replace(ADMISSION, in_turn=False).check(num_sequences=1, client="a", patience_s=1.5, load=there)


def test_with_a_free_slot_or_no_measure_no_deadline_is_hopeless() -> None:
    check(free_slots=1, service_s=100.0, patience_s=0.5)
    check(waiting=8, service_s=None, patience_s=0.5)
