"""Ollama's API: /api/chat, /api/generate, /api/embed, and the endpoints that list and describe models.

    POST /api/chat {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}
    {"model": "smollm2", "message": {"role": "assistant", "content": "Hi"}, "done": false}    one line a token
    {"model": "smollm2", "message": {...}, "done": true, "done_reason": "stop", "eval_count": 12}

A stream is JSON lines, and it is the default. Reading a body makes the same request as the other APIs do.
"""

import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from genbatch.actors.gateways.http.bodies import (
    EFFORT_NAMES,
    JSON,
    OLLAMA_PATH,
    Fields,
    HTTPRequest,
    LlamaSampling,
    ThinkingParams,
    build_request,
    decode_json,
    describe,
    llama_names,
    llama_params,
    parsed_arguments,
    renamed,
    set_fields,
    to_json,
)
from genbatch.actors.gateways.http.generating import Generating, HTTPAnswer, NewFields
from genbatch.actors.gateways.http.openai_answer import chat_logprobs, token_logprob
from genbatch.actors.gateways.http.openai_request import TOOL_FIELDS, is_run_by_client
from genbatch.actors.gateways.http.service_calls import HTTPCaller, HTTPCalls, OpenCalls, TokenTexts
from genbatch.proto.errors import GenbatchError, InvalidRequest
from genbatch.proto.messages import Result, Token, TokenLogprob
from genbatch.proto.service_messages import ModelCard

# Programs refuse older servers. This is the version of Ollama that has all that is served here.
OLLAMA_VERSION = "0.12.0"
_LATEST = ":latest"
_ROLES = ("system", "user", "assistant", "tool")
_NAMES = llama_names("options.") | {
    "max_tokens": "options.num_predict",
    "logprobs": "top_logprobs",
    "response_format.schema": "format",
    "response_format": "format",
}


class OllamaOptions(LlamaSampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ollama's sampling parameters.

    Args:
        num_predict: most tokens; -1 and -2 are as many as there is room for.
    """

    num_predict: int | None = None


class OllamaFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of both endpoints that generate.

    Args:
        format: "json", or a JSON Schema that the answer validates against.
        options: the sampling parameters.
        think: whether the model thinks first, or how much: "low", "medium" or "high".
        logprobs: whether to show the log-prob of each token.
        top_logprobs: how many of the likeliest tokens to show with each one.
        keep_alive: seconds, or a duration such as "5m", that a model which is served on demand stays loaded without
            requests; negative keeps it, 0 unloads it after this request. A body without a prompt loads or unloads it.
        deadline_s: ours: seconds after which the answer ends with what it has.
    """

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: str | float | None = None
    deadline_s: float | None = None


class OllamaChatFields(OllamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /api/chat; a body without messages asks whether the model is loaded."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateFields(OllamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /api/generate; a body without a prompt asks whether the model is loaded.

    Args:
        suffix: the text behind a gap that is to be filled.
        system: the system message.
        raw: whether the prompt is continued as it is, without the chat template.
    """

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class OllamaEmbedFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of /api/embed; `keep_alive` is as for /api/chat."""

    model: str
    input: str | list[str]
    dimensions: int | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of the older /api/embeddings."""

    model: str
    prompt: str
    keep_alive: str | float | None = None


class OllamaShowFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /api/show; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None


def read_ollama_chat(body: dict[str, Any], reader: Fields) -> HTTPRequest:
    """Return the request in a body for /api/chat.

    Raises:
        InvalidRequest: with the path of the first fault.
    """
    fields = reader.read(body, OllamaChatFields)
    params = _drawing(fields)
    params["messages"] = _turns(fields.messages, reader)
    params["reasoning"] = True
    names = dict(_NAMES)
    offered: list[dict[str, Any]] = []
    for index, tool in enumerate(fields.tools or ()):
        path = f"tools[{index}]"
        function = tool.get("function")
        if not is_run_by_client(tool, path, reader, ("function",)):
            continue
        if not isinstance(function, dict):
            raise InvalidRequest(f"{path}.function", "must be an object with a name")
        names[f"tools[{len(offered)}]"] = f"{path}.function"
        offered.append(reader.take(function, TOOL_FIELDS, f"{path}.function"))
    if offered:
        params["tools"] = offered
    thinking = _thinking(fields, reader)
    return _request(fields, params | thinking.result(), names, thinking=thinking.asked)


def read_ollama_generate(body: dict[str, Any], reader: Fields) -> HTTPRequest:
    """Return the request in a body for /api/generate; raises as `read_ollama_chat`."""
    fields = reader.read(body, OllamaGenerateFields)
    if fields.images:
        raise InvalidRequest("images", "only text is understood")
    if fields.template:
        raise InvalidRequest("template", "the model's own chat template is used: send a raw prompt in its place")
    if fields.context:
        raise InvalidRequest("context", "is not supported: send the conversation to /api/chat")
    params = _drawing(fields)
    if fields.raw or fields.suffix:
        if fields.system:
            raise InvalidRequest("system", "goes with neither raw nor suffix, which use no chat template")
        return _request(fields, params | {"prompt": fields.prompt}, _NAMES, suffix=fields.suffix)
    params["messages"] = [{"role": "user", "content": fields.prompt}]
    if fields.system:
        params["messages"].insert(0, {"role": "system", "content": fields.system})
    params["reasoning"] = True
    names = {f"messages[{len(params['messages']) - 1}].content": "prompt", "messages[0].content": "system"}
    thinking = _thinking(fields, reader)
    return _request(fields, params | thinking.result(), _NAMES | names, thinking=thinking.asked)


def _request(fields: OllamaFields, params: dict[str, Any], names: dict[str, str], **more: Any) -> HTTPRequest:
    """Return the request of a body; `more` are further arguments of HTTPRequest."""
    return HTTPRequest(
        model=plain_name(fields.model),
        requests=[build_request(params, names)],
        stream=fields.stream is not False,
        names=names,
        num_top=(fields.top_logprobs or 0) if fields.logprobs else None,
        **more,
    )


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"


def seconds_of(keep_alive: str | float | None) -> float | None:
    """Return the seconds of a number, or of a duration in Go's notation, such as "1h30m"; -1 for a negative one.

    Raises:
        InvalidRequest: it is neither.
    """
    if keep_alive is None:
        return None
    text = str(keep_alive)
    try:
        seconds = float(text)
    except ValueError:
        if not re.fullmatch(f"[+-]?({_PART})+", text):
            reason = f'must be seconds, or a duration such as "5m", not {text[:40]!r}'
            raise InvalidRequest("keep_alive", reason) from None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text))
        seconds = -seconds if text.startswith("-") else seconds
    if not math.isfinite(seconds):
        raise InvalidRequest("keep_alive", f"must be a number of seconds, not {text[:40]!r}")
    return -1.0 if seconds < 0 else seconds


def plain_name(name: str) -> str:
    """Return the model's name without Ollama's default tag."""
    return name.removesuffix(_LATEST)


def _drawing(fields: OllamaFields) -> dict[str, Any]:
    """Return the parameters that both endpoints have."""
    options = fields.options or OllamaOptions()
    params = llama_params(options, None if options.num_predict in (-1, -2) else options.num_predict)
    if isinstance(fields.format, dict):
        params["response_format"] = {"type": "json_schema", "schema": fields.format}
    elif fields.format == "json":
        params["response_format"] = {"type": "json_object"}
    elif fields.format:
        raise InvalidRequest("format", f'must be "json" or a JSON Schema, not {fields.format!r:.40}')
    if fields.logprobs:
        params["logprobs"] = fields.top_logprobs or 0
    return params | set_fields(fields, ("deadline_s",))


def _thinking(fields: OllamaFields, reader: Fields) -> ThinkingParams:
    thinking = ThinkingParams(reader)
    if isinstance(fields.think, str):
        if fields.think not in EFFORT_NAMES:
            raise InvalidRequest("think", f"must be true, false, or one of {', '.join(EFFORT_NAMES)}")
        thinking.effort("think", fields.think)
    else:
        thinking.switch("think", fields.think)
    return thinking


_MESSAGE_FIELDS = ("role", "content", "thinking", "tool_calls", "tool_call_id", "tool_name", "images")


def _turns(messages: Sequence[dict[str, Any]], reader: Fields) -> list[dict[str, Any]]:
    """Return the turns of a conversation. Ollama's calls may have no ids: answers are matched by name and order."""
    turns = []
    open_calls: list[tuple[str, str]] = []  # id and name of calls that have no answer yet
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        fields = reader.take(message, _MESSAGE_FIELDS, path)
        role = fields.get("role")
        if role not in _ROLES:
            raise InvalidRequest(f"{path}.role", f"must be one of {', '.join(_ROLES)}, not {role!r:.40}")
        if fields.get("images"):
            raise InvalidRequest(f"{path}.images", "only text is understood")
        content = fields.get("content", "")
        if not isinstance(content, str):
            raise InvalidRequest(f"{path}.content", "must be a string")
        turn: dict[str, Any] = {"role": role, "content": content}
        if fields.get("thinking"):
            turn["reasoning_content"] = fields["thinking"]
        if fields.get("tool_calls"):
            turn["tool_calls"] = _calls(fields["tool_calls"], path)
            open_calls = [(call["id"], call["name"]) for call in turn["tool_calls"]]
        if role == "tool":
            name = fields.get("tool_name")
            call_id = fields.get("tool_call_id")
            matching = [call for call in open_calls if name in (None, call[1]) and call_id in (None, call[0])]
            if matching:
                open_calls.remove(matching[0])
                turn["tool_call_id"] = matching[0][0]
            else:
                turn["tool_call_id"] = call_id or f"call_{index}"
            if name is not None:
                turn["name"] = name
        turns.append(turn)
    return turns


def _calls(calls: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path}.tool_calls", "must be a list")
    turns = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{path}.tool_calls[{index}]", 'must be {"function": {"name", "arguments"}}')
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        turns.append({"id": call.get("id") or f"call_{index}", "name": function["name"], "arguments": text})
    return turns


class OllamaAnswer:
    """An answer of Ollama's API, whole or as JSON lines.

    Args:
        model: the model's id.
        is_chat: whether lines have a message, as of /api/chat, or a text.
        texts: the texts of tokens, for log-probs.
    """

    def __init__(self, model: str, *, is_chat: bool, texts: TokenTexts | None = None) -> None:
        self.id = "ollama-" + secrets.token_hex(12)
        self._model = model
        self._texts = texts
        self._is_chat = is_chat
        self._began = time.monotonic_ns()
        self._first: int | None = None  # the time of the first token

    async def body(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the whole answer, for a request without a stream."""
        [result] = results
        shown = await self._logprobs(result.logprobs or ())
        return self._piece(result.text, result.reasoning, _shown_calls(result)) | shown | self._end(result)

    async def events(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Return a line for each of these tokens that has text, thinking or log-probs."""
        if self._first is None:
            self._first = time.monotonic_ns()
        lines = []
        for token in tokens:
            if token.text or token.reasoning or token.logprob is not None:
                entries = [token_logprob(token)] if token.logprob is not None else []
                shown = await self._logprobs(entries)
                lines.append(_line(self._piece(token.text, token.reasoning) | shown | {"done": False}))
        return b"".join(lines)

    async def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._texts is None or not entries:
            return {}
        for entry in entries:
            await self._texts.learn((entry.token_id, *entry.top))
        return {"logprobs": chat_logprobs(entries, self._texts)["content"]}

    def heartbeat(self) -> bytes:
        """Return a line without text, since JSON lines have no comments."""
        return _line(self._piece("") | {"done": False})

    def ending(self, results: Sequence[Result]) -> bytes:
        """Return the calls, which are shown whole, and the last line."""
        [result] = results
        calls = _shown_calls(result)
        asked = _line(self._piece("", "", calls) | {"done": False}) if calls else b""
        return asked + _line(self._piece("") | self._end(result))

    def failure(self, error: GenbatchError) -> bytes:
        """Return the line with the error that ends a failed stream."""
        return _line(describe(error, OLLAMA_PATH))

    def _piece(self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        head: dict[str, Any] = {"model": self._model, "created_at": _now()}
        thought = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return head | {"response": text} | thought
        message: dict[str, Any] = {"role": "assistant", "content": text} | thought
        if calls:
            message["tool_calls"] = calls
        return head | {"message": message}

    def _end(self, result: Result) -> dict[str, Any]:
        """Return the counts. Only a stream shows the first token, so only its answer has the time of the prompt."""
        now = time.monotonic_ns()
        end = {
            "done": True,
            "done_reason": "length" if result.finish_reason == "length" else "stop",
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": result.usage.prompt_tokens,
            "eval_count": result.usage.completion_tokens,
        }
        if self._first is not None:
            end |= {"prompt_eval_duration": self._first - self._began, "eval_duration": now - self._first}
        return end


def _shown_calls(result: Result) -> list[dict[str, Any]]:
    calls = []
    for index, call in enumerate(result.tool_calls):
        function = {"index": index, "name": call.name, "arguments": parsed_arguments(call.arguments)}
        calls.append({"id": call.id, "function": function})
    return calls


def _line(record: dict[str, Any]) -> bytes:
    return to_json(record) + b"\n"


_NEVER = "9999-12-31T23:59:59Z"


def _now(plus_s: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=plus_s)).isoformat().replace("+00:00", "Z")


class OllamaGenerating(Generating):
    """Serves /api/chat and /api/generate. A body without messages or prompt gets Ollama's answer to a load.

    Args:
        is_chat: whether the endpoint is /api/chat.
    """

    stream_type = b"application/x-ndjson"

    def __init__(
        self, calls: HTTPCalls, open_calls: OpenCalls, new_fields: NewFields = Fields, *, is_chat: bool
    ) -> None:
        super().__init__(read_ollama_chat if is_chat else read_ollama_generate, calls, open_calls, new_fields)
        self._is_chat = is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; an error before the first byte is raised."""
        body = decode_json(scope["state"]["body"])
        keep_alive = seconds_of(body.get("keep_alive"))
        if not any(body.get(name) for name in ("messages", "prompt", "suffix", "system", "images")):
            fields = self._new_fields().read(body, OllamaChatFields if self._is_chat else OllamaGenerateFields)
            card = await self._calls.model(plain_name(fields.model))
            await self._calls.load_model(card.id, keep_alive, scope["state"]["caller"])
            piece = OllamaAnswer(card.id, is_chat=self._is_chat)._piece("")
            await JSON(piece | {"done": True, "done_reason": "unload" if keep_alive == 0 else "load"})(
                scope, receive, send
            )
            return
        async with keeping(self._calls, body.get("model"), keep_alive, scope["state"]["caller"]):
            await super().__call__(scope, receive, send)

    def _answer(self, request: HTTPRequest, model: str, caller: HTTPCaller) -> HTTPAnswer:
        texts = None if request.num_top is None else self._calls.texts(model)
        return OllamaAnswer(model, is_chat=self._is_chat, texts=texts)


# Seconds for a service to take a new `keep_alive`.
KEEP_S = 1.0


@asynccontextmanager
async def keeping(calls: HTTPCalls, model: object, keep_alive: float | None, caller: HTTPCaller) -> AsyncIterator[None]:
    """Set how long the model stays loaded after the request that the body answers."""
    yield
    if keep_alive is not None and isinstance(model, str):
        # The request has its answer already, so a failed change of `keep_alive` is not reported.
        with suppress(GenbatchError), trio.move_on_after(KEEP_S):
            await calls.load_model(plain_name(model), keep_alive, caller)


# A tool that every template with a place for tools shows.
_PROBE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}],
}


class OllamaModels:
    """The endpoints that list and describe models, and those that embed.

    Args:
        calls: asks the service.
        new_fields: makes a reader of a body's fields.
    """

    def __init__(self, calls: HTTPCalls, new_fields: NewFields = Fields) -> None:
        self._calls = calls
        self._new_fields = new_fields
        self._started = _now()
        self._takes_tools: dict[str, bool] = {}  # by model

    async def version(self, request: Request) -> Response:
        """Answer with the version of Ollama that has this API."""
        return JSON({"version": OLLAMA_VERSION})

    async def tags(self, request: Request) -> Response:
        """Return the served models."""
        return JSON({"models": [self._row(card) for card in await self._calls.models()]})

    async def ps(self, request: Request) -> Response:
        """Return the loaded models, with their sizes and the time at which each is unloaded."""
        stats = await self._calls.stats(request.state.caller)
        by_model = stats.get("by_model", {})
        rows = []
        for card in await self._calls.models():
            if card.state == "loaded":
                own = by_model.get(card.parent or card.id, {})
                left_s = own.get("unload_in_s")
                expires_at = _NEVER if left_s is None else _now(left_s)
                size = own.get("model_bytes", 0)
                rows.append(self._row(card) | {"expires_at": expires_at, "size": size, "size_vram": 0})
        return JSON({"models": rows})

    async def show(self, request: Request) -> Response:
        """Describe a model: its context length, and whether it takes tools."""
        fields = self._new_fields().read(decode_json(request.state.body), OllamaShowFields)
        name = fields.model or fields.name
        if name is None:
            raise InvalidRequest("model", "is missing")
        card = await self._calls.model(plain_name(name))
        info: dict[str, Any] = {"general.architecture": "genbatch", "genbatch.context_length": card.n_ctx}
        if card.embedding_size is not None:
            info["genbatch.embedding_length"] = card.embedding_size
        parameters = "".join(f"{option} {value}\n" for option, value in card.sampling.items())
        return JSON(
            {
                "modelfile": "",
                "parameters": parameters,
                "template": "",
                "details": _details(card),
                "model_info": info,
                "capabilities": await self._capabilities(card, request.state.caller),
                "modified_at": self._started,
            }
        )

    async def embed(self, request: Request) -> Response:
        """Return a vector for each text."""
        fields = self._new_fields().read(decode_json(request.state.body), OllamaEmbedFields)
        params: dict[str, Any] = {"input": fields.input}
        if fields.dimensions is not None:
            params["dimensions"] = fields.dimensions
        async with keeping(self._calls, fields.model, seconds_of(fields.keep_alive), request.state.caller):
            model, vectors, num_tokens, duration = await self._vectors(fields.model, params, request.state.caller)
        counts = {"total_duration": duration, "load_duration": 0, "prompt_eval_count": num_tokens}
        return JSON({"model": model, "embeddings": vectors, **counts})

    async def embeddings(self, request: Request) -> Response:
        """Return the vector of one text, in the older shape."""
        fields = self._new_fields().read(decode_json(request.state.body), OllamaEmbeddingFields)
        try:
            async with keeping(self._calls, fields.model, seconds_of(fields.keep_alive), request.state.caller):
                _, vectors, _, _ = await self._vectors(fields.model, {"input": fields.prompt}, request.state.caller)
        except GenbatchError as error:
            raise renamed(error, {"input": "prompt"}) from None
        return JSON({"embedding": vectors[0]})

    async def _vectors(self, model: str, params: dict[str, Any], caller: HTTPCaller) -> tuple[str, Any, int, int]:
        """Return the model's id, a vector for each text, the number of tokens, and the duration in nanoseconds."""
        began = time.monotonic_ns()
        card = await self._calls.model(plain_name(model))
        embedded = await self._calls.embed({**params, "model": card.id}, caller)
        return card.id, embedded.embeddings, embedded.usage.prompt_tokens, time.monotonic_ns() - began

    async def _capabilities(self, card: ModelCard, caller: HTTPCaller) -> list[str]:
        capabilities = ["completion"] if card.generates else []
        # Do not load a model only to describe it.
        if card.generates and card.state == "loaded" and await self._shows_tools(card.id, caller):
            capabilities.append("tools")
        if card.embedding_size is not None:
            capabilities.append("embedding")
        return capabilities

    async def _shows_tools(self, model: str, caller: HTTPCaller) -> bool:
        """Return whether the model's chat template has a place for tools; the answer is kept."""
        if model not in self._takes_tools:
            try:
                await self._calls.token_ids({**_PROBE, "model": model}, caller)
            except InvalidRequest:
                self._takes_tools[model] = False
            except GenbatchError:
                return False  # a later call tries again
            else:
                self._takes_tools[model] = True
        return self._takes_tools[model]

    def _row(self, card: ModelCard) -> dict[str, Any]:
        digest = hashlib.sha256(card.id.encode()).hexdigest()
        names = {"name": card.id, "model": card.id, "modified_at": self._started}
        return names | {"size": 0, "digest": digest, "details": _details(card)}


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": card.parent or "",
        "format": "genbatch",
        "family": "genbatch",
        "families": ["genbatch"],
        "parameter_size": "",
        "quantization_level": card.dtype if card.quantize == "none" else card.quantize,
    }


chat_endpoint = partial(OllamaGenerating, is_chat=True)
generate_endpoint = partial(OllamaGenerating, is_chat=False)
