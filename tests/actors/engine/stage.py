"""Stage: a scheduler for engines in other processes by which a test has them be as far as it needs them to be."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Dies natively of prompts that begin with token 13, as a kernel with a bug would. While there is a file "hold" beside
# it nobody gets more than 8 tokens, and no engine starts.
SOURCE = """
import os
import time
from pathlib import Path

from genbatch.actors.scheduling.scheduler import FIFOScheduler

HOLD = Path(__file__).with_name("hold")
while HOLD.exists():
    time.sleep(0.01)

class Staged(FIFOScheduler):
    def schedule(self, fitting_requests, inflight_request_ids):
        if any(request.tokens[:1] == [13] for request in fitting_requests):
            os.abort()
        if HOLD.exists():
            fitting_requests = [request for request in fitting_requests if request.num_generated < 8]
        return super().schedule(fitting_requests, inflight_request_ids)
"""


class Stage:
    """The scheduler in a folder, which must be where the engine's process looks for modules.

    What is held goes on when something is asked for afterwards, or when its engine is replaced.
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
