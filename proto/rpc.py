"""msgpack-RPC without input or output: the messages, and the events that they mean at each end.

    request       [0, msgid, method, [params]]            client to service; [params, options] for a stream
    response      [1, msgid, error, result]               service to client, exactly one for each accepted request
    notification  [2, name, params]                       to the client: token, tokens, heartbeat, goaway
                                                          to the service: cancel, credit, heartbeat

`ServerConnection` and `ClientConnection` are the two ends. The owner of a socket hands each received message to
`receive` and sends the bytes that the other methods return. One table has the phases of a call for both ends, so that
the ends agree. The link between a gateway and its engine speaks this protocol, too (`actors/engine/link.py`), without
limits, since these processes trust each other.
"""

import enum
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any

import msgspec

from genbatch.proto.codec import (
    REQUEST_LIMITS,
    RESPONSE_LIMITS,
    DecodeLimits,
    decode,
    encode,
    read_head,
    read_type,
    why_unsendable,
)
from genbatch.proto.errors import (
    ErrorInfo,
    FrameTooLarge,
    GenbatchError,
    InvalidRequest,
    MalformedMessage,
    QueueFull,
    from_wire,
)
from genbatch.proto.messages import DrawnTokens, Token, ToolCallDelta
from genbatch.proto.validation import check_type

# Grows when a client of the last version cannot continue. New methods, options, keys and notifications do not change
# it: `hello` names the methods and options, and both ends ignore unknown keys and notifications.
WIRE_VERSION = 1
REQUEST, RESPONSE, NOTIFICATION = 0, 1, 2
MAX_MSGID = 2**64 - 1
# The most tokens that a client can grant; a larger number would have the same effect.
MAX_CREDIT = 2**31 - 1

# [msgid, index, token_id, text], and a map if the token has other fields.
TokenArray = list[Any]


class TokenExtra(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The map in a token's array: the other fields of `Token`."""

    logprob: float | None = None
    choice: int = 0
    top: dict[int, float] = {}
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class TokenRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The array of a received token."""

    msgid: int
    index: int
    token_id: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    text: str
    extra: TokenExtra | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a stream's tokens travel. Every option may be omitted, so that simple clients stay simple.

    Args:
        credit: tokens that may be sent before the client grants more; None sends as fast as the socket takes them.
        coalesce: whether several tokens may come in one `tokens` message.
        drawn: the tokens that the client has from a stream of this request that was lost, one entry a choice. The
            stream continues after them, and its indices, too.
    """

    credit: int | None = None
    coalesce: bool = False
    drawn: tuple[DrawnTokens, ...] = ()


PLAIN_STREAM = StreamOptions()
STREAM_OPTIONS: tuple[str, ...] = StreamOptions.__struct_fields__


@dataclass(frozen=True, slots=True)
class CallReceived:
    """A client called `method`. The service owes one `result` or `error`. `params` is a map that is not checked yet."""

    msgid: int
    method: str
    params: dict[Any, Any]
    options: StreamOptions = PLAIN_STREAM


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A client has cancelled an open call. The service still owes the call's final message."""

    msgid: int


@dataclass(frozen=True, slots=True)
class CreditGranted:
    """A client takes `count` more tokens of an open call."""

    msgid: int
    count: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life of the other end. With a lease, a client's calls end after that many seconds without a message."""

    lease_s: float | None = None


@dataclass(frozen=True, slots=True)
class GoAway:
    """The client sends new requests over another connection, and closes this connection after its last call."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused message. The owner of the connection sends `reply`.

    Args:
        is_foreign: whether its beginning belongs to no message of this protocol; its sender then speaks another one.
    """

    error: GenbatchError
    reply: bytes
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class TokenReceived:
    """A call's next token."""

    msgid: int
    token: Token


@dataclass(frozen=True, slots=True)
class TokensReceived:
    """The tokens of one message, each with the msgid of its call. They may belong to several calls."""

    tokens: list[tuple[int, Token]]


@dataclass(frozen=True, slots=True)
class Notified:
    """A notification with a name that this file does not know."""

    name: str
    params: list[Any]


@dataclass(frozen=True, slots=True)
class CallAnswered:
    """The final message of a call that succeeded. The result is plain data."""

    msgid: int
    result: Any


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The final message of a call that failed. Without a msgid the service could not read which call failed."""

    msgid: int | None
    error: GenbatchError


def typed(message: object) -> object:
    """Return a message that begins with a type and a msgid; None for another message. True and 1.0 are no 1 here."""
    if not isinstance(message, list) or len(message) < 2 or type(message[0]) is not int:
        return None
    if message[0] != NOTIFICATION and type(message[1]) not in (int, type(None)):
        return None
    return message


class CallPhase(enum.Enum):
    """The phase of a call between its request and its one final message. A msgid without a phase is free."""

    WAITING = "waiting"
    STREAMING = "streaming"  # at least one token was sent
    CANCELLED = "cancelled"  # its caller has left; the final message has not been sent


class CallEvent(enum.Enum):
    """An event of a call: one end sends it, and the other end receives it."""

    REQUEST = "request"
    TOKEN = "token"
    CANCEL = "cancel"
    FINAL = "final"  # a result or an error


_TRANSITIONS: dict[tuple[CallPhase | None, CallEvent], CallPhase | None] = {
    (None, CallEvent.REQUEST): CallPhase.WAITING,
    (CallPhase.WAITING, CallEvent.TOKEN): CallPhase.STREAMING,
    (CallPhase.STREAMING, CallEvent.TOKEN): CallPhase.STREAMING,
    # Tokens and a cancellation may cross on the way, and so may a cancellation and the final message.
    (CallPhase.CANCELLED, CallEvent.TOKEN): CallPhase.CANCELLED,
    (None, CallEvent.CANCEL): None,
    (CallPhase.WAITING, CallEvent.CANCEL): CallPhase.CANCELLED,
    (CallPhase.STREAMING, CallEvent.CANCEL): CallPhase.CANCELLED,
    (CallPhase.CANCELLED, CallEvent.CANCEL): CallPhase.CANCELLED,
    (CallPhase.WAITING, CallEvent.FINAL): None,
    (CallPhase.STREAMING, CallEvent.FINAL): None,
    (CallPhase.CANCELLED, CallEvent.FINAL): None,
}


# Python 3.11 takes a third of a microsecond to look up a member.
_STREAMING, _CANCELLED, _TOKEN = CallPhase.STREAMING, CallPhase.CANCELLED, CallEvent.TOKEN


class IllegalEvent(Exception):
    """The event cannot happen to a call in its phase; nothing changed."""

    def __init__(self, msgid: int, phase: CallPhase | None, event: CallEvent) -> None:
        where = "not open" if phase is None else phase.value
        super().__init__(f"{event.value} for call {msgid}, which is {where}")


class CallPhases:
    """The phases of one connection's open calls, by msgid."""

    __slots__ = ("_phases",)

    def __init__(self) -> None:
        self._phases: dict[int, CallPhase] = {}

    def __len__(self) -> int:
        return len(self._phases)

    def __contains__(self, msgid: int) -> bool:
        return msgid in self._phases

    def open_calls(self) -> list[int]:
        """Return the msgids without a final message, oldest first."""
        return list(self._phases)

    def drop(self, msgid: int) -> None:
        """Free a msgid in any phase, because its owner has failed."""
        self._phases.pop(msgid, None)

    def move(self, msgid: int, event: CallEvent) -> CallPhase | None:
        """Book an event, and return the phase before the event.

        Raises:
            IllegalEvent: the event is not allowed in this phase.
        """
        before = self._phases.get(msgid)
        if before is _STREAMING and event is _TOKEN:  # the most frequent event
            return before
        if (before, event) not in _TRANSITIONS:
            raise IllegalEvent(msgid, before, event)
        after = _TRANSITIONS[before, event]
        if after is not None:
            self._phases[msgid] = after
        elif before is not None:
            del self._phases[msgid]
        return before


# The retry hint in milliseconds for a peer with too many open calls.
RETRY_AFTER_MS = 100

ServerEvent = CallReceived | CancelRequest | CreditGranted | Heartbeat | Refused


class ServerConnection:
    """The service's end.

    Args:
        max_calls: most calls open at once.
        limits: bounds on a client's messages; None for a trusted client.
    """

    def __init__(self, max_calls: int, limits: DecodeLimits | None = REQUEST_LIMITS) -> None:
        self.calls = CallPhases()
        self._max_calls = max_calls
        self._limits = limits

    def receive(self, data: bytes) -> ServerEvent | None:
        """Return the event of a message; None for unknown notifications and for responses. This method never raises."""
        try:
            return self._read(decode(data, self._limits))
        except GenbatchError as error:
            message_type = read_type(data)
            is_foreign = type(message_type) is not int or message_type not in (REQUEST, RESPONSE, NOTIFICATION)
            return Refused(error, self.refusal(data, error), is_foreign)

    def token(self, msgid: int, token: Token) -> TokenArray | None:
        """Return the array of a call's next token, for `token_message`; None for a cancelled call."""
        if self.calls.move(msgid, _TOKEN) is _CANCELLED:
            return None
        return token_array(msgid, token)

    def result(self, msgid: int, result: object) -> bytes:
        """Return the final message of a call that succeeded.

        Raises:
            TypeError, ValueError, OverflowError: `result` has no form on the wire; the call stays open.
        """
        data = encode([RESPONSE, msgid, None, result])
        self.calls.move(msgid, CallEvent.FINAL)
        return data

    def error(self, msgid: int, error: GenbatchError) -> bytes:
        """Return the final message of a call that failed."""
        self.calls.move(msgid, CallEvent.FINAL)
        return error_message(msgid, error)

    def heartbeat(self) -> bytes:
        """Return the message that tells the client that its calls are still open."""
        return encode([NOTIFICATION, "heartbeat", []])

    def refusal(self, data: bytes, error: GenbatchError) -> bytes:
        """Return the reply to a refused message, with the msgid of a request unless an open call has this msgid."""
        match typed(read_head(data)):
            case [0, int(msgid)] if msgid >= 0 and msgid not in self.calls:
                return error_message(msgid, error)
        return error_message(None, error)

    def _read(self, message: object) -> ServerEvent | None:
        match typed(message):
            case [0, int(msgid), method, params]:
                return self._read_request(msgid, _name(method), params)
            case [2, str() | bytes() as name, list(params)]:
                return self._read_notification(_name(name), params)
            case [1, *_]:
                return None  # an answer to an answer could loop forever
        raise MalformedMessage("the message is neither [0, msgid, method, [params]] nor [2, name, params]")

    def _read_request(self, msgid: int, method: str, params: object) -> CallReceived:
        if not 0 <= msgid <= MAX_MSGID:
            raise MalformedMessage("the msgid is negative")
        # guard: msgid in use
        if msgid in self.calls:
            raise InvalidRequest("msgid", f"{msgid} is in use by a call that has not ended")
        arguments: dict[Any, Any] = {}
        options = PLAIN_STREAM
        match params:
            case []:
                pass
            case [dict(arguments)]:
                pass
            case [dict(arguments), dict(announced)]:
                options = _stream_options(announced)
            case _:
                raise MalformedMessage("the parameters are not an array of one map, or of a map and stream options")
        # guard: calls of one client
        if len(self.calls) >= self._max_calls:
            reason = f"{self._max_calls} calls of this client are open; no more are allowed"
            raise QueueFull(reason, retry_after_ms=RETRY_AFTER_MS)
        self.calls.move(msgid, CallEvent.REQUEST)
        return CallReceived(msgid, method, arguments, options)

    def _read_notification(self, name: str, params: list[Any]) -> CancelRequest | CreditGranted | Heartbeat | None:
        if name == "cancel":
            (msgid,) = check_type(params, tuple[int])
            before = self.calls.move(msgid, CallEvent.CANCEL)
            return CancelRequest(msgid) if before not in (None, CallPhase.CANCELLED) else None
        if name == "credit":
            msgid, count = check_type(params, tuple[int, int])
            _check_credit(count, 1)
            return CreditGranted(msgid, count) if msgid in self.calls else None  # else it crossed the final message
        if name == "heartbeat":
            (lease_s,) = check_type(params, tuple[float]) if params else (None,)
            if lease_s is not None and not lease_s > 0:
                raise InvalidRequest("heartbeat", "the lease must be more than 0 seconds")
            return Heartbeat(lease_s)
        return None


def token_array(msgid: int, token: Token, shows: bool = True) -> TokenArray:
    """Return the array of a token on the wire.

    Args:
        shows: whether the caller reads the token's texts; otherwise the array has none.
    """
    array: TokenArray = [msgid, token.index, token.token_id, token.text if shows else ""]
    if token.logprob is None and not (token.choice or token.reasoning or token.tool_calls):
        return array
    if token.logprob is not None or token.choice:
        extra: dict[str, object] = {"logprob": token.logprob, "choice": token.choice}
        array.append(extra | {"top": token.top} if token.top else extra)
    if shows and (token.reasoning or token.tool_calls):
        texts = {"reasoning": token.reasoning, "tool_calls": token.tool_calls}
        array[4:] = [dict(*array[4:]) | {name: value for name, value in texts.items() if value}]
    return array


def token_message(token: TokenArray) -> bytes:
    """Return the notification of one token."""
    return encode([NOTIFICATION, "token", token])


def tokens_message(tokens: list[TokenArray]) -> bytes:
    """Return the notification of several tokens in order, of one call or of several."""
    return encode([NOTIFICATION, "tokens", tokens])


def goaway_message() -> bytes:
    """Return the notification that asks a client to open another connection for new requests."""
    return notification("goaway")


def notification(name: str, *params: object) -> bytes:
    """Return a notification with these parameters."""
    return encode([NOTIFICATION, name, params])


def error_message(msgid: int | None, error: GenbatchError) -> bytes:
    """Return an error response; without a msgid it belongs to no particular call."""
    return encode([RESPONSE, msgid, error.to_wire(), None])


def _name(name: object) -> str:
    """Return the name of a method or a notification; older libraries send the name as binary data."""
    if isinstance(name, bytes):
        return name.decode(errors="replace")
    if not isinstance(name, str):
        raise MalformedMessage("the method is not a string")
    return name


def _stream_options(announced: dict[Any, Any]) -> StreamOptions:
    options: StreamOptions = check_type(announced, StreamOptions)
    if options.credit is not None:
        _check_credit(options.credit, 0)
    return options


def _check_credit(count: int, least: int) -> None:
    if not least <= count <= MAX_CREDIT:
        raise InvalidRequest("credit", f"must be at least {least} and at most {MAX_CREDIT}, not {count}")


ClientEvent = TokenReceived | TokensReceived | CallAnswered | CallFailed | Heartbeat | GoAway | Notified


class ClientConnection:
    """The client's end.

    Args:
        limits: bounds on the service's messages; None for a trusted service, and for requests of any size.
    """

    def __init__(self, limits: DecodeLimits | None = RESPONSE_LIMITS) -> None:
        self.calls = CallPhases()
        self._limits = limits
        self._msgids = count(1)
        self._next_index: dict[tuple[int, int], int] = {}  # by msgid and choice

    def request(self, method: str, params: object, options: StreamOptions = PLAIN_STREAM) -> tuple[int, bytes]:
        """Open a call, and return its msgid and the message to send.

        Args:
            options: the options of a stream.

        Raises:
            FrameTooLarge: the request is larger than a service accepts; nothing was opened.
            InvalidRequest: a parameter has no form on the wire; nothing was opened.
        """
        msgid = next(self._msgids)
        arguments = [params] if options == PLAIN_STREAM else [params, options]
        try:
            data = encode([REQUEST, msgid, method, arguments])
        except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
            raise why_unsendable(params) or InvalidRequest(None, "cannot be sent") from None
        if self._limits is not None and len(data) > REQUEST_LIMITS.max_bytes:
            raise FrameTooLarge(f"the request has {len(data)} bytes; at most {REQUEST_LIMITS.max_bytes} are allowed")
        self.calls.move(msgid, CallEvent.REQUEST)
        for choice, drawn in enumerate(options.drawn):
            self._next_index[msgid, choice] = len(drawn.token_ids)
        return msgid, data

    def cancel(self, msgid: int) -> bytes | None:
        """Cancel a call, so that no more of its events are returned; return the message to send, or None for none."""
        before = self.calls.move(msgid, CallEvent.CANCEL)
        if before in (None, CallPhase.CANCELLED):
            return None
        return encode([NOTIFICATION, "cancel", [msgid]])

    def credit(self, msgid: int, count: int) -> bytes:
        """Return the message that grants `count` more tokens to a call with credit."""
        return encode([NOTIFICATION, "credit", [msgid, count]])

    def heartbeat(self, lease_s: float) -> bytes:
        """Return the message that keeps the open calls for another `lease_s` seconds."""
        return encode([NOTIFICATION, "heartbeat", [lease_s]])

    def receive(self, data: bytes) -> ClientEvent | None:
        """Return the event of a message; None for messages of a cancelled call.

        Raises:
            FrameTooLarge, MalformedMessage: the service broke the protocol.
        """
        try:
            return self._read(decode(data, self._limits))
        except IllegalEvent as error:
            raise MalformedMessage(str(error)) from None
        except InvalidRequest as error:  # a value of a wrong type
            raise MalformedMessage(str(error)) from None

    def _read(self, message: object) -> ClientEvent | None:
        match typed(message):
            case [2, "token", list(token)]:
                return next((TokenReceived(*received) for received in self._read_tokens([token])), None)
            case [2, "tokens", list(tokens)]:
                return TokensReceived(self._read_tokens(tokens))
            case [2, "heartbeat", list()]:
                return Heartbeat()
            case [2, "goaway", list()]:
                return GoAway()
            case [2, str(name), list(params)]:
                return Notified(name, params)
            case [1, None, error, None]:
                return CallFailed(None, from_wire(check_type(error, ErrorInfo)))
            case [1, int(msgid), error, result]:
                return self._read_final(msgid, error, result)
        raise MalformedMessage("the message is neither a response nor a notification")

    def _read_tokens(self, arrays: list[object]) -> list[tuple[int, Token]]:
        """Return the tokens of open calls, each with its call's msgid."""
        received = []
        move, next_index = self.calls.move, self._next_index
        for row in check_type(arrays, list[TokenRow]):
            msgid, index, extra = row.msgid, row.index, row.extra
            if move(msgid, _TOKEN) is _CANCELLED:
                continue
            if extra is None:
                key = (msgid, 0)
                token = Token(text=row.text, token_id=row.token_id, index=index)
            else:
                key = (msgid, extra.choice)
                token = Token(
                    text=row.text,
                    token_id=row.token_id,
                    index=index,
                    logprob=extra.logprob,
                    choice=extra.choice,
                    top=extra.top,
                    reasoning=extra.reasoning,
                    tool_calls=extra.tool_calls,
                )
            expected = next_index.get(key, 0)
            # guard: no gap in a stream
            if index != expected:
                raise MalformedMessage(f"token {index} of call {msgid} arrived in place of token {expected}")
            next_index[key] = index + 1
            received.append((msgid, token))
        return received

    def _read_final(self, msgid: int, error: object, result: object) -> CallAnswered | CallFailed | None:
        info = None if error is None else check_type(error, ErrorInfo)
        before = self.calls.move(msgid, CallEvent.FINAL)
        for key in [key for key in self._next_index if key[0] == msgid]:
            del self._next_index[key]
        if before is CallPhase.CANCELLED:
            return None
        return CallAnswered(msgid, result) if info is None else CallFailed(msgid, from_wire(info))
