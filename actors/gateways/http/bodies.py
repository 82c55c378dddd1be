"""What HTTP carries: a body as plain data on the way in, JSON and errors on the way out."""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from genbatch.proto.errors import GenbatchError, InvalidRequest, MalformedMessage, from_wire

# Objects and arrays inside one another. A schema for an answer is the deepest thing there is a use for.
MAX_NESTING = 64
_CONTAINERS = {list, dict}


def decode_json(body: bytes) -> dict[str, Any]:
    """One JSON object.

    Raises:
        MalformedMessage: no JSON, not UTF-8, NaN or an infinity, a key twice in one object, nested too deeply.
        InvalidRequest: JSON, but no object.
    """
    try:
        value = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise MalformedMessage("the body is not UTF-8") from None
    except RecursionError:
        raise MalformedMessage(f"the body is nested more than {MAX_NESTING} deep") from None
    except ValueError as error:  # JSONDecodeError is one; an integer of thousands of digits is another
        raise MalformedMessage(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(None, "the body must be a JSON object")
    if _is_deeper(value, MAX_NESTING):
        raise MalformedMessage(f"the body is nested more than {MAX_NESTING} deep")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has the same key twice")
    return made


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number in JSON")


def _is_deeper(value: object, room: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    if room == 0:
        return True
    elements = value.values() if isinstance(value, dict) else value
    if _CONTAINERS.isdisjoint(map(type, elements)):  # stays in C for long lists of token ids
        return False
    return any(_is_deeper(element, room - 1) for element in elements)


to_json = msgspec.json.Encoder().encode
# Responses are private and must not be cached.
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
# Ollama's API: the error is a text.
OLLAMA_PATH = "/api/"
# Anthropic's API, and its `type` by HTTP's status.
MESSAGES_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: INVALID,
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
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


def describe(error: GenbatchError, path: str = "") -> dict[str, object]:
    """The body: {"error": {message, type, param, code}}; with Anthropic's types where `path` is of its API."""
    code = CODES.get(error.code, error.code)
    told = {"message": _valid(str(error)), "param": _valid(error.field), "code": code}
    if path.startswith(OLLAMA_PATH):
        return {"error": told["message"]}
    if path.startswith(MESSAGES_PATH):
        return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(_status(error), "api_error"), **told}}
    kind = INVALID if isinstance(error, Refusal) else STATUSES.get(error.code, FAILED)[1]
    return {"error": {"type": kind, **told}}


def _status(error: GenbatchError) -> int:
    return error.status if isinstance(error, Refusal) else STATUSES.get(error.code, FAILED)[0]


def _valid(text: str | None) -> str | None:
    """Text that quotes what a client sent, which may be half a surrogate pair, as it can be sent back."""
    return None if text is None else text.encode(errors="backslashreplace").decode()


def api_response(error: GenbatchError, path: str = "") -> Response:
    """The response that tells of `error` to whoever asked for `path`.

    OpenAI's own clients repeat a request at 408, 409, 429 and from 500 on; they are told not to where no time to
    come again is known, since the same request would fail again, or has cost its deadline already.
    """
    status = _status(error)
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    elif status >= 429:
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSON(describe(error, path), status, headers)


def renamed(error: GenbatchError, names: dict[str, str]) -> GenbatchError:
    """`error` about the parameter that the caller wrote, where it became one of another name."""
    field = error.field or ""
    for ours, theirs in names.items():
        if field == ours or field.startswith((f"{ours}[", f"{ours}.")):
            told = msgspec.structs.replace(error.to_wire(), field=theirs + field.removeprefix(ours))
            return from_wire(told)
    return error
