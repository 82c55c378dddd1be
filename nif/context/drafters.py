"""Drafters guess the next tokens of a run's sequences, for a step of the model to verify. HitRates says how well.

`DraftModel` asks another model, and `MultiTokenHead` a layer of the model itself.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from genbatch.nif.sampling.sampler import SamplerState

# The most sequences that have drafts: with more, a further row of a step costs as much as a first one.
DRAFTED_SEQUENCES = 4
# The assumed share of right tokens before the first draft.
UNTRIED = 0.7
# The weight of the newest token in a sequence's share of right tokens, and in that of all sequences.
NEWEST, NEWEST_OF_ALL = 0.1, 0.02
# How far a share moves back to `UNTRIED` in a step without a draft, so that drafting is tried again.
FORGETTING = 0.005
# The weight of the newest forward in the measured time of a forward.
NEWEST_TIME = 0.1
# The most sequences that have a share of right tokens of their own.
REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Drafted:
    """A sequence to draft for.

    Args:
        key: tells the sequence from all others.
        seq_id: its slot.
        tokens: its prompt and its output so far.
        sampler: draws its tokens; a draft is drawn with a fork of it.
    """

    key: int
    seq_id: int
    tokens: list[int]
    sampler: SamplerState


class Drafter(Protocol):
    """Guesses the next tokens of a run's sequences; `DraftModel` and `MultiTokenHead` implement it."""

    forward_s: float  # the measured seconds of a forward that drafts one token for each sequence
    seconds: float  # spent on drafts, in all

    def chance(self, key: int) -> float:
        """Return the estimated probability that a drafted token of this sequence is right."""
        ...

    def propose(self, sequences: Sequence[Drafted], lengths: Sequence[int]) -> list[list[int]]:
        """Draft up to `lengths[i]` tokens for each sequence."""
        ...

    def verified(self, key: int, num_drafted: int, num_right: int) -> None:
        """Learn from a step: how many of the drafted tokens were right."""
        ...

    def close(self) -> None:
        """Release the drafter's memory."""
        ...


class HitRates:
    """The recent share of drafted tokens that were right, of each sequence and of all."""

    def __init__(self) -> None:
        self._usual = UNTRIED  # the share of all sequences, with which a new one begins
        self._own: OrderedDict[int, float] = OrderedDict()  # by key, the least recently used first

    def chance(self, key: int) -> float:
        """Return the estimated probability that a drafted token of this sequence is right."""
        return self._own.get(key, self._usual)

    def verified(self, key: int, num_drafted: int, num_right: int) -> None:
        """Learn from a step: how many of the drafted tokens were right."""
        chance = self.chance(key)
        if num_drafted == 0:
            chance += FORGETTING * (UNTRIED - chance)
        # The token after the first wrong one says nothing.
        for place in range(min(num_drafted, num_right + 1)):
            is_right = place < num_right
            chance += NEWEST * (is_right - chance)
            self._usual += NEWEST_OF_ALL * (is_right - self._usual)
        self._own[key] = chance
        self._own.move_to_end(key)
        if len(self._own) > REMEMBERED:
            self._own.popitem(last=False)
