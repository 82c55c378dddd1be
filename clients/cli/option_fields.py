"""Every option of a service, read from the dataclasses that hold them: name, type, default and what it means.

A field that is added to one of those classes, with its line under "Args:", is a keyword, a flag, a key of the file, a
variable of the environment, and a row of `genbatch config` and docs/options.md, without a line here.
"""

import inspect
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.service.options import ServiceOptions
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.validation import RequestLimits

SECTIONS = {
    EngineOptions: "Model and memory",
    BatcherOptions: "Batching",
    RequestLimits: "What one request may ask for",
    ServiceOptions: "Service",
}
LIMITS = "limits"
# What the command takes where a program takes something else: `genbatch serve` outlives its engine.
_OF_COMMANDS = {"engine": "process"}
# Whose values are shown to nobody.
_SECRET = re.compile(r"(^|_)(secret|password|token|api_key)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Args:
        name: its key in the file, and keyword in Python; a request limit's is "limits.NAME".
        owner: the class that has it.
        field: its name there.
        kind: a type made of plain values, to be read from text or TOML.
        default: what `genbatch serve` takes.
        text: what it means.
    """

    name: str
    owner: type[Any]
    field: str
    kind: Any
    default: Any
    text: str

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"GENBATCH_{self.name.upper().replace('.', '__')}"

    @property
    def is_secret(self) -> bool:
        """Whether its value must not be shown."""
        return _SECRET.search(self.field) is not None

    def shown(self, value: Any) -> str:
        """The value as a person reads it; nothing of a secret."""
        if value is None:
            return "none"
        if self.is_secret:
            return "(secret)"
        if isinstance(value, Enum):
            return str(value.value)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple | list):
            return ", ".join(map(repr, value)) or "none"
        return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def options() -> Mapping[str, Option]:
    """All of them by name, in the order of their classes."""
    found: dict[str, Option] = {}
    for owner in SECTIONS:
        texts = _arguments(owner)
        for name, kind, default in _fields(owner):
            shown = "model" if name == "model_path" else f"{LIMITS}.{name}" if owner is RequestLimits else name
            assert shown not in found, f"two options are called {shown}"
            kind, default = _plain(kind), _OF_COMMANDS.get(name, default)
            found[shown] = Option(name=shown, owner=owner, field=name, kind=kind, default=default, text=texts[name])
    return found


def markdown_table() -> str:
    """The tables of docs/options.md: every option with its default and its meaning, a table for each class."""
    tables = []
    for owner, title in SECTIONS.items():
        lines = [f"**{title}**", "", "| option | default | |", "|---|---|---|"]
        for option in options().values():
            if option.owner is owner:
                text = option.text.replace("|", "\\|").removesuffix(".")
                lines.append(f"| `{option.name}` | {option.shown(option.default)} | {text} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _fields(owner: type[Any]) -> list[tuple[str, Any, Any]]:
    """(name, type, default) of what can be given to the class."""
    hints = get_type_hints(owner)
    if issubclass(owner, msgspec.Struct):
        return [(field.name, hints[field.name], field.default) for field in msgspec.structs.fields(owner)]
    return [
        (field.name, hints[field.name], field.default)
        for field in fields(owner)
        if field.init and field.default is not MISSING  # the limits, which have a section of their own, have a factory
    ]


def _plain(kind: Any) -> Any:
    """The part of a type that text or TOML can give."""
    if get_origin(kind) in (Union, types.UnionType):
        members = [_plain(member) for member in get_args(kind) if _is_plain(member)]
        return Union[tuple(members)]  # noqa: UP007  # made of a tuple
    return tuple[str, ...] if get_origin(kind) in (Sequence, tuple) else kind


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) in (Literal, Sequence, tuple):
        return True
    return inspect.isclass(kind) and issubclass(kind, str | int | float | bool | Enum | types.NoneType)


def _arguments(owner: type[Any]) -> dict[str, str]:
    """The entries of "Args:", by name."""
    section = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")[2].split("\n\n")[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", "\n" + section)[1:]:
        names, _, text = " ".join(entry.split()).partition(": ")
        found.update(dict.fromkeys(names.split(", "), text))
    return found
