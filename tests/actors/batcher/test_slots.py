"""Who of those that wait is to start first, and who gives way to them."""

from types import SimpleNamespace
from typing import Any, cast

from genbatch.actors.batcher.requests import Sequence
from genbatch.actors.batcher.slots import TURN_TOKENS, FairShare, HeldPrompts, Slots, _charge
from genbatch.actors.scheduling.request import Phase


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
    )


def small_pool(num_blocks: int) -> Any:
    """A context of which only the number of blocks counts; a sequence takes four."""
    return SimpleNamespace(kv=SimpleNamespace(most_held=lambda length: (4,), num_blocks=(num_blocks,)))


def test_what_was_paused_with_more_than_its_share_of_the_blocks_waits_for_its_clients_turn() -> None:
    fair = FairShare()
    for account in "ab":
        fair.enter(account)
    fair.charge("b", prompt_tokens=100)
    for num_blocks, first in ((8, "b"), (7, "a")):
        slots = Slots(small_pool(num_blocks), HeldPrompts([], 1), cast(Any, None), fair, 4, cast(Any, None))
        slots.enqueue(waits("a", 1))
        slots.enqueue(waits("b", 2, num_pauses=1))
        assert next(one.request.account for one in slots.ready()) == first


def test_what_was_paused_goes_first_and_then_clients_take_turns() -> None:
    """A paused one has paid for its prompt, and somebody has begun to read it."""
    fair = FairShare()
    for account in "aab":
        fair.enter(account)
    fair.charge("b", prompt_tokens=100)
    slots = Slots(small_pool(100), HeldPrompts([], 1), cast(Any, None), fair, 4, cast(Any, None))
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


def holding(running: list[Sequence], waiting: list[Sequence], num_slots: int = 4) -> Slots:
    """Slots that are taken in this order."""
    slots = Slots(small_pool(100), HeldPrompts([], 1), cast(Any, None), FairShare(), num_slots, cast(Any, None))
    for sequence in running:
        sequence.phase = Phase.DECODING
        sequence.num_generated = sequence.drawn_before + TURN_TOKENS
        slots.sequences[min(slots.seq_pool)] = sequence
        for _ in range(sequence.width):
            slots.seq_pool.remove(min(slots.seq_pool))
    for sequence in waiting:
        slots.enqueue(sequence)
    return slots


def test_a_client_with_more_than_its_share_of_the_slots_gives_way_to_one_with_less() -> None:
    running = [waits("a", number) for number in range(4)]
    slots = holding(running, [waits("b", 10), waits("b", 11), waits("b", 12)])
    assert slots.is_owed() and slots.giving_way(frozenset()) == [running[3], running[2]], "the newest, to equal parts"
    slots = holding([*running[:2], waits("b", 8), waits("b", 9)], [waits("a", 10), waits("b", 11)])
    assert not slots.is_owed() and slots.giving_way(frozenset()) == [], "each has its share"
    slots = holding(running, [waits("a", 10)])
    assert not slots.is_owed() and slots.giving_way(frozenset()) == [], "a client alone has all slots"


def test_with_more_clients_than_slots_each_may_hold_one() -> None:
    running = [waits(name, number) for number, name in enumerate("aabc")]
    slots = holding(running, [waits(name, 10 + number) for number, name in enumerate("defg")])
    assert slots.giving_way(frozenset()) == [running[1]]


def test_a_sequence_gives_way_once_it_has_had_a_turn_and_the_least_paused_one_first() -> None:
    running = [waits("a", number) for number in range(4)]
    slots = holding(running, [waits("b", 10)])
    running[3].num_pauses = 1
    running[2].drawn_before += 1
    assert slots.giving_way(frozenset()) == [running[1]]
    assert slots.giving_way(frozenset({1})) == [running[0]], "what sits out keeps its slot"
    running[0].phase = Phase.PREFILLING
    running[3].drawn_before += 1
    assert slots.giving_way(frozenset({1})) == [] and slots.is_owed()


def test_a_free_slot_is_taken_before_anybody_gives_way() -> None:
    running = [waits("a", number) for number in range(3)]
    slots = holding(running, [waits("b", 10)])
    assert slots.giving_way(frozenset()) == []
    slots.enqueue(waits("b", 11))
    assert slots.giving_way(frozenset()) == [running[2]]


def test_beams_do_not_give_way_and_are_given_a_slot_for_each_or_none() -> None:
    search = waits("a", 1, width=4)
    assert holding([search], [waits("b", 10)]).giving_way(frozenset()) == [], "it would begin anew"
    running = [waits("a", number) for number in range(4)]
    slots = holding(running, [waits("b", 10, width=2)])
    assert slots.giving_way(frozenset()) == [running[3], running[2]]
    assert slots.giving_way(frozenset({0, 1, 2})) == []
    assert not holding(running, [waits("b", 10, width=3)]).is_owed(), "more than its share waits for free slots"


def test_a_choice_that_waits_for_its_prompt_makes_nobody_give_way() -> None:
    first, second = waits("b", 10), waits("b", 11)
    second.donor, second.num_shared = first, 7
    running = [waits("a", number) for number in range(4)]
    slots = holding(running, [first, second])
    assert slots.giving_way(frozenset()) == [running[3]]
    first.phase = Phase.PREFILLING
    slots.pending.remove(first)
    assert not slots.is_owed()


def test_what_gave_way_waits_behind_those_within_their_share() -> None:
    fair = [waits("a", 1, num_pauses=1), waits("b", 10), waits("b", 11), waits("b", 12)]
    slots = holding([waits("a", number) for number in range(3)], fair)
    assert slots.ready() == [fair[1], fair[2], fair[0], fair[3]]
