"""Grammar: the one thing that an answer must match, whichever parameter says so."""

import json
from dataclasses import dataclass
from typing import Literal

import msgspec

from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, check_type
from genbatch.proto.request_limits import RequestLimits
from genbatch.proto.response_format import ResponseFormat

GrammarKind = Literal["json_schema", "grammar", "lark", "regex"]
SCHEMA_FIELD = "response_format.schema"
# What would leave an answer that does not match, or nothing that may come next.
_EXCLUDED = ("min_tokens", "ignore_eos", "echo")


class _Shaped(msgspec.Struct):
    """Puts the right path in front of what is wrong within it."""

    response_format: ResponseFormat


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match.

    Args:
        kind: how to read `text`.
        text: JSON Schema as JSON, a Lark or GBNF grammar, one that is Lark for certain, or a regular expression.
        field: the parameter it came from, for errors.
    """

    kind: GrammarKind
    text: str
    field: str


def grammar_of(request: GenerateRequest) -> Grammar | None:
    """What the request's answers must match; None where they are free.

    Raises:
        InvalidRequest: the schema cannot be written as JSON.
    """
    if request.grammar is not None:
        return Grammar("grammar", request.grammar, "grammar")
    if request.regex is not None:
        return Grammar("regex", request.regex, "regex")
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json_schema", '{"type": "object"}', "response_format")
    if isinstance(wanted.schema, str):
        return Grammar("json_schema", wanted.schema, SCHEMA_FIELD)
    try:
        return Grammar("json_schema", json.dumps(wanted.schema, allow_nan=False, ensure_ascii=False), SCHEMA_FIELD)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(SCHEMA_FIELD, f"is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(SCHEMA_FIELD, "is nested too deeply") from None


def check_grammar(request: GenerateRequest, limits: RequestLimits) -> None:
    """Checks what can be told of the shape asked for without compiling it.

    Raises:
        InvalidRequest: with the path of the parameter at fault.
    """
    wanted = request.response_format
    if wanted is not None:
        # One made in Python was never decoded, and a struct within another is taken as it is.
        check_type({"response_format": msgspec.structs.asdict(wanted)}, _Shaped)
    if wanted is not None and (wanted.type == "json_schema") != (wanted.schema is not None):
        rule = "is missing" if wanted.schema is None else f"goes with the type json_schema only, not {wanted.type}"
        raise InvalidRequest(SCHEMA_FIELD, rule)
    shaped = wanted is not None and wanted.type != "text"
    given = [name for name in ("response_format", "grammar", "regex") if getattr(request, name) is not None]
    if not shaped and wanted is not None:
        given.remove("response_format")
    if len(given) > 1:
        raise InvalidRequest(
            given[1], f"give at most one of response_format, grammar and regex, not {' and '.join(given)}"
        )
    if request.tools and request.tool_choice != "none":
        if given:
            raise InvalidRequest(given[0], "an answer that may be a tool call has no other shape; tool_choice none")
        if holds_to_tools(request):
            _check_excluded(request, "tools")
    grammar = grammar_of(request)
    if grammar is None:
        return
    if not grammar.text:
        raise InvalidRequest(grammar.field, "is empty")
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(grammar.field, "is not valid Unicode: it has a lone surrogate") from None
    if size > limits.max_grammar_bytes:
        raise InvalidRequest(grammar.field, f"has {size} bytes, {limits.max_grammar_bytes} are allowed")
    _check_excluded(request, given[0])


def holds_to_tools(request: GenerateRequest) -> bool:
    """Whether a grammar must hold the answer to the tools' schemas."""
    if not request.tools or request.tool_choice == "none":
        return False
    return request.tool_choice != "auto" or any(tool.strict for tool in request.tools)


def _check_excluded(request: GenerateRequest, given: str) -> None:
    for name in _EXCLUDED:
        if getattr(request, name):
            raise InvalidRequest(name, f"cannot be combined with {given}: the answer must match it, and end there")
