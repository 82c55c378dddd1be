"""EngineSession: the engine's side of its link: what a gateway asks of the Batcher, one call for each request.

Whatever happens within one turn of the event loop, such as a step, goes out as one frame.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from genbatch.actors.batching.batcher_messages import Generate, GetHealth
from genbatch.actors.engine import link_messages
from genbatch.actors.engine.frame_stream import FrameStream
from genbatch.actors.engine.link_messages import (
    QUESTIONS,
    Answer,
    Ask,
    Beat,
    Began,
    Cancel,
    Failed,
    Final,
    LinkError,
    Submit,
    Tokens,
    decode_for_engine,
    decode_value,
    encode_frame,
)
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.errors import ActorDown, CallTimeout, MailboxFull
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest, QueueFull
from genbatch.proto.messages import Token

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

    def _act(self, message: link_messages.ToEngine) -> None:
        match message:
            case Submit():
                self._start(message.id, lambda: self._generate(message))
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
                end = link_messages.encode(await work())
            except GenbatchError as error:
                if self._batcher.alive:  # else it fails all with its last breath, and the gateway knows better
                    end = Failed(id, error.to_wire())
            except MailboxFull:
                full = QueueFull("too many messages are waiting", retry_after_ms=RETRY_AFTER_FULL_MS)
                end = Failed(id, full.to_wire())
            except (TypeError, ValueError, OverflowError) as fault:
                logger.exception("the end of %d cannot be sent", id)
                end = Failed(id, EngineError(f"the result cannot be sent: {fault}").to_wire())
            except ActorDown:
                pass  # this process is ending, and the gateway will learn it from the link
        del self._scopes[id]
        if end is not None:
            self._post(end)

    async def _generate(self, submit: Submit) -> Final:
        call = Generate(
            submit.request,
            self._on_token(submit),
            submit.client,
            request_id=submit.request_id,
            beam_width=submit.beam_width,
        )
        return Final(submit.id, await self._batcher.call(call, timeout=None))

    async def _answer(self, ask: Ask) -> Answer:
        kind, _ = QUESTIONS.get(ask.method, (None, None))
        try:
            if kind is None:
                raise LinkError(f"no method {ask.method!r}")
            call = decode_value(ask.call, kind)
        except LinkError as error:
            raise InvalidRequest(None, str(error)) from error
        answer = await self._batcher.call(call, timeout=None, control=ask.method in ("stats", "drain"))
        return Answer(ask.id, link_messages.encode(answer))

    def _on_token(self, submit: Submit) -> Callable[[Token], None]:
        id, rows = submit.id, self._rows

        def stream(token: Token) -> None:
            rows.append((id, token.choice, token.index, token.token_id, token.text, token.logprob))
            num_rows = len(rows)
            if num_rows == 1:
                self._news.set()
            elif num_rows > MAX_BACKLOG:
                self._give_up()

        def begin(token: Token) -> None:
            if token.index == 0 and token.choice == 0:
                self._post(Began(id))

        return stream if submit.streams else begin

    # Sending

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
                self._post(Beat(await self._batcher.call(GetHealth(), control=True)))
            except CallTimeout:
                pass  # no sign of life is one, too
            except ActorDown:
                return
            await trio.sleep(BEAT_S)
