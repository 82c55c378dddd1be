"""The API of llama.cpp's server, which editors use for completions: /completion, /infill, /props, /slots and more.

    POST /completion {"prompt": "Once upon", "n_predict": 16}
    {"content": " a time", "stop": true, "stop_type": "limit", "tokens_predicted": 16, ...}

A stream is server-sent events without a `[DONE]`; `"stop": true` marks the last one.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from genbatch.actors.gateways.http.bodies import (
    JSON,
    Fields,
    HTTPRequest,
    LlamaSampling,
    build_request,
    decode_json,
    describe,
    llama_names,
    llama_params,
    set_fields,
    to_json,
)
from genbatch.actors.gateways.http.generating import Generating, HTTPAnswer, NewFields
from genbatch.actors.gateways.http.openai_answer import HEARTBEAT, named_token, token_logprob
from genbatch.actors.gateways.http.openai_request import read_chat, read_prompts, read_token_id
from genbatch.actors.gateways.http.service_calls import HTTPCaller, HTTPCalls, TokenTexts
from genbatch.proto.errors import GenbatchError, InvalidRequest, Unavailable
from genbatch.proto.messages import Result, Token, TokenLogprob, Usage

_NAMES = llama_names("") | {
    "max_tokens": "n_predict",
    "logprobs": "n_probs",
    "token_ids": "prompt",
    "response_format.schema": "json_schema",
    "response_format": "json_schema",
}
# The bias of a token that never comes: the lowest that a request may have.
NEVER = -100.0
# The separator before the text of another file.
_SNIPPET = "\n\n--- snippet ---\n\n"


class _LlamaFields(LlamaSampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of both endpoints.

    Args:
        n_predict: most tokens; -1 are as many as there is room for. Editors send 0 to have the prompt's keys and
            values cached; one token is generated and not shown.
        json_schema: a JSON Schema that the text validates against.
        n_probs: how many of the likeliest tokens to show with each one; 0 shows none.
        logit_bias: pairs of a token id and its bias, or an object of these; false is a token that never comes.
        response_fields: the fields of the answer to send, as "content" and "timings/prompt_n"; none sends all.
        deadline_s: ours: seconds after which the answer ends with what it has.
    """

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    ignore_eos: bool | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: int | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    response_fields: list[str] | None = None
    grammar: str | None = None
    regex: str | None = None
    deadline_s: float | None = None


class LlamaCompletionFields(_LlamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /completion: one prompt or several, each a text or token ids."""

    prompt: str | list[str | int | list[int]]


class InfillFields(_LlamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /infill.

    Args:
        input_prefix: the text in front of the gap.
        input_suffix: the text behind it.
        prompt: further text in front of the gap, such as the begun line.
        input_extra: other files' texts, as {"text", "filename"}.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[dict[str, Any]] = msgspec.field(default_factory=list)


def read_llama_completion(body: dict[str, Any], reader: Fields) -> HTTPRequest:
    """Return the request in a body for /completion.

    Raises:
        InvalidRequest: with the path of the first fault.
    """
    fields = reader.read(body, LlamaCompletionFields)
    has_several = isinstance(fields.prompt, list) and not (fields.prompt and isinstance(fields.prompt[0], int))
    return _request(fields, read_prompts(fields.prompt), has_several=has_several)


def read_infill(body: dict[str, Any], reader: Fields) -> HTTPRequest:
    """Return the request in a body for /infill; raises as `read_llama_completion`."""
    fields = reader.read(body, InfillFields)
    snippets = []
    for index, extra in enumerate(fields.input_extra):
        text = reader.take(extra, ("text", "filename"), f"input_extra[{index}]").get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"input_extra[{index}].text", "must be a string")
        snippets.append(_SNIPPET + text)
    prefix = "".join([*snippets, "\n" if snippets else "", fields.input_prefix, fields.prompt])
    return _request(fields, [{"prompt": prefix}], fields.input_suffix)


def _request(
    fields: _LlamaFields, prompts: list[dict[str, Any]], suffix: str = "", *, has_several: bool = False
) -> HTTPRequest:
    has_limit = fields.n_predict is not None and fields.n_predict >= 0
    params = llama_params(fields, max(1, fields.n_predict or 0) if has_limit else None)
    params |= {name: value for name in ("ignore_eos", "grammar", "regex") if (value := getattr(fields, name))}
    params |= set_fields(fields, ("deadline_s",))
    if params.get("stop") == "":
        del params["stop"]
    if fields.json_schema:
        params["response_format"] = {"type": "json_schema", "schema": fields.json_schema}
    if fields.logit_bias:
        params["logit_bias"] = _logit_bias(fields.logit_bias)
    num_top = fields.n_probs or None
    if num_top is not None:
        params["logprobs"] = num_top
    return HTTPRequest(
        model=fields.model,
        requests=[build_request(params | prompt, _NAMES) for prompt in prompts],
        stream=bool(fields.stream),
        names=_NAMES,
        num_top=num_top,
        suffix=suffix,
        body={
            "response_fields": fields.response_fields or (),
            "has_several": has_several,
            "shows_text": fields.n_predict != 0,
        },
    )


def _logit_bias(bias: dict[str, float | bool] | list[tuple[int | str, float | bool]]) -> dict[int, float]:
    values: dict[int, float] = {}
    for token, value in bias.items() if isinstance(bias, dict) else bias:
        if value is True:
            raise InvalidRequest("logit_bias", "a bias is a number or false")
        values[read_token_id(str(token))] = NEVER if value is False else value
    return values


class LlamaCppAnswer:
    """The answers to one prompt or several, whole or as events.

    Args:
        request: the answered request.
        model: the model's id.
        texts: the texts of tokens.
    """

    def __init__(self, request: HTTPRequest, model: str, texts: TokenTexts) -> None:
        self.id = "completion-" + secrets.token_hex(12)
        self._request = request
        self._model = model
        self._texts = texts
        self._began = time.monotonic()
        self._first: float | None = None  # the time of the first token

    async def body(self, results: Sequence[Result]) -> Any:
        """Return the whole answer: an object for one prompt, a list for several."""
        answers = []
        for index, result in enumerate(map(self._shown, results)):
            probabilities = await self._probabilities(result.logprobs or ())
            whole = self._end(index, result) | {"content": result.text, "tokens": result.token_ids} | probabilities
            answers.append(self._chosen(whole))
        return answers if self._request.body["has_several"] else answers[0]

    async def events(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Return an event for each of these tokens that has text or log-probs."""
        if self._first is None:
            self._first = time.monotonic()
        if not self._request.body["shows_text"]:
            return b""
        events = []
        for token in tokens:
            if token.text or token.logprob is not None:
                piece = {"index": index, "content": token.text, "tokens": [token.token_id], "stop": False}
                entries = [token_logprob(token)] if token.logprob is not None else []
                events.append(_event(piece | await self._probabilities(entries)))
        return b"".join(events)

    def heartbeat(self) -> bytes:
        """Return the bytes that keep a silent stream alive."""
        return HEARTBEAT

    def ending(self, results: Sequence[Result]) -> bytes:
        """Return the events that follow the last token."""
        ends = [self._chosen(self._end(index, result)) for index, result in enumerate(map(self._shown, results))]
        return b"".join(_event(end) for end in ends)

    def failure(self, error: GenbatchError) -> bytes:
        """Return the event with the error that ends a failed stream."""
        return _event(describe(error))

    def _shown(self, result: Result) -> Result:
        """Return the result, without its text if the caller asked for no tokens."""
        if self._request.body["shows_text"]:
            return result
        usage = msgspec.structs.replace(result.usage, completion_tokens=0)
        nothing: dict[str, Any] = {
            "text": "",
            "token_ids": [],
            "logprobs": None,
            "stop_string": None,
            "finish_reason": "length",
        }
        return msgspec.structs.replace(result, usage=usage, **nothing)

    async def _probabilities(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probs of tokens, if the request asks for them."""
        if self._request.num_top is None or not entries:
            return {}
        for entry in entries:
            await self._texts.learn((entry.token_id, *entry.top))
        shown = [
            self._named(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._named(token_id, logprob) for token_id, logprob in entry.top.items()]}
            for entry in entries
        ]
        return {"completion_probabilities": shown}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"id": token_id, **named_token(self._texts[token_id], logprob)}

    def _end(self, index: int, result: Result) -> dict[str, Any]:
        """Return the counts of an answer, and the reason for its end."""
        word = result.stop_string
        usage = result.usage
        return {
            "index": index,
            "content": "",
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "has_new_line": "\n" in result.text,
            "stop_type": "limit" if result.finish_reason == "length" else "eos" if word is None else "word",
            "stopping_word": word or "",
            "timings": self._timings(usage),
        }

    def _timings(self, usage: Usage) -> dict[str, Any]:
        """Return the times of prompt and answer; they are known only of a stream, which shows its first token."""
        evaluated = usage.prompt_tokens - usage.cached_tokens
        counts = {"cache_n": usage.cached_tokens, "prompt_n": evaluated, "predicted_n": usage.completion_tokens}
        if self._first is None:
            return counts
        prompt_s, answer_s = self._first - self._began, time.monotonic() - self._first
        times = {"prompt_ms": prompt_s * 1000, "predicted_ms": answer_s * 1000}
        rates = {"prompt_per_second": evaluated / max(prompt_s, 1e-9)}
        rates["predicted_per_second"] = usage.completion_tokens / max(answer_s, 1e-9)
        return counts | times | rates

    def _chosen(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that `response_fields` names, such as "timings/prompt_n"; all if it names none."""
        names = self._request.body["response_fields"]
        return {name: value for name in names if (value := _at(record, name)) is not None} if names else record


def _at(record: dict[str, Any], name: str) -> Any:
    outer, _, inner = name.partition("/")
    value = record.get(outer)
    return value.get(inner) if inner and isinstance(value, dict) else None if inner else value


def _event(record: dict[str, Any]) -> bytes:
    return b"data: " + to_json(record) + b"\n\n"


class LlamaCppGenerating(Generating):
    """Serves /completion and /infill."""

    def _answer(self, request: HTTPRequest, model: str, caller: HTTPCaller) -> HTTPAnswer:
        return LlamaCppAnswer(request, model, self._calls.texts(model))


class LlamaCppRoutes:
    """The endpoints that describe the model.

    Args:
        calls: calls the service.
        new_fields: makes a reader of a body's fields.
    """

    def __init__(self, calls: HTTPCalls, new_fields: NewFields) -> None:
        self._calls = calls
        self._new_fields = new_fields

    async def apply_template(self, request: Request) -> Response:
        """Return the prompt of a chat; the body is that of /v1/chat/completions."""
        reader = self._new_fields()
        asked = read_chat(decode_json(request.state.body), reader)
        card = await self._calls.model(asked.model)
        (chat,) = asked.requests
        offered = chat.tools if chat.tool_choice != "none" else []
        params = {"messages": chat.messages, "tools": offered, "chat_template_kwargs": chat.chat_template_kwargs}
        if chat.continue_final_message:
            raise InvalidRequest("continue_final_message", "is not supported here: the prompt begins a new message")
        text = await self._calls.prompt_text({**params, "model": card.id}, request.state.caller)
        return JSON({"prompt": text}, headers=reader.headers)

    async def props(self, request: Request) -> Response:
        """Answer /props, which clients ask first: the length of the context and the number of slots."""
        card = await self._calls.known_model(request.query_params.get("model"), request.state.caller)
        settings = {"n_ctx": card.n_ctx, "params": card.sampling}
        modalities = {"vision": False, "audio": False}
        answer = {"default_generation_settings": settings, "total_slots": card.n_parallel, "model_alias": card.id}
        return JSON(answer | {"modalities": modalities, "build_info": "genbatch"})

    async def slots(self, request: Request) -> Response:
        """Describe the slots. The first ones count as busy; their requests are not shown."""
        query = request.query_params
        card = await self._calls.known_model(query.get("model"), request.state.caller)
        stats = await self._calls.stats(request.state.caller)
        own = stats.get("by_model", {}).get(card.parent or card.id, stats)
        running = own.get("requests_running", 0)
        if running >= card.n_parallel and query.get("fail_on_no_slot", "0") not in ("0", "false", ""):
            raise Unavailable("all slots are taken", retry_after_ms=1000)
        about = {"n_ctx": card.n_ctx, "speculative": False}
        return JSON([{"id": slot, **about, "is_processing": slot < running} for slot in range(card.n_parallel)])
