"""Step costs: the work of a step, and the seconds that its parts cost. Imports no numpy, because clients import it.

StepTime(base=0.004, decode=0.001, ...).seconds(StepWork(decodes=8, keys=2400))
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one step, or the sum over several steps.

    Args:
        steps: number of forwards.
        decodes: number of sequences that get one token each.
        keys: number of positions that these sequences read, in all.
        prompts: number of prompts with a part in the step.
        prefill: number of tokens in these parts.
        prefill_keys: number of positions that these tokens read, in all.
        drafted: number of drafted tokens to verify.
    """

    steps: float = 1
    decodes: float = 0
    keys: float = 0.0
    prompts: float = 0
    prefill: float = 0
    prefill_keys: float = 0.0
    drafted: float = 0

    def row(self) -> list[float]:
        """Return the amounts in the order of `COSTS`."""
        return [self.steps, self.decodes, self.keys, self.prompts, self.prefill, self.prefill_keys, self.drafted]


@dataclass(frozen=True, slots=True)
class RehearsedStep:
    """A step that was run to learn what it costs, with its seconds."""

    work: StepWork
    seconds: float


# The fields of StepTime, in the order of StepWork's amounts.
COSTS = ("base", "decode", "key", "prompt", "prefill", "prefill_key", "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The seconds that each part of a step's work costs; `nif/step_time.py` learns them."""

    base: float
    decode: float
    key: float
    prefill: float
    prefill_key: float
    prompt: float = 0.0
    draft: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the seconds that this work takes."""
        return (
            self.base * work.steps
            + self.decode * work.decodes
            + self.key * work.keys
            + self.prompt * work.prompts
            + self.prefill * work.prefill
            + self.prefill_key * work.prefill_keys
            + self.draft * work.drafted
        )
