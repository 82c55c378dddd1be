"""Codec: bytes to plain data and back, within limits, and plain data to typed messages. It knows nothing of RPC.

    splitter = MessageSplitter(MAX_TRANSPORT_BYTES)
    for message in splitter.feed(received):              # where messages end in a stream of bytes
        params = decode(message, REQUEST_LIMITS)

Decoding has three passes, and each makes the next one safe:

    1. msgspec walks over the bytes without making objects. So every length in the message is true. (msgpack reserves
       memory for a length before it has read the content: 80 MB for a frame of 5 kB.)
    2. msgpack makes the objects, within limits, and without extension types or duplicate keys.
    3. msgspec converts the objects to a type. Its error names the path of the first value that does not fit.

The splitter makes no objects, either. It only walks over the bytes, so a false length reserves no memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import msgspec

from genbatch.proto.errors import FrameTooLarge, GenbatchError, InvalidRequest, MalformedMessage
from genbatch.proto.messages import GenerateRequest
from genbatch.proto.validation import check_type, is_deeper


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """Bounds on one message.

    Args:
        max_bytes: bytes of the whole message.
        max_nesting: arrays and maps inside one another; [1] has nesting 1.
        max_array_length: elements of one array.
        max_map_length: entries of one map.
        max_containers: arrays and maps of the whole message.
    """

    max_bytes: int
    max_nesting: int = 16
    max_array_length: int
    max_map_length: int
    max_containers: int = 2**14


# A service's limits. A prompt of 2**18 token ids is beyond any context here; a map is parameters or a logit bias.
REQUEST_LIMITS = DecodeLimits(max_bytes=2**20, max_array_length=2**18, max_map_length=1024)

# A client's limits: the log-probs of 20 tokens at every position of a long prompt take some 20 MiB.
RESPONSE_LIMITS = DecodeLimits(max_bytes=2**26, max_array_length=2**20, max_map_length=4096, max_containers=2**21)

# The transport disconnects a peer with a frame of more bytes. It is above REQUEST_LIMITS, so that a message that is a
# little too large gets an error.
MAX_TRANSPORT_BYTES = 4 * REQUEST_LIMITS.max_bytes


# Most bytes to feed at once.
MAX_FEED_BYTES = 2**16
# Bytes that a connection reserves before anything has arrived; msgpack's default is a mebibyte.
WALKER_BYTES = 2**12


class StreamBroken(Exception):
    """The beginning of the next message cannot be found any more, so the connection must end.

    Args:
        head: the received bytes of the message at fault.
        error: the error to answer it with.
    """

    def __init__(self, head: bytes, error: GenbatchError) -> None:
        super().__init__(str(error))
        self.head = head
        self.error = error


class MessageSplitter:
    """Splits one direction of a connection into messages.

    Args:
        max_bytes: most bytes of a message; a longer message breaks the stream.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # may be raised between two messages, up to MAX_TRANSPORT_BYTES
        self._walker = self._new_walker()
        self._buffer = bytearray()  # of the message that is arriving
        self._end_of_last = 0  # the end of the last message, in bytes since the stream's beginning

    @property
    def is_inside_message(self) -> bool:
        """Whether a message has arrived in part."""
        return bool(self._buffer)

    @property
    def num_held(self) -> int:
        """The bytes of the unfinished message. It takes two to three times as much memory."""
        return len(self._buffer)

    def clear(self) -> None:
        """Free the memory; `feed` must not be called any more."""
        self._buffer = bytearray()
        self._walker = self._new_walker()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that end in `data`, at most MAX_FEED_BYTES of it, in order.

        Raises:
            StreamBroken: a message does not end within `max_bytes`, or cannot end at all.
        """
        assert len(data) <= MAX_FEED_BYTES, "without this limit, memory is not bounded"
        self._walker.feed(data)
        self._buffer += data
        while self._walk():
            size = self._walker.tell() - self._end_of_last
            if size > self.max_bytes:
                break
            self._end_of_last += size
            message = bytes(memoryview(self._buffer)[:size])
            del self._buffer[:size]
            if size > MAX_FEED_BYTES:  # the walker's copy keeps its memory until the walker is replaced
                self._walker = self._new_walker()
                self._walker.feed(self._buffer)
                self._end_of_last = 0
            yield message
        # guard: cap on a message, msgpack-RPC
        if len(self._buffer) > self.max_bytes:
            reason = (
                f"a message has more than {len(self._buffer)} bytes; a connection skips at most {self.max_bytes} bytes"
            )
            raise StreamBroken(self.head(), FrameTooLarge(reason))

    def _new_walker(self) -> msgpack.Unpacker:
        most = max(self.max_bytes, MAX_TRANSPORT_BYTES) + MAX_FEED_BYTES
        return msgpack.Unpacker(read_size=WALKER_BYTES, max_buffer_size=most)

    def _walk(self) -> bool:
        """Return whether another message has arrived completely."""
        try:
            self._walker.skip()
        except msgpack.OutOfData:
            return False
        except (ValueError, msgpack.UnpackException) as error:  # a byte that begins no value; endless nesting
            reason = "nested too deeply" if isinstance(error, msgpack.StackError) else "not msgpack"
            raise StreamBroken(self.head(), MalformedMessage(f"{reason}, and the connection ends here")) from None
        return True

    def head(self) -> bytes:
        """Return the beginning of the message that is arriving."""
        return bytes(memoryview(self._buffer)[:32])


_walker = msgspec.msgpack.Decoder(msgspec.Raw)
_trusting = msgspec.msgpack.Decoder()
_encoder = msgspec.msgpack.Encoder()
# Room for an array's length, a small integer and the longest integer, in any encoding. By default the unpacker reserves
# a mebibyte.
HEAD_BYTES = 32


def encode(message: object) -> bytes:
    """Return a message's bytes; `message` is made of plain data and the types of proto."""
    return _encoder.encode(message)


def why_unsendable(value: object, path: str = "") -> InvalidRequest | None:
    """Return the error of the first part of a client's parameters that cannot be encoded; None if all can be.

    Examples are half a surrogate pair, a number of more than 64 bits, and an object of the program's own class.
    """
    try:
        encode(value)
    except RecursionError:
        reason = "is nested too deeply"
    except UnicodeEncodeError:
        reason = "is not valid Unicode: it has a lone surrogate"
    except OverflowError:
        reason = "has more than 64 bits"
    except TypeError:
        reason = f"a value of type {type(value).__name__} cannot be sent"
    else:
        return None
    inside = (why_unsendable(part, where) for where, part in _parts(value, path))
    # No single level is at fault, so the error names the whole parameter.
    within = None if path and reason == "is nested too deeply" else next(filter(None, inside), None)
    return within or InvalidRequest(path or None, reason)


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Iterate over the parts of a value, each with its path."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        for name, part in value.items():
            yield path, name
            yield (f"{path}.{name}" if path else str(name)), part
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield f"{path}[{index}]", part


def decode(data: bytes, limits: DecodeLimits | None) -> Any:
    """Decode exactly one message to plain data: None, bool, int, float, str, bytes, list, dict.

    Args:
        limits: None for a message of a trusted process.

    Raises:
        FrameTooLarge: the message has more bytes than `limits` allow.
        MalformedMessage: the bytes are not one complete, well-formed message, or exceed `limits`.
    """
    if limits is None:
        try:
            return _trusting.decode(data)
        except msgspec.DecodeError as error:
            raise MalformedMessage(str(error)) from None
    # guard: cap on a message's size
    if len(data) > limits.max_bytes:
        raise FrameTooLarge(f"the message has {len(data)} bytes; at most {limits.max_bytes} are accepted")
    containers = _Containers(limits.max_containers)
    try:
        # guard: lengths are true
        _walker.decode(data)
        value = msgpack.unpackb(
            data,
            strict_map_key=False,
            object_pairs_hook=containers.take_map,
            list_hook=containers.take_list,
            ext_hook=_refuse_extension,
            max_array_len=limits.max_array_length,
            max_map_len=limits.max_map_length,
            max_ext_len=0,
        )
    except msgspec.DecodeError as error:
        raise MalformedMessage(str(error).removeprefix("MessagePack data is malformed: ")) from None
    except (RecursionError, msgpack.StackError):
        raise MalformedMessage(f"nested more than {limits.max_nesting} deep") from None
    except (
        ValueError,
        TypeError,
        msgpack.UnpackException,
    ) as error:  # a limit, an extension type, a key, or invalid UTF-8
        raise MalformedMessage(str(error)) from None
    # guard: cap on nesting
    if is_deeper(value, limits.max_nesting):
        raise MalformedMessage(f"nested more than {limits.max_nesting} deep")
    return value


def read_type(data: bytes) -> object:
    """Return the first element of an array that may be incomplete; None for an empty array or another value."""
    unpacker = msgpack.Unpacker(read_size=HEAD_BYTES, max_ext_len=0, max_str_len=0, max_array_len=4, max_map_len=0)
    unpacker.feed(data[:HEAD_BYTES])
    try:
        return unpacker.unpack() if unpacker.read_array_header() else None
    except (ValueError, msgpack.UnpackException):
        return None


def read_head(data: bytes) -> list[object] | None:
    """Return the first two elements of an array, the message type and the msgid; None if there are not two.

    The rest of the message may be invalid. So the refusal of a message that `decode` rejects reaches its caller.
    """
    unpacker = msgpack.Unpacker(read_size=HEAD_BYTES, max_ext_len=0, max_str_len=0, max_array_len=4, max_map_len=0)
    unpacker.feed(data[:HEAD_BYTES])
    try:
        if unpacker.read_array_header() < 2:
            return None
        return [unpacker.unpack(), unpacker.unpack()]
    except (ValueError, msgpack.UnpackException):
        return None


def to_generate_request(params: object) -> GenerateRequest:
    """Return the request in a map of parameters; `stop` may be a single string.

    This checks types. `validate_request` checks ranges, when the request is accepted.

    Raises:
        InvalidRequest: with the path of the first fault.
    """
    if isinstance(params, dict) and isinstance(params.get("stop"), str):
        params = params | {"stop": [params["stop"]]}
    request: GenerateRequest = check_type(params, GenerateRequest)
    return request


def to_answer(value: object, answer_type: Any) -> Any:
    """Return a service's answer as the type that belongs to the method: Result, TokenIds, ...

    Raises:
        MalformedMessage: the value has another type.
    """
    try:
        return check_type(value, answer_type)
    except InvalidRequest as error:
        raise MalformedMessage(f"the answer has another type than the method's: {error}") from None


class _Containers:
    """Counts the arrays and maps of one message, since an object of one byte in the message takes much more memory."""

    __slots__ = ("room",)

    def __init__(self, room: int) -> None:
        self.room = room

    def take_map(self, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        self._count()
        entries = list(pairs)
        result = dict(entries)
        # guard: no key twice
        if len(result) != len(entries):
            raise ValueError("a map has the same key twice")
        return result

    def take_list(self, elements: list[Any]) -> list[Any]:
        self._count()
        return elements

    def _count(self) -> None:
        self.room -= 1
        # guard: cap on containers
        if self.room < 0:
            raise ValueError("too many arrays and maps")


def _refuse_extension(code: int, data: bytes) -> None:
    """Refuse an extension type. The limit on lengths does not refuse one without content."""
    raise ValueError(f"extension type {code}")
