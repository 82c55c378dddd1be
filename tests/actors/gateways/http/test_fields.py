"""Which fields of a body are accepted, ignored and refused, and what agents' programs always send."""

import logging
from typing import Any

import pytest
from msgspec import to_builtins

from genbatch.actors.gateways.http.anthropic import read_count, read_message
from genbatch.actors.gateways.http.bodies import HEADER, MAX_NAME_LENGTH, MAX_NAMED, Fields
from genbatch.actors.gateways.http.openai_request import read_chat
from genbatch.actors.gateways.http.responses import Conversations, ResponseAnswer, output_items, read_response
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import Result, ToolCall, Usage
from tests.actors.gateways.http.serving import served_http

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "x"}]
CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
# What Claude Code 2.1 sends with every question, shortened.
CLAUDE_CODE: dict[str, Any] = {
    "model": "model",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "now"}, {"type": "text", "text": "hello", **CACHED}]},
        {"role": "system", "content": "agents"},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cch=00001;"},
        {"type": "text", "text": "You are an agent.", **CACHED},
    ],
    "tools": [
        {"name": "Bash", "description": "runs", "input_schema": SCHEMA, "eager_input_streaming": True, **CACHED},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"name": "Read", "description": "reads", "input_schema": SCHEMA},
    ],
    "metadata": {"user_id": "u"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
# What Codex 0.169 sends, shortened.
CODEX: dict[str, Any] = {
    "model": "model",
    "stream": True,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "You are"}]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "", "strict": False, "parameters": SCHEMA},
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "agents",
            "description": "others",
            "tools": [
                {"type": "function", "name": "wait", "description": "", "strict": False, "parameters": SCHEMA},
                {"type": "function", "name": "exec_command", "description": "", "parameters": SCHEMA},
            ],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto", "effort": "medium"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
}


def test_what_claude_code_always_sends_is_read_and_what_cannot_be_followed_is_named() -> None:
    reader = Fields(strict=True)
    request = read_message(CLAUDE_CODE, reader)
    (asked,) = request.requests
    assert [tool.name for tool in asked.tools] == ["Bash", "Read"]
    assert asked.max_tokens == 32000 and request.stream
    assert asked.cache_ttl_s == 300.0
    turns = to_builtins(asked.messages)
    assert turns == [
        # The header for billing is a line of its own, which the Batcher takes out.
        {
            "role": "system",
            "content": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cch=00001;\nYou are an agent.",
        },
        {"role": "user", "content": "nowhello"},
        {"role": "system", "content": "agents"},
    ]
    assert sorted(reader.ignored) == [
        "context_management",
        "thinking.display",
        "tools[].web_search_20250305",
    ]
    counted = {name: value for name, value in CLAUDE_CODE.items() if name not in ("max_tokens", "stream", "metadata")}
    assert read_count(counted, Fields(strict=True))[1]["messages"] == turns


HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("path", "body", "ttl_s"),
    [
        (MESSAGES, {"cache_control": {"type": "ephemeral"}}, 300.0),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **HOUR}]}]}, 3600.0),
        (
            MESSAGES,
            {"system": [{"type": "text", "text": "x", **CACHED}, {"type": "text", "text": "y", **HOUR}]},
            3600.0,
        ),
        (MESSAGES, {"cache_control": {}}, None),
        (CHAT, {"prompt_cache_retention": "24h"}, 86400.0),
        (CHAT, {"prompt_cache_retention": "in_memory", "messages": [{"role": "user", "content": "x", **HOUR}]}, 3600.0),
        (CHAT, {}, None),
        (RESPONSES, {"prompt_cache_retention": "in-memory"}, 300.0),
    ],
)
def test_a_body_says_how_long_its_prompt_may_come_again(path: str, body: dict[str, Any], ttl_s: float | None) -> None:
    reader = Fields(strict=True)
    if path == RESPONSES:
        request = read_response({"model": "m", "input": "x", **body}, Conversations(), "me", reader)
    else:
        read = read_message if path == MESSAGES else read_chat
        request = read({"model": "m", "max_tokens": 4, "messages": USER, **body}, reader)
    assert request.requests[0].cache_ttl_s == ttl_s and not reader.ignored


@pytest.mark.parametrize("ttl", ["2d", 7, None])
def test_an_unknown_time_to_keep_a_prompt_is_ignored_and_named(ttl: object) -> None:
    reader = Fields(strict=True)
    body = {"model": "m", "max_tokens": 4, "messages": USER, "cache_control": {"type": "ephemeral", "ttl": ttl}}
    assert read_message(body, reader).requests[0].cache_ttl_s is None and reader.ignored == ("cache_control",)


def test_what_codex_always_sends_is_read_and_what_cannot_be_followed_is_named() -> None:
    reader = Fields(strict=True)
    (request,) = read_response(CODEX, Conversations(), "me", reader).requests
    assert [tool.name for tool in request.tools] == ["exec_command", "wait", "agents.exec_command"]
    assert [message.role for message in request.messages or ()] == ["system", "user"]
    named = ["prompt_cache_key", "text.verbosity", "tools[].web_search"]
    assert sorted(reader.ignored) == named


def test_a_function_of_a_namespace_is_called_by_the_names_that_its_caller_gave_it() -> None:
    conversations = Conversations()
    request = read_response(CODEX | {"store": True}, conversations, "me")
    answer = ResponseAnswer(request, "model", conversations, "me")
    names = ("wait", "agents.exec_command", "exec_command")
    calls = tuple(ToolCall(id=f"call{index}", name=name, arguments="{}") for index, name in enumerate(names))
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    result = Result(text="", token_ids=[], finish_reason="tool_calls", usage=usage, tool_calls=calls)
    items = answer._whole(result, output_items(result, request.namespaces))["output"]
    assert [(item.get("namespace"), item["name"]) for item in items] == [
        ("agents", "wait"),
        ("agents", "exec_command"),
        (None, "exec_command"),
    ]
    outputs = [{"type": "function_call_output", "call_id": item["call_id"], "output": "ok"} for item in items]
    sent_back = read_response(CODEX | {"input": [*items, *outputs]}, conversations, "me")
    going_on = read_response(CODEX | {"input": outputs, "previous_response_id": answer.id}, conversations, "me")
    for turns in (sent_back.requests[0].messages, going_on.requests[0].messages):
        (asked,) = [turn for turn in turns or () if turn.tool_calls]
        assert tuple(call.name for call in asked.tool_calls) == names


def test_a_field_that_nobody_published_is_ignored_and_in_strict_mode_refused() -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"temprature": 0}, "temprature"),
        ({"response_format": {"type": "text", "shape": 1}}, "response_format.shape"),
        ({"messages": [USER[0] | {"mood": "good"}]}, "messages[0].mood"),
        ({"messages": [USER[0] | {"content": [{"type": "text", "text": "x", "a": 1}]}]}, "messages[0].content[0].a"),
        ({"tools": [{"type": "function", "function": {"name": "f", "cost": 1}}]}, "tools[0].function.cost"),
    ]  # fmt: skip
    for body, path in bodies:
        reader = Fields()
        assert to_builtins(read_chat({"messages": USER} | body, reader).requests[0].messages) == USER
        assert reader.ignored == (path.replace("[0]", "[]"),)
        with pytest.raises(InvalidRequest) as caught:
            read_chat({"messages": USER} | body, Fields(strict=True))
        assert caught.value.field == path


def test_the_header_is_bounded_and_holds_nothing_that_a_header_cannot() -> None:
    reader = Fields()
    read_chat(
        {"messages": USER, "a\r\nset-cookie: x": 1, "\ud800" * 500: 1} | {f"field{index}": 1 for index in range(99)},
        reader,
    )
    assert len(reader.ignored) == MAX_NAMED
    assert reader.ignored[0] == "a??set-cookie??x" and reader.ignored[1] == "?" * MAX_NAME_LENGTH
    assert Fields().headers == {}


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
async def test_the_response_and_the_debug_log_name_what_is_ignored(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "genbatch")
    async with served_http() as served:
        body = {"prompt": "a b", "max_tokens": 2, "stream": stream, "reasoning_effort": "low", "user": "me", "mood": 1}
        response = await served.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.headers[HEADER] == "reasoning_effort, mood"
        plain = await served.client.post("/v1/completions", json={"prompt": "a", "user": "me", "stream": stream})
        assert HEADER not in plain.headers and plain.headers["x-request-id"]
    (line,) = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert response.headers["x-request-id"] in line and "reasoning_effort, mood" in line


@pytest.mark.trio
async def test_a_strict_service_refuses_what_nobody_published_at_every_endpoint() -> None:
    async with served_http(strict=True) as served:
        for path, body in (
            (CHAT, {"messages": USER}),
            ("/v1/completions", {"prompt": "x"}),
            (RESPONSES, {"input": "x"}),
            (MESSAGES, {"messages": USER, "max_tokens": 1}),
            ("/v1/messages/count_tokens", {"messages": USER}),
            ("/v1/embeddings", {"input": "x"}),
        ):
            response = await served.client.post(path, json=body | {"mood": 1})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "mood"), response.text


@pytest.mark.trio
@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "one"}), ("/detokenize", {"tokens": [1]})])
async def test_texts_follow_the_same_rule_as_answers(path: str, body: dict[str, Any]) -> None:
    odd = body | {"mood": "good"}
    async with served_http() as served:
        response = await served.client.post(path, json=odd)
        assert (response.status_code, response.headers[HEADER]) == (200, "mood")
        plain = await served.client.post(path, json=body)
        assert plain.json() == response.json() and HEADER not in plain.headers
    async with served_http(strict=True) as served:
        assert (await served.client.post(path, json=odd)).json()["error"]["param"] == "mood"
