"""The default order of a step: decodes, then contexts that have begun, then waiting requests in turn."""

from collections.abc import Set

from genbatch.actors.scheduling.llm_request import RequestList, split_by_phase
from genbatch.actors.scheduling.scheduler import MicroBatchOutput, MicroBatchScheduler
from genbatch.actors.scheduling.step_plan import StepLimits, StepPlan


class FIFOScheduler(MicroBatchScheduler):
    """Pushes what runs through before it pulls in what waits; decodes never stall behind a prefill.

    Args:
        limits: the budgets of a step.
    """

    def __init__(self, limits: StepLimits) -> None:
        super().__init__()
        self.limits = limits

    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Set[int]) -> MicroBatchOutput:
        """See MicroBatchScheduler; a later class gets something only once the earlier ones got all."""
        decoding, prefilling, pending = split_by_phase(fitting_requests, inflight_request_ids)
        step = StepPlan(self.limits)
        if step.add_decodes(decoding) and step.add_contexts(prefilling):
            step.add_contexts(pending)
        return MicroBatchOutput(step.context_requests, step.generation_requests, step.chunk_sizes, step.never_fitting)
