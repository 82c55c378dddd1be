"""The grammar of an answer: what it lets through, and that what it lets through is read as what it is."""

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from genbatch.nif.sampling.grammar import branches, convert, why_unreadable
from genbatch.nif.text.answer_grammar import Calls, _closed, answer_grammar, forced_format, readable_schema
from genbatch.nif.text.tools import FORMATS, HERMES, THINK, THINKING_TAGS, AnswerReader, ThinkingTags, ToolFormat
from tests.nif.text.test_tools import FORMAT, take_apart

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# A format whose answers look like calls: with a name, and with what a call of "f" has beside it.
NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"$ref": "#/$defs/number"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
THINKING = "<think>A <tool_call> or not?\n</think>\n\n"


def accepts(grammar: str, text: str, answer: tuple[str, str] | None = None) -> bool:
    converted = convert("lark", grammar) if answer is None else convert("branches", branches(grammar, *answer))
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, converted)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def calls_of(format: ToolFormat, **options: Any) -> Calls:
    return Calls(**{"format": format, "tools": [{"name": "f", "parameters": WEATHER}], "several": True, **options})


def grammar_for(calls: Calls | None, *, has_format: bool = False, thinks: bool = False) -> str:
    thinking = THINK if thinks else None
    return answer_grammar(calls, lambda mark: None, has_format=has_format, thinking=thinking)


def written_in(format: ToolFormat, arguments: str = '{"city": "</tool_call>]"}') -> str:
    """A call of "f" in this format."""
    call = f'{{"{format.name_key}": "f", "{format.key}": {arguments}}}'
    return {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "mistral": f"[TOOL_CALLS][{call}]",
        "mistral-args": f"[TOOL_CALLS]f[ARGS]{arguments}",
        "nemotron": f"<TOOLCALL>[{call}]</TOOLCALL>",
        "llama3": call,
        "cohere": f"<|START_ACTION|>[{call}]<|END_ACTION|>",
        "hunyuan": f"<tool_calls>[{call}]</tool_calls>",
        "phi4": f"<|tool_call|>[{call}]<|/tool_call|>",
        "granite": f"<|tool_call|>[{call}]",
        "kimi": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    }[format.name]


HELD = {format.name: format for format in map(forced_format, FORMATS)}.values()


@pytest.mark.parametrize("format", HELD, ids=lambda format: format.name)
@pytest.mark.parametrize("several", [False, True])
def test_what_a_grammar_lets_through_is_read_as_calls(format: ToolFormat, several: bool) -> None:
    grammar = grammar_for(calls_of(format, forced=True, several=several))
    written = written_in(format)
    assert accepts(grammar, written)
    assert not accepts(grammar, "Hello") and not accepts(grammar, written.replace("city", "town"))
    assert [name for name, _ in take_apart(AnswerReader(format), [written])[2]] == ["f"]
    if format.name == "hermes":
        assert accepts(grammar, f"{written}\n{written}") == several
    if format.name == "kimi":
        call = written.removeprefix(format.opens[0]).removesuffix(format.closes)
        assert accepts(grammar, format.opens[0] + call + call.replace(":0", ":1") + format.closes) == several


@pytest.mark.parametrize("format", [HERMES, FORMAT["mistral-args"], FORMAT["llama3"]], ids=lambda format: format.name)
def test_strict_lets_any_text_through_and_only_calls_that_validate(format: ToolFormat) -> None:
    grammar = grammar_for(calls_of(format))
    opens = format.opens[0]
    assert accepts(grammar, "any { text <tool_ [1]\n")
    good = {
        "hermes": 'So:<tool_call>\n{"name": "f", "arguments": {"city": "x"}}\n</tool_call> and so on',
        "mistral-args": 'So:[TOOL_CALLS]f[ARGS]{"city": "x"}',
        "llama3": 'So:<|python_tag|>{"name": "f", "parameters": {"city": "x"}}',
    }[format.name]
    assert opens in good and accepts(grammar, good)
    assert not accepts(grammar, good.replace('"x"', "1")) and not accepts(grammar, f"{opens} nothing")


@pytest.mark.parametrize("format", HELD, ids=lambda format: format.name)
@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_is_calls_or_matches_its_format_and_is_read_as_that(format: ToolFormat, thinks: bool) -> None:
    calls = calls_of(format)
    grammar = grammar_for(calls, has_format=True, thinks=thinks)
    answer = "json_schema", json.dumps(NAMED)

    def read(text: str) -> tuple[str, str, list[tuple[str, str]]]:
        for pieces in ([text], list(text)):
            reader = AnswerReader(format, thinking=THINK if thinks else None, begins=calls.beginnings)
            said, reasoning, found = take_apart(reader, pieces)
            assert "".join(pieces) == text
        return said, reasoning, found

    for begun in ("", THINKING) if thinks else ("",):
        written = written_in(format)
        assert accepts(grammar, begun + written, answer)
        assert [name for name, _ in read(begun + written)[2]] == ["f"]
        for said in ('{"name": "red"}', '{"name": "f"}', '{"name": "f", "parameters": 1}', '{"name": "<tool_call>"}'):
            assert accepts(grammar, begun + said, answer), said
            assert read(begun + said)[::2] == (said, [])
        for wrong in ("So", "[]", "{}", written.replace("city", "town"), f"{written}{{}}", f'{{"name": "x"}}{written}'):
            assert not accepts(grammar, begun + wrong, answer), wrong
    assert thinks or not accepts(grammar, THINKING + written_in(format), answer)


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (("regex", "[0-9]{4}"), "1945", "194"),
        (("grammar", 'root ::= "yes" | call\ncall ::= "no" call | "!"'), "nono!", "yes!"),
        (("grammar", 'start: thinking | "b"\nthinking: "a" thinking | "!"'), "aa!", "bb"),
        (("json_schema", '{"type": "object"}'), '{"a": [1, {}]}', "[1]"),
    ],
    ids=["regex", "gbnf", "lark with our names", "json_object"],
)
def test_every_kind_of_format_may_stand_beside_calls_and_behind_thinking(
    answer: tuple[str, str], good: str, bad: str
) -> None:
    call = written_in(HERMES)
    for calls in (calls_of(HERMES), None):
        grammar = grammar_for(calls, has_format=True, thinks=True)
        for begun in ("", THINKING, "<think></think>"):
            assert accepts(grammar, begun + good, answer) and not accepts(grammar, begun + bad, answer)
            assert accepts(grammar, begun + call, answer) == (calls is not None)


def test_calls_that_are_forced_may_be_thought_about_first() -> None:
    grammar = grammar_for(calls_of(HERMES, forced=True), thinks=True)
    assert accepts(grammar, THINKING + written_in(HERMES)) and accepts(grammar, written_in(HERMES))
    assert not accepts(grammar, THINKING) and not accepts(grammar, THINKING + "So")


@pytest.mark.parametrize("name", ["gemma", "lfm2", "qwen-xml"])
def test_free_calls_are_opened_by_a_mark_and_text_matches_its_format(name: str) -> None:
    calls = calls_of(FORMAT[name], free=True)
    grammar = grammar_for(calls, has_format=True)
    answer = "json_schema", '{"type": "array"}'
    written = {
        "gemma": "<start_function_call>call:f{city:<escape>x<escape>}<end_function_call>",
        "lfm2": "<|tool_call_start|>[f(city='x')]<|tool_call_end|>",
        "qwen-xml": "<tool_call>\n<function=f>\n<parameter=city>\nx\n</parameter>\n</function>\n</tool_call>",
    }[name]
    assert accepts(grammar, written, answer) and accepts(grammar, "[1, 2]", answer)
    assert not accepts(grammar, "So " + written, answer)
    reader = AnswerReader(FORMAT[name], begins=calls.beginnings)
    assert take_apart(reader, list(written))[2] == [("f", '{"city": "x"}')]
    assert take_apart(AnswerReader(FORMAT[name], begins=calls.beginnings), ["[1,", " 2]"])[::2] == ("[1, 2]", [])


@pytest.mark.parametrize("key", ["anyOf", "items", "properties"])
def test_a_schema_is_closed_so_deep_and_no_deeper(key: str) -> None:
    wrapped = {"anyOf": lambda inner: [inner], "items": lambda inner: inner, "properties": lambda inner: {"a": inner}}
    schema: dict[str, Any] = {"properties": {"end": {}}}
    for _ in range(100):
        schema = {key: wrapped[key](schema)}
    closed, depth = _closed(schema), 0
    while key in closed and "end" not in closed.get("properties", {}):
        closed, depth = closed[key], depth + 1
        closed = closed[0] if key == "anyOf" else closed["a"] if key == "properties" else closed
    assert depth == 100 and "additionalProperties" not in closed
    shallow = {key: wrapped[key]({"properties": {"end": {}}})}
    assert '"additionalProperties": false' in json.dumps(_closed(shallow))


def test_schemas_of_pydantic_and_zod_are_read_and_what_fits_the_grammar_is_valid() -> None:
    # The properties "kind" have a default, so that pydantic does not list them in `required`.
    branches_of_pets: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind, "default": kind}, mark: {"type": "integer"}},
            "required": [mark],
        }
        for kind, mark in (("cat", "lives"), ("dog", "bones"))
    ]
    schema: dict[str, Any] = {
        "$defs": dict(zip(("Cat", "Dog"), branches_of_pets, strict=True)),
        "properties": {
            "pet": {
                "discriminator": {"propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            },
            "data": {"type": "string", "format": "binary"},
            "format": {"const": {"format": "binary"}},
            "ages": {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        },
        "required": ["pet"],
        "type": "object",
    }
    valid = '{"pet": {"kind": "dog", "bones": 2}, "data": "b", "format": {"format": "binary"}, "ages": {"a": 1}}'
    grammar, answer = grammar_for(None, has_format=True), ("json_schema", json.dumps(schema))
    for text in (valid, '{"pet": {"kind": "cat", "lives": 9, "bones": 1}}'):
        assert accepts(grammar, text, answer)
        jsonschema.validate(json.loads(text), schema)
    both = '{"pet": {"lives": 9, "bones": 1}}'
    assert not accepts(grammar, both, answer)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(both), schema)

    strict = calls_of(HERMES, tools=[{"name": "f", "parameters": schema, "strict": True}], forced=True)
    assert accepts(grammar_for(strict), written_in(HERMES, '{"pet": {"kind": "dog", "bones": 2}}'))
    # JSON Schema defines this format, and llguidance does not know it.
    assert "idn-email" in why_unreadable("json_schema", '{"type": "string", "format": "idn-email"}')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # pydantic's Decimal, and those with max_digits and decimal_places
        ({"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, "0 -1.50 +.5 12.", "- . 1.5.2 1e5 x"),
        (
            {"pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"},
            "0 -123.45 +.5 007.10",
            "- . 1234 1.234 x",
        ),
        (
            {"pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)"},
            "0 123 12.3 .123 001",
            "1234 12.34 . x",
        ),
        ({"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"}, "1.25 10", "- 1.256 x"),
        ({"format": "date"}, "2024-02-29 2000-02-29 1900-02-28", "2023-02-29 1900-02-29 2023-04-31 0000-01-01"),
        ({"format": "time"}, "23:59:59Z 00:00:00+01:00", "23:59:60Z 12:00:60+01:00 24:00:00Z"),
        (
            {"format": "date-time", "allOf": [{"pattern": "^2"}]},
            "2024-02-29T00:00:00Z 2023-01-31T23:59:59.5+02:00",
            "2023-02-29T00:00:00Z 2016-12-31T23:59:60Z 1999-01-01T00:00:00Z",
        ),
        (
            {"format": "uuid4"},
            "f47ac10b-58cc-4372-a567-0e02b2c3d479",
            "f47ac10b-58cc-1372-a567-0e02b2c3d479 f47ac10b-58cc-4372-1567-0e02b2c3d479 x",
        ),
    ],
    ids=["decimal", "digits and places", "digits", "places", "date", "time", "date-time", "uuid4"],
)  # fmt: skip
def test_texts_of_pydantics_types_are_read_and_no_text_that_python_would_refuse(
    schema: dict[str, Any], good: str, bad: str
) -> None:
    grammar, answer = grammar_for(None, has_format=True), ("json_schema", json.dumps({"type": "string", **schema}))
    for text in good.split():
        assert accepts(grammar, json.dumps(text), answer), text
        jsonschema.validate(text, schema)
    for text in bad.split():
        assert not accepts(grammar, json.dumps(text), answer), text


@pytest.mark.parametrize(
    "names", [{"enum": ["a", "b", 1]}, {"type": "string", "pattern": "^[ab]$"}, {"$ref": "#/$defs/names"}]
)
def test_the_names_of_a_record_are_those_that_the_schema_allows(names: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "integer"},
        "$defs": {"names": {"enum": ["a", "b"], "title": "Names", "type": "string"}},
    }
    grammar, answer = grammar_for(None, has_format=True), ("json_schema", json.dumps(schema))
    for text in ('{"a": 1, "b": 2}', '{"b": 2}', "{}"):
        assert accepts(grammar, text, answer)
        jsonschema.validate(json.loads(text), schema)
    for text in ('{"c": 1}', '{"a": "x"}', '{"ab": 1}'):
        assert not accepts(grammar, text, answer)


@pytest.mark.parametrize("names", [{"$ref": "#/$defs/none"}, {"$ref": "#"}, {"format": "uuid"}, {"type": "integer"}, 5])
def test_names_of_a_record_that_cannot_be_described_are_refused(names: object) -> None:
    schema = {"type": "object", "propertyNames": names, "$defs": {}}
    refusal = why_unreadable("json_schema", json.dumps(schema))
    assert 'keywords are not supported: ["propertyNames"]' in refusal


@pytest.mark.parametrize("required", [None, 5, {"a": 1}])
def test_a_schema_with_damaged_parts_is_left_to_llguidance(required: object) -> None:
    damaged = {
        "oneOf": [5],
        "discriminator": {"propertyName": "kind"},
        "required": required,
        "properties": [],
        "format": 1,
    }
    assert readable_schema(damaged) == damaged


@pytest.mark.parametrize("tags", THINKING_TAGS, ids=lambda tags: tags.opens)
def test_thinking_in_any_known_tags_comes_before_an_answer_in_its_format(tags: ThinkingTags) -> None:
    grammar = answer_grammar(None, lambda mark: None, has_format=True, thinking=tags)
    answer = "json_schema", json.dumps(NAMED)
    for begun in (f"{tags.opens}\n{{hm}}{tags.ending}", ""):
        assert accepts(grammar, begun + '{"name": "x"}', answer)
    assert not accepts(grammar, f'{tags.opens}hm{{"name": "x"}}', answer)


def test_a_tag_of_a_special_token_and_text_is_written_as_both() -> None:
    tags = next(tags for tags in THINKING_TAGS if tags.opens == "<|channel>thought")
    ids = {"<|channel>": 100, "<channel|>": 101}
    grammar = answer_grammar(None, ids.get, has_format=True, thinking=tags)
    assert 'thinking: <[100]> "thought" thought' in grammar and "thought: TEXT <[101]>" in grammar
