"""MessageSplitter: finds where messages end in a stream of bytes, in bounded memory, without input or output.

    splitter = MessageSplitter(MAX_TRANSPORT_BYTES)
    for message in splitter.feed(received): ...

What it gives goes to the same decoder as a message that came in a frame of its own. It makes no objects: it only
walks over the bytes, so that a length that lies reserves nothing.
"""

from collections.abc import Iterator

import msgpack

from genbatch.proto.errors import FrameTooLarge, GenbatchError, MalformedMessage
from genbatch.proto.limits import MAX_TRANSPORT_BYTES

# Most bytes to feed at once.
MAX_FEED_BYTES = 2**16
# What a connection reserves before anything has arrived; it would be a mebibyte otherwise.
WALKER_BYTES = 2**12


class StreamBroken(Exception):
    """Where the next message begins cannot be told any more: the connection must end.

    Args:
        head: the bytes that have arrived of the message at fault.
        error: what to answer it with.
    """

    def __init__(self, head: bytes, error: GenbatchError) -> None:
        super().__init__(str(error))
        self.head = head
        self.error = error


class MessageSplitter:
    """One direction of one connection.

    Args:
        max_bytes: of a message; a longer one breaks the stream.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # may be raised between two messages, up to MAX_TRANSPORT_BYTES
        self._walker = msgpack.Unpacker(
            read_size=WALKER_BYTES, max_buffer_size=max(max_bytes, MAX_TRANSPORT_BYTES) + MAX_FEED_BYTES
        )
        self._held = bytearray()  # of the message that is arriving
        self._end_of_last = 0  # in all that ever arrived

    @property
    def is_inside_message(self) -> bool:
        """Whether the beginning of a message has arrived and not its end."""
        return bool(self._held)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that end in `data`, at most MAX_FEED_BYTES of it, in order.

        Raises:
            StreamBroken: a message has no end, or none within `max_bytes`.
        """
        assert len(data) <= MAX_FEED_BYTES, "memory would not be bounded"
        self._walker.feed(data)
        self._held += data
        while self._walk():
            size = self._walker.tell() - self._end_of_last
            if size > self.max_bytes:
                break
            self._end_of_last += size
            message = bytes(memoryview(self._held)[:size])
            del self._held[:size]
            yield message
        if len(self._held) > self.max_bytes:
            reason = f"{len(self._held)} bytes and more in one message, {self.max_bytes} can be passed over"
            raise StreamBroken(self._head(), FrameTooLarge(reason))

    def _walk(self) -> bool:
        """Whether another message has arrived entirely."""
        try:
            self._walker.skip()
        except msgpack.OutOfData:
            return False
        except (ValueError, msgpack.UnpackException) as error:  # a byte that starts nothing; endless nesting
            reason = "nested too deeply" if isinstance(error, msgpack.StackError) else "not msgpack"
            raise StreamBroken(self._head(), MalformedMessage(f"{reason}, and the connection ends here")) from None
        return True

    def _head(self) -> bytes:
        return bytes(memoryview(self._held)[:32])
