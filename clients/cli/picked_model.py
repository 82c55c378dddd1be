"""PickedModel: a client of a service that has several models, all of whose requests name one of them."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Unpack

from genbatch.clients.interface import Client, EmbedParams, GenerateParams, MessageLike, Stream, Texts
from genbatch.proto.messages import Drained, Embeddings, Health, ModelCard, Result


class PickedModel:
    """Implements `Client`.

    Args:
        client: asks.
        model: a name that the service lists.
    """

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Result:
        """See `Client.generate`."""
        params.setdefault("model", self._model)
        return await self._client.generate(prompt, messages=messages, **params)

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> AbstractAsyncContextManager[Stream]:
        """See `Client.stream`."""
        params.setdefault("model", self._model)
        return self._client.stream(prompt, messages=messages, **params)

    async def embed(self, texts: Texts, **params: Unpack[EmbedParams]) -> Embeddings:
        """See `Client.embed`."""
        params.setdefault("model", self._model)
        return await self._client.embed(texts, **params)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        add_special_tokens: bool = True,
        model: str | None = None,
    ) -> list[int]:
        """See `Client.tokenize`."""
        return await self._client.tokenize(
            prompt, messages=messages, add_special_tokens=add_special_tokens, model=model or self._model
        )

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """See `Client.detokenize`."""
        return await self._client.detokenize(token_ids, model=model or self._model)

    async def stats(self) -> dict[str, Any]:
        """See `Client.stats`."""
        return await self._client.stats()

    async def models(self) -> tuple[ModelCard, ...]:
        """See `Client.models`: all of them."""
        return await self._client.models()

    async def load_adapter(self, name: str, path: str) -> tuple[ModelCard, ...]:
        """See `Client.load_adapter`."""
        return await self._client.load_adapter(name, path)

    async def unload_adapter(self, name: str, timeout_s: float = 30.0) -> Drained:
        """See `Client.unload_adapter`."""
        return await self._client.unload_adapter(name, timeout_s)

    async def health(self) -> Health:
        """See `Client.health`."""
        return await self._client.health()

    async def drain(self, timeout_s: float = 30.0) -> Drained:
        """See `Client.drain`."""
        return await self._client.drain(timeout_s)
