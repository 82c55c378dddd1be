"""background: a nursery for what runs behind a `with` block and ends with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """A nursery that is cancelled when the body ends.

    The body's own exception comes out as it is, and so does the only exception of a background task: whoever uses
    the block did not open this nursery and should not have to take groups apart.
    """
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except Exception as error:
                failure = error
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if failure is None and len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    if failure is not None:
        raise failure
