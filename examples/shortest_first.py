"""A scheduler of your own: among the prompts that wait for their turn in a step, the shortest goes first.

    PYTHONPATH=examples genbatch serve smollm2 --scheduler shortest_first:ShortestFirst

A scheduler is a pure function from requests to a plan: it sees lengths and phases, never tokens, and touches nothing.
"""

from collections.abc import Set

from genbatch import FIFOScheduler, MicroBatchOutput, RequestList


class ShortestFirst(FIFOScheduler):
    """As FIFO, decodes before prefills. Among prefills, who has least left to compute goes first.

    A short question does not wait behind a book. A long prompt waits while shorter ones keep coming, which FIFO never
    lets happen.
    """

    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Set[int]) -> MicroBatchOutput:
        """The step's requests; FIFO's order within each phase is that of the list."""
        by_length = sorted(fitting_requests, key=lambda request: request.context_remaining)
        return super().schedule(by_length, inflight_request_ids)
