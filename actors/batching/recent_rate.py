"""RecentRate: how many a second, over the last seconds."""

from collections import deque

# Whole seconds that a rate looks back: long enough to be calm, short enough to follow a change.
WINDOW_S = 10


class RecentRate:
    """Counts by second."""

    def __init__(self) -> None:
        self._counts: deque[list[int]] = deque(maxlen=WINDOW_S + 1)  # [second, count]
        self._since: float | None = None  # when something was counted after a silent window

    def add(self, now: float, count: int) -> None:
        """Books `count` at the time `now`, in seconds on a clock that does not go back."""
        second = int(now)
        if self._since is None or not self._counts or self._counts[-1][0] < second - WINDOW_S:
            self._counts.clear()
            self._since = now
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1][1] += count
        else:
            self._counts.append([second, count])

    def per_second(self, now: float) -> float:
        """The mean since the window began, or since counting did, if that is later; a second at least."""
        if self._since is None:
            return 0.0
        start = max(self._since, int(now) - WINDOW_S)
        total = sum(count for second, count in self._counts if second >= int(now) - WINDOW_S)
        return total / max(now - start, 1.0)
