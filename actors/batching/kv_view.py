"""KVView: what schedulers may ask of the KV memory, answered from the context's bookkeeping."""

from collections.abc import Sequence

from genbatch.actors.batching.sequence import Slotted
from genbatch.actors.scheduling.llm_request import LlmRequest, Phase
from genbatch.nif.kv.kv_cache import KVCache


class KVView:
    """The `kv_cache_manager` of our schedulers; implements KVResources.

    With several layer groups every answer is in blocks of the largest pool: needs scaled up and free blocks scaled
    down, so that what fits here fits in every pool.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._unit = max(kv.num_blocks)

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self._kv.block_size

    @property
    def num_blocks(self) -> int:
        """All blocks of the largest pool."""
        return self._unit

    @property
    def free_blocks(self) -> int:
        """Blocks the allocator can hand out now."""
        pairs = zip(self._kv.free_blocks, self._kv.num_blocks, strict=True)
        return min(free * self._unit // total for free, total in pairs)

    def get_max_resource_count(self) -> int:
        """Blocks that requests may hold in all."""
        return self._unit

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks the request holds in total at its full length."""
        needed: Sequence[int] = self._kv.needed_to_completion(request.num_prompt_tokens, request.max_new_tokens)
        if request.width > 1:
            needed = self._of_beams(needed, request)
        return self._scaled(needed)

    def blocks_held(self, request: LlmRequest) -> int:
        """Blocks that become free if this request alone is released."""
        slots = _slots(request)
        if not slots:
            return 0
        of_slots = [self._kv.exclusive_blocks(seq_id) for seq_id in slots]
        held: list[int] = [sum(blocks) for blocks in zip(*of_slots, strict=True)]
        # Rounded down: counting a block as freed that is not would let a plan run out of blocks.
        pairs = zip(held, self._kv.num_blocks, strict=True)
        return min(count * self._unit // total for count, total in pairs)

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` more tokens of the request can be computed."""
        slots = _slots(request)
        length = request.num_computed + num_tokens
        if slots:
            if all(self._kv.is_writable(seq_id, length) for seq_id in slots):
                return 0
            more = [self._kv.blocks_to_reach(seq_id, length) for seq_id in slots]
            return self._scaled([sum(blocks) for blocks in zip(*more, strict=True)])
        needed = self._kv.needed_to_completion(length, 1)
        # What a donor holds is shared as it is; found in the prefix cache, a block may leave the free ones.
        shared = request.num_shared // self.block_size if isinstance(request, Slotted) and request.donor_ready else 0
        return self._scaled([max(0, count - shared) for count in needed])

    def _of_beams(self, needed: Sequence[int], request: LlmRequest) -> list[int]:
        """Blocks of all beams at their full length: the prompt's whole blocks are shared, the others are not."""
        prompt = request.num_prompt_tokens // self.block_size
        blocks = []
        for count, group in zip(needed, self._kv.groups, strict=True):
            shared = prompt if group.window is None else 0
            # Beams that share a last block each take a copy before the original goes: one more for every two.
            blocks.append(shared + (count - shared) * request.width + request.width // 2)
        return blocks

    def _scaled(self, needed: Sequence[int]) -> int:
        pairs = zip(needed, self._kv.num_blocks, strict=True)
        return max(-(-count * self._unit // total) for count, total in pairs)


def _slots(request: LlmRequest) -> list[int]:
    """The slots that hold KV of the request."""
    assert isinstance(request, Slotted)
    if request.seq_id is None:
        return []
    return [request.seq_id, *request.beam_slots] if request.phase is Phase.DECODING else [request.seq_id]
