"""What models write about calls and thinking, taken apart however it is cut into pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.text.tokenizer import plain_conversation
from genbatch.nif.text.tools import (
    FORMATS,
    HERMES,
    MAX_HELD,
    THINK,
    THINKING_TAGS,
    AnswerReader,
    ThinkingTags,
    thinking_tags,
    tool_format,
)

FORMAT = {format.name: format for format in FORMATS}


def _wide(text: str) -> str:
    """The text with DeepSeek's wide bars."""
    return text.replace("|", "\uff5c")


TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
# format, what the model writes, text, thinking, calls
CASES: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '   plain {"text": 1}\n', '   plain {"text": 1}\n', "", []),
    (
        "hermes",
        'See. \n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>}\\""}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"b": [1]}, "name": "g"}\n</tool_call>\n',
        "See.",
        "",
        [("f", {"a": '</tool_call>}"'}), ("g", {"b": [1]})],
    ),
    ("hermes", "<think>\nhm <tool_call>\n</think>\n\nHi < <tool_cal> x ", "Hi < <tool_cal> x ", "hm <tool_call>", []),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]</tool_call>', "", "",
     [("f", {}), ("f", {})]),
    ("hermes", "<tool_call>no call</tool_call> on", "<tool_call>no call</tool_call> on", "", []),
    ("hermes", '<tool_call>{"name": "class", "arguments": {"def": null}}', "", "", [("class", {"def": None})]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]', "", "",
     [("f", {"a": "x"}), ("g", {})]),
    ("mistral-args", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", "", [("f", {"a": 1}), ("g", {})]),
    ("llama3", '{"name": "f", "parameters": {"a": "1"}}', "", "", [("f", {"a": "1"})]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", "",
     [("f", {}), ("g", {})]),
    ("llama3", '{"not": "a call"}', '{"not": "a call"}', "", []),
    (
        "qwen-xml",
        "ok\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n12\n</parameter>\n"
        "</function>\n</tool_call>",
        "ok", "", [("f", {"a": "12", "b": 12})],
    ),
    ("glm", "ok\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n<arg_key>b</arg_key>\n"
     "<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>f</tool_call>", "ok", "",
     [("f", {"a": "12", "b": [1, 2]}), ("f", {})]),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value><arg_key>b</arg_key><arg_value>true</arg_value>"
     "</tool_call>", "", "", [("f", {"a": "x", "b": True})]),
    ("glm", "<tool_call>no call</tool_call> on", "<tool_call>no call</tool_call> on", "", []),
    ("seed", "<seed:tool_call>\n<function=f>\n<parameter=a>12</parameter>\n<parameter=b>12</parameter>\n</function>\n"
     "</seed:tool_call>", "", "", [("f", {"a": "12", "b": 12})]),
    ("minimax", 'ok\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x <b</parameter>\n'
     '<parameter name="b">{"c": 1}</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
     "ok", "", [("f", {"a": "x <b", "b": {"c": 1}}), ("g", {})]),
    ("deepseek", _wide("Two:<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>f\n```json\n" '{"a": "}`"}'
     "\n```<|tool▁call▁end|>\n<|tool▁call▁begin|>function<|tool▁sep|>g\n```json\n{}\n```<|tool▁call▁end|>"
     "<|tool▁calls▁end|>"), "Two:", "", [("f", {"a": "}`"}), ("g", {})]),
    ("deepseek", _wide('<|tool▁calls▁begin|><|tool▁call▁begin|>f<|tool▁sep|>{"a": 1}<|tool▁call▁end|>'
     "<|tool▁call▁begin|>g<|tool▁sep|>{}<|tool▁call▁end|><|tool▁calls▁end|>"), "", "", [("f", {"a": 1}), ("g", {})]),
    ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "]"}},\n'
     '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>', "", "",
     [("f", {"a": "]"}), ("g", {})]),
    ("cohere", '<|START_ACTION|>{"parameters": {"a": 1}, "tool_name": "f"}<|END_ACTION|>', "", "", [("f", {"a": 1})]),
    ("apertus", 'ok<|tools_prefix|>[{"f": {"a": "x"}}, {"g": {}}]<|tools_suffix|>', "ok", "",
     [("f", {"a": "x"}), ("g", {})]),
    ("apertus", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>', '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>', "", []),
    ("hunyuan", '<tool_calls>[{"name": "f", "arguments": {"a": "x"}}]</tool_calls>', "", "", [("f", {"a": "x"})]),
    ("phi4", '<|tool_call|>[{"name": "f", "arguments": {"a": "x"}}]<|/tool_call|>', "", "", [("f", {"a": "x"})]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", "",
     [("f", {}), ("g", {})]),
    ("pythonic", '[f(a="x", b=[1, 2]), m.g()]', "", "", [("f", {"a": "x", "b": [1, 2]}), ("m.g", {})]),
    ("pythonic", "[1, 2]", "[1, 2]", "", []),
    ("lfm2", '<|tool_call_start|>[f(a="x")]<|tool_call_end|>Done.', "Done.", "", [("f", {"a": "x"})]),
    ("lfm2", "<|tool_call_start|>[f(__import__('os'))]<|tool_call_end|>",
     "<|tool_call_start|>[f(__import__('os'))]<|tool_call_end|>", "", []),
    ("kimi", 'Two:<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{"a": "}"}'
     '<|tool_call_end|><|tool_call_begin|>functions.m-1.g:4 <|tool_call_argument_begin|> {}<|tool_call_end|>'
     '<|tool_calls_section_end|>', "Two:", "", [("f", {"a": "}"}), ("m-1.g", {})]),
    ("kimi", '<|tool_call_begin|>f<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', "", "", [("f", {"a": 1})]),
    ("kimi", "<|tool_calls_section_begin|>none<|tool_calls_section_end|> on",
     "<|tool_calls_section_begin|>none<|tool_calls_section_end|> on", "", []),
    ("gemma", "<start_function_call>call:f{a:<escape>x,}<escape>,b:{c:1,d:[true,<escape>y<escape>]}}"
     "<end_function_call>", "", "", [("f", {"a": "x,}", "b": {"c": 1, "d": [True, "y"]}})]),
]  # fmt: skip


def take_apart(reader: AnswerReader, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    text = reasoning = ""
    calls: list[tuple[str, str]] = []
    for parts in [*map(reader.push, pieces), reader.finish()]:
        text += parts.text
        reasoning += parts.reasoning
        for piece in parts.calls:
            if piece.id is not None:
                assert piece.index == len(calls)
                assert (piece.id.isalnum() and len(piece.id) == 9) or piece.id.split(":")[0].endswith(piece.name or "")
                calls.append((piece.name or "", ""))
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    return text, reasoning, calls


@pytest.mark.parametrize(("format", "written", "text", "reasoning", "calls"), CASES)
@pytest.mark.parametrize("length", [1, 3, 10_000])
def test_calls_are_found_however_the_text_is_cut(
    format: str, written: str, text: str, reasoning: str, calls: list[tuple[str, Any]], length: int
) -> None:
    reader = AnswerReader(FORMAT[format], TOOLS, thinking=THINK)
    pieces = [written[place : place + length] for place in range(0, len(written), length)]
    found = take_apart(reader, pieces)
    assert (found[0], found[1]) == (text, reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in found[2]] == calls


WORDS = (
    *(
        [
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|python_tag|>",
            "<function=f>",
            "<think>",
            "</think>",
            "<escape>",
        ]
    ),
    *(
        [
            "<start_function_call>",
            "<end_function_call>",
            "{",
            "}",
            "[",
            "]",
            "(",
            ":",
            ",",
            "f",
            "x",
            '"',
            "call:f",
            "parameters",
            "\\",
        ]
    ),
    *('"name": "f"', ', "arguments": ', " ", "\n"),
)


@given(format=st.sampled_from(FORMATS), words=st.lists(st.sampled_from(WORDS), max_size=30))
def test_however_it_is_cut_the_same_is_found_and_nothing_raises(format: Any, words: list[str]) -> None:
    whole = take_apart(AnswerReader(format, TOOLS, thinking=THINK), ["".join(words)])
    letters = take_apart(AnswerReader(format, TOOLS, thinking=THINK), list("".join(words)))
    assert whole[1:] == letters[1:] and whole[0] == letters[0]


def test_arguments_come_while_they_are_written_and_text_is_never_held_for_long() -> None:
    reader = AnswerReader(HERMES, TOOLS)
    assert reader.push("Hello").text == "Hello"
    reader.push('<tool_call>{"name": "f", "arguments": {"a": "')
    assert [piece.arguments for piece in reader.push("Par").calls] == ["Par"]
    assert [piece.arguments for piece in reader.push('is"').calls] == ['is"']


def test_a_call_that_never_ends_is_text_in_the_end() -> None:
    reader = AnswerReader(FORMAT["pythonic"], TOOLS)
    text = "[" + "(" * (MAX_HELD + 1)
    assert reader.push(text).text + reader.finish().text == text


@pytest.mark.parametrize("cut", ["<", "\n<tool_", "<tool_call"])
def test_the_beginning_of_a_further_call_that_was_cut_is_no_text(cut: str) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    text, _, calls = take_apart(AnswerReader(HERMES, TOOLS), [call, cut])
    assert (text, len(calls)) == ("", 1)
    assert take_apart(AnswerReader(HERMES, TOOLS), [f"a {cut}"])[0] == f"a {cut}", "without a call it may be text"


def test_a_prompt_that_opened_the_thinking_is_gone_on_with() -> None:
    found = take_apart(AnswerReader(None, thinking=THINK, starts_thinking=True), ["\nso\n</think>\n\nYes", "."])
    assert found == ("Yes.", "so", [])


@pytest.mark.parametrize("tags", THINKING_TAGS, ids=lambda tags: tags.opens)
@pytest.mark.parametrize("length", [1, 2, 5, 10_000])
def test_thinking_in_the_template_s_own_tags_is_separated_from_the_text(tags: ThinkingTags, length: int) -> None:
    template = f"{{{{ '{tags.opens}' }}}} … {{{{ '{tags.closes}' }}}}"
    assert thinking_tags(template) is tags and thinking_tags(template + tags.opens[:-1]) is tags
    assert thinking_tags(f"{{{{ '{tags.opens}' }}}}") is None, "a template that never closes it has another use for it"
    written = f"{tags.opens}\nhm, {tags.opens[0]} so{tags.ending}Yes {tags.closes}."
    for opened in (False, True):
        answer = written.removeprefix(tags.opens) if opened else written
        reader = AnswerReader(HERMES, TOOLS, thinking=tags, starts_thinking=opened)
        pieces = [answer[place : place + length] for place in range(0, len(answer), length)]
        assert take_apart(reader, pieces) == (f"Yes {tags.closes}.", f"hm, {tags.opens[0]} so", [])


def test_kimis_calls_have_the_ids_that_the_model_wrote() -> None:
    written = "".join(
        f"<|tool_call_begin|>functions.f:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for number in (3, 4)
    )
    parts = AnswerReader(FORMAT["kimi"]).push(f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>")
    assert [piece.id for piece in parts.calls if piece.name] == ["functions.f:3", "functions.f:4"]


def test_tags_of_one_model_come_before_those_of_many() -> None:
    assert thinking_tags("<think></think>[THINK][/THINK]") is THINKING_TAGS[0]
    assert thinking_tags("<think></think>") is THINK and thinking_tags("<think>") is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{{ x }}</tool_call>", "hermes"),
        ("<tool_call><function={{ x }}></tool_call>", "qwen-xml"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS][ARGS]", "mistral-args"),
        ('ipython {"name": x, "parameters": y}', "llama3"),
        ("<|tool_call_start|>", "lfm2"),
        ("<start_function_call>", "gemma"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<tool_call>{{ x }}<arg_key>{{ y }}</arg_key>", "glm"),
        ("<seed:tool_call><function={{ x }}>", "seed"),
        ('<minimax:tool_call><invoke name="{{ x }}">', "minimax"),
        ("<\uff5ctool▁calls▁begin\uff5c>", "deepseek"),
        ("<|START_ACTION|>", "cohere"),
        ("<|tools_prefix|>", "apertus"),
        ("<tool_calls>[{{ x }}]</tool_calls>", "hunyuan"),
        ("<|tool_call|><|/tool_call|>", "phi4"),
        ("<|tool_call|>", "granite"),
        ("unheard of", "hermes"),
    ],
)
def test_the_format_is_told_by_the_marks_of_the_template(template: str, name: str) -> None:
    assert tool_format(template).name == name


def test_a_template_without_tools_gets_them_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "{x}"}}}
    turns = plain_conversation(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ],
        [{"type": "function", "function": {"name": "f", "description": "{braces}"}}],
    )
    assert [turn["role"] for turn in turns] == ["system", "assistant", "user"]
    assert turns[0]["content"].startswith("Be brief.\n\n") and "{braces}" in turns[0]["content"]
    assert turns[1]["content"].count("<tool_call>") == 2
    assert turns[2]["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
