"""Values for every field that an SDK's own type definitions have.

    for path, value in each_field(CompletionCreateParams): ...      # ("tools[].function.strict", {"tools": [...]})

A field of a TypedDict or of a pydantic model is varied by itself; what is beside it is the least that the type allows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import pydantic
import typing_extensions

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Texts that mean something by the name of their field; any other text is "x".
BY_NAME: dict[str, list[Any]] = {
    "name": ["f"],
    "parameters": [SCHEMA],
    "input_schema": [SCHEMA],
    "schema": [SCHEMA],
    "json_schema": [{"name": "f", "schema": SCHEMA}],
    "arguments": ["{}"],
    "tool_choice": ["none", "auto"],
    "logit_bias": [{"1": 1}],
    "definition": ["[a-c]+"],
    "model": ["scripted"],
    "previous_response_id": ["resp_1"],
}
_PLAIN: dict[Any, list[Any]] = {
    str: ["x"], bool: [True, False], int: [1], float: [0.5], object: [{}], Any: [{}], dict: [{}], list: [[]],
    bytes: ["eA=="],
}  # fmt: skip
_REQUIRED = (Required, typing_extensions.Required)
_OPTIONAL = (NotRequired, typing_extensions.NotRequired)
_FILES = (IO[bytes], Path, PathLike)  # a package reads them and sends text
_LISTS = (list, Iterable, Sequence, tuple, set)
MAX_DEPTH = 9


def fields_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]] | None:
    """The types of an object's fields by their names, and the names of those that must be there."""
    if typing_extensions.is_typeddict(kind):
        kinds = get_type_hints(kind, include_extras=True)
        # Where annotations are strings, `__required_keys__` has not seen the marks within them.
        marked = {name: get_origin(each) for name, each in kinds.items()}
        required = {name for name in kinds if marked[name] in _REQUIRED}
        plain = {name for name in kind.__required_keys__ if marked[name] not in _OPTIONAL}
        return kinds, frozenset(required | plain)
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        named = {field.alias or name: field for name, field in kind.model_fields.items()}
        return (
            {name: field.annotation for name, field in named.items()},
            frozenset(name for name, field in named.items() if field.is_required()),
        )
    return None


def values(kind: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Values of a type, each with the path of what it varies within the value; "" is the value itself.

    The first is the least that the type allows.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Annotated, *_REQUIRED, *_OPTIONAL):
        yield from values(inner[0], name, depth)
    elif origin in (Literal, typing_extensions.Literal):
        yield from (("", value) for value in inner)
    elif origin in (Union, UnionType):
        for one in inner:
            if one is not NoneType:
                yield from values(one, name, depth)
    elif name in BY_NAME and (fields_of(kind) is None or name == "json_schema"):
        yield from (("", value) for value in BY_NAME[name])
    elif kind in _PLAIN:
        yield from (("", value) for value in _PLAIN[kind])
    elif origin in _LISTS:
        yield from ((f"[]{path}", [value]) for path, value in values(inner[0], "", depth))
    elif origin in (dict, Mapping) or kind is Mapping:
        yield from ((path and f".a{path}", {"a": value}) for path, value in values(inner[1], "", depth))
    elif (found := fields_of(kind)) is not None:
        yield from _objects(*found, depth + 1)
    elif kind not in _FILES and origin not in _FILES:
        yield "", {}  # a type that a newer package has brought


def _objects(kinds: dict[str, Any], required: frozenset[str], depth: int) -> Iterator[tuple[str, Any]]:
    least = {name: next(values(kinds[name], name, depth), ("", None))[1] for name in kinds if name in required}
    yield "", least
    if depth > MAX_DEPTH:
        return
    for name, kind in kinds.items():
        for index, (path, value) in enumerate(values(kind, name, depth)):
            if index or name not in required:  # the first one is in `least`
                yield f".{name}{path}", least | {name: value}


def each_field(kind: Any, least: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of a body, with their paths, each in a body with the least beside it; then the same with null.

    Args:
        least: what a body needs although its type does not say so.
    """
    found = fields_of(kind)
    assert found is not None
    kinds, required = found
    bodies = [(path.removeprefix("."), {**least, **body}) for path, body in _objects(kinds, required, 0)]
    yield from bodies
    yield from ((name, bodies[0][1] | {name: None}) for name in kinds if name not in {*required, *least})
