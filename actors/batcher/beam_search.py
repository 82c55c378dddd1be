"""BeamSearch: the search for the likeliest continuations of a prompt, by transformers' rules.

    search = BeamSearch(width=4, stop_ids=model.eos_token_ids, max_tokens=32)
    while not search.advance([top candidates of each running beam]):
        for source, target in search.moves: ...   # give each beam the KV of the one it continues
    search.best()

The length penalty is 1.0 and early_stopping is False, as in transformers. An ended beam's score is its
log-probability divided by its length. The search goes on while a running beam can still beat the worst of `width`
ended ones. This file computes no tensors. Scores are float32 as in transformers, so that ties rank the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Candidates = Sequence[tuple[int, float]]  # (token id, log-probability), likeliest first


@dataclass(slots=True)
class Beam:
    """One continuation.

    Args:
        slot: index, below the width, of the slot that holds its KV; meaningless for an ended beam.
        score: sum of its log-probabilities while it runs; divided by its length once it has ended.
        logits: the rows from which its tokens were chosen, where rows are kept.
    """

    slot: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    score: np.float32 = field(default_factory=lambda: np.float32(0))
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def extended(self, token_id: int, logprob: float, score: np.float32, row: npt.NDArray[np.float32] | None) -> "Beam":
        """Return the beam with one more token."""
        logits = self.logits if row is None else [*self.logits, row]
        return Beam(self.slot, [*self.tokens, token_id], [*self.logprobs, logprob], score, logits)


class BeamSearch:
    """The beams of one request.

    Args:
        width: the number of running beams, and of results.
        stop_ids: token ids that end a beam.
        max_tokens: length at which every beam ends.
    """

    def __init__(self, width: int, stop_ids: Collection[int], max_tokens: int) -> None:
        self.width = width
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.restart()

    def restart(self) -> None:
        """Discard all tokens after the prompt: the search is deterministic and runs again."""
        self.running = [Beam()]
        self.ended: list[Beam] = []  # best first
        self.moves: list[tuple[int, int]] = []
        self._drawn: dict[int, tuple[Candidates, npt.NDArray[np.float32] | None]] = {}

    @property
    def ended_by_stop(self) -> bool:
        """True if the best beam ended with a stop id; False if it ended at `max_tokens`."""
        return self.best()[0].tokens[-1] in self.stop_ids

    @property
    def num_candidates(self) -> int:
        """The number of likeliest tokens to consider for each beam, so that `width` of them do not end the beam."""
        return max(2, 1 + len(self.stop_ids)) * self.width

    @property
    def waiting(self) -> list[Beam]:
        """The running beams that have no candidates yet."""
        return [beam for beam in self.running if beam.slot not in self._drawn]

    def draw(self, slot: int, candidates: Candidates, row: npt.NDArray[np.float32] | None = None) -> bool:
        """Take the candidates of the beam at `slot`; return whether every running beam has its candidates now."""
        self._drawn[slot] = (candidates, row)
        return not self.waiting

    def advance(self) -> bool:
        """Continue with the best of all candidates; return whether the search is over.

        `moves` then lists (source, target) slots: a target copies the KV of its source. No target is a source.
        """
        candidates, self._drawn = self._best_candidates(), {}
        length = len(self.running[0].tokens) + 1
        ends = [length >= self.max_tokens or beam.tokens[-1] in self.stop_ids for beam in candidates]
        # Candidates beyond the width only replace beams that end; only the first `width` candidates may end.
        for beam, end in zip(candidates[: self.width], ends, strict=False):
            if end:
                beam.score = beam.score / np.float32(length)
                self.ended.append(beam)
        self.ended = sorted(self.ended, key=lambda beam: -beam.score)[: self.width]
        self.running = [beam for beam, end in zip(candidates, ends, strict=True) if not end][: self.width]
        if not self.running or self._cannot_improve(length):
            return True
        self._assign_slots()
        return False

    def best(self) -> list[Beam]:
        """Return the `width` best beams, best first; in a search cut short, ended beams precede running beams."""
        return [*self.ended, *self.running][: self.width]

    def _best_candidates(self) -> list[Beam]:
        scored = []
        for index, beam in enumerate(self.running):
            candidates, row = self._drawn[beam.slot]
            for token_id, logprob in candidates:
                scored.append((-(beam.score + np.float32(logprob)), index, token_id, logprob, row))
        scored.sort(key=lambda entry: entry[:3])
        return [
            self.running[index].extended(token_id, logprob, -minus, row)
            for minus, index, token_id, logprob, row in scored[: self.num_candidates]
        ]

    def _cannot_improve(self, length: int) -> bool:
        if len(self.ended) < self.width:
            return False
        return bool(self.running[0].score / np.float32(length) <= self.ended[-1].score)

    def _assign_slots(self) -> None:
        """Leave the first beam that continues another beam in that beam's slot; give free slots to its siblings."""
        kept: set[int] = set()
        siblings = []
        for beam in self.running:
            if beam.slot in kept:
                siblings.append(beam)
            kept.add(beam.slot)
        free = [slot for slot in range(self.width) if slot not in kept]
        self.moves = []
        for beam, target in zip(siblings, free, strict=False):
            self.moves.append((beam.slot, target))
            beam.slot = target
