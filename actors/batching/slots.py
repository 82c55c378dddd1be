"""Slots: which sequence holds which slot of the context, who waits for one, and what each one starts from."""

from bisect import insort
from collections.abc import Callable

import trio

from genbatch.actors.batching.fair_share import FairShare
from genbatch.actors.batching.held_prompts import HeldPrompts
from genbatch.actors.batching.journal import Journal
from genbatch.actors.batching.sequence import HeldPrompt, Sequence, Slotted
from genbatch.actors.batching.swap import Swap
from genbatch.actors.scheduling.llm_request import LlmRequest, Phase
from genbatch.nif.context import Context
from genbatch.nif.kv.step_draft import Beginning


class Slots:
    """Moves sequences between the waiting list and the context's slots; between two steps only.

    Args:
        ctx: whose slots 0 .. n_parallel - 1 these are.
        held: prompts that sequences may share.
        swap: where paused sequences may leave their KV.
        fair: whose turn it is among clients; None: all wait in one line.
        n_parallel: how many slots there are.
        journal: where starts and pauses are booked.
        now: the time that decides.
    """

    def __init__(
        self,
        ctx: Context,
        held: HeldPrompts,
        swap: Swap,
        fair: FairShare | None,
        n_parallel: int,
        journal: Journal,
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        self.pending: list[Sequence] = []  # by turn, then priority, then arrival
        self._fair = fair
        self.sequences: dict[int, Sequence] = {}  # by slot, longest admitted first
        self.seq_pool = set(range(n_parallel))  # free slots
        self._ctx = ctx
        self._held = held
        self._swap = swap
        self._n_parallel = n_parallel
        self._journal = journal
        self._now = now

    def enqueue(self, sequence: Sequence) -> None:
        """Lets a sequence wait in its turn."""
        insort(self.pending, sequence, key=waiting_key)

    def ready(self) -> list[Sequence]:
        """The waiting sequences that a plan may start, in turn."""
        ready = [sequence for sequence in self._in_turn() if not sequence.waits_for_donor]
        if len(self.sequences) + len(self.seq_pool) < self._n_parallel or any(s.width > 1 for s in ready):
            return self._with_slots(ready)
        return ready

    def beginning_of(self, sequence: Slotted) -> Beginning:
        """What a waiting sequence would start with if it were admitted now, and what that takes."""
        assert isinstance(sequence, Sequence)
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

    def admit(self, sequence: Sequence) -> None:
        """Moves a waiting sequence into a slot, with whatever is already evaluated of its beginning."""
        self.pending.remove(sequence)
        seq_id = min(self.seq_pool)
        self.seq_pool.remove(seq_id)
        self.sequences[seq_id] = sequence
        sequence.seq_id = seq_id
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
            if isinstance(donor, HeldPrompt):
                donor.last_used = self._now()
        if not sequence.scores_prompt:
            sequence.num_computed = self._ctx.attach_prefix(seq_id, sequence.tokens, sequence.cache_key)
        if sequence.num_pauses == 0:
            if self._fair is not None:
                self._fair.charge(_account(sequence), prompt_tokens=_charge(sequence))
            self._journal.stats.shared_tokens += num_shared
            self._journal.stats.reused_tokens += sequence.num_computed - num_shared
            if sequence.choice == 0:
                sequence.request.cached_tokens = sequence.num_computed
            self._journal.admitted(sequence)

    def pause(self, owner: LlmRequest) -> None:
        """Takes a sequence's blocks; it waits in its old turn and evaluates all its tokens again."""
        if isinstance(owner, HeldPrompt):
            self.drop_held(owner)
            return
        assert isinstance(owner, Sequence) and owner.seq_id is not None
        swapped = False
        if owner.beams is not None:
            owner.beams.restart()
            owner.num_generated = 0
        else:
            swapped = self._swap.out(owner.request_id, owner.seq_id)
            if swapped:
                owner.donor = None  # it comes back whole: a plan must find room for all of it
        self._free(owner)
        owner.pause()
        self._journal.paused(owner, swapped=swapped)
        self.enqueue(owner)

    def release(self, sequence: Sequence) -> None:
        """Ends a sequence, whether it waits or runs."""
        if sequence.seq_id is not None:
            self._free(sequence)
        else:
            self.pending.remove(sequence)
            self._swap.forget(sequence.request_id)
        sequence.move(Phase.FINISHED)

    def drop_held(self, held: HeldPrompt) -> None:
        """Frees a held prompt's blocks."""
        self._ctx.seq_rm(self._held.drop(held))

    def _in_turn(self) -> list[Sequence]:
        """Who waits, paused ones first: they have paid for their prompt, and their callers have begun to read."""
        if self._fair is None or len(self.pending) < 2:
            return self.pending
        paused = [sequence for sequence in self.pending if sequence.num_pauses]
        fresh = [sequence for sequence in self.pending if not sequence.num_pauses]
        at_work: dict[str, int] = {}
        for sequence in (*self.sequences.values(), *paused):
            account = sequence.request.account
            at_work[account] = at_work.get(account, 0) + sequence.num_generated
        return paused + self._fair.in_turn(fresh, _account, _charge, at_work)

    def _with_slots(self, ready: list[Sequence]) -> list[Sequence]:
        """The waiting sequences that find a slot for each beam; nobody overtakes one that does not."""
        free = len(self.seq_pool)
        for index, sequence in enumerate(ready):
            free -= sequence.width
            if free < 0:
                return ready[:index]
        return ready

    def _sharing(self, sequence: Sequence) -> tuple[Slotted | None, int]:
        """Whose beginning it takes over, and how many positions of it; none where there is nothing to take over."""
        sharer: Slotted = sequence
        while sharer.donor is not None:
            donor, num_shared = sharer.donor, sharer.num_shared
            # A sliding window may have moved past what is to be shared.
            ready = donor.seq_id is not None and donor.num_computed >= num_shared
            if ready and donor.seq_id is not None and self._ctx.kv.shortest_prefix(donor.seq_id) <= num_shared:
                return donor, num_shared
            sharer = donor  # the choice whose prompt it would share is gone; what that one shared may still be there
        return None, 0

    def _free(self, sequence: Sequence) -> None:
        seq_id = sequence.seq_id
        assert seq_id is not None
        for slot in (seq_id, *sequence.beam_slots):
            self._ctx.seq_rm(slot)
            self.seq_pool.add(slot)
        del self.sequences[seq_id]
        sequence.seq_id = None
        sequence.beam_slots = []


def waiting_key(sequence: LlmRequest) -> tuple[float, int, int]:
    """The order of the waiting list."""
    return sequence.waiting_key


def _account(sequence: Sequence) -> str:
    return sequence.request.account


def _charge(sequence: Sequence) -> int:
    """Prompt tokens that serving it costs; a request's further sequences share the first one's prompt."""
    return 0 if sequence.choice else sequence.num_prompt_tokens
