"""What the model's thread sends back to the Batcher when a step or a run ends."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import outcome

from genbatch.actors.batcher.generation import Generation
from genbatch.actors.batcher.requests import Evaluated, Planned
from genbatch.nif.sampling.sampler import Sampled, SampleFault


class Stepping(Protocol):
    """Who books what the thread sends back; `Stepper` implements it. Each returns whether nothing is under way now."""

    def decoded(self, decoded: "Decoded") -> bool:
        """Book a step of a run, whose next step may be under way."""

    def stepped(self, batch: list[Planned], result: "outcome.Outcome[list[Evaluated]]") -> bool:
        """Book a single step, or find whose fault it is that it failed."""

    def run_ended(self, run: "Run", result: "outcome.Outcome[Decoded | None]") -> bool:
        """Book the last step of a run."""


class Run(Protocol):
    """A run of decode steps as the event loop sees it; `RunAhead` implements it."""

    batch: list[Planned]
    sequences: list[Generation]

    def stop(self) -> None:
        """Ask for a plan: the run ends with the step under way."""

    def booked(self) -> None:
        """Note that one more step's tokens are handed out."""


# What a step of a run drew for each sequence: a token, and one more for each that was drafted rightly.
Drawn: TypeAlias = list[list[Sampled | SampleFault]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A step of a run has ended; unless it was the last one, the next has begun."""

    run: Run
    drawn: Drawn
    num_drafted: int

    def book(self, stepping: Stepping) -> bool:
        """Have it booked; returns whether nothing is under way now."""
        return stepping.decoded(self)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A forward has ended on the model's thread."""

    batch: list[Planned]
    result: outcome.Outcome[list[Evaluated]]

    def book(self, stepping: Stepping) -> bool:
        """As Decoded's."""
        return stepping.stepped(self.batch, self.result)


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run has ended on the model's thread: with its last step's draws, or None if those were told before."""

    run: Run
    result: outcome.Outcome[Decoded | None]

    def book(self, stepping: Stepping) -> bool:
        """As Decoded's."""
        return stepping.run_ended(self.run, self.result)


StepMessage = Stepped | Decoded | RunEnded
