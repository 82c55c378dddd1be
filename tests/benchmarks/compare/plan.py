"""Plan: how much is measured, the whole or a quick look at whether everything works."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PARTS = ("agreement", "variants", "w5", "prefill", "prefix", "w2", "w3", "w6", "w4", "transformers", "w5_long")
"""In the order they are run. `agreement` comes before anything is timed, `variants` finds llama.cpp's best."""

# Share of the whole time after which a part begins no further round.
_SHARES = {"w5": 0.22, "prefill": 0.05, "prefix": 0.04, "w2": 0.22, "w3": 0.22}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of a run.

    Args:
        parts: which of PARTS.
        modes: genbatch's, the first against llama.cpp's best, "bfloat16" against llama.cpp's BF16.
        rounds: of what takes seconds.
        slow_rounds: of what is not: transformers, long contexts, W4, W6, and a second mode of W2 and W3.
        minutes: the whole run's aim; each part has a share of it, and at least one round.
        batches: of W5.
        exact_batches: of W5 with exact weights.
        steps: decode steps timed.
        num_prompts, scale: of W2 and W3.
        poisson_prompts: of W4.
        limit_s: after which transformers' loads are cut off.
        greedy_tokens: of each answer that is compared before anything is timed.
    """

    parts: Sequence[str] = PARTS
    modes: Sequence[str] = ("int8", "bfloat16")
    rounds: int = 5
    slow_rounds: int = 1
    minutes: float = 24.0
    batches: Sequence[int] = (1, 8, 16, 32)
    exact_batches: Sequence[int] = (16, 32)
    steps: int = 64
    num_prompts: int = 64
    scale: float = 1.0
    poisson_prompts: int = 32
    limit_s: float = 75.0
    greedy_tokens: int = 64
    shares: Mapping[str, float] = field(default_factory=lambda: _SHARES)

    def part_s(self, part: str) -> float:
        """Seconds after which the part begins no further round."""
        return self.minutes * 60 * self.shares.get(part, 0.04)


FULL = Plan()
QUICK = Plan(
    rounds=1,
    batches=(1, 8),
    exact_batches=(8,),
    steps=8,
    num_prompts=6,
    scale=0.1,
    poisson_prompts=4,
    limit_s=10.0,
    greedy_tokens=8,
)
"""Every part once, too small for its figures to mean anything."""
