"""Step costs: the work of a step, and the seconds that its parts cost. Needs no numpy, as clients import it.

StepTime(base=0.004, decode=0.001, ...).seconds(StepWork(decodes=8, keys=2400))
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one step, or of several ones together.

    Args:
        steps: forwards.
        decodes: sequences that get one token each.
        keys: positions that those read, all together.
        prompts: prompts of which a part is evaluated.
        prefill: tokens of these parts.
        prefill_keys: positions that those tokens read, all together.
        drafted: tokens that are checked beside those decoded.
    """

    steps: float = 1
    decodes: float = 0
    keys: float = 0.0
    prompts: float = 0
    prefill: float = 0
    prefill_keys: float = 0.0
    drafted: float = 0

    def row(self) -> list[float]:
        """The amounts in the order of `COSTS`."""
        return [self.steps, self.decodes, self.keys, self.prompts, self.prefill, self.prefill_keys, self.drafted]


# The fields of StepTime, in the order of StepWork's amounts.
COSTS = ("base", "decode", "key", "prompt", "prefill", "prefill_key", "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds that each part of a step's work costs; `nif/step_time.py` says how they are learned."""

    base: float
    decode: float
    key: float
    prefill: float
    prefill_key: float
    prompt: float = 0.0
    draft: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """How long this work takes."""
        return (
            self.base * work.steps
            + self.decode * work.decodes
            + self.key * work.keys
            + self.prompt * work.prompts
            + self.prefill * work.prefill
            + self.prefill_key * work.prefill_keys
            + self.draft * work.drafted
        )
