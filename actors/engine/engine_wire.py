"""The protocol between a gateway process and an engine process: frames over a socketpair, each a list of messages.

    ToEngine:  Submit, SubmitEmbed, SubmitScore, Cancel, Ask     one frame for each turn of the gateway's event loop
    ToGateway: Tokens, Final, FinalEmbedded, FinalError, Answer, Beat, Serving    one a step of the engine

Decoding checks every type. Structs travel as arrays with a number as their first element, which keeps a step's message
small. The end of the stream means that the other process has ended.
"""

import socket
import struct
import typing
from typing import Annotated, Any

import msgspec
import trio

from genbatch.actors.batcher.messages import Embedded
from genbatch.proto.drawn import DrawnTokens
from genbatch.proto.errors import ErrorInfo
from genbatch.proto.messages import (
    EmbedRequest,
    GenerateRequest,
    Health,
    Models,
    Result,
    ScoreRequest,
    ToolCallDelta,
)


class LinkError(Exception):
    """The other side broke the protocol; the text says how."""


class Submit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """Work on a request.

    Args:
        id: the gateway's number for it, used once.
        request: the request; `deadline_s` is the time that remains.
        client, request_id, beam_width: see Generate.
        streams: whether to send tokens with their text, for a caller that reads them.
        drawn, is_admitted: see Generate.
    """

    id: int
    request: GenerateRequest
    client: str
    request_id: str
    beam_width: int
    streams: bool
    drawn: tuple[DrawnTokens, ...] = ()
    is_admitted: bool = False


class Cancel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Stop the work on this request or question."""

    id: int


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Another call of the Batcher.

    Args:
        method: a name in METHODS.
        call: the method's request.
    """

    id: int
    method: str
    call: msgspec.Raw


class SubmitEmbed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Work on an embedding request; see Submit for the fields."""

    id: int
    request: EmbedRequest
    client: str
    request_id: str


class SubmitScore(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """Work on a request for scores; see Submit for the fields."""

    id: int
    request: ScoreRequest
    client: str
    request_id: str


class TokenRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A Token of the request with this id; its text is empty where no caller reads it."""

    id: int
    choice: int
    index: int
    token_id: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    text: str
    logprob: float | None
    top: dict[int, float] = {}
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Tokens(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """The tokens of one step, for all sequences."""

    rows: list[TokenRow]


class Final(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """A request's result, after all its tokens."""

    id: int
    result: Result


class FinalEmbedded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """The result of texts to embed or to score."""

    id: int
    result: Embedded


class FinalError(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The error that ends a request or a question."""

    id: int
    error: ErrorInfo


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The answer to a question, with the answer type in METHODS."""

    id: int
    value: msgspec.Raw


class Beat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """A sign of life of the engine's event loop, with the Batcher's health."""

    health: Health


class Serving(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """The models that the engine serves from now on."""

    models: Models


ToEngine = Submit | SubmitEmbed | SubmitScore | Cancel | Ask
ToGateway = Tokens | Final | FinalEmbedded | FinalError | Answer | Beat | Serving

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_to_gateway = msgspec.msgpack.Decoder(list[ToGateway])


def encode(message: object) -> msgspec.Raw:
    """Encode one message, or a call or an answer within a message.

    Raises:
        TypeError, ValueError, OverflowError: msgpack cannot encode a value.
    """
    return msgspec.Raw(_encoder.encode(message))


def encode_frame(messages: list[Any]) -> bytes:
    """Return a frame of one side's messages, which may be encoded already."""
    return _encoder.encode(messages)


def decode_for_engine(frame: bytes) -> list[ToEngine]:
    """Return the messages of a gateway's frame.

    Raises:
        LinkError: the frame is not valid.
    """
    try:
        return _to_engine.decode(frame)
    except msgspec.DecodeError as error:
        raise LinkError(f"the gateway sent what is no frame: {error}") from error


def decode_for_gateway(frame: bytes) -> list[ToGateway]:
    """Return the messages of an engine's frame.

    Raises:
        LinkError: the frame is not valid.
    """
    try:
        return _to_gateway.decode(frame)
    except msgspec.DecodeError as error:
        raise LinkError(f"the engine sent what is no frame: {error}") from error


def decode_value(data: msgspec.Raw, kind: Any) -> Any:
    """Decode a call or an answer with a type in METHODS.

    Raises:
        LinkError: the bytes have another type.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise LinkError(f"not a {kind}: {error}") from error


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
