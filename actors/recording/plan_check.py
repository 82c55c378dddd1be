"""PlanCheck: the flight of a replay: time and masks are the record's, and each tick is compared with its record."""

from collections import deque
from collections.abc import Sequence as ListOf

from genbatch.actors.batching.step import Planned
from genbatch.actors.recording.flight import Flight
from genbatch.actors.recording.records import Tick
from genbatch.actors.recording.tick_of import tick_of
from genbatch.actors.scheduling.scheduler_output import SchedulerOutput


class PlanCheck(Flight):
    """Ends with the first difference: what follows it would be compared with what never happened.

    Args:
        began_at: the time of the record's header.
    """

    def __init__(self, began_at: float) -> None:
        self.num_ticks = 0  # compared and found the same
        self.difference: tuple[Tick | None, Tick | None] | None = None  # recorded, planned
        self._now = began_at
        self._ticks: deque[Tick] = deque()
        self._may_lack_ticks = False

    def expect(self, time: float, ticks: list[Tick], *, is_last: bool) -> None:
        """What is recorded of the next message: its time, and its ticks; the last message's may be cut off."""
        self._now = time
        self._ticks.extend(ticks)
        self._may_lack_ticks = is_last

    def settle(self) -> None:
        """The message has been handled: all its ticks must have come."""
        if self._ticks and self.difference is None:
            self.difference = self._ticks[0], None

    def now(self) -> float:
        return self._now

    def sitting_out(self, ids: frozenset[int]) -> frozenset[int]:
        return frozenset(self._ticks[0].sitting_out) if self._ticks else ids

    def ticked(self, plan: SchedulerOutput, groups: ListOf[ListOf[Planned]]) -> None:
        if self.difference is not None:
            return
        recorded = self._ticks.popleft() if self._ticks else None
        planned = tick_of(plan, groups, recorded.sitting_out if recorded else [])
        if recorded == planned:
            self.num_ticks += 1
        elif recorded is not None or not self._may_lack_ticks:
            self.difference = recorded, planned
