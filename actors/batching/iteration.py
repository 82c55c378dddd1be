"""What a paced Batcher is sent and answers: one iteration at a time, when its owner says so.

A paced Batcher receives requests as any other does, and evaluates nothing between two `Iterate` calls. So its owner
can hand in requests, read what ended and change its mind at the edges of an iteration, as a batch manager's
callbacks do.
"""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Iterate:
    """A call that runs one tick; answered with its Iteration once its last forward has ended.

    Args:
        sit_out: tags of requests that keep their place and are not planned, as if in flight elsewhere.
    """

    sit_out: frozenset[Hashable] = frozenset()


@dataclass(frozen=True, slots=True)
class Interrupt:
    """A call that ends the requests with these tags with what they have; unknown tags are ignored."""

    tags: frozenset[Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one iteration did.

    Args:
        context: tags of the requests that evaluated a part of their context.
        generation: tags of those that decoded.
        num_context_tokens: tokens of all contexts evaluated.
        num_generated_tokens: tokens that came out.
        kv_blocks_max, kv_blocks_free, kv_blocks_used: of all layer groups, as the iteration left them.
    """

    context: tuple[Hashable, ...] = ()
    generation: tuple[Hashable, ...] = ()
    num_context_tokens: int = 0
    num_generated_tokens: int = 0
    kv_blocks_max: int
    kv_blocks_free: int
    kv_blocks_used: int
    kv_block_size: int
