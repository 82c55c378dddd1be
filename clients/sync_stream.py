"""SyncTokenStream: a call's tokens for a plain `for`, then its result."""

from collections.abc import Callable, Iterator
from typing import Any

from genbatch.clients.call_result import CallResult
from genbatch.clients.retry import Retry
from genbatch.proto.messages import Token


class SyncTokenStream(CallResult):
    """Read by one thread.

    Args:
        wait_for: receives messages until its argument, called without arguments, is true.
        reopen: sends the request again.
        grant: lets the service send so many tokens more.
        window: tokens that the service may be ahead of the reader.
        retry: which refusals are not final.
    """

    __slots__ = ("_grant", "_has_begun", "_num_read", "_reopen", "_retry", "_wait_for", "_window")

    def __init__(
        self,
        wait_for: Callable[[Callable[[], bool]], None],
        reopen: Callable[[], None],
        grant: Callable[[int], None],
        *,
        window: int,
        retry: Retry,
    ) -> None:
        super().__init__()
        self._wait_for = wait_for
        self._reopen = reopen
        self._grant = grant
        self._window = window
        self._retry = retry
        self._has_begun = False
        self._num_read = 0  # since credit was granted last

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        if not self._has_begun:
            self._begin()
        self._wait_for(self._has_something)
        if not self.tokens:
            self.unwrap()
            raise StopIteration
        self._num_read += 1
        if self._num_read * 2 >= self._window:
            if self.final is None:
                self._grant(self._num_read)
            self._num_read = 0
        return self.tokens.popleft()

    def ended(self) -> Any:
        """Waits for the final, whatever tokens come before it, and returns or raises it."""
        self._wait_for(lambda: self.final is not None)
        return self.unwrap()

    def _begin(self) -> None:
        """Waits for the first token or the final. Nothing has come yet, so a refused request may be sent again."""
        for attempt in self._retry.attempts():
            with attempt:
                if attempt.num > 1:
                    self.final = None
                    self._reopen()
                self._wait_for(self._has_something)
                if not self.tokens:
                    self.unwrap()
        self._has_begun = True

    def _has_something(self) -> bool:
        return bool(self.tokens) or self.final is not None
