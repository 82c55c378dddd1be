"""/completion and /infill: the API of llama.cpp's server, which editors use for completions.

    POST /completion {"prompt": "Once upon", "n_predict": 16}
    {"content": " a time", "stop": true, "stop_type": "limit", "tokens_predicted": 16, ...}

A stream is server-sent events without a `[DONE]`; `"stop": true` marks the last one.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from genbatch.actors.gateways.http.bodies import describe, to_json
from genbatch.actors.gateways.http.fields import Fields
from genbatch.actors.gateways.http.generating import Generating, HTTPAnswer
from genbatch.actors.gateways.http.http_request import (
    HTTPRequest,
    LlamaSampling,
    build_request,
    llama_names,
    llama_params,
)
from genbatch.actors.gateways.http.openai_answer import HEARTBEAT
from genbatch.actors.gateways.http.service_calls import HTTPCaller
from genbatch.proto.errors import GenbatchError, InvalidRequest
from genbatch.proto.messages import Result, Token

_NAMES = llama_names("") | {
    "max_tokens": "n_predict",
    "token_ids": "prompt",
    "response_format.schema": "json_schema",
    "response_format": "json_schema",
}
# What stands in front of a text from another file.
_SNIPPET = "\n\n--- snippet ---\n\n"


class _LlamaFields(LlamaSampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take.

    Args:
        n_predict: most tokens; -1 are as many as there is room for.
        json_schema: a JSON Schema that the text validates against.
    """

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    ignore_eos: bool | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    regex: str | None = None


class LlamaCompletionFields(_LlamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /completion takes; the prompt is a text or token ids."""

    prompt: str | list[int]


class InfillFields(_LlamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What /infill takes.

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
    """The request in a body for /completion.

    Raises:
        InvalidRequest: with the path of the first fault.
    """
    fields = reader.read(body, LlamaCompletionFields)
    prompt = {"prompt": fields.prompt} if isinstance(fields.prompt, str) else {"token_ids": fields.prompt}
    return _request(fields, prompt)


def read_infill(body: dict[str, Any], reader: Fields) -> HTTPRequest:
    """The request in a body for /infill; raises as `read_llama_completion`."""
    fields = reader.read(body, InfillFields)
    snippets = []
    for index, extra in enumerate(fields.input_extra):
        text = reader.take(extra, ("text", "filename"), f"input_extra[{index}]").get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"input_extra[{index}].text", "must be a string")
        snippets.append(_SNIPPET + text)
    prefix = "".join([*snippets, "\n" if snippets else "", fields.input_prefix, fields.prompt])
    return _request(fields, {"prompt": prefix}, fields.input_suffix)


def _request(fields: _LlamaFields, prompt: dict[str, Any], suffix: str = "") -> HTTPRequest:
    has_limit = fields.n_predict is not None and fields.n_predict >= 0
    params = prompt | llama_params(fields, fields.n_predict if has_limit else None)
    params |= {name: value for name in ("ignore_eos", "grammar", "regex") if (value := getattr(fields, name))}
    if params.get("stop") == "":
        del params["stop"]
    if fields.json_schema:
        params["response_format"] = {"type": "json_schema", "schema": fields.json_schema}
    return HTTPRequest(
        model=fields.model,
        requests=[build_request(params, _NAMES)],
        stream=bool(fields.stream),
        names=_NAMES,
        suffix=suffix,
    )


class LlamaCppAnswer:
    """One answer, whole or as events.

    Args:
        model: the model's id.
    """

    def __init__(self, model: str) -> None:
        self.id = "completion-" + secrets.token_hex(12)
        self._model = model

    async def body(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer at once."""
        [result] = results
        return _end(result, self._model) | {"content": result.text, "tokens": result.token_ids}

    async def events(self, index: int, tokens: Sequence[Token]) -> bytes:
        """An event for each of these tokens that has text."""
        pieces = [
            {"index": 0, "content": token.text, "tokens": [token.token_id], "stop": False}
            for token in tokens
            if token.text
        ]
        return b"".join(_event(piece) for piece in pieces)

    def heartbeat(self) -> bytes:
        """What a stream sends while there is nothing to say."""
        return HEARTBEAT

    def ending(self, results: Sequence[Result]) -> bytes:
        """The event after the last token."""
        [result] = results
        return _event(_end(result, self._model))

    def failure(self, error: GenbatchError) -> bytes:
        """The last event of a stream that failed."""
        return _event(describe(error))


def _event(record: dict[str, Any]) -> bytes:
    return b"data: " + to_json(record) + b"\n\n"


def _end(result: Result, model: str) -> dict[str, Any]:
    """The counts of an answer, and what ended it."""
    word = result.stop_string
    usage = result.usage
    return {
        "index": 0,
        "content": "",
        "tokens": [],
        "id_slot": -1,
        "stop": True,
        "model": model,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "truncated": False,
        "has_new_line": "\n" in result.text,
        "stop_type": "limit" if result.finish_reason == "length" else "eos" if word is None else "word",
        "stopping_word": word or "",
    }


class LlamaCppGenerating(Generating):
    """/completion and /infill."""

    def _answer(self, request: HTTPRequest, model: str, caller: HTTPCaller) -> HTTPAnswer:
        return LlamaCppAnswer(model)
