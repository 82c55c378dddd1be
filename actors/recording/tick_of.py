"""What a record says of a plan."""

from collections.abc import Sequence as ListOf

from genbatch.actors.batching.sequence import Sequence
from genbatch.actors.batching.step import Planned
from genbatch.actors.recording.records import Part, Tick
from genbatch.actors.scheduling.llm_request import LlmRequest
from genbatch.actors.scheduling.scheduler_output import SchedulerOutput


def tick_of(plan: SchedulerOutput, groups: ListOf[ListOf[Planned]], sitting_out: list[int]) -> Tick:
    """The plan by the numbers of its requests, which are the same in every replay."""
    return Tick(
        groups=[
            [
                Part(*_name(planned.owner), planned.entry.seq_id, planned.entry.n_past, len(planned.entry.tokens))
                for planned in group
            ]
            for group in groups
        ],
        paused=[_name(owner) for owner in plan.paused_requests],
        refused=[_name(owner) for owner in plan.never_fitting],
        sitting_out=sitting_out,
    )


def _name(owner: LlmRequest) -> tuple[int, int]:
    if isinstance(owner, Sequence):
        return owner.request.number, owner.choice
    return 0, owner.request_id
