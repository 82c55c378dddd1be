"""Validation: the checks of requests that need no model, for all entry points.

RequestLimits are the operator's caps on one request. A Grammar is the constraint on an answer, from any parameter that
sets a constraint.
"""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import msgspec

from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import (
    MAX_COUNT,
    MAX_SEED,
    DetokenizeRequest,
    DrawnTokens,
    EmbedRequest,
    GenerateRequest,
    Message,
    PromptRequest,
    ResponseFormat,
    ScoreRequest,
    SessionRequest,
    Tool,
)
from genbatch.proto.service_messages import DrainRequest, LoadAdapterRequest, LoadModelRequest, UnloadAdapterRequest


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's limits of one request.

    Args:
        max_n: most answers.
        max_logprobs: most likeliest tokens reported with each token.
        max_stop: most stop strings, and most stop token ids.
        max_stop_length: most characters of a stop string.
        max_messages: most messages of a conversation.
        max_logit_bias: most token ids with a bias, most allowed token ids, and most bad words.
        max_grammar_bytes: most bytes of a JSON schema, grammar or regular expression for the answer.
        max_grammar_s: most seconds of processor time to compile it.
        max_deadline_s: the longest deadline in seconds.
        max_inputs: most texts to embed, and most documents to score.
    """

    max_n: int = 8
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_length: int = 256
    max_messages: int = 1024
    max_logit_bias: int = 1024
    max_grammar_bytes: int = 65536
    max_grammar_s: float = 1.0
    max_deadline_s: float = 86400.0
    max_inputs: int = 2048


GrammarKind = Literal["json_schema", "grammar", "lark", "regex"]
SCHEMA_FIELD = "response_format.schema"
# Parameters with which an answer could break its grammar, or no token could follow.
_EXCLUDED = ("min_tokens", "ignore_eos", "echo")


class _Shaped(msgspec.Struct):
    """Gives errors within a response format their path."""

    response_format: ResponseFormat


@dataclass(frozen=True, slots=True)
class Grammar:
    """The constraint on an answer.

    Args:
        kind: the format of `text`; "grammar" is Lark or GBNF, and "lark" is certainly Lark.
        text: a JSON Schema, a grammar or a regular expression.
        field: the parameter that set it, for errors.
        answer: the meaning of `@answer` in a Lark grammar.
    """

    kind: GrammarKind
    text: str
    field: str
    answer: "Grammar | None" = None


def grammar_of(request: GenerateRequest) -> Grammar | None:
    """Return the constraint on a request's answers; None for free answers.

    Raises:
        InvalidRequest: the schema cannot be written as JSON.
    """
    if request.grammar is not None:
        return Grammar("grammar", request.grammar, "grammar")
    if request.regex is not None:
        return Grammar("regex", request.regex, "regex")
    form = request.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar("json_schema", '{"type": "object"}', "response_format")
    if isinstance(form.schema, str):
        return Grammar("json_schema", form.schema, SCHEMA_FIELD)
    try:
        return Grammar("json_schema", json.dumps(form.schema, allow_nan=False, ensure_ascii=False), SCHEMA_FIELD)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(SCHEMA_FIELD, f"is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(SCHEMA_FIELD, "is nested too deeply") from None


def check_grammar(request: GenerateRequest, limits: RequestLimits) -> None:
    """Check the constraint on the answers, as far as possible without compiling it.

    Raises:
        InvalidRequest: with the path of the parameter at fault.
    """
    form = request.response_format
    if form is not None and (form.type == "json_schema") != (form.schema is not None):
        rule = "is missing" if form.schema is None else f"goes with the type json_schema only, not {form.type}"
        raise InvalidRequest(SCHEMA_FIELD, rule)
    present = [name for name in ("response_format", "grammar", "regex") if getattr(request, name) is not None]
    if form is not None and form.type == "text":
        present.remove("response_format")
    if len(present) > 1:
        raise InvalidRequest(
            present[1], f"give at most one of response_format, grammar and regex, not {' and '.join(present)}"
        )
    if holds_to_tools(request):
        _check_excluded(request, "tools")
    grammar = grammar_of(request)
    if grammar is None:
        return
    if not grammar.text:
        raise InvalidRequest(grammar.field, "is empty")
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(grammar.field, "is not valid Unicode: it has a lone surrogate") from None
    # guard: cap on a grammar's size
    if size > limits.max_grammar_bytes:
        raise InvalidRequest(grammar.field, f"has {size} bytes; at most {limits.max_grammar_bytes} are allowed")
    _check_excluded(request, present[0])


def has_shape(request: GenerateRequest) -> bool:
    """Return whether the request has a constraint on its answers."""
    form = request.response_format
    return request.grammar is not None or request.regex is not None or (form is not None and form.type != "text")


def holds_to_tools(request: GenerateRequest) -> bool:
    """Return whether a grammar must enforce the tools' schemas."""
    if not request.tools or request.tool_choice == "none":
        return False
    return request.tool_choice != "auto" or any(tool.strict for tool in request.tools)


def _check_excluded(request: GenerateRequest, constraint: str) -> None:
    for name in _EXCLUDED:
        if getattr(request, name):
            raise InvalidRequest(name, f"cannot be combined with {constraint}: the answer must match it, and end there")


MAX_PRIORITY = 100
MAX_CACHE_TTL_S = 86400.0
MAX_LOGIT_BIAS = 100.0  # as other services document
MAX_NAME_LENGTH = 128  # characters of a role or a tenant
MAX_PATH_LENGTH = 4096  # characters; the limit of file systems
MAX_PAYER_LENGTH = 256  # characters of the name of a fleet's client
MAX_SERVED = 1e18  # weighted tokens
MAX_DRAIN_S = 86400.0
MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


# The ranges that the sampling parameters of a request declare beside their types.
SAMPLING_RANGES = {
    name: bounds
    for name, kind in get_type_hints(GenerateRequest, include_extras=True).items()
    for bounds in getattr(kind, "__metadata__", ())
}


class _Offered(msgspec.Struct):
    """Gives errors within a tool their path."""

    tools: list[Tool]


def check_type(value: object, kind: Any) -> Any:
    """Return plain data as a value of a type.

    Raises:
        InvalidRequest: with the path of the first fault.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(*_fault(str(error))) from None
    except UnicodeEncodeError:  # msgspec raises it for a name or a word of a fixed list
        raise InvalidRequest(None, "a name or a word is not valid Unicode: it has a lone surrogate") from None
    except RecursionError:
        raise InvalidRequest(None, "is nested too deeply") from None


def _fault(message: str) -> tuple[str | None, str]:
    """Return the path and the reason in msgspec's "Expected `int`, got `str` - at `$.stop[0]`"."""
    reason, _, where = message.partition(" - at ")
    path = where.rpartition("`$")[2].rstrip("`").lstrip(".")
    if reason.startswith("Object contains unknown field `"):
        name = reason.partition("`")[2].rstrip("`")
        return (f"{path}.{name}" if path else name), "unknown parameter"
    if reason.startswith("Object missing required field `"):
        name = reason.partition("`")[2].rstrip("`")
        return (f"{path}.{name}" if path else name), "is missing"
    if where.startswith("`key`"):
        reason += " as a key"
    return path or None, reason[0].lower() + reason[1:]


def num_characters(value: object) -> int:
    """Return the characters in a message or a part of it; each element of a list or map counts as eight more."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, msgspec.Struct):
        return sum(num_characters(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, list | tuple):
        return 8 * len(value) + (0 if set(map(type, value)) <= {int, float} else sum(map(num_characters, value)))
    if isinstance(value, dict):
        return 8 * len(value) + sum(map(num_characters, value)) + sum(map(num_characters, value.values()))
    return 0


_CONTAINERS = {list, dict}


def is_deeper(value: object, levels: int) -> bool:
    """Return whether lists and dictionaries are nested more than `levels` deep."""
    if not isinstance(value, list | dict):
        return False
    if levels == 0:
        return True
    elements = value.values() if isinstance(value, dict) else value
    if _CONTAINERS.isdisjoint(map(type, elements)):  # stays in C for long lists of token ids
        return False
    return any(is_deeper(element, levels - 1) for element in elements)


def check_types(request: GenerateRequest) -> None:
    """Check the types of a request that a program has made, since a Struct's constructor does not check them.

    Raises:
        InvalidRequest: with the path of the first parameter at fault.
    """
    check_type(msgspec.structs.asdict(request), GenerateRequest)
    # `check_type` does not look into a struct within another one.
    if request.tools:
        check_type({"tools": [msgspec.structs.asdict(tool) for tool in request.tools]}, _Offered)
    if request.response_format is not None:
        check_type({"response_format": msgspec.structs.asdict(request.response_format)}, _Shaped)


def validate_request(
    request: GenerateRequest, limits: RequestLimits, *, drawn: Sequence[DrawnTokens] = (), is_typed: bool = True
) -> None:
    """Check the ranges and rules that need no model.

    Args:
        drawn: the tokens that each choice has drawn before; empty for a new request.
        is_typed: whether the types were checked, as a gateway does for clients. False checks them here.

    Raises:
        InvalidRequest: with the path of the first parameter at fault.
    """
    if not is_typed:
        check_types(request)
    _check_prompt(request, limits)
    _check_tools(request)
    _check_lengths(request, limits)
    _check_sampling(request, limits)
    _check_stopping(request, limits)
    check_grammar(request, limits)
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_text("tenant", request.tenant, MAX_NAME_LENGTH)
    _check_text("model", request.model or "")
    if request.payer is not None:
        _check_text("payer.name", request.payer.name, MAX_PAYER_LENGTH)
        _check_range("payer.served", request.payer.served, 0.0, MAX_SERVED)
    if drawn:
        _check_drawn(drawn, request)


def validate_text(request: PromptRequest, limits: RequestLimits) -> None:
    """Validate a request to tokenize. Its prompt may be empty. Raises as `validate_request`."""
    check_type(msgspec.structs.asdict(request), type(request))
    if _check_given(request, ("prompt", "messages")) == "messages" and not request.messages:
        raise InvalidRequest("messages", "is empty")
    _check_offer(request)
    _check_text("prompt", request.prompt or "")
    _check_messages(request.messages or [], limits)


def validate_detokenize(request: DetokenizeRequest) -> None:
    """Validate a request to detokenize; raises as `validate_request`."""
    check_type(msgspec.structs.asdict(request), DetokenizeRequest)
    _check_token_ids(request.token_ids)


_SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def validate_session(request: SessionRequest) -> None:
    """Check the name and the tenant of a session.

    Raises:
        InvalidRequest: the name could be a path, or a text is too long.
    """
    # guard: a name is no path
    if not _SESSION_NAME.fullmatch(request.name):
        rule = 'is 1 to 128 letters, digits, ".", "_" and "-", the first a letter or a digit'
        raise InvalidRequest("name", f"{rule}; not {request.name[:64]!r}")
    _check_text("tenant", request.tenant, MAX_NAME_LENGTH)


def validate_embed(request: EmbedRequest, limits: RequestLimits) -> None:
    """Validate a request to embed; raises as `validate_request`."""
    check_type(msgspec.structs.asdict(request), EmbedRequest)
    kinds = {str} if isinstance(request.input, str) else set(map(type, request.input))
    if not kinds:
        raise InvalidRequest("input", "is empty")
    if len(kinds) > 1:
        raise InvalidRequest("input", "has texts and token ids side by side; give either")
    several = kinds != {int} and not isinstance(request.input, str)
    if several:
        _check_count("input", len(request.input), limits.max_inputs)
    for index, text in enumerate(request.texts):
        field = f"input[{index}]" if several else "input"
        if not text:
            raise InvalidRequest(field, "is empty")
        if isinstance(text, str):
            _check_text(field, text)
        elif min(text) < 0:
            position = next(place for place, token_id in enumerate(text) if token_id < 0)
            raise InvalidRequest(f"{field}[{position}]", f"{text[position]} is negative")
    if request.dimensions is not None:
        _check_range("dimensions", request.dimensions, 1, MAX_COUNT)
    _check_deadline(request, limits)
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_text("tenant", request.tenant, MAX_NAME_LENGTH)


def validate_score(request: ScoreRequest, limits: RequestLimits) -> None:
    """Validate a request to score; raises as `validate_request`."""
    check_type(msgspec.structs.asdict(request), ScoreRequest)
    if not request.documents:
        raise InvalidRequest("documents", "is empty")
    _check_count("documents", len(request.documents), limits.max_inputs)
    if isinstance(request.query, list) and len(request.query) != len(request.documents):
        rule = f"has {len(request.query)} entries, and there are {len(request.documents)} documents"
        raise InvalidRequest("query", rule)
    for index, (query, document) in enumerate(request.pairs):
        place = f"query[{index}]" if isinstance(request.query, list) else "query"
        if query == "":
            raise InvalidRequest(place, "is empty")
        if query is None and not document:
            raise InvalidRequest(f"documents[{index}]", "is empty")
        _check_text(place, query or "")
        _check_text(f"documents[{index}]", document)
    _check_text("instruction", request.instruction or "")
    _check_given_range("max_document_tokens", request.max_document_tokens, 1, MAX_COUNT)
    _check_deadline(request, limits)
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_text("tenant", request.tenant, MAX_NAME_LENGTH)


def validate_texts(request: EmbedRequest | ScoreRequest, limits: RequestLimits) -> None:
    """Validate a request to embed or to score; raises as `validate_request`."""
    if isinstance(request, ScoreRequest):
        validate_score(request, limits)
    else:
        validate_embed(request, limits)


def validate_drain(request: DrainRequest) -> None:
    """Validate a request to drain; raises as `validate_request`."""
    check_type(msgspec.structs.asdict(request), DrainRequest)
    _check_range("timeout_s", request.timeout_s, 0, MAX_DRAIN_S)


def validate_load_adapter(request: LoadAdapterRequest) -> None:
    """Validate a request to load an adapter; raises as `validate_request`."""
    check_type(msgspec.structs.asdict(request), LoadAdapterRequest)
    _check_text("name", request.name, MAX_NAME_LENGTH)
    _check_text("path", request.path, MAX_PATH_LENGTH)
    if not request.path.startswith("/") or "\0" in request.path:
        raise InvalidRequest("path", "is not the absolute path of a directory on the service's machine")


def validate_load_model(request: LoadModelRequest) -> None:
    """Validate a request to load a model; raises as `validate_request`."""
    check_type(msgspec.structs.asdict(request), LoadModelRequest)
    if request.model is not None:
        _check_text("model", request.model, MAX_NAME_LENGTH)
    if request.keep_alive is not None and not math.isfinite(request.keep_alive):
        raise InvalidRequest("keep_alive", f"must be a number of seconds, not {request.keep_alive}")


def validate_unload_adapter(request: UnloadAdapterRequest) -> None:
    """Validate a request to unload an adapter; raises as `validate_request`."""
    check_type(msgspec.structs.asdict(request), UnloadAdapterRequest)
    _check_text("name", request.name, MAX_NAME_LENGTH)
    _check_range("timeout_s", request.timeout_s, 0, MAX_DRAIN_S)


def _check_prompt(request: GenerateRequest, limits: RequestLimits) -> None:
    field = _check_given(request, ("prompt", "token_ids", "messages"))
    if not getattr(request, field):
        raise InvalidRequest(field, "is empty")
    _check_text("prompt", request.prompt or "")
    _check_token_ids(request.token_ids or [])
    _check_messages(request.messages or [], limits)


def _check_given(request: PromptRequest, names: tuple[str, ...]) -> str:
    """Return the one parameter among `names` that the request sets."""
    present = [name for name in names if getattr(request, name) is not None]
    if len(present) != 1:
        choices = f"{', '.join(names[:-1])} and {names[-1]}"
        raise InvalidRequest("prompt", f"give exactly one of {choices}, not {' and '.join(present) or 'none'}")
    return present[0]


def _check_token_ids(token_ids: list[int]) -> None:
    if token_ids and min(token_ids) < 0:
        index = next(index for index, token_id in enumerate(token_ids) if token_id < 0)
        raise InvalidRequest(f"token_ids[{index}]", f"{token_ids[index]} is negative")


def _check_messages(messages: list[Message], limits: RequestLimits) -> None:
    _check_count("messages", len(messages), limits.max_messages)
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"messages[{index}].role", "is empty")
        _check_text(f"messages[{index}].role", message.role, MAX_NAME_LENGTH)
        _check_text(f"messages[{index}].content", message.content)
        _check_text(f"messages[{index}].name", message.name or "", MAX_NAME_LENGTH)
        _check_text(f"messages[{index}].tool_call_id", message.tool_call_id or "", MAX_NAME_LENGTH)
        _check_text(f"messages[{index}].reasoning_content", message.reasoning_content or "")
        _check_calls(message, f"messages[{index}]")


def _check_calls(message: Message, path: str) -> None:
    for number, call in enumerate(message.tool_calls):
        place = f"{path}.tool_calls[{number}]"
        if message.role != "assistant":
            raise InvalidRequest(
                f"{path}.tool_calls", f"only an assistant's turn has tool calls, not one of the role {message.role!r}"
            )
        for name in ("id", "name"):
            _check_text(f"{place}.{name}", getattr(call, name), MAX_NAME_LENGTH)
        _check_text(f"{place}.arguments", call.arguments)
        # JSON can contain what no valid text or number is: half a surrogate pair, NaN.
        # guard: arguments of a call that was sent back
        _check_json(f"{place}.arguments", call_arguments(call.arguments))


def call_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call that was sent back, as an object.

    An answer may have ended inside a call (`max_tokens`), and agents send such a call back. Its text is kept as the
    value of one argument, since chat templates read an object.
    """
    with suppress(ValueError, RecursionError):
        if isinstance(arguments := json.loads(text or "{}"), dict):
            return arguments
    return {"incomplete": text}


def _check_tools(request: GenerateRequest) -> None:
    tool, tools = request.named_tool, request.tools
    names = [tool.name for tool in tools]
    _check_offer(request)
    if tool is not None and tool not in names:
        offered = ", ".join(names) or "none"
        raise InvalidRequest("tool_choice.name", f"{tool[:64]!r} is not one of the tools: {offered}")
    if request.tool_choice == "required" and not tools:
        raise InvalidRequest("tool_choice", "'required' needs at least one tool in tools")
    if request.continue_final_message and not request.messages:
        raise InvalidRequest("continue_final_message", "goes with messages only")


def _check_offer(request: PromptRequest) -> None:
    tools = request.tools
    names = [tool.name for tool in tools]
    # guard: cap on tools
    _check_count("tools", len(tools), MAX_TOOLS)
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if _TOOL_NAME.fullmatch(tool.name) is None:
            shown = f"{tool.name[:64]!r}"
            raise InvalidRequest(f"{path}.name", f'must be 1 to 64 letters, digits, "_", "-" and ".", not {shown}')
        if tool.name in names[:index]:
            raise InvalidRequest(f"{path}.name", f"two tools have the name {tool.name}")
        _check_text(f"{path}.description", tool.description or "")
        _check_json(f"{path}.parameters", tool.parameters)
        if tool.parameters is not None and tool.parameters.get("type", "object") != "object":
            raise InvalidRequest(f"{path}.parameters", 'arguments are an object: its type must be "object"')
    _check_json("chat_template_kwargs", request.chat_template_kwargs)
    for name in ("tools", "chat_template_kwargs"):
        if getattr(request, name) and not request.messages:
            raise InvalidRequest(name, "goes with messages only: it is for the chat template")


def _check_json(field: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(field, "is not JSON, is nested too deeply or has a lone surrogate") from None


def _check_lengths(request: GenerateRequest, limits: RequestLimits) -> None:
    if request.max_tokens is not None:
        shows_prompt = request.echo or request.prompt_logprobs is not None
        _check_range("max_tokens", request.max_tokens, 0 if shows_prompt else 1, MAX_COUNT)
    _check_range("min_tokens", request.min_tokens, 0, MAX_COUNT)
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise InvalidRequest("min_tokens", f"{request.min_tokens} is more than max_tokens, {request.max_tokens}")
    _check_given_range("truncate_prompt_tokens", request.truncate_prompt_tokens, 1, MAX_COUNT)
    _check_given_range("max_thinking_tokens", request.max_thinking_tokens, 0, MAX_COUNT)
    for name in ("reasoning_effort", "max_thinking_tokens"):
        if getattr(request, name) is not None and not request.messages:
            raise InvalidRequest(name, "goes with messages only: thinking is marked by the chat template")
    # guard: cap on n
    _check_range("n", request.n, 1, limits.max_n)
    if request.cache_ttl_s is not None:
        _check_range("cache_ttl_s", request.cache_ttl_s, 0, MAX_CACHE_TTL_S, above=True)
    _check_deadline(request, limits)


def _check_deadline(request: GenerateRequest | EmbedRequest | ScoreRequest, limits: RequestLimits) -> None:
    if request.deadline_s is not None:
        # guard: cap on the deadline
        _check_range("deadline_s", request.deadline_s, 0, limits.max_deadline_s, above=True)


def _check_sampling(request: GenerateRequest, limits: RequestLimits) -> None:
    for name, (low, high) in SAMPLING_RANGES.items():
        _check_given_range(name, getattr(request, name), low, high)
    _check_count("logit_bias", len(request.logit_bias or ()), limits.max_logit_bias)
    for token_id, bias in (request.logit_bias or {}).items():
        _check_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if token_id < 0:
            raise InvalidRequest(f"logit_bias[{token_id}]", "the token id is negative")
    _check_given_range("seed", request.seed, 0, MAX_SEED)
    for name in ("logprobs", "prompt_logprobs"):
        # guard: cap on logprobs
        _check_given_range(name, getattr(request, name), 0, limits.max_logprobs)


def _check_stopping(request: GenerateRequest, limits: RequestLimits) -> None:
    # guard: cap on stop strings
    _check_count("stop", len(request.stop), limits.max_stop)
    for index, text in enumerate(request.stop):
        if not text:
            raise InvalidRequest(f"stop[{index}]", "is empty")
        _check_text(f"stop[{index}]", text, limits.max_stop_length)
    _check_count("stop_token_ids", len(request.stop_token_ids), limits.max_stop)
    for index, token_id in enumerate(request.stop_token_ids):
        if token_id < 0:
            raise InvalidRequest(f"stop_token_ids[{index}]", f"{token_id} is negative")
    if request.allowed_token_ids is not None:
        if not request.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "is empty, so no token could follow")
        _check_count("allowed_token_ids", len(request.allowed_token_ids), limits.max_logit_bias)
    _check_count("bad_words", len(request.bad_words), limits.max_logit_bias)
    for index, text in enumerate(request.bad_words):
        if not text.strip():
            raise InvalidRequest(f"bad_words[{index}]", "is empty")
        _check_text(f"bad_words[{index}]", text, limits.max_stop_length)


def _check_given_range(field: str, value: float | None, low: float, high: float) -> None:
    """Check a range as `_check_range` does; None is allowed."""
    if value is not None:
        _check_range(field, value, low, high)


def _check_range(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Check that low <= value <= high, or that low < value with `above`; refuse NaN and infinities."""
    if math.isfinite(value) and (low < value if above else low <= value) and value <= high:
        return
    rule = f"more than {low}" if above else f"at least {low}"
    if high != math.inf:
        rule += f" and at most {high}"
    raise InvalidRequest(field, f"must be {rule}, not {value}")


def _check_count(field: str, count: int, high: int) -> None:
    if count > high:
        raise InvalidRequest(field, f"has {count} entries; at most {high} are allowed")


def _check_text(field: str, text: str, max_length: int | None = None) -> None:
    if max_length is not None and len(text) > max_length:
        raise InvalidRequest(field, f"has {len(text)} characters; at most {max_length} are allowed")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(field, "is not valid Unicode: it has a lone surrogate") from None


def _check_drawn(drawn: Sequence[DrawnTokens], request: GenerateRequest) -> None:
    """Check the drawn tokens that a client sends with its request; the engine checks that they are the model's."""
    if len(drawn) != request.n:
        raise InvalidRequest("drawn", f"has the tokens of {len(drawn)} choices, the request has n = {request.n}")
    for choice, tokens in enumerate(drawn):
        path = f"drawn[{choice}]"
        if tokens.token_ids and not (min(tokens.token_ids) >= 0 and max(tokens.token_ids) < 2**32):
            raise InvalidRequest(f"{path}.token_ids", "has an id below 0 or of more than 32 bits")
        if len(tokens.call_ids) > len(tokens.token_ids):
            raise InvalidRequest(f"{path}.call_ids", "has more calls than tokens")
        if len(tokens.logprobs) != (len(tokens.token_ids) if request.logprobs is not None else 0):
            raise InvalidRequest(f"{path}.logprobs", "must have one entry a token if the request asks for log-probs")
        for index, (logprob, top) in enumerate(tokens.logprobs):
            if not (math.isfinite(logprob) and all(map(math.isfinite, top.values()))):
                raise InvalidRequest(f"{path}.logprobs[{index}]", "is not finite")
