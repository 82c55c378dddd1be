"""RemoteStream: a stream over a connection: grants credit as its tokens are read, and begins anew if it was refused."""

from collections.abc import Awaitable, Callable

from genbatch.clients.retry import Retry
from genbatch.clients.token_stream import TokenStream
from genbatch.proto.messages import Token


class RemoteStream(TokenStream):
    """Read by one task.

    Args:
        reopen: sends the request again.
        grant: lets the service send so many tokens more.
        window: tokens that the service may be ahead of the reader.
        retry: which refusals are not final.
    """

    __slots__ = ("_grant", "_has_begun", "_num_read", "_reopen", "_retry", "_window")

    def __init__(
        self, reopen: Callable[[], Awaitable[None]], grant: Callable[[int], None], *, window: int, retry: Retry
    ) -> None:
        super().__init__()
        self._reopen = reopen
        self._grant = grant
        self._window = window
        self._retry = retry
        self._has_begun = False
        self._num_read = 0  # since credit was granted last

    async def __anext__(self) -> Token:
        if not self._has_begun:
            await self._begin()
        token = await super().__anext__()
        self._num_read += 1
        if self._num_read * 2 >= self._window:
            if self.final is None:
                self._grant(self._num_read)
            self._num_read = 0
        return token

    async def _begin(self) -> None:
        """Waits for the first token or the final. Nothing has come yet, so a refused request may be sent again."""
        async for attempt in self._retry.attempts():
            with attempt:
                if attempt.num > 1:
                    self.final = None
                    await self._reopen()
                while not self.tokens and self.final is None:
                    await self._wait()
                if not self.tokens:
                    self.unwrap()
        self._has_begun = True
