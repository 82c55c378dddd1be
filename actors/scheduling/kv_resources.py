"""What a scheduler may ask of the KV memory: counts of blocks, never the blocks themselves."""

from typing import Protocol

from genbatch.actors.scheduling.blocks import Blocks
from genbatch.actors.scheduling.llm_request import LlmRequest


class KVResources(Protocol):
    """The `kv_cache_manager` argument of schedulers; asking changes nothing.

    Schedulers add up needs and compare the sum with what is there. They need not be exact: the Batcher carries out
    as much of a plan as fits, by the allocator's own arithmetic.
    """

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        ...

    @property
    def num_blocks(self) -> Blocks:
        """All blocks."""
        ...

    @property
    def free_blocks(self) -> Blocks:
        """Blocks that can be handed out now, those included that keep a finished prefix or an idle held prompt."""
        ...

    @property
    def no_blocks(self) -> Blocks:
        """None of any pool."""
        ...

    def get_max_resource_count(self) -> Blocks:
        """Blocks that requests may hold in all: what is not pinned by a configured prompt."""
        ...

    def get_needed_resource_to_completion(self, request: LlmRequest) -> Blocks:
        """The most blocks the request holds on its way to `max_positions`, those held now included.

        What it shares with a configured prompt is not counted. More than `get_max_resource_count()` only if it does
        not fit even alone.
        """
        ...

    def blocks_held(self, request: LlmRequest) -> Blocks:
        """Blocks that become free if this request alone is released."""
        ...

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> Blocks:
        """The most blocks that leave `free_blocks` until `num_tokens` more tokens of the request are computed.

        For a pending request that includes the free blocks that keep a prefix it will reuse.
        """
        ...
