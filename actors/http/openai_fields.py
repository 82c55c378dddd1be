"""The parameters of OpenAI's two generating endpoints, and of vLLM's additions to them: names, types, what is refused.

A parameter is taken, known and without meaning here, or refused by name. `null` is the same as not given.
"""

from typing import Any

import msgspec

from genbatch.proto.errors import InvalidRequest

# They name, file or bill a request, or hint at how to run it; no text is another for them.
WITHOUT_MEANING = frozenset(
    (
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "user",
    )
)  # fmt: skip
# What a request must not have, unless it is one of these values, with the reason.
_NOTHING: tuple[object, ...] = ([], {}, "none", "auto", False)
REFUSED = {
    "tools": "tool calls are not supported",
    "tool_choice": "tool calls are not supported",
    "functions": "tool calls are not supported",
    "function_call": "tool calls are not supported",
    "audio": "only text can be generated",
    "prediction": "predicted outputs are not supported",
    "reasoning_effort": "the effort of reasoning cannot be set",
    "verbosity": "how much is said cannot be set; ask for it in the prompt",
    "web_search_options": "the web cannot be searched",
    "suffix": "text can only be continued, not filled in",
    "use_beam_search": "beam search is not supported over HTTP",
}


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream tells what it cost.

    Args:
        include_usage: one more chunk, with the usage and no choices, before the end.
        continuous_usage_stats: taken from clients that send it; the counts come once, at the end.
        include_obfuscation: taken likewise; nothing is padded.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JSONSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer must validate against.

    Args:
        name: what to call it; not used.
        description: what it is for; not used.
        schema: a JSON Schema.
        strict: taken either way: an answer always keeps to its schema.
    """

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of an answer: "text", "json_object", or "json_schema" with `json_schema`."""

    type: str
    json_schema: JSONSchema | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take. Ranges are those of GenerateRequest, and are checked where all requests are."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: ResponseShape | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    return_tokens_as_token_ids: bool | None = None
    # Ours
    deadline_s: float | None = None
    grammar: str | None = None
    regex: str | None = None


class ChatFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /v1/chat/completions takes; `messages` are looked at one by one."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /v1/completions takes."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


def given(body: dict[str, Any]) -> dict[str, Any]:
    """The parameters in `body` that say something.

    Raises:
        InvalidRequest: one of them is refused.
    """
    for name, reason in REFUSED.items():
        value = body.get(name)
        if value is not None and value not in _NOTHING:
            raise InvalidRequest(name, reason)
    if body.get("modalities") not in (None, ["text"]):
        raise InvalidRequest("modalities", "only text can be generated")
    passed_over = WITHOUT_MEANING | REFUSED.keys() | {"modalities"}
    return {name: value for name, value in body.items() if value is not None and name not in passed_over}
