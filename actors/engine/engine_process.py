"""The engine process: the Batcher, with its model and its KV, and the link to whoever sends it requests.

An EngineSession is its side of the link: one call of the Batcher for each request. Whatever happens within one turn of
the event loop, such as a step, goes out as one frame. A crash of the Batcher ends the process: after a device fault,
and after most others, only a new one can be trusted.
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
# Tokens that may wait for a gateway that does not read; then it counts as dead. A thousand steps of 64 sequences.
MAX_BACKLOG = 65536
RETRY_AFTER_FULL_MS = 100


class EngineSession:
    """Serves one gateway until its end of the link closes, or stays unread for too long.

    Args:
        batcher: who generates.
        stream: the link; closed at the end.
    """

    def __init__(self, batcher: ActorRef, stream: FrameStream) -> None:
        self._batcher = batcher
        self._stream = stream
        self._scopes: dict[int, trio.CancelScope] = {}
        self._rows: list[Any] = []  # the fields of TokenRow, as tuples, which cost half as much and travel alike
        self._messages: list[object] = []
        self._news = trio.Event()
        self._parent_knows = trio.Event()  # what is served
        self._parent_knows.set()
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Returns when the link is closed; every call of this gateway is cancelled then."""
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
        """Sends the one end of a request or a question, unless it was cancelled."""
        end: object = None
        with self._scopes[id]:
            try:
                end = engine_wire.encode(await work())
            except GenbatchError as error:
                if self._batcher.alive:  # else it fails all with its last breath, and the gateway knows better
                    end = FinalError(id, error.to_wire())
            except MailboxFull:
                full = QueueFull("too many messages are waiting", retry_after_ms=RETRY_AFTER_FULL_MS)
                end = FinalError(id, full.to_wire())
            except (TypeError, ValueError, OverflowError) as fault:
                logger.exception("the end of %d cannot be sent", id)
                end = FinalError(id, EngineError(f"the result cannot be sent: {fault}").to_wire())
            except ActorDown:
                pass  # this process is ending, and the gateway will learn it from the link
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
        """Sends what the next engine would need."""

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
        """What is served has changed; the answer to who changed it, and all after it, waits until `told` is set."""
        self._parent_knows = told
        self._post(Serving(models))

    def _post(self, message: object) -> None:
        self._messages.append(message)
        self._news.set()

    def _give_up(self) -> None:
        """A step must not wait for a gateway, nor memory grow with its silence."""
        if not self._nursery.cancel_scope.cancel_called:
            logger.error("the gateway does not read what it is sent: the link is given up")
            self._nursery.cancel_scope.cancel()

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            await self._parent_knows.wait()
            self._news = trio.Event()
            messages: list[object] = [Tokens(self._rows)] if self._rows else []
            messages += self._messages  # ends come after the tokens that they follow
            frame = encode_frame(messages)
            self._rows.clear()
            self._messages.clear()
            try:
                await self._stream.send(frame)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # what was sent before can still be read, and the end of that ends the session

    async def _beat(self) -> None:
        while True:
            try:
                self._post(Beat(await self._batcher.call(HealthRequest(), control=True)))
            except CallTimeout:
                pass  # no sign of life is one, too
            except ActorDown:
                return
            await trio.sleep(BEAT_S)


# Parts of a stage of loading that are told of one by one.
_PARTS = 100


def main() -> None:
    """Runs until the parent says Stop, or is gone."""
    run_child(lambda channel: EngineProcess(channel).serve())


async def _import_model_side() -> ModuleType:
    """On a thread, as torch takes seconds to import, in which the parent may say Stop."""
    return await trio.to_thread.run_sync(import_module, "genbatch.actors.engine.model_side", abandon_on_cancel=True)


async def _import_everything() -> None:
    """What any model may need: one that was not described before is described by transformers' modules."""
    await _import_model_side()
    await trio.to_thread.run_sync(import_module, "genbatch.nif.models.model", abandon_on_cancel=True)


class EngineProcess:
    """What the process does for its parent."""

    def __init__(self, channel: ControlChannel[Any]) -> None:
        self._channel = channel
        self._batcher: ActorRef
        self._nursery: trio.Nursery
        self._session = trio.CancelScope()
        self._served: EngineSession | None = None  # the gateway's that is there
        self._told: tuple[str, int] = ("", 0)  # stage and part of loading
        self._changes: deque[tuple[ServingChanged, trio.Event]] = deque()  # what the parent was not told yet

    async def serve(self) -> None:
        """Returns when the parent says so, or is gone.

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
        """Serves one gateway."""
        with self._session:
            self._served = session = EngineSession(self._batcher, stream)
            try:
                await session.run()
            finally:
                if self._served is session:
                    self._served = None
        await self._tell(Unjoined(number))

    def _tell_models(self, models: Models, adapters: list[AdapterSource]) -> None:
        """The parent is to know what the next engine is to have, and then the gateway what this one has: were this one
        killed between the two, what a client was told of would be undone."""
        told = trio.Event()
        self._changes.append((ServingChanged(models, adapters), told))
        self._nursery.start_soon(self._tell_change)
        if self._served is not None:
            self._served.tell_models(models, told)

    async def _tell_change(self) -> None:
        change, told = (
            self._changes.popleft()
        )  # the oldest: tasks begin in any order, the channel keeps to that of calls
        await self._tell(change)
        told.set()

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        """On the event loop's thread."""
        part = _PARTS * done // total if total else 0
        if self._told != (stage, part):
            self._told = (stage, part)
            self._nursery.start_soon(self._tell, Loading(stage, done, total))

    async def _tell(self, message: object) -> None:
        with suppress(OSError):  # the parent is gone, which ends this process, too
            await self._channel.send(message)
