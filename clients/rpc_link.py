"""RPCLink: one connection of an msgpack-RPC client as bytes in and out; the same with an event loop and without."""

from genbatch.proto.codec import decode, encode
from genbatch.proto.errors import ErrorInfo, GenbatchError, MalformedMessage, Unauthenticated, from_wire
from genbatch.proto.framing import MAX_FEED_BYTES, MessageSplitter, StreamBroken
from genbatch.proto.limits import RESPONSE_LIMITS
from genbatch.proto.messages import check_type
from genbatch.proto.service_messages import HelloRequest

# Calls are counted from 1.
HELLO_MSGID = 0


class RPCLink:
    """Splits what arrives into messages, and shows the token before anything else.

    Args:
        token: what to show; None where none is asked for.
    """

    def __init__(self, token: str | None) -> None:
        self._splitter = MessageSplitter(RESPONSE_LIMITS.max_bytes)
        self._awaits_welcome = token is not None
        self.greeting = b"" if token is None else encode([0, HELLO_MSGID, "hello", [HelloRequest(token=token)]])

    def receive(self, data: bytes) -> list[bytes]:
        """The messages that end in `data`, without the answer to the greeting.

        Raises:
            Unauthenticated: the service does not know the token.
            MalformedMessage, FrameTooLarge: the service does not speak the protocol.
        """
        messages: list[bytes] = []
        try:
            for start in range(0, len(data), MAX_FEED_BYTES):
                messages += self._splitter.feed(data[start : start + MAX_FEED_BYTES])
        except StreamBroken as broken:
            raise broken.error from None
        if self._awaits_welcome and messages:
            self._awaits_welcome = False
            _read_welcome(messages.pop(0))
        return messages


def _read_welcome(message: bytes) -> None:
    match decode(message, RESPONSE_LIMITS):
        case [1, int(), None, _]:
            return
        case [1, _, dict(error), None]:
            refusal: GenbatchError = from_wire(check_type(error, ErrorInfo))
            raise refusal if isinstance(refusal, Unauthenticated) else Unauthenticated(str(refusal))
    raise MalformedMessage("the service did not answer the greeting")
