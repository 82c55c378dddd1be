"""api_response: an error in the shape that OpenAI's clients know, under the status that they act upon."""

import math

import msgspec
from starlette.responses import Response

from genbatch.actors.http.json_response import JSON
from genbatch.proto.errors import GenbatchError, from_wire

INVALID = "invalid_request_error"

# By our code: HTTP's status, and OpenAI's `type`.
STATUSES: dict[str, tuple[int, str]] = {
    "invalid_request": (400, INVALID),
    "prompt_too_long": (400, INVALID),
    "malformed_message": (400, INVALID),
    "unauthenticated": (401, "authentication_error"),
    "forbidden": (403, "permission_error"),
    "model_not_found": (404, INVALID),
    "unknown_method": (404, INVALID),
    "frame_too_large": (413, INVALID),
    "queue_full": (429, "rate_limit_error"),
    "cancelled": (503, "server_error"),
    "unavailable": (503, "server_error"),
    "deadline_exceeded": (504, "server_error"),
}
FAILED = (500, "server_error")
# Codes for which OpenAI has a name of its own, that programs compare with.
CODES = {"prompt_too_long": "context_length_exceeded", "unauthenticated": "invalid_api_key"}


class Refusal(GenbatchError):
    """A fault of HTTP's own, for which there is a status and no code on the other wires."""

    code = "http"

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


def describe(error: GenbatchError) -> dict[str, object]:
    """The body: {"error": {message, type, param, code}}."""
    kind = INVALID if isinstance(error, Refusal) else STATUSES.get(error.code, FAILED)[1]
    code = CODES.get(error.code, error.code)
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": code}}


def api_response(error: GenbatchError) -> Response:
    """The response that tells of `error`.

    OpenAI's own clients repeat a request at 408, 409, 429 and from 500 on; they are told not to where no time to
    come again is known, since the same request would fail again, or has cost its deadline already.
    """
    status = error.status if isinstance(error, Refusal) else STATUSES.get(error.code, FAILED)[0]
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    elif status >= 429:
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSON(describe(error), status, headers)


def renamed(error: GenbatchError, names: dict[str, str]) -> GenbatchError:
    """`error` about the parameter that the caller wrote, where it became one of another name."""
    field = error.field or ""
    for ours, theirs in names.items():
        if field == ours or field.startswith((f"{ours}[", f"{ours}.")):
            told = msgspec.structs.replace(error.to_wire(), field=theirs + field.removeprefix(ours))
            return from_wire(told)
    return error
