"""run_seeded: trio's event loop in simulated time, that does the same again for the same seed.

trio leaves to chance which task of a turn runs first; its random numbers are seeded here. And it leaves to memory
addresses whom a cancellation reaches first, and which of two deadlines at one moment: here it is whoever came first.
So a world depends on its seed alone, whatever ran before it and in whichever process.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from heapq import heappush
from itertools import count
from math import inf
from typing import Any

import trio
from trio._core import _run
from trio.testing import MockClock


def run_seeded(main: Callable[[], Awaitable[None]], seed: int) -> None:
    """Runs it with a clock that jumps to the next deadline whenever every task waits."""
    with _in_order(seed):
        trio.run(main, clock=_clock())


class _InOrder(dict[Any, None]):
    """A set that is gone through in the order in which it was filled."""

    def add(self, element: object) -> None:
        self[element] = None

    def remove(self, element: object) -> None:
        del self[element]


@contextmanager
def _in_order(seed: int) -> Iterator[None]:
    """While it lasts, nothing of the event loop depends on anything but the seed."""
    numbers = count()
    begin: Callable[[Any], None] = _run.CancelStatus.__attrs_post_init__

    def begin_in_order(status: Any) -> None:
        status._children, status._tasks = _InOrder(), _InOrder()
        begin(status)

    def add_in_order(deadlines: Any, deadline: float, scope: object) -> None:
        heappush(deadlines._heap, (deadline, next(numbers), scope))
        deadlines._active += 1

    patches = [
        (_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        (_run.CancelStatus, "__attrs_post_init__", begin_in_order),
        (_run.Deadlines, "add", add_in_order),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    _run._r.seed(seed)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _clock() -> MockClock:
    """A MockClock that takes its short ways: it never looks at the real one, and no statistics are made at a jump."""
    clock: Any = MockClock(autojump_threshold=0)

    def jump_to_next() -> None:
        deadline = _run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if deadline < inf:
            clock._virtual_base = max(clock._virtual_base, deadline)

    clock.current_time = lambda: clock._virtual_base
    clock._autojump = jump_to_next
    return clock
