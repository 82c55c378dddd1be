"""RemoteBatcher: takes the place of a Batcher in another process, and answers the same calls.

    remote = await start(nursery, RemoteBatcher(options, on_hung=kill))
    remote.info(EngineUp(connection, models), control=True)          # a new engine is connected
    result = await remote.call(Generate(request), timeout=None)      # as with a Batcher

RemoteBatcher decides, AcceptedRequests keeps the requests, EngineConnection moves the bytes, and EngineWatch knows the
engine's health. Requests outlive engines by the rules of AcceptedRequests. OpenQuestions sends all other calls to the
engine. A health check is answered even without an engine, with the engine's last health.
"""

import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.draining import Draining, DrainOver
from genbatch.actors.batcher.messages import Embed, Generate, validate_generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.accepted_requests import RETRY_MS, AcceptedRequest, AcceptedRequests, Stage, Wanted
from genbatch.actors.engine.child_process import Join
from genbatch.actors.engine.engine_wire import (
    Answer,
    Beat,
    Cancel,
    Final,
    FinalEmbedded,
    FinalError,
    FrameStream,
    LinkError,
    Serving,
    Submit,
    SubmitEmbed,
    SubmitScore,
    ToEngine,
    ToGateway,
    Tokens,
    decode_for_gateway,
    encode,
    encode_frame,
)
from genbatch.actors.engine.open_questions import AnswerLate, OpenQuestions
from genbatch.actors.runtime.actor import NOREPLY, ActorRef, Down, From, GenServer, Monitor, Reason, reply, reply_error
from genbatch.actors.runtime.errors import ActorDown
from genbatch.proto.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    GenbatchError,
    InvalidRequest,
    Unavailable,
    from_wire,
)
from genbatch.proto.messages import (
    DrainRequest,
    EmbedRequest,
    GenerateRequest,
    Health,
    HealthRequest,
    HealthStatus,
    Models,
    ModelsRequest,
    ScoreRequest,
    StatsRequest,
)
from genbatch.proto.methods import method_of
from genbatch.proto.validation import MAX_SEED, validate_texts

logger = logging.getLogger(__name__)

# Requests that waited for an engine go out in several frames, since each request may have a megabyte.
MESSAGES_A_FRAME = 16


class EngineConnection:
    """One engine's link, from its start to its end.

    Args:
        stream: closed at the end.
        receive: called with this connection and the messages of each frame, and with None at the end, once.
    """

    def __init__(
        self, stream: FrameStream, receive: "Callable[[EngineConnection, list[ToGateway] | None], None]"
    ) -> None:
        self.epoch = 0  # set by the receiver
        self.fault: LinkError | None = None  # the protocol fault after which its messages are ignored
        self._stream = stream
        self._receive = receive
        self._outbox: list[ToEngine] = []
        self._news = trio.Event()
        self._scope = trio.CancelScope()

    def post(self, message: ToEngine) -> None:
        """Send a message in one frame with this turn's messages; the number of accepted requests bounds the queue."""
        self._outbox.append(message)
        self._news.set()

    def close(self) -> None:
        """Close the link; the engine notices."""
        self._scope.cancel()

    async def run(self) -> None:
        """Run until the engine or `close` ends the link."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send)
                    await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._stream.aclose()
            self._receive(self, None)

    async def _read(self) -> None:
        """Read until the engine closes its end, even after a fault: closing ours would make it ask for a new link."""
        while (frame := await self._stream.receive()) is not None:
            if self.fault is not None:
                continue
            messages: list[ToGateway] = []
            try:
                messages = decode_for_gateway(frame)
            except LinkError as error:
                self.fault = error
            self._receive(self, messages)

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._outbox:
                frame = encode_frame(self._outbox[:MESSAGES_A_FRAME])
                del self._outbox[:MESSAGES_A_FRAME]
                try:
                    await self._stream.send(frame)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return  # the engine's last messages are still read


@dataclass(frozen=True, slots=True)
class EngineUp:
    """An engine is connected."""

    connection: EngineConnection
    models: Models


@dataclass(frozen=True, slots=True)
class EngineFrame:
    """An engine's messages; None at its end."""

    connection: EngineConnection
    messages: list[ToGateway] | None


@dataclass(frozen=True, slots=True)
class WatchTick:
    """It is time to check deadlines and the engine."""


@dataclass(frozen=True, slots=True)
class CancelOver:
    """The time to end the cancelled requests of a drain is over."""


class EngineWatch:
    """Tracks the health of one engine after another. Times are seconds on the event loop's clock.

    Args:
        stall_s: seconds without a sign of life, or without the end of a step while there is work, after which an
            engine is stuck.
    """

    def __init__(self, stall_s: float) -> None:
        self.is_given_up = False  # true while it is being killed
        self._stall_s = stall_s
        self._health: Health | None = None  # its last report
        self._last_heard = 0.0

    def joined(self, now: float) -> None:
        """Note a new engine."""
        self.is_given_up = False
        self._health = None
        self._last_heard = now

    def lost(self) -> None:
        """Note that no engine is connected."""
        self._health = None

    def heard(self, now: float) -> None:
        """Note that the engine has sent a message."""
        self._last_heard = now

    def beat(self, health: Health) -> None:
        """Note the engine's reported health."""
        self._health = health

    def was_deaf(self, seconds: float) -> None:
        """Allow for a delay of this event loop, in which no message could be read."""
        self._last_heard += seconds

    def stalled_s(self, now: float) -> float:
        """Return the seconds without the expected progress."""
        return now - self._last_heard + (self._health.stalled_s if self._health is not None else 0.0)

    def is_stuck(self, now: float) -> bool:
        """Return whether the engine counts as stuck."""
        return self.stalled_s(now) > self._stall_s

    def report(self, now: float, *, draining: bool, waiting: int) -> Health:
        """Return the health of the service, with `waiting` requests open."""
        if self._health is None:
            return Health(status="down", steps=0, requests_running=0, requests_waiting=waiting, stalled_s=0.0)
        status: HealthStatus = "draining" if draining else self._health.status
        if self.is_stuck(now):
            status = "stuck"
        return msgspec.structs.replace(self._health, status=status, stalled_s=self.stalled_s(now))


# The client name for the admission bounds of all remote clients.
REMOTE = "remote"
# Seconds between two checks of deadlines and of the engine's signs of life.
TICK_S = 0.5
# Seconds that a draining engine has to end its cancelled requests.
CANCEL_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class WaitingCaller:
    """The caller that waits for a request."""

    from_: "From[Any]"
    monitor: Monitor
    message: Generate | Embed


class RemoteBatcher(GenServer):
    """See the module's docstring.

    Args:
        options: the Batcher's. Without an engine, as many sequences may wait as its queue and slots hold. An engine
            hangs after `stall_s` seconds without a sign of life, or without the end of a step while there is work.
        on_hung: called with the reason; must kill the engine.
    """

    def __init__(self, options: BatcherOptions, on_hung: Callable[[str], None]) -> None:
        self.options = options
        self.accepted = AcceptedRequests(options.admission(REMOTE).max_queue + options.n_parallel)
        self._on_hung = on_hung
        self._callers: dict[Monitor, AcceptedRequest] = {}
        self._questions = OpenQuestions(self.send_after, self._completed, self._health)
        self._connection: EngineConnection | None = None
        self._models: Models | None = None
        self._watch = EngineWatch(options.stall_s)
        self._last_tick = 0.0
        self._draining = Draining(lambda: len(self.accepted), self.send_after)

    # Callbacks

    async def init(self) -> None:
        self._last_tick = trio.current_time()
        self.send_after(TICK_S, WatchTick())

    async def handle_call(self, request: object, from_: "From[Any]") -> object:
        try:
            match request:
                case Generate() | Embed():
                    self._receive(request, from_)
                case StatsRequest() if self._connection is None:
                    return self._own_stats()
                case HealthRequest() if self._connection is None or self._watch.is_given_up:
                    return self._health()
                case ModelsRequest():
                    return self._known_models()
                case DrainRequest(timeout_s=timeout_s):
                    self._draining.ask(from_, timeout_s)
                case _ if (method := method_of(request)) is not None and method.crosses:
                    self._questions.ask(request, from_, self.monitor(from_), self._connection)
                case _:
                    raise TypeError(f"the engine's link has no call {type(request).__name__}")
        except GenbatchError as error:
            reply_error(from_, error)
        return NOREPLY

    async def handle_info(self, message: object) -> None:
        match message:
            case EngineFrame(connection, messages):
                if messages is None:
                    self._lose(connection)
                else:
                    self._hear(connection, messages)
            case EngineUp(connection, models):
                self._join(connection, models)
            case Down(monitor):
                self._leave(monitor)
            case WatchTick():
                self.send_after(TICK_S, WatchTick())
                self._tick()
            case AnswerLate(id):
                self._questions.give_up(id, self._connection)
            case DrainOver():
                self._cancel_open()
            case CancelOver():
                for entry in self.accepted:
                    self._end(entry, Cancelled("the service has stopped"))

    async def terminate(self, reason: Reason) -> None:
        for entry in self.accepted:
            self._end(entry, Unavailable("the service is stopping"))
        self._questions.lose()
        if self._connection is not None:
            self._connection.close()

    # Requests

    def _receive(self, message: Generate | Embed, from_: "From[Any]") -> None:
        # guard: draining takes nothing new, at the link
        self._draining.check()
        if isinstance(message, Embed):
            validate_texts(message.request, self.options.limits)
        else:
            if message.keep is not None:
                raise InvalidRequest(None, "logits are kept by an engine in the caller's process only")
            validate_generate(message, self.options.limits)
        try:
            encode(message.request)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(None, f"cannot be sent: {error}") from error
        wanted = message.request
        is_streamed = isinstance(message, Generate) and message.on_token is not None
        # The engine itself bounds the wait for a slot, from the arrival of the request at the engine.
        # guard: default deadline, at the link
        wait_s = (self.options.default_deadline_s or None) if message.client else None
        entry = self.accepted.accept(wanted, trio.current_time(), is_streamed=is_streamed, wait_s=wait_s)
        entry.brought = message.drawn if isinstance(message, Generate) else ()
        entry.seed = secrets.randbelow(MAX_SEED + 1)
        entry.caller = WaitingCaller(from_, self.monitor(from_), message)
        self._callers[entry.caller.monitor] = entry
        self._send_due()

    def _send_due(self) -> None:
        if self._watch.is_given_up:
            return
        now = trio.current_time()
        for entry in self.accepted.due():
            assert self._connection is not None
            request = entry.request
            if entry.expires_at is not None:
                # Leave the engine at least a millisecond, so that it ends the request with its output so far.
                request = msgspec.structs.replace(request, deadline_s=max(0.001, entry.expires_at - now))
            if isinstance(request, GenerateRequest) and request.seed is None:
                request = msgspec.structs.replace(request, seed=entry.seed)
            self._connection.post(_submission(entry, request))

    def _leave(self, monitor: Monitor) -> None:
        """Note that a caller has stopped waiting."""
        self._questions.leave(monitor, self._connection)
        entry = self._callers.pop(monitor, None)
        # guard: callers that leave, at the link
        if entry is not None:
            self._forget(entry)

    def _forget(self, entry: AcceptedRequest) -> None:
        if self.accepted.drop(entry) and self._connection is not None:
            self._connection.post(Cancel(entry.id))
        self._draining.settle()

    def _end(self, entry: AcceptedRequest, error: GenbatchError) -> None:
        """End a request without the engine."""
        self._forget(entry)
        self._answer(entry, error)

    def _answer(self, entry: AcceptedRequest, end: object) -> None:
        """Answer a request's caller; no other place does so."""
        caller: WaitingCaller = entry.caller
        del self._callers[caller.monitor]
        caller.monitor.cancel()
        if isinstance(end, GenbatchError):
            reply_error(caller.from_, end)
        else:
            reply(caller.from_, end)

    # The engine

    def _join(self, connection: EngineConnection, models: Models) -> None:
        if self._connection is not None:
            self._connection.close()
            self._lose(self._connection)
        self._connection = connection
        self._models = models
        self._watch.joined(trio.current_time())
        connection.epoch = self.accepted.engine_up()
        self._send_due()

    def _lose(self, connection: EngineConnection) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self._watch.lost()
        self._questions.lose()
        for entry, error in self.accepted.lose(trio.current_time()):
            self._answer(entry, error)
        self._draining.settle()

    def _hear(self, connection: EngineConnection, messages: list[ToGateway]) -> None:
        if connection is self._connection and not self._watch.is_given_up:
            self._watch.heard(trio.current_time())
            try:
                for message in messages:
                    self._act(connection.epoch, message)
                if connection.fault is not None:
                    raise connection.fault
            except LinkError as error:
                self._give_up(str(error))
            self._send_due()  # a suspect's first token or end may free the next suspect

    def _act(self, epoch: int, message: ToGateway) -> None:
        match message:
            case Tokens(rows):
                for entry, token in self.accepted.tokens(epoch, rows):
                    if entry not in self.accepted:
                        continue  # it failed at an earlier token of this frame
                    try:
                        entry.caller.message.on_token(token)
                    except Exception as error:  # a fault of the caller's function ends its request only
                        self._end(entry, EngineError(f"on_token raised {error!r}"))
            case Beat(health):
                self._watch.beat(health)
            case Serving(models):
                self._models = models
            case Final(id, result) | FinalEmbedded(id, result):
                self._final(epoch, id, result)
            case FinalError(id, error):
                if id < 0:
                    self._questions.fail(id, from_wire(error))
                else:
                    self._final(epoch, id, from_wire(error))
            case Answer(id, value):
                self._questions.answer(id, value, self._connection)

    def _final(self, epoch: int, id: int, end: object) -> None:
        entry = self.accepted.final(epoch, id)
        if entry is not None:
            self._answer(entry, end)
            self._draining.settle()

    # Time

    def _tick(self) -> None:
        now = trio.current_time()
        self._watch.was_deaf(max(0.0, now - self._last_tick - TICK_S))
        self._last_tick = now
        # guard: deadline without an engine
        for entry in self.accepted.expired(now):
            reason = "the deadline passed before the engine had answered"
            if entry.wait_s is not None:
                reason = f"no engine was there for {entry.wait_s:g} s, and no request waits longer for one"
            self._end(entry, entry.too_late(reason) if entry.phase is Stage.WAITING else DeadlineExceeded(reason))
        if not len(self.accepted):
            self.accepted.check_integrity()
        # guard: hung engine
        if self._connection is not None and not self._watch.is_given_up and self._watch.is_stuck(now):
            self._give_up(f"no progress for {self._watch.stalled_s(now):.1f} s")

    def _give_up(self, reason: str) -> None:
        """Have the engine killed; requests wait until its link closes and a new engine connects."""
        self._watch.is_given_up = True
        self._on_hung(reason)

    # Answers for gateways

    def _completed(self, method: str, answer: Any) -> Any:
        """Return an engine's answer with this side's data."""
        if method == "stats":
            return {**answer, **self._counters()}
        if method == "health":
            self._watch.beat(answer)
            return self._health()
        return answer

    def _health(self) -> Health:
        """Return the engine's last reported health with this link's state."""
        draining = self._draining.has_begun
        return self._watch.report(trio.current_time(), draining=draining, waiting=len(self.accepted))

    def _known_models(self) -> Models:
        if self._models is None:
            raise Unavailable("the engine is being started", retry_after_ms=RETRY_MS)
        return self._models

    def _own_stats(self) -> dict[str, object]:
        """Return the statistics that are known without an engine."""
        stats = self._counters()
        if self._models is not None and self._models.models:
            stats["model"] = self._models.models[0].id
        return stats

    def _counters(self) -> dict[str, object]:
        counts = self.accepted.counts
        return {
            "engine": "down" if self._connection is None else "up",
            "requests_open": len(self.accepted),
            "engine_restarts": max(0, self.accepted.epoch - 1),
            "requests_replayed": counts["replayed"],
            "requests_lost": counts["lost"],
            "gateway_tasks": trio.lowlevel.current_statistics().tasks_living,
        }

    # Draining

    def _cancel_open(self) -> None:
        """Let the engine end the open requests with their output so far; a timer ends the remaining ones here."""
        self._draining.num_cancelled += len(self.accepted)
        if self._connection is not None and len(self.accepted):
            self._questions.tell_to_drain(self._connection)
            self.send_after(CANCEL_GRACE_S, CancelOver())
        else:
            for entry in self.accepted:
                self._end(entry, Cancelled("the service has stopped"))


def _submission(entry: AcceptedRequest, request: Wanted) -> Submit | SubmitEmbed | SubmitScore:
    """Return the message that submits a request to the engine; `request` has the remaining deadline."""
    message: Generate | Embed = entry.caller.message
    if isinstance(message, Embed):
        if isinstance(request, ScoreRequest):
            return SubmitScore(entry.id, request, message.client, message.request_id)
        assert isinstance(request, EmbedRequest)
        return SubmitEmbed(entry.id, request, message.client, message.request_id)
    assert isinstance(request, GenerateRequest)
    return Submit(
        entry.id,
        request,
        message.client,
        message.request_id,
        message.beam_width,
        entry.is_streamed,
        entry.drawn(),
        is_admitted=entry.deaths > 0,
    )


class EngineConnections:
    """The gateways' side of a Joint; `run` is a child for a supervisor.

    Args:
        link: the RemoteBatcher that gets the engine's messages.
    """

    def __init__(self, link: ActorRef) -> None:
        self.joined = trio.Event()  # set by the first engine
        self._link = link
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # no new tasks can start

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        """Take the gateways' end of a new link."""
        if self._nursery is None:
            hand_over.close()
        else:
            connection = EngineConnection(FrameStream(hand_over), self._receive)
            self._nursery.start_soon(connection.run)
            with suppress(ActorDown):
                self._link.info(EngineUp(connection, message.models), control=True)
            self.joined.set()
        await trio.lowlevel.checkpoint()  # last: the connection owns the socket by now

    def _receive(self, connection: EngineConnection, messages: list[ToGateway] | None) -> None:
        with suppress(ActorDown):
            self._link.info(EngineFrame(connection, messages), control=True)
