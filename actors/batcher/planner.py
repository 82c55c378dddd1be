"""Planner: asks the scheduler what the next step holds, and turns its answer into the entries of forwards.

The scheduler sees the KV memory through KVView, which answers with the arithmetic of the cache itself.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import cast

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import HeldPrompt, Planned, Sequence, Slotted, slotted
from genbatch.actors.batcher.slots import HeldPrompts, Slots, waiting_key
from genbatch.actors.scheduling.plan import BatchingType, PromptBudget, StepLimits, forwards, prompt_budget
from genbatch.actors.scheduling.request import Blocks, LlmRequest, Phase, RequestList, total
from genbatch.actors.scheduling.scheduler import RequestScheduler, SchedulerError, SchedulerOutput, normalize_output
from genbatch.actors.scheduling.spec import STEP_ORDERS, build_scheduler
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.kv.reservation import Beginning
from genbatch.nif.runner import LayerGroup
from genbatch.nif.step_costs import StepWork
from genbatch.nif.step_time import StepTimeModel


class KVView:
    """The `kv_cache_manager` of schedulers; implements KVResources.

    Args:
        kv: the bookkeeping.
        held: prompts that take blocks for no request's sake alone.
        limits: the budgets of a step.
    """

    def __init__(self, kv: KVCache, held: HeldPrompts, limits: StepLimits) -> None:
        self._kv = kv
        self._held = held
        self._limits = limits
        self._beginnings: dict[int, Beginning] = {}  # by request id, of those that may start
        self._idle: list[int] = []  # slots of held prompts that can go
        self._nothing = Blocks([0] * len(kv.groups))
        self._all = Blocks(kv.num_blocks)

    def prepare(self, waiting: Iterable[Slotted], beginning_of: Callable[[Slotted], Beginning]) -> None:
        """Before each plan: what the waiting ones would start with, and which held prompts nobody waits for."""
        self._beginnings = {}
        wanted: set[int] = set()
        for owner in waiting:
            beginning = self._beginnings[owner.request_id] = beginning_of(owner)
            owner.num_computed = beginning.length
            if owner.donor is not None:
                wanted.add(owner.donor.request_id)
        self._idle = self._idle_slots(wanted)

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self._kv.block_size

    @property
    def num_blocks(self) -> Blocks:
        """All blocks."""
        return self._all

    @property
    def no_blocks(self) -> Blocks:
        """None of any pool; needs of nothing are this very object."""
        return self._nothing

    @property
    def free_blocks(self) -> Blocks:
        """Blocks that can be handed out now, if held prompts that nobody waits for give way."""
        free = Blocks(self._kv.free_blocks)
        return free + Blocks(self._kv.held_only_by(self._idle)) if self._idle else free

    def get_max_resource_count(self) -> Blocks:
        """Blocks that requests may hold in all: those of configured prompts are never given back."""
        pinned = [held.seq_id for held in self._held if held.pinned and held.seq_id is not None]
        available = self._all
        for seq_id in pinned:
            available = available - Blocks(self._kv.blocks_held(seq_id))
        return available

    def get_needed_resource_to_completion(self, request: LlmRequest) -> Blocks:
        """The most blocks the request holds on its way to its full length."""
        available = self.get_max_resource_count()
        # Alone it can share a configured prompt, if what it shares now begins with that one and gives way.
        alone = self._to_completion(request, 1, _num_pinned(request))
        if alone > available:
            return alone
        # What has room alone must not be told otherwise: then it runs alone, in smaller steps and sharing nothing.
        donor = _slotted(request).held_donor
        shared = len(donor.tokens) if donor is not None and donor.pinned else 0
        most = self._to_completion(request, self._limits.max_batch_tokens, shared)
        return (most + _slotted(request).num_copied_blocks).at_most(available)

    def blocks_held(self, request: LlmRequest) -> Blocks:
        """Blocks that become free if this request alone is released."""
        slots = _slotted(request).kv_slots
        return Blocks(self._kv.held_only_by(slots)) if slots else self._nothing

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> Blocks:
        """The most blocks to take until `num_tokens` more tokens of the request are computed."""
        kv, length = self._kv, request.num_computed + num_tokens
        chunk = min(num_tokens, self._limits.max_batch_tokens)
        slots = _slotted(request).kv_slots
        if not slots:
            beginning = self._beginnings.get(request.request_id, Beginning(0, self._nothing.counts))
            return Blocks(kv.still_to_take_from(beginning, length, chunk))
        if all(kv.is_writable(seq_id, length) for seq_id in slots):
            return self._nothing
        needed = self._nothing
        for seq_id in slots:
            needed = needed + Blocks(kv.still_to_take(seq_id, length, chunk))
        return needed

    def has_room(self, held: HeldPrompt, running: Iterable[Slotted], wanted: Set[int], *, forever: bool) -> bool:
        """Whether a prompt to hold can be evaluated without a pause of anybody.

        Args:
            held: has its slot, and holds nothing.
            running: who has begun.
            wanted: ids of the held prompts that somebody waits for; the others give way to it.
            forever: whether the running ones must find all they need to their ends; else what their contexts need.
        """
        if forever:
            needs = [self.get_needed_resource_to_completion(one) for one in running]
            room, needed = self.get_max_resource_count(), self.get_needed_resource_to_completion(held)
        else:
            room = Blocks(self._kv.free_blocks) + Blocks(self._kv.held_only_by(self._idle_slots(wanted)))
            needs = [self.blocks_for_step(one, one.context_remaining) for one in running]
            needed = self.blocks_for_step(held, held.context_remaining)
        return needed <= room - total(needs, self._nothing)

    def longest(self, prompt_tokens: list[int], width: int, cap: int, *, shares: bool) -> int:
        """The most tokens, prompt and output together, with which a sequence fits if it is alone; 0 if none do.

        Args:
            width: see LlmRequest.
            cap: most that are asked for, at least 1.
            shares: whether it may take over a configured prompt that it begins with.
        """
        available = self.get_max_resource_count()
        pinned = self._held.pinned_prefix(prompt_tokens) if shares else 0
        num_prompt = len(prompt_tokens)
        # The most positions whose blocks are there, by bisection: they grow with each.
        fits, too_many = 0, cap
        if self._limits.cache_budget is not None:
            too_many = min(cap, self._limits.cache_budget // width * self._kv.block_size + 1)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._most(num_prompt, middle, width, pinned, 1) <= available:
                fits = middle
            else:
                too_many = middle
        return fits + 1 if fits else 0  # the token drawn last is never evaluated

    def _idle_slots(self, wanted: Set[int]) -> list[int]:
        """Slots of the held prompts that can go; those of these ids somebody waits for."""
        idle = (held.seq_id for held in self._held.droppable() if held.request_id not in wanted)
        return [seq_id for seq_id in idle if seq_id is not None]

    def _to_completion(self, request: LlmRequest, chunk: int, num_pinned: int) -> Blocks:
        return self._most(request.num_prompt_tokens, request.max_positions, request.width, num_pinned, chunk)

    def _most(self, num_prompt: int, num_positions: int, width: int, num_pinned: int, chunk: int) -> Blocks:
        """The most blocks held on the way to `num_positions`, besides those of a configured prompt."""
        kv = self._kv
        most = kv.most_held(num_positions, chunk)
        of_beam = kv.most_held(num_positions) if width > 1 else most
        needed = []
        for group, count, beam in zip(kv.groups, most, of_beam, strict=True):
            if width > 1:
                # Beams share the prompt's whole blocks. Those that share a last block each take a copy before the
                # original goes: one more for every two.
                common = self._common(group, num_prompt, num_positions, beam)
                count = max(count, common + (beam - common) * width + width // 2)
            shared = num_pinned // kv.block_size if group.window is None else 0
            needed.append(max(0, count - shared))
        return Blocks(needed)

    def _common(self, group: LayerGroup, num_prompt: int, num_positions: int, held: int) -> int:
        """Whole blocks of the prompt among the `held` ones that a beam has at its full length.

        A window keeps the sinks at the beginning, and the last blocks.
        """
        block_size = self._kv.block_size
        prompt_blocks = num_prompt // block_size
        if group.window is None:
            return min(prompt_blocks, held)
        kept = min(-(-group.sink_tokens // block_size), held)
        first = -(-num_positions // block_size) - (held - kept)
        return min(prompt_blocks, kept) + max(0, prompt_blocks - max(first, kept))


def _slotted(request: LlmRequest) -> Slotted:
    """A request as the Batcher knows it: schedulers ask about none but those that they were given."""
    return cast("Slotted", request)


def _num_pinned(request: LlmRequest) -> int:
    """Positions that it can share with a configured prompt for as long as it lives."""
    pinned = _slotted(request).pinned_donor
    return len(pinned.tokens) if pinned is not None else 0


log = logging.getLogger("genbatch")

# A user's scheduler may pause a request so often in a row before it has got further than ever.
MAX_VAIN_PAUSES = 3


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
        times: what steps have cost.

    Raises:
        SchedulerError: the scheduler cannot be built.
    """

    def __init__(
        self,
        options: BatcherOptions,
        kv: KVCache,
        kv_view: KVView,
        slots: Slots,
        held: HeldPrompts,
        times: StepTimeModel,
    ) -> None:
        self._limits = options.scheduling.limits(kv.block_size)
        self.scheduler = build_scheduler(options.scheduling, kv_view, self._limits)
        self._fallback: RequestScheduler | None = None
        if options.scheduler not in STEP_ORDERS:
            self._fallback = build_scheduler(replace(options.scheduling, scheduler="fifo"), kv_view, self._limits)
        self._failures: Counter[str] = Counter()  # of the user's scheduler, by the kind of error
        self._options = options
        self._times = times
        self._kv = kv
        self._kv_view = kv_view
        self._slots = slots
        self._held = held
        self._is_whole = True  # whether all of the last plan fitted

    def prompt_budget(self) -> PromptBudget | None:
        """The time for prompts in the next step: for as long as somebody decodes and some prompt waits."""
        target_ms = self._options.target_inter_token_latency_ms
        if not target_ms or not self._options.scheduling.decodes_first:
            return None
        decoding = [one for one in self._slots.sequences.values() if one.phase is Phase.DECODING]
        waiting = min(len(self._slots.pending), len(self._slots.seq_pool))
        num_prompts = len(self._slots.sequences) - len(decoding) + waiting + len(self._held.evaluating())
        if not num_prompts:
            return None
        is_fused = self._options.batching_type is BatchingType.INFLIGHT_FUSED_BATCHING
        work = StepWork(
            steps=1 if is_fused else 2,
            decodes=sum([one.width for one in decoding]),
            keys=sum([one.width * (one.num_computed + 1) for one in decoding]),
        )
        return prompt_budget(self._times.time, work, num_prompts, target_ms / 1000)

    def first_step_s(self) -> float | None:
        """Seconds for a step that evaluates all prompts that wait; None where nothing is known of steps."""
        time = self._times.time
        if time is None:
            return None
        ready = self._slots.ready()[: len(self._slots.seq_pool)]
        cached = [self._slots.beginning_of(one).length for one in ready]
        sizes = [len(one.tokens) - length for one, length in zip(ready, cached, strict=True)]
        keys = sum([size * (length + size / 2) for size, length in zip(sizes, cached, strict=True)])
        return time.seconds(StepWork(prompts=len(ready), prefill=sum(sizes), prefill_keys=keys))

    def plan(self, inflight: Set[int], budget: PromptBudget | None) -> SchedulerOutput:
        """Asks the scheduler; what a waiting sequence will share counts as computed while it is asked.

        A scheduler of the user's is passed over where it raises, plans nothing although nothing else is under way, or
        would pause a request again and again before it gets anywhere.

        Args:
            inflight: ids of those that are not to be planned.
            budget: the time for prompts; None: nothing bounds it.
        """
        self._limits.prompt_budget = budget
        self._begin_held()
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
                for one in plan.paused_requests:
                    if _slotted(one).num_vain_pauses >= MAX_VAIN_PAUSES:
                        raise SchedulerError(f"request {one.request_id} is paused before it gets anywhere")
            except Exception as error:  # whatever a user's scheduler raises
                self._report(error)
                return self._ask(self._fallback, active, inflight)
            return plan
        finally:
            for sequence in candidates:
                sequence.num_computed = 0

    def _report(self, error: Exception) -> None:
        """Logs a failure of the user's scheduler: each kind once, and their number quietly at each tenfold."""
        name, kind = type(self.scheduler).__name__, type(error).__name__
        self._failures[kind] += 1
        count = self._failures[kind]
        if count == 1:
            log.error("the scheduler %s failed, fifo plans in its place: %r", name, error)
        elif str(count).rstrip("0") == "1":
            log.info("the scheduler %s has failed %d times with %s", name, count, kind)

    def giving_way(self, inflight: Set[int]) -> list[Sequence]:
        """The sequences to pause before the plan, so that each client that waits has its share of the slots.

        Args:
            inflight: ids of those that are not to be paused.
        """
        return self._slots.giving_way(inflight) if self.is_owed() else []

    def is_owed(self) -> bool:
        """Whether a client waits for its share of the slots and another one's sequence may be paused for it."""
        return not self._options.scheduling.never_pauses and self._slots.is_owed()

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
            and not (self._slots.pending and (self._slots.seq_pool or self.is_owed()))
        )

    def stuck(self) -> SchedulerOutput | None:
        """The plan that goes on where nothing of the last one could be done; None if nobody could run at all.

        The newest that runs is paused; one that runs alone, or waits while nobody runs, is refused.
        """
        active, _ = self._active()
        running = [one for one in active if _slotted(one).seq_id is not None]
        if len(running) > 1:
            return SchedulerOutput([], [], [max(running, key=waiting_key)])
        return SchedulerOutput([], [], [], never_fitting=active[:1]) if active else None

    def _begin_held(self) -> None:
        """Begins the prompts to hold. One that was noticed and has no room beside what runs is given up."""
        for held in self._held.evaluating():
            if held.begun:
                continue
            running = [one for one in self._held.evaluating() if one.begun] + list(self._slots.sequences.values())
            waiting = (sequence.held_donor for sequence in self._slots.pending)
            wanted = {donor.request_id for donor in waiting if donor is not None}
            forever = self._options.scheduling.never_pauses
            if held.pinned or self._kv_view.has_room(held, running, wanted, forever=forever):
                self._slots.begin_held(held)
            else:
                self._slots.drop_held(held)

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
        for owner in slotted(plan.generation_requests):
            if draft.grow(owner.decode_slots, owner.num_computed + 1):
                generation.append(owner)
        contexts: RequestList = []
        chunk_sizes: dict[int, int] = {}
        for owner in slotted(plan.context_requests):
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
        wanted = {id(one.held_donor) for one in slotted(starting)}
        return next((held for held in droppable if id(held) not in wanted), next(iter(droppable), None))

    def _lay_out(self, plan: SchedulerOutput) -> list[Planned]:
        chunks = []
        for owner in slotted(plan.context_requests):
            if owner.seq_id is None:
                self._slots.admit(owner)
            chunks.append(owner.plan_chunk(min(plan.chunk_sizes[owner.request_id], owner.context_remaining)))
        decodes: list[Planned] = []
        for owner in slotted(plan.generation_requests):
            decodes += owner.plan_decode()
        return decodes + chunks
