"""/v1/responses and /v1/messages: bounds, faults by name, and clients that leave, over a scripted Batcher."""

import json
from dataclasses import replace
from typing import Any

import httpx2
import msgspec
import pytest
import trio

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.gateways.http import generating, responses, service_calls
from genbatch.actors.gateways.http.anthropic import read_message
from genbatch.actors.gateways.http.bodies import Refusal
from genbatch.actors.gateways.http.generating import FORMATS, FillIn
from genbatch.actors.gateways.http.responses import Conversations, read_items
from genbatch.actors.runtime.actor import From
from genbatch.proto.errors import DeadlineExceeded, InvalidRequest
from genbatch.proto.validation import MAX_TOOLS, RequestLimits, validate_request
from tests.actors.gateways.http.serving import served_http
from tests.actors.gateways.scripted_batcher import ScriptedBatcher
from tests.waiting import received_until

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "x"}]
HOLD = [{"role": "user", "content": "hold"}]
SILENT = {"role": "assistant", "content": None}
TOOL = {"name": "f", "parameters": {"type": "object"}}


class Talking(ScriptedBatcher):
    """Takes a conversation's last message as its prompt."""

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        if isinstance(request, Generate) and request.request.messages:
            self.asked = request.request
            said = request.request.messages[-1].content
            plain = msgspec.structs.replace(request.request, messages=None, prompt=said, reasoning=False, tools=[])
            request = replace(request, request=plain)
        return await super().handle_call(request, from_)


def asks(arguments: str, name: str = "f", call_id: str = "a") -> dict[str, Any]:
    """An assistant's turn with a call."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return SILENT | {"tool_calls": [call]}


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "banana", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (CHAT, {"messages": [SILENT]}, "messages[0].content"),
        (CHAT, {"messages": [asks('{"x": "\\ud83d"}')]}, "messages[0].tool_calls[0].arguments"),
        (CHAT, {"messages": [asks('{"x": NaN}')]}, "messages[0].tool_calls[0].arguments"),
        (CHAT, {"messages": [asks("{}", "f" * 129)]}, "messages[0].tool_calls[0].name"),
        (CHAT, {"messages": [asks("{}", call_id="a" * 129)]}, "messages[0].tool_calls[0].id"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (CHAT, {"messages": USER, "tools": [{"type": "function", "function": TOOL}] * 2}, "tools[1].function.name"),
        (CHAT, {"messages": USER, "tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": USER, "tools": [{"type": "mcp"}], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        (CHAT, {"messages": USER, "tools": [{"type": "custom"}]}, "tools[0].custom"),
        (CHAT, {"messages": USER, "tools": [{"type": "custom", "custom": {"name": " "}}]}, "tools[0].custom.name"),
        (CHAT, {"messages": USER, "tools": [{"type": "mcp"}, {"type": "function", "function": {"name": " "}}]},
         "tools[1].function.name"),
        (CHAT, {"messages": USER, "max_output_tokens": 5}, "max_output_tokens"),
        (CHAT, {"messages": USER, "web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "refusal": "no"}]}, "messages[0].refusal"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images"),
        (COMPLETION, {"prompt": [1, 2], "suffix": "x"}, "suffix"),
        (COMPLETION, {"prompt": "a", "suffix": "x", "echo": True}, "suffix"),
        (COMPLETION, {"prompt": "a", "suffix": "x"}, "suffix"),  # no marks in this vocabulary
        (RESPONSES, {"input": [{"role": "banana", "content": "x"}]}, "input[0].role"),
        (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (RESPONSES, {"input": [{"content": "x"}]}, "input[0].role"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (RESPONSES, {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input[0].text"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"input": "x", "background": True}, "background"),
        (RESPONSES, {"input": "x", "max_tokens": 5}, "max_tokens"),
        (RESPONSES, {"input": "x", "conversation": "c"}, "conversation"),
        (RESPONSES, {"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (RESPONSES, {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
         "tools[0].tools[0].name"),
        (RESPONSES, {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": 1}]}, "tools[0].tools"),
        (RESPONSES, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (MESSAGES, {"messages": USER}, "max_tokens"),
        (MESSAGES, {"messages": USER, "max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "tool", "content": "x"}], "max_tokens": 1}, "messages[0].role"),
        (MESSAGES, {"messages": [{"role": "user"}], "max_tokens": 1}, "messages[0].content"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1},
         "messages[0].content[0].type"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "tool_choice": {"type": "some"}}, "tool_choice.type"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "response_format": {"type": "json_object"}}, "response_format"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "tools": [{"type": "web_search_20250305", "name": "w"}],
                    "tool_choice": {"type": "tool", "name": "w"}}, "tool_choice.name"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "tools": [{"name": "f", "input_schema": {"type": "array"}}]},
         "tools[0].input_schema"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "stop_sequences": [""]}, "stop_sequences[0]"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "output_format": {"type": "json_schema", "schema": {}},
                    "output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}}}, "output_format"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "output_format": {"type": "x", "schema": {}}},
         "output_format.type"),
        (COUNT, {"messages": USER, "max_tokens": 1}, "max_tokens"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named_and_the_connection_lives(path: str, body: dict[str, Any], param: str) -> None:
    async with served_http() as served:
        for stream in (False, True):
            asked = body if path == COUNT else body | {"stream": stream}
            response = await served.client.post(path, content=json.dumps(asked).encode())
            told = response.json()
            assert (response.status_code, told["error"]["param"]) == (400, param), told
            assert told.get("type") == ("error" if path.startswith(MESSAGES) else None)
        assert (await served.complete("still there")).json()["choices"][0]["text"] == "stillthere"


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "x"}),
        (CHAT, {"messages": USER}),
        (MESSAGES, {"messages": USER, "max_tokens": 1}),
    ],
)
async def test_more_tools_than_allowed_are_refused_at_every_door(path: str, body: dict[str, Any]) -> None:
    tools = [{"name": f"f{number}"} for number in range(MAX_TOOLS + 1)]
    shaped = [
        {"type": "function", "function": tool} if path == CHAT else {"type": "function", **tool} for tool in tools
    ]
    async with served_http() as served:
        response = await served.client.post(path, json=body | {"tools": tools if path == MESSAGES else shaped})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.trio
async def test_every_door_has_the_same_bound_on_bodies_in_its_own_words() -> None:
    async with served_http() as served:
        for path in (RESPONSES, MESSAGES, COUNT):
            response = await served.client.post(path, content=b" " * (service_calls.MAX_BODY_BYTES + 1))
            assert response.status_code == 413
            expected = "invalid_request_error" if path == RESPONSES else "request_too_large"
            assert response.json()["error"]["type"] == expected


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [(RESPONSES, {"input": "hold"}), (MESSAGES, {"messages": [{"role": "user", "content": "hold"}], "max_tokens": 9})],
)
async def test_a_client_that_leaves_ends_its_request(path: str, body: dict[str, Any], stream: bool) -> None:
    async with served_http(batcher=Talking()) as served:
        connection = await trio.open_tcp_stream("127.0.0.1", served.port)
        content = json.dumps(body | {"stream": stream}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        await connection.send_all(head.encode() + content)
        held = await served.batcher.arrival("hold")
        if stream:
            held.emit("shown")
            assert b"shown" in await received_until(connection, b"shown")
        await connection.aclose()
        await served.batcher.release("hold")


@pytest.mark.trio
async def test_a_streamed_response_opens_one_message_for_all_of_its_text() -> None:
    async with served_http(batcher=Talking()) as served:
        connection = await trio.open_tcp_stream("127.0.0.1", served.port)
        content = json.dumps({"input": "hold", "stream": True, "metadata": {"topic": "x"}}).encode()
        head = f"POST {RESPONSES} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        await connection.send_all(head.encode() + content)
        held = await served.batcher.arrival("hold")
        held.emit("one")
        seen = await received_until(connection, b'"one"')
        held.emit("two")
        seen += await received_until(connection, b'"two"')
        await connection.aclose()
        await served.batcher.release("hold")
    events = [json.loads(line[6:]) for line in seen.decode().splitlines() if line.startswith("data: ")]
    opened = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
    assert opened == ["message"]
    assert events[0]["response"]["metadata"] == {"topic": "x"}, "it is the caller's, and comes back"
    assert [event["delta"] for event in events if event["type"] == "response.output_text.delta"] == ["one", "two"]


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": "hold"}),
        (CHAT, {"messages": [{"role": "user", "content": "hold"}]}),
        (RESPONSES, {"input": "hold"}),
        (MESSAGES, {"messages": [{"role": "user", "content": "hold"}], "max_tokens": 9}),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
async def test_a_silent_stream_has_heartbeats_and_says_how_it_ended(
    path: str, body: dict[str, Any], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a long prompt is read there is nothing to say, and a proxy would close the connection."""
    monkeypatch.setattr(generating, "HEARTBEAT_S", 0.02)
    beat = b"event: ping\n" if path == MESSAGES else b"\n: heartbeat\n\n"
    async with served_http(batcher=Talking()) as served, await trio.open_tcp_stream("127.0.0.1", served.port) as client:
        content = json.dumps(body | {"stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        await client.send_all(head.encode() + content)
        held = await served.batcher.arrival("hold")
        silent = await received_until(client, beat)
        assert silent.startswith(b"HTTP/1.1 200 ") and b"shown" not in silent
        held.emit("shown")
        await received_until(client, b"shown")
        await received_until(client, beat)  # they go on between tokens
        if fails:
            held.fail(DeadlineExceeded("too late"))
            assert b"too late" in await received_until(client, b"}\n\n")
        else:
            held.finish()
            ends = {MESSAGES: b"message_stop", RESPONSES: b"response.completed"}
            await received_until(client, ends.get(path, b"[DONE]"))


# Every way to an answer, with a body that asks for it, and what says there that the answer was cut.
DEADLINE_DOORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    COMPLETION: ({"prompt": "hold"}, {"finish_reason": "length"}),
    "/v1/fim/completions": ({"prompt": "hold"}, {"finish_reason": "length"}),
    CHAT: ({"messages": HOLD}, {"finish_reason": "length"}),
    RESPONSES: ({"input": "hold"}, {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}),
    MESSAGES: ({"messages": HOLD, "max_tokens": 9}, {"stop_reason": "max_tokens"}),
    "/api/chat": ({"model": "scripted", "messages": HOLD}, {"done_reason": "length"}),
    "/api/generate": ({"model": "scripted", "prompt": "hold"}, {"done_reason": "length"}),
    "/completion": ({"prompt": "hold"}, {"stop_type": "limit"}),
    "/infill": ({"prompt": "hold"}, {"stop_type": "limit"}),
}
ENDS = {MESSAGES: "event: message_stop", RESPONSES: "event: response.incomplete"}


def says(content: Any, fields: dict[str, Any]) -> bool:
    """Whether an object at any depth has these fields."""
    if isinstance(content, dict):
        return fields.items() <= content.items() or any(says(part, fields) for part in content.values())
    return isinstance(content, list) and any(says(part, fields) for part in content)


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DEADLINE_DOORS)
async def test_a_deadline_ends_an_answer_with_its_text_in_the_shape_of_each_api(path: str, stream: bool) -> None:
    body, cut = DEADLINE_DOORS[path]
    answers: list[httpx2.Response] = []
    async with served_http(batcher=Talking()) as served, trio.open_nursery() as nursery:

        async def ask() -> None:
            answers.append(await served.client.post(path, json=body | {"stream": stream, "deadline_s": 7.5}))

        nursery.start_soon(ask)
        held = await served.batcher.arrival("hold")
        assert held.message.request.deadline_s == 7.5
        held.emit("so")
        held.emit("far")
        held.finish("deadline")
    [answer] = answers
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines() if stream else [answer.text]
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))]
    assert any(says(piece, cut) for piece in pieces), answer.text
    assert ("so" in answer.text and "far" in answer.text) if stream else "sofar" in answer.text
    assert "error" not in answer.text.replace('"error":null', "")
    if stream and path.startswith("/v1/"):
        assert ENDS.get(path, "data: [DONE]") in answer.text


@pytest.mark.trio
@pytest.mark.parametrize("path", DEADLINE_DOORS)
async def test_a_deadline_without_a_token_is_504_and_a_wrong_one_is_named(path: str) -> None:
    body = DEADLINE_DOORS[path][0]
    async with served_http(batcher=Talking()) as served, trio.open_nursery() as nursery:
        refused = await served.client.post(path, json=body | {"deadline_s": -1})
        assert (refused.status_code, "deadline_s" in refused.text) == (400, True)

        async def ask() -> None:
            answer = await served.client.post(path, json=body | {"stream": False, "deadline_s": 7.5})
            assert (answer.status_code, "deadline" in answer.text) == (504, True)

        nursery.start_soon(ask)
        (await served.batcher.arrival("hold")).finish("deadline")


COLOUR = {"type": "object", "properties": {"name": {"enum": ["red", "green"]}}, "required": ["name"]}


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            CHAT,
            {
                "messages": USER,
                "tools": [{"type": "function", "function": TOOL}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}},
            },
        ),
        (
            RESPONSES,
            {
                "input": "x",
                "tools": [{"type": "function", **TOOL}],
                "text": {"format": {"type": "json_schema", "name": "c", "schema": COLOUR}},
            },
        ),
        *[
            (MESSAGES, {"messages": USER, "max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}], **shape})
            for shape in (
                {"output_config": {"format": {"type": "json_schema", "schema": COLOUR}}},
                {"output_format": {"type": "json_schema", "schema": COLOUR}},
            )
        ],
    ],
)
async def test_every_door_takes_tools_beside_a_format(path: str, body: dict[str, Any], stream: bool) -> None:
    batcher = Talking()
    async with served_http(batcher=batcher) as served:
        assert (await served.client.post(path, json=body | {"stream": stream})).status_code == 200
        asked = batcher.asked
        validate_request(asked, RequestLimits())
        assert [tool.name for tool in asked.tools] == ["f"] and asked.tool_choice == "auto"
        assert asked.response_format is not None and asked.response_format.schema == COLOUR


def test_an_answer_that_the_caller_has_begun_is_gone_on_with() -> None:
    def goes_on(*messages: dict[str, Any]) -> bool:
        (request,) = read_message({"messages": [*USER, *messages], "max_tokens": 1}).requests
        return request.continue_final_message

    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    assert goes_on({"role": "assistant", "content": "Sure"})
    assert goes_on({"role": "assistant", "content": [{"type": "text", "text": "Sure"}]})
    assert not goes_on()
    assert not goes_on({"role": "assistant", "content": ""}) and not goes_on({"role": "assistant", "content": [call]})
    assert not goes_on({"role": "assistant", "content": "Sure"}, *USER)


# Conversations that are remembered


def test_the_oldest_conversations_give_way_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_REMEMBERED", 3)
    monkeypatch.setattr(responses, "MAX_REMEMBERED_CHARS", 1000)
    known = Conversations()
    for number in range(4):
        known.remember("me", f"r{number}", USER)
    with pytest.raises(Refusal, match="not remembered"):
        known.find("me", "r0")
    assert known.find("me", "r1") == USER
    known.remember("me", "long", [{"role": "user", "content": "x" * 900}])
    assert known.find("me", "long")
    with pytest.raises(Refusal):
        known.find("me", "r1")
    known.remember("me", "longer", [{"role": "user", "content": "x" * 1001}])
    with pytest.raises(Refusal):
        known.find("me", "longer")
    assert known.find("me", "long")
    with pytest.raises(Refusal):
        known.find("somebody else", "long")


def test_thinking_that_is_sent_back_belongs_to_the_answer_that_follows() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    asked = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    told = {"type": "function_call_output", "call_id": "a", "output": "1"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "One."}]}
    turns = read_items([*USER, thought, asked, told, said, thought, *USER])
    assert [turn.get("reasoning_content") for turn in turns] == [None, "hm", None, None, None]
    assert read_items([thought, said])[0]["reasoning_content"] == "hm"
    assert "reasoning_content" not in read_items([{"type": "reasoning", "summary": [], "content": None}, said])[0]


# Gaps


@pytest.mark.trio
@pytest.mark.parametrize("format", FORMATS)
async def test_a_gap_is_written_with_the_marks_that_the_model_has(format: Any) -> None:
    asked = []

    async def count_tokens(model: str, text: str) -> int:
        asked.append(text)
        return 1 if text in format.marks else len(text)

    fill_in = FillIn(count_tokens)
    text = await fill_in.prompt("model", "BEFORE", "AFTER")
    assert sorted(format.marks) == sorted(mark for mark in format.marks if text.count(mark) == 1)
    before, after = text.index("BEFORE"), text.index("AFTER")
    assert (before < after) == (format.parts[0] == "prefix") and text.startswith(format.marks[0])
    looked = len(asked)
    await fill_in.prompt("model", "a", "b")
    assert len(asked) == looked


@pytest.mark.trio
async def test_a_model_without_marks_can_only_continue() -> None:
    async def count_tokens(model: str, text: str) -> int:
        return len(text)

    with pytest.raises(InvalidRequest, match="only continue"):
        await FillIn(count_tokens).prompt("model", "a", "b")


RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "no such file"}


def test_a_tool_that_failed_is_told_to_the_model() -> None:
    for is_error, said in ((True, "Error: no such file"), (False, "no such file")):
        turn = {"role": "user", "content": [RESULT | {"is_error": is_error}]}
        (request,) = read_message({"max_tokens": 1, "messages": [turn]}).requests
        assert request.messages is not None and request.messages[0].content == said


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            MESSAGES,
            {"system": "be brief", "messages": [*USER, {"role": "user", "content": "\ud83d"}]},
            "messages[1].content",
        ),
        (MESSAGES, {"system": "\ud83d", "messages": USER}, "system"),
        (
            MESSAGES,
            {
                "system": "s",
                "messages": [
                    *USER,
                    {"role": "user", "content": [{"type": "text", "text": "x"}, RESULT | {"tool_use_id": "a" * 129}]},
                ],
            },
            "messages[1].content[1].tool_use_id",
        ),
        (
            MESSAGES,
            {
                "messages": [
                    *USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "x"},
                            {"type": "tool_use", "id": "a", "name": "f" * 129, "input": {}},
                        ],
                    },
                ]
            },
            "messages[1].content[1].name",
        ),
        (
            RESPONSES,
            {"instructions": "be brief", "input": [*USER, {"role": "user", "content": "\ud83d"}]},
            "input[1].content",
        ),
        (RESPONSES, {"instructions": "\ud83d", "input": "x"}, "instructions"),
        (RESPONSES, {"instructions": "s", "input": "\ud83d"}, "input"),
        (
            RESPONSES,
            {
                "instructions": "s",
                "input": [*USER, {"type": "function_call", "call_id": "a" * 129, "name": "f", "arguments": "{}"}],
            },
            "input[1].call_id",
        ),
        (
            RESPONSES,
            {
                "instructions": "s",
                "input": [*USER, {"type": "function_call_output", "call_id": "a", "output": "\ud83d"}],
            },
            "input[1].output",
        ),
    ],
)
async def test_a_fault_is_named_by_the_callers_own_index(path: str, body: dict[str, Any], param: str) -> None:
    async with served_http() as served:
        asked = {"max_tokens": 1, **body} if path == MESSAGES else body
        response = await served.client.post(path, content=json.dumps(asked).encode())
        told = response.json()
        assert (response.status_code, told["error"]["param"]) == (400, param), told
