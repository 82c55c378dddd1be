"""ResponseFormat: what shape an answer must have, in the terms that callers know."""

from typing import Any, Literal

import msgspec


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The shape of an answer.

    Args:
        type: "text" is any; "json_object" one JSON object; "json_schema" JSON that validates against `schema`.
        schema: the JSON Schema, as an object or as its JSON text; only with "json_schema".
    """

    type: Literal["text", "json_object", "json_schema"]
    # A schema has no type but JSON's own; `grammar_of` is the only reader.
    schema: dict[str, Any] | str | None = None
