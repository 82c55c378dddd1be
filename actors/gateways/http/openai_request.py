"""OpenAI's API and Mistral's /v1/fim/completions: make requests of their bodies.

`bodies.py` has the treatment of all other parameters.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from genbatch.actors.gateways.http.bodies import (
    Fields,
    HTTPRequest,
    ReasoningFields,
    SamplingFields,
    ThinkingFields,
    ThinkingParams,
    build_request,
    set_fields,
)
from genbatch.actors.gateways.http.custom_tools import arguments_of, as_function
from genbatch.proto.errors import InvalidRequest


class StreamExtras(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a stream: whether it reports its usage.

    Args:
        include_usage: whether one more chunk, with the usage and no choices, precedes the end.
        continuous_usage_stats: accepted and not used; the counts come once, at the end.
        include_obfuscation: accepted and not used; no chunk is padded.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JSONSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON Schema that an answer must validate against.

    Args:
        name: its name; not used.
        description: its purpose; not used.
        schema: a JSON Schema.
        strict: not used, since an answer always keeps to its schema.
    """

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of an answer: "text", "json_object", or "json_schema" with `json_schema`.

    Args:
        schema: a JSON Schema beside "json_object", as llama.cpp's server takes it.
    """

    type: str
    json_schema: JSONSchema | None = None
    schema: dict[str, Any] | None = None


class GenerationFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of all three endpoints. `validate_request` checks their ranges, as those of every request."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamExtras | None = None
    n: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: ResponseShape | None = None
    # vLLM's
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    return_tokens_as_token_ids: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    # llama.cpp's
    json_schema: dict[str, Any] | None = None
    # Mistral's
    random_seed: int | None = None
    # Ours
    deadline_s: float | None = None
    grammar: str | None = None
    regex: str | None = None


class ChatFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions; each of the `messages` is checked by itself."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Any = None  # a hint, so that no value of it is an error
    # OpenRouter's and Anthropic's, which other services take, too
    reasoning: ReasoningFields | None = None
    thinking: ThinkingFields | None = None
    # Qwen's
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    separate_reasoning: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/completions; with a `suffix`, the answer fills the gap between prompt and suffix."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class FimFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/fim/completions, as Mistral's; without a `suffix`, the answer continues the prompt."""

    prompt: str
    suffix: str | None = None


# OpenAI's documented default.
DEFAULT_COMPLETION_TOKENS = 16
# The fields of a function's description, and of a custom tool's.
TOOL_FIELDS = ("name", "description", "parameters", "strict")
CUSTOM_FIELDS = ("name", "description", "format")
# The most prompts of one body; each prompt becomes a separate request.
MAX_PROMPTS = 128
# The roles of messages. Other roles of a template can be used over ZeroMQ and msgpack-RPC.
ROLES = ("system", "developer", "user", "assistant", "tool")
_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/")
_SAME_NAME = (
    *SamplingFields.__struct_fields__,
    *("n", "max_tokens", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids"),
    *("priority", "deadline_s", "stop", "grammar", "regex", "allowed_token_ids", "bad_words", "prompt_logprobs"),
    *("truncate_prompt_tokens", "skip_special_tokens"),
)


def read_chat(body: dict[str, Any], reader: Fields | None = None) -> HTTPRequest:
    """Return the request in a body for /v1/chat/completions.

    Args:
        reader: remembers which fields are ignored.

    Raises:
        InvalidRequest: with the path of the first fault.
    """
    reader = reader or Fields()
    fields = reader.read(body, ChatFields)
    params = _shared(fields)
    names = {}
    if fields.max_completion_tokens is not None:
        if fields.max_tokens not in (None, fields.max_completion_tokens):
            raise InvalidRequest("max_tokens", "is the old name of max_completion_tokens, which has another value")
        params["max_tokens"] = fields.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    num_top = None
    if fields.logprobs:
        num_top = fields.top_logprobs or 0
        params["logprobs"] = num_top
        names["logprobs"] = "top_logprobs"
    elif fields.top_logprobs is not None:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    params["messages"] = read_messages(fields.messages, reader)
    params |= _for_template(fields, reader, names)
    thinking = _thinking(fields, reader)
    params |= thinking.result(fields.chat_template_kwargs)
    names |= thinking.names
    more = {"custom": _custom_names(fields.tools or ()), "thinking": thinking.asked}
    return _request(fields, [params | reader.hints], names, num_top=num_top, **more)


def _thinking(fields: ChatFields, reader: Fields) -> ThinkingParams:
    thinking = ThinkingParams(reader)
    thinking.effort("reasoning_effort", fields.reasoning_effort)
    thinking.reasoning(fields.reasoning)
    thinking.thinking(fields.thinking)
    thinking.switch("enable_thinking", fields.enable_thinking)
    thinking.budget("thinking_token_budget", fields.thinking_token_budget)
    thinking.budget("thinking_budget", fields.thinking_budget)
    return thinking


def _for_template(fields: ChatFields, reader: Fields, names: dict[str, str]) -> dict[str, Any]:
    """Return the chat template's other variables; `names` gets the caller's names of the tools."""
    params: dict[str, Any] = {}
    offered: list[dict[str, Any]] = []
    allowed = allowed_tools(fields.tool_choice)
    for index, tool in enumerate(fields.tools or ()):
        if is_run_by_client(tool, f"tools[{index}]", reader):
            converted = _tool(tool, f"tools[{index}]", reader)
            if allowed is None or converted.get("name") in allowed.names:
                names[f"tools[{len(offered)}]"] = f"tools[{index}].{tool.get('type')}"
                offered.append(converted)
    if offered:
        params["tools"] = offered
        if fields.parallel_tool_calls is not None:
            params["parallel_tool_calls"] = fields.parallel_tool_calls
    if fields.tool_choice is not None:
        params["tool_choice"] = _choice(fields.tool_choice) if allowed is None else allowed.mode
    goes_on = bool(fields.continue_final_message)
    if goes_on:
        params["continue_final_message"] = True
    if fields.add_generation_prompt not in (None, not goes_on):
        rule = "excludes continue_final_message: set one of them"
        if not goes_on:
            rule = "false is only for continue_final_message: otherwise the answer is a turn of its own"
        raise InvalidRequest("add_generation_prompt", rule)
    if fields.include_reasoning is not False and fields.separate_reasoning is not False:
        params["reasoning"] = True
    return params


def is_run_by_client(
    tool: dict[str, Any], path: str, reader: Fields, kinds: Sequence[str] = ("function", "custom")
) -> bool:
    """Return whether the client runs a tool, which its kind shows. Tools that a server runs are left out."""
    kind = tool.get("type")
    if isinstance(kind, str) and kind not in kinds:
        reader.ignore(f"{path}.{kind}")
        return False
    return True


class AllowedTools(NamedTuple):
    """The tools that a choice of the type "allowed_tools" allows, among the offered ones."""

    mode: str
    names: frozenset[str]


def allowed_tools(choice: object) -> AllowedTools | None:
    """Read the tools that a choice allows, as chats and responses write it; None for a choice of another type.

    Raises:
        InvalidRequest: its mode or its tools are missing.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    path, inner = "tool_choice", choice
    if isinstance(choice.get("allowed_tools"), dict):
        path, inner = "tool_choice.allowed_tools", choice["allowed_tools"]
    if inner.get("mode") not in ("auto", "required"):
        raise InvalidRequest(f"{path}.mode", 'must be "auto" or "required"')
    tools = inner.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest(f"{path}.tools", "must be a list of tools")
    named = [tool.get(str(tool.get("type")), tool) for tool in tools]
    return AllowedTools(inner["mode"], frozenset(str(entry.get("name")) for entry in named if isinstance(entry, dict)))


def _tool(tool: dict[str, Any], path: str, reader: Fields) -> dict[str, Any]:
    """Return a tool in OpenAI's shape as a Tool; raises as `read_chat`."""
    kind = tool.get("type")
    function = tool.get(kind) if kind in ("function", "custom") else None
    if kind == "custom" and isinstance(function, dict):
        reader.take(tool, ("type", "custom"), path)
        custom = reader.take(function, CUSTOM_FIELDS, f"{path}.custom")
        return as_function(custom, f"{path}.custom", reader)
    if kind not in ("function", "custom"):
        raise InvalidRequest(f"{path}.type", f'must be "function", not {kind!r:.40}')
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path}.{kind}", "must be an object with a name")
    reader.take(tool, ("type", "function"), path)
    return reader.take(function, TOOL_FIELDS, f"{path}.function")


def _custom_names(tools: Sequence[dict[str, Any]]) -> frozenset[str]:
    custom = [tool.get("custom") for tool in tools if tool.get("type") == "custom"]
    return frozenset(str(tool.get("name")) for tool in custom if isinstance(tool, dict))


def _choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return "required" if choice == "any" else choice  # Mistral's word
    kind = choice.get("type")
    function = choice.get(kind) if kind in ("function", "custom") else None
    if not isinstance(function, dict):
        rule = 'must be "none", "auto", "required", or a function or a custom tool with its name'
        raise InvalidRequest("tool_choice", rule)
    return function


def read_completion(body: dict[str, Any], reader: Fields | None = None) -> HTTPRequest:
    """Return the request in a body for /v1/completions; raises as `read_chat`."""
    fields = (reader or Fields()).read(body, CompletionFields)
    params = {"max_tokens": DEFAULT_COMPLETION_TOKENS} | _shared(fields)
    if fields.best_of not in (None, fields.n or 1):
        raise InvalidRequest("best_of", "must equal n: all answers are returned")
    if fields.logprobs is not None:
        params["logprobs"] = fields.logprobs
    if fields.echo:
        params["echo"] = True
        if fields.logprobs is not None:
            if fields.stream:
                raise InvalidRequest("echo", "log-probs of a prompt cannot be streamed")
            if fields.prompt_logprobs not in (None, fields.logprobs):
                raise InvalidRequest("prompt_logprobs", "must be the same as logprobs, as echo shows the prompt's too")
            params["prompt_logprobs"] = fields.logprobs
    names = {"token_ids": "prompt"} | ({"prompt_logprobs": "logprobs"} if fields.prompt_logprobs is None else {})
    every = [params | prompt for prompt in read_prompts(fields.prompt)]
    if fields.suffix and (fields.echo or any("token_ids" in each for each in every)):
        raise InvalidRequest("suffix", "goes with prompts that are text, and without echo")
    more = {"num_top": fields.logprobs, "echo": bool(fields.echo), "suffix": fields.suffix or ""}
    return _request(fields, every, names, is_chat=False, **more)


def read_fim(body: dict[str, Any], reader: Fields | None = None) -> HTTPRequest:
    """Return the request in a body for /v1/fim/completions; raises as `read_chat`. Its answer is a chat's."""
    fields = (reader or Fields()).read(body, FimFields)
    return _request(fields, [_shared(fields) | {"prompt": fields.prompt}], {}, suffix=fields.suffix or "")


def _request(fields: GenerationFields, params: list[dict[str, Any]], names: dict[str, str], **more: Any) -> HTTPRequest:
    """Return the request of a body; `more` are further arguments of HTTPRequest."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options", "needs stream to be true")
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequest("prompt_logprobs", "log-probs of a prompt cannot be streamed")
    is_object = fields.response_format is not None and fields.response_format.type == "json_object"
    inner = "schema" if is_object else "json_schema.schema"
    names = names | {"response_format.schema": f"response_format.{inner}"}
    if fields.seed is None:
        names |= {"seed": "random_seed"}
    if fields.json_schema is not None:
        names |= {"response_format.schema": "json_schema", "response_format": "json_schema"}
    return HTTPRequest(
        model=fields.model,
        requests=[build_request(each, names) for each in params],
        n=1 if fields.n is None else fields.n,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        ids_for_text=bool(fields.return_tokens_as_token_ids),
        shows_ids=bool(fields.return_token_ids),
        scores_prompt=fields.prompt_logprobs is not None,
        names=names,
        **more,
    )


def _shared(fields: GenerationFields) -> dict[str, Any]:
    """Return the parameters that the three endpoints have."""
    params = set_fields(fields, _SAME_NAME)
    if fields.top_k == -1:  # vLLM's way to say "off"
        params["top_k"] = 0
    if fields.random_seed is not None:
        if fields.seed not in (None, fields.random_seed):
            raise InvalidRequest("random_seed", "is another name of seed, which has another value")
        params["seed"] = fields.random_seed
    if fields.seed is not None:
        # OpenAI's seeds are signed; a negative seed maps to the upper half of ours.
        params["seed"] = fields.seed % 2**64 if -(2**63) <= fields.seed < 0 else fields.seed
    if fields.response_format is not None:
        shape: dict[str, Any] = {"type": fields.response_format.type}
        if fields.response_format.json_schema is not None:
            shape["schema"] = fields.response_format.json_schema.schema
        elif fields.response_format.schema is not None and shape["type"] == "json_object":
            shape = {"type": "json_schema", "schema": fields.response_format.schema}
        params["response_format"] = shape
    if fields.truncate_prompt_tokens == -1:  # vLLM's way to say "as long as the context"
        del params["truncate_prompt_tokens"]
    if fields.return_token_ids:
        params["return_prompt_token_ids"] = True
    if fields.no_stop_trim or fields.include_stop_str_in_output:
        params["keep_stop"] = True
    params |= _shape(fields)
    if fields.logit_bias:
        params["logit_bias"] = {read_token_id(name): bias for name, bias in fields.logit_bias.items()}
    return params


def _shape(fields: GenerationFields) -> dict[str, Any]:
    """Return the shape of the answer, by vLLM's names, old and new, and by llama.cpp's."""
    guided = {f"guided_{name}": getattr(fields, f"guided_{name}") for name in ("json", "regex", "grammar", "choice")}
    for name, value in (fields.structured_outputs or {}).items():
        if value is None or value is False:
            continue
        if name == "json_object":
            return {"response_format": {"type": "json_object"}}
        if f"guided_{name}" not in guided:
            raise InvalidRequest(
                f"structured_outputs.{name}", "is not supported: json, json_object, regex, choice, grammar"
            )
        guided[f"guided_{name}"] = value
    params: dict[str, Any] = {}
    if fields.json_schema is not None:
        params["response_format"] = {"type": "json_schema", "schema": fields.json_schema}
    if guided["guided_json"] is not None:
        params["response_format"] = {"type": "json_schema", "schema": guided["guided_json"]}
    for name in ("regex", "grammar"):
        if guided[f"guided_{name}"] is not None:
            params[name] = guided[f"guided_{name}"]
    choices = guided["guided_choice"]
    if choices is not None:
        if not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise InvalidRequest("guided_choice", "must be a list of texts, none of them empty")
        params["regex"] = "|".join(f"({_quoted(choice)})" for choice in choices)
    return params


def _quoted(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(f"\\{character}" if character in _SPECIAL else character for character in text)


def read_token_id(name: str) -> int:
    """Return the token id in a key of `logit_bias`."""
    if not (name.isascii() and name.isdecimal() and len(name) <= len(str(2**63))):
        raise InvalidRequest("logit_bias", f"{name[:32]!r} is no token id")
    return int(name)


def read_prompts(prompt: str | list[str | int | list[int]]) -> list[dict[str, Any]]:
    """Return the prompts of a body, each as text or as token ids."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [{"token_ids": prompt}]
    if int in kinds:
        raise InvalidRequest("prompt", "must be texts and lists of token ids, or one list of token ids")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"has {len(prompt)} entries, {MAX_PROMPTS} are allowed")
    return [{"prompt" if isinstance(each, str) else "token_ids": each} for each in prompt]


def read_messages(messages: list[dict[str, Any]], reader: Fields | None = None) -> list[dict[str, Any]]:
    """Return the turns of a conversation; raises as `read_chat`."""
    reader = reader or Fields()
    return [_message(message, f"messages[{index}]", reader) for index, message in enumerate(messages)]


_MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "name")


def _message(message: dict[str, Any], path: str, reader: Fields) -> dict[str, Any]:
    """Return a turn. A client may send an answer back as it was received, with its empty fields and its calls."""
    values = {name: value for name, value in reader.take(message, _MESSAGE_FIELDS, path).items() if value != []}
    role = values.pop("role", None)
    if role is None:
        raise InvalidRequest(f"{path}.role", "is missing")
    if not isinstance(role, str):
        raise InvalidRequest(f"{path}.role", "must be a string")
    if role == "function":
        raise InvalidRequest(f"{path}.role", "is the old name of tool")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role", f"must be one of {', '.join(ROLES)}, not {role!r:.40}")
    if "tool_calls" not in values and "content" not in message:
        raise InvalidRequest(f"{path}.content", "is missing")
    # OpenAI's newer name of the system role.
    turn: dict[str, Any] = {"role": "system" if role == "developer" else role}
    has_calls = "tool_calls" in values
    turn["content"] = "" if has_calls and "content" not in values else _text(values.get("content"), path, reader)
    if has_calls:
        calls = values["tool_calls"]
        if not isinstance(calls, list):
            raise InvalidRequest(f"{path}.tool_calls", "must be a list")
        turn["tool_calls"] = [_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    # Programs that know both names of thinking send both.
    for name, ours in (("tool_call_id",) * 2, ("reasoning", "reasoning_content"), ("reasoning_content",) * 2):
        if name in values:
            turn[ours] = _string(values[name], f"{path}.{name}")
    if role == "tool" and "name" in values:
        turn["name"] = _string(values["name"], f"{path}.name")
    if role == "tool" and "tool_call_id" not in turn:
        raise InvalidRequest(f"{path}.tool_call_id", "is missing: which call does this answer?")
    return turn


def _call(call: object, path: str) -> dict[str, Any]:
    """Return a call of an assistant's turn. A call that came in a stream still has its `index`."""
    kind = call.get("type", "function") if isinstance(call, dict) else None
    function = call.get(kind) if isinstance(call, dict) and kind in ("function", "custom") else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(path, 'must be {"id", "type": "function", "function": {"name", "arguments"}}')
    if kind == "custom":
        return {
            "id": _string(call.get("id"), f"{path}.id"),
            "name": _string(function.get("name"), f"{path}.custom.name"),
            "arguments": arguments_of(_string(function.get("input"), f"{path}.custom.input")),
        }
    return {
        "id": _string(call.get("id"), f"{path}.id"),
        "name": _string(function.get("name"), f"{path}.function.name"),
        "arguments": _string(function.get("arguments"), f"{path}.function.arguments"),
    }


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(path, "must be a string")
    return value


def _text(content: object, path: str, reader: Fields) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}.content", "must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        place = f"{path}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = f"{kind!r}"[:40]
            raise InvalidRequest(f"{place}.type", f'only parts of type "text" are understood, not {shown}')
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{place}.text", "must be a string")
        reader.take(part, ("type", "text"), place)
        texts.append(part["text"])
    return "".join(texts)
