"""What was measured: figures of rounds beside one another, and what follows from them."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of some figures."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(slots=True)
class Comparison:
    """One case of two engines, round by round.

    Args:
        case: what was done.
        ours, theirs: the engines' names.
        goal: the least ratio that is aimed at; None without one.
        ours_tok_s, theirs_tok_s: a figure a round; the same round's are divided by one another.
    """

    case: str
    ours: str
    theirs: str
    goal: float | None = None
    ours_tok_s: list[float] = field(default_factory=list)
    theirs_tok_s: list[float] = field(default_factory=list)

    def add(self, ours: float, theirs: float) -> None:
        """A round's figures."""
        self.ours_tok_s.append(ours)
        self.theirs_tok_s.append(theirs)

    @property
    def ratio(self) -> Spread:
        """Ours to theirs."""
        return Spread.of([ours / theirs for ours, theirs in zip(self.ours_tok_s, self.theirs_tok_s, strict=True)])


@dataclass(slots=True)
class StepFloor:
    """A decode step through the Batcher and by the kernels alone, seconds, round by round."""

    mode: str
    batch: int
    step_s: list[float] = field(default_factory=list)
    floor_s: list[float] = field(default_factory=list)

    @property
    def percent(self) -> Spread:
        """What share of the floor's speed the step reaches."""
        return Spread.of([100 * floor / step for floor, step in zip(self.floor_s, self.step_s, strict=True)])


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many greedy tokens are the same until the first that is not, as a share."""

    engine: str
    reference: str
    share: float
    tokens: int


@dataclass(slots=True)
class Results:
    """Everything of one run, in the order it was measured."""

    comparisons: list[Comparison] = field(default_factory=list)
    floors: list[StepFloor] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    # What a client saw: (case, engine, its summary).
    latencies: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    # llama.cpp's variants, tokens a second by case.
    variants: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def agreed(answers: list[list[int]], reference: list[list[int]]) -> float:
    """The mean share of each answer that equals the reference from its beginning."""
    shares = []
    for answer, wanted in zip(answers, reference, strict=True):
        equal = 0
        for token, other in zip(answer, wanted, strict=True):
            if token != other:
                break
            equal += 1
        shares.append(equal / len(wanted))
    return sum(shares) / len(shares)
