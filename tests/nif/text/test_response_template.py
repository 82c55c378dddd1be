"""Answers read by a tokenizer's own response template: the same as transformers' parse, however the text is cut."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from genbatch.nif.text.response_template import GEMMA_4, HARMONY, TemplateReader, checked_template, known_template
from genbatch.nif.text.tools import Parts

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]
CALL: dict[str, Any] = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
# As Qwen 3 and its likes write.
HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True, "transform": CALL,
        },
        "content": {"repeats": True, "join": ""},
    },
}  # fmt: skip
# As gpt-oss writes: names in the mark, no region without one.
CHANNELS: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+)<\|message\|>", "close": "<|call|>",
            "content": "json", "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>", "content_args": {"strip": False}},
    },
}  # fmt: skip
WRITTEN = [
    (HERMES, "<think>\nhm <tool_call>\n</think>\n\nHi < there. \n"),
    (HERMES, 'See.\n<tool_call>\n{"name": "f", "arguments": {"a": "7", "b": "7"}}\n</tool_call>\n'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
     '<tool_call>{"name": "g", "arguments": {"x": [1]}}</tool_call>'),
    (HERMES, "plain"),
    (HERMES, "<think>cut short"),
    (CHANNELS, "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|> Yes. <|return|>"),
    (CHANNELS, '<|channel|>commentary to=functions.f<|message|>{"a": "3"}<|call|>'),
]  # fmt: skip


def read(reader: TemplateReader, pieces: list[str]) -> Parts:
    whole = Parts()
    for parts in [*map(reader.push, pieces), reader.finish()]:
        whole.text += parts.text
        whole.reasoning += parts.reasoning
        whole.calls += parts.calls
    return whole


def prompt_of(template: dict[str, Any]) -> str:
    anchor: str = template["start_anchor"]
    return anchor


@pytest.mark.parametrize(("template", "written"), WRITTEN)
@pytest.mark.parametrize("length", [1, 3, 10_000])
def test_what_is_read_is_what_transformers_parses(template: dict[str, Any], written: str, length: int) -> None:
    expected = parse_response(written, template, prefix=prompt_of(template), tools=TOOLS)
    pieces = [written[place : place + length] for place in range(0, len(written), length)]
    found = read(TemplateReader(template, prompt_of(template), TOOLS), pieces)
    assert found.text == expected.get("content", "")
    assert found.reasoning == expected.get("reasoning_content", expected.get("thinking", ""))
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in found.calls
    ]
    assert calls == expected.get("tool_calls", [])
    assert [call.index for call in found.calls] == list(range(len(calls)))
    assert len({call.id for call in found.calls}) == len(calls)


def test_a_prompt_that_opened_the_thinking_is_gone_on_with() -> None:
    found = read(TemplateReader(HERMES, "<|start|>assistant\n<think>\n", TOOLS), ["so\n</th", "ink>\n\nYes", "."])
    assert (found.text, found.reasoning) == ("Yes.", "so")


def test_text_comes_while_it_is_written() -> None:
    reader = TemplateReader(HERMES, prompt_of(HERMES), TOOLS)
    assert reader.push("Hello <").text == "Hello"
    assert reader.push("b").text == " <b"


@pytest.mark.parametrize("bad", ["no json", '{"name": 7}', "[]", '{"arguments": {}}', "[" * 5000])
@pytest.mark.parametrize("length", [1, 10_000])
def test_a_call_that_cannot_be_read_is_text_and_so_is_what_follows(bad: str, length: int) -> None:
    written = f"Hi <tool_call>{bad}</tool_call> on"
    pieces = [written[place : place + length] for place in range(0, len(written), length)]
    found = read(TemplateReader(HERMES, prompt_of(HERMES), TOOLS), pieces)
    assert (found.text, found.calls) == (written.replace("Hi ", "Hi"), [])


def test_without_tools_a_call_is_text() -> None:
    written = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(TemplateReader(HERMES, prompt_of(HERMES)), list(written)).text == written


WORDS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {}}',
    "x",
    " ",
    "\n",
    "<",
    "{",
)


@given(st.lists(st.sampled_from(WORDS), max_size=20))
@example(["<tool_call>", "x", "</tool_call>", " ", "<", "x"])
def test_however_it_is_cut_the_same_is_found_and_nothing_raises(words: list[str]) -> None:
    written = "".join(words)
    one = read(TemplateReader(HERMES, prompt_of(HERMES), TOOLS), [written])
    other = read(TemplateReader(HERMES, prompt_of(HERMES), TOOLS), list(written))
    assert one.reasoning == other.reasoning
    assert [(call.name, call.arguments) for call in one.calls] == [(call.name, call.arguments) for call in other.calls]
    assert one.text == other.text


@pytest.mark.parametrize(
    "spec", [7, [], {}, {"fields": {}}, {"fields": {"content": {"content": "sql"}}, "start_anchor": "a"},
             {"version": 9, "fields": {"content": {}}, "start_anchor": "a"},
             {"fields": {"content": {"open_pattern": "("}}, "start_anchor": "a"}],
)  # fmt: skip
def test_what_is_no_template_is_said_when_it_is_read(spec: Any) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        checked_template(spec)


def test_most_tokenizers_have_none() -> None:
    assert checked_template(None) is None


# Expressions that try every way to split a run of the letter a. Each is of its own part of a template.
SLOW = "(a|a|aa)+(a|aa)+(a|aa)+!"
TAGS = {"tag_pattern": f"<(?P<key>{SLOW})>(?P<value>.*?)</>"}
TEXT_FIELD: dict[str, Any] = {"repeats": True, "join": ""}
HOSTILE: dict[str, dict[str, Any]] = {
    "open": {"start_anchor": "S", "fields": {"thinking": {"open_pattern": SLOW, "close": "."}, "content": TEXT_FIELD}},
    "close": {"start_anchor": "S", "fields": {"thinking": {"open": "<", "close_pattern": SLOW}, "content": TEXT_FIELD}},
    "anchor": {"start_anchor_pattern": SLOW, "fields": {"content": TEXT_FIELD}},
    "tags": {
        "start_anchor": "S",
        "fields": {
            "tool_calls": {"open": "[", "close": "]", "content": "xml-inline", "content_args": TAGS},
            "content": TEXT_FIELD,
        },
    },
}


@pytest.mark.parametrize("part", HOSTILE)
def test_an_expression_without_an_end_makes_the_rest_of_the_answer_text(part: str) -> None:
    template = checked_template(HOSTILE[part])
    assert template is not None
    run = "a" * 200
    prefix = f"S{run}" if part == "anchor" else "S"
    written = {"tags": f"[<{run}>b</>]", "close": f"<{run}", "anchor": "hi"}.get(part, run)
    reader = TemplateReader(template, prefix=prefix, tools=TOOLS)
    parts = [reader.push(written), reader.push(" more"), reader.finish()]
    text = "".join(part.text + part.reasoning for part in parts)
    assert text.endswith({"tags": f"<{run}>b</>]", "anchor": "hi"}.get(part, run) + " more"), "nothing is lost"
    assert not any(part.calls for part in parts)


@pytest.mark.parametrize("pattern", ["((a{60000}){60000}){60000}", "a{9999999999}", "(a{400,}){400}"])
def test_an_expression_that_never_compiles_is_refused(pattern: str) -> None:
    template = {"start_anchor": "S", "fields": {"content": {"open_pattern": pattern, "close": "."}}}
    with pytest.raises(ValueError, match="repeats multiply"):
        checked_template(template)
    assert checked_template({**template, "start_anchor": "a{60000}{60000}", "fields": {"content": {}}})


NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>hm{NEXT}"
ARGUMENTS = '{"a": 3}'


@pytest.mark.parametrize("length", [1, 3, 10_000])
@pytest.mark.parametrize(
    ("written", "text", "reasoning", "called"),
    [
        (f"{THOUGHT}<|channel|>final<|message|> Yes.<|return|>", " Yes.", "hm", False),
        (f"{THOUGHT}<|channel|>final<|message|>cut short", "cut short", "hm", False),
        (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>Yes.", "Yes.", "hmhm", False),
        (f"<|channel|>final <|constrain|>json<|message|>{ARGUMENTS}<|return|>", ARGUMENTS, "", False),
        (
            f"{THOUGHT}<|channel|>commentary<|message|>I look.{NEXT}"
            f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            "I look.",
            "hm",
            True,
        ),
        (f"{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}", "", "hm", True),
        ("without a channel", "without a channel", "", False),
    ],
)
def test_harmonys_channels_are_thinking_text_and_calls(
    written: str, text: str, reasoning: str, called: bool, length: int
) -> None:
    pieces = [written[place : place + length] for place in range(0, len(written), length)]
    found = read(TemplateReader(HARMONY, "<|start|>assistant", TOOLS), pieces)
    assert (found.text, found.reasoning) == (text, reasoning)
    assert [(call.name, call.arguments) for call in found.calls] == ([("f", ARGUMENTS)] if called else [])


def test_harmony_is_known_by_the_marks_of_its_chat_template() -> None:
    checked_template(HARMONY)
    marks = "<|start|>assistant<|channel|>analysis<|message|> <|start|>assistant<|channel|>final<|message|>"
    assert known_template(f"{{{{ '{marks}' }}}}") is HARMONY
    assert known_template("<|start|>assistant<think></think>") is None


@pytest.mark.parametrize("length", [1, 3, 10_000])
def test_the_channels_of_gemma_4_are_thinking_text_and_calls(length: int) -> None:
    checked_template(GEMMA_4)
    written = '<|channel>thought\nhm<channel|>I look.<|tool_call>call:f{a:<|"|>x, y<|"|>}<tool_call|><|tool_response>'
    pieces = [written[place : place + length] for place in range(0, len(written), length)]
    found = read(TemplateReader(GEMMA_4, "<|turn>model\n", TOOLS), pieces)
    assert (found.text, found.reasoning) == ("I look.", "hm")
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("f", {"a": "x, y"})]
    closed = read(TemplateReader(GEMMA_4, "<|turn>model\n<|channel>thought\n<channel|>", TOOLS), ["Yes.<turn|>"])
    assert (closed.text, closed.reasoning) == ("Yes.", "")


def test_gemma_4_is_known_by_the_marks_of_its_chat_template() -> None:
    marks = "<|turn>model <|channel>thought <channel|> <|tool_call>call:"
    assert known_template(f"{{{{ '{marks}' }}}}") is GEMMA_4
    assert known_template(marks.replace("<|tool_call>", "")) is None
