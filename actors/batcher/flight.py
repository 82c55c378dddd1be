"""Flight: what the Batcher tells of all that decides about its ticks; a recorder keeps it, this class does not.

Telemetry tells of the same lives, but its events are plain values for any listener. A flight is told objects, tokens
among them, and it answers: a replay says what time it is, and who is left out of a plan.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING

import outcome
import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.scheduling.plan import SchedulerOutput
from genbatch.nif.errors import OptionError

if TYPE_CHECKING:
    from genbatch.actors.batcher.intake import Prompt
    from genbatch.actors.batcher.messages import Generate
    from genbatch.actors.batcher.requests import Request
    from genbatch.actors.batcher.step import Planned
    from genbatch.actors.batcher.stepper import StepMessage
    from genbatch.nif.context import Context


class Flight:
    """A flight that nobody records. Between two calls of `began` one message is handled."""

    def begin(self, context: "Context", system_prompts: ListOf[list[int]]) -> None:
        """The Batcher has opened its context, and is about to evaluate the prompts that it holds from the start."""

    def began(self) -> None:
        """The Batcher turns to its next message."""

    def now(self) -> float:
        """The time that decides: seconds on the event loop's clock."""
        return trio.current_time()

    def arrived(self, request: "Request", message: "Generate", deadline_s: float | None) -> None:
        """A request was accepted, with so many seconds to its deadline."""

    def encoded(self, request: "Request", prompt: "outcome.Outcome[Prompt]") -> None:
        """Its prompt was tokenized."""

    def left(self, request: "Request") -> None:
        """Its caller is gone."""

    def stepped(self, message: "StepMessage") -> None:
        """A step has ended, and was booked."""

    def draining(self, timeout_s: float) -> None:
        """New requests are refused from now on."""

    def drain_over(self) -> None:
        """The requests that are still open are cancelled."""

    def prompted(self) -> None:
        """Something else has become ready: a tick follows where none is under way."""

    def sitting_out(self, ids: frozenset[int]) -> frozenset[int]:
        """Who is not to be planned in the next tick."""
        return ids

    def ticked(self, plan: SchedulerOutput, groups: "ListOf[ListOf[Planned]]") -> None:
        """A tick has planned, and made these forwards of it."""

    def close(self, reason: str) -> None:
        """Nothing that follows can be told; may be called again."""


OpenFlight = Callable[[BatcherOptions], Flight]


def unrecorded(options: BatcherOptions) -> Flight:
    """A flight that nobody records.

    Raises:
        OptionError: the options ask for a record.
    """
    if options.record is not None:
        raise OptionError("record", "a Batcher made without `open_flight` records nothing")
    return Flight()
