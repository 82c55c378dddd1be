"""Recorded bytes of the wire: old clients with today's service, today's client with old services, and the schema.

`python -m tests.proto.vectors` writes what these tests compare with.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import pytest
import trio
import zmq

from genbatch.actors.gateways.dispatcher import Caller, Dispatcher
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.zeromq_socket import open_socket
from genbatch.clients.transports import RPCLink
from genbatch.proto.codec import to_answer
from genbatch.proto.errors import InvalidRequest, MalformedMessage
from genbatch.proto.methods import METHODS
from genbatch.proto.rpc import (
    STREAM_OPTIONS,
    WIRE_VERSION,
    CallAnswered,
    CallFailed,
    CallReceived,
    CancelRequest,
    ClientConnection,
    CreditGranted,
    Heartbeat,
    ServerConnection,
    StreamOptions,
)
from genbatch.proto.schema import wire_schema
from genbatch.proto.service_messages import Hello
from tests.actors.gateways.scripted_batcher import ScriptedBatcher, served
from tests.proto.vectors import CURRENT, SAMPLES, SCHEMA_FILE, VECTORS, Exchange, as_json, exchange, typed_params

# The file of a release is never changed: other people's clients and services are what it says.
RELEASED = {"0.1.0": "247241b28f995f02"}
REWRITE = "run `python -m tests.proto.vectors`, look at what has changed, and say so in proto/README.md"


def exchanges(path: Path) -> dict[str, Exchange]:
    return {one["name"]: one for one in json.loads(path.read_text())}


CURRENT_EXCHANGES = exchanges(CURRENT)
OLD = [
    pytest.param(one, id=f"{release} {name}")
    for release in RELEASED
    for name, one in exchanges(VECTORS / f"{release}.json").items()
]


def sent_by(sender: str, one: Exchange) -> list[bytes]:
    return [bytes.fromhex(step["hex"]) for step in one["steps"] if step["from"] == sender]


def final_of(one: Exchange) -> Any:
    return one["steps"][-1]["message"]


def covers(new: Any, old: Any) -> bool:
    """Whether who reads the old value finds all of it in the new one: maps may have more keys."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and covers(new[key], value) for key, value in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(covers, new, old))
    return type(new) is type(old) and bool(new == old)


def test_the_file_says_what_the_code_sends() -> None:
    for sample in SAMPLES:
        assert exchange(sample) == CURRENT_EXCHANGES.get(sample.name), f"{sample.name}: {REWRITE}"
    assert len(CURRENT_EXCHANGES) == len(SAMPLES), REWRITE


def test_every_method_and_option_is_recorded() -> None:
    assert {sample.method for sample in SAMPLES} == set(METHODS)
    options = [sample.options for sample in SAMPLES]
    for name in STREAM_OPTIONS:
        assert any(getattr(given, name) != getattr(StreamOptions(), name) for given in options), name


def test_files_of_releases_are_as_they_were() -> None:
    assert {path.stem for path in VECTORS.glob("*.json")} == {*RELEASED, CURRENT.stem}
    for release, digest in RELEASED.items():
        assert hashlib.sha256((VECTORS / f"{release}.json").read_bytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.json")), ids=lambda path: path.stem)
def test_bytes_stand_for_the_values_beside_them(path: Path) -> None:
    for one in exchanges(path).values():
        for step in one["steps"]:
            value = msgpack.unpackb(bytes.fromhex(step["hex"]), strict_map_key=False)
            assert as_json(value) == step["message"], one["name"]


# An old client with today's service


@pytest.mark.parametrize("one", OLD)
def test_todays_service_takes_what_an_old_client_sends(one: Exchange) -> None:
    service = ServerConnection(max_calls=1)
    for data in sent_by("client", one):
        event = service.receive(data)
        assert isinstance(event, CallReceived | Heartbeat | CreditGranted | CancelRequest), event
        if isinstance(event, CallReceived):
            typed_params(event.method, event.params)


@pytest.mark.parametrize("one", OLD)
def test_an_old_client_finds_in_todays_answers_all_that_it_reads(one: Exchange) -> None:
    today = CURRENT_EXCHANGES[one["name"]]
    old_steps, new_steps = (
        [step["message"] for step in steps["steps"] if step["from"] == "service"] for steps in (one, today)
    )
    assert covers(new_steps, old_steps)


@pytest.mark.trio
@pytest.mark.parametrize("transport", ["ipc", "unix"])
async def test_a_running_service_answers_the_bytes_of_an_old_client(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service:
        for release in RELEASED:
            for name, one in exchanges(VECTORS / f"{release}.json").items():
                final = await ask(service.address, sent_by("client", one))
                recorded = final_of(one)[2]
                code = final[2]["code"] if final[2] is not None else None
                if recorded is None:
                    assert code in (None, "cancelled"), (name, final)
                elif recorded["code"] == InvalidRequest.code:
                    assert covers(final[2], {key: recorded[key] for key in ("code", "field")}), name


async def ask(address: str, messages: list[bytes]) -> Any:
    """What a service answers to raw messages, at last."""
    transport, _, path = address.partition("://")
    if transport == "ipc":
        async with open_socket(zmq.DEALER) as socket:
            socket.connect(address)
            for message in messages:
                await socket.send([message])
            while True:
                (answer,) = await socket.recv()
                if (final := msgpack.unpackb(answer, strict_map_key=False))[0] == 1:
                    return final
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(b"".join(messages))
        unpacker = msgpack.Unpacker(strict_map_key=False)
        while True:
            unpacker.feed(await stream.receive_some())
            for answer in unpacker:
                if answer[0] == 1:
                    return answer


# Today's client with an old service


@pytest.mark.parametrize("one", OLD)
def test_todays_client_sends_an_old_service_nothing_that_is_new_to_it(one: Exchange) -> None:
    assert sent_by("client", CURRENT_EXCHANGES[one["name"]]) == sent_by("client", one)


@pytest.mark.parametrize("one", OLD)
def test_todays_client_reads_what_an_old_service_sends(one: Exchange) -> None:
    client = ClientConnection()
    sample = next(sample for sample in SAMPLES if sample.name == one["name"])
    client.request(sample.method, {}, sample.options)
    *_, final = [client.receive(data) for data in sent_by("service", one)]
    if final_of(one)[2] is None:
        assert isinstance(final, CallAnswered)
        to_answer(final.result, METHODS[one["method"]].answer)
    else:
        assert isinstance(final, CallFailed)
        assert final.error.to_wire().code == final_of(one)[2]["code"]


# Versions


@pytest.mark.trio
async def test_hello_says_the_version_and_what_a_stream_may_ask_for() -> None:
    async with trio.open_nursery() as nursery:
        dispatcher = Dispatcher(await start(nursery, ScriptedBatcher()))
        hello = await dispatcher.call("hello", {}, Caller("test"))
        nursery.cancel_scope.cancel()
    assert hello == Hello(methods=tuple(METHODS), version=WIRE_VERSION, stream_options=("credit", "coalesce", "drawn"))


def test_a_client_is_told_of_a_service_whose_version_it_does_not_know() -> None:
    def welcome(more: Mapping[str, Any]) -> bytes:
        return msgpack.packb([1, 0, None, {"methods": ["generate"], "tenant": None, **more}])  # type: ignore[no-any-return]

    for fine in ({}, {"version": WIRE_VERSION, "a": "later key"}):
        assert RPCLink("rpc://127.0.0.1:1", None).receive(welcome(fine)) == []
    with pytest.raises(MalformedMessage, match=f"version {WIRE_VERSION + 1} of the wire.*knows {WIRE_VERSION}"):
        RPCLink("rpc://127.0.0.1:1", None).receive(welcome({"version": WIRE_VERSION + 1}))


# The schema


def test_the_schema_file_is_made_of_the_types() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == as_json(wire_schema()), REWRITE


def test_the_schema_accepts_every_recorded_message_and_refuses_a_misspelt_parameter() -> None:
    schema = json.loads(SCHEMA_FILE.read_text())

    def check(value: Any, part: Any) -> None:
        jsonschema.Draft202012Validator({**part, "$defs": schema["$defs"]}).validate(value)

    jsonschema.Draft202012Validator.check_schema(schema)
    for one in CURRENT_EXCHANGES.values():
        for step in one["steps"]:
            check(step["message"], {"anyOf": list(schema["messages"].values())})
        method = schema["methods"][one["method"]]
        request = one["steps"][1]["message"]
        check(request[3][0], method["params"])
        if final_of(one)[2] is None:
            check(final_of(one)[3], method["result"])
    with pytest.raises(jsonschema.ValidationError):
        check({"promt": "x"}, schema["methods"]["generate"]["params"])
