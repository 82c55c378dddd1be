"""Messages out of a stream of bytes, however it is cut; the decoder against hostile bytes, with msgpack as oracle."""

import math
import tracemalloc
from functools import partial
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.proto.codec import (
    MAX_FEED_BYTES,
    MAX_TRANSPORT_BYTES,
    REQUEST_LIMITS,
    DecodeLimits,
    MessageSplitter,
    StreamBroken,
    decode,
    encode,
    read_head,
    to_answer,
    to_generate_request,
)
from genbatch.proto.errors import FrameTooLarge, GenbatchError, InvalidRequest, MalformedMessage
from genbatch.proto.messages import Choice, GenerateRequest, Result, TokenLogprob, Usage

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


@pytest.mark.parametrize("size", [1000, MAX_FEED_BYTES])
def test_a_large_message_is_found_among_small_ones_and_leaves_nothing_behind(size: int) -> None:
    packed = [msgpack.packb(text) for text in ("a", "x" * 2**20, "b", "y" * 2**20, "c" * 5000)]
    whole = b"".join(packed)
    tracemalloc.start()
    try:
        splitter = MessageSplitter(MAX_TRANSPORT_BYTES)
        for start in range(0, len(whole), size):
            for message in splitter.feed(whole[start : start + size]):
                assert message == packed.pop(0)
                del message
        assert not packed and not splitter.is_inside_message
        assert tracemalloc.get_traced_memory()[0] < len(whole) / 10
    finally:
        tracemalloc.stop()


def test_a_message_over_the_limit_that_came_at_once_breaks_the_stream_too() -> None:
    splitter = MessageSplitter(10)
    small, large = msgpack.packb("x"), msgpack.packb("x" * 20)
    found = []
    with pytest.raises(StreamBroken, match="skips at most 10"):
        for message in splitter.feed(small + large + small):
            found.append(message)  # noqa: PERF402
    assert found == [small]


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=6),
    max_leaves=25,
)
REQUESTS = st.builds(
    GenerateRequest,
    prompt=st.none() | st.text(max_size=20),
    token_ids=st.none() | st.lists(st.integers(0, 2**31), max_size=8),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 10),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(max_size=5), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    echo=st.booleans(),
    tenant=st.text(max_size=10),
)


@settings(deadline=None)
@given(PLAIN)
def test_what_the_msgpack_library_packs_is_decoded_as_it_was(value: Any) -> None:
    assert decode(msgpack.packb(value), REQUEST_LIMITS) == value


@settings(deadline=None)
@given(PLAIN)
def test_what_is_encoded_the_msgpack_library_reads(value: Any) -> None:
    assert msgpack.unpackb(encode(value), strict_map_key=False) == value


def test_a_request_has_no_more_token_ids_than_any_context() -> None:
    most = msgpack.packb([5] * 2**18)
    assert len(decode(most, REQUEST_LIMITS)) == 2**18
    with pytest.raises(MalformedMessage):
        decode(msgpack.packb([5] * (2**18 + 1)), REQUEST_LIMITS)


@settings(deadline=None)
@given(REQUESTS)
def test_a_request_survives_the_wire(request: GenerateRequest) -> None:
    assert to_generate_request(decode(encode(request), REQUEST_LIMITS)) == request


def test_a_result_survives_the_wire_with_everything_in_it() -> None:
    logprobs = [TokenLogprob(token_id=5, logprob=-0.5, top={5: -0.5, 9: -1.5})]
    choices = tuple(Choice(text=text, token_ids=[5], finish_reason="length", logprobs=logprobs) for text in ("a", "b"))
    result = Result(
        text="a",
        token_ids=[5],
        finish_reason="length",
        usage=Usage(prompt_tokens=2, completion_tokens=2, cached_tokens=1),
        logprobs=logprobs,
        prompt_logprobs=[None, *logprobs],
        several=choices,
    )
    assert to_answer(decode(encode(result), REQUEST_LIMITS), Result) == result


def test_a_plain_result_is_the_documented_map() -> None:
    result = Result(text="a", token_ids=[5], finish_reason="stop", usage=Usage(prompt_tokens=2, completion_tokens=1))
    assert msgpack.unpackb(encode(result)) == {
        "text": "a",
        "token_ids": [5],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "cached_tokens": 0},
    }


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200) | PLAIN.map(msgpack.packb).flatmap(lambda data: st.binary(max_size=4).map(data.__add__)))
def test_no_bytes_raise_anything_but_a_typed_error(data: bytes) -> None:
    read_head(data)
    try:
        value = decode(data, REQUEST_LIMITS)
    except MalformedMessage:
        return
    for convert in (to_generate_request, partial(to_answer, answer_type=Result)):
        try:
            convert(value)
        except GenbatchError:
            continue


@settings(max_examples=300, deadline=None)
@given(REQUESTS, st.data())
def test_a_damaged_request_is_read_or_refused_with_a_typed_error(request: GenerateRequest, draw: st.DataObject) -> None:
    damaged = bytearray(encode([0, 7, "generate", [request]]))
    for _ in range(draw.draw(st.integers(1, 4))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    try:
        value = decode(bytes(damaged), REQUEST_LIMITS)
        to_generate_request(value)
    except GenbatchError:
        return


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x02",  # trailing bytes
        b"\x93\x00",  # cut off
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements, none there
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xa2\xff\xfe",  # no UTF-8
        b"\xa3\xed\xa0\x80",  # a surrogate in UTF-8
        b"\xd4\x01\x00",  # an extension type
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x91\xc7\x00\x05",  # an extension type without content
        b"\x82\xa1a\x01\xa1a\x02",  # the same key twice
        b"\x82\x01\x01\xc3\x01",  # 1 and true are one key
        b"\x81\x90\x01",  # an array as a key
        b"\x91" * 17 + b"\x00",
        b"\x91" * 1200 + b"\x00",
        b"\x91" * 100_000 + b"\x00",
        b"\x81\xa1a" * 100_000 + b"\x00",
        b"\xdc\xff\xff" * 100_000,
    ],
    ids=lambda data: data[:8].hex(),
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data, REQUEST_LIMITS)


def test_limits_hold_at_their_edges() -> None:
    limits = DecodeLimits(max_bytes=40, max_nesting=3, max_array_length=4, max_map_length=2)
    assert decode(encode([[[1]]]), limits) == [[[1]]]
    assert decode(encode([1, 2, 3, 4]), limits) == [1, 2, 3, 4]
    assert decode(encode({"a": 1, "b": 2}), limits) == {"a": 1, "b": 2}
    assert decode(encode("x" * 38), limits) == "x" * 38
    for value in ([[[[1]]]], [1, 2, {"a": [[]]}], [1, 2, 3, 4, 5], {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(MalformedMessage):
            decode(encode(value), limits)
    with pytest.raises(FrameTooLarge):
        decode(encode("x" * 39), limits)
    few = DecodeLimits(max_bytes=40, max_array_length=4, max_map_length=2, max_containers=3)
    assert decode(encode([[], {}]), few) == [[], {}]
    for value in ([[], {}, []], [[{}], {}]):
        with pytest.raises(MalformedMessage, match="too many"):
            decode(encode(value), few)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\x00\x03\xff\xff" * 1000,  # arrays in arrays that claim to be long
        b"\xdd\xff\xff\xff\xff" * 3000,
        b"\xdc\x40\x00" + b"\x90" * 0x4000,
        b"\xdc\x40\x00" + b"\x81\x01\x01" * 0x4000,
        b"\xdc\x40\x00" + b"\xa1" * 0x8000,
        b"\xdc\x80\x00" + b"\x91\x00" * 0x8000,
        b"\xdc\x88\x88" + (b"\x81\xc0" * 14 + b"\xc0") * 0x8888,
    ],
    ids=["nested arrays", "lies", "empty arrays", "maps", "strings", "arrays", "nested maps"],
)
def test_no_message_takes_more_than_a_hundred_times_its_size(data: bytes) -> None:
    tracemalloc.start()
    try:
        decode(data, REQUEST_LIMITS)
    except GenbatchError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(data) + 100_000


def test_the_head_of_a_message_is_read_without_reserving_much() -> None:
    tracemalloc.start()
    try:
        read_head(b"\x93\x00\x01")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"prompt": "x", "max_tokens": "8"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "temperatur": 1}, "temperatur"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"token_ids": [1, 2.5]}, "token_ids[1]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({1: 2}, None),
        ([], None),
        (None, None),
    ],
)
def test_wrong_types_and_unknown_parameters_are_named_by_their_path(params: object, path: str | None) -> None:
    with pytest.raises(InvalidRequest) as info:
        to_generate_request(params)
    assert info.value.field == path


def test_stop_may_be_one_string() -> None:
    assert to_generate_request({"prompt": "x", "stop": "END"}).stop == ["END"]


def test_a_number_that_is_none_is_read_and_left_to_the_range_check() -> None:
    assert math.isnan(to_generate_request(decode(encode({"temperature": math.nan}), REQUEST_LIMITS)).temperature)


def test_the_head_of_a_message_is_read_whatever_follows() -> None:
    assert read_head(encode([0, 2**64 - 1, "generate", [{}]]) + b"\xc1") == [0, 2**64 - 1]
    assert read_head(b"\x94\x00\x07\xa8") == [0, 7]
    for data in (b"", b"\x91\x00", b"\x80", b"\x94", b"\x94\x00\xdd\xff\xff\xff\xff", b"\xc1"):
        assert read_head(data) is None
