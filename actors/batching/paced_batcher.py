"""PacedBatcher: a Batcher that evaluates one iteration at a time, when its owner says so."""

from collections.abc import Callable
from typing import Any

from genbatch.actors.batching.batcher import Batcher
from genbatch.actors.batching.iteration import Interrupt, Iterate
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.batching.pace import Pace
from genbatch.actors.runtime.actor import NOREPLY, From
from genbatch.actors.scheduling.scheduler_output import SchedulerOutput
from genbatch.nif.context import Context
from genbatch.nif.errors import OptionError


class PacedBatcher(Batcher):
    """Requests arrive as at any other; a tick runs only while an `Iterate` call waits.

    Args:
        open_context, options: see Batcher.

    Raises:
        OptionError: it is to be recorded.
    """

    def __init__(self, open_context: Callable[[], Context], options: BatcherOptions | None = None) -> None:
        super().__init__(open_context, options)
        if self.options.record is not None:
            raise OptionError("record", "a Batcher that evaluates on demand is not recorded")
        self._runs_ahead = False
        self._pace: Pace | None = None  # the iteration that was asked for

    async def handle_call(self, request: object, from_: From[Any]) -> object:
        match request:
            case Iterate():
                assert self._pace is None, "one iteration at a time"
                self._pace = Pace(from_, request.sit_out, self.stats.generation_tokens)
                self._tick()
                return NOREPLY
            case Interrupt():
                self.requests.interrupt(request.tags)
                self._end_abandoned()
                return None
            case _:
                return await super().handle_call(request, from_)

    def _wake(self) -> None:
        """What has arrived waits for the next iteration."""

    def _plan(self, inflight: frozenset[int]) -> SchedulerOutput:
        plan = super()._plan(inflight)
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
        """One tick is one iteration."""
        self._stepping = False
        self._end_iteration()

    def _rest(self) -> None:
        super()._rest()
        self._end_iteration()

    def _end_iteration(self) -> None:
        if self._pace is not None:
            pace, self._pace = self._pace, None
            pace.end(self.ctx.kv, self.stats.generation_tokens)
