"""From an HTTP request to the service: Front checks the caller and reads the body, HTTPCalls calls the Dispatcher.

Front finds the caller by the headers (host, origin, token). Then it reads the whole body, within bounds. Until the
request is answered, other connections cannot push this one out. An endpoint finds `caller` and `body` in the scope's
state. It can receive one more message, which tells that the client has gone.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import trio
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genbatch.actors.batcher.messages import RETRY_AFTER_DRAIN_MS
from genbatch.actors.gateways.accepting import MAX_HALF_MESSAGES, MessageBudget, Seat, account_of_host
from genbatch.actors.gateways.dispatcher import RETRY_AFTER_FULL_MS, Caller, Dispatcher
from genbatch.actors.gateways.http.bodies import Refusal, api_response
from genbatch.actors.security.key_files import bearer_token
from genbatch.actors.security.security import Authenticate, is_loopback
from genbatch.proto.codec import REQUEST_LIMITS
from genbatch.proto.errors import Forbidden, FrameTooLarge, GenbatchError, ModelNotFound, Unauthenticated, Unavailable
from genbatch.proto.messages import Embeddings, GenerateRequest, Result, Scores, Text, Token, TokenIds
from genbatch.proto.service_messages import Drained, Health, ModelCard, Models

TextOf = Callable[[int], Awaitable[str]]
Answer = TypeVar("Answer")


class TokenTexts:
    """Caches the texts of tokens; the vocabulary bounds their number.

    Args:
        detokenize: the text of one token id, by itself.
    """

    def __init__(self, detokenize: TextOf) -> None:
        self._detokenize = detokenize
        self._known: dict[int, str] = {}

    async def learn(self, token_ids: Iterable[int]) -> None:
        """Look up the texts of these tokens, for `self[token_id]`."""
        for token_id in token_ids:
            if token_id not in self._known:
                self._known[token_id] = await self._detokenize(token_id)

    def __getitem__(self, token_id: int) -> str:
        """Return the text, with U+FFFD in the place of an incomplete character; empty for special tokens."""
        return self._known[token_id]


class TokenNames(TokenTexts):
    """Replaces TokenTexts for callers that want ids: the text of a token is its id."""

    def __init__(self) -> None:
        pass

    async def learn(self, token_ids: Iterable[int]) -> None:
        """Do nothing: the names need no look-up."""

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}"


# Seconds. A health check that times out counts as unhealthy.
HEALTH_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class HTTPCaller:
    """The caller of one HTTP request.

    Args:
        client: the account of the caller's machine.
        tenant: the tenant of the caller's token; None for a service without tokens.
        request_id: the answer's id, for logs and spans.
    """

    client: str
    tenant: str | None = None
    request_id: str = ""

    @property
    def owner(self) -> str:
        """The owner of the conversations that this caller may continue."""
        return self.client if self.tenant is None else f"tenant:{self.tenant}"


class HTTPCalls:
    """Typed calls of the Dispatcher.

    Args:
        dispatcher: runs the methods.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._texts: dict[str, TokenTexts] = {}

    def texts(self, model: str) -> TokenTexts:
        """Return the cached texts of a model's tokens."""
        if model not in self._texts:
            self._texts[model] = TokenTexts(partial(self._token_text, model))
        return self._texts[model]

    async def generate(
        self, request: GenerateRequest, caller: HTTPCaller, on_token: Callable[[Token], None] | None
    ) -> Result:
        """Run one request; cancelling the caller's scope frees its sequences."""
        method = "generate" if on_token is None else "stream"
        return await self._call(method, request, caller, Result, on_token)

    async def embed(self, params: dict[str, Any], caller: HTTPCaller) -> Embeddings:
        """Return a vector for each text."""
        return await self._call("embed", params, caller, Embeddings)

    async def score(self, params: dict[str, Any], caller: HTTPCaller) -> Scores:
        """Return the scores of each document."""
        return await self._call("score", params, caller, Scores)

    async def token_ids(self, params: dict[str, Any], caller: HTTPCaller) -> list[int]:
        """Return the token ids of a text or of messages."""
        return (await self._call("tokenize", params, caller, TokenIds)).token_ids

    async def prompt_text(self, params: dict[str, Any], caller: HTTPCaller) -> str:
        """Return the prompt that the chat template writes for messages."""
        answer = await self._call("tokenize", {**params, "return_text": True}, caller, TokenIds)
        assert answer.text is not None
        return answer.text

    async def text(self, params: dict[str, Any], caller: HTTPCaller) -> str:
        """Return the text of token ids."""
        return (await self._call("detokenize", params, caller, Text)).text

    async def model(self, name: str | None) -> ModelCard:
        """Return the card of the model with this name; None names the first model.

        Raises:
            ModelNotFound: no served model has this name.
        """
        models = await self.models()
        for card in models:
            if name is None or card.id == name:
                return card
        served = ", ".join(card.id for card in models)
        raise ModelNotFound(f"the model {str(name)[:128]!r} is not served here; there is {served}", field="model")

    async def known_model(self, name: str | None, caller: HTTPCaller) -> ModelCard:
        """Return a model's card as `model` does, with all its facts: a model on demand is loaded first."""
        card = await self.model(name)
        if card.n_ctx:
            return card
        await self.load_model(card.id, None, caller)
        return await self.model(name)

    async def load_model(self, model: str, keep_alive: float | None, caller: HTTPCaller) -> None:
        """Load a model that is served on demand; a `keep_alive` of 0 unloads it instead."""
        await self._call("load_model", {"model": model, "keep_alive": keep_alive}, caller, Models)

    async def models(self) -> tuple[ModelCard, ...]:
        """Return the served models. Every call asks anew, since the operator may load and unload adapters."""
        return (await self._call("models", {}, OURSELVES, Models)).models

    async def load_adapter(self, name: str, path: str, caller: HTTPCaller) -> None:
        """Load a LoRA adapter and serve it."""
        await self._call("load_adapter", {"name": name, "path": path}, caller, Models)

    async def unload_adapter(self, name: str, caller: HTTPCaller) -> None:
        """Unload a LoRA adapter; return after the end of its requests."""
        await self._call("unload_adapter", {"name": name}, caller, Drained)

    async def stats(self, caller: HTTPCaller) -> dict[str, Any]:
        """Return the counters."""
        return await self._call("stats", {}, caller, dict)

    async def health(self) -> Health:
        """Return the health of the service; "down" if it does not answer in time."""
        with trio.move_on_after(HEALTH_TIMEOUT_S):
            return await self._call("health", {}, OURSELVES, Health)
        return Health(status="down", steps=0, requests_running=0, requests_waiting=0, stalled_s=0.0)

    async def _token_text(self, model: str, token_id: int) -> str:
        return await self.text({"token_ids": [token_id], "model": model}, OURSELVES)

    async def _call(
        self,
        method: str,
        params: dict[str, Any] | msgspec.Struct,
        caller: HTTPCaller,
        answer_type: type[Answer],
        on_token: Callable[[Token], None] | None = None,
    ) -> Answer:
        who = Caller(caller.client, on_token, caller.tenant, caller.request_id)
        answer = await self._dispatcher.call(method, params, who)
        assert isinstance(answer, answer_type)
        return answer


OURSELVES = HTTPCaller("")  # this caller has no limits


class OpenCalls:
    """The running calls, which `stop` ends."""

    def __init__(self) -> None:
        self._scopes: set[trio.CancelScope] = set()
        self._stopping = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Run one call in the body, which `stop` ends.

        Raises:
            Unavailable: the gateway stops, or has stopped.
        """
        scope = trio.CancelScope()
        if self._stopping:
            raise Unavailable("the service is stopping", retry_after_ms=RETRY_AFTER_DRAIN_MS)
        self._scopes.add(scope)
        try:
            with scope:
                yield
        finally:
            self._scopes.discard(scope)
        if scope.cancelled_caught:
            raise Unavailable("the service is stopping", retry_after_ms=RETRY_AFTER_DRAIN_MS)

    def stop(self) -> None:
        """End every call, and refuse new calls."""
        self._stopping = True
        for scope in self._scopes:
            scope.cancel()


# As on the other wires.
MAX_BODY_BYTES = REQUEST_LIMITS.max_bytes
# Seconds for a whole body to arrive.
BODY_TIMEOUT_S = 30.0
# Paths without a token: they reveal and change nothing, and a page is loaded before it can send a token.
OPEN_PATHS = frozenset(
    (
        *("/", "/chat.js", "/chat.css", "/events.js", "/compare", "/playground.css", "/playground.js", "/chart.js"),
        *("/column.js", "/markdown.js", "/models.js", "/favicon.svg", "/health", "/docs", "/openapi.json"),
    )
)


class Front:
    """The ASGI application in front of the endpoints.

    Args:
        app: the endpoints.
        authenticate: returns the tenant of a token, or None for an unknown token; None admits every client.
        only_loopback: whether the address is a loopback address. Another host name in a request is then an attack by a
            web page with a server that resolves its name to this machine (DNS rebinding).
        hosts: allowed host names; if there are any, other names are refused.
        origins: origins of other sites with pages that may use the service.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Authenticate | None,
        only_loopback: bool,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._authenticate = authenticate
        self._only_loopback = only_loopback
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._budget = MessageBudget(MAX_HALF_MESSAGES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to its endpoint, or answer it with the refusal."""
        origin = Headers(scope=scope).get("origin")
        if origin is not None and origin.lower() in self._origins:
            # Pages of this origin may read each response.
            send = with_headers(send, {"access-control-allow-origin": origin, "vary": "origin"})
            if scope["method"] == "OPTIONS":
                await _allow(Headers(scope=scope))(scope, receive, send)
                return
        try:
            caller = self._caller(scope)
            body = await _read(receive, self._budget)
        except GenbatchError as error:
            await api_response(error, scope["path"])(scope, receive, send)
            return
        seat: Seat = scope["state"]["seat"]
        scope["state"] = {"caller": caller, "body": body}
        with seat.busy():
            await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> HTTPCaller:
        """Return the caller of a request.

        Raises:
            Forbidden, Unauthenticated: the headers name another host or origin, or no known token.
        """
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        self._check_host(host, scope["path"])
        origin = headers.get("origin")
        # guard: pages of other sites
        if origin is not None and _host_of(origin) != host and origin.lower() not in self._origins:
            raise Forbidden(f"pages of {origin[:128]!r} may not use this service (--allowed-origin)")
        client = account_of_host((scope.get("client") or ("",))[0])
        # guard: token before anything, HTTP
        if self._authenticate is None or scope["path"] in OPEN_PATHS:
            return HTTPCaller(client)
        # Anthropic's clients have a header of their own.
        token = bearer_token(headers.get("authorization")) or headers.get("x-api-key")
        tenant = None if token is None else self._authenticate(token)
        if tenant is None:
            if token is None:
                raise Unauthenticated("the token is missing; send the header Authorization: Bearer TOKEN")
            raise Unauthenticated("the token is not known; its operator makes one with `genbatch keys token`")
        return HTTPCaller(client, tenant)

    def _check_host(self, host: str, path: str) -> None:
        """Check the Host header.

        Raises:
            Forbidden: the host name is not allowed; it may be DNS rebinding.
        """
        name = _without_port(host)
        # A browser names a host in every request; a health check over HTTP/1.0, such as HAProxy's, names none.
        if not host or is_loopback(name) or name.lower() in self._hosts:
            return
        # guard: names that lead to this machine
        if self._only_loopback:
            names = "localhost, 127.0.0.1 or [::1]"
        elif self._hosts and path != "/health":  # probes use the address of the machine
            names = ", ".join(sorted(self._hosts))
        else:
            return
        raise Forbidden(f"the service is reached as {names}, not as {host[:128]!r} (--allowed-host)")


def with_headers(send: Send, headers: dict[str, str]) -> Send:
    """Return a `send` that adds these headers to the response."""
    more = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return send_more


def _allow(headers: Headers) -> Response:
    """Return the response to a browser's preflight request, which has no token."""
    asked_headers = headers.get("access-control-request-headers", "authorization, content-type")
    allowed = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": asked_headers,
        "access-control-max-age": "600",
    }
    return Response(status_code=204, headers=allowed)


def _host_of(origin: str) -> str | None:
    """Return HOST:PORT of an Origin header; None if it is not an address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


async def _read(receive: Receive, budget: MessageBudget) -> bytes:
    """Return the whole body.

    Raises:
        FrameTooLarge: the body has too many bytes.
        Unavailable: other bodies need its memory.
        Refusal: the body does not arrive in time.
    """
    body = bytearray()  # a list of tiny chunks would take ten times their bytes
    given_up = trio.CancelScope()
    with given_up, budget.share(given_up.cancel) as share, trio.move_on_after(BODY_TIMEOUT_S):
        while True:
            message = await receive()
            body += message["body"]
            # guard: cap on a body, HTTP
            if len(body) > MAX_BODY_BYTES:
                raise FrameTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
            if not message.get("more_body"):
                return bytes(body)
            # guard: half bodies of strangers
            share.holds(len(body))
    if given_up.cancelled_caught:
        raise Unavailable(f"unfinished bodies take {budget.max_bytes} bytes", retry_after_ms=RETRY_AFTER_FULL_MS)
    raise Refusal(408, "timeout", f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
