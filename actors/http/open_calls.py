"""OpenCalls: what runs for HTTP clients, so that it can be ended with a word when the gateway stops."""

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from genbatch.proto.errors import Unavailable


class OpenCalls:
    """The calls that have not ended."""

    def __init__(self) -> None:
        self._scopes: set[trio.CancelScope] = set()
        self._stopping = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around a call.

        Raises:
            Unavailable: the gateway stops, or has stopped.
        """
        scope = trio.CancelScope()
        if self._stopping:
            raise Unavailable("the service is stopping")
        self._scopes.add(scope)
        try:
            with scope:
                yield
        finally:
            self._scopes.discard(scope)
        if scope.cancelled_caught:
            raise Unavailable("the service is stopping")

    def stop(self) -> None:
        """Ends every call, and refuses new ones."""
        self._stopping = True
        for scope in self._scopes:
            scope.cancel()
