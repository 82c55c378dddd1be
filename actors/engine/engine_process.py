"""The engine process: the Batcher with its model and its KV, and the link to the gateway.

An EngineSession is the engine's side of the link, with one call of the Batcher for each request. All messages of one
turn of the event loop, such as a step's, go out as one frame. A crash of the Batcher ends the process: after a device
fault, and after most other faults, only a new process can be trusted.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import trio

from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.engine import engine_wire
from genbatch.actors.engine.child_process import (
    AdapterSource,
    ControlChannel,
    EngineReady,
    Join,
    Loading,
    PrepareEngine,
    ServingChanged,
    StartEngine,
    StartFault,
    Unjoined,
    keep_for_good,
    run_child,
)
from genbatch.actors.engine.engine_wire import (
    Answer,
    Ask,
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
    Tokens,
    decode_for_engine,
    decode_value,
    encode_frame,
)
from genbatch.actors.engine.freed_memory import keep_returning_freed_memory
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.errors import ActorDown, CallTimeout, MailboxFull
from genbatch.actors.runtime.supervisor import background
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest, QueueFull
from genbatch.proto.messages import HealthRequest, Models, ModelsRequest, StatsRequest, Token
from genbatch.proto.methods import METHODS, Lane

logger = logging.getLogger(__name__)

# Seconds between two signs of life.
BEAT_S = 0.25
# The most tokens that wait for a gateway that does not read: a thousand steps of 64 sequences. Then the link is closed.
MAX_BACKLOG = 65536
RETRY_AFTER_FULL_MS = 100


class EngineSession:
    """Serves one gateway until the gateway closes its end of the link, or leaves it unread for too long.

    Args:
        batcher: the Batcher.
        stream: the link; closed at the end.
    """

    def __init__(self, batcher: ActorRef, stream: FrameStream) -> None:
        self._batcher = batcher
        self._stream = stream
        self._scopes: dict[int, trio.CancelScope] = {}
        self._rows: list[Any] = []  # TokenRow's fields as tuples: half the cost, same bytes
        self._messages: list[object] = []
        self._news = trio.Event()
        self._parent_knows = trio.Event()  # set once the parent knows the served models
        self._parent_knows.set()
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Serve until the link is closed; then cancel every call of this gateway."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._send)
                self._nursery.start_soon(self._beat)
                await self._receive()
                self._nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._stream.aclose()

    async def _receive(self) -> None:
        while True:
            frame = await self._stream.receive()
            if frame is None:
                return
            try:
                for message in decode_for_engine(frame):
                    self._act(message)
            except LinkError as error:
                logger.error("the link is given up: %s", error)
                return

    def _act(self, message: engine_wire.ToEngine) -> None:
        match message:
            case Submit():
                self._start(message.id, lambda: self._generate(message))
            case SubmitEmbed() | SubmitScore():
                self._start(message.id, lambda: self._embed(message))
            case Ask():
                self._start(message.id, lambda: self._answer(message))
            case Cancel(id):
                scope = self._scopes.get(id)
                if scope is not None:  # else it has just ended
                    scope.cancel()

    def _start(self, id: int, work: Callable[[], Awaitable[object]]) -> None:
        if id in self._scopes:
            raise LinkError(f"number {id} is used twice")
        self._scopes[id] = trio.CancelScope()
        self._nursery.start_soon(self._serve, id, work)

    async def _serve(self, id: int, work: Callable[[], Awaitable[object]]) -> None:
        """Send the one result or error of a request or a question, unless it was cancelled."""
        end: object = None
        with self._scopes[id]:
            try:
                end = engine_wire.encode(await work())
            except GenbatchError as error:
                if self._batcher.alive:  # a failing Batcher's errors are dropped: the gateway decides
                    end = FinalError(id, error.to_wire())
            except MailboxFull:
                full = QueueFull("too many messages are waiting", retry_after_ms=RETRY_AFTER_FULL_MS)
                end = FinalError(id, full.to_wire())
            except (TypeError, ValueError, OverflowError) as fault:
                logger.exception("the end of %d cannot be sent", id)
                end = FinalError(id, EngineError(f"the result cannot be sent: {fault}").to_wire())
            except ActorDown:
                pass  # this process is ending, which closes the link
        del self._scopes[id]
        if end is not None:
            self._post(end)

    async def _generate(self, submit: Submit) -> Final:
        call = Generate(
            submit.request,
            self._sender(submit.id) if submit.streams else self._recorder(submit.id),
            submit.client,
            request_id=submit.request_id,
            beam_width=submit.beam_width,
            shows=submit.streams,
            drawn=submit.drawn,
            is_admitted=submit.is_admitted,
            is_validated=True,
        )
        return Final(submit.id, await self._batcher.call(call, timeout=None))

    async def _embed(self, submit: SubmitEmbed | SubmitScore) -> FinalEmbedded:
        call = Embed(submit.request, submit.client, request_id=submit.request_id, is_validated=True)
        return FinalEmbedded(submit.id, await self._batcher.call(call, timeout=None))

    async def _answer(self, ask: Ask) -> Answer:
        method = METHODS.get(ask.method)
        try:
            if method is None or not method.crosses:
                raise LinkError(f"no method {ask.method!r}")
            call = decode_value(ask.call, method.request)
        except LinkError as error:
            raise InvalidRequest(None, str(error)) from error
        answer = await self._batcher.call(call, timeout=None, control=method.lane is Lane.CONTROL)
        return Answer(ask.id, engine_wire.encode(answer))

    def _sender(self, id: int) -> Callable[[Token], None]:
        def stream(token: Token) -> None:
            row = (id, token.choice, token.index, token.token_id, token.text, token.logprob)
            if token.reasoning or token.tool_calls:
                self._add((*row, token.top, token.reasoning, token.tool_calls))
            else:
                self._add((*row, token.top) if token.top else row)

        return stream

    def _recorder(self, id: int) -> Callable[[Token], None]:
        """Return a function that sends the tokens without text, which the next engine would need."""

        def record(token: Token) -> None:
            row = (id, token.choice, token.index, token.token_id, "", token.logprob)
            self._add((*row, token.top) if token.top else row)

        return record

    def _add(self, row: tuple[Any, ...]) -> None:
        self._rows.append(row)
        num_rows = len(self._rows)
        if num_rows == 1:
            self._news.set()
        elif num_rows > MAX_BACKLOG:
            self._give_up()

    # Sending

    def tell_models(self, models: Models, told: trio.Event) -> None:
        """Send the newly served models; this message, and all later ones, wait until `told` is set."""
        self._parent_knows = told
        self._post(Serving(models))

    def _post(self, message: object) -> None:
        self._messages.append(message)
        self._news.set()

    def _give_up(self) -> None:
        """Close the link: a step must not wait for a gateway, and memory must not grow with unread messages."""
        if not self._nursery.cancel_scope.cancel_called:
            logger.error("the gateway does not read what it is sent: the link is given up")
            self._nursery.cancel_scope.cancel()

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            await self._parent_knows.wait()
            self._news = trio.Event()
            messages: list[object] = [Tokens(self._rows)] if self._rows else []
            messages += self._messages  # results follow the tokens that belong to them
            frame = encode_frame(messages)
            self._rows.clear()
            self._messages.clear()
            try:
                await self._stream.send(frame)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the gateway's last messages are still read; their end ends the session

    async def _beat(self) -> None:
        while True:
            try:
                self._post(Beat(await self._batcher.call(HealthRequest(), control=True)))
            except CallTimeout:
                pass  # a missing beat shows the gateway that the engine hangs
            except ActorDown:
                return
            await trio.sleep(BEAT_S)


# The number of reported parts in each stage of loading.
_PARTS = 100


def main() -> None:
    """Run until the parent sends Stop, or ends."""
    run_child(lambda channel: EngineProcess(channel).serve())


async def _import_model_side() -> ModuleType:
    """Import on a thread: torch takes seconds to import, and the parent may send Stop meanwhile."""
    return await trio.to_thread.run_sync(import_module, "genbatch.actors.engine.model_side", abandon_on_cancel=True)


async def _import_everything() -> None:
    """Import all that a model may need: a model without a stored description needs transformers' modules."""
    await _import_model_side()
    await trio.to_thread.run_sync(import_module, "genbatch.nif.models.model", abandon_on_cancel=True)


class EngineProcess:
    """The engine process's work for its parent."""

    def __init__(self, channel: ControlChannel[Any]) -> None:
        self._channel = channel
        self._batcher: ActorRef
        self._nursery: trio.Nursery
        self._session = trio.CancelScope()
        self._served: EngineSession | None = None  # of the connected gateway
        self._told: tuple[str, int] = ("", 0)  # last reported stage and part of loading
        self._changes: deque[tuple[ServingChanged, trio.Event]] = deque()  # changes not sent to the parent yet

    async def serve(self) -> None:
        """Serve until the parent sends Stop, or ends.

        Raises:
            StartFault: the Batcher could not be started.
        """
        async with background() as self._nursery:
            while True:
                match await self._channel.receive():
                    case PrepareEngine():
                        self._nursery.start_soon(_import_everything)
                    case StartEngine() as start:
                        self._nursery.start_soon(self._open, start)
                    case Join(number):
                        self._session.cancel()
                        self._session = trio.CancelScope()
                        self._nursery.start_soon(self._follow, number, FrameStream(self._channel.take_socket()))
                    case _:
                        return

    async def _open(self, start: StartEngine) -> None:
        try:
            side = await _import_model_side()
            self._batcher = await side.open_batcher(self._nursery, start, self._tell_progress, self._tell_models)
        except Exception as error:
            raise StartFault(error) from error
        models = await self._batcher.call(ModelsRequest(), timeout=None)
        stats = await self._batcher.call(StatsRequest(), timeout=None)
        keep_for_good()
        self._nursery.start_soon(keep_returning_freed_memory)
        await self._tell(EngineReady(models, stats))

    async def _follow(self, number: int, stream: FrameStream) -> None:
        """Serve one gateway."""
        with self._session:
            self._served = session = EngineSession(self._batcher, stream)
            try:
                await session.run()
            finally:
                if self._served is session:
                    self._served = None
        await self._tell(Unjoined(number))

    def _tell_models(self, models: Models, adapters: list[AdapterSource]) -> None:
        """Tell the parent about changed models first, and then the gateway.

        The parent needs the adapters for the next engine. In the other order, a crash in between would undo a change
        that the client already knows of.
        """
        told = trio.Event()
        self._changes.append((ServingChanged(models, adapters), told))
        self._nursery.start_soon(self._tell_change)
        if self._served is not None:
            self._served.tell_models(models, told)

    async def _tell_change(self) -> None:
        change, told = self._changes.popleft()  # the oldest: tasks start in any order
        await self._tell(change)
        told.set()

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        """Report progress; runs on the event loop's thread."""
        part = _PARTS * done // total if total else 0
        if self._told != (stage, part):
            self._told = (stage, part)
            self._nursery.start_soon(self._tell, Loading(stage, done, total))

    async def _tell(self, message: object) -> None:
        with suppress(OSError):  # the parent has ended, which ends this process, too
            await self._channel.send(message)
