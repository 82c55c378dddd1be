"""What travels: requests, tokens and results, and the range checks that every entry point shares."""

import math
from typing import Any, Literal

import msgspec

from genbatch.proto.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]

# Counts beyond this are mistakes, and would not fit the integers of the native layer.
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_PRIORITY = 100
# The ranges other services document; beyond them logits are drowned, not biased.
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_NAME_LENGTH = 128  # characters of a role or a tenant


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation.

    Args:
        role: who speaks: "system", "user", "assistant", or what else the model's chat template knows.
        content: what was said; may be empty.
    """

    role: str
    content: str


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to generate; exactly one of `prompt`, `token_ids` and `messages` is given.

    Args:
        prompt: text, continued as it is; not empty.
        token_ids: the prompt as token ids, each >= 0 and below the logits' width; at least one.
        messages: a conversation, rendered by the model's chat template; at least one.
        max_tokens: most tokens to generate, >= 1; None is as many as fit.
        temperature: 0 is greedy, otherwise the logits' divisor; finite, >= 0.
        top_k: draw among the k most likely tokens; 0 is off.
        top_p: draw among the fewest most likely tokens that hold this share, 0 < top_p <= 1; 1 is off.
        min_p: draw among tokens at least this fraction as likely as the likeliest, 0 <= min_p <= 1; 0 is off.
        repetition_penalty: divides the logits of tokens seen in prompt or output; > 0, 1 is off.
        presence_penalty: taken once from the logits of tokens in the output; -2 to 2, 0 is off.
        frequency_penalty: taken from a token's logit for each time it is in the output; -2 to 2, 0 is off.
        logit_bias: added to the logits of these token ids; -100 to 100.
        seed: makes the draws repeatable; 0 to 2**64 - 1; None draws one.
        stop: strings that end the output and are not part of it; none of them empty.
        stop_token_ids: token ids that end the output.
        min_tokens: tokens before which nothing but `max_tokens` ends the output; >= 0.
        ignore_eos: go on after the model's end-of-sequence tokens.
        logprobs: how many of the likeliest tokens to report with each generated one; 0 reports only the generated
            one's log-prob, None nothing.
        prompt_logprobs: the same for the prompt's tokens.
        echo: put the prompt in front of the text.
        n: how many answers; each has its own draws.
        priority: smaller is served first, -100 to 100.
        deadline_s: seconds from its arrival after which the request ends with what it has; > 0, None is none.
        tenant: in whose name; prompts are shared within a tenant only.
    """

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    n: int = 1
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token of a stream.

    Args:
        text: the text that became final with it; may be empty, while a character or a stop string is incomplete.
        token_id: its id.
        index: its place in its choice's output, from 0, without gaps.
        logprob: its natural log-probability, where `logprobs` was asked for.
        choice: which of the `n` answers it belongs to, from 0.
    """

    text: str
    token_id: int
    index: int
    logprob: float | None = None
    choice: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log-prob of one token and of the likeliest ones in its place, natural logarithms.

    Args:
        token_id: the token that is there.
        logprob: its log-prob.
        top: the likeliest token ids with their log-probs, likeliest first.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = {}


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a request took.

    Args:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated, of all choices together.
        cached_tokens: prompt tokens that were already evaluated and needed no prefill.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a request's answers; the fields are those of Result."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request ends with.

    Args:
        text: the output, without the stop string that ended it.
        token_ids: the tokens generated, the one that ended the output included.
        finish_reason: "stop" (end of sequence or a stop string), "length", "deadline", "cancelled" or "error".
        usage: tokens that it took.
        logprobs: one a token, where asked for.
        prompt_logprobs: one a token of the prompt, None for the first, where asked for.
        choices: all answers when `n` > 1, of which the first is also above; otherwise empty.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    choices: tuple[Choice, ...] = ()


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator lets one request ask for.

    Args:
        max_n: answers.
        max_logprobs: likeliest tokens reported with each token.
        max_stop: stop strings, and as many stop token ids.
        max_stop_length: characters of a stop string.
        max_messages: messages of a conversation.
        max_logit_bias: token ids with a bias.
        max_deadline_s: seconds.
    """

    max_n: int = 8
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_length: int = 256
    max_messages: int = 1024
    max_logit_bias: int = 1024
    max_deadline_s: float = 86400.0


def validate_request(request: GenerateRequest, limits: RequestLimits) -> None:
    """Checks what can be checked without the model; the one place where ranges are.

    Types are checked too, because a request made in Python was never decoded.

    Raises:
        InvalidRequest: with the path of the first parameter at fault.
    """
    check_type(msgspec.structs.asdict(request), GenerateRequest)
    _check_prompt(request, limits)
    _check_lengths(request, limits)
    _check_sampling(request, limits)
    _check_stopping(request, limits)
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_text("tenant", request.tenant, MAX_NAME_LENGTH)


def check_type(value: object, wanted: Any) -> Any:
    """`value`, plain data, as a `wanted` type of this file.

    Raises:
        InvalidRequest: with the path of the first fault.
    """
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        raise InvalidRequest(*_fault(str(error))) from None
    except RecursionError:
        raise InvalidRequest(None, "is nested too deeply") from None


def _fault(message: str) -> tuple[str | None, str]:
    """Path and reason out of msgspec's "Expected `int`, got `str` - at `$.stop[0]`"."""
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


def _check_prompt(request: GenerateRequest, limits: RequestLimits) -> None:
    given = [name for name in ("prompt", "token_ids", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidRequest("prompt", f"give exactly one of prompt, token_ids and messages, not {found}")
    if not getattr(request, given[0]):
        raise InvalidRequest(given[0], "is empty")
    if request.prompt is not None:
        _check_text("prompt", request.prompt)
    if request.token_ids is not None and min(request.token_ids) < 0:
        index = next(index for index, token_id in enumerate(request.token_ids) if token_id < 0)
        raise InvalidRequest(f"token_ids[{index}]", f"{request.token_ids[index]} is negative")
    _check_count("messages", len(request.messages or ()), limits.max_messages)
    for index, message in enumerate(request.messages or ()):
        if not message.role:
            raise InvalidRequest(f"messages[{index}].role", "is empty")
        _check_text(f"messages[{index}].role", message.role, MAX_NAME_LENGTH)
        _check_text(f"messages[{index}].content", message.content)


def _check_lengths(request: GenerateRequest, limits: RequestLimits) -> None:
    if request.max_tokens is not None:
        _check_range("max_tokens", request.max_tokens, 1, MAX_COUNT)
    _check_range("min_tokens", request.min_tokens, 0, MAX_COUNT)
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise InvalidRequest("min_tokens", f"{request.min_tokens} is more than max_tokens, {request.max_tokens}")
    _check_range("n", request.n, 1, limits.max_n)
    if request.deadline_s is not None:
        _check_range("deadline_s", request.deadline_s, 0, limits.max_deadline_s, above=True)


def _check_sampling(request: GenerateRequest, limits: RequestLimits) -> None:
    _check_range("temperature", request.temperature, 0, math.inf)
    _check_range("top_k", request.top_k, 0, MAX_COUNT)
    _check_range("top_p", request.top_p, 0, 1, above=True)
    _check_range("min_p", request.min_p, 0, 1)
    _check_range("repetition_penalty", request.repetition_penalty, 0, math.inf, above=True)
    _check_range("presence_penalty", request.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", request.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_count("logit_bias", len(request.logit_bias or ()), limits.max_logit_bias)
    for token_id, bias in (request.logit_bias or {}).items():
        _check_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if token_id < 0:
            raise InvalidRequest(f"logit_bias[{token_id}]", "the token id is negative")
    if request.seed is not None:
        _check_range("seed", request.seed, 0, MAX_SEED)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(request, name)
        if wanted is not None:
            _check_range(name, wanted, 0, limits.max_logprobs)


def _check_stopping(request: GenerateRequest, limits: RequestLimits) -> None:
    _check_count("stop", len(request.stop), limits.max_stop)
    for index, text in enumerate(request.stop):
        if not text:
            raise InvalidRequest(f"stop[{index}]", "is empty")
        _check_text(f"stop[{index}]", text, limits.max_stop_length)
    _check_count("stop_token_ids", len(request.stop_token_ids), limits.max_stop)
    for index, token_id in enumerate(request.stop_token_ids):
        if token_id < 0:
            raise InvalidRequest(f"stop_token_ids[{index}]", f"{token_id} is negative")


def _check_range(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """low <= value <= high, or low < value with `above`; NaN and infinities never pass."""
    if math.isfinite(value) and (low < value if above else low <= value) and value <= high:
        return
    rule = f"more than {low}" if above else f"at least {low}"
    if high != math.inf:
        rule += f" and at most {high}"
    raise InvalidRequest(field, f"must be {rule}, not {value}")


def _check_count(field: str, count: int, high: int) -> None:
    if count > high:
        raise InvalidRequest(field, f"has {count} entries, {high} are allowed")


def _check_text(field: str, text: str, max_length: int | None = None) -> None:
    if max_length is not None and len(text) > max_length:
        raise InvalidRequest(field, f"has {len(text)} characters, {max_length} are allowed")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(field, "is not valid Unicode: it has a lone surrogate") from None
