"""RemoteBatcher: takes the place of a Batcher in another process, and answers the same calls.

    remote = RemoteBatcher(options, on_hung=kill)
    await nursery.start(remote.run)
    await remote.send(Join(1, models), end)                          # a new engine is connected
    result = await remote.call(Generate(request), timeout=None)      # as with a Batcher

A call runs in its caller's task, so a caller that leaves cancels it. RemoteBatcher decides, AcceptedRequests keeps the
requests, EngineConnection moves the messages, and EngineWatch knows the engine's health. Requests outlive engines by
the rules of AcceptedRequests. All other calls go to the engine that is there. A health check is answered even without
an engine, with the engine's last health.
"""

import math
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.messages import DRAINING, RETRY_AFTER_DRAIN_MS, Embed, Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.accepted_requests import RETRY_MS, AcceptedRequest, AcceptedRequests, EngineRequest, Stage
from genbatch.actors.engine.child_process import Join
from genbatch.actors.engine.link import CALLS, EngineConnection, EngineWork, FrameStream
from genbatch.actors.runtime.errors import CallTimeout
from genbatch.proto.codec import to_answer, why_unsendable
from genbatch.proto.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    GenbatchError,
    InvalidRequest,
    MalformedMessage,
    Unavailable,
)
from genbatch.proto.messages import MAX_SEED, GenerateRequest
from genbatch.proto.methods import method_of
from genbatch.proto.rpc import CallAnswered, CallFailed, ClientEvent, Notified, StreamOptions, TokensReceived
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    HealthStatus,
    Models,
    ModelsRequest,
    StatsRequest,
)
from genbatch.proto.validation import check_type, validate_request, validate_texts


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


# Seconds between two checks of deadlines and of the engine's signs of life.
TICK_S = 0.5
# Seconds that a draining engine has to end its cancelled requests.
CANCEL_GRACE_S = 2.0
# The engine's timeout for a health check. After that, the caller gets the last known health.
HEALTH_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class EndWaiting:
    """A call: the next engine could not be started, so the open requests end with this error."""

    error: GenbatchError


class PendingCall:
    """A caller's wait for the answer to its call.

    Args:
        method: the method's name.
        message: the request's message, if `AcceptedRequests` keeps the request; None for another call.
    """

    def __init__(self, method: str, message: Generate | Embed | None = None) -> None:
        self.method = method
        self.message = message
        self._ended = trio.Event()
        self._end: object = None

    def end(self, end: object) -> None:
        """Give the caller its answer or its error."""
        self._end = end
        self._ended.set()

    async def wait(self) -> Any:
        """Return the answer.

        Raises:
            GenbatchError: the error.
        """
        await self._ended.wait()
        if isinstance(self._end, GenbatchError):
            raise self._end
        return self._end


class SharedQuestion:
    """Asks the engine one question at a time, so that many frequent callers cost no more than one.

    Callers that arrive during a question share the next answer.
    """

    def __init__(self) -> None:
        self._turn = trio.Lock()
        self._num_asked = 0
        self._answer: tuple[int, Any] = (0, None)  # the latest answer, behind the number of its question

    async def ask(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer to a question that was sent after this call began."""
        num_before = self._num_asked
        async with self._turn:
            if self._answer[0] <= num_before:
                self._num_asked += 1
                self._answer = (self._num_asked, await ask())
            return self._answer[1]


class RemoteBatcher:
    """See the module's docstring.

    Args:
        options: the Batcher's. Without an engine, as many sequences may wait as its queue and slots hold. An engine
            hangs after `stall_s` seconds without a sign of life, or without the end of a step while there is work.
        on_hung: called with the reason; must kill the engine.
    """

    def __init__(self, options: BatcherOptions, on_hung: Callable[[str], None]) -> None:
        self.options = options
        self.joined = trio.Event()  # set by the first engine
        self.is_draining = False
        self._on_hung = on_hung
        self._models: Models | None = None
        self._shared_health, self._shared_stats = SharedQuestion(), SharedQuestion()
        self._num_cancelled = 0  # by a drain
        self._settled = trio.Event()  # replaced when a request ends
        self._nursery: trio.Nursery | None = None
        self._reset()

    def _reset(self) -> None:
        self.accepted = AcceptedRequests(self.options.queue_size(of_clients=True) + self.options.n_parallel)
        self._watch = EngineWatch(self.options.stall_s)
        self._connection: EngineConnection | None = None
        self._calls: dict[int, AcceptedRequest | PendingCall] = {}  # the calls that the engine has, by msgid

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Host the links, until cancelled; a supervisor may start it again after a fault."""
        async with trio.open_nursery() as self._nursery:
            try:
                task_status.started()
                await self._keep_watch()
            finally:
                self._nursery = None  # no new tasks can start
                for entry in self.accepted:
                    self._end(entry, Unavailable("the service is stopping"))
                self._lose_calls()
                self._reset()

    async def _keep_watch(self) -> None:
        last_tick = trio.current_time()
        while True:
            await trio.sleep(TICK_S)
            now = trio.current_time()
            self._watch.was_deaf(max(0.0, now - last_tick - TICK_S))
            last_tick = now
            self._tick(now)

    async def send(self, message: Join, hand_over: socket.socket) -> None:
        """Take the gateway's end of a new link."""
        if self._nursery is None:
            hand_over.close()
        else:
            self.join(FrameStream(hand_over), message.models, was_killed=message.was_killed)
        await trio.lowlevel.checkpoint()  # last: the connection owns the socket by now

    def join(self, stream: FrameStream, models: Models, *, was_killed: bool = False) -> None:
        """Work with a new engine from now on; see AcceptedRequests.engine_up."""
        assert self._nursery is not None, "not running"
        if self._connection is not None:
            self._connection.close()
            self._lose()
        self._connection = EngineConnection(stream, self._hear)
        self._nursery.start_soon(self._connection.run)
        self._models = models
        self._watch.joined(trio.current_time())
        self.accepted.engine_up(was_killed=was_killed)
        self.joined.set()
        self._send_due()

    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        """Answer a call as a Batcher's ref does.

        Raises:
            GenbatchError: as with the Batcher.
            CallTimeout: no answer within `timeout` seconds.
        """
        with trio.move_on_after(math.inf if timeout is None else timeout):
            return await self._answer(request)
        raise CallTimeout("link", timeout or 0.0)

    async def _answer(self, request: object) -> Any:
        await trio.lowlevel.checkpoint()
        match request:
            case Generate() | Embed():
                return await self._work(request)
            case StatsRequest():
                return await self._stats()
            case HealthRequest():
                return await self._health()
            case ModelsRequest():
                if self._models is None:
                    raise Unavailable("the engine is being started", retry_after_ms=RETRY_MS)
                return self._models
            case EndWaiting(error):
                for entry in self.accepted:
                    self._end(entry, error)
                return None
            case DrainRequest(timeout_s=timeout_s):
                return await self._drain(timeout_s)
            case msgspec.Struct() if (method := method_of(request)) is not None and method.crosses:
                return await self._ask(request)
        raise TypeError(f"the engine's link has no call {type(request).__name__}")

    # Requests

    async def _work(self, message: Generate | Embed) -> Any:
        """Accept a request, and return its result, of this engine or of a later one."""
        if self._nursery is None:
            raise Unavailable("the service is stopping")
        self._check(message)
        is_streamed = isinstance(message, Generate) and message.on_token is not None
        # The engine itself bounds the wait for a slot, from the arrival of the request at the engine.
        # guard: default deadline, at the link
        wait_s = (self.options.default_deadline_s or None) if message.client else None
        entry = self.accepted.accept(message.request, trio.current_time(), is_streamed=is_streamed, wait_s=wait_s)
        entry.brought = message.drawn if isinstance(message, Generate) else ()
        entry.seed = secrets.randbelow(MAX_SEED + 1)
        entry.caller = pending = PendingCall(_method(message.request), message)
        try:
            self._send_due()
            return await pending.wait()
        finally:
            # guard: callers that leave, at the link
            self._forget(entry)

    def _check(self, message: Generate | Embed) -> None:
        """Refuse a request that cannot be taken.

        Raises:
            InvalidRequest: a parameter is out of range, or has no form on the wire.
            Unavailable: a drain has begun.
        """
        # guard: draining takes nothing new, at the link
        if self.is_draining:
            raise Unavailable(DRAINING, retry_after_ms=RETRY_AFTER_DRAIN_MS)
        if isinstance(message, Embed):
            validate_texts(message.request, self.options.limits)
        else:
            if message.keep is not None:
                raise InvalidRequest(None, "only an engine in the caller's process returns logits")
            limits, is_typed = self.options.limits, bool(message.client)
            validate_request(message.request, limits, drawn=message.drawn, is_typed=is_typed)
        fault = why_unsendable(message.request)
        if fault is not None:
            raise fault

    def _send_due(self) -> None:
        connection = self._connection
        if connection is None or self._watch.is_given_up:
            return
        now = trio.current_time()
        for entry in self.accepted.due():
            request = entry.request
            if entry.expires_at is not None:
                # Leave the engine at least a millisecond, so that it ends the request with its output so far.
                request = msgspec.structs.replace(request, deadline_s=max(0.001, entry.expires_at - now))
            if isinstance(request, GenerateRequest) and request.seed is None:
                request = msgspec.structs.replace(request, seed=entry.seed)
            message: Generate | Embed = entry.caller.message
            work: EngineWork[EngineRequest] = EngineWork(
                request=request,
                client=message.client,
                request_id=message.request_id,
                beam_width=message.beam_width if isinstance(message, Generate) else 1,
                streams=entry.is_streamed,
                is_admitted=entry.deaths > 0,
            )
            entry.msgid = connection.call(entry.caller.method, work, StreamOptions(drawn=entry.drawn()))
            self._calls[entry.msgid] = entry

    def _forget(self, entry: AcceptedRequest) -> None:
        """Remove a request that has ended, or that its caller has left."""
        if self.accepted.drop(entry):
            self._stop(entry.msgid)
        self._settled.set()
        self._settled = trio.Event()

    def _stop(self, msgid: int) -> None:
        """Let the engine stop the work on a call, unless the call has ended."""
        if self._calls.pop(msgid, None) is not None and self._connection is not None:
            self._connection.cancel(msgid)

    def _end(self, entry: AcceptedRequest, end: object) -> None:
        """End a request with its result or its error."""
        self._forget(entry)
        entry.caller.end(end)

    # The engine

    def _hear(self, connection: EngineConnection, event: ClientEvent | MalformedMessage | None) -> None:
        # guard: messages of an engine that is gone
        if connection is not self._connection:
            return
        if event is None:
            self._lose()
        elif not self._watch.is_given_up:
            self._watch.heard(trio.current_time())
            try:
                self._act(event)
            except (MalformedMessage, InvalidRequest) as fault:
                self._give_up(str(fault))
            self._send_due()  # a suspect's first token or end may free the next suspect

    def _act(self, event: ClientEvent | MalformedMessage) -> None:
        match event:
            case TokensReceived(tokens):
                for msgid, token in tokens:
                    entry = self._calls.get(msgid)
                    # Without an entry the request failed at an earlier token of this message.
                    if isinstance(entry, AcceptedRequest) and self.accepted.add(entry, token):
                        try:
                            entry.caller.message.on_token(token)
                        except Exception as error:  # a fault of the caller's function ends its request only
                            self._end(entry, EngineError(f"on_token raised {error!r}"))
            case CallAnswered(msgid, value):
                call = self._calls.get(msgid)
                if call is not None:  # no caller waits for the answer to a drain
                    method = call.method if isinstance(call, PendingCall) else call.caller.method
                    self._answered(msgid, to_answer(value, CALLS[method][1]))
            case CallFailed(int(msgid), error):
                self._answered(msgid, error)
            case Notified("health", params):
                (health,) = check_type(params, tuple[Health])
                self._watch.beat(health)
            case Notified("models", params):
                (self._models,) = check_type(params, tuple[Models])
            case MalformedMessage():
                raise event

    def _answered(self, msgid: int, end: object) -> None:
        call = self._calls.pop(msgid, None)
        if isinstance(call, AcceptedRequest):
            self._end(call, end)
        elif call is not None:
            call.end(end)

    def _lose(self) -> None:
        """Note that the engine has died."""
        self._connection = None
        self._watch.lost()
        self._lose_calls()
        for entry, error in self.accepted.lose(trio.current_time()):
            self._end(entry, error)

    def _lose_calls(self) -> None:
        """End the calls that only the lost engine could answer."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if isinstance(call, PendingCall):
                call.end(Unavailable("the engine died", retry_after_ms=RETRY_MS))

    # Time

    def _tick(self, now: float) -> None:
        # guard: deadline without an engine
        for entry in self.accepted.expired(now):
            reason = "the deadline passed before the engine had answered"
            if entry.wait_s is not None:
                reason = f"no engine was running for {entry.wait_s:g} s, the longest wait of this service"
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

    # Other calls

    async def _ask(self, request: msgspec.Struct) -> Any:
        """Return the engine's answer to a call that ends with this engine."""
        if self._connection is None:
            raise Unavailable("the engine is being restarted", retry_after_ms=RETRY_MS)
        method = method_of(request)
        assert method is not None and method.crosses, request
        pending = PendingCall(method.name)
        msgid = self._connection.call(method.name, request)
        self._calls[msgid] = pending
        try:
            return await pending.wait()
        finally:
            if self._calls.get(msgid) is pending:
                self._stop(msgid)

    async def _health(self) -> Health:
        """Return the engine's health with this link's state; the last known health if the engine does not answer."""
        if self._connection is not None and not self._watch.is_given_up:
            with trio.move_on_after(HEALTH_WAIT_S), suppress(GenbatchError):
                health = await self._shared_health.ask(lambda: self._ask(HealthRequest()))
                self._watch.beat(health)
        return self._watch.report(trio.current_time(), draining=self.is_draining, waiting=len(self.accepted))

    async def _stats(self) -> dict[str, Any]:
        """Return the engine's counters and this link's."""
        stats: dict[str, Any] = {}
        if self._connection is not None:
            stats |= await self._shared_stats.ask(lambda: self._ask(StatsRequest()))
        elif self._models is not None and self._models.models:
            stats["model"] = self._models.models[0].id
        counts = self.accepted.counts
        return stats | {
            "engine": "down" if self._connection is None else "up",
            "requests_open": len(self.accepted),
            "engine_restarts": max(0, self.accepted.num_engines - 1),
            "requests_replayed": counts["replayed"],
            "requests_lost": counts["lost"],
            "gateway_tasks": trio.lowlevel.current_statistics().tasks_living,
        }

    async def _drain(self, timeout_s: float) -> Drained:
        """Refuse new requests; return when the open requests have ended."""
        self.is_draining = True
        if len(self.accepted) and self._nursery is not None:
            deadline = trio.current_time() + timeout_s
            self._nursery.start_soon(self._cancel_open, deadline)  # also if this caller leaves
        await self._all_ended()
        return Drained(num_cancelled=self._num_cancelled)

    async def _cancel_open(self, deadline: float) -> None:
        """At the deadline, let the engine end the open requests with their output so far; then end the rest here."""
        with trio.move_on_at(deadline):
            await self._all_ended()
        self._num_cancelled += len(self.accepted)
        if self._connection is not None and len(self.accepted):
            self._connection.call("drain", DrainRequest(timeout_s=0.0))
            with trio.move_on_after(CANCEL_GRACE_S):
                await self._all_ended()
        for entry in self.accepted:
            self._end(entry, Cancelled("the service has stopped"))

    async def _all_ended(self) -> None:
        while len(self.accepted):
            await self._settled.wait()


def _method(request: EngineRequest) -> str:
    method = method_of(request)
    assert method is not None, request
    return method.name
