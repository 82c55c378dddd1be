"""What a gateway process and an engine process say to each other: frames over a socketpair, each a list of messages.

    ToEngine:  Submit, SubmitEmbed, SubmitScore, Cancel, Ask     one frame for each turn of the gateway's event loop
    ToGateway: Tokens, Final, FinalEmbedded, FinalError, Answer, Beat, Serving    one a step of the engine

Every type is checked when a frame is decoded. Numbers in place of names keep a step's message small: structs travel
as arrays, told apart by their first element. The end of the stream is the other process's end.
"""

import socket
import struct
import typing
from typing import Annotated, Any

import msgspec
import trio

from genbatch.actors.batcher.messages import DrawnTokens, Embedded
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
    """The other side broke the link's rules; the message says how."""


class Submit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """Work on a request.

    Args:
        id: the gateway's number for it, used once.
        request: what to generate; `deadline_s` is what remains of it.
        client, request_id, beam_width: see Generate.
        streams: whether tokens are to be sent with their text: somebody reads them.
        drawn: see Generate.
    """

    id: int
    request: GenerateRequest
    client: str
    request_id: str
    beam_width: int
    streams: bool
    drawn: tuple[DrawnTokens, ...] = ()


class Cancel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Nobody waits for this request or question any more."""

    id: int


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Another call of the Batcher's.

    Args:
        method: a name in METHODS.
        call: the method's request.
    """

    id: int
    method: str
    call: msgspec.Raw


class SubmitEmbed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Work on an embedding request; the fields are those of Submit."""

    id: int
    request: EmbedRequest
    client: str
    request_id: str


class SubmitScore(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """Work on a request for scores; the fields are those of Submit."""

    id: int
    request: ScoreRequest
    client: str
    request_id: str


class TokenRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A Token of the request with this id; without its text where nobody reads that."""

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
    """The tokens of a step, of all sequences together."""

    rows: list[TokenRow]


class Final(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """A request's result; all its tokens were sent before."""

    id: int
    result: Result


class FinalEmbedded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """The result of texts to embed or to score."""

    id: int
    result: Embedded


class FinalError(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The error that a request or a question ends with."""

    id: int
    error: ErrorInfo


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The answer to a question, of the type that METHODS says."""

    id: int
    value: msgspec.Raw


class Beat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """The engine's event loop runs, and this is how the Batcher is."""

    health: Health


class Serving(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """What the engine serves from now on."""

    models: Models


ToEngine = Submit | SubmitEmbed | SubmitScore | Cancel | Ask
ToGateway = Tokens | Final | FinalEmbedded | FinalError | Answer | Beat | Serving

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_to_gateway = msgspec.msgpack.Decoder(list[ToGateway])


def encode(message: object) -> msgspec.Raw:
    """One message, or a call or an answer, to be put into a frame.

    Raises:
        TypeError, ValueError, OverflowError: it holds what msgpack has no form for.
    """
    return msgspec.Raw(_encoder.encode(message))


def encode_frame(messages: list[Any]) -> bytes:
    """A frame of one side's messages, encoded already or not."""
    return _encoder.encode(messages)


def decode_for_engine(frame: bytes) -> list[ToEngine]:
    """The messages of a gateway's frame.

    Raises:
        LinkError: it is not such a message.
    """
    try:
        return _to_engine.decode(frame)
    except msgspec.DecodeError as error:
        raise LinkError(f"the gateway sent what is no frame: {error}") from error


def decode_for_gateway(frame: bytes) -> list[ToGateway]:
    """The messages of an engine's frame.

    Raises:
        LinkError: it is not such a message.
    """
    try:
        return _to_gateway.decode(frame)
    except msgspec.DecodeError as error:
        raise LinkError(f"the engine sent what is no frame: {error}") from error


def decode_value(data: msgspec.Raw, kind: Any) -> Any:
    """A call or an answer of the type that METHODS says.

    Raises:
        LinkError: it is of another.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise LinkError(f"not a {kind}: {error}") from error


_LENGTH: typing.Final = struct.Struct("<I")
# More than any result that is sent; what claims to be longer is no frame of ours.
MAX_FRAME_BYTES = 2**30
_RECEIVE_BYTES = 64 * 2**10


class FrameStream:
    """One end of a socketpair, for one task that receives and one that sends.

    Args:
        end: is closed with the stream.
    """

    def __init__(self, end: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(end))
        self._received = bytearray()

    async def receive(self) -> bytes | None:
        """The next frame; None once the other end is closed.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: this end is.
        """
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            try:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
            except trio.BrokenResourceError:  # reset: it died with data of ours unread
                return None
            if not data:
                return None
            self._received += data

    async def send(self, frame: bytes) -> None:
        """Sends a frame; returns once the kernel has all of it.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: one of the ends is closed.
        """
        assert len(frame) <= MAX_FRAME_BYTES, len(frame)
        await self._stream.send_all(_LENGTH.pack(len(frame)) + frame)

    async def aclose(self) -> None:
        """Closes this end."""
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
