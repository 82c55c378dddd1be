"""Parses calls that are read as a whole: in XML, as Python's, in Gemma's, GLM's and Apertus' notations, and odd JSON.

    read_xml("<function=f>...</function>", schemas)     # [("f", {"city": "Den Haag"})]; [] if it is no call

`schemas` has the offered tools' parameters by their names: they say which unquoted values are texts.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Most characters of a call that is not JSON, as a bound for Python's parser. A longer call is text.
MAX_HELD = 64 * 1024

CallList = list[tuple[str, dict[str, Any]]]


def whole_calls(body: str) -> list[tuple[str, str]] | None:
    """Parse JSON calls with another order of members or with arguments in a string; None if the text is no call.

    A call may also be a dictionary of Python, since some chat templates show one: {'name': 'f', 'arguments': {}}.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = _python_value(body)
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict):
            return None
        inner = entry.get("function")
        entry = inner if isinstance(inner, dict) else entry
        name = entry.get("name", entry.get("tool_name", inner))
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return None
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append((name, text))
    return calls or None


# Qwen and Seed write <function=f>, MiniMax <invoke name="f">; parameters likewise.
_FUNCTION = re.compile(r"<(?:function=|invoke name=\"?)([^>\n\"]+)\"?>(.*?)(?:</(?:function|invoke)>|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter(?:=| name=\"?)([^>\n\"]+)\"?>\n?(.*?)\n?(?:</parameter>|(?=<parameter)|\Z)", re.DOTALL
)
_TAGGED = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def read_xml(body: str, schemas: Mapping[str, Any]) -> CallList:
    """Parse calls with a tag for each function and parameter."""
    return [
        (name.strip(), _arguments(name, _PARAMETER.findall(inner), schemas)) for name, inner in _FUNCTION.findall(body)
    ]


def read_tagged(body: str, schemas: Mapping[str, Any]) -> CallList:
    """Parse GLM's call: a name, then a pair of tags for each argument."""
    name, mark, _ = body.partition("<arg_key>")
    if not name.strip() or (not mark and name.strip() not in schemas):
        return []
    return [(name.strip(), _arguments(name, _TAGGED.findall(body), schemas))]


def _arguments(name: str, pairs: Sequence[tuple[str, str]], schemas: Mapping[str, Any]) -> dict[str, Any]:
    properties = schemas.get(name.strip(), {}).get("properties") or {}
    return {key.strip(): _typed(value, properties.get(key.strip())) for key, value in pairs}


def read_by_name(body: str, schemas: Mapping[str, Any]) -> CallList:
    """Parse Apertus' list of objects, each with a function's name and its arguments."""
    try:
        entries = json.loads(body)
    except (ValueError, RecursionError):
        return []
    entries = entries if isinstance(entries, list) else [entries]
    calls = [call for entry in entries if isinstance(entry, dict) for call in entry.items()]
    return calls if all(isinstance(arguments, dict) for _, arguments in calls) else []


def _typed(text: str, schema: object) -> Any:
    """Convert an unquoted value by its schema: JSON, or as Python writes it, unless the schema says string."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        value = None if kind is None else _python_value(text)
        return text if value is None and text.strip() != "None" else value


# The errors that evaluating Python's literals raises.
_NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def _python_value(text: str) -> Any:
    """Return the value of a literal of Python that JSON can express, too; None if the text is something else."""
    try:
        value = ast.literal_eval(text.strip()) if len(text) <= MAX_HELD else None
        json.dumps(value, allow_nan=False)
    except _NOT_PYTHON:
        return None
    return value


class _JSONWords(ast.NodeTransformer):
    """Replaces true, false and null, which JSON within a call has."""

    _VALUES: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def read_pythonic(body: str, schemas: Mapping[str, Any]) -> CallList:
    """Parse calls in a list, in lines, or, as LFM2 writes on request, in JSON."""
    try:
        calls: CallList = []
        for line in ast.parse(body.strip()).body:
            tree = line.value if isinstance(line, ast.Expr) else None
            for node in tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]:
                if not isinstance(node, ast.Call) or node.args:
                    return _read_json(body)
                words = {word.arg: _JSONWords().visit(word.value) for word in node.keywords if word.arg is not None}
                arguments = {name: ast.literal_eval(value) for name, value in words.items()}
                json.dumps(arguments, allow_nan=False)
                calls.append((ast.unparse(node.func), arguments))
    except _NOT_PYTHON:
        return []
    return calls


def _read_json(body: str) -> CallList:
    """Parse calls in JSON, of which arguments in a string are JSON as well."""
    try:
        return [(name, dict(json.loads(arguments))) for name, arguments in whole_calls(body) or ()]
    except (ValueError, TypeError, RecursionError):
        return []


_CALLED = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")


def read_called(body: str, schemas: Mapping[str, Any]) -> CallList:
    """Parse Gemma's calls."""
    calls: CallList = []
    place = 0
    while (head := _CALLED.match(body, place)) is not None:
        try:
            arguments, place = _called_value(body, head.end(), 0)
        except (ValueError, IndexError):
            return []
        calls.append((head[1], arguments))
    return calls


_ESCAPE = "<escape>"
_MAX_DEPTH = 32


def _called_value(text: str, place: int, depth: int) -> tuple[Any, int]:
    """Parse a value in Gemma's notation; returns the value and its end.

    Raises:
        ValueError, IndexError: the text is no such value.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith(_ESCAPE, place):
        end = text.index(_ESCAPE, place + len(_ESCAPE))
        return text[place + len(_ESCAPE) : end], end + len(_ESCAPE)
    if text[place] == "[":
        items = []
        place += 1
        while text[place] != "]":
            item, place = _called_value(text, place, depth + 1)
            items.append(item)
            place += text[place] == ","
        return items, place + 1
    if text[place] == "{":
        members = {}
        place += 1
        while text[place] != "}":
            colon = text.index(":", place)
            key = text[place:colon].strip().removeprefix(_ESCAPE).removesuffix(_ESCAPE)
            members[key], place = _called_value(text, colon + 1, depth + 1)
            place += text[place] == ","
        return members, place + 1
    word = re.compile(r"[^,\]}]*").match(text, place)
    assert word is not None
    return _typed(word[0].strip(), None), word.end()
