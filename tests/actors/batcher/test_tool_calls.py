"""Tool calls over a tiny random model: in this program, over the wire and from the engine's process."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import trio

from genbatch.clients import ZeroMQClient, open_batcher
from genbatch.proto.errors import InvalidRequest
from tests.actors.gateways.scripted_batcher import PATIENCE_S
from tests.tool_models import tool_model

USER = {"role": "user", "content": "Well?"}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", "f"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
# A name that is a keyword of Python and of JSON Schema's and the grammar's languages alike.
KEYWORD: dict[str, Any] = {"name": "class", "parameters": {"type": "object", "properties": {"start": {"const": "}}"}},
                           "required": ["start"], "additionalProperties": False}}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tool_model(tiny_model_dir("llama"), tmp_path_factory.mktemp("tools") / "model")


@asynccontextmanager
async def running(model: Path, **options: Any) -> AsyncIterator[Any]:
    with trio.fail_after(PATIENCE_S):
        async with open_batcher(str(model), dtype="float32", n_gpu_layers=0, n_ctx=2048, **options) as batcher:
            yield batcher


def check(call: Any, tool: dict[str, Any]) -> None:
    assert call.name == tool["name"]
    jsonschema.validate(json.loads(call.arguments), tool["parameters"])


@pytest.mark.trio
async def test_a_random_models_forced_calls_parse_and_validate(model: Path) -> None:
    async with running(model) as batcher:
        for seed in range(3):
            params: Any = {"messages": [USER], "temperature": 1.5, "seed": seed, "max_tokens": 900}
            result = await batcher.generate(tools=[WEATHER, KEYWORD], tool_choice="required", **params)
            assert result.finish_reason == "tool_calls" and result.text == "" and 1 <= len(result.tool_calls) <= 8
            for call in result.tool_calls:
                check(call, WEATHER if call.name == "get_weather" else KEYWORD)
            assert len({call.id for call in result.tool_calls}) == len(result.tool_calls)
            named = await batcher.generate(tools=[WEATHER, KEYWORD], tool_choice={"name": "class"}, **params)
            (call,) = named.tool_calls
            check(call, KEYWORD)
            alone = await batcher.generate(
                tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, n=2, **params
            )
            assert [len(choice.tool_calls) for choice in alone.choices] == [1, 1]


@pytest.mark.trio
async def test_a_stream_has_the_same_calls_in_pieces_and_text_without_tools_is_as_ever(model: Path) -> None:
    async with running(model) as batcher:
        pieces: list[Any] = []
        params: Any = {"messages": [USER], "tools": [WEATHER], "max_tokens": 200, "temperature": 1.0, "seed": 4}
        async with batcher.stream(tool_choice={"name": "get_weather"}, **params) as stream:
            async for token in stream:
                pieces += token.tool_calls
                assert token.text == ""
        (call,) = stream.result.tool_calls
        assert (pieces[0].id, pieces[0].name, pieces[0].arguments) == (call.id, "get_weather", "")
        assert len(pieces) > 3 and "".join(piece.arguments for piece in pieces) == call.arguments
        free = await batcher.generate(messages=[USER], tools=[WEATHER], tool_choice="none", max_tokens=12)
        plain = await batcher.generate(messages=[USER], max_tokens=12)
        assert (free.text, free.token_ids) == (plain.text, plain.token_ids)


@pytest.mark.trio
async def test_the_same_over_the_wire_from_the_engines_process(model: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/zeromq.sock"
    async with running(model, engine="process", bind=address), ZeroMQClient(address) as client:
        params: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        async with client.stream(messages=[USER], **params) as stream:
            pieces = [piece async for token in stream for piece in token.tool_calls]
        (call,) = stream.result.tool_calls
        check(call, WEATHER)
        assert "".join(piece.arguments for piece in pieces) == call.arguments
        asked = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.id, "name": call.name, "arguments": call.arguments}],
        }
        answered = {"role": "tool", "content": "sunny", "tool_call_id": call.id}
        result = await client.generate(messages=[USER, asked, answered], tools=[WEATHER], max_tokens=4)
        assert result.usage.completion_tokens == 4


@pytest.mark.trio
@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}, {"name": "f"}]}, "tools[1].name"),
        ({"tools": [{"name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tools": [WEATHER], "tool_choice": {"name": "other"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [WEATHER], "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "messages"),
        ({"chat_template_kwargs": {"tokenize": True}}, "messages"),
        (
            {"tool_choice": "required", "tools": [{"name": "f", "strict": True, "parameters": {"type": "object",
             "properties": {"x": {"type": "integer", "multipleOf": 999983}}, "required": ["x"]}}]},
            "tools",
        ),
        (
            {"tool_choice": "required", "tools": [{"name": "f", "parameters": {"$ref": "#/nowhere"}}]},
            "tools",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_offered_is_refused_by_name(model: Path, params: dict[str, Any], field: str) -> None:
    async with running(model) as batcher:
        with pytest.raises(InvalidRequest) as caught:
            await batcher.generate(messages=[USER], max_tokens=2, **params)
        assert caught.value.field == field
