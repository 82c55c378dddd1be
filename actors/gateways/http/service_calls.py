"""HTTPCalls: the service's methods as the HTTP endpoint uses them, over the Dispatcher that all gateways share."""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.draining import RETRY_AFTER_DRAIN_MS
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.proto.errors import ModelNotFound, Unavailable
from genbatch.proto.messages import (
    Embeddings,
    GenerateRequest,
    Health,
    ModelCard,
    Models,
    Result,
    Scores,
    Text,
    Token,
    TokenIds,
)

TextOf = Callable[[int], Awaitable[str]]


class TokenTexts:
    """Remembers the text of each token it was asked for; the vocabulary bounds how many those are.

    Args:
        detokenize: the text of one token id, by itself.
    """

    def __init__(self, detokenize: TextOf) -> None:
        self._detokenize = detokenize
        self._known: dict[int, str] = {}

    async def learn(self, token_ids: Iterable[int]) -> None:
        """Makes `self[token_id]` work for these."""
        for token_id in token_ids:
            if token_id not in self._known:
                self._known[token_id] = await self._detokenize(token_id)

    def __getitem__(self, token_id: int) -> str:
        """The text, with U+FFFD in the place of an incomplete character; empty for special tokens."""
        return self._known[token_id]


class TokenNames(TokenTexts):
    """In the place of TokenTexts where the caller wants ids: no two tokens have the same name."""

    def __init__(self) -> None:
        pass

    async def learn(self, token_ids: Iterable[int]) -> None:
        """Nothing is to be learned."""

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}"


# Seconds. A health check that times out counts as unhealthy.
HEALTH_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class HTTPCaller:
    """Who calls.

    Args:
        client: the account of its machine.
        tenant: the name that goes with its token; None where no tokens are wanted.
        request_id: the answer's id, for logs and spans.
    """

    client: str
    tenant: str | None = None
    request_id: str = ""

    @property
    def owner(self) -> str:
        """Whose conversations it may go on with."""
        return self.client if self.tenant is None else f"tenant:{self.tenant}"


class HTTPCalls:
    """Calls of the Dispatcher, typed.

    Args:
        dispatcher: what the methods do.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._texts: dict[str, TokenTexts] = {}

    def texts(self, model: str) -> TokenTexts:
        """What tokens of a model look like."""
        if model not in self._texts:
            self._texts[model] = TokenTexts(partial(self._token_text, model))
        return self._texts[model]

    async def generate(
        self, request: GenerateRequest, caller: HTTPCaller, on_token: Callable[[Token], None] | None
    ) -> Result:
        """One request; cancelling the caller's scope frees its sequence."""
        result = await self._call("generate" if on_token is None else "stream", request, caller, on_token)
        assert isinstance(result, Result)
        return result

    async def embed(self, params: dict[str, Any], caller: HTTPCaller) -> Embeddings:
        """A vector for each text."""
        answer = await self._call("embed", params, caller)
        assert isinstance(answer, Embeddings)
        return answer

    async def score(self, params: dict[str, Any], caller: HTTPCaller) -> Scores:
        """The scores of each document."""
        answer = await self._call("score", params, caller)
        assert isinstance(answer, Scores)
        return answer

    async def token_ids(self, params: dict[str, Any], caller: HTTPCaller) -> list[int]:
        """The token ids of a text or of messages."""
        answer = await self._call("tokenize", params, caller)
        assert isinstance(answer, TokenIds)
        return answer.token_ids

    async def text(self, params: dict[str, Any], caller: HTTPCaller) -> str:
        """The text of token ids."""
        answer = await self._call("detokenize", params, caller)
        assert isinstance(answer, Text)
        return answer.text

    async def model(self, name: str | None) -> ModelCard:
        """The model of this name; the first one where none is named.

        Raises:
            ModelNotFound: there is none.
        """
        models = await self.models()
        for card in models:
            if name is None or card.id == name:
                return card
        served = ", ".join(card.id for card in models)
        raise ModelNotFound(f"the model {str(name)[:128]!r} is not served here; there is {served}", field="model")

    async def known_model(self, name: str | None, caller: HTTPCaller) -> ModelCard:
        """As `model`, with all that is known of a model once it was loaded: a model that was not is loaded."""
        card = await self.model(name)
        if card.n_ctx:
            return card
        await self.load_model(card.id, None, caller)
        return await self.model(name)

    async def load_model(self, model: str, keep_alive: float | None, caller: HTTPCaller) -> None:
        """Load a model that is served on demand; with a `keep_alive` of 0 it is unloaded instead."""
        await self._call("load_model", {"model": model, "keep_alive": keep_alive}, caller)

    async def models(self) -> tuple[ModelCard, ...]:
        """What is served; asked for each time, since the operator may load and unload adapters."""
        answer = await self._call("models", {}, OURSELVES)
        assert isinstance(answer, Models)
        return answer.models

    async def load_adapter(self, name: str, path: str, caller: HTTPCaller) -> None:
        """Has an adapter served, too."""
        await self._call("load_adapter", {"name": name, "path": path}, caller)

    async def unload_adapter(self, name: str, caller: HTTPCaller) -> None:
        """Has an adapter served no longer; returns when its requests have ended."""
        await self._call("unload_adapter", {"name": name}, caller)

    async def stats(self, caller: HTTPCaller) -> dict[str, Any]:
        """The counters."""
        answer = await self._call("stats", {}, caller)
        assert isinstance(answer, dict)
        return answer

    async def health(self) -> Health:
        """How the service is; "down" if it does not say so in time."""
        with trio.move_on_after(HEALTH_TIMEOUT_S):
            answer = await self._call("health", {}, OURSELVES)
            assert isinstance(answer, Health)
            return answer
        return Health(status="down", steps=0, requests_running=0, requests_waiting=0, stalled_s=0.0)

    async def _token_text(self, model: str, token_id: int) -> str:
        return await self.text({"token_ids": [token_id], "model": model}, OURSELVES)

    async def _call(
        self,
        method: str,
        params: dict[str, Any] | msgspec.Struct,
        caller: HTTPCaller,
        on_token: Callable[[Token], None] | None = None,
    ) -> object:
        return await self._dispatcher.call(
            method,
            params,
            client=caller.client,
            on_token=on_token,
            tenant=caller.tenant,
            request_id=caller.request_id,
        )


OURSELVES = HTTPCaller("")  # not bounded as clients are


class OpenCalls:
    """The calls that have not ended."""

    def __init__(self) -> None:
        self._scopes: set[trio.CancelScope] = set()
        self._stopping = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around a call.

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
        """Ends every call, and refuses new ones."""
        self._stopping = True
        for scope in self._scopes:
            scope.cancel()
