"""TensorRT-LLM's three batching types, and the forwards that a plan becomes under each."""

from enum import Enum

from genbatch.actors.scheduling.scheduler_output import SchedulerOutput


class BatchingType(Enum):
    """What the batch manager calls modelType."""

    # A batch runs in lockstep until all of it is complete: see LockstepScheduler. Nothing is padded, and who has ended
    # is answered at once: an empty generation slot is one that nobody may join yet, and costs nothing.
    V1 = "V1"
    INFLIGHT_BATCHING = "InflightBatching"  # joins and leaves at every step; prefill and decode run apart
    INFLIGHT_FUSED_BATCHING = "InflightFusedBatching"  # the same, prefill and decode in one forward


def forwards(batching_type: BatchingType, plan: SchedulerOutput) -> list[SchedulerOutput]:
    """The plan's forward passes, in order: one, or contexts and decodes apart where they are not fused.

    Paused and never fitting requests stay with the first pass; a plan without work is still one pass.
    """
    if batching_type is BatchingType.INFLIGHT_FUSED_BATCHING:
        return [plan]
    if not plan.context_requests or not plan.generation_requests:
        return [plan]
    return [
        SchedulerOutput(
            context_requests=plan.context_requests,
            generation_requests=[],
            paused_requests=plan.paused_requests,
            chunk_sizes=plan.chunk_sizes,
            never_fitting=plan.never_fitting,
        ),
        SchedulerOutput([], plan.generation_requests, []),
    ]
