"""The ledger: one final for each request, tokens without gaps, and what is replayed when an engine dies."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genbatch.actors.engine.ledger import (
    DEADLINE_GRACE_S,
    MAX_POISONS,
    POISON_S,
    Entry,
    Ledger,
    Phase,
)
from genbatch.actors.engine.link_messages import LinkError, TokenRow
from genbatch.proto.errors import DeadlineExceeded, EngineLost, Unavailable
from genbatch.proto.messages import GenerateRequest


def ask(prompt: str = "go", **params: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, **params)


def up(ledger: Ledger) -> int:
    return ledger.engine_up()


def row(entry: Entry, index: int, choice: int = 0) -> TokenRow:
    return TokenRow(entry.id, choice, index, 100 + index, "x", None)


def errors(ended: list[tuple[Entry, Any]]) -> dict[int, type[Any]]:
    return {entry.id: type(error) for entry, error in ended}


def test_what_arrives_before_an_engine_waits_for_it_within_a_bound() -> None:
    ledger = Ledger(2)
    first, second = (ledger.accept(ask(prompt), 0.0) for prompt in "ab")
    assert ledger.due() == []
    with pytest.raises(Unavailable) as refused:
        ledger.accept(ask("c"), 0.0)
    assert refused.value.retry_after_ms
    up(ledger)
    assert ledger.due() == [first, second]
    assert ledger.due() == []
    ledger.accept(ask("d"), 0.0)  # an engine has bounds of its own


def test_a_request_ends_once_whatever_the_engine_says_again() -> None:
    ledger = Ledger(8)
    entry, epoch = ledger.accept(ask(), 0.0), up(ledger)
    ledger.due()
    assert ledger.final(epoch, entry.id) is entry
    assert ledger.final(epoch, entry.id) is None
    assert ledger.tokens(epoch, [row(entry, 0)]) == []
    assert not ledger.drop(entry)
    ledger.check_integrity()


def test_a_gap_or_a_repetition_in_a_stream_is_the_links_fault() -> None:
    ledger = Ledger(8)
    entry, epoch = ledger.accept(ask(n=2), 0.0, is_streamed=True), up(ledger)
    ledger.due()
    delivered = ledger.tokens(epoch, [row(entry, 0), row(entry, 0, choice=1), row(entry, 1)])
    assert [(token.choice, token.index) for _, token in delivered] == [(0, 0), (1, 0), (0, 1)]
    for wrong in (row(entry, 1), row(entry, 3), row(entry, 2, choice=1)):
        with pytest.raises(LinkError):
            ledger.tokens(epoch, [wrong])


def test_messages_of_an_engine_that_is_gone_are_dropped() -> None:
    ledger = Ledger(8)
    entry, old = ledger.accept(ask(), 0.0, is_streamed=True), up(ledger)
    ledger.due()
    ledger.lose(0.0)
    assert ledger.tokens(old, [row(entry, 0)]) == [] and ledger.final(old, entry.id) is None
    new = up(ledger)
    ledger.due()
    assert ledger.tokens(old, [row(entry, 0)]) == [] and ledger.final(old, entry.id) is None
    assert len(ledger.tokens(new, [row(entry, 0)])) == 1
    assert ledger.counts["stale"] == 4


def test_an_engines_death_ends_what_was_delivered_in_part_and_replays_the_rest() -> None:
    ledger = Ledger(8)
    streamed, silent, whole = (ledger.accept(ask(p), 0.0, is_streamed=p != "w") for p in "dsw")
    epoch = up(ledger)
    ledger.due()
    late = ledger.accept(ask("late"), 0.0)  # not sent yet
    ledger.tokens(epoch, [row(streamed, 0), row(streamed, 1)])
    ledger.begun(epoch, whole.id)
    [(ended, error)] = ledger.lose(1.0)
    assert ended is streamed
    assert isinstance(error, EngineLost) and error.tokens_delivered == 2
    up(ledger)
    assert late.deaths == 0
    assert silent in ledger and whole in ledger and whole.phase is Phase.WAITING


def test_a_deadline_that_passed_is_not_replayed_and_one_that_remains_is() -> None:
    ledger = Ledger(8)
    short, long = ledger.accept(ask("a", deadline_s=1.0), 10.0), ledger.accept(ask("b", deadline_s=9.0), 10.0)
    up(ledger)
    ledger.due()
    assert errors(ledger.lose(11.0)) == {short.id: DeadlineExceeded}
    assert long in ledger


def test_deadlines_are_kept_without_an_engine_and_with_one_that_is_silent() -> None:
    ledger = Ledger(8)
    entry = ledger.accept(ask(deadline_s=1.0), 10.0)
    assert ledger.expired(10.9) == []
    assert ledger.expired(11.0) == [entry]
    up(ledger)
    ledger.due()
    assert ledger.expired(11.0) == []  # the engine says it, with what it has
    assert ledger.expired(11.0 + DEADLINE_GRACE_S) == [entry]
    assert ledger.drop(entry)
    ledger.check_integrity()


def test_suspects_are_sent_one_at_a_time_the_likeliest_first_and_innocents_live() -> None:
    ledger = Ledger(8)
    begun, first, poison, last = (ledger.accept(ask(p), 0.0) for p in "abpc")
    epoch = up(ledger)
    ledger.due()
    ledger.begun(epoch, begun.id)
    assert ledger.lose(1.0) == []
    epoch = up(ledger)
    fresh = ledger.accept(ask("fresh"), 1.0)
    assert ledger.due() == [fresh, last]
    assert ledger.due() == []
    ledger.begun(epoch, last.id)
    assert ledger.due() == [poison]
    ledger.final(epoch, last.id)
    assert errors(ledger.lose(2.0)) == {poison.id: EngineLost}
    epoch = up(ledger)
    # Never sent again, they are not to blame for the second death.
    order = []
    while suspects := ledger.due():
        order += suspects
        ledger.final(epoch, suspects[-1].id)
    assert order == [first, begun, fresh]
    assert {entry.deaths for entry in order} == {1}


def test_poison_is_refused_for_a_while_and_nothing_else_is() -> None:
    ledger = Ledger(8)
    ledger.accept(ask("p", temperature=1.0, deadline_s=9.0), 0.0)
    for now in (1.0, 2.0):
        up(ledger)
        assert len(ledger.due()) == 1
        ended = ledger.lose(now)
    assert len(ended) == 1
    with pytest.raises(EngineLost) as refused:
        ledger.accept(ask("p", temperature=1.0, priority=3), 3.0)
    assert refused.value.retry_after_ms == round(1000 * (POISON_S - 1.0))
    ledger.accept(ask("p"), 3.0)
    ledger.accept(ask("p", temperature=1.0, tenant="another"), 3.0)
    ledger.accept(ask("p", temperature=1.0), 2.0 + POISON_S)
    ledger.check_integrity()


def test_a_request_that_began_and_dies_again_in_company_ends_without_being_blocked() -> None:
    ledger = Ledger(8)
    poison, entry = ledger.accept(ask("p"), 0.0), ledger.accept(ask("a"), 0.0)
    up(ledger)
    ledger.due()
    ledger.lose(1.0)
    epoch = up(ledger)
    assert ledger.due() == [entry]
    ledger.begun(epoch, entry.id)
    assert ledger.due() == [poison]
    assert errors(ledger.lose(2.0)) == {entry.id: EngineLost, poison.id: EngineLost}
    ledger.accept(ask("a"), 3.0)
    with pytest.raises(EngineLost):
        ledger.accept(ask("p"), 3.0)


def test_only_so_many_kinds_of_poison_are_remembered() -> None:
    ledger = Ledger(8)
    for number in range(MAX_POISONS + 1):
        ledger.accept(ask(str(number)), 0.0)
        for _ in range(2):
            up(ledger)
            ledger.due()
            ledger.lose(0.0)
    ledger.accept(ask("0"), 0.0)
    with pytest.raises(EngineLost):
        ledger.accept(ask("1"), 0.0)


class AnyEngine(RuleBasedStateMachine):
    """An engine that dies at any time, callers that leave at any time: each accepted request ends exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(6)
        self.now = 0.0
        self.open: dict[int, Entry] = {}
        self.sent: dict[int, dict[int, int]] = {}  # by the engine that is there: next index by choice
        self.seen: dict[int, list[tuple[int, int]]] = {}  # tokens that callers have
        self.streamed: set[int] = set()

    def end(self, entry: Entry) -> None:
        assert self.open.pop(entry.id) is entry  # a KeyError would be a second final
        self.sent.pop(entry.id, None)

    def send(self) -> None:
        for entry in self.ledger.due():
            assert entry.id in self.open and entry.id not in self.sent
            assert not entry.is_streamed or not self.seen[entry.id], "replayed after tokens were delivered"
            self.sent[entry.id] = {}

    @rule(
        streamed=st.booleans(), deadline_s=st.none() | st.floats(0.1, 5), prompt=st.text("abc", min_size=1, max_size=2)
    )
    def arrive(self, streamed: bool, deadline_s: float | None, prompt: str) -> None:
        try:
            entry = self.ledger.accept(ask(prompt, deadline_s=deadline_s), self.now, is_streamed=streamed)
        except (Unavailable, EngineLost):
            return
        self.open[entry.id] = entry
        self.seen[entry.id] = []
        if streamed:
            self.streamed.add(entry.id)
        self.send()

    @precondition(lambda self: not self.ledger.is_up)
    @rule()
    def engine_comes(self) -> None:
        self.ledger.engine_up()
        self.send()

    @precondition(lambda self: self.ledger.is_up)
    @rule()
    def engine_dies(self) -> None:
        for entry, _ in self.ledger.lose(self.now):
            self.end(entry)
        self.sent.clear()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), stale=st.booleans())
    def token(self, data: st.DataObject, stale: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.sent)))
        choice = data.draw(st.integers(0, 1))
        index = self.sent[request_id].get(choice, 0)
        token = TokenRow(request_id, choice, index, 7, "x", None)
        delivered = self.ledger.tokens(self.ledger.epoch - stale, [token])
        assert bool(delivered) is not stale
        if not stale:
            self.sent[request_id][choice] = index + 1
            self.seen[request_id] += [(choice, index)]
        self.send()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), stale=st.booleans())
    def final(self, data: st.DataObject, stale: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.sent)))
        entry = self.ledger.final(self.ledger.epoch - stale, request_id)
        assert (entry is None) is stale
        if entry is not None:
            self.end(entry)
        self.send()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def caller_leaves(self, data: st.DataObject) -> None:
        entry = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        assert self.ledger.drop(entry) is (entry.id in self.sent)
        self.end(entry)
        self.send()

    @rule(seconds=st.floats(0.1, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for entry in self.ledger.expired(self.now):
            self.ledger.drop(entry)
            self.end(entry)
        self.send()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.ledger.check_integrity()
        assert {entry.id for entry in self.ledger} == set(self.open)
        suspects = [entry for entry in self.ledger if entry.deaths and entry.phase is Phase.SENT]
        assert len(suspects) <= 1
        assert all(entry.deaths <= 1 for entry in self.ledger), "replayed more than once"
        for request_id, tokens in self.seen.items():
            for choice in (0, 1):
                indices = [index for of, index in tokens if of == choice]
                if request_id in self.streamed:  # one that does not stream may be generated again, from its start
                    assert indices == list(range(len(indices)))


TestAnyEngine = AnyEngine.TestCase
TestAnyEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
