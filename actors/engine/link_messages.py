"""What a gateway and an engine say to each other over their link; a frame is a list of one side's messages.

Every type is checked when a frame is decoded. Numbers in place of names keep a step's message small: structs travel as
arrays, told apart by their first element.
"""

from typing import Any

import msgspec

from genbatch.actors.batching.batcher_messages import Detokenize, Drain, GetStats, Tokenize
from genbatch.proto.errors import ErrorInfo
from genbatch.proto.messages import GenerateRequest, Result
from genbatch.proto.service_messages import Drained, Health, Text, TokenIds


class LinkError(Exception):
    """The other side broke the link's rules; the message says how."""


class Submit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """Work on a request.

    Args:
        id: the gateway's number for it, used once.
        request: what to generate; `deadline_s` is what remains of it.
        client, request_id, beam_width: see Generate.
        streams: whether every token is to be sent, and not just the news of the first.
    """

    id: int
    request: GenerateRequest
    client: str
    request_id: str
    beam_width: int
    streams: bool


class Cancel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Nobody waits for this request or question any more."""

    id: int


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Another call of the Batcher's.

    Args:
        method: a name in QUESTIONS.
        call: the call, of the type that the name has there.
    """

    id: int
    method: str
    call: msgspec.Raw


class TokenRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A Token of the request with this id."""

    id: int
    choice: int
    index: int
    token_id: int
    text: str
    logprob: float | None
    top: dict[int, float] = {}


class Tokens(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """The tokens of a step, of all sequences together."""

    rows: list[TokenRow]


class Began(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The first token of a request that does not stream."""

    id: int


class Final(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """A request's result; all its tokens were sent before."""

    id: int
    result: Result


class Failed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The error that a request or a question ends with."""

    id: int
    error: ErrorInfo


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The answer to a question, of the type that QUESTIONS says."""

    id: int
    value: msgspec.Raw


class Beat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """The engine's event loop runs, and this is how the Batcher is."""

    health: Health


ToEngine = Submit | Cancel | Ask
ToGateway = Tokens | Began | Final | Failed | Answer | Beat

# The Batcher's other calls that cross, with the types of call and answer.
QUESTIONS: dict[str, tuple[type[Any], Any]] = {
    "stats": (GetStats, dict[str, Any]),
    "tokenize": (Tokenize, TokenIds),
    "detokenize": (Detokenize, Text),
    "drain": (Drain, Drained),
}
METHODS = {call: method for method, (call, _) in QUESTIONS.items()}

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
        LinkError: it is none.
    """
    try:
        return _to_engine.decode(frame)
    except msgspec.DecodeError as error:
        raise LinkError(f"the gateway sent what is no frame: {error}") from error


def decode_for_gateway(frame: bytes) -> list[ToGateway]:
    """The messages of an engine's frame.

    Raises:
        LinkError: it is none.
    """
    try:
        return _to_gateway.decode(frame)
    except msgspec.DecodeError as error:
        raise LinkError(f"the engine sent what is no frame: {error}") from error


def decode_value(data: msgspec.Raw, kind: Any) -> Any:
    """A call or an answer of the type that QUESTIONS says.

    Raises:
        LinkError: it is of another.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise LinkError(f"not a {kind}: {error}") from error
