"""ServerConnection: the service's end of one client's connection, without input or output."""

from typing import Any

from genbatch.proto.call_phases import CallEvent, CallPhase, CallPhases
from genbatch.proto.codec import decode, encode, read_head
from genbatch.proto.errors import GenbatchError, InvalidRequest, MalformedMessage, QueueFull
from genbatch.proto.limits import REQUEST_LIMITS
from genbatch.proto.messages import Token, check_type
from genbatch.proto.rpc import (
    MAX_CREDIT,
    MAX_MSGID,
    NOTIFICATION,
    PLAIN_STREAM,
    RESPONSE,
    CancelRequest,
    CreditGranted,
    Heartbeat,
    Refused,
    Request,
    StreamOptions,
    TokenArray,
    typed,
)

# How long a peer that is full with its own calls should wait; they are its to finish.
RETRY_AFTER_MS = 100

ServerEvent = Request | CancelRequest | CreditGranted | Heartbeat | Refused


class ServerConnection:
    """The service's end.

    Args:
        max_calls: most calls open at once.
    """

    def __init__(self, max_calls: int) -> None:
        self.calls = CallPhases()
        self._max_calls = max_calls

    def receive(self, data: bytes) -> ServerEvent | None:
        """What a message means; None for notifications that nobody here knows, and for responses. Raises nothing."""
        try:
            return self._read(decode(data, REQUEST_LIMITS))
        except GenbatchError as error:
            return Refused(error, self.refusal(data, error))

    def token(self, msgid: int, token: Token) -> TokenArray | None:
        """A call's next token as it travels, for `token_message`; None once the call is cancelled."""
        if self.calls.move(msgid, CallEvent.TOKEN) is CallPhase.CANCELLED:
            return None
        array: TokenArray = [msgid, token.index, token.token_id, token.text]
        if token.logprob is not None or token.choice:
            extra: dict[str, object] = {"logprob": token.logprob, "choice": token.choice}
            array.append(extra | {"top": token.top} if token.top else extra)
        if token.reasoning or token.tool_calls:
            taken_apart = {"reasoning": token.reasoning, "tool_calls": token.tool_calls}
            array[4:] = [dict(*array[4:]) | {name: value for name, value in taken_apart.items() if value}]
        return array

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

    def _read_request(self, msgid: int, method: str, params: object) -> Request:
        if not 0 <= msgid <= MAX_MSGID:
            raise MalformedMessage("the msgid is negative")
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
        if len(self.calls) >= self._max_calls:
            raise QueueFull(f"{self._max_calls} calls of this client are open", retry_after_ms=RETRY_AFTER_MS)
        self.calls.move(msgid, CallEvent.REQUEST)
        return Request(msgid, method, arguments, options)

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


def token_message(token: TokenArray) -> bytes:
    """The notification of one token."""
    return encode([NOTIFICATION, "token", token])


def tokens_message(tokens: list[TokenArray]) -> bytes:
    """The notification of several tokens, of one call or of several, in order."""
    return encode([NOTIFICATION, "tokens", tokens])


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
