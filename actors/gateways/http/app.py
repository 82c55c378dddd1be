"""make_app: the endpoints by their paths.

Endpoints that generate are in `generating.py`. Endpoints about the service itself, and the web page, are here.

One table of endpoints gives the routes, the OpenAPI document and the page of documentation.
"""

import html
import inspect
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from genbatch.actors.gateways.http.anthropic import CountFields, MessageFields, read_count, read_message
from genbatch.actors.gateways.http.batch_endpoints import BatchEndpoints, BatchFields, NoBatches
from genbatch.actors.gateways.http.batch_runner import BatchRunner
from genbatch.actors.gateways.http.bodies import JSON, Fields, Refusal, api_response, decode_json, renamed
from genbatch.actors.gateways.http.generating import Generating, Messages, NewFields, Responses
from genbatch.actors.gateways.http.llama_cpp import (
    InfillFields,
    LlamaCompletionFields,
    LlamaCppGenerating,
    LlamaCppRoutes,
    read_infill,
    read_llama_completion,
)
from genbatch.actors.gateways.http.ollama import (
    OllamaChatFields,
    OllamaEmbeddingFields,
    OllamaEmbedFields,
    OllamaGenerateFields,
    OllamaModels,
    OllamaShowFields,
    chat_endpoint,
    generate_endpoint,
)
from genbatch.actors.gateways.http.openai_request import (
    ChatFields,
    CompletionFields,
    FimFields,
    read_chat,
    read_completion,
    read_fim,
    read_messages,
)
from genbatch.actors.gateways.http.responses import ResponseFields
from genbatch.actors.gateways.http.service_calls import Front, HTTPCalls, OpenCalls
from genbatch.actors.gateways.http.text_endpoints import (
    ClassifyFields,
    EmbeddingFields,
    RerankFields,
    ScoreFields,
    TextEndpoint,
    classify,
    embed,
    rerank,
    rerank_cut,
    score,
)
from genbatch.actors.observing.metrics import render
from genbatch.actors.security.security import Security
from genbatch.proto.errors import EngineError, Forbidden, GenbatchError, InvalidRequest
from genbatch.proto.messages import GenerateRequest
from genbatch.proto.service_messages import ModelCard
from genbatch.proto.validation import check_type

_SCHEMAS = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and a path, with the function that serves it.

    Args:
        path: as Starlette writes it.
        endpoint: the function that answers.
        summary: its purpose, in one line.
        body: the type of a POST's body; None for a GET.
        verb: the HTTP method, if it is neither GET nor POST.
    """

    path: str
    endpoint: Any
    summary: str
    body: type | None = None
    verb: str = ""

    @property
    def method(self) -> str:
        """The HTTP method of the endpoint."""
        return self.verb or ("GET" if self.body is None else "POST")

    @property
    def shown(self) -> str:
        """The path in OpenAPI's notation."""
        return re.sub(r":\w+}", "}", self.path)


def describe_api(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI document."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation: dict[str, Any] = {
            "summary": endpoint.summary,
            "responses": {"200": {"description": "The answer, in the shape of the path's API."}},
        }
        if endpoint.body is not None:
            schema = {"$ref": _SCHEMAS.format(name=endpoint.body.__name__)}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            operation["responses"]["400"] = {
                "description": "{error: {message, type, param, code}}: `param` is at fault."
            }
        names = re.findall(r"{(\w+)}", endpoint.shown)
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(endpoint.shown, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "genbatch", "version": "1", "description": "One language model, shared by many callers."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def docs_page(endpoints: Sequence[Endpoint]) -> str:
    """Return the page of documentation; it loads nothing from other sites."""
    parts = []
    for endpoint in endpoints:
        parts.append(f'<section class="card"><h2>{endpoint.method} {html.escape(endpoint.shown)}</h2>')
        parts.append(f"<p>{_shown_text(endpoint.summary)}</p>")
        if endpoint.body is not None:
            texts = {**_arguments(GenerateRequest), **_arguments(endpoint.body)}
            rows = "".join(
                f"<tr><td><code>{field.name}</code></td><td><code>{html.escape(_json_type(field.type))}</code></td>"
                f"<td>{'required' if field.required else ''}</td><td>{_shown_text(texts.get(field.name, ''))}</td></tr>"
                for field in msgspec.structs.fields(endpoint.body)
            )
            parts.append(f"<details><summary>{_first_line(endpoint.body)}</summary><table>{rows}</table></details>")
        parts.append("</section>")
    return _PAGE.replace("{{sections}}", "".join(parts))


def _json_type(python_type: Any) -> str:
    """Return a field's type in JSON's words, such as "array of string or null"."""
    (schema,), _ = msgspec.json.schema_components([python_type], ref_template="{name}")
    return _shown_type(schema)


def _shown_type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_shown_type, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    kind = schema.get("type", "any")
    return f"array of {_shown_type(schema['items'])}" if kind == "array" and schema.get("items") else str(kind)


_ARGUMENT = re.compile(r"    (\w+(?:, \w+)*): (.*)")


def _arguments(body: type) -> dict[str, str]:
    """Return the texts of the class's docstring by field."""
    _, _, part = (inspect.getdoc(body) or "").partition("Args:\n")
    descriptions: dict[str, str] = {}
    names: list[str] = []
    for line in part.splitlines():
        if match := _ARGUMENT.fullmatch(line):
            names = match[1].split(", ")
            descriptions.update(dict.fromkeys(names, match[2]))
        elif line.startswith("        "):
            descriptions.update({name: f"{descriptions[name]} {line.strip()}" for name in names})
    return descriptions


def _first_line(body: type) -> str:
    return _shown_text((inspect.getdoc(body) or "").partition("\n")[0])


def _shown_text(text: str) -> str:
    """Return a docstring's text as HTML, with its `code` as an element."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>genbatch API</title>
  <link rel="icon" href="favicon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="playground.css">
  <link rel="stylesheet" href="chat.css">
</head>
<body>
  <header class="top"><img src="favicon.svg" alt="" width="28" height="28"><h1>genbatch API</h1>
    <nav aria-label="Pages"><a href="/">chat</a> <a href="/openapi.json">openapi.json</a></nav></header>
  <main class="chat docs">{{sections}}</main>
</body>
</html>
"""


# The page loads nothing from other sites, has no inline script, and no other page may frame it. So a script in a
# model's text does not run, even if a fault of the page puts the text outside its element.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {
    "/": "index.html",
    "/chat.js": "chat.js",
    "/chat.css": "chat.css",
    "/events.js": "events.js",
    "/markdown.js": "markdown.js",
    "/models.js": "models.js",
    "/compare": "compare.html",
    "/playground.css": "playground.css",
    "/playground.js": "playground.js",
    "/column.js": "column.js",
    "/chart.js": "chart.js",
    "/favicon.svg": "favicon.svg",
}


def page_routes() -> list[Route]:
    """Return a route for each file; the files are read once."""
    return [Route(path, _endpoint(name), methods=["GET"]) for path, name in FILES.items()]


def docs_routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return the routes of the documentation: a page, and an OpenAPI document."""
    page, document = docs_page(endpoints), describe_api(endpoints)

    async def docs(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=_HEADERS)

    async def openapi(request: Request) -> Response:
        return JSON(document)

    return [Route("/docs", docs, methods=["GET"]), Route("/openapi.json", openapi, methods=["GET"])]


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = (files("genbatch.actors.gateways.http") / "static" / name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]

    async def respond(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return respond


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize: vLLM's fields, and llama.cpp's `content`, `add_special` and `with_pieces`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /detokenize, as vLLM's."""

    model: str | None = None
    tokens: list[int]


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter, as vLLM's."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/unload_lora_adapter, as vLLM's."""

    lora_name: str


class LoadModelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /models/load and /models/unload, as llama.cpp's."""

    model: str


@contextmanager
def _vllm_names() -> Iterator[None]:
    try:
        yield
    except GenbatchError as error:
        raise renamed(error, {"name": "lora_name", "path": "lora_path"}) from None


class ServiceRoutes:
    """The endpoints' functions.

    Args:
        calls: calls the service.
        has_operators: whether callers without a token are this machine's own users.
        new_fields: makes a reader of a body's fields.
    """

    def __init__(self, calls: HTTPCalls, *, has_operators: bool = False, new_fields: NewFields = Fields) -> None:
        self._calls = calls
        self._has_operators = has_operators
        self._new_fields = new_fields
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """Return the list of models."""
        cards = [self._card(card) for card in await self._calls.models()]
        return JSON({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """Describe the model of this name."""
        return JSON(self._card(await self._calls.model(request.path_params["name"])))

    def _card(self, card: ModelCard) -> dict[str, Any]:
        """Describe a model as OpenAI does, with vLLM's names for context and adapters and llama.cpp's for the state."""
        shown = {"id": card.id, "object": "model", "created": self._created, "owned_by": "genbatch"}
        shown |= {"parent": card.parent, "max_model_len": card.n_ctx, "sampling": card.sampling}
        shown["generates"] = card.generates
        shown["status"] = {"value": card.state}
        if card.embedding_size is not None:
            shown["embedding_size"] = card.embedding_size
        if card.labels:
            shown["labels"] = card.labels
        return shown

    async def to_tokens(self, request: Request) -> Response:
        """Return the token ids of a text or of messages."""
        reader = self._new_fields()
        body = reader.read(decode_json(request.state.body), TokenizeBody)
        card = await self._calls.known_model(body.model, request.state.caller)
        params: dict[str, Any] = {"model": card.id}
        if body.prompt is not None:
            params["prompt"] = body.prompt
        if body.messages is not None:
            params["messages"] = read_messages(body.messages, reader)
        if body.add_special_tokens is not None:
            params["add_special_tokens"] = body.add_special_tokens
        if body.content is not None:
            if body.prompt is not None:
                raise InvalidRequest("content", "is llama.cpp's name of prompt: send one of them")
            params |= {"prompt": body.content, "add_special_tokens": bool(body.add_special)}
        token_ids = await self._calls.token_ids(params, request.state.caller)
        tokens: list[Any] = token_ids
        if body.with_pieces:
            texts = self._calls.texts(card.id)
            await texts.learn(token_ids)
            tokens = [{"id": token_id, "piece": texts[token_id]} for token_id in token_ids]
        answer = {"count": len(token_ids), "max_model_len": card.n_ctx, "tokens": tokens}
        return JSON(answer, headers=reader.headers)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a body of Anthropic's API."""
        reader = self._new_fields()
        model, params, names = read_count(decode_json(request.state.body), reader)
        card = await self._calls.model(model)
        try:
            token_ids = await self._calls.token_ids({**params, "model": card.id}, request.state.caller)
        except GenbatchError as error:
            raise renamed(error, names) from None
        return JSON({"input_tokens": len(token_ids)}, headers=reader.headers)

    async def to_text(self, request: Request) -> Response:
        """Return the text of token ids."""
        reader = self._new_fields()
        body = reader.read(decode_json(request.state.body), DetokenizeBody)
        card = await self._calls.model(body.model)
        try:
            params = {"token_ids": body.tokens, "model": card.id}
            text = await self._calls.text(params, request.state.caller)
        except GenbatchError as error:
            raise renamed(error, {"token_ids": "tokens"}) from None
        return JSON({"prompt": text, "content": text}, headers=reader.headers)  # vLLM's name and llama.cpp's

    async def load_model(self, request: Request) -> Response:
        """Load a model that is served on demand; answer once it is loaded."""
        return await self._switch(request, None)

    async def unload_model(self, request: Request) -> Response:
        """Unload a model that is served on demand, as soon as it has no open request."""
        return await self._switch(request, 0.0)

    async def _switch(self, request: Request, keep_alive: float | None) -> Response:
        body: LoadModelBody = check_type(decode_json(request.state.body), LoadModelBody)
        await self._calls.load_model(body.model, keep_alive, request.state.caller)
        return JSON({"success": True})

    async def load_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter."""
        self._check_operator()
        body: LoadAdapterBody = check_type(decode_json(request.state.body), LoadAdapterBody)
        with _vllm_names():
            await self._calls.load_adapter(body.lora_name, body.lora_path, request.state.caller)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Unload a LoRA adapter."""
        self._check_operator()
        body: UnloadAdapterBody = check_type(decode_json(request.state.body), UnloadAdapterBody)
        with _vllm_names():
            await self._calls.unload_adapter(body.lora_name, request.state.caller)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check_operator(self) -> None:
        if not self._has_operators:
            raise Forbidden("adapters are for the operator, at an address of this machine without tokens")

    async def health(self, request: Request) -> Response:
        """Answer 200 while the service takes requests and completes them, else 503 with the reason in `status`."""
        health = await self._calls.health()
        return JSON(health, 200 if health.status == "ready" else 503)

    async def stats(self, request: Request) -> Response:
        """Return the counters, as `genbatch stats` shows them."""
        return JSON(await self._calls.stats(request.state.caller))

    async def metrics(self, request: Request) -> Response:
        """Return the counters in Prometheus's format."""
        content, content_type = render(await self._calls.stats(request.state.caller))
        return Response(content, headers={"content-type": content_type})


def make_metrics_app(calls: HTTPCalls) -> ASGIApp:
    """Return the ASGI application of the address for metrics: counters and health, without access control."""
    service = ServiceRoutes(calls)
    routes = [
        Route("/metrics", service.metrics, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
    ]
    return Front(_routed(routes), authenticate=None, only_loopback=False)


# The bodies of OpenAI's and Anthropic's endpoints.
_BODIES = (ChatFields, CompletionFields, ResponseFields, MessageFields, EmbeddingFields, RerankFields, ScoreFields)


# llama.cpp's server has these endpoints at these paths, too.
_OTHER_PATHS = {
    "/v1/chat/completions": ("/chat/completions",),
    "/v1/models": ("/models",),
    "/health": ("/v1/health",),
}


def make_app(
    calls: HTTPCalls,
    open_calls: OpenCalls,
    security: Security,
    *,
    only_loopback: bool,
    strict: bool = False,
    batches: BatchRunner | None = None,
) -> ASGIApp:
    """Return the ASGI application of the endpoints.

    Args:
        calls: calls the service.
        open_calls: the running calls.
        security: the access control.
        only_loopback: see Front.
        strict: whether a field that no API has published is refused.
        batches: evaluates stored batches through the endpoints; None where nothing is stored.
    """
    elsewhere = frozenset(name for body in _BODIES for name in body.__struct_fields__)
    new_fields = partial(Fields, strict=strict, elsewhere=elsewhere)
    # With any of these, a caller without a token may be on another machine, so no caller counts as the operator.
    others = security.http_insecure or security.allowed_hosts or security.allowed_origins
    service = ServiceRoutes(calls, has_operators=only_loopback and not others, new_fields=new_fields)
    endpoints = [
        *_generating_endpoints(calls, open_calls, new_fields),
        *_reading_endpoints(calls, open_calls, new_fields),
        *_ollama_endpoints(calls, open_calls, new_fields),
        *_batch_endpoints(batches),
        *_llama_cpp_endpoints(calls, open_calls, new_fields),
        *_service_endpoints(service),
    ]
    routes = [
        *(
            Route(path, endpoint.endpoint, methods=[endpoint.method])
            for endpoint in endpoints
            for path in (endpoint.path, *_OTHER_PATHS.get(endpoint.path, ()))
        ),
        *docs_routes(endpoints),
        *page_routes(),
    ]
    app = _routed(routes)
    if batches is not None:
        batches.app = app
    return Front(
        app,
        authenticate=security.tokens.tenant if security.tokens else None,
        only_loopback=only_loopback,
        hosts=security.allowed_hosts,
        origins=security.allowed_origins,
    )


def _generating_endpoints(calls: HTTPCalls, open_calls: OpenCalls, new_fields: NewFields) -> list[Endpoint]:
    chat, completion, fim = (
        Generating(read, calls, open_calls, new_fields) for read in (read_chat, read_completion, read_fim)
    )
    responses = Responses(calls, open_calls, new_fields)
    messages = Messages(read_message, calls, open_calls, new_fields)
    next_message = "The next message of a conversation, whole or streamed, with tools. OpenAI's."
    return [
        Endpoint("/v1/chat/completions", chat, next_message, ChatFields),
        Endpoint("/v1/completions", completion, "Continue one text or several. OpenAI's.", CompletionFields),
        Endpoint("/v1/responses", responses, "OpenAI's newer API.", ResponseFields),
        Endpoint("/v1/messages", messages, "Anthropic's API.", MessageFields),
        Endpoint("/v1/fim/completions", fim, "The text between a prompt and a suffix. Mistral's.", FimFields),
    ]


def _reading_endpoints(calls: HTTPCalls, open_calls: OpenCalls, new_fields: NewFields) -> list[Endpoint]:
    by_vllm, by_cohere = (
        TextEndpoint(RerankFields, answer, calls, open_calls, new_fields) for answer in (rerank, rerank_cut)
    )
    scoring = TextEndpoint(ScoreFields, score, calls, open_calls, new_fields)
    classifying = TextEndpoint(ClassifyFields, classify, calls, open_calls, new_fields)
    embedding = TextEndpoint(EmbeddingFields, embed, calls, open_calls, new_fields)
    return [
        Endpoint("/v1/embeddings", embedding, "The embeddings of texts. OpenAI's.", EmbeddingFields),
        Endpoint("/v1/rerank", by_vllm, "Rank documents by relevance. Jina's, Cohere's v1, vLLM's.", RerankFields),
        Endpoint(
            "/rerank", by_vllm, "Like /v1/rerank; with `texts`, the answer of text-embeddings-inference.", RerankFields
        ),
        Endpoint("/v2/rerank", by_cohere, "Rank documents by relevance. Cohere's v2.", RerankFields),
        Endpoint("/v1/score", scoring, "The score of each pair of texts. vLLM's.", ScoreFields),
        Endpoint("/score", scoring, "The same.", ScoreFields),
        Endpoint("/v1/classify", classifying, "The label of each text. vLLM's.", ClassifyFields),
        Endpoint("/classify", classifying, "The same.", ClassifyFields),
    ]


def _batch_endpoints(runner: BatchRunner | None) -> list[Endpoint]:
    batches = NoBatches() if runner is None else BatchEndpoints(runner)
    return [
        Endpoint("/v1/files", batches.upload, "Store a file of requests, sent as a form. OpenAI's.", verb="POST"),
        Endpoint("/v1/files", batches.files, "The stored files. OpenAI's."),
        Endpoint("/v1/files/{id}", batches.file, "One file. OpenAI's."),
        Endpoint("/v1/files/{id}", batches.delete, "Delete a file. OpenAI's.", verb="DELETE"),
        Endpoint("/v1/files/{id}/content", batches.content, "The content of a file. OpenAI's."),
        Endpoint("/v1/batches", batches.create, "Run a file's requests in free slots. OpenAI's.", BatchFields),
        Endpoint("/v1/batches", batches.batches, "The batches. OpenAI's."),
        Endpoint("/v1/batches/{id}", batches.batch, "One batch. OpenAI's."),
        Endpoint("/v1/batches/{id}/cancel", batches.cancel, "Cancel a batch. OpenAI's.", verb="POST"),
    ]


def _ollama_endpoints(calls: HTTPCalls, open_calls: OpenCalls, new_fields: NewFields) -> list[Endpoint]:
    models = OllamaModels(calls, new_fields)
    chat = chat_endpoint(calls, open_calls, new_fields)
    generate = generate_endpoint(calls, open_calls, new_fields)
    return [
        Endpoint("/api/chat", chat, "The next message of a conversation, as JSON lines. Ollama's.", OllamaChatFields),
        Endpoint("/api/generate", generate, "The answer to a prompt, as JSON lines. Ollama's.", OllamaGenerateFields),
        Endpoint("/api/embed", models.embed, "The embeddings of texts. Ollama's.", OllamaEmbedFields),
        Endpoint("/api/embeddings", models.embeddings, "The embedding of one text. Ollama's.", OllamaEmbeddingFields),
        Endpoint("/api/tags", models.tags, "The served models. Ollama's."),
        Endpoint("/api/ps", models.ps, "The loaded models. Ollama's."),
        Endpoint("/api/show", models.show, "One model. Ollama's.", OllamaShowFields),
        Endpoint("/api/version", models.version, "The version of Ollama's API."),
    ]


def _llama_cpp_endpoints(calls: HTTPCalls, open_calls: OpenCalls, new_fields: NewFields) -> list[Endpoint]:
    completion, infill = (
        LlamaCppGenerating(read, calls, open_calls, new_fields) for read in (read_llama_completion, read_infill)
    )
    llama = LlamaCppRoutes(calls, new_fields)
    return [
        Endpoint("/completion", completion, "Continue a text. llama.cpp's.", LlamaCompletionFields),
        Endpoint("/infill", infill, "The text between a prefix and a suffix. llama.cpp's.", InfillFields),
        Endpoint("/apply-template", llama.apply_template, "The prompt of a chat. llama.cpp's.", ChatFields),
        Endpoint("/props", llama.props, "The length of the context and the number of slots. llama.cpp's."),
        Endpoint("/slots", llama.slots, "Which slots are taken; `fail_on_no_slot=1` is 503 if all are. llama.cpp's."),
    ]


def _service_endpoints(service: ServiceRoutes) -> list[Endpoint]:
    load, unload = service.load_adapter, service.unload_adapter
    unloads = "Unload a LoRA adapter after its requests have ended. For the operator. vLLM's."
    return [
        Endpoint("/v1/messages/count_tokens", service.count_tokens, "The number of a message's tokens.", CountFields),
        Endpoint("/v1/models", service.models, "The served models."),
        Endpoint("/v1/models/{name:path}", service.model, "One model."),
        Endpoint("/tokenize", service.to_tokens, "The token ids of a text or of messages.", TokenizeBody),
        Endpoint("/detokenize", service.to_text, "The text of token ids.", DetokenizeBody),
        Endpoint("/v1/load_lora_adapter", load, "Load a LoRA adapter. For the operator. vLLM's.", LoadAdapterBody),
        Endpoint("/v1/unload_lora_adapter", unload, unloads, UnloadAdapterBody),
        Endpoint("/models/load", service.load_model, "Load a model on demand now. llama.cpp's.", LoadModelBody),
        Endpoint("/models/unload", service.unload_model, "Unload a model. llama.cpp's.", LoadModelBody),
        Endpoint("/health", service.health, "200 while requests are completed, else 503 with the reason in `status`."),
        Endpoint("/stats", service.stats, "The counters as JSON."),
        Endpoint("/metrics", service.metrics, "The counters for Prometheus."),
    ]


def _routed(routes: list[Route]) -> Starlette:
    handlers = {GenbatchError: _refused, HTTPException: _not_routed, Exception: _failed}
    app = Starlette(routes=routes, exception_handlers=handlers)
    # No redirect from /health/ to /health: with some clients a redirected POST loses its body.
    app.router.redirect_slashes = False
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, GenbatchError)
    return api_response(error, request.url.path)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:128]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        refusal = Refusal(error.status_code, "method_not_allowed", f"{request.method} is not for {path}")
        refusal.headers.update(error.headers or {})
        return api_response(refusal, path)
    return api_response(Refusal(error.status_code, "not_found", f"there is no {path} here"), path)


async def _failed(request: Request, error: Exception) -> Response:
    # The error's text may reveal internals, so only the server's log has it.
    return api_response(EngineError("the service failed at this request"), request.url.path)
