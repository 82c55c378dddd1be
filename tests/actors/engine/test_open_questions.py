"""The numbers under which a gateway asks its engine, and the counters that many ask for at once."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from genbatch.actors.engine.engine_wire import Ask, Cancel, encode
from genbatch.actors.engine.remote_batcher import OpenQuestions
from genbatch.proto.messages import StatsRequest, TokenizeRequest


def test_every_question_and_the_word_to_drain_have_numbers_of_their_own() -> None:
    posted: list[Ask] = []
    connection = cast(Any, SimpleNamespace(post=posted.append))
    questions = OpenQuestions()
    questions.ask(StatsRequest(), cast(Any, None), cast(Any, "a monitor"), connection)
    questions.tell_to_drain(connection)
    questions.ask(TokenizeRequest(prompt="a"), cast(Any, None), cast(Any, "another"), connection)
    assert [ask.id for ask in posted] == [-1, -2, -3] and posted[1].method == "drain"


def test_callers_who_ask_for_the_counters_at_once_share_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Ask | Cancel] = []
    replies: list[tuple[str, object]] = []
    module = "genbatch.actors.engine.remote_batcher"
    monkeypatch.setattr(f"{module}.reply", lambda from_, value: replies.append((from_, value)))
    monkeypatch.setattr(f"{module}.reply_error", lambda from_, error: replies.append((from_, error.code)))
    connection = cast(Any, SimpleNamespace(post=posted.append))
    questions = OpenQuestions()
    monitors = {name: cast(Any, Watched()) for name in "abcdefg"}

    def ask(*names: str) -> None:
        for name in names:
            questions.ask(StatsRequest(), cast(Any, name), monitors[name], connection)

    def answer(steps: int) -> None:
        asked = cast(Ask, posted[-1])
        questions.answer(asked.id, msgspec.Raw(encode({"steps": steps})), {"engine": "up"}, connection)

    ask("a", "b", "c", "d")
    assert len(posted) == 1
    questions.leave(monitors["c"], connection)
    answer(1)  # b and d asked later, and hear of nothing older than that
    assert replies == [("a", {"steps": 1, "engine": "up"})] and len(posted) == 2
    ask("e")
    answer(2)
    assert replies[1:] == [("b", {"steps": 2, "engine": "up"}), ("d", {"steps": 2, "engine": "up"})]
    ask("f")
    questions.leave(monitors["e"], connection)  # the only one who waits: f's question takes its place
    assert [type(one) for one in posted[2:]] == [Ask, Cancel, Ask]
    ask("g")
    questions.lose()
    assert replies[3:] == [("f", "unavailable"), ("g", "unavailable")]
    assert all(monitors[name].is_cancelled for name in monitors)


class Watched:
    """In a monitor's place."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
