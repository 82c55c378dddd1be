"""Messages from the model's thread to the Batcher at the end of a step or of a run."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import outcome

from genbatch.actors.batcher.generation import Generation
from genbatch.actors.batcher.requests import Evaluated, Planned
from genbatch.nif.sampling.sampler import Sampled, SampleFault


class Stepping(Protocol):
    """Books the messages of the thread; `Stepper` implements it. Each method returns whether no work is left."""

    def decoded(self, decoded: "Decoded") -> bool:
        """Book a step of a run; the next step may be running."""

    def stepped(self, batch: list[Planned], result: "outcome.Outcome[list[Evaluated]]") -> bool:
        """Book a single step, or begin to find the request at fault for a failed one."""

    def run_ended(self, run: "Run", result: "outcome.Outcome[Decoded | None]") -> bool:
        """Book the last step of a run."""


class Run(Protocol):
    """A run of decode steps as the event loop sees it; `RunAhead` implements it."""

    batch: list[Planned]
    sequences: list[Generation]

    def stop(self) -> None:
        """Ask for a plan: the run ends with the current step."""

    def booked(self) -> None:
        """Note that the tokens of one more step were handed out."""


# The draws of a run's step for each sequence: one token, and one more for each accepted draft token.
Drawn: TypeAlias = list[list[Sampled | SampleFault]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A step of a run has ended; unless it was the last step, the next step has begun.

    Args:
        guessing_s: the seconds that a draft model took before the step.
    """

    run: Run
    drawn: Drawn
    num_drafted: int
    guessing_s: float = 0.0

    def book(self, stepping: Stepping) -> bool:
        """Book the step; return whether no work is left."""
        return stepping.decoded(self)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A forward has ended on the model's thread."""

    batch: list[Planned]
    result: outcome.Outcome[list[Evaluated]]

    def book(self, stepping: Stepping) -> bool:
        """Book the step; return whether no work is left."""
        return stepping.stepped(self.batch, self.result)


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run has ended on the model's thread, with its last step's draws; None if they were sent before."""

    run: Run
    result: outcome.Outcome[Decoded | None]

    def book(self, stepping: Stepping) -> bool:
        """Book the end; return whether no work is left."""
        return stepping.run_ended(self.run, self.result)


StepMessage = Stepped | Decoded | RunEnded
