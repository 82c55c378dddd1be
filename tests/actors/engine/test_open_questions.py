"""The numbers under which a gateway asks its engine, and the counters that many ask for at once."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from genbatch.actors.engine.engine_wire import Ask, Cancel, encode
from genbatch.actors.engine.open_questions import HEALTH_WAIT_S, AnswerLate, OpenQuestions
from genbatch.proto.messages import Health, HealthRequest, StatsRequest, TokenizeRequest

KNOWN = Health(status="stuck", steps=1, requests_running=0, requests_waiting=0, stalled_s=0.0)


def open_questions(timers: list[tuple[float, AnswerLate]]) -> OpenQuestions:
    """Completes the counters with their method's name; what is set as a timer goes to `timers`."""

    def send_after(delay_s: float, message: AnswerLate) -> Any:
        timers.append((delay_s, message))
        return Watched()

    def complete(method: str, answer: Any) -> Any:
        return {**answer, "of": method} if method == "stats" else answer

    return OpenQuestions(send_after, complete, lambda: KNOWN)


def test_every_question_and_the_word_to_drain_have_numbers_of_their_own() -> None:
    posted: list[Ask] = []
    connection = cast(Any, SimpleNamespace(post=posted.append))
    questions = open_questions([])
    questions.ask(StatsRequest(), cast(Any, None), cast(Any, "a monitor"), connection)
    questions.tell_to_drain(connection)
    questions.ask(TokenizeRequest(prompt="a"), cast(Any, None), cast(Any, "another"), connection)
    assert [ask.id for ask in posted] == [-1, -2, -3] and posted[1].method == "drain"


def test_callers_who_ask_for_the_counters_at_once_share_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Ask | Cancel] = []
    replies: list[tuple[str, object]] = []
    module = "genbatch.actors.engine.open_questions"
    monkeypatch.setattr(f"{module}.reply", lambda from_, value: replies.append((from_, value)))
    monkeypatch.setattr(f"{module}.reply_error", lambda from_, error: replies.append((from_, error.code)))
    connection = cast(Any, SimpleNamespace(post=posted.append))
    questions = open_questions([])
    monitors = {name: cast(Any, Watched()) for name in "abcdefg"}

    def ask(*names: str) -> None:
        for name in names:
            questions.ask(StatsRequest(), cast(Any, name), monitors[name], connection)

    def answer(steps: int) -> None:
        asked = cast(Ask, posted[-1])
        questions.answer(asked.id, msgspec.Raw(encode({"steps": steps})), connection)

    ask("a", "b", "c", "d")
    assert len(posted) == 1
    questions.leave(monitors["c"], connection)
    answer(1)  # b and d asked later, and hear of nothing older than that
    assert replies == [("a", {"steps": 1, "of": "stats"})] and len(posted) == 2
    ask("e")
    answer(2)
    assert replies[1:] == [("b", {"steps": 2, "of": "stats"}), ("d", {"steps": 2, "of": "stats"})]
    ask("f")
    questions.leave(monitors["e"], connection)  # the only one who waits: f's question takes its place
    assert [type(one) for one in posted[2:]] == [Ask, Cancel, Ask]
    ask("g")
    questions.lose()
    assert replies[3:] == [("f", "unavailable"), ("g", "unavailable")]
    assert all(monitors[name].is_cancelled for name in monitors)


def test_a_health_check_is_answered_with_the_health_that_is_known_where_the_engine_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted: list[Ask | Cancel] = []
    replies: list[tuple[str, object]] = []
    module = "genbatch.actors.engine.open_questions"
    monkeypatch.setattr(f"{module}.reply", lambda from_, value: replies.append((from_, value)))
    connection = cast(Any, SimpleNamespace(post=posted.append))
    timers: list[tuple[float, AnswerLate]] = []
    questions = open_questions(timers)
    for name in "ab":
        questions.ask(HealthRequest(), cast(Any, name), cast(Any, Watched()), connection)
    assert timers == [(HEALTH_WAIT_S, AnswerLate(-1))]
    questions.give_up(-1, connection)
    assert replies == [("a", KNOWN), ("b", KNOWN)] and [type(one) for one in posted] == [Ask, Cancel]
    questions.answer(-1, msgspec.Raw(encode(KNOWN)), connection)  # too late
    questions.give_up(-1, connection)
    questions.ask(HealthRequest(), cast(Any, "c"), cast(Any, Watched()), connection)
    questions.lose()  # the engine died
    assert replies[2:] == [("c", KNOWN)] and len(posted) == 3


class Watched:
    """In the place of a monitor or a timer."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
