"""Drafters guess the next tokens of a run's sequences, for a step of the model to verify. HitRates counts right ones.

`DraftModel` asks another model. `MultiTokenHead` asks a layer of the model itself, and `Assistant` asks a small model
that reads the model's keys. These two read rows of the model's steps, so they are a `StateDrafter`.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import Largest, PredictingRunner, RaggedBatch
from genbatch.nif.sampling.choice import choose
from genbatch.nif.sampling.sampler import SamplerState

log = logging.getLogger("genbatch")

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


class Drafter(ABC):
    """Guesses the next tokens of a run's sequences.

    An error of the drafter never fails a request: it is logged once, and drafting ends.
    """

    name: ClassVar[str]  # in logs

    def __init__(self) -> None:
        self.seconds = 0.0  # spent on drafts, in all
        self._has_failed = False
        self._rates = HitRates()
        self._rehearse()  # touches the weights
        began = time.perf_counter()
        self._rehearse()
        self.forward_s = time.perf_counter() - began  # of a forward that drafts one token for each sequence

    def chance(self, key: int) -> float:
        """Return the estimated probability that a drafted token of this sequence is right."""
        return 0.0 if self._has_failed else self._rates.chance(key)

    def verified(self, key: int, num_drafted: int, num_right: int) -> None:
        """Learn from a step of the model: how many of the drafted tokens were right."""
        self._rates.verified(key, num_drafted, num_right)

    def propose(self, sequences: Sequence[Drafted], lengths: Sequence[int]) -> list[list[int]]:
        """Draft up to `lengths[i]` tokens for each sequence; [] if the drafter has not read the sequence."""
        began = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in sequences]
        try:
            self._propose(sequences, lengths, drafts)
        except Exception:
            self._fail()
            return [[] for _ in sequences]
        finally:
            self.seconds += time.perf_counter() - began
        return drafts

    @abstractmethod
    def close(self) -> None:
        """Release the drafter's memory."""

    @abstractmethod
    def _propose(self, sequences: Sequence[Drafted], lengths: Sequence[int], drafts: list[list[int]]) -> None:
        """Append guesses to `drafts`; without a free block, fewer."""

    @abstractmethod
    def _rehearse(self) -> None:
        """Run a forward that drafts one token."""

    def _fail(self) -> None:
        log.exception("the %s failed; nothing is drafted from now on", self.name)
        self._has_failed = True

    def _measured(self, began: float) -> None:
        """Add a forward that began at this time to the measured time of a forward."""
        self.forward_s += NEWEST_TIME * (time.perf_counter() - began - self.forward_s)


StateRows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Seen:
    """A sequence's part of a step that was committed.

    Args:
        n_past: the positions that the sequence had.
        count: the positions that were added.
        places: indices into the sequence's tokens of the step; these tokens have rows. In ascending order.
        states: [places, hidden], their rows in front of the model's head.
    """

    seq_id: int
    n_past: int
    count: int
    places: npt.NDArray[np.int64]
    states: StateRows


class Guess(Protocol):
    """What a predictor reads to guess a token of one sequence."""

    @property
    def position(self) -> int:
        """The position of the token that is guessed."""
        ...

    def following(self, token_id: int, state: StateRows) -> Self:
        """Return what the predictor reads after it guessed `token_id` with its own row `state`, [hidden]."""
        ...


G = TypeVar("G", bound=Guess)


class StateDrafter(Drafter, Generic[G]):
    """Guesses with the predictor of a runner, which reads rows that the model had in front of its head.

    `MultiTokenHead` and `Assistant` choose the rows. It follows the steps of up to `DRAFTED_SEQUENCES` sequences.
    Guesses are drawn with forks of the sequences' samplers.

    Args:
        runner: computes the predictor.
        kv: holds the sequences, none so far.
        vocab_size: the width of the logits.
    """

    def __init__(self, runner: PredictingRunner, kv: KVCache, vocab_size: int) -> None:
        assert runner.predicts
        self.runner = runner
        self._kv = kv
        self._vocab_size = vocab_size
        super().__init__()

    def follows(self, num_sequences: int) -> bool:
        """Whether the drafter reads the rows of a step with this many sequences; more would take too long."""
        return num_sequences <= DRAFTED_SEQUENCES and not self._has_failed

    def stepped(
        self,
        steps: Sequence[tuple[int, Sequence[int], int]],
        evaluated: Sequence[Sequence[int]] | None,
        tokens: npt.NDArray[np.int64],
        states: StateRows,
    ) -> None:
        """Take the rows of a step that was committed.

        Args:
            steps: each sequence's slot, its tokens in the step, and the positions that it had.
            evaluated: each sequence's tokens that were committed; None means all of `steps`.
            tokens: the step's tokens whose rows were computed, as `reads` chose them.
            states: [tokens, hidden].
        """
        try:
            starts = [0, *accumulate(len(fed) for _, fed, _ in steps)]
            cuts = np.searchsorted(tokens, starts).tolist()
            parts = zip(steps, evaluated or [fed for _, fed, _ in steps], starts, pairwise(cuts), strict=False)
            self._see(
                [
                    Seen(seq_id, n_past, len(kept), tokens[first:end] - start, states[first:end])
                    for (seq_id, _, n_past), kept, start, (first, end) in parts
                ]
            )
        except Exception:
            self._fail()

    @abstractmethod
    def reads(self, batch: RaggedBatch) -> npt.NDArray[np.int64]:
        """Return the indices of the step's tokens for which the drafter needs rows, in ascending order."""

    @abstractmethod
    def missed(self, seq_ids: Sequence[int]) -> None:
        """Note that the rows of a step were not computed, or that sequences ended."""

    @abstractmethod
    def copied(self, src: int, dst: int) -> None:
        """Note that `dst` shares all positions of `src` now."""

    @abstractmethod
    def _see(self, parts: Sequence[Seen]) -> None:
        """Take the parts' rows."""

    @abstractmethod
    def _read(self, parts: Sequence[G], *, with_logits: bool) -> tuple[StateRows | None, Largest, StateRows]:
        """Run the predictor; returns the logits and the rows of the last token of each part."""

    def _draw(
        self,
        parts: dict[int, G],
        samplers: dict[int, SamplerState],
        drafts: list[list[int]],
        lengths: Sequence[int],
    ) -> dict[int, G]:
        """Read the parts and append a draw to each draft; return the parts that draw the next tokens."""
        began = time.perf_counter()
        states = [samplers[i] for i in parts]
        rows, largest, hidden = self._read(
            list(parts.values()), with_logits=any(state.reads_logits for state in states)
        )
        drawn = choose(rows, largest, states, [part.position for part in parts.values()])
        following = {}
        for (i, part), draw, row in zip(parts.items(), drawn, hidden, strict=True):
            if draw.failed or draw.token_id >= self._vocab_size:
                continue
            drafts[i].append(draw.token_id)
            samplers[i].accept(draw.token_id)
            if len(drafts[i]) < lengths[i] and not samplers[i].is_slow:
                following[i] = part.following(draw.token_id, row)
        self._measured(began)
        return following

    def _fail(self) -> None:
        super()._fail()
        self.close()
