"""A paced Batcher: it accepts requests at any time, and evaluates one iteration per `Iterate` call.

So its owner can hand in requests, read results and cancel requests at the edges of an iteration, as a batch manager's
callbacks do.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Slotted, slotted
from genbatch.actors.runtime.actor import NOREPLY, From, NoReply, reply
from genbatch.actors.scheduling.plan import PromptBudget
from genbatch.actors.scheduling.request import LlmRequest
from genbatch.actors.scheduling.scheduler import SchedulerOutput
from genbatch.nif.context import Context
from genbatch.nif.errors import OptionError
from genbatch.nif.kv.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Iterate:
    """A call that runs one tick; the reply is its Iteration once its last forward has ended.

    Args:
        sit_out: tags of requests that keep their place and are not planned, as if in flight elsewhere.
    """

    sit_out: frozenset[Hashable] = frozenset()


@dataclass(frozen=True, slots=True)
class Interrupt:
    """A call that ends the requests with these tags with their output so far; unknown tags are ignored."""

    tags: frozenset[Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The results of one iteration.

    Args:
        context: tags of the requests that evaluated a part of their context.
        generation: tags of the requests that decoded.
        num_context_tokens: the context tokens evaluated.
        num_generated_tokens: the tokens generated.
        kv_blocks_max, kv_blocks_free, kv_blocks_used: of all layer groups, at the end of the iteration.
    """

    context: tuple[Hashable, ...] = ()
    generation: tuple[Hashable, ...] = ()
    num_context_tokens: int = 0
    num_generated_tokens: int = 0
    kv_blocks_max: int
    kv_blocks_free: int
    kv_blocks_used: int
    kv_block_size: int


@dataclass(slots=True)
class Pace:
    """An iteration from the `Iterate` call to its reply.

    Args:
        from_: the caller.
        sit_out: tags of the requests that are not planned.
        tokens_before: tokens that the Batcher had generated at the beginning.
        plan: the scheduler's plan; None before it was made.
    """

    from_: "From[Any]"
    sit_out: frozenset[Hashable]
    tokens_before: int
    plan: SchedulerOutput | None = field(default=None)

    def sits_out(self, owner: Slotted) -> bool:
        """Return whether a unit of scheduling sits out."""
        return any(tag in self.sit_out for tag in owner.tags)

    def end(self, kv: KVCache, tokens_after: int) -> None:
        """Reply to the caller."""
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
    return tuple(dict.fromkeys(tag for owner in slotted(owners) for tag in owner.tags))


class PacedBatcher(Batcher):
    """A Batcher that runs a tick only for an `Iterate` call; requests arrive as usual.

    Args:
        open_context, options: see Batcher.

    Raises:
        OptionError: the options ask for a record.
    """

    def __init__(self, open_context: Callable[[], Context], options: BatcherOptions | None = None) -> None:
        super().__init__(open_context, options)
        if self.options.record is not None:
            raise OptionError("record", "a Batcher that evaluates on demand is not recorded")
        self._runs_ahead = False
        self._pace: Pace | None = None  # the iteration in progress

    async def handle_call(self, request: object, from_: From[Any]) -> object:
        answer = _CALLS.get(type(request))
        return await super().handle_call(request, from_) if answer is None else answer(self, request, from_)

    def _iterate(self, request: Iterate, from_: From[Any]) -> NoReply:
        assert self._pace is None, "one iteration at a time"
        self._pace = Pace(from_, request.sit_out, self.stats.generation_tokens)
        self._tick()
        return NOREPLY

    def _interrupt(self, request: Interrupt, from_: From[Any]) -> None:
        self.requests.interrupt(request.tags)
        self._end_abandoned()

    def _wake(self) -> None:
        """Do nothing: arrivals wait for the next iteration."""

    def _plan(self, inflight: frozenset[int], budget: PromptBudget | None) -> SchedulerOutput:
        plan = super()._plan(inflight, budget)
        if self._pace is not None:
            self._pace.plan = plan
        return plan

    def _sitting_out(self) -> frozenset[int]:
        sitting_out = super()._sitting_out()
        if self._pace is None:
            return sitting_out
        owners = (*self.slots.sequences.values(), *self.slots.pending)
        return sitting_out | {owner.request_id for owner in owners if self._pace.sits_out(owner)}

    def _stepped(self) -> None:
        """End the iteration, which is one tick."""
        self._stepping = False
        self._end_iteration()

    def _rest(self) -> None:
        super()._rest()
        self._end_iteration()

    def _end_iteration(self) -> None:
        if self._pace is not None:
            pace, self._pace = self._pace, None
            pace.end(self.ctx.kv, self.stats.generation_tokens)


_CALLS: dict[type, Callable[[PacedBatcher, Any, From[Any]], object]] = {
    Iterate: PacedBatcher._iterate,
    Interrupt: PacedBatcher._interrupt,
}
