"""msgpack-RPC without input or output: what the messages are, and the events that they become at either end.

    request       [0, msgid, method, [params]]            client to service; [params, options] for a stream
    response      [1, msgid, error, result]               service to client, exactly one for each request taken
    notification  [2, name, params]                       to the client: token, tokens, heartbeat
                                                          to the service: cancel, credit, heartbeat

`ServerConnection` and `ClientConnection` are the two ends. Whoever owns a socket hands each received message to
`receive` and sends the bytes that the other methods return.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import Token

REQUEST, RESPONSE, NOTIFICATION = 0, 1, 2
MAX_MSGID = 2**64 - 1
# Tokens that a client can ask for ahead; more of them is as good as all.
MAX_CREDIT = 2**31 - 1

# [msgid, index, token_id, text] and, if there is more to say, a map.
TokenArray = list[object]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a stream's tokens travel; all of it optional, so that simple clients stay simple.

    Args:
        credit: tokens that may be sent before the client grants more; None: as fast as its socket takes them.
        coalesce: whether several tokens may come in one `tokens` message.
    """

    credit: int | None = None
    coalesce: bool = False


PLAIN_STREAM = StreamOptions()


@dataclass(frozen=True, slots=True)
class Request:
    """A client called `method`; owed one `result` or `error`. `params` is a map, not yet checked."""

    msgid: int
    method: str
    params: dict[Any, Any]
    options: StreamOptions = PLAIN_STREAM


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A client wants no more of an open call; its final is still owed."""

    msgid: int


@dataclass(frozen=True, slots=True)
class CreditGranted:
    """A client can take `count` more tokens of an open call."""

    msgid: int
    count: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The other end is alive. A client may say how many seconds its silence is to be taken for its death."""

    lease_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that was not taken; `reply` is to be sent."""

    error: GenbatchError
    reply: bytes


@dataclass(frozen=True, slots=True)
class TokenReceived:
    """A call's next token."""

    msgid: int
    token: Token


@dataclass(frozen=True, slots=True)
class TokensReceived:
    """Several tokens that came in one message, possibly of several calls."""

    tokens: list[TokenReceived]


@dataclass(frozen=True, slots=True)
class Answered:
    """A call's final: plain data."""

    msgid: int
    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A call's final: an error. Without a msgid the service could not tell which call it is about."""

    msgid: int | None
    error: GenbatchError


def typed(message: object) -> object:
    """The message, or None if it does not start with a type and, where one belongs, a msgid: true and 1.0 equal 1."""
    if not isinstance(message, list) or len(message) < 2 or type(message[0]) is not int:
        return None
    if message[0] != NOTIFICATION and type(message[1]) not in (int, type(None)):
        return None
    return message
