"""The link between a gateway process and its engine process: msgpack-RPC over a socketpair, one frame a message.

    gateway:  EngineConnection    generate, embed, score and the methods that cross;  cancel
    engine:   EngineSession       tokens, results, errors;  health: a sign of life;  models: what is served now

Both ends are those of `proto/rpc.py`, without limits. `generate`, `embed` and `score` carry an EngineWork instead of
the client's request. The end of the stream means that the other process has ended.
"""

import logging
import socket
import struct
import typing
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
import trio

from genbatch.actors.batcher.messages import Embed, Embedded, Generate
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.errors import ActorDown, CallTimeout, MailboxFull
from genbatch.proto.errors import Cancelled, EngineError, GenbatchError, InvalidRequest, MalformedMessage, QueueFull
from genbatch.proto.messages import EmbedRequest, GenerateRequest, Result, ScoreRequest, Token
from genbatch.proto.methods import METHODS, Lane
from genbatch.proto.rpc import (
    MAX_MSGID,
    PLAIN_STREAM,
    CallReceived,
    CancelRequest,
    ClientConnection,
    ClientEvent,
    Refused,
    ServerConnection,
    StreamOptions,
    TokenArray,
    notification,
    token_array,
    tokens_message,
)
from genbatch.proto.service_messages import HealthRequest, Models
from genbatch.proto.validation import check_type

logger = logging.getLogger(__name__)

R = TypeVar("R")


class EngineWork(msgspec.Struct, Generic[R], frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request that the engine's Batcher accepts, queues and charges to a client.

    Args:
        request: the request; `deadline_s` is the time that remains.
        client, request_id, beam_width: see Generate.
        streams: whether the caller reads the tokens; else they are sent without text, for the next engine.
        is_admitted: see Generate.
    """

    request: R
    client: str = ""
    request_id: str = ""
    beam_width: int = 1
    streams: bool = False
    is_admitted: bool = False


# The type of a call's parameters, and of its answer, by the method's name.
CALLS: dict[str, tuple[Any, Any]] = {
    "generate": (EngineWork[GenerateRequest], Result),
    "embed": (EngineWork[EmbedRequest], Embedded),
    "score": (EngineWork[ScoreRequest], Embedded),
} | {row.name: (row.request, row.answer) for row in METHODS.values() if row.crosses}


_LENGTH: typing.Final = struct.Struct("<I")
# The most bytes of a frame, above any result; a longer frame breaks the protocol.
MAX_FRAME_BYTES = 2**30
_RECEIVE_BYTES = 64 * 2**10


class FrameStream:
    """One end of a socketpair, for one task that receives and one that sends.

    Args:
        end: the socket; it is closed with the stream.
    """

    def __init__(self, end: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(end))
        self._received = bytearray()

    async def receive(self) -> bytes | None:
        """Return the next frame; None once the other end is closed.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: this end is broken or closed.
        """
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            try:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
            except trio.BrokenResourceError:  # a reset: the other process died with unread data
                return None
            if not data:
                return None
            self._received += data

    async def send(self, frame: bytes) -> None:
        """Send a frame; return once the kernel has all of it.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: one of the ends is closed.
        """
        assert len(frame) <= MAX_FRAME_BYTES, len(frame)
        await self._stream.send_all(_LENGTH.pack(len(frame)) + frame)

    async def aclose(self) -> None:
        """Close this end."""
        await self._stream.aclose()

    def _take(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise trio.BrokenResourceError(f"a frame of {length} bytes")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        with memoryview(self._received) as view:
            frame = bytes(view[_LENGTH.size : end])
        del self._received[:end]
        return frame


class EngineConnection:
    """The gateway's end of one engine's link, from its start to its end.

    Args:
        stream: closed at the end.
        hear: called with this connection and each message; with the fault, once, if the engine breaks the protocol.
            Messages after a fault are ignored. Called with None at the end, once.
    """

    def __init__(
        self,
        stream: FrameStream,
        hear: "Callable[[EngineConnection, ClientEvent | MalformedMessage | None], None]",
    ) -> None:
        self._stream = stream
        self._hear = hear
        self._rpc = ClientConnection(limits=None)
        self._outbox: deque[bytes] = deque()  # the number of accepted requests bounds it
        self._news = trio.Event()
        self._scope = trio.CancelScope()

    def call(self, method: str, params: msgspec.Struct, options: StreamOptions = PLAIN_STREAM) -> int:
        """Send a call soon; return its msgid.

        Raises:
            InvalidRequest: a parameter has no form on the wire.
        """
        msgid, message = self._rpc.request(method, params, options)
        self._post(message)
        return msgid

    def cancel(self, msgid: int) -> None:
        """Stop the work on a call, and ignore its later messages."""
        message = self._rpc.cancel(msgid)
        if message is not None:
            self._post(message)

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
            self._hear(self, None)

    async def _read(self) -> None:
        """Read until the engine closes its end, even after a fault: closing ours would make it ask for a new link."""
        is_faulty = False
        while (frame := await self._stream.receive()) is not None:
            if is_faulty:
                continue
            try:
                event = self._rpc.receive(frame)
            except MalformedMessage as fault:
                is_faulty = True
                self._hear(self, fault)
            else:
                if event is not None:
                    self._hear(self, event)

    def _post(self, message: bytes) -> None:
        self._outbox.append(message)
        self._news.set()

    async def _send(self) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # the engine's last messages are still read
            while True:
                await self._news.wait()
                self._news = trio.Event()
                while self._outbox:
                    await self._stream.send(self._outbox.popleft())


# Seconds between two signs of life.
BEAT_S = 0.25
# The most tokens that wait for a gateway that does not read: a thousand steps of 64 sequences. Then the link is closed.
MAX_BACKLOG = 65536
RETRY_AFTER_FULL_MS = 100


class EngineSession:
    """The engine's end: serves one gateway until it closes its end, or leaves the link unread for too long.

    Args:
        batcher: the Batcher.
        stream: the link; closed at the end.
    """

    def __init__(self, batcher: ActorRef, stream: FrameStream) -> None:
        self._batcher = batcher
        self._stream = stream
        self._rpc = ServerConnection(max_calls=MAX_MSGID, limits=None)
        self._scopes: dict[int, trio.CancelScope] = {}
        self._rows: list[TokenArray] = []
        self._messages: list[bytes] = []
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
                while (frame := await self._stream.receive()) is not None:
                    if not self._act(frame):
                        break
                self._nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._stream.aclose()

    def _act(self, frame: bytes) -> bool:
        """Handle a message; return False if the gateway breaks the protocol."""
        match self._rpc.receive(frame):
            case CallReceived() as call:
                self._scopes[call.msgid] = trio.CancelScope()
                self._nursery.start_soon(self._serve, call)
            case CancelRequest(msgid):
                if msgid in self._scopes:  # else this process is ending
                    self._scopes[msgid].cancel()
            case Refused(error):
                logger.error("the link is given up: %s", error)
                return False
        return True

    async def _serve(self, call: CallReceived) -> None:
        """Send the one result or error of a call."""
        msgid = call.msgid
        final = None
        with self._scopes[msgid] as scope:
            try:
                final = self._rpc.result(msgid, await self._answer(call))
            except GenbatchError as error:
                if self._batcher.alive:  # a failing Batcher's errors are dropped: the gateway decides
                    final = self._rpc.error(msgid, error)
            except MailboxFull:
                full = QueueFull("too many messages are waiting", retry_after_ms=RETRY_AFTER_FULL_MS)
                final = self._rpc.error(msgid, full)
            except (TypeError, ValueError, OverflowError) as fault:
                logger.exception("the result of %s cannot be sent", call.method)
                final = self._rpc.error(msgid, EngineError(f"the result cannot be sent: {fault}"))
            except ActorDown:
                pass  # this process is ending, which closes the link
        del self._scopes[msgid]
        if scope.cancelled_caught:
            final = self._rpc.error(msgid, Cancelled("cancelled by the gateway"))
        if final is not None:
            self._post(final)

    async def _answer(self, call: CallReceived) -> object:
        if call.method not in CALLS:
            raise InvalidRequest(None, f"no method {call.method!r}")
        params = check_type(call.params, CALLS[call.method][0])
        if not isinstance(params, EngineWork):
            is_control = METHODS[call.method].lane is Lane.CONTROL
            return await self._batcher.call(params, timeout=None, control=is_control)
        if not isinstance(params.request, GenerateRequest):
            embed = Embed(params.request, params.client, request_id=params.request_id, is_validated=True)
            return await self._batcher.call(embed, timeout=None)
        generate = Generate(
            params.request,
            self._sender(call.msgid, shows=params.streams),
            params.client,
            request_id=params.request_id,
            beam_width=params.beam_width,
            shows=params.streams,
            drawn=call.options.drawn,
            is_admitted=params.is_admitted,
            is_validated=True,
        )
        return await self._batcher.call(generate, timeout=None)

    def _sender(self, msgid: int, *, shows: bool) -> Callable[[Token], None]:
        """Return the function that sends a call's tokens."""

        def send(token: Token) -> None:
            rows = self._rows
            rows.append(token_array(msgid, token, shows))
            num_rows = len(rows)
            if num_rows == 1:
                self._news.set()
            elif num_rows > MAX_BACKLOG:
                self._give_up()

        return send

    # Sending

    def tell_models(self, models: Models, announced: trio.Event) -> None:
        """Send the newly served models; this message, and all later ones, wait until `announced` is set."""
        self._parent_knows = announced
        self._post(notification("models", models))

    def _post(self, message: bytes) -> None:
        self._messages.append(message)
        self._news.set()

    def _give_up(self) -> None:
        """Close the link: a step must not wait for a gateway, and memory must not grow with unread messages."""
        if not self._nursery.cancel_scope.cancel_called:
            logger.error("the gateway does not read its messages, so the link is closed")
            self._nursery.cancel_scope.cancel()

    async def _send(self) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # the gateway's end ends the session
            while True:
                await self._news.wait()
                if not self._parent_knows.is_set():  # `wait` would give up this turn of the event loop in any case
                    await self._parent_knows.wait()
                self._news = trio.Event()
                # Results follow the tokens that belong to them.
                messages = [tokens_message(self._rows), *self._messages] if self._rows else self._messages
                self._rows, self._messages = [], []
                for message in messages:
                    await self._stream.send(message)

    async def _beat(self) -> None:
        while True:
            try:
                health = await self._batcher.call(HealthRequest(), control=True)
                self._post(notification("health", health))
            except CallTimeout:
                pass  # a missing beat shows the gateway that the engine hangs
            except ActorDown:
                return
            await trio.sleep(BEAT_S)
