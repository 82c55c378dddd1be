"""Slots: which sequence holds which slot of the context, the order of the waiting sequences, and their cached prefixes.

HeldPrompts knows the prefixes that sequences can share. Swap keeps the KV of paused sequences in host memory.

Clients share the slots while more than one has work: each may hold an equal share. A client may hold more only while
no client below its share waits. Otherwise it pauses a sequence (`giving_way`). `BlockShares` does the same for blocks.
"""

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Set
from collections.abc import Sequence as ListOf
from typing import cast

import trio

from genbatch.actors.batcher.journal import Journal
from genbatch.actors.batcher.requests import HeldPrompt, Sequence, Slotted
from genbatch.actors.scheduling.request import OUTPUT_WEIGHT, Blocks, FairShare, LlmRequest, Phase, slots_share
from genbatch.nif.context import Context
from genbatch.nif.errors import OptionError
from genbatch.nif.kv.kv_cache import Beginning
from genbatch.nif.kv.offload import HostBlockStore
from genbatch.nif.runner import Content, LoraAdapter

GIB = 2**30


class SwapFault(Exception):
    """Copying KV between the pool and the host failed, so the context's contents are unknown."""


class Swap:
    """Swaps the KV of paused sequences: it decides between two steps, and copies at the start of the next step.

    The copies run on the model's thread. A paused sequence's block ids may be reused at once. But only a step writes
    blocks, and every step runs the copies first.

    Args:
        context: the context that holds the sequences.
        space: GiB of host memory; 0 disables swapping.

    Raises:
        OptionError: `space` is negative or not a number.
    """

    def __init__(self, context: Context, space: float) -> None:
        if not space >= 0:
            raise OptionError("cpu_offload_space", f"must be at least 0, not {space}")
        self._context = context
        self._store = HostBlockStore(int(space * GIB), pinned=space > 0 and context.model.device.type == "cuda")
        self._copies: list[Callable[[], None]] = []
        self._reserved = 0  # bytes of copies that are not made yet
        self._lengths: dict[int, int] = {}  # positions kept, by request id

    def length(self, request_id: int) -> int:
        """Return the positions kept of a paused sequence; 0 if it was not swapped."""
        return self._lengths.get(request_id, 0)

    @property
    def bytes_used(self) -> int:
        """The host memory in use, in bytes."""
        return self._store.bytes_used + self._reserved

    def out(self, request_id: int, seq_id: int) -> bool:
        """Swap a sequence out; return False without enough room. The caller then frees the sequence."""
        tokens, blocks = self._context.kv.export(seq_id)
        runner, block_size = self._context.runner, self._context.kv.block_size
        size = sum(len(ids) * runner.bytes_per_block(group, block_size) for group, ids in enumerate(blocks))
        if not tokens or self.bytes_used + size > self._store.max_bytes:
            return False

        def copy() -> None:
            content = [runner.read_blocks(group, ids) for group, ids in enumerate(blocks)]
            kept = self._store.put(request_id, content)
            assert kept, "room was reserved"
            self._reserved -= size

        self._reserved += size
        self._lengths[request_id] = len(tokens)
        self._copies.append(copy)
        return True

    def back(self, request_id: int, seq_id: int, tokens: ListOf[int], key: bytes) -> int:
        """Swap a sequence in, into an empty slot; return the number of its positions.

        Raises:
            OutOfBlocks: the pool has no room; the KV stays in host memory.
        """
        length = self._lengths[request_id]
        blocks = self._context.kv.import_(seq_id, tokens[:length], key)

        def copy() -> None:
            content: list[Content] = self._store.take(request_id)
            for group, (ids, tensor) in enumerate(zip(blocks, content, strict=True)):
                self._context.runner.write_blocks(group, ids, tensor)

        self._copies.append(copy)
        del self._lengths[request_id]
        return length

    def forget(self, request_id: int) -> None:
        """Drop the swapped KV of a sequence that ended while it waited."""
        if self._lengths.pop(request_id, None) is not None:
            self._copies.append(lambda: _drop(self._store, request_id))

    def take_copies(self) -> list[Callable[[], None]]:
        """Return the copies that the next step must run first, in this order."""
        copies, self._copies = self._copies, []
        return copies


def run_copies(copies: ListOf[Callable[[], None]]) -> None:
    """Run the copies.

    Raises:
        SwapFault: a copy failed.
    """
    try:
        for copy in copies:
            copy()
    except Exception as error:
        raise SwapFault(str(error)) from error


def _drop(store: HostBlockStore, request_id: int) -> None:
    store.drop(request_id)


# The number of first messages remembered until a second request has the same one.
MAX_SEEN = 256


class HeldPrompts:
    """Tracks which prompts are held and which were seen once, and which prompt is dropped for another.

    Args:
        slots: the context's sequence ids that are reserved for held prompts.
        min_tokens: the least length of a prefix that is worth a slot.
        now: the clock for the least recent use.
    """

    def __init__(self, slots: ListOf[int], min_tokens: int, now: Callable[[], float] = trio.current_time) -> None:
        self._free_slots = list(slots)
        self._min_tokens = min_tokens
        self._now = now
        self._prompts: list[HeldPrompt] = []
        self._seen: OrderedDict[tuple[bytes, tuple[int, ...]], None] = OrderedDict()

    def __iter__(self) -> Iterator[HeldPrompt]:
        return iter(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def find(self, tokens: ListOf[int], key: bytes | None, adapter: LoraAdapter | None = None) -> HeldPrompt | None:
        """Return the longest held prompt that is a prefix of these tokens, either of this owner or configured.

        Args:
            key: the owner's key; None for configured prompts only.
            adapter: the adapter that evaluates the tokens; configured prompts are evaluated without one.
        """
        match: HeldPrompt | None = None
        for prompt in self._prompts:
            size = len(prompt.tokens)
            # At least one token must remain to be evaluated: its logits give the first token.
            if size >= len(tokens) or (match and size <= len(match.tokens)):
                continue
            # guard: configured prompts have no adapter
            if ((prompt.pinned and adapter is None) or prompt.key == key) and tokens[:size] == prompt.tokens:
                match = prompt
        return match

    def pinned_prefix(self, tokens: ListOf[int]) -> int:
        """Return the number of positions that a prompt shares with a configured prompt."""
        prompt = self.find(tokens, None)
        return len(prompt.tokens) if prompt is not None else 0

    def notice(self, prefix: ListOf[int], key: bytes) -> bool:
        """Book that a request starts with `prefix`; return whether to hold it, which is so at the second sighting."""
        if len(prefix) < self._min_tokens:
            return False
        sighting = (key, tuple(prefix))
        if sighting in self._seen:
            del self._seen[sighting]
            return True
        self._seen[sighting] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def take_slot(self) -> int | None:
        """Return a free slot to fill; None when every slot is taken."""
        return self._free_slots.pop() if self._free_slots else None

    def return_slot(self, slot: int) -> None:
        """Return a slot that `take_slot` gave; it must be empty again."""
        self._free_slots.append(slot)

    def adopt(self, prompt: HeldPrompt, slot: int) -> None:
        """Hold an evaluated prompt in a slot that `take_slot` gave."""
        prompt.seq_id = slot
        prompt.num_computed = len(prompt.tokens)
        prompt.donor = self.find(prompt.tokens, None, prompt.adapter)  # what sharers can use after it was dropped
        prompt.num_shared = len(prompt.donor.tokens) if prompt.donor is not None else 0
        prompt.move(Phase.PREFILLING)
        self._prompts.append(prompt)

    def hold(self, prompt: HeldPrompt) -> bool:
        """Give a prompt a slot; return False when every slot is taken."""
        if not self._free_slots:
            return False
        prompt.seq_id = self._free_slots.pop()
        prompt.move(Phase.PREFILLING)
        self._prompts.append(prompt)
        return True

    def used(self, prompt: HeldPrompt) -> None:
        """Mark a prompt as just used, so that other prompts are dropped first."""
        prompt.last_used = self._now()

    def droppable(self) -> list[HeldPrompt]:
        """Return the prompts that may be dropped, least recently used first: evaluated ones that are not configured."""
        idle = [prompt for prompt in self._prompts if prompt.ready and not prompt.pinned]
        return sorted(idle, key=lambda prompt: prompt.last_used)

    def least_recent(self, besides: HeldPrompt | None = None) -> HeldPrompt | None:
        """Return the prompt to drop first; None for none."""
        return next((prompt for prompt in self.droppable() if prompt is not besides), None)

    def drop(self, prompt: HeldPrompt) -> int:
        """Remove a prompt and return its slot; the caller must free the slot's blocks."""
        assert prompt.seq_id is not None
        self._prompts.remove(prompt)
        slot, prompt.seq_id = prompt.seq_id, None
        prompt.move(Phase.FINISHED)
        self._free_slots.append(slot)
        return slot

    def evaluating(self) -> list[HeldPrompt]:
        """Return the prompts that still need a forward."""
        return [prompt for prompt in self._prompts if not prompt.ready]


# The least tokens that a sequence draws before it is paused for another client. A pause may cost a prefill. So short
# requests end before a pause, and a client cannot discard others' work again and again.
TURN_TOKENS = 16


class Slots:
    """Moves sequences between the waiting list and the context's slots; runs only between two steps.

    Args:
        ctx: the context with the slots 0 .. n_parallel - 1.
        held_prompts: prompts that sequences may share.
        swap: keeps the KV of paused sequences.
        fair: the order of turns among clients; None for one queue of all.
        n_parallel: the number of slots.
        journal: books starts and pauses.
    """

    def __init__(
        self,
        ctx: Context,
        held_prompts: HeldPrompts,
        swap: Swap,
        fair: FairShare | None,
        n_parallel: int,
        journal: Journal,
    ) -> None:
        self.pending: list[Sequence] = []  # by turn, then priority, then arrival
        self._fair = fair
        self.sequences: dict[int, Sequence] = {}  # by slot, longest admitted first
        self.seq_pool = set(range(n_parallel))  # free slots
        self._ctx = ctx
        self._held_prompts = held_prompts
        self._swap = swap
        self.n_parallel = n_parallel
        self._journal = journal

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting list, in its turn."""
        insort(self.pending, sequence, key=waiting_key)

    def ready(self) -> list[Sequence]:
        """Return the waiting sequences that a plan may start, in turn."""
        ready = self._ready_in_turn()
        if len(self.sequences) + len(self.seq_pool) < self.n_parallel or any(s.width > 1 for s in ready):
            return self._with_slots(ready)
        return ready

    def is_owed(self) -> bool:
        """Return whether a client waits below its share of the slots while another client holds more than its share."""
        if self._fair is None or not self.pending:
            return False
        num_slots, share = self._slots_by_client()
        if max(num_slots.values(), default=0) <= share:
            return False
        ready = (sequence for sequence in self.pending if not sequence.waits_for_others)
        return any(num_slots[_account(sequence)] + sequence.width <= share for sequence in ready)

    def giving_way(self, inflight: Set[int]) -> list[Sequence]:
        """Return the sequences to pause so that each waiting client has its share of the slots.

        Sequences that have just started are not paused, nor are beam searches, which would start again.

        Args:
            inflight: ids of the sequences that cannot be paused now.
        """
        num_slots, share = self._slots_by_client()
        able = self.pausable(inflight)
        free, chosen = len(self.seq_pool), list[Sequence]()
        for sequence in self._ready_in_turn():
            num_slots[_account(sequence)] += sequence.width
            if num_slots[_account(sequence)] > share:
                break  # the following sequences belong to clients with their share
            free -= sequence.width
            for_it: list[Sequence] = []
            while free + len(for_it) < 0:
                # Pause a sequence of the client with most slots: the least paused one, and among these the newest.
                rivals = [rival for rival in able if num_slots[_account(rival)] > share]
                if not rivals:
                    return chosen
                paused = max(
                    rivals, key=lambda rival: (num_slots[_account(rival)], -rival.num_pauses, waiting_key(rival))
                )
                num_slots[_account(paused)] -= 1
                able.remove(paused)
                for_it.append(paused)
            free += len(for_it)
            chosen += for_it
        return chosen

    def pausable(self, inflight: Set[int]) -> list[Sequence]:
        """Return the running sequences that may be paused for another client.

        Args:
            inflight: ids of the sequences that cannot be paused now.
        """
        running = self.sequences.values()
        return [unit for unit in running if _has_had_a_turn(unit) and unit.request_id not in inflight]

    def first_of_several(self) -> Sequence | None:
        """Return the waiting sequence that starts next, if a slot is free and several clients have work."""
        if self._fair is None or not self.pending or not self.seq_pool or len(self._clients()) < 2:
            return None
        return next(iter(self.ready()), None)

    def seq_ids_by_client(self) -> dict[str, list[int]]:
        """Return the slots of each client with work; a client that only waits has none."""
        seq_ids: dict[str, list[int]] = {account: [] for account in self._clients()}
        for sequence in self.sequences.values():
            seq_ids[_account(sequence)] += sequence.kv_slots
        return seq_ids

    def served(self, account: str) -> float:
        """Return the weighted tokens that a client has had, including those of its open sequences."""
        assert self._fair is not None
        return self._fair.served(account) + OUTPUT_WEIGHT * self._generated()[account]

    def beginning_of(self, unit: Slotted) -> Beginning:
        """Return the prefix that a waiting sequence would start with now, and the blocks that it takes."""
        sequence = _sequence(unit)
        kv = self._ctx.kv
        swapped = self._swap.length(sequence.request_id)
        if swapped:
            return kv.beginning_from_host(swapped)
        donor, num_shared = self._sharing(sequence)
        return kv.beginning(
            sequence.tokens,
            sequence.cache_key,
            sequence.block_names,
            source=None if donor is None else donor.seq_id,
            num_shared=num_shared,
            finds=not sequence.scores_prompt,
        )

    def admit(self, unit: Slotted) -> None:
        """Move a waiting sequence into a slot, with its cached or shared prefix."""
        sequence = _sequence(unit)
        self.pending.remove(sequence)
        seq_id = min(self.seq_pool)
        self.seq_pool.remove(seq_id)
        self.sequences[seq_id] = sequence
        sequence.seq_id = seq_id
        sequence.drawn_before = sequence.num_generated
        sequence.beam_slots = sorted(self.seq_pool)[: sequence.width - 1]
        self.seq_pool.difference_update(sequence.beam_slots)
        sequence.move(Phase.PREFILLING)
        if self._swap.length(sequence.request_id):
            tokens, key = sequence.tokens, sequence.cache_key
            sequence.num_computed = self._swap.back(sequence.request_id, seq_id, tokens, key)
            return
        donor, num_shared = self._sharing(sequence)
        if donor is not None:
            assert donor.seq_id is not None
            self._ctx.seq_cp(donor.seq_id, seq_id, 0, num_shared)
            sequence.num_computed = num_shared
            if donor.as_held is not None:
                self._held_prompts.used(donor.as_held)
        if not sequence.scores_prompt:
            sequence.num_computed = self._ctx.attach_prefix(seq_id, sequence.tokens, sequence.cache_key)
        if sequence.num_pauses == 0:
            if self._fair is not None:
                self._fair.charge(_account(sequence), prompt_tokens=_charge(sequence))
            self._journal.stats.shared_tokens += num_shared
            self._journal.stats.reused_tokens += sequence.num_computed - num_shared
            if sequence.choice == 0:
                cached = min(sequence.num_computed, sequence.num_prompt_tokens)
                sequence.request.cached_tokens = cached - _evaluated_for(sequence)
            self._journal.admitted(sequence)

    def pause(self, unit: Slotted) -> None:
        """Take a sequence's blocks; it waits in its old turn, and is evaluated again unless it was swapped."""
        if unit.as_held is not None:
            self.drop_held(unit.as_held)
            return
        owner = _sequence(unit)
        assert owner.seq_id is not None
        owner.num_vain = owner.num_vain + 1 if owner.num_computed <= owner.reached else 0
        owner.reached = max(owner.reached, owner.num_computed)
        swapped = False
        if not owner.keeps_progress:
            owner.restart()
        elif owner.pinned_donor is None:
            # Do not swap a sequence with a pinned donor: it would return whole, without sharing, and might not fit.
            swapped = self._swap.out(owner.request_id, owner.seq_id)
            if swapped:
                # guard: room for all that was swapped
                owner.donor = None  # a plan must find room for all of it
        self._free(owner)
        owner.pause()
        self._journal.paused(owner, swapped=swapped)
        self.enqueue(owner)

    def release(self, sequence: Sequence, *, is_freed: bool = False) -> None:
        """End a sequence, waiting or running.

        Args:
            is_freed: whether the model's thread has removed its KV; the context may then be in use.
        """
        if sequence.seq_id is not None:
            self._free(sequence, is_freed=is_freed)
        else:
            self.pending.remove(sequence)
            self._swap.forget(sequence.request_id)
        sequence.move(Phase.FINISHED)

    def begin_held(self, prompt: HeldPrompt) -> None:
        """Attach the cached prefix of a prompt to hold, once."""
        if prompt.begun:
            return
        assert prompt.seq_id is not None
        prompt.begun = True
        prompt.num_computed = prompt.num_reused = self._ctx.attach_prefix(prompt.seq_id, prompt.tokens, prompt.key)
        self._journal.stats.reused_tokens += prompt.num_computed

    def drop_held(self, prompt: HeldPrompt) -> None:
        """Free a held prompt's blocks."""
        self._ctx.seq_rm(self._held_prompts.drop(prompt))

    def _ready_in_turn(self) -> list[Sequence]:
        """Return the waiting sequences that could start; those within their clients' shares come first."""
        ready = [sequence for sequence in self._in_turn() if not sequence.waits_for_others]
        if self._fair is None or len(ready) < 2:
            return ready
        num_slots, share = self._slots_by_client()
        within: list[Sequence] = []
        beyond: list[Sequence] = []
        for sequence in ready:
            num_slots[_account(sequence)] += sequence.width
            (within if num_slots[_account(sequence)] <= share else beyond).append(sequence)
        return within + beyond

    def _in_turn(self) -> list[Sequence]:
        """Return the waiting sequences in turn; begun ones come first, since their callers already read.

        A begun sequence with more than its client's share of the blocks waits for the client's turn, as others do.
        """
        # guard: clients take turns
        if self._fair is None or len(self.pending) < 2:
            return self.pending
        num_clients = len(self._clients())
        begun: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in self.pending:
            (begun if sequence.has_begun and self._fits_share(sequence, num_clients) else others).append(sequence)
        return begun + self._fair.in_turn(others, _account, _charge, self._generated())

    def _fits_share(self, sequence: Sequence, num_clients: int) -> bool:
        """Return whether a sequence takes at most an equal share of the blocks."""
        kv = self._ctx.kv
        return Blocks(kv.most_held(len(sequence.tokens))) * num_clients <= Blocks(kv.num_blocks)

    def _clients(self) -> set[str]:
        """Return the clients with work."""
        return {_account(sequence) for sequence in (*self.sequences.values(), *self.pending)}

    def _generated(self) -> Counter[str]:
        """Return each client's generated tokens of open sequences, which are not charged yet."""
        generated: Counter[str] = Counter()
        for sequence in (*self.sequences.values(), *self.pending):
            generated[_account(sequence)] += sequence.num_generated
        return generated

    def _slots_by_client(self) -> tuple[Counter[str], int]:
        """Return the slots that each client holds, and the equal share of every client with work."""
        num_slots: Counter[str] = Counter()
        for sequence in self.sequences.values():
            num_slots[_account(sequence)] += sequence.width
        return num_slots, slots_share(self.n_parallel, len(self._clients()))

    def _with_slots(self, ready: list[Sequence]) -> list[Sequence]:
        """Return the waiting sequences with a slot for each beam; no sequence overtakes one without enough slots."""
        free = len(self.seq_pool)
        for index, sequence in enumerate(ready):
            free -= sequence.width
            if free < 0:
                return ready[:index]
        return ready

    def _sharing(self, sequence: Sequence) -> tuple[Slotted | None, int]:
        """Return the unit to copy the prefix from, and the number of positions; (None, 0) for no sharing."""
        sharer: Slotted = sequence
        while sharer.donor is not None:
            donor, num_shared = sharer.donor, sharer.num_shared
            # The choice in between may have ended with a failed engine; then the donor need not be ready. A sliding
            # window may have moved past the shared positions.
            if (
                donor.seq_id is not None
                and sharer.donor_ready
                and self._ctx.kv.shortest_prefix(donor.seq_id) <= num_shared
            ):
                return donor, num_shared
            sharer = donor  # a donor that has ended may itself have had a donor
        return None, 0

    def _free(self, sequence: Sequence, *, is_freed: bool = False) -> None:
        seq_id = sequence.seq_id
        assert seq_id is not None
        for slot in (seq_id, *sequence.beam_slots):
            if not is_freed:
                self._ctx.seq_rm(slot)
            self.seq_pool.add(slot)
        del self.sequences[seq_id]
        sequence.seq_id = None
        sequence.beam_slots = []


def waiting_key(sequence: LlmRequest) -> tuple[float, int, int]:
    """Return the sort key of the waiting list."""
    return sequence.waiting_key


def _sequence(unit: Slotted) -> Sequence:
    """Cast a unit that waits or runs; held prompts do neither."""
    return cast("Sequence", unit)


def _account(sequence: Sequence) -> str:
    return sequence.request.account


def _has_had_a_turn(sequence: Sequence) -> bool:
    """Return whether the sequence may be paused for another client."""
    num_drawn = sequence.num_generated - sequence.drawn_before
    return sequence.phase is Phase.DECODING and sequence.width == 1 and num_drawn >= TURN_TOKENS


def _evaluated_for(sequence: Sequence) -> int:
    """Return the held prompt's tokens that were evaluated for this request, which are no cache hit of it."""
    prompt = None if sequence.donor is None else sequence.donor.as_held
    if prompt is None or prompt.noticed_by is not sequence.request:
        return 0
    prompt.noticed_by = None
    return len(prompt.tokens) - prompt.num_reused


def _charge(sequence: Sequence) -> int:
    """Return the prompt tokens to charge; a request's further sequences share the first one's prompt."""
    return 0 if sequence.choice else sequence.num_prompt_tokens
