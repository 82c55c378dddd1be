"""Builds the grammar of an answer: thinking, then calls or the requested format.

    answer ── [ <think> … </think> ] ──┬── call, call …      each held to its tool's schema, or free
                                       └── @answer           what `response_format`, `grammar` or `regex` says

Grammars are in Lark, as llguidance reads it. `@answer` is compiled beside them (nif/sampling/grammar.py).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genbatch.nif.text.tools import CALL_ARGUMENTS, CALL_BEGINS, CALL_ENDS, HERMES, Shape, ThinkingTags, ToolFormat

# Most calls of one answer that a grammar restricts to calls: a small model might never stop by itself.
MAX_FORCED_CALLS = 8
# The depth to which a schema is searched.
_MAX_DEPTH = 32
# With one of these keywords an object may need properties that it does not name itself.
_COMBINING = frozenset(("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "unevaluatedProperties"))
_PROPERTIES = ("properties", "patternProperties")
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": False}
# JSON Schema's own formats. Any other format is a note to the reader, such as pydantic's "binary" and Zod's "cuid2".
_FORMATS = frozenset((
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
    "unknown",
))  # fmt: skip
# llguidance's formats also allow 29 February in every year, the year 0 and a 60th second, which Python's types refuse.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (f"^(?:.{{4}}-(?:0[13-9]|1[0-2])|.{{4}}-02-(?:[01]|2[0-8])|{_LEAP_YEAR}-02-29)", "^[0-9]*[1-9]")
_FORMAT_PATTERNS = {"date": _DATE, "time": ("^.{6}[0-5]",), "date-time": (*_DATE, "^.{17}[0-5]")}
# The beginning of pydantic's patterns of `Decimal`, and a limit of its digits. llguidance reads no look-ahead.
_DECIMAL = "^(?!^[-+.]*$)"
_MAX_DIGITS = re.compile(r"\(\?=(\[\\d\.\]\{1,\d+\})0\*\$\)")
_TEXT = r"TEXT: /(.|\n)*/"
_ANY_TOKENS = "<[*]>*"

TokenId = Callable[[str], int | None]


def is_json(format: ToolFormat) -> bool:
    """Return whether calls of this format have JSON arguments, which a schema can restrict."""
    return format.shape in (Shape.JSON, Shape.NAMED_JSON, Shape.NUMBERED)


def forced_format(format: ToolFormat) -> ToolFormat:
    """Return the format of enforced calls: the model's own format if it is JSON, else Hermes'."""
    return format if is_json(format) else HERMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls that an answer may have.

    Args:
        format: the format of the calls; one of `forced_format`, unless the calls are free.
        tools: the tools that may be called, each with a key "strict".
        several: whether there may be more than one call.
        forced: whether the answer must be calls only.
        free: whether no schema restricts the calls: any text may follow the mark that opens a call.
    """

    format: ToolFormat
    tools: Sequence[Mapping[str, Any]]
    several: bool
    forced: bool = False
    free: bool = False

    @property
    def beginnings(self) -> tuple[str, ...]:
        """Return the texts with which an answer of calls only can begin."""
        if self.format.bare and not self.free:
            return tuple("".join(_head(self.format, tool["name"])) for tool in self.tools)
        return self.format.opens


def answer_grammar(calls: Calls | None, token_id: TokenId, *, has_format: bool, thinking: ThinkingTags | None) -> str:
    """Build a Lark grammar of an answer.

    Args:
        calls: the allowed calls; None allows no call.
        token_id: returns the id of a mark that is one special token, and None for other text.
        has_format: whether an answer without a call must match `@answer`; otherwise the answer is text with calls.
        thinking: the tags of the thinking that may come first; None for none.
    """
    rules: list[str] = []
    branches = ["@answer"] if has_format and not (calls is not None and calls.forced) else []
    if calls is not None:
        if calls.forced or has_format:
            branches.insert(0, "calls")
        else:
            branches.append("mixed")
        rules += _call_rules(calls, _Marks(token_id), is_mixed="mixed" in branches)
    start = " | ".join(branches)
    if thinking is not None and "mixed" not in branches:  # "mixed" allows any text anyway
        start = f"thinking? ({start})"
        rules += _thinking_rules(thinking, _Marks(token_id))
    return "\n".join(["%llguidance {}", f"start: {start}", *dict.fromkeys(rules)])


class _Marks:
    """Writes marks in the grammar's syntax."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id

    def __call__(self, mark: str) -> str:
        special_id = self._token_id(mark)
        if special_id is not None:
            return f"<[{special_id}]>"
        first, text = mark[: mark.find(">") + 1], mark[mark.find(">") + 1 :]
        begins = self._token_id(first) if first and text else None  # as <|channel>thought
        return json.dumps(mark) if begins is None else f"<[{begins}]> {json.dumps(text)}"


def _thinking_rules(tags: ThinkingTags, written: _Marks) -> list[str]:
    """Return the rules of a region of thinking and of the empty lines after it."""
    opens, closes = written(tags.opens), written(tags.closes)
    if closes.startswith("<["):
        thought = [f"thought: TEXT {closes}", _TEXT]
    else:
        thought = [f"thought[lazy]: TEXT {closes}", _TEXT]
    return [f"thinking: {opens} thought LINES?", *thought, r"LINES: /[ \n]+/"]


def _call_rules(calls: Calls, written: _Marks, *, is_mixed: bool) -> list[str]:
    """Return the rules of `calls`, for calls only, or of `mixed`, for text with calls."""
    format, opens = calls.format, written(calls.format.opens[0])
    if calls.free:
        return [f"calls: {opens} {_ANY_TOKENS}"]
    rules = _tool_rules(calls, written)
    more = f"{{0,{MAX_FORCED_CALLS - 1}}}" if calls.several else None
    between = ""
    if format.shape is Shape.NUMBERED:
        body = "tool" + (f" tool{more}" if more else "") + f" {written(format.closes)}"
        call, more = f"{opens} {body}", None
    elif format.closes and not format.listed:
        body = f'"\\n" tool "\\n" {written(format.closes)}'
        call, between = f"{opens} {body}", '"\\n"'
    elif format.shape is Shape.NAMED_JSON:
        body = "tool"
        call = f"{opens} tool"
    elif format.bare:
        body, call, more = "tool", "tool", None
    else:
        closes = f" {written(format.closes)}" if format.closes else ""
        body = '"[" tool' + (f' (", " tool){more}' if more else "") + f' "]"{closes}'
        call, more = f"{opens} {body}", None
    rules.append(f"call: {call}")
    if not is_mixed:
        return [*rules, "calls: call" + (f" ({between} call){more}" if more else "")]
    begun = "TEXT " + opens if opens.startswith("<[") else "opened"
    rules += [_TEXT, f"opened[lazy]: TEXT {opens}", f"called: {begun} {body}", "rest: TEXT"]
    return [*rules, "mixed: called* rest" if calls.several else "mixed: called? rest"]


def _tool_rules(calls: Calls, written: _Marks) -> list[str]:
    """Return the rules of `tool`: a call without its marks."""
    format = calls.format
    rules = []
    for number, tool in enumerate(calls.tools):
        schema = dict(tool.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False})
        schema = _closed(readable_schema(schema))
        schema["x-guidance"] = _JSON_OPTIONS | {"lenient": not tool.get("strict")}
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
        if format.shape is Shape.NAMED_JSON:
            head = f"{json.dumps(tool['name'])} {written('[ARGS]')}"
            rules.append(f"tool_{number}: {head} arguments_{number}")
        elif format.shape is Shape.NUMBERED:
            name = json.dumps(f"functions.{tool['name']}:")
            head = f"{written(CALL_BEGINS)} {name} NUMBER {written(CALL_ARGUMENTS)}"
            rules += [f"tool_{number}: {head} arguments_{number} {written(CALL_ENDS)}", "NUMBER: /[0-9]{1,3}/"]
        else:
            head = " ".join(map(json.dumps, _head(format, tool["name"])))
            rules.append(f'tool_{number}: {head} arguments_{number} "}}"')
    return [*rules, "tool: " + " | ".join(f"tool_{number}" for number in range(len(calls.tools)))]


def _head(format: ToolFormat, name: str) -> tuple[str, ...]:
    """Return the text before a call's arguments, in the same pieces as a JSON schema's grammar.

    If two branches begin with the same text, the branch with the longer pieces would hide the other.
    """
    return "{", json.dumps(format.name_key), ": ", json.dumps(name), ", ", json.dumps(format.key), ": "


def _closed(schema: Any, depth: int = 0) -> Any:
    """Return the schema with additional properties forbidden where it does not mention them.

    Small models would keep adding properties. Every value of the result is also valid for `schema`.
    """
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return schema
    closed = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(closed.get(name), dict):
            closed[name] = {key: _closed(inner, depth + 1) for key, inner in closed[name].items()}
    if "items" in closed:
        closed["items"] = _closed(closed["items"], depth + 1)
    if isinstance(closed.get("anyOf"), list) and "properties" not in closed:
        closed["anyOf"] = [_closed(inner, depth + 1) for inner in closed["anyOf"]]
    if "properties" in closed and not _COMBINING.intersection(closed):
        closed.setdefault("additionalProperties", False)
    return closed


def readable_schema(schema: Any, depth: int = 0, root: Any = None) -> Any:
    """Return the schema in keywords that llguidance reads, where libraries write others.

    Every value of the result is also valid for `schema`. The result has no format that JSON Schema does not define, no
    `propertyNames` that lists or describes the names, and no look-ahead in a pattern of a decimal number. It requires
    the property by which a `discriminator` chooses a branch.

    Args:
        schema: the schema, or a part of it.
        depth: how deep that part is.
        root: the whole schema, which has the definitions; None if `schema` is the whole.
    """
    root = schema if root is None else root
    if isinstance(schema, list):
        return [readable_schema(inner, depth, root) for inner in schema]
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return schema
    readable = dict(schema)
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            readable[name] = {key: readable_schema(inner, depth + 1, root) for key, inner in schema[name].items()}
    for name in ("items", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf"):
        if name in schema:
            readable[name] = readable_schema(schema[name], depth + 1, root)
    _read_text_keywords(readable)
    if "propertyNames" in schema:
        _read_property_names(readable, root)
    if schema.get("uniqueItems") is False:
        del readable["uniqueItems"]
    match schema:
        case {"oneOf": list(), "discriminator": {"propertyName": str(chooser)}}:
            required = schema.get("required", [])
            readable["required"] = [*required, chooser] if isinstance(required, list) else required
    return readable


def _read_text_keywords(readable: dict[str, Any]) -> None:
    """Replace a `format` and a `pattern` that llguidance does not read, or reads too generously."""
    patterns: list[str] = []
    format, pattern = readable.get("format"), readable.get("pattern")
    if isinstance(format, str):
        patterns += _FORMAT_PATTERNS.get(format, ())
        if version := re.fullmatch("uuid([1-8])", format):  # pydantic's
            readable["format"] = "uuid"
            patterns.append(f"^.{{14}}{version[1]}.{{4}}[89abAB]")
        elif format not in _FORMATS:
            del readable["format"]
    if isinstance(pattern, str) and pattern.startswith(_DECIMAL):
        pattern = "^" + pattern.removeprefix(_DECIMAL)
        patterns.append("[^-+.]")
        if digits := _MAX_DIGITS.search(pattern):
            pattern = pattern.replace(digits[0], "").replace("0*$)", ")$")
            patterns.append(f"^[+-]?0*{digits[1]}$")
        readable["pattern"] = pattern
    if patterns and isinstance(readable.setdefault("allOf", []), list):
        readable["allOf"] = [*readable["allOf"], *({"pattern": one} for one in patterns)]


def _read_property_names(readable: dict[str, Any], root: Any) -> None:
    """Replace `propertyNames` that allow every name, a list of names or a pattern. Others stay, and are refused."""
    names, values = readable["propertyNames"], readable.get("additionalProperties", True)
    match names:
        case {"$ref": str(place), **others} if not others:
            for key in place.removeprefix("#/").split("/"):
                root = root.get(key) if isinstance(root, dict) else None
            names = root
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return
    described = {key: value for key, value in names.items() if key not in ("type", "title", "description")}
    match described:
        case {"enum": list(allowed), **others} if not others and readable.keys().isdisjoint(_PROPERTIES):
            readable["properties"] = {name: values for name in allowed if isinstance(name, str)}
        case {"pattern": str(pattern), **others} if not others and readable.keys().isdisjoint(_PROPERTIES):
            readable["patternProperties"] = {pattern: values}
        case _ if described:
            return
    if described:
        readable["additionalProperties"] = False
    del readable["propertyNames"]
