"""What the model's thread sends back to the Batcher when a step or a run ends."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import outcome
import torch

from genbatch.actors.batcher.requests import Planned
from genbatch.nif.sampling.sampler import Sampled, SampleFault
from genbatch.proto.messages import TokenLogprob


class Run(Protocol):
    """A run of decode steps as the event loop sees it; `RunAhead` implements it."""

    batch: list[Planned]

    def stop(self) -> None:
        """Ask for a plan: the run ends with the step under way."""

    def booked(self) -> None:
        """Note that one more step's tokens are handed out."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What a step gave one entry."""

    drawn: Sampled | SampleFault | None
    prompt_logprobs: list[TokenLogprob]
    rows: torch.Tensor | None = None  # [rows, vocab_size] on the CPU, where logits are kept; of a text its states


# What a step of a run drew for each sequence: a token, and one more for each that was drafted rightly.
Drawn: TypeAlias = list[list[Sampled | SampleFault]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A step of a run has ended; unless it was the last one, the next has begun."""

    run: Run
    drawn: Drawn
    num_drafted: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A forward has ended on the model's thread."""

    batch: list[Planned]
    result: outcome.Outcome[list[Evaluated]]


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run has ended on the model's thread: with its last step's draws, or None if those were told before."""

    run: Run
    result: outcome.Outcome[Decoded | None]


StepMessage = Stepped | Decoded | RunEnded
