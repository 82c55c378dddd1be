"""Stage: a scheduler for engines in other processes, by which a test stops them at the point that it needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Dies natively of prompts that begin with token 13, as a kernel with a bug would. While there is a file "hold" beside
# it, no engine starts, and a request with 8 tokens is as good as not there for the planner, as one that waits for the
# prefix of another is. To leave such requests out of the plan alone is not enough: a plan for nobody counts as a
# scheduler's fault, and the fallback plans in its place.
SOURCE = """
import os
import time
from pathlib import Path

from genbatch.actors.batcher.planner import Planner
from genbatch.actors.scheduling.scheduler import FIFOScheduler

HOLD = Path(__file__).with_name("hold")
while HOLD.exists():
    time.sleep(0.01)

active = Planner._active

def active_unless_held(planner):
    units, ready = active(planner)
    if HOLD.exists():
        units, ready = ([one for one in some if one.num_generated < 8] for some in (units, ready))
    return units, ready

Planner._active = active_unless_held

class Staged(FIFOScheduler):
    def schedule(self, fitting_requests, inflight_request_ids):
        if any(request.tokens[:1] == [13] for request in fitting_requests):
            os.abort()
        return super().schedule(fitting_requests, inflight_request_ids)
"""


class Stage:
    """The scheduler in a folder, which must be where the engine's process looks for modules.

    A held request goes on when something is asked for afterwards, or when its engine is replaced.
    """

    scheduler = "staged_scheduler:Staged"

    def __init__(self, directory: Path) -> None:
        self._hold = directory / "hold"
        (directory / "staged_scheduler.py").write_text(SOURCE)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """For as long as the body runs requests stay open, and an engine that has died stays away."""
        self._hold.touch()
        try:
            yield
        finally:
            self._hold.unlink()
