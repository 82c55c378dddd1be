"""The lifecycle of a request and the lengths derived from it."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.scheduling.request import IllegalTransition, LlmRequest, LlmRequestState, Phase, split_by_phase
from tests.actors.scheduling.real_blocks import decoding, prefilling, request

LEGAL = {
    (Phase.PENDING, Phase.PREFILLING),
    (Phase.PREFILLING, Phase.DECODING),
    (Phase.PREFILLING, Phase.PENDING),
    (Phase.DECODING, Phase.PENDING),
    (Phase.PENDING, Phase.FINISHED),
    (Phase.PREFILLING, Phase.FINISHED),
    (Phase.DECODING, Phase.FINISHED),
}


@pytest.mark.parametrize("old", Phase)
@pytest.mark.parametrize("new", Phase)
def test_h01_only_legal_transitions_are_possible(old: Phase, new: Phase) -> None:
    one = request(7, phase=old)
    if (old, new) in LEGAL:
        one.move(new)
        assert one.phase is new
    else:
        with pytest.raises(IllegalTransition, match=rf"request 7 cannot go from {old.name} to {new.name}"):
            one.move(new)
        assert one.phase is old


@given(st.lists(st.sampled_from(Phase), max_size=30))
def test_h01_whatever_is_tried_a_finished_request_stays_finished(attempts: list[Phase]) -> None:
    one, path = request(1), [Phase.PENDING]
    for phase in attempts:
        try:
            one.move(phase)
        except IllegalTransition:
            assert (path[-1], phase) not in LEGAL
        else:
            assert (path[-1], phase) in LEGAL
            path.append(phase)
    assert Phase.FINISHED not in path[:-1]


def test_states_are_ordered_as_schedulers_compare_them() -> None:
    names = [state.name for state in sorted(LlmRequestState, key=lambda state: state.value)]
    assert names == [
        "CONTEXT_INIT",
        "GENERATION_IN_PROGRESS",
        "GENERATION_TO_COMPLETE",
        "GENERATION_COMPLETE",
    ]


def test_the_state_follows_phase_and_generated_tokens() -> None:
    one = request(1, prompt=4, max_new=3)
    assert one.state is LlmRequestState.CONTEXT_INIT
    one.move(Phase.PREFILLING)
    assert one.state is LlmRequestState.CONTEXT_INIT
    one.move(Phase.DECODING)
    one.num_generated = 1
    assert one.state is LlmRequestState.GENERATION_IN_PROGRESS
    one.num_generated = 2
    assert one.state is LlmRequestState.GENERATION_TO_COMPLETE
    one.move(Phase.FINISHED)
    assert one.state is LlmRequestState.GENERATION_COMPLETE


def test_after_a_pause_the_generated_tokens_are_context_again() -> None:
    one = decoding(1, positions=8)
    one.num_computed, one.num_generated, one.num_cached = 11, 4, 2
    assert one.context_remaining == 1
    one.pause()
    assert (one.phase, one.num_computed, one.num_cached, one.num_pauses) == (Phase.PENDING, 0, 0, 1)
    assert one.context_remaining == one.num_tokens == 12


def test_a_pending_request_cannot_be_paused() -> None:
    one = request(1)
    with pytest.raises(IllegalTransition):
        one.pause()
    assert one.num_pauses == 0


def test_the_last_token_needs_no_position() -> None:
    assert request(1, prompt=5, max_new=1).max_positions == 5
    assert request(1, prompt=5, max_new=3).max_positions == 7
    assert request(1, prompt=5, max_new=0).max_positions == 5


def test_the_waiting_order_is_priority_then_arrival() -> None:
    waiting = [request(0, priority=1), request(1), request(2, priority=-1), request(3)]
    assert [one.request_id for one in sorted(waiting, key=lambda one: one.waiting_key)] == [2, 1, 3, 0]


def test_a_subclass_with_slots_adds_its_own_fields() -> None:
    @dataclass(slots=True, kw_only=True, eq=False)
    class Speech(LlmRequest):
        text: str

    one = Speech(request_id=1, num_prompt_tokens=2, max_new_tokens=3, arrival=0, text="a")
    one.move(Phase.PREFILLING)
    assert not hasattr(one, "__dict__")
    assert len({one, Speech(request_id=1, num_prompt_tokens=2, max_new_tokens=3, arrival=0, text="a")}) == 2


def test_splitting_by_phase_keeps_the_order_and_leaves_out_what_is_in_flight() -> None:
    requests = [decoding(1), request(2), prefilling(3, 8, 4), decoding(4), decoding(5)]
    requests.append(request(6, phase=Phase.FINISHED))
    ids = [[one.request_id for one in part] for part in split_by_phase(requests, {4})]
    assert ids == [[1, 5], [3], [2]]
