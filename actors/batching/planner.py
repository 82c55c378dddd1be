"""Planner: asks the scheduler what the next step holds, and turns its answer into the entries of forwards."""

from collections.abc import Set

from genbatch.actors.batching.held_prompts import HeldPrompts
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.batching.sequence import Sequence, Slotted
from genbatch.actors.batching.slots import Slots
from genbatch.actors.batching.step import Planned, plan_beams, plan_tokens
from genbatch.actors.scheduling.batching_type import forwards
from genbatch.actors.scheduling.kv_resources import KVResources
from genbatch.actors.scheduling.llm_request import LlmRequest
from genbatch.actors.scheduling.scheduler import SchedulerOutput, normalize_output
from genbatch.actors.scheduling.scheduler_spec import build_scheduler


class Planner:
    """Knows all that could run; between two steps only.

    Args:
        options: name the scheduler and the budgets.
        kv_view: what the scheduler may ask of the memory.
        slots: the sequences that run and that wait.
        held: prompts to share, which are evaluated like sequences.

    Raises:
        SchedulerError: the scheduler cannot be built.
    """

    def __init__(self, options: BatcherOptions, kv_view: KVResources, slots: Slots, held: HeldPrompts) -> None:
        self.scheduler = build_scheduler(options.scheduling, kv_view)
        self._options = options
        self._limits = options.scheduling.limits(kv_view.block_size)
        self._slots = slots
        self._held = held

    def plan(self, inflight: Set[int]) -> SchedulerOutput:
        """Asks the scheduler; what a waiting sequence will share counts as computed while it is asked.

        Args:
            inflight: ids of those that are not to be planned.
        """
        ready = self._slots.ready()
        candidates = ready[: len(self._slots.seq_pool)]
        for sequence in candidates:
            sequence.num_computed = self._slots.reusable(sequence)
        active: list[LlmRequest] = [*self._held.evaluating(), *self._slots.sequences.values(), *ready]
        try:
            output = self.scheduler.schedule_request(active, inflight) if active else ([], [], [])
            return normalize_output(output, active, inflight, self._limits)
        finally:
            for sequence in candidates:
                sequence.num_computed = 0

    def start(self, plan: SchedulerOutput) -> list[list[Planned]]:
        """The plan's forwards, each a list of entries; those newly picked take their slots."""
        parts = [self._lay_out(part) for part in forwards(self._options.batching_type, plan)]
        return [part for part in parts if part]

    def repeats(self, plan: SchedulerOutput) -> bool:
        """Whether the plan is that all there is decodes, and would be so until something arrives or ends."""
        return (
            self._options.plans_repeat
            and len(plan.generation_requests) == len(self._slots.sequences) == plan.num_scheduled
            and not (self._slots.pending and self._slots.seq_pool)
        )

    def _lay_out(self, plan: SchedulerOutput) -> list[Planned]:
        chunks = []
        for owner in plan.context_requests:
            assert isinstance(owner, Slotted)
            if isinstance(owner, Sequence) and owner.seq_id is None:
                self._slots.admit(owner)
            size = min(plan.chunk_sizes.get(owner.request_id, owner.context_remaining), owner.context_remaining)
            chunks.append(plan_tokens(owner, size))
        decodes: list[Planned] = []
        for owner in plan.generation_requests:
            assert isinstance(owner, Sequence)
            decodes += plan_beams(owner, owner.beams) if owner.beams is not None else [plan_tokens(owner, 1)]
        return decodes + chunks
