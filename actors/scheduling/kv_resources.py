"""What a scheduler may ask of the KV memory: counts of blocks, never the blocks themselves."""

from typing import Protocol

from genbatch.actors.scheduling.llm_request import LlmRequest


class KVResources(Protocol):
    """The `kv_cache_manager` argument of schedulers; asking changes nothing.

    Schedulers add up needs and compare the sum with what is free. Over several block pools an
    implementation answers in the units of one, needs rounded up and free blocks rounded down, so that
    what fits here fits in every pool.
    """

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """All blocks of the pool."""
        ...

    @property
    def free_blocks(self) -> int:
        """Blocks the allocator can hand out now, those that keep a finished prefix included."""
        ...

    def get_max_resource_count(self) -> int:
        """Blocks that requests may hold in all."""
        ...

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks the request holds in total once it has `max_positions`, those held now included."""
        ...

    def blocks_held(self, request: LlmRequest) -> int:
        """Blocks that become free if this request alone is released."""
        ...

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> int:
        """Blocks that leave `free_blocks` before `num_tokens` more tokens of the request can be computed.

        For a pending request that includes the free blocks that keep a prefix it will reuse.
        """
        ...
