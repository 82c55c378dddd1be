"""EngineLink: stands where the Batcher would, and answers the same calls, with the Batcher in another process.

    link = await start(nursery, EngineLink(options, on_hung=kill))
    link.info(LinkUp(connection, models), control=True)          # a new engine is there
    result = await link.call(Generate(request), timeout=None)    # as of a Batcher

It decides, the ledger remembers, a LinkConnection moves the bytes. Requests outlive engines: what an engine's death
means for each is the ledger's rule. Whoever asks how the service is gets an answer from here, however the engine is.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from genbatch.actors.batching.batcher_messages import (
    Detokenize,
    Drain,
    Generate,
    GetHealth,
    GetModels,
    GetStats,
    Tokenize,
)
from genbatch.actors.batching.draining import Draining, DrainOver
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.engine.engine_watch import EngineWatch
from genbatch.actors.engine.ledger import RETRY_MS, Entry, Ledger
from genbatch.actors.engine.link_connection import LinkConnection
from genbatch.actors.engine.link_events import CancelOver, LinkFrame, LinkUp, Tick
from genbatch.actors.engine.link_messages import (
    Answer,
    Beat,
    Began,
    Cancel,
    Failed,
    Final,
    LinkError,
    Submit,
    ToGateway,
    Tokens,
    encode,
)
from genbatch.actors.engine.link_questions import LinkQuestions
from genbatch.actors.runtime.actor import NOREPLY, Down, From, GenServer, Monitor, Reason, reply, reply_error
from genbatch.proto.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    GenbatchError,
    InvalidRequest,
    Unavailable,
    from_wire,
)
from genbatch.proto.service_messages import Models
from genbatch.proto.validation import validate_request

logger = logging.getLogger(__name__)

# Any client that is not the program which runs the Batcher.
REMOTE = "remote"
# Seconds between two looks at deadlines and at the engine's signs of life.
TICK_S = 0.5
# Seconds that a drained engine has to end what it was told to cancel.
CANCEL_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who waits for a request."""

    from_: "From[Any]"
    monitor: Monitor
    message: Generate


class EngineLink(GenServer):
    """See the module's docstring.

    Args:
        options: the Batcher's. As many requests as its queue and slots hold may wait while no engine is there; after
            `stall_s` seconds without a sign of life, or without the end of a step while there is work, one is hung.
        on_hung: called with the reason; is to kill the engine.
    """

    def __init__(self, options: BatcherOptions, on_hung: Callable[[str], None]) -> None:
        self.options = options
        self.ledger = Ledger(options.admission(REMOTE).max_queue + options.n_parallel)
        self._on_hung = on_hung
        self._callers: dict[Monitor, Entry] = {}
        self._questions = LinkQuestions()
        self._connection: LinkConnection | None = None
        self._models: Models | None = None
        self._watch = EngineWatch(options.stall_s)
        self._last_tick = 0.0
        self._draining = Draining(lambda: len(self.ledger), self.send_after)

    # Callbacks

    async def init(self) -> None:
        self._last_tick = trio.current_time()
        self.send_after(TICK_S, Tick())

    async def handle_call(self, request: object, from_: "From[Any]") -> object:
        try:
            match request:
                case Generate():
                    self._receive(request, from_)
                case GetStats() if self._connection is None:
                    return self._own_stats()
                case GetStats() | Tokenize() | Detokenize():
                    self._questions.ask(request, from_, self.monitor(from_), self._connection)
                case GetHealth():
                    draining = self._draining.has_begun
                    return self._watch.report(trio.current_time(), draining=draining, waiting=len(self.ledger))
                case GetModels():
                    return self._known_models()
                case Drain(timeout_s):
                    self._draining.ask(from_, timeout_s)
                case _:
                    raise TypeError(f"the engine's link has no call {type(request).__name__}")
        except GenbatchError as error:
            reply_error(from_, error)
        return NOREPLY

    async def handle_info(self, message: object) -> None:
        match message:
            case LinkFrame(connection, messages):
                if messages is None:
                    self._lose(connection)
                else:
                    self._hear(connection, messages)
            case LinkUp(connection, models):
                self._join(connection, models)
            case Down(monitor):
                self._leave(monitor)
            case Tick():
                self.send_after(TICK_S, Tick())
                self._tick()
            case DrainOver():
                self._cancel_open()
            case CancelOver():
                for entry in self.ledger:
                    self._end(entry, Cancelled("the service has stopped"))

    async def terminate(self, reason: Reason) -> None:
        for entry in self.ledger:
            self._end(entry, Unavailable("the service is stopping"))
        self._questions.lose()
        if self._connection is not None:
            self._connection.close()

    # Requests

    def _receive(self, message: Generate, from_: "From[Any]") -> None:
        self._draining.check()
        if message.keep is not None:
            raise InvalidRequest(None, "logits are kept by an engine in the caller's process only")
        validate_request(message.request, self.options.limits)
        try:
            encode(message.request)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(None, f"cannot be sent: {error}") from error
        wanted = message.request
        if wanted.deadline_s is None and message.client and self.options.default_deadline_s:
            wanted = msgspec.structs.replace(wanted, deadline_s=self.options.default_deadline_s)
        entry = self.ledger.accept(wanted, trio.current_time(), is_streamed=message.on_token is not None)
        entry.caller = Caller(from_, self.monitor(from_), message)
        self._callers[entry.caller.monitor] = entry
        self._send_due()

    def _send_due(self) -> None:
        if self._watch.is_given_up:
            return
        now = trio.current_time()
        for entry in self.ledger.due():
            assert self._connection is not None
            request, message = entry.request, entry.caller.message
            if entry.expires_at is not None:
                # At the edge the engine is to say it, with whatever it has.
                request = msgspec.structs.replace(request, deadline_s=max(0.001, entry.expires_at - now))
            self._connection.post(
                Submit(
                    entry.id,
                    request,
                    message.client,
                    message.request_id,
                    message.beam_width,
                    entry.is_streamed,
                )
            )

    def _leave(self, monitor: Monitor) -> None:
        """A caller has stopped waiting."""
        self._questions.leave(monitor, self._connection)
        entry = self._callers.pop(monitor, None)
        if entry is not None:
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        if self.ledger.drop(entry) and self._connection is not None:
            self._connection.post(Cancel(entry.id))
        self._draining.settle()

    def _end(self, entry: Entry, error: GenbatchError) -> None:
        """Ends a request from here, whatever the engine does."""
        self._forget(entry)
        self._answer(entry, error)

    def _answer(self, entry: Entry, end: object) -> None:
        """The one place where a request's caller is answered."""
        caller: Caller = entry.caller
        del self._callers[caller.monitor]
        caller.monitor.cancel()
        if isinstance(end, GenbatchError):
            reply_error(caller.from_, end)
        else:
            reply(caller.from_, end)

    # The engine

    def _join(self, connection: LinkConnection, models: Models) -> None:
        if self._connection is not None:
            self._connection.close()
            self._lose(self._connection)
        self._connection = connection
        self._models = models
        self._watch.joined(trio.current_time())
        connection.epoch = self.ledger.engine_up()
        self._send_due()

    def _lose(self, connection: LinkConnection) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self._watch.lost()
        self._questions.lose()
        for entry, error in self.ledger.lose(trio.current_time()):
            self._answer(entry, error)
        self._draining.settle()

    def _hear(self, connection: LinkConnection, messages: list[ToGateway]) -> None:
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
                for entry, token in self.ledger.tokens(epoch, rows):
                    if entry not in self.ledger:
                        continue  # it has failed at an earlier token of these
                    try:
                        entry.caller.message.on_token(token)
                    except Exception as error:  # the caller's own function: its fault ends its request only
                        self._end(entry, EngineError(f"on_token raised {error!r}"))
            case Beat(health):
                self._watch.beat(health)
            case Began(id):
                self.ledger.begun(epoch, id)
            case Final(id, result):
                self._final(epoch, id, result)
            case Failed(id, error):
                if id < 0:
                    self._questions.fail(id, from_wire(error))
                else:
                    self._final(epoch, id, from_wire(error))
            case Answer(id, value):
                self._questions.answer(id, value, self._counters())

    def _final(self, epoch: int, id: int, end: object) -> None:
        entry = self.ledger.final(epoch, id)
        if entry is not None:
            self._answer(entry, end)
            self._draining.settle()

    # Time

    def _tick(self) -> None:
        now = trio.current_time()
        self._watch.was_deaf(max(0.0, now - self._last_tick - TICK_S))
        self._last_tick = now
        for entry in self.ledger.expired(now):
            self._end(entry, DeadlineExceeded("the deadline passed before the engine had answered"))
        if not len(self.ledger):
            self.ledger.check_integrity()
        if self._connection is not None and not self._watch.is_given_up and self._watch.is_stuck(now):
            self._give_up(f"no progress for {self._watch.stalled_s(now):.1f} s")

    def _give_up(self, reason: str) -> None:
        """Has the engine killed. Until its end of the link closes, and then a new one comes, requests wait."""
        self._watch.is_given_up = True
        self._on_hung(reason)

    # What gateways ask

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
        counts = self.ledger.counts
        return {
            "engine": "down" if self._connection is None else "up",
            "requests_open": len(self.ledger),
            "engine_restarts": max(0, self.ledger.epoch - 1),
            "requests_replayed": counts["replayed"],
            "requests_lost": counts["lost"],
            "gateway_tasks": trio.lowlevel.current_statistics().tasks_living,
        }

    # Draining

    def _cancel_open(self) -> None:
        """The engine ends what is open with what it has; what it does not end in time ends here."""
        self._draining.num_cancelled += len(self.ledger)
        if self._connection is not None and len(self.ledger):
            self._questions.tell_to_drain(self._connection)
            self.send_after(CANCEL_GRACE_S, CancelOver())
        else:
            for entry in self.ledger:
                self._end(entry, Cancelled("the service has stopped"))
