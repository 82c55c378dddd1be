"""Messages out of a stream of bytes, however it is cut, and what is done where the stream makes no sense."""

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.proto.framing import MAX_FEED_BYTES, MessageSplitter, StreamBroken
from genbatch.proto.limits import MAX_TRANSPORT_BYTES

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def split(splitter: MessageSplitter, data: bytes, size: int = MAX_FEED_BYTES) -> list[bytes]:
    found = []
    for start in range(0, len(data), size):
        found += splitter.feed(data[start : start + size])
    return found


@given(st.lists(plain, max_size=6), st.integers(1, 40))
def test_every_message_is_found_however_the_stream_is_cut(messages: list[Any], size: int) -> None:
    packed = [msgpack.packb(message) for message in messages]
    splitter = MessageSplitter(MAX_TRANSPORT_BYTES)
    assert split(splitter, b"".join(packed), size) == packed
    assert not splitter.is_inside_message


@given(st.binary(max_size=200), st.integers(1, 40))
def test_no_bytes_do_more_than_break_the_stream(data: bytes, size: int) -> None:
    splitter = MessageSplitter(100)
    try:
        messages = split(splitter, data, size)
    except StreamBroken as broken:
        assert broken.error.code in ("malformed_message", "frame_too_large")
        return
    held = len(data) - sum(map(len, messages))
    assert data.startswith(b"".join(messages))
    assert splitter.is_inside_message == (held > 0) and held <= 100


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"\xc1", "malformed_message"), (b"\x91" * 5000, "malformed_message"), (b"\xa3abcd", None), (b"\xc4\x03ab", None)],
)
def test_only_bytes_without_an_end_break_the_stream(data: bytes, code: str | None) -> None:
    splitter = MessageSplitter(MAX_TRANSPORT_BYTES)
    if code is None:
        assert split(splitter, data) == ([b"\xa3abc", b"d"] if data[0] == 0xA3 else [])
        return
    with pytest.raises(StreamBroken) as info:
        split(splitter, data)
    assert info.value.error.code == code
    assert data.startswith(info.value.head)


@pytest.mark.parametrize(
    "endless",
    [b"\xdd\xff\xff\xff\xff" + b"\x01" * 400_000, b"\xdb\xff\xff\xff\xff" + b"x" * 400_000, b"\xdf\xff\xff\xff\xff"],
    ids=["array", "string", "map"],
)
def test_an_endless_message_holds_no_more_than_its_size_and_breaks_at_the_limit(endless: bytes) -> None:
    splitter = MessageSplitter(100_000)
    tracemalloc.start()
    try:
        if len(endless) < 100:
            assert split(splitter, endless) == []
        else:
            with pytest.raises(StreamBroken) as info:
                split(splitter, endless)
            assert info.value.error.code == "frame_too_large"
            assert info.value.head == endless[:32]
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_message_over_the_limit_that_came_at_once_breaks_the_stream_too() -> None:
    splitter = MessageSplitter(10)
    small, large = msgpack.packb("x"), msgpack.packb("x" * 20)
    found = []
    with pytest.raises(StreamBroken, match="10 can be passed over"):
        for message in splitter.feed(small + large + small):
            found.append(message)  # noqa: PERF402
    assert found == [small]
