"""The Batcher's options, with their defaults in one place."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from genbatch.actors.scheduler import RequestScheduler
from genbatch.proto.messages import RequestLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherOptions:
    """How the Batcher accumulates, admits and plans.

    Args:
        n_parallel: sequences decoded at once.
        batch_size: pending requests that end the accumulation at once; 0 means n_parallel.
        batch_timeout: milliseconds an idle Batcher waits for more requests before it starts.
        max_batch_tokens: most tokens, decodes and prefill chunks together, in one forward.
        max_queue: most requests waiting for a slot; one more is refused with a retry hint.
        scheduler: "fifo", "prefill_first", "module:Class", or a RequestScheduler.
        scheduler_policy: "MAX_UTILIZATION" (pauses under pressure) or "GUARANTEED_NO_EVICT".
        max_held_prompts: most system prompts whose KV is held for requests to share.
        system_prompts: contents of system messages to hold from the start.
        limits: caps on what one request may ask.
    """

    n_parallel: int = 8
    batch_size: int = 0
    batch_timeout: float = 20.0
    max_batch_tokens: int = 512
    max_queue: int = 256
    scheduler: str | RequestScheduler = "fifo"
    scheduler_policy: str = "MAX_UTILIZATION"
    max_held_prompts: int = 4
    system_prompts: Sequence[str] = ()
    limits: RequestLimits = field(default_factory=RequestLimits)

    @property
    def flush_size(self) -> int:
        """Pending requests at which an idle Batcher starts without waiting longer."""
        return self.batch_size or self.n_parallel
