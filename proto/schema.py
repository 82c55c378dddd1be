"""The wire as a JSON Schema, made from the types, for programs in other languages.

    python -m genbatch.proto.schema         # prints it; proto/schema.json is the same

`methods` has the schema of each method's parameters and result. `messages` has the schemas of the arrays on the wire.
"""

from typing import Annotated, Any, Literal

import msgspec

from genbatch.proto.errors import CLASSES, ErrorInfo
from genbatch.proto.methods import METHODS
from genbatch.proto.rpc import MAX_CREDIT, MAX_MSGID, WIRE_VERSION, StreamOptions, TokenExtra

Msgid = Annotated[int, msgspec.Meta(ge=0, description=f"at most {MAX_MSGID}")]
CreditCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_CREDIT)]
LeaseS = Annotated[float, msgspec.Meta(gt=0)]

# The arrays of both directions, by name.
MESSAGES: dict[str, Any] = {
    "request": tuple[Literal[0], Msgid, str, list[dict[str, Any]]],
    "result": tuple[Literal[1], Msgid, None, Any],
    "error": tuple[Literal[1], Msgid | None, ErrorInfo, None],
    "token": tuple[Literal[2], Literal["token"], tuple[Msgid, int, int, str]],
    "token_with_extra": tuple[Literal[2], Literal["token"], tuple[Msgid, int, int, str, TokenExtra]],
    "tokens": tuple[Literal[2], Literal["tokens"], list[list[Any]]],
    "cancel": tuple[Literal[2], Literal["cancel"], tuple[Msgid]],
    "credit": tuple[Literal[2], Literal["credit"], tuple[Msgid, CreditCount]],
    "goaway": tuple[Literal[2], Literal["goaway"], list[Any]],
    "heartbeat": tuple[Literal[2], Literal["heartbeat"], list[LeaseS]],
}


def wire_schema() -> dict[str, Any]:
    """Return the schema of every message, method and type."""
    rows = list(METHODS.values())
    types = [*MESSAGES.values(), StreamOptions, *(row.request for row in rows), *(row.answer for row in rows)]
    schemas, definitions = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    messages, rest = schemas[: len(MESSAGES)], schemas[len(MESSAGES) :]
    options, requests, answers = rest[0], rest[1 : 1 + len(rows)], rest[1 + len(rows) :]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "genbatch's wire",
        "version": WIRE_VERSION,
        "messages": dict(zip(MESSAGES, messages, strict=True)),
        "stream_options": options,
        "methods": {
            row.name: {"params": request, "result": answer, "streams": row.streams}
            for row, request, answer in zip(rows, requests, answers, strict=True)
        },
        "error_codes": sorted(CLASSES),
        "$defs": definitions,
    }


if __name__ == "__main__":
    print(msgspec.json.format(msgspec.json.encode(wire_schema())).decode())
