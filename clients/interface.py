"""The interface that all clients share: the one in this process and those over the network, for trio and without."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, Unpack

from genbatch.clients.request import GenerateParams, MessageLike
from genbatch.proto.messages import Result, Token


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
        """The service's counters."""


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
