"""What callers write, made into a request: the one place, whatever the client."""

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from genbatch.proto.codec import to_generate_request
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, Message, check_type
from genbatch.proto.response_format import ResponseFormat
from genbatch.proto.service_messages import TokenizeRequest
from genbatch.proto.tools import Tool, ToolChoice

MessageLike = Message | Mapping[str, object]


class GenerateParams(TypedDict, total=False):
    """The parameters beside the prompt; GenerateRequest tells what each means and its range."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    response_format: ResponseFormat | Mapping[str, object] | None
    grammar: str | None
    regex: str | None
    tools: Sequence[Tool | Mapping[str, object]]
    tool_choice: ToolChoice | Mapping[str, str]
    parallel_tool_calls: bool
    reasoning: bool
    chat_template_kwargs: Mapping[str, object] | None
    continue_final_message: bool
    keep_stop: bool
    n: int
    priority: int
    deadline_s: float | None
    tenant: str


def build_request(
    prompt: str | Sequence[int] | None,
    messages: Sequence[MessageLike] | None,
    params: GenerateParams,
) -> GenerateRequest:
    """The request for a client's arguments, types checked; the service checks ranges.

    Raises:
        InvalidRequest: a parameter is unknown or of the wrong type; `field` is its path.
    """
    fields: dict[str, object] = dict(params)
    if isinstance(prompt, str) or prompt is None:
        fields["prompt"] = prompt
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        fields["token_ids"] = list(prompt)
    else:
        raise InvalidRequest("prompt", f"expected a string or token ids, got {type(prompt).__name__}")
    if messages is not None:
        fields["messages"] = _plain(messages)
    return to_generate_request(fields)


def build_tokenize(
    prompt: str | None, messages: Sequence[MessageLike] | None, add_special_tokens: bool
) -> TokenizeRequest:
    """As `build_request`, for `Client.tokenize`."""
    fields: dict[str, object] = {"prompt": prompt, "add_special_tokens": add_special_tokens}
    if messages is not None:
        fields["messages"] = _plain(messages)
    request: TokenizeRequest = check_type(fields, TokenizeRequest)
    return request


def generate_request(
    prompt: str | Sequence[int] | None = None,
    *,
    messages: Sequence[MessageLike] | None = None,
    **params: Unpack[GenerateParams],
) -> GenerateRequest:
    """As `build_request`, with the arguments of `Client.generate`."""
    return build_request(prompt, messages, params)


def _plain(messages: Sequence[MessageLike]) -> list[object]:
    if isinstance(messages, str | bytes | Mapping):
        raise InvalidRequest("messages", f"expected a list of messages, got {type(messages).__name__}")
    return [dict(message) if isinstance(message, Mapping) else message for message in messages]
