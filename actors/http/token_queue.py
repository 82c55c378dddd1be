"""TokenQueue: tokens between the Batcher, which waits for nobody, and a socket, for which we wait."""

from collections.abc import Callable, Sequence

import trio

from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import Result, Token

# Tokens of one stream that may wait. A reader that is so far behind is not reading.
MAX_WAITING = 4096


class TokenQueue:
    """The tokens of one stream, and its end.

    Args:
        on_overflow: called when a token finds the queue full; the stream is of no use from then on.
    """

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        self.results: Sequence[Result] = ()
        self.error: GenbatchError | None = None
        self.has_ended = False
        self._on_overflow = on_overflow
        self._waiting: list[tuple[int, Token]] = []
        self._changed = trio.Event()

    def put(self, choice: int, token: Token) -> None:
        """The next token of a choice; does not block, and raises nothing."""
        if len(self._waiting) >= MAX_WAITING:
            self._on_overflow()
            return
        self._waiting.append((choice, token))
        self._changed.set()

    def end(self, results: Sequence[Result]) -> None:
        """Nothing follows."""
        self.results = results
        self._end()

    def fail(self, error: GenbatchError) -> None:
        """Nothing follows, for this reason."""
        self.error = error
        self._end()

    async def take(self) -> list[tuple[int, Token]]:
        """All that waits, with its choices; waits for a token or the end, after which it may be empty."""
        if not self._waiting and not self.has_ended:
            await self._changed.wait()
        self._changed = trio.Event()
        taken, self._waiting = self._waiting, []
        return taken

    def _end(self) -> None:
        self.has_ended = True
        self._changed.set()
