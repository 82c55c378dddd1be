"""RemoteBatcher: stands where the Batcher would, and answers the same calls, with the Batcher in another process.

    remote = await start(nursery, RemoteBatcher(options, on_hung=kill))
    remote.info(EngineUp(connection, models), control=True)          # a new engine is there
    result = await remote.call(Generate(request), timeout=None)      # as of a Batcher

It decides, AcceptedRequests remembers, an EngineConnection moves the bytes, an EngineWatch knows the engine's health.
Requests outlive engines: what an engine's death means for each is the rule of AcceptedRequests. OpenQuestions asks the
engine all else. A health check is answered even while the engine is not: then with what the engine said last.
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

# Requests that have waited for an engine are not copied all at once into one frame: each may have a megabyte.
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
        self.epoch = 0  # for who receives
        self.fault: LinkError | None = None  # why nothing more of it is believed
        self._stream = stream
        self._receive = receive
        self._outbox: list[ToEngine] = []
        self._news = trio.Event()
        self._scope = trio.CancelScope()

    def post(self, message: ToEngine) -> None:
        """Sends a message with those of this turn of the event loop; what waits is bounded by what was accepted."""
        self._outbox.append(message)
        self._news.set()

    def close(self) -> None:
        """Ends it: the engine will see."""
        self._scope.cancel()

    async def run(self) -> None:
        """Returns when the engine or `close` has ended it."""
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
        """Until the engine's end closes, even after a fault: if ours did, that one would ask for a new link."""
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
                    return  # what the engine sent before its end is still read


@dataclass(frozen=True, slots=True)
class EngineUp:
    """An engine is there."""

    connection: EngineConnection
    models: Models


@dataclass(frozen=True, slots=True)
class EngineFrame:
    """An engine's messages; None: its end."""

    connection: EngineConnection
    messages: list[ToGateway] | None


@dataclass(frozen=True, slots=True)
class WatchTick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class CancelOver:
    """The time to end what was cancelled, at the end of a drain, is over."""


class EngineWatch:
    """Of one engine after another. Times are seconds on the event loop's clock.

    Args:
        stall_s: seconds without a sign of life, or without the end of a step while there is work, after which an
            engine is stuck.
    """

    def __init__(self, stall_s: float) -> None:
        self.is_given_up = False  # and is being killed
        self._stall_s = stall_s
        self._health: Health | None = None  # as it said last
        self._last_heard = 0.0

    def joined(self, now: float) -> None:
        """A new engine is there."""
        self.is_given_up = False
        self._health = None
        self._last_heard = now

    def lost(self) -> None:
        """There is none."""
        self._health = None

    def heard(self, now: float) -> None:
        """It has sent something."""
        self._last_heard = now

    def beat(self, health: Health) -> None:
        """It has said how it is."""
        self._health = health

    def was_deaf(self, seconds: float) -> None:
        """This event loop was held up, and nobody could be heard meanwhile."""
        self._last_heard += seconds

    def stalled_s(self, now: float) -> float:
        """Seconds without progress that should have been."""
        return now - self._last_heard + (self._health.stalled_s if self._health is not None else 0.0)

    def is_stuck(self, now: float) -> bool:
        """Whether to wait for it no longer."""
        return self.stalled_s(now) > self._stall_s

    def report(self, now: float, *, draining: bool, waiting: int) -> Health:
        """What to say of the service, with so many requests open."""
        if self._health is None:
            return Health(status="down", steps=0, requests_running=0, requests_waiting=waiting, stalled_s=0.0)
        status: HealthStatus = "draining" if draining else self._health.status
        if self.is_stuck(now):
            status = "stuck"
        return msgspec.structs.replace(self._health, status=status, stalled_s=self.stalled_s(now))


# Any client that is not the program which runs the Batcher.
REMOTE = "remote"
# Seconds between two looks at deadlines and at the engine's signs of life.
TICK_S = 0.5
# Seconds that a drained engine has to end what it was told to cancel.
CANCEL_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class WaitingCaller:
    """Who waits for a request."""

    from_: "From[Any]"
    monitor: Monitor
    message: Generate | Embed


class RemoteBatcher(GenServer):
    """See the module's docstring.

    Args:
        options: the Batcher's. As many sequences as its queue and slots hold may wait while no engine is there; after
            `stall_s` seconds without a sign of life, or without the end of a step while there is work, one is hung.
        on_hung: called with the reason; is to kill the engine.
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
        # The engine bounds the wait for a slot itself, from when it has the request.
        # guard: default deadline, at the link
        wait_s = (self.options.default_deadline_s or None) if message.client else None
        entry = self.accepted.accept(wanted, trio.current_time(), is_streamed=is_streamed, wait_s=wait_s)
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
                # At the edge the engine is to say it, with whatever it has.
                request = msgspec.structs.replace(request, deadline_s=max(0.001, entry.expires_at - now))
            if isinstance(request, GenerateRequest) and request.seed is None:
                request = msgspec.structs.replace(request, seed=entry.seed)
            self._connection.post(_submission(entry, request))

    def _leave(self, monitor: Monitor) -> None:
        """A caller has stopped waiting."""
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
        """Ends a request from here, whatever the engine does."""
        self._forget(entry)
        self._answer(entry, error)

    def _answer(self, entry: AcceptedRequest, end: object) -> None:
        """The one place where a request's caller is answered."""
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
            self._send_due()  # what waited for a suspect's first sign

    def _act(self, epoch: int, message: ToGateway) -> None:
        match message:
            case Tokens(rows):
                for entry, token in self.accepted.tokens(epoch, rows):
                    if entry not in self.accepted:
                        continue  # it has failed at an earlier token of these
                    try:
                        entry.caller.message.on_token(token)
                    except Exception as error:  # the caller's own function: its fault ends its request only
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
        """Has the engine killed. Until its end of the link closes, and then a new one comes, requests wait."""
        self._watch.is_given_up = True
        self._on_hung(reason)

    # What gateways ask

    def _completed(self, method: str, answer: Any) -> Any:
        """An engine's answer with what is known of it here."""
        if method == "stats":
            return {**answer, **self._counters()}
        if method == "health":
            self._watch.beat(answer)
            return self._health()
        return answer

    def _health(self) -> Health:
        """The engine's health as it said last, and this link's."""
        draining = self._draining.has_begun
        return self._watch.report(trio.current_time(), draining=draining, waiting=len(self.accepted))

    def _known_models(self) -> Models:
        if self._models is None:
            raise Unavailable("the engine is being started", retry_after_ms=RETRY_MS)
        return self._models

    def _own_stats(self) -> dict[str, object]:
        """What is known without an engine."""
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
        """The engine ends what is open with what it has; what it does not end in time ends here."""
        self._draining.num_cancelled += len(self.accepted)
        if self._connection is not None and len(self.accepted):
            self._questions.tell_to_drain(self._connection)
            self.send_after(CANCEL_GRACE_S, CancelOver())
        else:
            for entry in self.accepted:
                self._end(entry, Cancelled("the service has stopped"))


def _submission(entry: AcceptedRequest, request: Wanted) -> Submit | SubmitEmbed | SubmitScore:
    """What tells the engine of a request; `request` has the deadline that is left."""
    message: Generate | Embed = entry.caller.message
    if isinstance(message, Embed):
        if isinstance(request, ScoreRequest):
            return SubmitScore(entry.id, request, message.client, message.request_id)
        assert isinstance(request, EmbedRequest)
        return SubmitEmbed(entry.id, request, message.client, message.request_id)
    assert isinstance(request, GenerateRequest)
    return Submit(
        entry.id, request, message.client, message.request_id, message.beam_width, entry.is_streamed, entry.drawn()
    )


class EngineConnections:
    """The gateways' side of a Joint; `run` is a child for a supervisor.

    Args:
        link: who is told.
    """

    def __init__(self, link: ActorRef) -> None:
        self.joined = trio.Event()  # to a first engine
        self._link = link
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # it takes no new tasks

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        """Takes the gateways' end of a new link."""
        if self._nursery is None:
            hand_over.close()
        else:
            connection = EngineConnection(FrameStream(hand_over), self._receive)
            self._nursery.start_soon(connection.run)
            with suppress(ActorDown):
                self._link.info(EngineUp(connection, message.models), control=True)
            self.joined.set()
        await trio.lowlevel.checkpoint()  # last: the socket is somebody's by now

    def _receive(self, connection: EngineConnection, messages: list[ToGateway] | None) -> None:
        with suppress(ActorDown):
            self._link.info(EngineFrame(connection, messages), control=True)
