"""OpenCall: a call between its request and its final, and the tokens that wait for its client's credit."""

from collections import deque

import trio

from genbatch.actors.gateways.outbox import Outbox
from genbatch.proto.errors import Cancelled, GenbatchError
from genbatch.proto.rpc import MAX_CREDIT, StreamOptions, TokenArray

# Tokens of one stream that wait for credit, and how many seconds they do.
MAX_HELD = 4096
STALLED_S = 10.0


class OpenCall:
    """One call of a session.

    Args:
        options: how its tokens travel.
        outbox: where tokens go for which there is credit.
    """

    __slots__ = ("_caught_up", "_coalesce", "_credit", "_held", "_outbox", "_stalled_since", "reason", "scope")

    def __init__(self, options: StreamOptions, outbox: Outbox) -> None:
        self.scope = trio.CancelScope()
        self.reason: GenbatchError | None = None  # why it was cancelled
        self._outbox = outbox
        self._coalesce = options.coalesce
        self._credit = options.credit  # None: nobody counts
        self._held: deque[TokenArray] = deque()
        self._stalled_since: float | None = None  # tokens wait, and no credit has come since
        self._caught_up = trio.Event()
        self._caught_up.set()

    def cancel(self, reason: GenbatchError) -> None:
        """Ends it; the first reason stands."""
        if self.reason is None:
            self.reason = reason
            self._held.clear()
            self.scope.cancel()

    def deliver(self, token: TokenArray) -> bool:
        """Sends the next token, or keeps it until there is credit; returns whether it was sent."""
        if self._credit is not None:
            if not self._credit:
                self._hold(token)
                return False
            self._credit -= 1
        self._outbox.post_token(token, coalesce=self._coalesce)
        return True

    def grant(self, count: int) -> None:
        """The client can take `count` more tokens; a call that announced no credit has no need of it."""
        if self._credit is None:
            return
        self._credit = min(self._credit + count, MAX_CREDIT)
        while self._held and self._credit:
            self._credit -= 1
            self._outbox.post_token(self._held.popleft(), coalesce=self._coalesce)
        self._stalled_since = trio.current_time() if self._held else None
        if not self._held:
            self._caught_up.set()

    async def caught_up(self) -> None:
        """Waits until no token waits for credit."""
        await self._caught_up.wait()

    def check_stalled(self, now: float) -> None:
        """Cancels it if its client has granted nothing for too long while tokens wait."""
        if self._stalled_since is not None and now - self._stalled_since > STALLED_S:
            self.cancel(Cancelled(f"the client granted no credit for {STALLED_S:g} s"))

    def _hold(self, token: TokenArray) -> None:
        if not self._held:
            self._stalled_since = trio.current_time()
            self._caught_up = trio.Event()
        self._held.append(token)
        if len(self._held) > MAX_HELD:
            self.cancel(Cancelled(f"more than {MAX_HELD} tokens of this call wait for credit"))
