"""ClientConnection: the client's end of a connection, without input or output."""

from itertools import count
from typing import Any

from genbatch.proto.call_phases import CallEvent, CallPhase, CallPhases, IllegalEvent
from genbatch.proto.codec import decode, encode
from genbatch.proto.errors import ErrorInfo, FrameTooLarge, InvalidRequest, MalformedMessage, from_wire
from genbatch.proto.limits import REQUEST_LIMITS, RESPONSE_LIMITS
from genbatch.proto.messages import Token, check_type
from genbatch.proto.rpc import (
    NOTIFICATION,
    PLAIN_STREAM,
    REQUEST,
    Answered,
    Failed,
    Heartbeat,
    StreamOptions,
    TokenReceived,
    TokensReceived,
    typed,
)

ClientEvent = TokenReceived | TokensReceived | Answered | Failed | Heartbeat


class ClientConnection:
    """The client's end."""

    def __init__(self) -> None:
        self.calls = CallPhases()
        self._msgids = count(1)
        self._next_index: dict[tuple[int, int], int] = {}  # by msgid and choice

    def request(self, method: str, params: object, options: StreamOptions = PLAIN_STREAM) -> tuple[int, bytes]:
        """Opens a call: its msgid and the message to send.

        Args:
            options: of a stream; others have none.

        Raises:
            FrameTooLarge: the service would not take it; nothing was opened.
        """
        msgid = next(self._msgids)
        arguments = [params] if options == PLAIN_STREAM else [params, options]
        data = encode([REQUEST, msgid, method, arguments])
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
            return self._read(decode(data, RESPONSE_LIMITS))
        except IllegalEvent as error:
            raise MalformedMessage(str(error)) from None
        except InvalidRequest as error:  # a type that does not fit
            raise MalformedMessage(str(error)) from None

    def _read(self, message: object) -> ClientEvent | None:
        match typed(message):
            case [2, "token", list(token)]:
                return self._read_token(token)
            case [2, "tokens", list(tokens)]:
                received = [self._read_token(token) for token in tokens]
                return TokensReceived([token for token in received if token is not None])
            case [2, "heartbeat", list()]:
                return Heartbeat()
            case [2, str(), list()]:
                return None
            case [1, None, error, None]:
                return Failed(None, from_wire(check_type(error, ErrorInfo)))
            case [1, int(msgid), error, result]:
                return self._read_final(msgid, error, result)
        raise MalformedMessage("neither a response nor a notification")

    def _read_token(self, array: object) -> TokenReceived | None:
        match array:
            case [int(msgid), int(index), int(token_id), str(text)]:
                extra: dict[Any, Any] = {}
            case [int(msgid), int(index), int(token_id), str(text), dict(extra)]:
                pass
            case _:
                raise MalformedMessage("a token is not [msgid, index, token_id, text] and perhaps a map")
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
