"""Planner: asks the scheduler what the next step holds, fits that into memory, and makes it the entries of forwards.

A scheduler, which may be a user's, decides who should run; it need not be right about memory, nor work at all. So that
no plan is made twice in vain, what it says is carried out as far as the blocks go round, by the arithmetic with which
the step reserves them (`StepDraft`). Prompts held for nobody in particular give way first, then those of the plan that
come last.
"""

import logging
from collections.abc import Set
from dataclasses import dataclass, replace

from genbatch.actors.batching.held_prompts import HeldPrompts
from genbatch.actors.batching.kv_view import KVView
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.batching.sequence import HeldPrompt, Sequence, Slotted
from genbatch.actors.batching.slots import Slots, waiting_key
from genbatch.actors.batching.step import Planned, plan_beams, plan_tokens
from genbatch.actors.scheduling.batching_type import forwards
from genbatch.actors.scheduling.llm_request import RequestList
from genbatch.actors.scheduling.scheduler import RequestScheduler, SchedulerError, SchedulerOutput, normalize_output
from genbatch.actors.scheduling.scheduler_spec import STEP_ORDERS, build_scheduler
from genbatch.nif.kv.kv_cache import KVCache

log = logging.getLogger("genbatch")


@dataclass(frozen=True, slots=True)
class Fitted:
    """What of a plan fits.

    Args:
        plan: that part.
        is_whole: whether it is all of it.
    """

    plan: SchedulerOutput
    is_whole: bool


class Planner:
    """Knows all that could run; between two steps only.

    Args:
        options: name the scheduler and the budgets.
        kv: from which steps take their blocks.
        kv_view: what the scheduler may ask of the memory.
        slots: the sequences that run and that wait.
        held: prompts to share, which are evaluated like sequences.

    Raises:
        SchedulerError: the scheduler cannot be built.
    """

    def __init__(self, options: BatcherOptions, kv: KVCache, kv_view: KVView, slots: Slots, held: HeldPrompts) -> None:
        self.scheduler = build_scheduler(options.scheduling, kv_view)
        self._fallback: RequestScheduler | None = None
        if options.scheduler not in STEP_ORDERS:
            self._fallback = build_scheduler(replace(options.scheduling, scheduler="fifo"), kv_view)
        self._has_failed = False  # the scheduler, when it was asked last
        self._options = options
        self._limits = options.scheduling.limits(kv.block_size)
        self._kv = kv
        self._kv_view = kv_view
        self._slots = slots
        self._held = held
        self._is_whole = True  # whether all of the last plan fitted

    def plan(self, inflight: Set[int]) -> SchedulerOutput:
        """Asks the scheduler; what a waiting sequence will share counts as computed while it is asked.

        A scheduler of the user's that raises, or plans nothing although nothing else is under way, is passed over.

        Args:
            inflight: ids of those that are not to be planned.
        """
        active, ready = self._active()
        if not active:
            return SchedulerOutput([], [], [])
        candidates = ready[: len(self._slots.seq_pool)]
        self._kv_view.prepare(candidates, self._slots.beginning_of)
        try:
            if self._fallback is None:
                return self._ask(self.scheduler, active, inflight)
            try:
                plan = self._ask(self.scheduler, active, inflight)
                if not (inflight or plan.num_scheduled or plan.paused_requests or plan.never_fitting):
                    raise SchedulerError(f"nothing is planned, and {len(active)} requests could run")
            except Exception as error:  # whatever a user's scheduler raises
                if not self._has_failed:
                    name = type(self.scheduler).__name__
                    log.error("the scheduler %s failed, fifo plans in its place: %r", name, error)
                self._has_failed = True
                return self._ask(self._fallback, active, inflight)
            self._has_failed = False
            return plan
        finally:
            for sequence in candidates:
                sequence.num_computed = 0

    def start(self, plan: SchedulerOutput) -> list[list[Planned]]:
        """The forwards of what fits of a plan, each a list of entries; those newly picked take their slots."""
        fitted = self._fit(plan)
        while not fitted.is_whole:
            held = self._to_drop(plan.context_requests)
            if held is None:
                break
            self._slots.drop_held(held)
            fitted = self._fit(plan)
        self._is_whole = fitted.is_whole
        parts = [self._lay_out(part) for part in forwards(self._options.batching_type, fitted.plan)]
        return [part for part in parts if part]

    def repeats(self, plan: SchedulerOutput) -> bool:
        """Whether the plan is that all there is decodes, and would be so until something arrives or ends."""
        return (
            self._options.plans_repeat
            and self._is_whole
            and len(plan.generation_requests) == len(self._slots.sequences) == plan.num_scheduled
            and not (self._slots.pending and self._slots.seq_pool)
        )

    def stuck(self) -> SchedulerOutput | None:
        """The plan that goes on where nothing of the last one could be done; None if nobody could run at all.

        The newest that runs is paused; one that runs alone, or waits while nobody runs, is refused.
        """
        active, _ = self._active()
        running = [one for one in active if isinstance(one, Slotted) and one.seq_id is not None]
        if len(running) > 1:
            return SchedulerOutput([], [], [max(running, key=waiting_key)])
        return SchedulerOutput([], [], [], never_fitting=active[:1]) if active else None

    def _active(self) -> tuple[RequestList, list[Sequence]]:
        """All that could run, and those of them that wait."""
        ready = self._slots.ready()
        return [*self._held.evaluating(), *self._slots.sequences.values(), *ready], ready

    def _ask(self, scheduler: RequestScheduler, active: RequestList, inflight: Set[int]) -> SchedulerOutput:
        return normalize_output(scheduler.schedule_request(active, inflight), active, inflight, self._limits)

    # What fits

    def _fit(self, plan: SchedulerOutput) -> Fitted:
        draft = self._kv.draft()
        free_slots = len(self._slots.seq_pool)
        generation: RequestList = []
        for owner in plan.generation_requests:
            assert isinstance(owner, Sequence)
            if draft.grow(_slots_to_decode(owner), owner.num_computed + 1):
                generation.append(owner)
        contexts: RequestList = []
        chunk_sizes: dict[int, int] = {}
        for owner in plan.context_requests:
            assert isinstance(owner, Slotted)
            wanted = plan.chunk_sizes[owner.request_id]
            if owner.seq_id is not None:
                start = owner.num_computed
                size = min(wanted, draft.reach(owner.seq_id) - start)
                fits = size > 0 and draft.grow([owner.seq_id], start + size)
            else:
                beginning = self._slots.beginning_of(owner)
                size = min(wanted, len(owner.tokens) - beginning.length)
                free_slots -= owner.width
                reach = draft.reach_from(beginning) - beginning.length
                if reach < size and not generation and not contexts:
                    size = reach  # alone it goes in smaller steps; beside others it waits until there is more room
                fits = free_slots >= 0 and size > 0 and draft.begin(beginning, beginning.length + size)
            if fits:
                contexts.append(owner)
                chunk_sizes[owner.request_id] = size
        fitted = SchedulerOutput(contexts, generation, [], chunk_sizes)
        return Fitted(fitted, fitted.num_scheduled == plan.num_scheduled and chunk_sizes == plan.chunk_sizes)

    def _to_drop(self, starting: RequestList) -> HeldPrompt | None:
        """The held prompt to drop next: one that those about to start share only if there is no other."""
        droppable = self._held.droppable()
        wanted = {id(one.held_donor) for one in starting if isinstance(one, Slotted)}
        return next((held for held in droppable if id(held) not in wanted), next(iter(droppable), None))

    def _lay_out(self, plan: SchedulerOutput) -> list[Planned]:
        chunks = []
        for owner in plan.context_requests:
            assert isinstance(owner, Slotted)
            if isinstance(owner, Sequence) and owner.seq_id is None:
                self._slots.admit(owner)
            chunks.append(plan_tokens(owner, min(plan.chunk_sizes[owner.request_id], owner.context_remaining)))
        decodes: list[Planned] = []
        for owner in plan.generation_requests:
            assert isinstance(owner, Sequence)
            decodes += plan_beams(owner, owner.beams) if owner.beams is not None else [plan_tokens(owner, 1)]
        return decodes + chunks


def _slots_to_decode(sequence: Sequence) -> list[int]:
    assert sequence.seq_id is not None
    if sequence.beams is None:
        return [sequence.seq_id]
    slots = [sequence.seq_id, *sequence.beam_slots]
    return [slots[beam.slot] for beam in sequence.beams.waiting]
