"""Answers that come at once, in the words of each door."""

from typing import Any

import pytest

from genbatch.actors.gateways.http.anthropic import MessageAnswer, read_message
from genbatch.actors.gateways.http.responses import output_items
from genbatch.proto.messages import Result, ToolCall, Usage

USAGE = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=3)


def result(**fields: Any) -> Result:
    return Result(**{"text": "", "token_ids": [1], "finish_reason": "stop", "usage": USAGE, **fields})


def calls(*arguments: str) -> list[ToolCall]:
    return [ToolCall(id=f"c{index}", name="f", arguments=text) for index, text in enumerate(arguments)]


async def message(answered: Result) -> dict[str, Any]:
    asked = read_message({"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "x"}]})
    return await MessageAnswer(asked, "m").body([answered])


@pytest.mark.trio
async def test_a_message_has_a_block_for_each_thing_that_was_said() -> None:
    said = await message(result(reasoning="hm", text="so", tool_calls=calls('{"a": 1}', "{")))
    assert said["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"_invalid": "{"}},
    ]
    assert (said["usage"]["input_tokens"], said["usage"]["cache_read_input_tokens"]) == (6, 3)


@pytest.mark.trio
async def test_a_message_that_says_nothing_has_one_empty_text_and_one_of_calls_has_none() -> None:
    assert (await message(result()))["content"] == [{"type": "text", "text": ""}]
    (only,) = (await message(result(tool_calls=calls("{}"))))["content"]
    assert only["type"] == "tool_use"


@pytest.mark.trio
async def test_a_message_says_at_which_stop_string_it_ended() -> None:
    said = await message(result(stop_string="END"))
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "END")
    said = await message(result())
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)


def test_a_response_has_an_item_for_each_thing_that_was_said() -> None:
    items = output_items(result(reasoning="hm", text="so", tool_calls=calls('{"a": 1}', "{}")))
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["arguments"] for item in items[2:]] == ['{"a": 1}', "{}"]
    assert items[1]["content"][0]["text"] == "so"
