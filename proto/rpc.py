"""msgpack-RPC without input or output: what the messages are, and the events that they become at either end.

    request       [0, msgid, method, [params]]            client to service; [params, options] for a stream
    response      [1, msgid, error, result]               service to client, exactly one for each request taken
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

# Grows when a client of the last version cannot go on. New methods, options, keys and notifications do not change it:
# `hello` names the methods and options, and both ends pass over keys and notifications that they do not know.
WIRE_VERSION = 1
REQUEST, RESPONSE, NOTIFICATION = 0, 1, 2
MAX_MSGID = 2**64 - 1
# Tokens that a client can ask for ahead; more of them is as good as all.
MAX_CREDIT = 2**31 - 1

# [msgid, index, token_id, text] and, if there is more to say, a map.
TokenArray = list[Any]


class TokenExtra(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The map in a token's array: the other fields of `Token`."""

    logprob: float | None = None
    choice: int = 0
    top: dict[int, float] = {}
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class TokenRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A token's array, as it is received."""

    msgid: int
    index: int
    token_id: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    text: str
    extra: TokenExtra | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a stream's tokens travel; all of it optional, so that simple clients stay simple.

    Args:
        credit: tokens that may be sent before the client grants more; None: as fast as its socket takes them.
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
class GoAway:
    """New requests are for another connection, and this connection is to be closed once its calls have ended."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that was not taken; `reply` is to be sent.

    Args:
        is_foreign: it does not even begin as a message of this protocol does, so its sender speaks another.
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
    """Several tokens that came in one message, possibly of several calls: each with its call's msgid."""

    tokens: list[tuple[int, Token]]


@dataclass(frozen=True, slots=True)
class Notified:
    """A notification that this file does not read."""

    name: str
    params: list[Any]


@dataclass(frozen=True, slots=True)
class CallAnswered:
    """A call's final: plain data."""

    msgid: int
    result: Any


@dataclass(frozen=True, slots=True)
class CallFailed:
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


class CallPhase(enum.Enum):
    """A call between its request and its one final; a msgid with no phase is free."""

    WAITING = "waiting"
    STREAMING = "streaming"  # at least one token went by
    CANCELLED = "cancelled"  # its caller wants no more of it; the final is still to come


class CallEvent(enum.Enum):
    """What is sent at one end and received at the other."""

    REQUEST = "request"
    TOKEN = "token"
    CANCEL = "cancel"
    FINAL = "final"  # a result or an error


_TRANSITIONS: dict[tuple[CallPhase | None, CallEvent], CallPhase | None] = {
    (None, CallEvent.REQUEST): CallPhase.WAITING,
    (CallPhase.WAITING, CallEvent.TOKEN): CallPhase.STREAMING,
    (CallPhase.STREAMING, CallEvent.TOKEN): CallPhase.STREAMING,
    # Tokens cross a cancellation on their way, and a cancellation crosses the final.
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
        """The msgids without a final yet, oldest first."""
        return list(self._phases)

    def drop(self, msgid: int) -> None:
        """Frees a msgid, in any phase: its owner has failed."""
        self._phases.pop(msgid, None)

    def move(self, msgid: int, event: CallEvent) -> CallPhase | None:
        """Lets `event` happen; returns the phase before it.

        Raises:
            IllegalEvent: it cannot happen now.
        """
        before = self._phases.get(msgid)
        if before is _STREAMING and event is _TOKEN:  # the one event that happens often
            return before
        if (before, event) not in _TRANSITIONS:
            raise IllegalEvent(msgid, before, event)
        after = _TRANSITIONS[before, event]
        if after is not None:
            self._phases[msgid] = after
        elif before is not None:
            del self._phases[msgid]
        return before


# How long a peer that is full with its own calls should wait; they are its to finish.
RETRY_AFTER_MS = 100

ServerEvent = CallReceived | CancelRequest | CreditGranted | Heartbeat | Refused


class ServerConnection:
    """The service's end.

    Args:
        max_calls: most calls open at once.
        limits: bounds on a client's messages; None for a client that is trusted.
    """

    def __init__(self, max_calls: int, limits: DecodeLimits | None = REQUEST_LIMITS) -> None:
        self.calls = CallPhases()
        self._max_calls = max_calls
        self._limits = limits

    def receive(self, data: bytes) -> ServerEvent | None:
        """What a message means; None for notifications that nobody here knows, and for responses. Raises nothing."""
        try:
            return self._read(decode(data, self._limits))
        except GenbatchError as error:
            message_type = read_type(data)
            is_foreign = type(message_type) is not int or message_type not in (REQUEST, RESPONSE, NOTIFICATION)
            return Refused(error, self.refusal(data, error), is_foreign)

    def token(self, msgid: int, token: Token) -> TokenArray | None:
        """A call's next token as it travels, for `token_message`; None once the call is cancelled."""
        if self.calls.move(msgid, _TOKEN) is _CANCELLED:
            return None
        return token_array(msgid, token)

    def result(self, msgid: int, result: object) -> bytes:
        """The final of a call that succeeded; the call stays open if `result` is nothing that can be sent.

        Raises:
            TypeError, ValueError, OverflowError: it is not.
        """
        data = encode([RESPONSE, msgid, None, result])
        self.calls.move(msgid, CallEvent.FINAL)
        return data

    def error(self, msgid: int, error: GenbatchError) -> bytes:
        """The final of a call that failed."""
        self.calls.move(msgid, CallEvent.FINAL)
        return error_message(msgid, error)

    def heartbeat(self) -> bytes:
        """Tells the client that its calls are not forgotten."""
        return encode([NOTIFICATION, "heartbeat", []])

    def refusal(self, data: bytes, error: GenbatchError) -> bytes:
        """The reply to a message not taken: with its msgid, if it is a request and the msgid names no open call."""
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
                return None  # an answer to an answer could go on for ever
        raise MalformedMessage("not [0, msgid, method, [params]] nor [2, name, params]")

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
            raise QueueFull(f"{self._max_calls} calls of this client are open", retry_after_ms=RETRY_AFTER_MS)
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
            return CreditGranted(msgid, count) if msgid in self.calls else None  # else it crossed the final
        if name == "heartbeat":
            (lease_s,) = check_type(params, tuple[float]) if params else (None,)
            if lease_s is not None and not lease_s > 0:
                raise InvalidRequest("heartbeat", "the lease is not more than 0 seconds")
            return Heartbeat(lease_s)
        return None


def token_array(msgid: int, token: Token, shows: bool = True) -> TokenArray:
    """A token as it travels.

    Args:
        shows: whether the caller reads its texts; else it travels without them.
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
    """The notification of one token."""
    return encode([NOTIFICATION, "token", token])


def tokens_message(tokens: list[TokenArray]) -> bytes:
    """The notification of several tokens, of one call or of several, in order."""
    return encode([NOTIFICATION, "tokens", tokens])


def goaway_message() -> bytes:
    """The notification that asks a client to open another connection for new requests."""
    return notification("goaway")


def notification(name: str, *params: object) -> bytes:
    """A notification with these parameters."""
    return encode([NOTIFICATION, name, params])


def error_message(msgid: int | None, error: GenbatchError) -> bytes:
    """A response that is an error; without a msgid it is about no call in particular."""
    return encode([RESPONSE, msgid, error.to_wire(), None])


def _name(name: object) -> str:
    """A method's or a notification's name; older libraries send it as binary data."""
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
        limits: bounds on the service's messages; None for a service that is trusted, and for requests of any size.
    """

    def __init__(self, limits: DecodeLimits | None = RESPONSE_LIMITS) -> None:
        self.calls = CallPhases()
        self._limits = limits
        self._msgids = count(1)
        self._next_index: dict[tuple[int, int], int] = {}  # by msgid and choice

    def request(self, method: str, params: object, options: StreamOptions = PLAIN_STREAM) -> tuple[int, bytes]:
        """Opens a call: its msgid and the message to send.

        Args:
            options: of a stream; others have none.

        Raises:
            FrameTooLarge: the service would not take it; nothing was opened.
            InvalidRequest: a parameter has no form on the wire; nothing was opened.
        """
        msgid = next(self._msgids)
        arguments = [params] if options == PLAIN_STREAM else [params, options]
        try:
            data = encode([REQUEST, msgid, method, arguments])
        except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
            raise why_unsendable(params) or InvalidRequest(None, "cannot be sent") from None
        if self._limits is not None and len(data) > REQUEST_LIMITS.max_bytes:
            raise FrameTooLarge(f"the request has {len(data)} bytes, {REQUEST_LIMITS.max_bytes} are taken")
        self.calls.move(msgid, CallEvent.REQUEST)
        for choice, drawn in enumerate(options.drawn):
            self._next_index[msgid, choice] = len(drawn.token_ids)
        return msgid, data

    def cancel(self, msgid: int) -> bytes | None:
        """Gives a call up: nothing more is reported of it. None where nothing needs to be sent."""
        before = self.calls.move(msgid, CallEvent.CANCEL)
        if before in (None, CallPhase.CANCELLED):
            return None
        return encode([NOTIFICATION, "cancel", [msgid]])

    def credit(self, msgid: int, count: int) -> bytes:
        """Lets the service send `count` more tokens of a call that announced credit."""
        return encode([NOTIFICATION, "credit", [msgid, count]])

    def heartbeat(self, lease_s: float) -> bytes:
        """Tells the service to keep the open calls for another `lease_s` seconds."""
        return encode([NOTIFICATION, "heartbeat", [lease_s]])

    def receive(self, data: bytes) -> ClientEvent | None:
        """What a message means; None for what belongs to a cancelled call and for unknown notifications.

        Raises:
            FrameTooLarge, MalformedMessage: the service broke the protocol.
        """
        try:
            return self._read(decode(data, self._limits))
        except IllegalEvent as error:
            raise MalformedMessage(str(error)) from None
        except InvalidRequest as error:  # a type that does not fit
            raise MalformedMessage(str(error)) from None

    def _read(self, message: object) -> ClientEvent | None:
        match typed(message):
            case [2, "token", list(token)]:
                return next((TokenReceived(*one) for one in self._read_tokens([token])), None)
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
        raise MalformedMessage("neither a response nor a notification")

    def _read_tokens(self, arrays: list[object]) -> list[tuple[int, Token]]:
        """The tokens of open calls, each with its call's msgid."""
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
                raise MalformedMessage(f"token {index} of call {msgid} came where {expected} should")
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
