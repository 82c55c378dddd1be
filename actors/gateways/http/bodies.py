"""HTTP bodies: JSON into requests of our own on the way in, answers and errors on the way out.

An endpoint reads its body into a Struct of its own, which checks the types. `build_request` makes the GenerateRequest.
An HTTPRequest is one body, of any API: the requests of our own, and how the answer is to be written.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from genbatch.proto.errors import GenbatchError, InvalidRequest, MalformedMessage, from_wire
from genbatch.proto.messages import GenerateRequest
from genbatch.proto.validation import check_type

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


# Parameters that a body's Struct leaves as JSON, in whole or in part: their types are checked here.
_AS_JSON = ("messages", "tools", "tool_choice", "response_format", "grammar", "regex")


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """One body.

    Args:
        model: as it was named; None for the first model.
        requests: one for each prompt.
        stream: whether the answer comes token by token.
        names: the caller's names of parameters, by ours, where they differ.
        is_chat: whether an answer of OpenAI's has a message, and not a text.
        n: answers to each prompt.
        include_usage: whether a stream tells its usage.
        num_top: how many of the likeliest tokens to show with each one; None shows no log-probs.
        ids_for_text: whether log-probs name tokens by their ids.
        shows_ids: whether the token ids of prompts and answers come back.
        scores_prompt: whether the log-probs of the prompts' tokens come back in an array of their own.
        echo: whether the prompts come back in front of the answers.
        suffix: the text behind the gap to be filled; "" is none.
        body: what was asked, where the answer repeats it.
        namespaces: of functions within a namespace, by our name: the namespace, and the function's name there.
        custom: names of the functions that are custom tools to the caller.
        thinking: the fields that ask for thinking; they have no effect where the model does not think.
    """

    model: str | None
    requests: list[GenerateRequest]
    stream: bool
    names: dict[str, str]
    is_chat: bool = True
    n: int = 1
    include_usage: bool = True
    num_top: int | None = None
    ids_for_text: bool = False
    shows_ids: bool = False
    scores_prompt: bool = False
    echo: bool = False
    suffix: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    thinking: Sequence[str] = ()


def build_request(params: dict[str, Any], names: dict[str, str]) -> GenerateRequest:
    """The request with these parameters, of which a body's Struct has checked those that are no JSON.

    Args:
        names: the caller's names of parameters, by ours.

    Raises:
        InvalidRequest: with the path of the first fault, under the caller's name.
    """
    as_json = {name: params[name] for name in _AS_JSON if name in params}
    try:
        checked: GenerateRequest = check_type(as_json, GenerateRequest)
    except InvalidRequest as error:
        raise renamed(error, names) from None
    plain = {name: value for name, value in params.items() if name not in as_json}
    if isinstance(plain.get("stop"), str):
        plain["stop"] = [plain["stop"]]
    return msgspec.structs.replace(checked, **plain)


def set_fields(body: msgspec.Struct, names: Iterable[str]) -> dict[str, Any]:
    """The values of these fields of a body, without those that it does not set."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters that OpenAI's, vLLM's, Ollama's and llama.cpp's API call as GenerateRequest does."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class LlamaSampling(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of llama.cpp, which Ollama has taken over.

    Args:
        repeat_penalty: llama.cpp's name of `repetition_penalty`.
        seed: of the draws; a negative one draws a seed.
    """

    repeat_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


# Our names of LlamaSampling's fields, where they differ.
_OUR_NAMES = {"repeat_penalty": "repetition_penalty"}


def llama_params(fields: LlamaSampling, max_tokens: int | None) -> dict[str, Any]:
    """The parameters of a request; with None for `max_tokens` as many tokens as there is room for."""
    params = {
        _OUR_NAMES.get(name, name): value for name, value in set_fields(fields, LlamaSampling.__struct_fields__).items()
    }
    if params.get("seed", 0) < 0:
        del params["seed"]
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    return params


def llama_names(prefix: str) -> dict[str, str]:
    """The caller's names of the sampling parameters, by ours."""
    return {_OUR_NAMES.get(name, name): prefix + name for name in LlamaSampling.__struct_fields__}
