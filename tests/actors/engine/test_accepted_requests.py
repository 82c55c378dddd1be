"""AcceptedRequests: one final for each request, tokens without gaps, and what is replayed when an engine dies."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genbatch.actors.engine.accepted_requests import (
    DEADLINE_GRACE_S,
    MAX_DEATHS,
    MAX_POISONS,
    POISON_S,
    AcceptedRequest,
    AcceptedRequests,
    Stage,
)
from genbatch.proto.errors import DeadlineExceeded, EngineLost, MalformedMessage, Unavailable
from genbatch.proto.messages import DrawnTokens, GenerateRequest, Token, ToolCallDelta


def ask(prompt: str = "go", **params: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, **params)


def token(index: int, choice: int = 0) -> Token:
    return Token(text="x", token_id=100 + index, index=index, choice=choice)


def errors(ended: list[tuple[AcceptedRequest, Any]]) -> dict[int, type[Any]]:
    return {entry.id: type(error) for entry, error in ended}


def test_what_arrives_before_an_engine_waits_for_it_within_a_bound() -> None:
    accepted = AcceptedRequests(2)
    first, second = (accepted.accept(ask(prompt), 0.0) for prompt in "ab")
    assert accepted.due() == []
    with pytest.raises(Unavailable) as refused:
        accepted.accept(ask("c"), 0.0)
    assert refused.value.retry_after_ms
    accepted.engine_up()
    assert accepted.due() == [first, second]
    assert accepted.due() == []
    accepted.accept(ask("d"), 0.0)  # an engine has bounds of its own


def test_while_no_engine_is_there_sequences_are_counted_and_not_requests() -> None:
    accepted = AcceptedRequests(8)
    several = accepted.accept(ask("a", n=5), 0.0)
    with pytest.raises(Unavailable):
        accepted.accept(ask("b", n=4), 0.0)
    accepted.accept(ask("b", n=3), 0.0)
    with pytest.raises(Unavailable):
        accepted.accept(ask("c"), 0.0)
    accepted.drop(several)
    accepted.accept(ask("c", n=5), 0.0)


def test_a_request_ends_once() -> None:
    accepted = AcceptedRequests(8)
    entry = accepted.accept(ask(), 0.0)
    accepted.engine_up()
    accepted.due()
    assert accepted.drop(entry)
    assert not accepted.drop(entry)
    accepted.check_integrity()


def test_an_engines_death_ends_nothing_and_the_next_one_goes_on_after_the_tokens_of_each() -> None:
    accepted = AcceptedRequests(8)
    streamed, silent, whole = (accepted.accept(ask(p, n=2), 0.0, is_streamed=p != "w") for p in "dsw")
    accepted.engine_up()
    assert [entry.drawn() for entry in accepted.due()] == [(), (), ()]
    late = accepted.accept(ask("late"), 0.0)  # not sent yet
    shown = [
        accepted.add(streamed, token(0)),
        accepted.add(streamed, token(1)),
        accepted.add(whole, token(0, choice=1)),
    ]
    assert shown == [True, True, False], "a caller that reads no tokens gets none"
    assert accepted.lose(1.0) == []
    assert late.drawn() == ()
    nothing = DrawnTokens([])
    assert streamed.drawn() == (DrawnTokens([100, 101]), nothing)
    assert silent.drawn() == (nothing, nothing)
    assert whole.drawn() == (nothing, DrawnTokens([100]))
    accepted.engine_up()
    sent = []
    while due := accepted.due():
        sent += due
        for entry in due:
            accepted.add(entry, token(1 if entry is whole else 0, choice=1))
    assert set(sent) == {streamed, silent, whole, late}
    assert streamed.drawn() == (DrawnTokens([100, 101]), DrawnTokens([100]))


def test_log_probs_and_the_ids_of_calls_are_kept_with_the_tokens() -> None:
    accepted = AcceptedRequests(8)
    entry = accepted.accept(ask(logprobs=1), 0.0, is_streamed=True)
    accepted.engine_up()
    accepted.due()
    calls = (
        ToolCallDelta(index=0, id="a", name="f"),
        ToolCallDelta(index=0, arguments="{}"),
        ToolCallDelta(index=1, id="b"),
    )
    accepted.add(entry, Token(text="x", token_id=7, index=0, logprob=-0.5, top={7: -0.5}, tool_calls=calls))
    accepted.lose(1.0)
    assert entry.drawn() == (DrawnTokens([7], [(-0.5, {7: -0.5})], ["a", "b"]),)
    accepted.engine_up()
    accepted.due()
    with pytest.raises(MalformedMessage):
        accepted.add(entry, token(1))  # without its log-prob the next engine could not go on


def test_a_stream_that_gets_on_with_each_engine_outlives_several_and_not_any_number() -> None:
    accepted = AcceptedRequests(8)
    entry = accepted.accept(ask(), 0.0, is_streamed=True)
    for index in range(MAX_DEATHS):
        accepted.engine_up()
        assert accepted.due() == [entry]
        accepted.add(entry, token(index))
        ended = accepted.lose(1.0)
        assert bool(ended) is (index == MAX_DEATHS - 1)
    [(_, error)] = ended
    assert isinstance(error, EngineLost) and error.tokens_delivered == MAX_DEATHS


def test_a_stream_whose_time_passes_without_an_engine_says_how_much_was_delivered() -> None:
    accepted = AcceptedRequests(8)
    entry = accepted.accept(ask(deadline_s=5.0), 0.0, is_streamed=True)
    accepted.engine_up()
    accepted.due()
    accepted.add(entry, token(0))
    assert accepted.lose(1.0) == []
    assert accepted.expired(5.0) == [entry]
    error = entry.too_late("late")
    assert isinstance(error, EngineLost) and error.tokens_delivered == 1


def test_a_deadline_that_passed_is_not_replayed_and_one_that_remains_is() -> None:
    accepted = AcceptedRequests(8)
    short, long = accepted.accept(ask("a", deadline_s=1.0), 10.0), accepted.accept(ask("b", deadline_s=9.0), 10.0)
    accepted.engine_up()
    accepted.due()
    assert errors(accepted.lose(11.0)) == {short.id: DeadlineExceeded}
    assert long in accepted


def test_deadlines_are_kept_without_an_engine_and_with_one_that_is_silent() -> None:
    accepted = AcceptedRequests(8)
    entry = accepted.accept(ask(deadline_s=1.0), 10.0)
    assert accepted.expired(10.9) == []
    assert accepted.expired(11.0) == [entry]
    accepted.engine_up()
    accepted.due()
    assert accepted.expired(11.0) == []  # the engine says it, with what it has
    assert accepted.expired(11.0 + DEADLINE_GRACE_S) == [entry]
    assert accepted.drop(entry)
    accepted.check_integrity()


def test_a_wait_for_an_engine_is_bounded_each_time_and_work_is_not() -> None:
    accepted = AcceptedRequests(8)
    entry = accepted.accept(ask(), 10.0, wait_s=5.0)
    own = accepted.accept(ask(deadline_s=100.0), 10.0, wait_s=5.0)
    assert own.wait_s is None, "a caller's own deadline counts in its place"
    assert accepted.expired(14.9) == [] and accepted.expired(15.0) == [entry]
    accepted.engine_up()
    accepted.due()
    assert accepted.expired(90.0) == []
    accepted.lose(90.0)
    assert accepted.expired(94.9) == [] and accepted.expired(95.0) == [entry]


def test_suspects_are_sent_one_at_a_time_the_likeliest_first_and_innocents_live() -> None:
    accepted = AcceptedRequests(8)
    begun, first, poison, last = (accepted.accept(ask(p), 0.0) for p in "abpc")
    accepted.engine_up()
    accepted.due()
    accepted.add(begun, token(0))
    assert accepted.lose(1.0) == []
    accepted.engine_up()
    fresh = accepted.accept(ask("fresh"), 1.0)
    assert accepted.due() == [fresh, last]
    assert accepted.due() == []
    accepted.add(last, token(0))
    assert accepted.due() == [poison]
    accepted.drop(last)
    assert errors(accepted.lose(2.0)) == {poison.id: EngineLost}
    accepted.engine_up()
    # Never sent again, they are not to blame for the second death.
    order = []
    while suspects := accepted.due():
        order += suspects
        accepted.drop(suspects[-1])
    assert order == [first, begun, fresh]
    assert {entry.deaths for entry in order} == {1}


def test_after_a_kill_from_outside_all_requests_go_on_at_once_those_with_tokens_first() -> None:
    accepted = AcceptedRequests(8)
    first, second, third = (accepted.accept(ask(p), 0.0) for p in "abc")
    accepted.engine_up()
    accepted.due()
    accepted.add(second, token(0))
    accepted.lose(1.0)
    fresh = accepted.accept(ask("fresh"), 1.0)
    accepted.engine_up(was_killed=True)
    assert accepted.due() == [second, first, third, fresh]
    assert second.drawn() == (DrawnTokens([100]),)
    accepted.check_integrity()


def test_a_request_that_was_sent_with_others_is_no_cause_and_the_next_death_makes_suspects_of_all() -> None:
    accepted = AcceptedRequests(8)
    innocent, poison = accepted.accept(ask("a"), 0.0), accepted.accept(ask("p"), 0.0)
    for was_killed in (False, True):  # both look as if they had come from outside
        accepted.engine_up(was_killed=was_killed)
        assert accepted.due() == [innocent, poison]
        assert accepted.lose(1.0) == []
    accepted.engine_up(was_killed=True)
    assert accepted.due() == [poison], "a request is pardoned once"
    assert errors(accepted.lose(2.0)) == {poison.id: EngineLost}
    with pytest.raises(EngineLost):
        accepted.accept(ask("p"), 3.0)
    accepted.engine_up()
    assert accepted.due() == [innocent]


def test_a_pardoned_death_does_not_count_towards_the_most_deaths() -> None:
    accepted = AcceptedRequests(8)
    entry = accepted.accept(ask(), 0.0)
    for index in range(MAX_DEATHS + 1):
        accepted.engine_up(was_killed=index == 1)
        assert accepted.due() == [entry]
        accepted.add(entry, token(index))
        assert bool(accepted.lose(1.0)) is (index == MAX_DEATHS)


def test_poison_is_refused_for_a_while_and_nothing_else_is() -> None:
    accepted = AcceptedRequests(8)
    accepted.accept(ask("p", temperature=1.0, deadline_s=9.0, seed=7), 0.0)  # clients draw the seed
    for now in (1.0, 2.0):
        accepted.engine_up()
        assert len(accepted.due()) == 1
        ended = accepted.lose(now)
    assert len(ended) == 1
    with pytest.raises(EngineLost) as refused:
        accepted.accept(ask("p", temperature=1.0, priority=3, seed=8), 3.0)
    assert refused.value.retry_after_ms == round(1000 * (POISON_S - 1.0))
    accepted.accept(ask("p"), 3.0)
    accepted.accept(ask("p", temperature=1.0, tenant="another"), 3.0)
    accepted.accept(ask("p", temperature=1.0), 2.0 + POISON_S)
    accepted.check_integrity()


def test_a_request_that_gets_on_and_loses_its_engine_to_another_one_goes_on() -> None:
    accepted = AcceptedRequests(8)
    poison, entry = accepted.accept(ask("p"), 0.0), accepted.accept(ask("a"), 0.0)
    accepted.engine_up()
    accepted.due()
    accepted.lose(1.0)
    accepted.engine_up()
    assert accepted.due() == [entry]
    accepted.add(entry, token(0))
    assert accepted.due() == [poison]
    assert errors(accepted.lose(2.0)) == {poison.id: EngineLost}
    accepted.accept(ask("a"), 3.0)
    with pytest.raises(EngineLost):
        accepted.accept(ask("p"), 3.0)
    accepted.engine_up()
    assert entry in accepted.due() and entry.drawn() == (DrawnTokens([100]),)


def test_only_so_many_kinds_of_poison_are_remembered() -> None:
    accepted = AcceptedRequests(8)
    for number in range(MAX_POISONS + 1):
        accepted.accept(ask(str(number)), 0.0)
        for _ in range(2):
            accepted.engine_up()
            accepted.due()
            accepted.lose(0.0)
    accepted.accept(ask("0"), 0.0)
    with pytest.raises(EngineLost):
        accepted.accept(ask("1"), 0.0)


class AnyEngine(RuleBasedStateMachine):
    """An engine that dies at any time, callers that leave at any time: each accepted request ends exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted = AcceptedRequests(6)
        self.now = 0.0
        self.open: dict[int, AcceptedRequest] = {}
        self.sent: dict[int, dict[int, int]] = {}  # by the engine that is there: next index by choice
        self.drawn: dict[int, dict[int, int]] = {}  # the same, of engines that have died, too
        self.seen: dict[int, list[tuple[int, int]]] = {}  # tokens that callers have
        self.streamed: set[int] = set()

    def end(self, entry: AcceptedRequest) -> None:
        assert self.open.pop(entry.id) is entry  # a KeyError would be a second final
        self.sent.pop(entry.id, None)

    def send(self) -> None:
        for entry in self.accepted.due():
            assert entry.id in self.open and entry.id not in self.sent
            kept = {choice: len(one.token_ids) for choice, one in enumerate(entry.drawn()) if one.token_ids}
            assert kept == self.drawn.setdefault(entry.id, {}), "the next engine goes on elsewhere"
            self.sent[entry.id] = self.drawn[entry.id]

    @rule(
        streamed=st.booleans(), deadline_s=st.none() | st.floats(0.1, 5), prompt=st.text("abc", min_size=1, max_size=2)
    )
    def arrive(self, streamed: bool, deadline_s: float | None, prompt: str) -> None:
        try:
            entry = self.accepted.accept(ask(prompt, n=2, deadline_s=deadline_s), self.now, is_streamed=streamed)
        except (Unavailable, EngineLost):
            return
        self.open[entry.id] = entry
        self.seen[entry.id] = []
        if streamed:
            self.streamed.add(entry.id)
        self.send()

    @precondition(lambda self: not self.accepted.is_up)
    @rule(was_killed=st.booleans())
    def engine_comes(self, was_killed: bool) -> None:
        self.accepted.engine_up(was_killed=was_killed)
        self.send()

    @precondition(lambda self: self.accepted.is_up)
    @rule()
    def engine_dies(self) -> None:
        for entry, _ in self.accepted.lose(self.now):
            self.end(entry)
        self.sent.clear()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def token(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.sent)))
        choice = data.draw(st.integers(0, 1))
        index = self.sent[request_id].get(choice, 0)
        assert self.accepted.add(self.open[request_id], token(index, choice)) is (request_id in self.streamed)
        self.sent[request_id][choice] = index + 1
        self.seen[request_id] += [(choice, index)]
        self.send()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def final(self, data: st.DataObject) -> None:
        entry = self.open[data.draw(st.sampled_from(sorted(self.sent)))]
        assert self.accepted.drop(entry)
        self.end(entry)
        self.send()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def caller_leaves(self, data: st.DataObject) -> None:
        entry = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        assert self.accepted.drop(entry) is (entry.id in self.sent)
        self.end(entry)
        self.send()

    @rule(seconds=st.floats(0.1, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for entry in self.accepted.expired(self.now):
            self.accepted.drop(entry)
            self.end(entry)
        self.send()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.accepted.check_integrity()
        assert {entry.id for entry in self.accepted} == set(self.open)
        suspects = [entry for entry in self.accepted if entry.is_suspect and entry.phase is Stage.SENT]
        assert len(suspects) <= 1
        assert all(entry.deaths <= MAX_DEATHS for entry in self.accepted), "replayed without end"
        assert all(entry.deaths < MAX_DEATHS or entry.is_pardoned for entry in self.accepted)
        for tokens in self.seen.values():
            for choice in (0, 1):
                indices = [index for of, index in tokens if of == choice]
                assert indices == list(range(len(indices)))


TestAnyEngine = AnyEngine.TestCase
TestAnyEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
