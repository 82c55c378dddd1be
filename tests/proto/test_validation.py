"""The shape of an answer as a parameter: at most one, of a size that is allowed, and with nothing that defeats it."""

from typing import Any

import pytest

from genbatch.proto.codec import REQUEST_LIMITS, decode, encode, to_generate_request
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, ResponseFormat
from genbatch.proto.validation import Grammar, RequestLimits, check_types, grammar_of, validate_request

SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}


def as_schema(schema: Any) -> ResponseFormat:
    return ResponseFormat(type="json_schema", schema=schema)


@pytest.mark.parametrize(
    ("params", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "regex": "a"}, Grammar("regex", "a", "regex")),
        ({"grammar": "start: A"}, Grammar("grammar", "start: A", "grammar")),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type": "object"}', "response_format")),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            Grammar(
                "json_schema", '{"type": "object", "properties": {"é": {"type": "string"}}}', "response_format.schema"
            ),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": "{}"}},
            Grammar("json_schema", "{}", "response_format.schema"),
        ),
    ],
)
def test_what_an_answer_must_match_travels_and_is_found(params: dict[str, Any], grammar: Grammar | None) -> None:
    request = to_generate_request(decode(encode({"prompt": "x", **params}), REQUEST_LIMITS))
    validate_request(request, RequestLimits())
    assert grammar_of(request) == grammar
    assert to_generate_request(decode(encode(request), REQUEST_LIMITS)) == request


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("params", "field", "message"),
    [
        ({"regex": "a", "grammar": "b"}, "regex", "at most one"),
        ({"regex": "a", "response_format": ResponseFormat(type="json_object")}, "regex", "at most one"),
        ({"regex": ""}, "regex", "is empty"),
        ({"grammar": ""}, "grammar", "is empty"),
        ({"regex": "é" * 40_000}, "regex", "has 80000 bytes; at most 65536 are allowed"),
        ({"grammar": "a" * 65_537}, "grammar", "65537"),
        ({"regex": "\ud800"}, "regex", "Unicode"),
        ({"regex": 7}, "regex", "expected"),
        ({"response_format": as_schema(None)}, "response_format.schema", "is missing"),
        ({"response_format": as_schema("")}, "response_format.schema", "is empty"),
        ({"response_format": as_schema({"enum": ["a" * 70_000]})}, "response_format.schema", "bytes"),
        ({"response_format": as_schema({"a": float("nan")})}, "response_format.schema", "not JSON"),
        ({"response_format": as_schema({"a": b"bytes"})}, "response_format.schema", "not JSON"),
        ({"response_format": as_schema(nested(100_000))}, "response_format.schema", "nested too deeply"),
        ({"response_format": as_schema("\ud800")}, "response_format.schema", "Unicode"),
        (
            {"response_format": ResponseFormat(type="json_object", schema={})},
            "response_format.schema",
            "json_schema only",
        ),
        ({"response_format": ResponseFormat(type="text", schema={})}, "response_format.schema", "json_schema only"),
        ({"response_format": ResponseFormat(type="yaml")}, "response_format.type", "yaml"),  # type: ignore[arg-type]
        ({"regex": "a", "min_tokens": 1}, "min_tokens", "combined with regex"),
        ({"grammar": "a", "ignore_eos": True}, "ignore_eos", "combined with grammar"),
        ({"response_format": ResponseFormat(type="json_object"), "echo": True}, "echo", "with response_format"),
    ],
)
def test_what_is_wrong_with_it_names_its_field(params: dict[str, Any], field: str, message: str) -> None:
    request = GenerateRequest(prompt="x", **params)
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_types(request)
        validate_request(request, RequestLimits())
    assert caught.value.field == field


def test_the_operator_sets_how_large_it_may_be() -> None:
    request = GenerateRequest(prompt="x", regex="a" * 11)
    validate_request(request, RequestLimits(max_grammar_bytes=11))
    with pytest.raises(InvalidRequest, match="10 are allowed"):
        validate_request(request, RequestLimits(max_grammar_bytes=10))
