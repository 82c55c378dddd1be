"""LinkQuestions: the open calls of an EngineLink that are no requests; they are asked once and end with the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from genbatch.actors.batching.batcher_messages import Drain
from genbatch.actors.engine.ledger import RETRY_MS
from genbatch.actors.engine.link_connection import LinkConnection
from genbatch.actors.engine.link_messages import METHODS, QUESTIONS, Ask, Cancel, LinkError, decode_value, encode
from genbatch.actors.runtime.actor import From, Monitor, reply, reply_error
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest, Unavailable


@dataclass(frozen=True, slots=True)
class Question:
    """One open call."""

    from_: "From[Any]"
    monitor: Monitor
    method: str


class LinkQuestions:
    """Their numbers are negative, those of requests positive."""

    def __init__(self) -> None:
        self._open: dict[int, Question] = {}
        self._ids: dict[Monitor, int] = {}
        self._last_id = 0

    def ask(self, call: object, from_: "From[Any]", monitor: Monitor, connection: LinkConnection | None) -> None:
        """Sends a call of the Batcher's.

        Raises:
            GenbatchError: it cannot be sent; `from_` has no reply yet.
        """
        if connection is None:
            raise Unavailable("the engine is being restarted", retry_after_ms=RETRY_MS)
        method = METHODS[type(call)]
        try:
            data = encode(call)
        except (TypeError, ValueError, OverflowError) as fault:
            raise InvalidRequest(None, f"cannot be sent: {fault}") from fault
        self._last_id -= 1
        self._open[self._last_id] = Question(from_, monitor, method)
        self._ids[monitor] = self._last_id
        connection.post(Ask(self._last_id, method, data))

    def tell_to_drain(self, connection: LinkConnection) -> None:
        """Has the Batcher cancel what is open and answer it; nobody waits for the answer to this."""
        self._last_id -= 1
        connection.post(Ask(self._last_id, "drain", encode(Drain(0.0))))

    def answer(self, id: int, value: msgspec.Raw, counters: Mapping[str, object]) -> None:
        """Replies with the engine's answer; `counters` are added to its stats."""
        question = self._take(id)
        if question is None:
            return
        try:
            answer = decode_value(value, QUESTIONS[question.method][1])
        except LinkError as error:
            reply_error(question.from_, EngineError(str(error)))
            return
        reply(question.from_, {**answer, **counters} if question.method == "stats" else answer)

    def fail(self, id: int, error: GenbatchError) -> None:
        """Replies with the engine's refusal."""
        question = self._take(id)
        if question is not None:
            reply_error(question.from_, error)

    def leave(self, monitor: Monitor, connection: LinkConnection | None) -> None:
        """Its caller is gone."""
        id = self._ids.get(monitor)
        if id is not None and self._take(id) is not None and connection is not None:
            connection.post(Cancel(id))

    def lose(self) -> None:
        """The engine is gone: replies to all."""
        for id in list(self._open):
            self.fail(id, Unavailable("the engine died", retry_after_ms=RETRY_MS))

    def _take(self, id: int) -> Question | None:
        question = self._open.pop(id, None)
        if question is not None:
            del self._ids[question.monitor]
            question.monitor.cancel()
        return question
