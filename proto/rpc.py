"""msgpack-RPC without input or output: messages in, events out, for either end of a connection.

    request       [0, msgid, method, [params]]       client to service
    response      [1, msgid, error, result]          service to client, exactly one for each request taken
    notification  [2, name, params]                  to the client: token, heartbeat; to the service: cancel, heartbeat

Whoever owns a socket hands each received message to `receive` and sends the bytes that the other methods return.
"""

from dataclasses import dataclass
from itertools import count
from typing import Any

from genbatch.proto.call_phases import CallEvent, CallPhase, CallPhases, IllegalEvent
from genbatch.proto.codec import decode, encode, read_head
from genbatch.proto.errors import (
    ErrorInfo,
    FrameTooLarge,
    GenbatchError,
    InvalidRequest,
    MalformedMessage,
    QueueFull,
    from_wire,
)
from genbatch.proto.limits import REQUEST_LIMITS, RESPONSE_LIMITS
from genbatch.proto.messages import Token, check_type

REQUEST, RESPONSE, NOTIFICATION = 0, 1, 2
MAX_MSGID = 2**64 - 1
# How long a peer that is full with its own calls should wait; they are its to finish.
RETRY_AFTER_MS = 100


@dataclass(frozen=True, slots=True)
class Request:
    """A client called `method`; owed one `result` or `error`. `params` is a map, not yet checked."""

    msgid: int
    method: str
    params: dict[Any, Any]


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A client wants no more of an open call; its final is still owed."""

    msgid: int


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
class Answered:
    """A call's final: plain data."""

    msgid: int
    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A call's final: an error. Without a msgid the service could not tell which call it is about."""

    msgid: int | None
    error: GenbatchError


class ServerConnection:
    """The service's end of one client's connection.

    Args:
        max_calls: most calls open at once.
    """

    def __init__(self, max_calls: int) -> None:
        self.calls = CallPhases()
        self._max_calls = max_calls

    def receive(self, data: bytes) -> Request | CancelRequest | Heartbeat | Refused | None:
        """What a message means; None for notifications that nobody here knows. Raises nothing."""
        try:
            return self._read(decode(data, REQUEST_LIMITS))
        except GenbatchError as error:
            return Refused(error, self._refusal(data, error))

    def token(self, msgid: int, token: Token) -> bytes | None:
        """The notification of a call's next token; None once the call is cancelled."""
        if self.calls.move(msgid, CallEvent.TOKEN) is CallPhase.CANCELLED:
            return None
        params: list[object] = [msgid, token.index, token.token_id, token.text]
        if token.logprob is not None or token.choice:
            params.append({"logprob": token.logprob, "choice": token.choice})
        return encode([NOTIFICATION, "token", params])

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
        return _response(msgid, error)

    def heartbeat(self) -> bytes:
        """Tells the client that its calls are not forgotten."""
        return encode([NOTIFICATION, "heartbeat", []])

    def _read(self, message: object) -> Request | CancelRequest | Heartbeat | None:
        match _typed(message):
            case [0, int(msgid), method, params]:
                return self._read_request(msgid, method, params)
            case [2, str(name), list(params)]:
                return self._read_notification(name, params)
        raise MalformedMessage("not [0, msgid, method, [params]] nor [2, name, params]")

    def _read_request(self, msgid: int, method: object, params: object) -> Request:
        if not 0 <= msgid <= MAX_MSGID:
            raise MalformedMessage("the msgid is negative")
        if msgid in self.calls:
            raise InvalidRequest("msgid", f"{msgid} is in use by a call that has not ended")
        if not isinstance(method, str):
            raise MalformedMessage("the method is not a string")
        if params == []:
            params = [{}]
        if not (isinstance(params, list) and len(params) == 1 and isinstance(params[0], dict)):
            raise MalformedMessage("the parameters are not an array of one map")
        if len(self.calls) >= self._max_calls:
            raise QueueFull(f"{self._max_calls} calls of this client are open", retry_after_ms=RETRY_AFTER_MS)
        self.calls.move(msgid, CallEvent.REQUEST)
        return Request(msgid, method, params[0])

    def _read_notification(self, name: str, params: list[Any]) -> CancelRequest | Heartbeat | None:
        if name == "cancel":
            (msgid,) = check_type(params, tuple[int])
            before = self.calls.move(msgid, CallEvent.CANCEL)
            return CancelRequest(msgid) if before not in (None, CallPhase.CANCELLED) else None
        if name == "heartbeat":
            (lease_s,) = check_type(params, tuple[float]) if params else (None,)
            if lease_s is not None and not lease_s > 0:
                raise InvalidRequest("heartbeat", "the lease is not more than 0 seconds")
            return Heartbeat(lease_s)
        return None

    def _refusal(self, data: bytes, error: GenbatchError) -> bytes:
        """The reply to a message not taken: with its msgid, if it is a request and the msgid names no open call."""
        match _typed(read_head(data)):
            case [0, int(msgid)] if msgid >= 0 and msgid not in self.calls:
                return _response(msgid, error)
        return _response(None, error)


class ClientConnection:
    """The client's end of a connection."""

    def __init__(self) -> None:
        self.calls = CallPhases()
        self._msgids = count(1)
        self._next_index: dict[tuple[int, int], int] = {}  # by msgid and choice

    def request(self, method: str, params: object) -> tuple[int, bytes]:
        """Opens a call: its msgid and the message to send.

        Raises:
            FrameTooLarge: the service would not take it; nothing was opened.
        """
        msgid = next(self._msgids)
        data = encode([REQUEST, msgid, method, [params]])
        if len(data) > REQUEST_LIMITS.max_bytes:
            raise FrameTooLarge(f"the request has {len(data)} bytes, {REQUEST_LIMITS.max_bytes} are taken")
        self.calls.move(msgid, CallEvent.REQUEST)
        return msgid, data

    def cancel(self, msgid: int) -> bytes | None:
        """Gives a call up: nothing more is reported of it. None where nothing needs to be sent."""
        before = self.calls.move(msgid, CallEvent.CANCEL)
        if before in (None, CallPhase.CANCELLED):
            return None
        return encode([NOTIFICATION, "cancel", [msgid]])

    def heartbeat(self, lease_s: float) -> bytes:
        """Tells the service to keep the open calls for another `lease_s` seconds."""
        return encode([NOTIFICATION, "heartbeat", [lease_s]])

    def receive(self, data: bytes) -> TokenReceived | Answered | Failed | Heartbeat | None:
        """What a message means; None for what belongs to a cancelled call and for unknown notifications.

        Raises:
            FrameTooLarge, MalformedMessage: the service broke the protocol.
        """
        try:
            return self._read(decode(data, RESPONSE_LIMITS))
        except IllegalEvent as error:
            raise MalformedMessage(str(error)) from None
        except InvalidRequest as error:  # a type that does not fit
            raise MalformedMessage(str(error)) from None

    def _read(self, message: object) -> TokenReceived | Answered | Failed | Heartbeat | None:
        match _typed(message):
            case [2, "token", [int(msgid), int(index), int(token_id), str(text), *more]]:
                return self._read_token(msgid, index, token_id, text, more)
            case [2, "heartbeat", list()]:
                return Heartbeat()
            case [2, str(), list()]:
                return None
            case [1, None, error, None]:
                return Failed(None, from_wire(check_type(error, ErrorInfo)))
            case [1, int(msgid), error, result]:
                return self._read_final(msgid, error, result)
        raise MalformedMessage("neither a response nor a notification")

    def _read_token(self, msgid: int, index: int, token_id: int, text: str, more: list[Any]) -> TokenReceived | None:
        extra = more[0] if more else {}
        if not isinstance(extra, dict):
            raise MalformedMessage("a token's fifth element is not a map")
        token = check_type(extra | {"text": text, "token_id": token_id, "index": index}, Token)
        if self.calls.move(msgid, CallEvent.TOKEN) is CallPhase.CANCELLED:
            return None
        key = (msgid, token.choice)
        expected = self._next_index.get(key, 0)
        if index != expected:
            raise MalformedMessage(f"token {index} of call {msgid} came where {expected} should")
        self._next_index[key] = index + 1
        return TokenReceived(msgid, token)

    def _read_final(self, msgid: int, error: object, result: object) -> Answered | Failed | None:
        info = None if error is None else check_type(error, ErrorInfo)
        before = self.calls.move(msgid, CallEvent.FINAL)
        for key in [key for key in self._next_index if key[0] == msgid]:
            del self._next_index[key]
        if before is CallPhase.CANCELLED:
            return None
        return Answered(msgid, result) if info is None else Failed(msgid, from_wire(info))


def _response(msgid: int | None, error: GenbatchError) -> bytes:
    return encode([RESPONSE, msgid, error.to_wire(), None])


def _typed(message: object) -> object:
    """The message, or None if it does not start with a type and, where one belongs, a msgid: true and 1.0 equal 1."""
    if not isinstance(message, list) or len(message) < 2 or type(message[0]) is not int:
        return None
    if message[0] != NOTIFICATION and type(message[1]) not in (int, type(None)):
        return None
    return message
