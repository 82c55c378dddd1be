"""Admission: bounded queues, shares for clients that are not alone, hopeless deadlines refused at once."""

from typing import Any

import pytest

from genbatch.actors.batcher.options import Admission, Load
from genbatch.proto.errors import DeadlineExceeded, QueueFull

ADMISSION = Admission(n_parallel=4, max_queue=16, max_client_queue_share=0.5, max_client_open=2.0)


def load(**changes: Any) -> Load:
    return Load(**{"free_slots": 0, "waiting": 0, "waiting_of": {}, "open_of": {}, "service_s": None, **changes})


def check(wanted: int = 1, client: str = "a", deadline_s: float | None = None, **changes: Any) -> None:
    ADMISSION.check(wanted=wanted, client=client, deadline_s=deadline_s, load=load(**changes))


def test_the_queue_holds_max_queue_and_what_free_slots_take_at_once() -> None:
    check(wanted=16)
    check(wanted=20, free_slots=4)
    with pytest.raises(QueueFull):
        check(wanted=17)
    with pytest.raises(QueueFull):
        check(waiting=16)


def test_a_refusal_tells_when_to_come_again_at_the_measured_pace() -> None:
    with pytest.raises(QueueFull) as refused:
        check(waiting=16, service_s=2.0)
    assert refused.value.retry_after_ms == 2000 * 16 // 4


def test_a_client_alone_may_fill_the_queue() -> None:
    check(waiting=15, waiting_of={"a": 15}, open_of={"a": 19})


def test_beside_others_a_client_gets_half_the_queue() -> None:
    others = {"open_of": {"a": 7, "b": 1}, "waiting": 8}
    check(waiting_of={"a": 7}, **others)
    with pytest.raises(QueueFull, match="of this client's requests"):
        check(waiting_of={"a": 8}, **others)


def test_beside_others_a_client_has_two_sequences_a_slot_open() -> None:
    check(open_of={"a": 7, "b": 1})
    with pytest.raises(QueueFull, match="has 8 requests open"):
        check(open_of={"a": 8, "b": 1})


def test_the_program_that_runs_the_batcher_has_no_share_only_the_queue() -> None:
    check(client="", waiting=15, waiting_of={"": 15}, open_of={"": 19, "b": 1})
    with pytest.raises(QueueFull):
        check(client="", waiting=16)


def test_a_deadline_before_its_turn_is_refused_at_once() -> None:
    check(waiting=7, service_s=1.0, deadline_s=2.0)
    with pytest.raises(DeadlineExceeded) as refused:
        check(waiting=8, service_s=1.0, deadline_s=2.0)
    assert refused.value.retry_after_ms == 2000


def test_with_a_free_slot_or_no_measure_no_deadline_is_hopeless() -> None:
    check(free_slots=1, service_s=100.0, deadline_s=0.5)
    check(waiting=8, service_s=None, deadline_s=0.5)
