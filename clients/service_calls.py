"""What clients can ask beside generations: one place for the methods, whatever carries them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from genbatch.clients.request import MessageLike, build_tokenize
from genbatch.proto.service_messages import (
    DetokenizeRequest,
    Drained,
    DrainRequest,
    Health,
    ModelCard,
    Models,
    Text,
    TokenIds,
)

Params = msgspec.Struct | dict[str, Any]


class ServiceCalls:
    """The methods of `Client` that are one question and one answer. A subclass asks."""

    async def _ask(self, method: str, params: Params, wanted: Any) -> Any:
        """The answer, of the type `wanted`."""
        raise NotImplementedError

    async def stats(self) -> dict[str, Any]:
        """See `Client.stats`."""
        stats: dict[str, Any] = await self._ask("stats", {}, dict[str, Any])
        return stats

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """See `Client.tokenize`."""
        request = build_tokenize(prompt, messages, add_special_tokens)
        answer: TokenIds = await self._ask("tokenize", request, TokenIds)
        return answer.token_ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `Client.detokenize`."""
        answer: Text = await self._ask("detokenize", DetokenizeRequest(token_ids=list(token_ids)), Text)
        return answer.text

    async def models(self) -> tuple[ModelCard, ...]:
        """See `Client.models`."""
        answer: Models = await self._ask("models", {}, Models)
        return answer.models

    async def health(self) -> Health:
        """See `Client.health`."""
        health: Health = await self._ask("health", {}, Health)
        return health

    async def drain(self, timeout_s: float = 30.0) -> Drained:
        """See `Client.drain`."""
        drained: Drained = await self._ask("drain", DrainRequest(timeout_s=timeout_s), Drained)
        return drained


class SyncServiceCalls:
    """The same without an event loop."""

    def _ask(self, method: str, params: Params, wanted: Any) -> Any:
        """The answer, of the type `wanted`."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """See `Client.stats`."""
        stats: dict[str, Any] = self._ask("stats", {}, dict[str, Any])
        return stats

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """See `Client.tokenize`."""
        answer: TokenIds = self._ask("tokenize", build_tokenize(prompt, messages, add_special_tokens), TokenIds)
        return answer.token_ids

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `Client.detokenize`."""
        answer: Text = self._ask("detokenize", DetokenizeRequest(token_ids=list(token_ids)), Text)
        return answer.text

    def models(self) -> tuple[ModelCard, ...]:
        """See `Client.models`."""
        answer: Models = self._ask("models", {}, Models)
        return answer.models

    def health(self) -> Health:
        """See `Client.health`."""
        health: Health = self._ask("health", {}, Health)
        return health

    def drain(self, timeout_s: float = 30.0) -> Drained:
        """See `Client.drain`."""
        drained: Drained = self._ask("drain", DrainRequest(timeout_s=timeout_s), Drained)
        return drained
