"""Custom tools of OpenAI's APIs: a call has one free text as its input (ADR 50).

A custom tool is offered to the model as a function with one argument, and a call of that function is shown as a call
of the tool:

    {"type": "custom", "name": "apply_patch"} ── as_function ──> a function with the argument "input"
    {"input": "*** Begin Patch\\n"}           ── InputReader ──> the text *** Begin Patch
"""

import json
import re
from typing import Any

from genbatch.actors.gateways.http.bodies import Fields
from genbatch.proto.errors import InvalidRequest

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEX = "[0-9a-fA-F]"
# The first half of a character that JSON writes as two escapes, and what may be the beginning of the second half.
_FIRST_HALF = rf"\\u[dD][89abAB]{_HEX}{{2}}(?!\\?(?:u{_HEX}{{0,3}})?\Z)"
_OTHER_UNIT = rf"\\u(?![dD][89abAB]){_HEX}{{4}}"
_NO_UNIT = rf"\\u(?!{_HEX}{{0,3}}\Z)(?!{_HEX}{{4}})"
_COMPLETE = re.compile(rf'(?:[^"\\]+|{_FIRST_HALF}|{_OTHER_UNIT}|{_NO_UNIT}|\\[^u])*', re.DOTALL)
_ESCAPES = re.compile(rf"(?:\\u{_HEX}{{4}})+|\\.", re.DOTALL)
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


def as_function(tool: dict[str, Any], path: str, reader: Fields) -> dict[str, Any]:
    """Return a custom tool as a function with the argument `input`.

    Args:
        tool: its name, description and format.
        path: the path of the tool in the caller's body.
        reader: gets the name of a format that is not enforced.

    Raises:
        InvalidRequest: OpenAI has no such format.
    """
    described, argument = tool.get("description"), {"type": "string", "description": "The tool's whole input."}
    function = {name: tool[name] for name in ("name",) if name in tool}
    syntax, definition = _format(tool.get("format"), f"{path}.format")
    if syntax == "regex":
        argument["pattern"] = f"^(?:{definition})$"
        function["strict"] = True
    elif syntax == "lark":
        # The model writes the input as JSON text, and a grammar of the input does not match this text.
        reader.ignore(f"{path}.format")
    if syntax and (described is None or isinstance(described, str)):
        described = f"{described or ''}\n\nThe input must match this {syntax}:\n{definition}".lstrip()
    if described is not None:
        function["description"] = described
    parameters = {"type": "object", "properties": {"input": argument}, "required": ["input"]}
    return function | {"parameters": parameters | {"additionalProperties": False}}


def _format(format: object, path: str) -> tuple[str, str]:
    """Return the syntax of a format and its definition; both are empty for free text."""
    if format is None:
        return "", ""
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "text":
        return "", ""
    if not isinstance(format, dict) or kind != "grammar":
        raise InvalidRequest(f"{path}.type", f'must be "text" or "grammar", not {kind!r:.40}')
    # /v1/chat/completions has the two fields in an object of their own.
    grammar, place = (format["grammar"], f"{path}.grammar") if "grammar" in format else (format, path)
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
    if syntax not in ("lark", "regex"):
        raise InvalidRequest(f"{place}.syntax", f'must be "lark" or "regex", not {syntax!r:.40}')
    definition = grammar.get("definition")
    if not isinstance(definition, str):
        raise InvalidRequest(f"{place}.definition", "must be a string")
    return syntax, definition


def arguments_of(text: str) -> str:
    """Return the arguments of the function's call with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the input in the arguments of a whole call."""
    reader = InputReader()
    return reader.push(arguments) + reader.finish()


class InputReader:
    """Reads the input of one call while the model writes the call's arguments.

    Arguments that do not begin with `{"input": "` are the input themselves, so no text of the model is lost.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._is_open = False  # within the string
        self._has_ended = False

    def push(self, arguments: str) -> str:
        """Return the part of the input that is complete after these further characters of the arguments."""
        self._buffer += arguments
        if not self._is_open:
            head = _HEAD.match(self._buffer)
            if head is None:
                return ""
            self._is_open = True
            self._buffer = self._buffer[head.end() :]
        if self._has_ended:
            return ""
        complete = _COMPLETE.match(self._buffer)
        assert complete is not None
        self._buffer = self._buffer[complete.end() :]
        self._has_ended = self._buffer.startswith('"')
        return _ESCAPES.sub(_unescaped, complete[0])

    def finish(self) -> str:
        """Return the rest of the input; half an escape at the end is dropped."""
        return "" if self._is_open else self._buffer


def _unescaped(escape: re.Match[str]) -> str:
    if not escape[0].startswith("\\u") or len(escape[0]) == 2:
        return _LETTERS.get(escape[0][1], escape[0])
    units = bytes.fromhex(escape[0].replace("\\u", ""))
    return units.decode("utf-16-be", errors="replace")
