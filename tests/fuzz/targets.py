"""What is fed with arbitrary bytes, and what must hold whatever they are: a function of bytes for each.

A target raises AssertionError, or lets an unclassified exception out, where something is wrong.
"""

import math
from collections.abc import Callable
from pathlib import Path

import msgpack

from genbatch.actors.gateways.addresses import check_address
from genbatch.actors.security.key_files import AddressError, KeyFileError
from genbatch.actors.security.security import is_loopback
from genbatch.proto.codec import (
    MAX_FEED_BYTES,
    REQUEST_LIMITS,
    RESPONSE_LIMITS,
    DecodeLimits,
    MessageSplitter,
    StreamBroken,
    decode,
    encode,
    to_generate_request,
)
from genbatch.proto.errors import FrameTooLarge, InvalidRequest, MalformedMessage
from genbatch.proto.messages import DetokenizeRequest, Token, TokenizeRequest
from genbatch.proto.rpc import (
    CallReceived,
    CancelRequest,
    ClientConnection,
    CreditGranted,
    Heartbeat,
    Refused,
    ServerConnection,
)
from genbatch.proto.service_messages import DrainRequest
from genbatch.proto.validation import (
    RequestLimits,
    check_type,
    validate_detokenize,
    validate_drain,
    validate_request,
    validate_text,
)

Target = Callable[[bytes], None]

_PLAIN = (type(None), bool, int, float, str, bytes)
# Small, so that short inputs reach them.
_LIMITS = DecodeLimits(max_bytes=4096, max_nesting=4, max_array_length=16, max_map_length=8, max_containers=12)
_MAX_CALLS = 3


def decoding(data: bytes) -> None:
    """What is decoded is plain, within the limits, what another decoder reads, and the same after another round."""
    for limits in (_LIMITS, REQUEST_LIMITS):
        try:
            value = decode(data, limits)
        except (FrameTooLarge, MalformedMessage):
            continue
        _check_plain(value, limits, limits.max_nesting)
        other = msgpack.unpackb(data, strict_map_key=False, use_list=True)
        assert _same(value, other)
        assert _same(decode(encode(value), limits), value)


def server(data: bytes) -> None:
    """A service's end raises nothing, refuses without changing anything, and every call has one final."""
    connection = ServerConnection(_MAX_CALLS)
    for message in _messages(data):
        before = connection.calls.open_calls()
        event = connection.receive(message)
        after = connection.calls.open_calls()
        assert len(after) <= _MAX_CALLS
        match event:
            case CallReceived(msgid):
                assert after == [*before, msgid]
                connection.token(msgid, Token(text="t", token_id=1, index=0))
            case Refused(error, reply):
                assert after == before
                kind, msgid, info, result = decode(reply, RESPONSE_LIMITS)
                assert (kind, info["code"], result) == (1, error.code, None)
                assert msgid is None or msgid not in before
            case CancelRequest(msgid) | CreditGranted(msgid):
                assert after == before and msgid in before
            case Heartbeat(lease_s):
                assert lease_s is None or lease_s > 0
            case None:
                assert after == before
    for msgid in connection.calls.open_calls():
        connection.error(msgid, MalformedMessage("the end"))
    assert not connection.calls.open_calls()


def client(data: bytes) -> None:
    """A client's end raises nothing unclassified, and knows of no call that it did not open."""
    connection = ClientConnection()
    opened = {connection.request("stream", {})[0] for _ in range(_MAX_CALLS)}
    connection.cancel(2)
    for message in _messages(data):
        before = connection.calls.open_calls()
        try:
            connection.receive(message)
        except (FrameTooLarge, MalformedMessage):
            assert set(connection.calls.open_calls()) <= set(before)
        assert opened.issuperset(connection.calls.open_calls())


def stream(data: bytes) -> None:
    """Where messages end does not depend on how their bytes arrive, and what is held is bounded."""
    cut, data = data[:4], data[4:]
    whole = _split(data, [len(data)])
    assert _split(data, [1 + size % 32 for size in cut] or [1]) == whole
    messages, is_broken = whole
    assert b"".join(messages) == data[: sum(map(len, messages))]
    for message in messages:
        assert 0 < len(message) <= _LIMITS.max_bytes
    if not is_broken:
        assert len(data) - sum(map(len, messages)) <= _LIMITS.max_bytes


def parameters(data: bytes) -> None:
    """Whatever plain data a method is called with, it is a valid request or an InvalidRequest."""
    try:
        params = decode(data, REQUEST_LIMITS)
    except (FrameTooLarge, MalformedMessage):
        return
    limits = RequestLimits()
    for read in (
        lambda: validate_request(to_generate_request(params), limits),
        lambda: validate_text(check_type(params, TokenizeRequest), limits),
        lambda: validate_detokenize(check_type(params, DetokenizeRequest)),
        lambda: validate_drain(check_type(params, DrainRequest)),
    ):
        try:
            read()
        except InvalidRequest as error:
            encode(error.to_wire())


def addresses(data: bytes) -> None:
    """Without keys an address is refused, or is a file's, or this machine's own."""
    address = data.decode(errors="surrogateescape")
    for given in (address, f"tcp://{address}", f"ipc://{address}"):
        try:
            path = check_address("bind", given, lacking=["keys"])
        except (AddressError, KeyFileError):
            continue
        if path is not None:
            assert isinstance(path, Path) and given.startswith("ipc://")
        else:
            host = given.removeprefix("tcp://").rpartition(":")[0]
            assert is_loopback(host) and (host == "localhost" or "127." in host or ":" in host)


TARGETS: dict[str, Target] = {
    target.__name__: target for target in (decoding, server, client, stream, parameters, addresses)
}


def seeds() -> list[bytes]:
    """Inputs from which mutation reaches far."""
    messages = [
        [0, 1, "stream", [{"prompt": "x", "stop": ["a"], "logit_bias": {5: 1.5}}, {"credit": 3, "coalesce": True}]],
        [0, 2, "generate", [{"messages": [{"role": "user", "content": "é"}], "seed": 2**64 - 1, "n": 2}]],
        [0, 3, "tokenize", [{"prompt": "x", "add_special_tokens": False}]],
        [0, 4, "auth", [{"token": "x"}]],
        [2, "cancel", [1]],
        [2, "credit", [1, 5]],
        [2, "heartbeat", [1.5]],
        [2, "token", [1, 0, 5, "text", {"logprob": -0.5, "choice": 0}]],
        [2, "tokens", [[1, 0, 5, "a"], [3, 0, 6, "b"]]],
        [1, 1, None, {"text": "x", "token_ids": [1], "finish_reason": "stop"}],
        [1, 3, {"code": "queue_full", "message": "full", "retry_after_ms": 5}, None],
        {"prompt": "x", "max_tokens": 5, "temperature": 0.5, "top_p": 1.0, "stop": "a"},
        {"token_ids": [1, 2, 3]},
        {"timeout_s": 1.0},
    ]
    packed = [msgpack.packb(message) for message in messages]
    joined = b"".join(bytes([len(data)]) + data for data in packed if len(data) < 256)
    return [*packed, joined, b"".join(packed), b"127.0.0.1:5555", b"[::1]:*", b"/tmp/x", b"tcp://*:1"]


def _messages(data: bytes) -> list[bytes]:
    """Cuts the input into messages, each behind a byte with its length; or takes it as one, if it starts with 0."""
    if data[:1] == b"\0":
        return [data[1:]]
    messages = []
    while data:
        size = data[0]
        messages.append(data[1 : 1 + size])
        data = data[1 + size :]
    return messages


def _split(data: bytes, sizes: list[int]) -> tuple[list[bytes], bool]:
    splitter = MessageSplitter(_LIMITS.max_bytes)
    messages: list[bytes] = []
    turn = 0
    try:
        while data:
            size = min(sizes[turn % len(sizes)], MAX_FEED_BYTES)
            turn += 1
            for message in splitter.feed(data[:size]):
                messages.append(message)  # noqa: PERF402  # what came before a fault counts
            data = data[size:]
    except StreamBroken as broken:
        assert isinstance(broken.error, FrameTooLarge | MalformedMessage)
        return messages, True
    return messages, False


def _check_plain(value: object, limits: DecodeLimits, room: int) -> None:
    assert isinstance(value, (*_PLAIN, list, dict))
    if isinstance(value, list | dict):
        assert room > 0
        assert len(value) <= (limits.max_array_length if isinstance(value, list) else limits.max_map_length)
        for element in value.values() if isinstance(value, dict) else value:
            _check_plain(element, limits, room - 1)


def _same(one: object, other: object) -> bool:
    """Equality that tells 1 from 1.0 and true, and takes NaN for itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return (
            len(one) == len(other)
            and all(map(_same, one.keys(), other.keys()))
            and all(map(_same, one.values(), other.values()))
        )
    return one == other
