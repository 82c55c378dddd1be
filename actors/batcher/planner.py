"""Planner: asks the scheduler for the next step's contents, and turns its plan into the entries of forwards.

The scheduler sees the KV memory through KVView, which uses the cache's own arithmetic.

BlockShares give a client that waits for blocks its share of the pool, although another client has filled the pool. Each
client with work may hold an equal share of the blocks. A client may hold more only while no client below its share
waits. Otherwise one of its sequences is paused: the one that was paused least often, and among these the newest. The
paused sequence waits for its client's turn (FairShare), and its text stays the same.

A sequence is paused only after a turn, and each pause doubles its next turn. So evaluating a sequence again and again
costs little of its time.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import cast

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import HeldPrompt, Planned, Sequence, Slotted, slotted
from genbatch.actors.batcher.slots import TURN_TOKENS, HeldPrompts, Slots, waiting_key
from genbatch.actors.scheduling.plan import (
    BatchingType,
    PromptBudget,
    StepLimits,
    StepTimeModel,
    StepWork,
    forwards,
    prompt_budget,
)
from genbatch.actors.scheduling.request import Blocks, KVResources, LlmRequest, Phase, RequestList, total
from genbatch.actors.scheduling.scheduler import (
    DEFAULT_MARGIN,
    STEP_ORDERS,
    RequestScheduler,
    SchedulerError,
    SchedulerOutput,
    build_scheduler,
    normalize_output,
)
from genbatch.nif.kv.kv_cache import Beginning, KVCache
from genbatch.nif.runner import LayerGroup


class KVView:
    """The `kv_cache_manager` of schedulers; implements KVResources.

    Args:
        kv: the KV cache's accounting.
        held_prompts: prompts that hold blocks independently of requests.
        limits: the budgets of a step.
    """

    def __init__(self, kv: KVCache, held_prompts: HeldPrompts, limits: StepLimits) -> None:
        self._kv = kv
        self._held_prompts = held_prompts
        self._limits = limits
        self._beginnings: dict[int, Beginning] = {}  # by request id; for waiting sequences
        self._idle: list[int] = []  # slots of droppable held prompts
        self._nothing = Blocks([0] * len(kv.groups))
        self._all = Blocks(kv.num_blocks)

    def prepare(self, waiting: Iterable[Slotted], beginning_of: Callable[[Slotted], Beginning]) -> None:
        """Prepare for a plan: set the waiting sequences' prefixes, and find held prompts that none of them needs."""
        self._beginnings = {}
        donor_ids: set[int] = set()
        for owner in waiting:
            beginning = self._beginnings[owner.request_id] = beginning_of(owner)
            owner.num_computed = beginning.length
            if owner.donor is not None:
                donor_ids.add(owner.donor.request_id)
        self._idle = self._idle_slots(donor_ids)

    @property
    def block_size(self) -> int:
        """The positions in a block."""
        return self._kv.block_size

    @property
    def num_blocks(self) -> Blocks:
        """The blocks of each pool."""
        return self._all

    @property
    def no_blocks(self) -> Blocks:
        """Zero blocks; one shared constant, compared by identity."""
        return self._nothing

    @property
    def free_blocks(self) -> Blocks:
        """Free blocks, including the blocks of held prompts that no waiting sequence needs."""
        free = Blocks(self._kv.free_blocks)
        return free + Blocks(self._kv.held_only_by(self._idle)) if self._idle else free

    def get_max_resource_count(self) -> Blocks:
        """Return the blocks that requests may hold in all; configured prompts never give their blocks back."""
        pinned = [prompt.seq_id for prompt in self._held_prompts if prompt.pinned and prompt.seq_id is not None]
        available = self._all
        for seq_id in pinned:
            available = available - Blocks(self._kv.blocks_held(seq_id))
        return available

    def get_needed_resource_to_completion(self, request: LlmRequest) -> Blocks:
        """Return the most blocks that the request holds on the way to its full length."""
        available = self.get_max_resource_count()
        # Alone, the request can share a configured prompt if its current donor begins with that prompt and is dropped.
        alone = self._to_completion(request, 1, _num_pinned(request))
        if alone > available:
            return alone
        # A request that fits alone must not count as too large: it then runs alone, in smaller steps, without sharing.
        donor = _slotted(request).held_donor
        shared = len(donor.tokens) if donor is not None and donor.pinned else 0
        most = self._to_completion(request, self._limits.max_batch_tokens, shared)
        return (most + _slotted(request).num_copied_blocks).at_most(available)

    def blocks_held(self, request: LlmRequest) -> Blocks:
        """Return the blocks that become free if this request alone is released."""
        slots = _slotted(request).kv_slots
        return Blocks(self._kv.held_only_by(slots)) if slots else self._nothing

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> Blocks:
        """Return the most blocks to allocate until `num_tokens` more tokens of the request are computed."""
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

    def has_room(self, prompt: HeldPrompt, running: Iterable[Slotted], donor_ids: Set[int], *, forever: bool) -> bool:
        """Return whether a prompt to hold can be evaluated without a pause of another sequence.

        Args:
            prompt: has a slot and no blocks.
            running: the units that have begun.
            donor_ids: ids of the held prompts that waiting sequences need; other held prompts are dropped for it.
            forever: reserve room for the full length of the running units; else only for their contexts.
        """
        if forever:
            needs = [self.get_needed_resource_to_completion(unit) for unit in running]
            room, needed = self.get_max_resource_count(), self.get_needed_resource_to_completion(prompt)
        else:
            room = Blocks(self._kv.free_blocks) + Blocks(self._kv.held_only_by(self._idle_slots(donor_ids)))
            needs = [self.blocks_for_step(unit, unit.context_remaining) for unit in running]
            needed = self.blocks_for_step(prompt, prompt.context_remaining)
        return needed <= room - total(needs, self._nothing)

    def longest(self, prompt_tokens: list[int], width: int, cap: int, *, shares: bool) -> int:
        """Return the most tokens, prompt and output, of a sequence that runs alone; 0 if none fit.

        Args:
            width: see LlmRequest.
            cap: the upper bound on the answer, at least 1.
            shares: whether it may share a configured prompt that it begins with.
        """
        available = self.get_max_resource_count()
        pinned = self._held_prompts.pinned_prefix(prompt_tokens) if shares else 0
        num_prompt = len(prompt_tokens)
        # Find the most positions with enough blocks by bisection: the need grows with each position.
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

    def _idle_slots(self, donor_ids: Set[int]) -> list[int]:
        """Return the slots of droppable held prompts, except those with an id in `donor_ids`."""
        idle = (prompt.seq_id for prompt in self._held_prompts.droppable() if prompt.request_id not in donor_ids)
        return [seq_id for seq_id in idle if seq_id is not None]

    def _to_completion(self, request: LlmRequest, chunk: int, num_pinned: int) -> Blocks:
        return self._most(request.num_prompt_tokens, request.max_positions, request.width, num_pinned, chunk)

    def _most(self, num_prompt: int, num_positions: int, width: int, num_pinned: int, chunk: int) -> Blocks:
        """Return the most blocks held on the way to `num_positions`, without the blocks of a configured prompt."""
        kv = self._kv
        most = kv.most_held(num_positions, chunk)
        of_beam = kv.most_held(num_positions) if width > 1 else most
        needed = []
        for group, count, beam in zip(kv.groups, most, of_beam, strict=True):
            if width > 1:
                # Beams share the prompt's whole blocks. Beams that share a last block each copy it before the original
                # is freed: that takes one more block for every two beams.
                common = self._common(group, num_prompt, num_positions, beam)
                count = max(count, common + (beam - common) * width + width // 2)
            shared = num_pinned // kv.block_size if group.window is None else 0
            needed.append(max(0, count - shared))
        return Blocks(needed)

    def _common(self, group: LayerGroup, num_prompt: int, num_positions: int, num_held: int) -> int:
        """Return the number of whole prompt blocks among the `num_held` blocks of a beam at its full length.

        A window keeps the sink blocks at the beginning, and the last blocks.
        """
        block_size = self._kv.block_size
        prompt_blocks = num_prompt // block_size
        if group.window is None:
            return min(prompt_blocks, num_held)
        kept = min(-(-group.sink_tokens // block_size), num_held)
        first = -(-num_positions // block_size) - (num_held - kept)
        return min(prompt_blocks, kept) + max(0, prompt_blocks - max(first, kept))


def _slotted(request: LlmRequest) -> Slotted:
    """Cast a request to the Batcher's type: schedulers see only requests that the Batcher gave them."""
    return cast("Slotted", request)


def _num_pinned(request: LlmRequest) -> int:
    """Return the positions that the request shares with a configured prompt for its whole life."""
    pinned = _slotted(request).pinned_donor
    return len(pinned.tokens) if pinned is not None else 0


log = logging.getLogger("genbatch")

# A user's scheduler may pause a request this often in a row without progress in between.
MAX_VAIN_PAUSES = 3


@dataclass(frozen=True, slots=True)
class Fitted:
    """The part of a plan that fits.

    Args:
        plan: that part.
        is_whole: whether the part is the whole plan.
    """

    plan: SchedulerOutput
    is_whole: bool


class Planner:
    """Plans steps over all running and waiting units; runs only between two steps.

    Args:
        options: name the scheduler and the budgets.
        kv: the cache from which steps take their blocks.
        kv_view: the scheduler's view of the KV memory.
        slots: the running and the waiting sequences.
        held_prompts: prompts to share, which are evaluated like sequences.
        times: the measured costs of steps.

    Raises:
        SchedulerError: the scheduler cannot be built.
    """

    def __init__(
        self,
        options: BatcherOptions,
        kv: KVCache,
        kv_view: KVView,
        slots: Slots,
        held_prompts: HeldPrompts,
        times: StepTimeModel,
    ) -> None:
        self._limits = options.scheduling.limits(kv.block_size)
        self.scheduler = build_scheduler(options.scheduling, kv_view, self._limits)
        self._fallback: RequestScheduler | None = None
        if options.scheduler not in STEP_ORDERS:
            self._fallback = build_scheduler(replace(options.scheduling, scheduler="fifo"), kv_view, self._limits)
        self._failures: Counter[str] = Counter()  # of the user's scheduler, by kind of error
        self._options = options
        # Whether the plan of a step with decodes only holds until a request arrives or ends.
        self._plans_repeat = options.scheduler in STEP_ORDERS and options.cache_budget is None
        self._times = times
        self._kv = kv
        self._kv_view = kv_view
        self._slots = slots
        margin = options.scheduling.margin
        self._shares = BlockShares(slots, kv, kv_view, DEFAULT_MARGIN if margin is None else margin)
        self._held_prompts = held_prompts
        self._is_whole = True  # whether all of the last plan fitted

    def prompt_budget(self) -> PromptBudget | None:
        """Return the time for prompts in the next step; None unless sequences decode while prompts wait."""
        target_ms = self._options.target_inter_token_latency_ms
        if not target_ms or not self._options.scheduling.decodes_first:
            return None
        decoding = [sequence for sequence in self._slots.sequences.values() if sequence.phase is Phase.DECODING]
        waiting = min(len(self._slots.pending), len(self._slots.seq_pool))
        num_prompts = len(self._slots.sequences) - len(decoding) + waiting + len(self._held_prompts.evaluating())
        if not num_prompts:
            return None
        is_fused = self._options.batching_type is BatchingType.INFLIGHT_FUSED_BATCHING
        work = StepWork(
            steps=1 if is_fused else 2,
            decodes=sum([sequence.width for sequence in decoding]),
            keys=sum([sequence.width * (sequence.num_computed + 1) for sequence in decoding]),
        )
        return prompt_budget(self._times.time, work, num_prompts, target_ms / 1000)

    def first_step_s(self) -> float | None:
        """Return the seconds of a step that evaluates all waiting prompts; None before step times were measured."""
        time = self._times.time
        if time is None:
            return None
        ready = self._slots.ready()[: len(self._slots.seq_pool)]
        cached = [self._slots.beginning_of(sequence).length for sequence in ready]
        sizes = [len(sequence.tokens) - length for sequence, length in zip(ready, cached, strict=True)]
        keys = sum([size * (length + size / 2) for size, length in zip(sizes, cached, strict=True)])
        return time.seconds(StepWork(prompts=len(ready), prefill=sum(sizes), prefill_keys=keys))

    def plan(self, inflight: Set[int], budget: PromptBudget | None) -> SchedulerOutput:
        """Ask the scheduler for a plan; a waiting sequence's shared prefix counts as computed meanwhile.

        The fallback replaces a user's scheduler for this plan in three cases: the scheduler raises, plans nothing while
        nothing else is in flight, or pauses a request again and again without progress.

        Args:
            inflight: ids of the units that must not be planned.
            budget: the time for prompts; None for no bound.
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
                for request in plan.paused_requests:
                    if _slotted(request).num_vain_pauses >= MAX_VAIN_PAUSES:
                        raise SchedulerError(f"request {request.request_id} is paused again and again without progress")
            except Exception as error:  # a user's scheduler may raise anything
                self._report(error)
                return self._ask(self._fallback, active, inflight)
            return plan
        finally:
            for sequence in candidates:
                sequence.num_computed = 0

    def _report(self, error: Exception) -> None:
        """Log a failure of the user's scheduler: the first of each kind, then the count at each power of ten."""
        name, kind = type(self.scheduler).__name__, type(error).__name__
        self._failures[kind] += 1
        count = self._failures[kind]
        if count == 1:
            log.error("the scheduler %s failed, fifo plans in its place: %r", name, error)
        elif str(count).rstrip("0") == "1":
            log.info("the scheduler %s has failed %d times with %s", name, count, kind)

    def giving_way(self, inflight: Set[int]) -> list[Sequence]:
        """Return the sequences to pause before the plan, so that each waiting client gets its share.

        Args:
            inflight: ids of the sequences that must not be paused.
        """
        if self._options.scheduling.never_pauses:
            return []
        return self._slots.giving_way(inflight) if self._slots.is_owed() else self._shares.giving_way(inflight)

    def is_owed(self) -> bool:
        """Return whether a client waits below its share of the slots and another one's sequence may be paused."""
        return not self._options.scheduling.never_pauses and self._slots.is_owed()

    def start(self, plan: SchedulerOutput) -> list[list[Planned]]:
        """Return the forwards of the part of a plan that fits, as lists of entries; new sequences take their slots."""
        fitted = self._fit(plan)
        while not fitted.is_whole:
            prompt = self._to_drop(plan.context_requests)
            if prompt is None:
                break
            self._slots.drop_held(prompt)
            fitted = self._fit(plan)
        self._is_whole = fitted.is_whole
        parts = [self._lay_out(part) for part in forwards(self._options.batching_type, fitted.plan)]
        return [part for part in parts if part]

    def repeats(self, plan: SchedulerOutput) -> bool:
        """Return whether every sequence is in the plan, and the next plan is the same until a request arrives or ends.

        The next plan decodes a sequence if this plan evaluates the last token of its prompt; see `draws_ahead`.
        """
        return (
            self._plans_repeat
            and self._is_whole
            and plan.num_scheduled == len(self._slots.sequences)
            and not (self._slots.pending and (self._slots.seq_pool or self.is_owed()))
        )

    def stuck(self) -> SchedulerOutput | None:
        """Return a plan that resolves a plan without effect; None if no unit could run at all.

        It pauses the newest running unit. It refuses a unit that runs alone, or one that waits while none runs.
        """
        active, _ = self._active()
        running = [request for request in active if _slotted(request).seq_id is not None]
        if len(running) > 1:
            return SchedulerOutput([], [], [max(running, key=waiting_key)])
        return SchedulerOutput([], [], [], never_fitting=active[:1]) if active else None

    def _begin_held(self) -> None:
        """Begin the prompts to hold; drop a noticed prompt that has no room beside the running units."""
        for prompt in self._held_prompts.evaluating():
            if prompt.begun:
                continue
            begun = [other for other in self._held_prompts.evaluating() if other.begun]
            running = [*begun, *self._slots.sequences.values()]
            waiting = (sequence.held_donor for sequence in self._slots.pending)
            donor_ids = {donor.request_id for donor in waiting if donor is not None}
            forever = self._options.scheduling.never_pauses
            if prompt.pinned or self._kv_view.has_room(prompt, running, donor_ids, forever=forever):
                self._slots.begin_held(prompt)
            else:
                self._slots.drop_held(prompt)

    def _active(self) -> tuple[RequestList, list[Sequence]]:
        """Return all units that could run, and the waiting sequences among them."""
        ready = self._slots.ready()
        return [*self._held_prompts.evaluating(), *self._slots.sequences.values(), *ready], ready

    def _ask(self, scheduler: RequestScheduler, active: RequestList, inflight: Set[int]) -> SchedulerOutput:
        return normalize_output(scheduler.schedule_request(active, inflight), active, inflight, self._limits)

    # Fitting a plan

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
            chunk_size = plan.chunk_sizes[owner.request_id]
            if owner.seq_id is not None:
                start = owner.num_computed
                size = min(chunk_size, draft.reach(owner.seq_id) - start)
                fits = size > 0 and draft.grow([owner.seq_id], start + size)
            else:
                beginning = self._slots.beginning_of(owner)
                size = min(chunk_size, len(owner.tokens) - beginning.length)
                free_slots -= owner.width
                reach = draft.reach_from(beginning) - beginning.length
                if reach < size and not generation and not contexts:
                    size = reach  # alone it takes smaller steps; beside others it waits
                fits = free_slots >= 0 and size > 0 and draft.begin(beginning, beginning.length + size)
            if fits:
                contexts.append(owner)
                chunk_sizes[owner.request_id] = size
        fitted = SchedulerOutput(contexts, generation, [], chunk_sizes)
        return Fitted(fitted, fitted.num_scheduled == plan.num_scheduled and chunk_sizes == plan.chunk_sizes)

    def _to_drop(self, starting: RequestList) -> HeldPrompt | None:
        """Return the held prompt to drop next: preferably one that no starting unit shares; None for none."""
        droppable = self._held_prompts.droppable()
        donors = {id(unit.held_donor) for unit in slotted(starting)}
        return next((prompt for prompt in droppable if id(prompt) not in donors), next(iter(droppable), None))

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


class BlockShares:
    """Chooses the sequences to pause; runs only between two steps.

    Args:
        slots: the running and the waiting sequences.
        kv: the cache of their blocks.
        kv_view: tells which blocks are free, or become free.
        margin: the share of the pool that must be free before the scheduler starts a sequence beside others.
    """

    def __init__(self, slots: Slots, kv: KVCache, kv_view: KVResources, margin: float) -> None:
        self._slots = slots
        self._kv = kv
        self._kv_view = kv_view
        self._margin = margin

    def giving_way(self, inflight: Set[int]) -> list[Sequence]:
        """Return the sequences to pause so that the first waiting sequence finds blocks; none if that does not help.

        Args:
            inflight: ids of the sequences that cannot be paused now.
        """
        first = self._slots.first_of_several()
        if first is None:
            return []
        free, pool, length = self._kv_view.free_blocks, self._kv_view.num_blocks, len(first.tokens)
        if Blocks(self._kv.most_held(length, length)) <= free and free >= self._margin * pool:
            return []
        needed = Blocks(self._kv.still_to_take_from(self._slots.beginning_of(first), length, length))
        seq_ids = self._slots.seq_ids_by_client()
        blocks_of = {account: Blocks(self._kv.held_only_by(ids)) for account, ids in seq_ids.items()}
        mine = first.request.account
        if not (blocks_of[mine] + needed) * len(blocks_of) <= pool:
            return []  # more than the client's share: it waits until others end
        chosen: list[Sequence] = []
        able = [sequence for sequence in self._slots.pausable(inflight) if _has_had_a_turn(sequence)]
        while not (needed <= free and (free >= self._margin * pool or len(chosen) == len(self._slots.sequences))):
            # guard: share of the blocks
            rivals = [sequence for sequence in able if self._gives_way(sequence, first, blocks_of)]
            if not rivals:
                return []
            victim = max(
                rivals, key=lambda rival: (max(blocks_of[rival.request.account]), -rival.num_pauses, waiting_key(rival))
            )
            freed = self._kv_view.blocks_held(victim)
            free, blocks_of[victim.request.account] = free + freed, blocks_of[victim.request.account] - freed
            able.remove(victim)
            chosen.append(victim)
        return chosen

    def _gives_way(self, sequence: Sequence, first: Sequence, blocks_of: dict[str, Blocks]) -> bool:
        """Return whether a client has more than its share, and has been served more than the waiting client."""
        account = sequence.request.account
        exceeds = not blocks_of[account] * len(blocks_of) <= self._kv_view.num_blocks
        return exceeds and self._slots.served(account) > self._slots.served(first.request.account)


def _has_had_a_turn(sequence: Sequence) -> bool:
    return sequence.num_generated - sequence.drawn_before >= TURN_TOKENS << min(sequence.num_pauses, 16)
