"""Who of those that wait is to start first."""

from types import SimpleNamespace
from typing import Any, cast

from genbatch.actors.batcher.requests import Sequence
from genbatch.actors.batcher.slots import FairShare, HeldPrompts, Slots, _charge


def waits(account: str, arrival: int, num_pauses: int = 0, width: int = 1) -> Sequence:
    request = SimpleNamespace(account=account)
    return cast(Any, Sequence)(
        request_id=arrival,
        num_prompt_tokens=8,
        max_new_tokens=8,
        arrival=arrival,
        num_pauses=num_pauses,
        width=width,
        request=request,
        output=None,
        sampler=None,
    )


def test_what_was_paused_goes_first_and_then_clients_take_turns() -> None:
    """A paused one has paid for its prompt, and somebody has begun to read it."""
    fair = FairShare()
    for account in "aab":
        fair.enter(account)
    fair.charge("b", prompt_tokens=100)
    slots = Slots(cast(Any, None), HeldPrompts([], 1), cast(Any, None), fair, 4, cast(Any, None))
    first, second, other, paused = waits("a", 1), waits("a", 2), waits("b", 3), waits("b", 4, num_pauses=1)
    for one in (first, second, other, paused):
        slots.enqueue(one)
    assert slots.ready() == [paused, first, second, other]


def test_two_that_wait_take_turns_already() -> None:
    fair = FairShare()
    for account in "ab":
        fair.enter(account)
    fair.charge("a", prompt_tokens=100)
    slots = Slots(cast(Any, None), HeldPrompts([], 1), cast(Any, None), fair, 4, cast(Any, None))
    first, second = waits("a", 1), waits("b", 2)
    slots.enqueue(first)
    slots.enqueue(second)
    assert slots.ready() == [second, first]


def test_a_request_is_charged_for_its_prompt_once_however_many_sequences_it_has() -> None:
    first = waits("a", 1)
    assert _charge(first) == 8
    first.choice = 1
    assert _charge(first) == 0


def test_beams_find_a_slot_for_each_or_wait_and_nobody_overtakes_them() -> None:
    slots = Slots(cast(Any, None), HeldPrompts([], 1), cast(Any, None), None, 4, cast(Any, None))
    one, wide, last = waits("a", 1), waits("a", 2, width=4), waits("a", 3)
    for sequence in (one, wide, last):
        slots.enqueue(sequence)
    assert slots.ready() == [one], "beams wait, and nobody runs"
    slots.pending = [waits("a", 1), waits("a", 2)]
    slots.sequences, slots.seq_pool = {0: wide}, {3}
    assert slots.ready() == slots.pending[:1], "beams run, and none waits"
