"""TokenStream: a call's tokens for `async for`, then its result.

stream = TokenStream()
nursery.start_soon(produce, stream.push, stream.finish)
async for token in stream: ...
stream.result
"""

from collections.abc import AsyncIterator
from typing import Any

import trio

from genbatch.clients.call_result import CallResult
from genbatch.proto.messages import Token


class TokenStream(CallResult):
    """Read by one task; `push`, `finish` and `fail` are called on the event loop."""

    __slots__ = ("_reader",)

    def __init__(self) -> None:
        super().__init__()
        self._reader: trio.lowlevel.Task | None = None

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        if self.tokens or self.final is not None:
            await trio.lowlevel.checkpoint()
        while not self.tokens and self.final is None:
            await self._wait()  # a checkpoint, too: one that comes on top costs as much as all else here
        if self.tokens:
            return self.tokens.popleft()
        self.unwrap()
        raise StopAsyncIteration

    async def ended(self) -> Any:
        """Waits for the final, whatever tokens come before it, and returns or raises it."""
        while self.final is None:
            await self._wait()
        return self.unwrap()

    def changed(self) -> None:
        """Wakes the reader."""
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None

    async def _wait(self) -> None:
        self._reader = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED
