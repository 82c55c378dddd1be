"""BlockShares: a client that waits for blocks gets its share of the pool, although another client has filled the pool.

Each client with work may hold an equal share of the blocks. A client may hold more only while no client below its share
waits. Otherwise one of its sequences is paused: the one that was paused least often, and among these the newest. The
paused sequence waits for its client's turn (FairShare), and its text stays the same.

A sequence is paused only after a turn, and each pause doubles its next turn. So evaluating a sequence again and again
costs little of its time.
"""

from collections.abc import Set

from genbatch.actors.batcher.requests import Sequence
from genbatch.actors.batcher.slots import TURN_TOKENS, Slots, waiting_key
from genbatch.actors.scheduling.request import Blocks, KVResources
from genbatch.nif.kv.kv_cache import KVCache


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
        held = {account: Blocks(self._kv.held_only_by(ids)) for account, ids in seq_ids.items()}
        mine = first.request.account
        if not (held[mine] + needed) * len(held) <= pool:
            return []  # more than the client's share: it waits until others end
        chosen: list[Sequence] = []
        able = [one for one in self._slots.pausable(inflight) if _has_had_a_turn(one)]
        while not (needed <= free and (free >= self._margin * pool or len(chosen) == len(self._slots.sequences))):
            # guard: share of the blocks
            rivals = [one for one in able if self._gives_way(one, first, held)]
            if not rivals:
                return []
            one = max(rivals, key=lambda one: (max(held[one.request.account]), -one.num_pauses, waiting_key(one)))
            freed = self._kv_view.blocks_held(one)
            free, held[one.request.account] = free + freed, held[one.request.account] - freed
            able.remove(one)
            chosen.append(one)
        return chosen

    def _gives_way(self, one: Sequence, first: Sequence, held: dict[str, Blocks]) -> bool:
        """Return whether a client has more than its share, and has been served more than the waiting client."""
        account = one.request.account
        exceeds = not held[account] * len(held) <= self._kv_view.num_blocks
        return exceeds and self._slots.served(account) > self._slots.served(first.request.account)


def _has_had_a_turn(sequence: Sequence) -> bool:
    return sequence.num_generated - sequence.drawn_before >= TURN_TOKENS << min(sequence.num_pauses, 16)
