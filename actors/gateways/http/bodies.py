"""HTTP bodies: convert JSON to requests, and answers and errors to JSON.

An endpoint reads its body into a Struct of its own, which checks the types. `build_request` makes the GenerateRequest.
An HTTPRequest holds one body of any API: the GenerateRequests in it, and the shape of the answer.

Fields knows which fields of a body are used, accepted, ignored and refused (ADR 34). A field of OpenAI's, Anthropic's
or vLLM's API is of one of these kinds:

    used      a field of the endpoint's Struct: its value is checked and has an effect
    accepted  a name, a label or a matter of billing: it does not change the answer
    a hint    a preference that this service cannot follow: the field is ignored, and the response names it
    refused   it would change the answer: InvalidRequest with the field's path

A field that no API has published is ignored and named as a hint is. In strict mode such a field is refused. `null` is
the same as a missing field.

Efforts and budgets of thinking have other names in each API; ThinkingParams reads them all:

    OpenAI                reasoning_effort, reasoning.effort
    Anthropic             thinking {type, budget_tokens}, output_config.effort
    vLLM, Qwen            thinking_token_budget, thinking_budget, enable_thinking
    OpenRouter            reasoning {effort, max_tokens, enabled}
    Ollama                think

All of them become `reasoning_effort` and `max_thinking_tokens` of a GenerateRequest.
"""

import codecs
import json
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from starlette.responses import Response

from genbatch.proto.errors import GenbatchError, InvalidRequest, MalformedMessage, from_wire
from genbatch.proto.messages import Effort, GenerateRequest
from genbatch.proto.validation import check_type, is_deeper

# The most objects and arrays inside one another; the schema of an answer is the deepest useful value.
MAX_NESTING = 64


def decode_json(body: bytes) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        MalformedMessage: no JSON, not UTF-8, NaN or an infinity, a key twice in one object, nested too deeply.
        InvalidRequest: JSON, but no object.
    """
    try:
        value = json.loads(
            body.removeprefix(codecs.BOM_UTF8).decode(), object_pairs_hook=_object, parse_constant=_refuse
        )
    except UnicodeDecodeError:
        raise MalformedMessage("the body is not UTF-8; a compressed body is not read either") from None
    except RecursionError:
        raise MalformedMessage(f"the body is nested more than {MAX_NESTING} deep") from None
    except ValueError as error:  # JSONDecodeError is one; an integer of thousands of digits is another
        raise MalformedMessage(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(None, "the body must be a JSON object")
    if is_deeper(value, MAX_NESTING):
        raise MalformedMessage(f"the body is nested more than {MAX_NESTING} deep")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has the same key twice")
    return members


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number in JSON")


to_json = msgspec.json.Encoder().encode
# Responses are private and must not be cached.
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class JSON(Response):
    """A response with `content` as JSON.

    Args:
        content: a value that msgspec can encode.
        status: the HTTP status.
        headers: further headers.
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
# In Ollama's API the error is a text.
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
# OpenAI's own names of these codes; programs compare them.
CODES = {"prompt_too_long": "context_length_exceeded", "unauthenticated": "invalid_api_key"}


class Refusal(GenbatchError):
    """A fault of the HTTP request itself: it has a status, and no code on the other wires."""

    code = "http"

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


def describe(error: GenbatchError, path: str = "") -> dict[str, object]:
    """Return the body {"error": {message, type, param, code}}, in the shape of the API that has `path`."""
    code = CODES.get(error.code, error.code)
    detail = {"message": _valid(str(error)), "param": _valid(error.field), "code": code}
    if path.startswith(OLLAMA_PATH):
        return {"error": detail["message"]}
    if path.startswith(MESSAGES_PATH):
        return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(_status(error), "api_error"), **detail}}
    kind = INVALID if isinstance(error, Refusal) else STATUSES.get(error.code, FAILED)[1]
    return {"error": {"type": kind, **detail}}


def _status(error: GenbatchError) -> int:
    return error.status if isinstance(error, Refusal) else STATUSES.get(error.code, FAILED)[0]


def _valid(text: str | None) -> str | None:
    """Return the text in a form that can be encoded: a text that quotes a client may have half a surrogate pair."""
    return None if text is None else text.encode(errors="backslashreplace").decode()


def api_response(error: GenbatchError, path: str = "") -> Response:
    """Return the response with an error, in the shape of the API of `path`.

    OpenAI's clients repeat a request at 408, 409, 429 and from 500 on. A header forbids that for errors without a time
    to retry: the same request would fail again, or has cost its deadline already.
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
    """Return the error with the caller's name of the parameter."""
    field = error.field or ""
    for ours, theirs in names.items():
        if field == ours or field.startswith((f"{ours}[", f"{ours}.")):
            wire = msgspec.structs.replace(error.to_wire(), field=theirs + field.removeprefix(ours))
            return from_wire(wire)
    return error


# Parameters that a body's Struct keeps as JSON, in whole or in part; build_request checks their types.
_AS_JSON = ("messages", "tools", "tool_choice", "response_format", "grammar", "regex")


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """The request of one HTTP body.

    Args:
        model: the named model; None for the first model.
        requests: one for each prompt.
        stream: whether the answer is sent token by token.
        names: the caller's names of parameters by our names, if they differ.
        is_chat: whether an answer in OpenAI's shape has a message and not a text.
        n: the number of answers to each prompt.
        include_usage: whether a stream reports its usage.
        num_top: the number of likeliest tokens to show with each token; None shows no log-probs.
        ids_for_text: whether log-probs show the ids of tokens in place of their texts.
        shows_ids: whether the answer has the token ids of prompts and outputs.
        scores_prompt: whether the answer has the log-probs of the prompts' tokens in a separate array.
        echo: whether each answer begins with its prompt.
        suffix: the text after the gap to fill; "" for none.
        body: the fields of the body that the answer repeats.
        namespaces: the namespace and the name in it of each function within a namespace, by our name.
        custom: names of the functions that the caller sent as custom tools.
        thinking: the fields about thinking, which have no effect on a model that does not think.
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
    """Return the request with these parameters; a body's Struct has checked their types, except those kept as JSON.

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
    """Return the values of these fields of a body, without the unset fields."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def parsed_arguments(arguments: str) -> Any:
    """Parse the arguments of a tool call. Arguments that were cut short or are no JSON are shown as text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {"_invalid": arguments}


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters that have GenerateRequest's name in OpenAI's, vLLM's, Ollama's and llama.cpp's API."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class LlamaSampling(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of llama.cpp; Ollama has the same.

    Args:
        repeat_penalty: llama.cpp's name of `repetition_penalty`.
        seed: the seed of the draws; a negative value draws a seed.
    """

    repeat_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


# Our names of LlamaSampling's fields, if they differ.
_OUR_NAMES = {"repeat_penalty": "repetition_penalty"}


def llama_params(fields: LlamaSampling, max_tokens: int | None) -> dict[str, Any]:
    """Return the parameters of a request; None for `max_tokens` allows as many tokens as fit."""
    params = {
        _OUR_NAMES.get(name, name): value for name, value in set_fields(fields, LlamaSampling.__struct_fields__).items()
    }
    if params.get("seed", 0) < 0:
        del params["seed"]
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    return params


def llama_names(prefix: str) -> dict[str, str]:
    """Return the caller's names of the sampling parameters, by our names."""
    return {_OUR_NAMES.get(name, name): prefix + name for name in LlamaSampling.__struct_fields__}


Body = TypeVar("Body", bound=msgspec.Struct)

# The tables have paths without indexes. "*." in front of a name means: at any depth.
ACCEPTED = frozenset(
    (
        *("metadata", "user", "safety_identifier", "store", "client_metadata", "request_id", "rid"),
        *("betas", "anthropic_version", "container", "max_tool_calls", "stream_options.include_obfuscation"),
        # Clients send these fields back with an answer's turn.
        *("messages.annotations", "messages.content.annotations", "messages.tool_calls.index", "messages.name"),
        *("input.id", "input.status", "input.phase", "input.summary", "input.encrypted_content"),
        *("input.content.annotations", "input.content.logprobs", "messages.content.signature"),
        *("messages.content.citations", "system.citations", "messages.content.caller"),
        # The streaming of a tool's arguments, and the name of a schema.
        *("tools.eager_input_streaming", "response_format.json_schema.name", "text.format.name"),
    )
)
HINTS = frozenset(
    (
        *("service_tier", "prompt_cache_key", "prompt_cache_options"),
        *("context_management", "reasoning_effort", "verbosity", "prediction", "reasoning", "thinking", "speed"),
        *("output_config.task_budget", "reasoning.summary", "reasoning.exclude"),
        *("reasoning.generate_summary", "text.verbosity", "thinking.display"),
        *("options.num_ctx", "options.num_batch", "options.num_gpu", "options.main_gpu", "options.num_thread"),
        *("options.use_mmap", "options.use_mlock", "options.numa", "options.num_keep", "options.repeat_last_n"),
        *(
            "options.penalize_newline",
            "options.low_vram",
            "options.f16_kv",
            "truncate",
            "shift",
            "keep_alive",
            "verbose",
        ),
        # llama.cpp's server
        *("cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms", "t_max_predict_ms"),
        *("n_indent", "return_tokens", "return_progress", "timings_per_token", "repeat_last_n"),
        *("samplers", "min_keep", "post_sampling_probs"),
        *("inference_geo", "mcp_servers", "tools.defer_loading", "tools.input_examples", "tools.allowed_callers"),
    )
)
# These fields would change the answer; each with the reason for the refusal.
REFUSED = {
    "functions": "is the old name of tools",
    "function_call": "is the old name of tool_choice",
    "rank_fields": "documents are ranked by their text",
    "audio": "only text can be generated",
    "modalities": "only text can be generated",
    "web_search_options": "the web cannot be searched",
    "use_beam_search": "beam search is not supported over HTTP",
    "conversation": "conversations are not stored: send the messages, or previous_response_id",
    "messages.audio": "only text is understood",
    "messages.images": "only text is understood",
    "messages.refusal": "is not the answer's text: send it as content",
    "messages.function_call": "is the old name of tool_calls",
}
# Values at which a field of the other tables has no effect.
_NOTHING: tuple[object, ...] = ([], {}, "", "none", "auto", False, ["text"])
# Fields of other servers that have no effect at these values; with other values they are refused by name.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n_probs": (0,),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "dynatemp_range": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "options.typical_p": (1, 1.0),
    "options.tfs_z": (1, 1.0),
    "options.mirostat": (0,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "best_of": (1,),
    "spaces_between_special_tokens": (True, False),
    "add_special_tokens": (True, False),
    "echo": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "guided_decoding_backend": ("auto",),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "cache_salt": ("",),
    "chat_template": (),
    "structural_tag": (),
    "ebnf": (),
    "lora_path": (),
    "session_params": ({},),
    "return_hidden_states": (False,),
    "data_parallel_rank": (),
    "stop_regex": ([],),
    "return_cached_tokens_details": (False,),
    "return_routed_experts": (False,),
    "stream_reasoning": (True, False),
}
# Seconds for which Anthropic's `cache_control` and OpenAI's `prompt_cache_retention` ask to keep a prompt.
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0, "in_memory": 300.0, "in-memory": 300.0, "24h": 86400.0}
# The response header that names the ignored fields. The names come from the client, so their number, length and
# letters are bounded.
HEADER = "x-ignored-fields"
MAX_NAMED, MAX_NAME_LENGTH = 32, 80
_INDEX = re.compile(r"\[\d+\]")
_NO_NAME = re.compile(r"[^\w.\[\]-]", re.ASCII)


@cache  # msgspec evaluates all annotations at each call
def _structs_in(kind: type[msgspec.Struct]) -> Mapping[str, type[msgspec.Struct]]:
    """Return the types of the fields that hold a Struct or None, by their names."""
    kinds: dict[str, type[msgspec.Struct]] = {}
    for info in msgspec.structs.fields(kind):
        for each in filter(_is_struct, get_args(info.type)):
            kinds.setdefault(info.name, each)
    return kinds


class Fields:
    """Reads the fields of one body, and remembers the names of those that it ignores.

    Args:
        strict: whether a field that no API has published is refused.
        elsewhere: fields of other endpoints; this endpoint refuses them, since they would have no effect.
    """

    def __init__(self, *, strict: bool = False, elsewhere: Container[str] = ()) -> None:
        self._strict = strict
        self._elsewhere = elsewhere
        self._ignored: dict[str, None] = {}
        self._cache_ttl_s = 0.0

    @property
    def hints(self) -> dict[str, float]:
        """Return the longest time for which the body asks to keep its prompt; an empty dict if it does not ask."""
        return {"cache_ttl_s": self._cache_ttl_s} if self._cache_ttl_s else {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """The paths of the ignored fields, without their indexes: `messages[].content[].annotations`."""
        return tuple(self._ignored)

    @property
    def headers(self) -> dict[str, str]:
        """Return the response header that names the ignored fields; an empty dict if there are none."""
        return {HEADER: ", ".join(self._ignored)} if self._ignored else {}

    def read(self, body: dict[str, Any], kind: type[Body]) -> Body:
        """Return the body as a Struct.

        Raises:
            InvalidRequest: with the path of the first fault.
        """
        typed: Body = check_type(self._known(body, kind, ""), kind)
        return typed

    def take(self, body: dict[str, Any], names: Container[str], path: str) -> dict[str, Any]:
        """Return the fields of `body` that have these names and a value; raises as `read`.

        Args:
            path: the path of `body`; "" for the whole body.
        """
        taken = {}
        for name, value in body.items():
            if value is None:
                continue
            if name in names:
                taken[name] = value
            else:
                self._leave(f"{path}.{name}" if path else name, value)
        return taken

    def ignore(self, path: str) -> None:
        """Note a part of the body that has no effect."""
        if len(self._ignored) < MAX_NAMED:
            self._ignored[_NO_NAME.sub("?", _INDEX.sub("[]", path))[:MAX_NAME_LENGTH]] = None

    def _known(self, body: dict[str, Any], kind: type[msgspec.Struct], path: str) -> dict[str, Any]:
        """Return the fields of `kind` in `body`, and those of Structs within it."""
        known = self.take(body, kind.__struct_fields__, path)
        for name, inner in _structs_in(kind).items():
            if isinstance(known.get(name), dict):
                known[name] = self._known(known[name], inner, f"{path}.{name}" if path else name)
        return known

    def _leave(self, path: str, value: object) -> None:
        """Refuse or ignore a field that the endpoint does not use."""
        plain = _INDEX.sub("", path)
        if plain in ACCEPTED:
            return
        if plain.rpartition(".")[2] == "cache_control" or plain == "prompt_cache_retention":
            if value in _NOTHING:
                return
            ttl = value.get("ttl", "5m") if isinstance(value, dict) else value
            known = CACHE_TTLS.get(ttl) if isinstance(ttl, str) else None
            self._cache_ttl_s = max(self._cache_ttl_s, known or 0.0)
            if known is None:
                self.ignore(path)
            return
        if plain in NEUTRAL:
            if value not in NEUTRAL[plain]:
                raise InvalidRequest(path, f"is not supported at this value: {value!r:.60}")
            return
        is_hint = plain in HINTS or f"*.{plain.rpartition('.')[2]}" in HINTS
        is_known = is_hint or plain in REFUSED or plain in self._elsewhere
        if is_known and value in _NOTHING:
            return
        if plain in REFUSED:
            raise InvalidRequest(path, REFUSED[plain])
        if not is_hint and plain in self._elsewhere:
            raise InvalidRequest(path, "is a field of another endpoint, and has no effect here")
        if not is_hint and self._strict:
            raise InvalidRequest(path, "is a field of no API that is served here (http_strict)")
        self.ignore(path)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


EFFORT_NAMES = get_args(Effort)


class ThinkingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `thinking` object of Anthropic's bodies.

    Args:
        type: "disabled" for no thinking; "enabled" or "adaptive" for thinking.
        budget_tokens: most tokens of thinking.
    """

    type: str
    budget_tokens: int | None = None


class ReasoningFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `reasoning`, and OpenRouter's.

    Args:
        effort: one of `EFFORT_NAMES`.
        max_tokens: most tokens of thinking.
        enabled: whether to think at all.
    """

    effort: Any = None
    max_tokens: int | None = None
    enabled: bool | None = None


class ThinkingParams:
    """Collects the parameters of thinking from one body; None in a field means that the body does not set it.

    Args:
        reader: remembers which fields are ignored.
    """

    def __init__(self, reader: Fields) -> None:
        self.names: dict[str, str] = {}  # the caller's names, by ours
        self.asked: list[str] = []  # fields without effect for a model that does not think
        self._reader = reader
        self._params: dict[str, Any] = {}
        self._is_off = self._is_on = False

    def effort(self, path: str, effort: object) -> None:
        """Set the effort. A value that no API has published is ignored and named."""
        if effort is None:
            return
        if effort not in EFFORT_NAMES:
            self._reader.ignore(path)
            return
        self._set("reasoning_effort", effort, path)
        if effort != "none":
            self.asked.append(path)

    def budget(self, path: str, budget: int | None) -> None:
        """Set the most tokens of thinking."""
        if budget is not None:
            self._set("max_thinking_tokens", budget, path)
            self.asked.append(path)

    def switch(self, path: str, is_on: bool | None) -> None:
        """Turn thinking on or off."""
        if is_on is not None:
            self._is_on |= is_on
            self._is_off |= not is_on
            if is_on:
                self.asked.append(path)

    def thinking(self, fields: ThinkingFields | None) -> None:
        """Read Anthropic's object."""
        if fields is not None:
            self.switch("thinking.type", fields.type != "disabled")
            self.budget("thinking.budget_tokens", fields.budget_tokens)

    def reasoning(self, fields: ReasoningFields | None) -> None:
        """Read OpenAI's and OpenRouter's object."""
        if fields is not None:
            self.effort("reasoning.effort", fields.effort)
            self.budget("reasoning.max_tokens", fields.max_tokens)
            self.switch("reasoning.enabled", fields.enabled)

    def result(self, variables: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the parameters of the request.

        Args:
            variables: the caller's own variables of the chat template, which have priority.
        """
        params = dict(self._params)
        if self._is_off:  # the effort may concern the answer
            params = {"reasoning_effort": "none"}
            self.asked.clear()
        elif self._is_on and "reasoning_effort" not in params:
            variables = {"enable_thinking": True, "thinking": True} | (variables or {})
        if variables:
            params["chat_template_kwargs"] = variables
        return params

    def _set(self, name: str, value: object, path: str) -> None:
        if self._params.setdefault(name, value) != value:
            raise InvalidRequest(path, f"is another name of {self.names[name]}, which has another value")
        self.names.setdefault(name, path)
