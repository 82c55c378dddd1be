"""Custom tools: offered as functions, and their calls shown as calls of the tools, whole and streamed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.gateways.http.bodies import Fields
from genbatch.actors.gateways.http.custom_tools import InputReader, arguments_of, input_of
from genbatch.actors.gateways.http.openai_answer import OpenAIAnswer
from genbatch.actors.gateways.http.openai_request import read_chat
from genbatch.actors.gateways.http.responses import Conversations, ResponseAnswer, read_response
from genbatch.actors.gateways.http.service_calls import TokenNames
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, NamedTool, Result, Token, ToolCall, ToolCallDelta, Usage

LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
PATCH = {"name": "apply_patch", "description": "Edits files."}
USER = [{"role": "user", "content": "x"}]
RESPONSE = {"input": "x", "tools": [{"type": "custom", **PATCH}, {"type": "function", "name": "f"}]}
CHAT = {
    "messages": USER,
    "tools": [{"type": "custom", "custom": PATCH}, {"type": "function", "function": {"name": "f"}}],
}
TEXT = '*** Begin Patch\n"😀\\é"\t'
CUSTOM, PLAIN = {"name": "apply_patch", "arguments": json.dumps({"input": TEXT})}, {"name": "f", "arguments": "{}"}


def result(*calls: dict[str, str]) -> Result:
    made = tuple(ToolCall(id=f"call{index}", **call) for index, call in enumerate(calls))
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    return Result(text="", token_ids=[1], finish_reason="tool_calls", usage=usage, tool_calls=made)


def tokens(*calls: dict[str, str]) -> list[Token]:
    """The calls as a stream has them: a piece with the name, and one for each character of the arguments."""
    pieces = []
    for index, call in enumerate(calls):
        pieces.append(ToolCallDelta(index=index, id=f"call{index}", name=call["name"]))
        pieces += [ToolCallDelta(index=index, arguments=character) for character in call["arguments"]]
    return [Token(text="", token_id=1, index=index, tool_calls=(piece,)) for index, piece in enumerate(pieces)]


def first_input(request: GenerateRequest) -> str:
    """The input of the first call of the second turn."""
    assert request.messages is not None
    return input_of(request.messages[1].tool_calls[0].arguments)


def data_of(events: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in events.splitlines() if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


@given(st.text(), st.booleans(), st.data())
def test_an_input_is_read_whole_and_in_pieces_however_it_is_escaped(text: str, as_ascii: bool, data: Any) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=as_ascii)
    place = data.draw(st.integers(0, len(arguments)))
    reader = InputReader()
    assert reader.push(arguments[:place]) + reader.push(arguments[place:]) + reader.finish() == text
    assert input_of(arguments) == text == input_of(arguments_of(text))


@given(st.text(alphabet='a"\\un{}:12dD8cé\n', max_size=40), st.booleans())
def test_pieces_give_what_the_whole_gives_where_a_model_writes_what_it_likes(text: str, has_head: bool) -> None:
    arguments = ('{"input": "' if has_head else "") + text
    reader = InputReader()
    pieces = "".join(map(reader.push, arguments)) + reader.finish()
    assert pieces == input_of(arguments)
    pieces.encode()  # no half of a character is left over
    assert has_head or pieces == text or text.lstrip().startswith("{")


def test_arguments_of_another_form_are_the_input_themselves() -> None:
    assert input_of('{"patch": "x"}') == '{"patch": "x"}'
    assert input_of("") == ""
    assert input_of('{"input": "ab\\u12') == "ab"
    assert input_of(r'{"input": "\q \uzz \ud83dx"}') == r"\q \uzz " + "\N{REPLACEMENT CHARACTER}x"


@pytest.mark.trio
async def test_a_chat_shows_a_call_of_a_custom_tool_whole_and_streamed_alike() -> None:
    request = read_chat(CHAT)
    whole = await OpenAIAnswer(request, "m", TokenNames()).body([result(CUSTOM, PLAIN)])
    calls = whole["choices"][0]["message"]["tool_calls"]
    assert calls == [
        {"id": "call0", "type": "custom", "custom": {"name": "apply_patch", "input": TEXT}},
        {"id": "call1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    ]
    answer = OpenAIAnswer(request, "m", TokenNames())
    events = await answer.events(0, tokens(CUSTOM, PLAIN)) + answer.ending([result(CUSTOM, PLAIN)])
    deltas = [event["choices"][0]["delta"] for event in data_of(events) if event["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert pieces[0] == {"index": 0, "id": "call0", "type": "custom", "custom": {"name": "apply_patch", "input": ""}}
    assert "".join(piece["custom"]["input"] for piece in pieces if piece["index"] == 0) == TEXT
    assert "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == 1) == "{}"
    # The turn is sent back as it came.
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    told = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    (asked,) = read_chat(CHAT | {"messages": [*USER, turn, *told]}).requests
    assert first_input(asked) == TEXT


@pytest.mark.trio
@pytest.mark.parametrize("arguments", [CUSTOM["arguments"], '{"patch": 1}'], ids=["as asked", "another form"])
async def test_a_response_shows_a_call_of_a_custom_tool_whole_and_streamed_alike(arguments: str) -> None:
    conversations, wanted = Conversations(), CUSTOM | {"arguments": arguments}
    request = read_response(RESPONSE, conversations, "me")
    answer = ResponseAnswer(request, "m", conversations, "me")
    whole = (await answer.body([result(wanted, PLAIN)]))["output"]
    said = {"type": "custom_tool_call", "call_id": "call0", "name": "apply_patch", "input": input_of(arguments)}
    assert said.items() <= whole[0].items() and whole[1]["type"] == "function_call"
    answer = ResponseAnswer(request, "m", conversations, "me")
    events = data_of(await answer.events(0, tokens(wanted, PLAIN)) + answer.ending([result(wanted, PLAIN)]))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    streamed = events[-1]["response"]["output"]
    assert [item | {"id": ""} for item in streamed] == [item | {"id": ""} for item in whole]
    (added,) = [event for event in events if event["type"].endswith("added") and event["output_index"] == 0]
    assert (added["item"]["type"], added["item"]["input"]) == ("custom_tool_call", "")
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done["input"] == input_of(arguments) and "" not in deltas
    # The conversation goes on by its id, or with the items as they came.
    told = {"type": "custom_tool_call_output", "call_id": "call0", "output": "ok"}
    going_on = read_response(RESPONSE | {"input": [told], "previous_response_id": answer.id}, conversations, "me")
    sent_back = read_response(RESPONSE | {"input": [*USER, *streamed, told]}, conversations, "me")
    assert going_on.requests[0].messages == sent_back.requests[0].messages
    assert first_input(going_on.requests[0]) == input_of(arguments)


def test_a_custom_tool_is_a_function_with_one_text_and_a_grammar_in_lark_is_named() -> None:
    reader = Fields(strict=True)
    offered = {"type": "custom", "name": "p", "description": "Edits.", "format": LARK}
    (request,) = read_response({"input": "x", "tools": [offered]}, Conversations(), "me", reader).requests
    (tool,) = request.tools
    assert tool.parameters is not None and tool.parameters["required"] == ["input"] and not tool.strict
    assert tool.description == 'Edits.\n\nThe input must match this lark:\nstart: "a"'
    assert reader.ignored == ("tools[].format",)


def test_a_custom_tool_with_a_regular_expression_is_held_to_it() -> None:
    format = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|b"}}
    body = {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "p", "format": format}}]}
    (request,) = read_chat(body | {"tool_choice": {"type": "custom", "custom": {"name": "p"}}}).requests
    (tool,) = request.tools
    assert tool.parameters is not None
    assert (tool.parameters["properties"]["input"]["pattern"], tool.strict) == ("^(?:a|b)$", True)
    assert request.tool_choice == NamedTool(name="p")
    asked = {"input": "x", "tools": [{"type": "custom", "name": "p"}], "tool_choice": {"type": "custom", "name": "p"}}
    assert read_response(asked, Conversations(), "me").requests[0].tool_choice == NamedTool(name="p")


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({"type": "json"}, "format.type"),
        ("text", "format.type"),
        ({"type": "grammar", "syntax": "ebnf"}, "format.syntax"),
        ({"type": "grammar", "syntax": "regex"}, "format.definition"),
        ({"type": "grammar", "grammar": {"syntax": "lark"}}, "format.grammar.definition"),
        ({"type": "grammar", "grammar": 1}, "format.grammar.syntax"),
    ],
)
def test_a_format_that_is_none_is_named(format: object, param: str) -> None:
    tool = {"name": "p", "format": format}
    with pytest.raises(InvalidRequest) as caught:
        read_chat({"messages": USER, "tools": [{"type": "custom", "custom": tool}]})
    assert caught.value.field == f"tools[0].custom.{param}"
    with pytest.raises(InvalidRequest) as caught:
        read_response({"input": "x", "tools": [{"type": "custom", **tool}]}, Conversations(), "me")
    assert caught.value.field == f"tools[0].{param}"
