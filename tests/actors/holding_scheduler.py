"""HoldingScheduler: a request for ENDLESS tokens gets a few and then waits for ever, to be there when a test acts."""

from collections.abc import Set

from genbatch.actors.scheduling.request import RequestList
from genbatch.actors.scheduling.scheduler import FIFOScheduler, MicroBatchOutput

NAME = f"{__name__}:HoldingScheduler"
ENDLESS, FIRST = 240, 8


class HoldingScheduler(FIFOScheduler):
    """FIFO for all others."""

    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Set[int]) -> MicroBatchOutput:
        """See MicroBatchScheduler."""
        going_on = [one for one in fitting_requests if one.max_new_tokens != ENDLESS or one.num_generated < FIRST]
        return super().schedule(going_on, inflight_request_ids)
