"""Drafting: what a sequence may say next is looked up in what it has said, and checked several tokens at a time.

    drafts = RunDrafts(sequences, costs, max_rows=512)     # of one run of decode steps
    proposed = drafts.next()
    drafts.took(draws)

A draft costs rows of a forward and saves a step where it is right. Both are measured: how often a lookup is right by
letting it guess every token, drafted or not, which costs no forward; what a row costs by the one model of step time
(nif/step_time.py). So drafts begin where they pay and end by themselves where they do not. All of this is for the
model's thread.
"""

from collections.abc import Sequence as ListOf
from math import inf

from genbatch.actors.batcher.generation import Generation
from genbatch.nif.sampling.sampler import Sampled, SampleFault
from genbatch.nif.step_costs import StepWork
from genbatch.nif.step_time import StepTimeModel

# With more sequences a step's further rows cost as much as its first ones do.
MAX_SEQUENCES = 4
# Tokens of a draft at most; longer ones bring no more, since a copy is seldom without a change for so long.
MAX_DRAFT = 8
# How much more likely than its cost a drafted token must be.
MARGIN = 1.25
# What a drafted token adds to a step, in steps, at least.
LEAST_PRICE = 0.02
# With each plain step a price comes down by so much: one that was measured too high is tried again.
FORGETTING = 0.998
# By what share a step may take longer for drafts while somebody in it has none.
NEIGHBOURLY = 0.1


class DraftCosts:
    """What a drafted token adds to a step: one for all runs, as the machine is the same.

    Args:
        times: what steps cost.
    """

    def __init__(self, times: StepTimeModel) -> None:
        self._times = times
        self._discount = 1.0

    def price(self, num_sequences: int, num_keys: int) -> float:
        """What a drafted token adds to a step of so many sequences over so many positions, in such steps."""
        time = self._times.time
        if time is None:
            return inf  # a step without drafts comes first, to compare with
        plain_s = time.seconds(StepWork(decodes=num_sequences, keys=num_keys))
        return max(LEAST_PRICE, self._discount * time.draft / plain_s)

    def took(self, num_drafted: int) -> None:
        """Books a step: while nothing is drafted, drafts are tried at ever lower prices."""
        self._discount = 1.0 if num_drafted else FORGETTING * self._discount


class RunDrafts:
    """The drafts of one run.

    Args:
        sequences: those of the run.
        costs: of all runs.
        max_rows: most tokens of a step.
    """

    def __init__(self, sequences: ListOf[Generation], costs: DraftCosts, *, max_rows: int) -> None:
        self._lookups = [sequence.lookup for sequence in sequences]
        self._sequences = sequences
        # How many tokens each may still draw.
        self._left = [sequence.max_new_tokens - sequence.num_generated for sequence in sequences]
        self._costs = costs
        self._max_drafted = max_rows - len(sequences)
        self._num_keys = 0

    def begin(self) -> None:
        """Before the first step, while nobody appends to the sequences' tokens."""
        for sequence, lookup in zip(self._sequences, self._lookups, strict=True):
            lookup.catch_up(sequence.tokens)
            self._num_keys += len(sequence.tokens)

    def next(self) -> list[list[int]]:
        """What to draft in the step that begins now, for each sequence; nothing at all where none of it would pay."""
        lengths = self._lengths()
        drafts = [lookup.draft(length) for lookup, length in zip(self._lookups, lengths, strict=True)]
        return drafts if any(drafts) else []

    def took(self, draws: ListOf[ListOf[Sampled | SampleFault]], num_drafted: int) -> bool:
        """Books a step, which has ended now; returns whether every sequence may draw another token."""
        self._costs.took(num_drafted)
        self._num_keys += sum(map(len, draws))
        for index, (lookup, drawn) in enumerate(zip(self._lookups, draws, strict=True)):
            self._left[index] -= len(drawn)
            for draw in drawn:
                if not draw.failed:
                    lookup.push(draw.token_id)
        return all(left > 0 for left in self._left)

    def _lengths(self) -> list[int]:
        """How many tokens to draft for each sequence: as many as make the most tokens of the time."""
        size = len(self._sequences)
        chances = [
            # What a sampler makes of logits by the tokens before is not known for several tokens at once.
            # guard: what the tokens before edit is not drafted
            0.0 if sequence.sampler.edits else lookup.chance
            for sequence, lookup in zip(self._sequences, self._lookups, strict=True)
        ]
        lengths = [0] * size
        if max(chances) == 0.0:
            return lengths
        price = self._costs.price(size, self._num_keys)
        lengths = self._share_out(chances, price, self._max_drafted)
        if 0 in lengths:
            lengths = self._share_out(chances, price, min(self._max_drafted, int(NEIGHBOURLY / price)))
        return lengths

    def _share_out(self, chances: ListOf[float], price: float, most: int) -> list[int]:
        lengths, gains = [0] * len(chances), list(chances)
        tokens, steps = float(len(chances)), 1.0  # what the step is to bring, and what it takes
        while sum(lengths) < most:
            best = max(range(len(gains)), key=gains.__getitem__)
            if gains[best] < 0.0 or gains[best] <= MARGIN * price * tokens / steps:
                break
            # A step draws one token more than it drafts, and nobody draws more than it may.
            # guard: nobody's draft goes beyond its last token
            if lengths[best] >= min(MAX_DRAFT, self._left[best] - 1):
                gains[best] = -1.0
                continue
            lengths[best] += 1
            tokens += gains[best]
            steps += price
            gains[best] *= chances[best]
        return lengths
