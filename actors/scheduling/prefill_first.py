"""The order of a step for long prompts: contexts that have begun, then decodes, then waiting requests."""

from collections.abc import Set

from genbatch.actors.scheduling.llm_request import RequestList, split_by_phase
from genbatch.actors.scheduling.scheduler import MicroBatchOutput, MicroBatchScheduler
from genbatch.actors.scheduling.step_plan import StepLimits, StepPlan


class PrefillFirstScheduler(MicroBatchScheduler):
    """Completes contexts that were split before decodes resume.

    Waiting requests come last, so a steady stream of prompts cannot keep the decodes out.

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
        if step.add_contexts(prefilling) and step.add_decodes(decoding):
            step.add_contexts(pending)
        return MicroBatchOutput(step.context_requests, step.generation_requests, step.chunk_sizes, step.never_fitting)
