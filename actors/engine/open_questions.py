"""OpenQuestions: the Batcher's calls with one short answer, on their way to an engine and back.

    questions.ask(StatsRequest(), from_, monitor, engine)
    questions.answer(id, value, engine)      # or fail, give_up, lose: each caller gets one reply

The engine gets one question for its counters, and one for its health, at a time. Later callers share the next answer.
So many clients that ask all the time cost the engine no more than one client does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from genbatch.actors.engine.accepted_requests import RETRY_MS
from genbatch.actors.engine.engine_wire import Ask, Cancel, LinkError, ToEngine, decode_value, encode
from genbatch.actors.runtime.actor import From, Monitor, Timer, reply, reply_error
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest, Unavailable
from genbatch.proto.messages import DrainRequest, Health, HealthRequest, StatsRequest
from genbatch.proto.methods import METHODS, method_of

# The engine's timeout for a health check. After that, the caller gets the last known health.
HEALTH_WAIT_S = 0.25
# Callers share the answers to these calls, which have no parameters.
SHARED = {"stats": StatsRequest(), "health": HealthRequest()}

Callers = dict[Monitor, "From[Any]"]


@dataclass(frozen=True, slots=True)
class AnswerLate:
    """The engine has not answered a question in time."""

    id: int


class EngineSender(Protocol):
    """The sending side of an engine's connection."""

    def post(self, message: ToEngine) -> None:
        """Send a message soon."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """One open call and the callers that wait for its answer."""

    method: str
    callers: Callers
    timer: Timer | None


class OpenQuestions:
    """The open questions; their numbers are negative, and the numbers of requests are positive.

    Args:
        send_after: sends an AnswerLate to the owning actor after a number of seconds.
        complete: adds this side's data to an answer; called with the method's name and the answer.
        known_health: returns the health that is known without the engine's answer.
    """

    def __init__(
        self,
        send_after: Callable[[float, AnswerLate], Timer],
        complete: Callable[[str, Any], Any],
        known_health: Callable[[], Health],
    ) -> None:
        self._send_after = send_after
        self._complete = complete
        self._known_health = known_health
        self._open: dict[int, Question] = {}
        self._ids: dict[Monitor, int] = {}
        self._last_id = 0
        # Callers by method, which wait until the engine can be asked again.
        self._next: dict[str, Callers] = {method: {} for method in SHARED}

    def ask(self, call: object, from_: "From[Any]", monitor: Monitor, engine: EngineSender | None) -> None:
        """Send a call of the Batcher to the engine.

        Raises:
            GenbatchError: the call cannot be sent, and `from_` has no reply yet.
        """
        if engine is None:
            raise Unavailable("the engine is being restarted", retry_after_ms=RETRY_MS)
        method = method_of(call)
        assert method is not None and method.crosses, call
        try:
            data = encode(call)
        except (TypeError, ValueError, OverflowError) as fault:
            raise InvalidRequest(None, f"cannot be sent: {fault}") from fault
        if method.name in SHARED and any(question.method == method.name for question in self._open.values()):
            self._next[method.name][monitor] = from_
        else:
            self._post(method.name, data, {monitor: from_}, engine)

    def tell_to_drain(self, engine: EngineSender) -> None:
        """Let the Batcher cancel the open requests and answer them; the answer to this call itself is ignored."""
        self._last_id -= 1
        engine.post(Ask(self._last_id, "drain", encode(DrainRequest(timeout_s=0.0))))

    def answer(self, id: int, value: msgspec.Raw, engine: EngineSender | None) -> None:
        """Reply with the engine's answer."""
        question = self._take(id)
        if question is None:
            return
        try:
            answer = self._complete(question.method, decode_value(value, METHODS[question.method].answer))
        except LinkError as error:
            self._reply_error(question.method, question.callers, EngineError(str(error)))
        else:
            for from_ in question.callers.values():
                reply(from_, answer)
        self._ask_next(question.method, engine)

    def fail(self, id: int, error: GenbatchError) -> None:
        """Reply with the engine's error, or with the known health."""
        question = self._take(id)
        if question is None:
            return
        callers = question.callers
        if question.method in SHARED:
            for monitor in self._next[question.method]:
                monitor.cancel()
            callers = callers | self._next[question.method]
            self._next[question.method] = {}
        self._reply_error(question.method, callers, error)

    def give_up(self, id: int, engine: EngineSender | None) -> None:
        """Stop waiting for an answer after its timeout."""
        if id in self._open and engine is not None:
            engine.post(Cancel(id))
        self.fail(id, Unavailable("the engine does not answer", retry_after_ms=RETRY_MS))

    def leave(self, monitor: Monitor, engine: EngineSender | None) -> None:
        """Forget a caller that has left."""
        for callers in self._next.values():
            if callers.pop(monitor, None) is not None:
                monitor.cancel()
        if (id := self._ids.get(monitor)) is None:
            return
        question = self._open[id]
        del question.callers[monitor], self._ids[monitor]
        monitor.cancel()
        if not question.callers:
            self._take(id)
            if engine is not None:
                engine.post(Cancel(id))
            self._ask_next(question.method, engine)

    def lose(self) -> None:
        """Reply to all callers after the engine died."""
        for id in list(self._open):
            self.fail(id, Unavailable("the engine died", retry_after_ms=RETRY_MS))

    def _post(self, method: str, data: msgspec.Raw, callers: Callers, engine: EngineSender) -> None:
        self._last_id -= 1
        timer = self._send_after(HEALTH_WAIT_S, AnswerLate(self._last_id)) if method == "health" else None
        self._open[self._last_id] = Question(method, callers, timer)
        self._ids.update(dict.fromkeys(callers, self._last_id))
        engine.post(Ask(self._last_id, method, data))

    def _ask_next(self, method: str, engine: EngineSender | None) -> None:
        callers = self._next.get(method)
        if callers and engine is not None:
            self._next[method] = {}
            self._post(method, encode(SHARED[method]), callers, engine)

    def _take(self, id: int) -> Question | None:
        question = self._open.pop(id, None)
        if question is not None:
            if question.timer is not None:
                question.timer.cancel()
            for monitor in question.callers:
                del self._ids[monitor]
                monitor.cancel()
        return question

    def _reply_error(self, method: str, callers: Callers, error: GenbatchError) -> None:
        """Reply with the error, or for a health check with the known health."""
        for from_ in callers.values():
            if method == "health":
                reply(from_, self._known_health())
            else:
                reply_error(from_, error)
