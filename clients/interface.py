"""The interface that all clients share: the one in this process and those over the network, for trio and without."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, Unpack

from genbatch.clients.request import GenerateParams, MessageLike
from genbatch.proto.messages import Result, Token
from genbatch.proto.service_messages import Drained, Health, ModelCard


class Stream(Protocol):
    """Tokens as they come, then the result."""

    def __aiter__(self) -> AsyncIterator[Token]: ...

    @property
    def result(self) -> Result:
        """What it ended with, once the iteration has ended.

        Raises:
            StreamNotEnded: it has not.
        """


class SyncStream(Protocol):
    """As Stream, for a plain `for`."""

    def __iter__(self) -> Iterator[Token]: ...

    @property
    def result(self) -> Result:
        """As Stream's."""


class Client(Protocol):
    """A client for trio."""

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Result:
        """Generates and returns the whole; cancelling the scope cancels the request.

        Args:
            prompt: text or token ids; None with `messages`.
            messages: a conversation, each turn a Message or a dict of role and content.
            params: the other fields of GenerateRequest.

        Raises:
            GenbatchError: the request's error, one of the classes of genbatch.proto.errors.
        """

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> AbstractAsyncContextManager[Stream]:
        """As `generate`, token by token; leaving the body early cancels the request.

        async with client.stream("Hello", max_tokens=8) as stream:
            async for token in stream:
                print(token.text, end="")
        print(stream.result.finish_reason)
        """

    async def stats(self) -> dict[str, Any]:
        """The service's counters; while its engine is down (`engine` says so) only those of the gateway."""

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """The token ids that `generate` would evaluate for a text or a conversation.

        Args:
            add_special_tokens: put the start token in front of `prompt`, if the model wants one.
        """

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; parts of a character become U+FFFD."""

    async def models(self) -> tuple[ModelCard, ...]:
        """The models that are served."""

    async def health(self) -> Health:
        """How the service is: "ready", "draining", "stuck" or "down"."""

    async def drain(self, timeout_s: float = 30.0) -> Drained:
        """Lets the service take no new requests, and waits until those it has have ended; there is no way back.

        Args:
            timeout_s: seconds after which those that are still open are cancelled.
        """


class SyncClient(Protocol):
    """A client without an event loop; used by one thread."""

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> Result:
        """As Client's."""

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        **params: Unpack[GenerateParams],
    ) -> AbstractContextManager[SyncStream]:
        """As Client's, with `with` and `for`."""

    def stats(self) -> dict[str, Any]:
        """As Client's."""

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """As Client's."""

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """As Client's."""

    def models(self) -> tuple[ModelCard, ...]:
        """As Client's."""

    def health(self) -> Health:
        """As Client's."""

    def drain(self, timeout_s: float = 30.0) -> Drained:
        """As Client's."""
