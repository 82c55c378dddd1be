"""Retry: which refusals a client takes as "later", and how long it waits before it asks again."""

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import stamina

from genbatch.proto.errors import QueueFull, Unavailable

# Refusals that follow one another make the waits longer by this factor, and by a share of up to this much at random,
# so that those who were refused together do not come back together.
GROWTH, JITTER = 1.5, 0.25


class Attempt(Protocol):
    """One try; as a context manager it decides about the next when its body raises."""

    @property
    def num(self) -> int:
        """1, 2, ..."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> bool | None: ...


class Attempts(Protocol):
    """`for attempt in attempts` waits between tries, or `async for`."""

    def __iter__(self) -> Iterator[Attempt]: ...

    def __aiter__(self) -> AsyncIterator[Attempt]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often a refused request is sent again.

    Only a request that the service refused, saying when to come back (`retry_after_ms`), and of which no token has
    arrived; never one whose fate is not known.

    Args:
        max_attempts: tries in all; 1 gives every refusal to the caller.
        timeout_s: seconds after which no further try begins.
    """

    max_attempts: int = 5
    timeout_s: float = 30.0

    def attempts(self) -> Attempts:
        """The tries of one request, as its body raises or not."""
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")
        wait = _Wait()
        found = stamina.retry_context(on=wait, attempts=self.max_attempts, timeout=self.timeout_s)
        return cast(Attempts, found)


class _Wait:
    """Seconds until the next try after an error; False for errors that another try does not mend."""

    def __init__(self) -> None:
        self._factor = 1.0

    def __call__(self, error: Exception) -> bool | float:
        if not isinstance(error, QueueFull | Unavailable) or error.retry_after_ms is None:
            return False
        wait_s = error.retry_after_ms / 1000 * self._factor * (1 + JITTER * random.random())
        self._factor *= GROWTH
        return wait_s
