"""Pace: the iteration that a paced Batcher is asked for."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from genbatch.actors.batching.iteration import Iteration
from genbatch.actors.batching.sequence import Sequence
from genbatch.actors.runtime.actor import From, reply
from genbatch.actors.scheduling.llm_request import LlmRequest
from genbatch.actors.scheduling.scheduler import SchedulerOutput
from genbatch.nif.kv.kv_cache import KVCache


@dataclass(slots=True)
class Pace:
    """From the `Iterate` call to its reply.

    Args:
        from_: who asked.
        sit_out: tags of the requests that are not planned.
        tokens_before: tokens the Batcher had generated when it began.
        plan: the scheduler's; None until it was asked.
    """

    from_: "From[Any]"
    sit_out: frozenset[Hashable]
    tokens_before: int
    plan: SchedulerOutput | None = field(default=None)

    def sits_out(self, owner: LlmRequest) -> bool:
        """Whether a unit of scheduling is to be left alone."""
        return isinstance(owner, Sequence) and owner.request.tag in self.sit_out

    def end(self, kv: KVCache, tokens_after: int) -> None:
        """Answers."""
        counts, plan = kv.counts(), self.plan or SchedulerOutput([], [], [])
        reply(
            self.from_,
            Iteration(
                context=_tags(plan.context_requests),
                generation=_tags(plan.generation_requests),
                num_context_tokens=plan.num_context_tokens,
                num_generated_tokens=tokens_after - self.tokens_before,
                kv_blocks_max=counts.max,
                kv_blocks_free=counts.free,
                kv_blocks_used=counts.used,
                kv_block_size=kv.block_size,
            ),
        )


def _tags(owners: list[LlmRequest]) -> tuple[Hashable, ...]:
    return tuple(dict.fromkeys(owner.request.tag for owner in owners if isinstance(owner, Sequence)))
