"""KVView: what schedulers may ask of the KV memory, answered from the context's bookkeeping."""

from collections.abc import Sequence

from genbatch.actors.llm_request import LlmRequest
from genbatch.actors.sequence import Slotted
from genbatch.nif.kv_cache import KVCache


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
        return self._scaled(self._kv.needed_to_completion(request.num_prompt_tokens, request.max_new_tokens))

    def blocks_held(self, request: LlmRequest) -> int:
        """Blocks that become free if this request alone is released."""
        seq_id = _slot(request)
        if seq_id is None:
            return 0
        # Rounded down: counting a block as freed that is not would let a plan run out of blocks.
        pairs = zip(self._kv.exclusive_blocks(seq_id), self._kv.num_blocks, strict=True)
        return min(held * self._unit // total for held, total in pairs)

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` more tokens of the request can be computed."""
        seq_id = _slot(request)
        length = request.num_computed + num_tokens
        if seq_id is not None:
            return self._scaled(self._kv.blocks_to_reach(seq_id, length))
        needed = self._kv.needed_to_completion(length, 1)
        # What a donor holds is shared as it is; found in the prefix cache, a block may leave the free ones.
        shared = request.num_shared // self.block_size if isinstance(request, Slotted) and request.donor_ready else 0
        return self._scaled([max(0, count - shared) for count in needed])

    def _scaled(self, needed: Sequence[int]) -> int:
        pairs = zip(needed, self._kv.num_blocks, strict=True)
        return max(-(-count * self._unit // total) for count, total in pairs)


def _slot(request: LlmRequest) -> int | None:
    assert isinstance(request, Slotted)
    return request.seq_id
