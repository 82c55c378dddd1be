"""JSON: a response of plain data and the types of proto."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

to_json = msgspec.json.Encoder().encode
# Answers are nobody else's and never the same again.
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class JSON(Response):
    """`content` as JSON.

    Args:
        content: what msgspec can encode.
        status: HTTP's.
        headers: more of them.
    """

    media_type = "application/json"

    def __init__(self, content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(to_json(content), status, _HEADERS | dict(headers or {}))
