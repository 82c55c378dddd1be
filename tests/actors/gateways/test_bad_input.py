"""Every class of bad message gets its typed error, the same by either framing, and a well-meant client goes on."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import zmq

from genbatch.actors.runtime.zeromq_socket import open_socket
from genbatch.proto.codec import REQUEST_LIMITS
from tests.actors.gateways.scripted_batcher import served

pytestmark = pytest.mark.trio

Ask = Callable[[bytes], Awaitable[Any]]


def call(params: Any, method: str = "generate", *options: Any) -> bytes:
    packed: bytes = msgpack.packb([0, 7, method, [params, *options]])
    return packed


def prompt(**params: Any) -> bytes:
    return call({"prompt": "x", **params})


# What is sent, the msgid and the code of the error, and its field.
BAD: dict[str, tuple[bytes, int | None, str, str | None]] = {
    "not an array": (msgpack.packb({"a": 1}), None, "malformed_message", None),
    "an empty array": (msgpack.packb([]), None, "malformed_message", None),
    "an unknown type": (msgpack.packb([3, 7, "generate", [{}]]), None, "malformed_message", None),
    "a boolean type": (msgpack.packb([False, 7, "generate", [{}]]), None, "malformed_message", None),
    "a boolean msgid": (msgpack.packb([0, True, "generate", [{}]]), None, "malformed_message", None),
    "a fractional msgid": (msgpack.packb([0, 7.0, "generate", [{}]]), None, "malformed_message", None),
    "a negative msgid": (msgpack.packb([0, -7, "generate", [{}]]), None, "malformed_message", None),
    "a missing method": (msgpack.packb([0, 7]), 7, "malformed_message", None),
    "a number for a method": (msgpack.packb([0, 7, 5, [{}]]), 7, "malformed_message", None),
    "parameters by position": (msgpack.packb([0, 7, "generate", ["x", 3]]), 7, "malformed_message", None),
    "too many elements": (msgpack.packb([0, 7, "generate", [{}], 1]), 7, "malformed_message", None),
    "an unknown method": (call({}, "generat"), 7, "unknown_method", None),
    "a method that is no text": (msgpack.packb([0, 7, b"\xff\xfe", []]), 7, "unknown_method", None),
    "a key twice": (b"\x94\x00\x07\xa8generate\x91\x82\xa1a\x01\xa1a\x02", 7, "malformed_message", None),
    "a map as a key": (b"\x94\x00\x07\xa8generate\x91\x81\x80\x01", 7, "malformed_message", None),
    "bad UTF-8": (b"\x94\x00\x07\xa8generate\x91\x81\xa6prompt\xa2\xff\xfe", 7, "malformed_message", None),
    "an extension type": (b"\x94\x00\x07\xa8generate\x91\x81\xa6prompt\xd4\x05\x00", 7, "malformed_message", None),
    "a timestamp": (b"\x94\x00\x07\xa8generate\x91\x81\xa4seed\xd6\xff\x00\x00\x00\x01", 7, "malformed_message", None),
    "nesting": (b"\x94\x00\x07\xa8generate\x91\x81\xa1a" + b"\x91" * 200 + b"\x00", 7, "malformed_message", None),
    "too many entries": (prompt(logit_bias=dict.fromkeys(range(1025), 1.0)), 7, "malformed_message", None),
    "too many bytes": (prompt(stop="x" * REQUEST_LIMITS.max_bytes), 7, "frame_too_large", None),
    "a misspelt parameter": (prompt(temprature=1.0), 7, "invalid_request", "temprature"),
    "a number as a name": (call({5: 1, "prompt": "x"}), 7, "invalid_request", None),
    "text for a number": (prompt(max_tokens="8"), 7, "invalid_request", "max_tokens"),
    "a boolean for a number": (prompt(n=True), 7, "invalid_request", "n"),
    "a fraction for a count": (prompt(max_tokens=1.5), 7, "invalid_request", "max_tokens"),
    "nil for a number": (prompt(presence_penalty=None), 7, "invalid_request", "presence_penalty"),
    "not a number": (prompt(temperature=float("nan")), 7, "invalid_request", "temperature"),
    "infinity": (prompt(temperature=float("inf")), 7, "invalid_request", "temperature"),
    "a negative temperature": (prompt(temperature=-0.1), 7, "invalid_request", "temperature"),
    "a share above 1": (prompt(top_p=1.1), 7, "invalid_request", "top_p"),
    "a negative share": (prompt(top_p=-0.1), 7, "invalid_request", "top_p"),
    "a penalty of 0": (prompt(repetition_penalty=0.0), 7, "invalid_request", "repetition_penalty"),
    "a penalty too large": (prompt(presence_penalty=2.5), 7, "invalid_request", "presence_penalty"),
    "no tokens at all": (prompt(max_tokens=0), 7, "invalid_request", "max_tokens"),
    "a huge count": (prompt(max_tokens=2**64 - 1), 7, "invalid_request", "max_tokens"),
    "a negative seed": (prompt(seed=-1), 7, "invalid_request", "seed"),
    "more at least than at most": (prompt(max_tokens=2, min_tokens=3), 7, "invalid_request", "min_tokens"),
    "too many answers": (prompt(n=10**6), 7, "invalid_request", "n"),
    "too many log-probs": (prompt(logprobs=10**6), 7, "invalid_request", "logprobs"),
    "too many stop strings": (prompt(stop=["a"] * 17), 7, "invalid_request", "stop"),
    "an empty stop string": (prompt(stop=["a", ""]), 7, "invalid_request", "stop[1]"),
    "a long stop string": (prompt(stop=["a" * 257]), 7, "invalid_request", "stop[0]"),
    "a bias too large": (prompt(logit_bias={3: 101.0}), 7, "invalid_request", "logit_bias[3]"),
    "a bias for no token": (prompt(logit_bias={-3: 1.0}), 7, "invalid_request", "logit_bias[-3]"),
    "a deadline of 0": (prompt(deadline_s=0), 7, "invalid_request", "deadline_s"),
    "a deadline that is no number": (prompt(deadline_s=float("nan")), 7, "invalid_request", "deadline_s"),
    "a deadline too far": (prompt(deadline_s=1e9), 7, "invalid_request", "deadline_s"),
    "a priority too high": (prompt(priority=101), 7, "invalid_request", "priority"),
    "an empty prompt": (call({"prompt": ""}), 7, "invalid_request", "prompt"),
    "no prompt": (call({}), 7, "invalid_request", "prompt"),
    "two prompts": (call({"prompt": "x", "token_ids": [1]}), 7, "invalid_request", "prompt"),
    "token ids of other types": (call({"token_ids": [1, "2"]}), 7, "invalid_request", "token_ids[1]"),
    "a negative token id": (call({"token_ids": [1, -2]}), 7, "invalid_request", "token_ids[1]"),
    "no messages": (call({"messages": []}), 7, "invalid_request", "messages"),
    "a message without content": (
        *(call({"messages": [{"role": "user"}]}), 7),
        *("invalid_request", "messages[0].content"),
    ),
    "a message of other types": (
        *(call({"messages": [{"role": 5, "content": ""}]}), 7),
        *("invalid_request", "messages[0].role"),
    ),
    "parameters of a method without": (call({"x": 1}, "stats"), 7, "invalid_request", "x"),
    "a bad drain": (call({"timeout_s": -1.0}, "drain"), 7, "invalid_request", "timeout_s"),
    "bad text calls": (call({"token_ids": "abc"}, "detokenize"), 7, "invalid_request", "token_ids"),
    "options of a method without": (call({"prompt": "x"}, "generate", {"credit": 1}), 7, "invalid_request", "options"),
    "a bad option": (call({"prompt": "x"}, "stream", {"credit": -1}), 7, "invalid_request", "credit"),
    "an unknown option": (call({"prompt": "x"}, "stream", {"turbo": True}), 7, "invalid_request", "turbo"),
    "a bad cancellation": (msgpack.packb([2, "cancel", ["7"]]), None, "invalid_request", "[0]"),
    "a bad grant": (msgpack.packb([2, "credit", [7, 0]]), None, "invalid_request", "credit"),
    "a bad lease": (msgpack.packb([2, "heartbeat", [float("nan")]]), None, "invalid_request", "heartbeat"),
    "a notification without parameters": (msgpack.packb([2, "cancel"]), None, "malformed_message", None),
}


FOREIGN = {"not an array", "an empty array", "an unknown type", "a boolean type"}


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[Ask]:
    """Something that sends bytes and returns the next message, by either framing."""
    if address.startswith("ipc://"):
        async with open_socket(zmq.DEALER) as socket:
            socket.connect(address)

            async def ask(data: bytes) -> Any:
                await socket.send([data])
                (answer,) = await socket.recv()
                return msgpack.unpackb(answer)

            yield ask
        return
    async with await trio.open_unix_socket(address.removeprefix("unix://")) as stream:

        async def ask_stream(data: bytes) -> Any:
            await stream.send_all(data)
            unpacker = msgpack.Unpacker()
            while True:
                for message in unpacker:
                    return message
                unpacker.feed(await stream.receive_some())

        yield ask_stream


@pytest.mark.parametrize("transport", ["ipc", "unix"])
async def test_every_bad_message_gets_its_typed_error_and_the_connection_survives_all(
    tmp_path: Path, transport: str
) -> None:
    async with served(tmp_path, transport) as service, asking(service.address) as ask:
        for name, (data, msgid, code, field) in BAD.items():
            if name in FOREIGN and transport == "unix":
                continue  # there it is the connection's end: test_rpc_gateway
            kind, got, error, result = await ask(data)
            assert (kind, got, error["code"], error.get("field"), result) == (1, msgid, code, field, None), (
                name,
                error,
            )
            assert error["message"], name
        assert (await ask(call({"prompt": "still here"})))[3]["text"] == "stillhere"
        assert service.gateway.num_calls == 0
