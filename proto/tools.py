"""Tools: the functions that a model may ask its caller to call, and the calls it asks for."""

from typing import Any, Literal

import msgspec


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the caller offers.

    Args:
        name: 1 to 64 letters, digits, "_", "-" and "."; no two tools of a request have the same.
        description: what it does, for the model.
        parameters: a JSON Schema of its arguments, an object; None is a function without any.
        strict: every call of it has arguments that validate.
    """

    name: str
    description: str | None = None
    # A schema has no type but JSON's own.
    parameters: dict[str, Any] | None = None
    strict: bool = False


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that the model asks for.

    Args:
        id: names it in the answer that the caller sends back.
        name: the tool's name, as the model wrote it.
        arguments: the arguments as JSON, as the model wrote them: without `strict`, or where the output ended early,
            they may be invalid.
    """

    id: str
    name: str
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a call in a stream; the pieces of one `index` joined are the call.

    Args:
        index: which call of its choice, from 0.
        id, name: given in a call's first piece.
        arguments: the JSON text that follows.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
