"""The numbers under which a gateway asks its engine."""

from types import SimpleNamespace
from typing import Any, cast

from genbatch.actors.engine.engine_wire import Ask
from genbatch.actors.engine.remote_batcher import OpenQuestions
from genbatch.proto.messages import StatsRequest


def test_every_question_and_the_word_to_drain_have_numbers_of_their_own() -> None:
    posted: list[Ask] = []
    connection = cast(Any, SimpleNamespace(post=posted.append))
    questions = OpenQuestions()
    questions.ask(StatsRequest(), cast(Any, None), cast(Any, "a monitor"), connection)
    questions.tell_to_drain(connection)
    questions.ask(StatsRequest(), cast(Any, None), cast(Any, "another"), connection)
    assert [ask.id for ask in posted] == [-1, -2, -3] and posted[1].method == "drain"
