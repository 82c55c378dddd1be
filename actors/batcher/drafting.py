"""Drafting: guess a sequence's next tokens and verify several in one step.

    drafts = RunDrafts(sequences, costs, max_rows=512)     # of one run of decode steps
    proposed = drafts.next()
    drafts.took(draws)

Guesses come from the sequence's grammar where it allows only one text, from prompt lookup in the sequence's own tokens,
from a draft model (nif/context/draft_model.py), the model's own multi-token head (nif/context/multi_token_head.py) or
an assistant (nif/context/assistant.py). Each sequence takes the best of these sources. A draft costs rows of a forward,
and each right token saves a step. Both are measured. A lookup guesses every token, drafted or not, which costs no
forward. The hit rates of a grammar, a draft model and a head are known from their verified drafts. The cost of a row
comes from the learned step time (actors/scheduling/plan.py). So drafting begins where it pays and ends where it
does not. All of this runs on the model's thread.
"""

from collections.abc import Sequence as ListOf
from itertools import takewhile
from math import inf

from genbatch.actors.batcher.generation import Generation
from genbatch.actors.scheduling.plan import StepTimeModel, StepWork
from genbatch.nif.context.drafters import DRAFTED_SEQUENCES, Drafted, Drafter
from genbatch.nif.sampling.prompt_lookup import PromptLookup
from genbatch.nif.sampling.sampler import Sampled, SampleFault

# With more sequences, a further row of a step costs as much as a first one.
MAX_SEQUENCES = DRAFTED_SEQUENCES
# With more sequences, prompt lookup had no measurable gain: all sequences seldom copy at once (ADR 93).
MAX_LOOKUPS = 2
# The most tokens of a draft. Longer drafts gain nothing, since a copied text seldom runs so long without a change.
MAX_DRAFT = 8
# A drafted token's chance must exceed its cost by this factor.
MARGIN = 1.25
# The least cost of a drafted token, in steps.
LEAST_PRICE = 0.02
# Each step without drafts lowers the price by this factor, so that a price measured too high is tried again.
FORGETTING = 0.998
# The weight of the newest token in the estimated share of forced tokens that are drawn.
NEWEST = 0.1
# The share by which drafts may lengthen a step while a sequence in it has no draft.
NEIGHBOURLY = 0.1


class DraftCosts:
    """The cost of a drafted token; all runs share it, since they share the machine.

    Args:
        times: the model of step time.
    """

    def __init__(self, times: StepTimeModel) -> None:
        self._times = times
        self._discount = 1.0

    def price(self, num_sequences: int, num_keys: int, guess_s: float = 0.0) -> float:
        """Return a drafted token's cost in plain steps of `num_sequences` sequences over `num_keys` positions.

        Args:
            guess_s: the seconds that guessing a token takes.
        """
        time = self._times.time
        if time is None:
            return inf  # the first step is the baseline, and has no drafts
        plain_s = time.seconds(StepWork(decodes=num_sequences, keys=num_keys))
        return max(LEAST_PRICE, self._discount * (time.draft + guess_s) / plain_s)

    def took(self, num_drafted: int) -> None:
        """Book a step; while nothing is drafted, the price falls so that drafting is tried again."""
        self._discount = 1.0 if num_drafted else FORGETTING * self._discount


class RunDrafts:
    """The drafts of one run.

    Args:
        sequences: the sequences of the run.
        costs: the costs that all runs share.
        max_rows: most tokens of a step.
        vocab_size: number of tokens that the model can evaluate. A tokenizer, and so a grammar, may have more.
        looks_up: whether prompt lookup guesses, too.
        drafter: the draft model; None without one.
    """

    def __init__(
        self,
        sequences: ListOf[Generation],
        costs: DraftCosts,
        *,
        max_rows: int,
        vocab_size: int,
        looks_up: bool = True,
        drafter: Drafter | None = None,
    ) -> None:
        self._lookups = [_lookup_of(sequence) for sequence in sequences] if looks_up else []
        self._drafter = drafter
        self._drafted: list[Drafted] = []
        self._sequences = sequences
        self._slots = [sequence.decode_slots[0] for sequence in sequences] if drafter is not None else []
        # The number of tokens that each sequence may still draw.
        self._left = [sequence.max_new_tokens - sequence.num_generated for sequence in sequences]
        self._lengths = [0] * len(sequences)  # of the draft model's current drafts
        self._num_forced = [0] * len(sequences)  # tokens of the current drafts that a grammar forces
        self._costs = costs
        self._max_drafted = max_rows - len(sequences)
        self._vocab_size = vocab_size
        self._num_keys = 0

    def begin(self) -> None:
        """Read the sequences' tokens before the first step, while no other thread appends to them."""
        for lookup, sequence in zip(self._lookups, self._sequences, strict=False):
            lookup.catch_up(sequence.tokens)
        self._num_keys += sum(len(sequence.tokens) for sequence in self._sequences)
        if self._drafter is not None:
            self._drafted = [
                Drafted(sequence.request_id, slot, list(sequence.tokens), sequence.sampler)
                for slot, sequence in zip(self._slots, self._sequences, strict=True)
            ]

    @property
    def seconds(self) -> float:
        """The seconds that the draft model has taken so far."""
        return 0.0 if self._drafter is None else self._drafter.seconds

    def next(self) -> list[list[int]]:
        """Return the draft of each sequence for the step that begins now; an empty list where no draft pays."""
        forced = [self._forced(sequence) for sequence in self._sequences]
        looked_up = [lookup.chance for lookup in self._lookups] or [0.0] * len(self._sequences)
        modelled = [0.0] * len(self._sequences)
        if self._drafter is not None:
            modelled = [self._drafter.chance(drafted.key) for drafted in self._drafted]
        chances = [max(pair) for pair in zip(looked_up, modelled, strict=True)]
        # A step draws one token more than it drafts, and no sequence may draw more than its limit.
        # guard: drafts end at the last token
        most = [min(MAX_DRAFT, left - 1) for left in self._left]
        for index, tokens in enumerate(forced):
            if tokens is None:
                most[index] = 0
            elif tokens:
                chances[index] = self._sequences[index].forced_chance
                most[index] = min(most[index], len(tokens))
        lengths = self._choose_lengths(chances, most)
        drafts: list[list[int]] = [[] for _ in self._sequences]
        for index, tokens in enumerate(forced):
            self._num_forced[index] = lengths[index] if tokens else 0
            if tokens:
                drafts[index] = tokens[: lengths[index]]
                lengths[index] = 0
            elif self._lookups and looked_up[index] >= modelled[index]:
                drafts[index] = self._lookups[index].draft(lengths[index])
                lengths[index] = 0
        if self._drafter is not None and any(lengths):
            proposed = self._drafter.propose(self._drafted, lengths)
            drafts = [mine or theirs for mine, theirs in zip(proposed, drafts, strict=True)]
            lengths = [len(draft) for draft in proposed]
        self._lengths = lengths
        return drafts if any(drafts) else []

    def took(self, draws: ListOf[ListOf[Sampled | SampleFault]], num_drafted: int) -> bool:
        """Book a step that has ended; return whether every sequence may draw another token."""
        self._costs.took(num_drafted)
        self._num_keys += sum(map(len, draws))
        for index, drawn in enumerate(draws):
            self._left[index] -= len(drawn)
            tokens = [draw.token_id for draw in drawn if not draw.failed]
            if num_drafted:
                self._learn(index, len(drawn) - 1)
            if self._lookups:
                for token_id in tokens:
                    self._lookups[index].push(token_id)
            if self._drafter is not None:
                drafted = self._drafted[index]
                self._drafter.verified(drafted.key, self._lengths[index] if num_drafted else 0, len(drawn) - 1)
                drafted.tokens.extend(tokens)
        return all(left > 0 for left in self._left)

    def _forced(self, sequence: Generation) -> list[int] | None:
        """Return the next tokens that the sequence's grammar forces, as many as a draft may have; None for no draft."""
        try:
            tokens = sequence.sampler.forced()
        except Exception:
            return None  # the sequence's next draw meets this error, and it fails that sequence alone
        # guard: no drafted token is outside the model's vocabulary
        return list(takewhile(lambda token: token < self._vocab_size, tokens[:MAX_DRAFT]))

    def _learn(self, index: int, num_right: int) -> None:
        """Learn from a verified draft how often a sequence draws the tokens that its grammar forces."""
        sequence = self._sequences[index]
        for place in range(min(self._num_forced[index], num_right + 1)):
            sequence.forced_chance += NEWEST * ((place < num_right) - sequence.forced_chance)

    def _choose_lengths(self, chances: list[float], most: list[int]) -> list[int]:
        """Choose the number of tokens to draft for each sequence, so that tokens per second are highest."""
        size = len(self._sequences)
        lengths = [0] * size
        if max(chances) == 0.0:
            return lengths
        guess_s = 0.0 if self._drafter is None else self._drafter.forward_s / size
        price = self._costs.price(size, self._num_keys, guess_s)
        lengths = self._share_out(chances, most, price, self._max_drafted)
        if 0 in lengths:
            lengths = self._share_out(chances, most, price, min(self._max_drafted, int(NEIGHBOURLY / price)))
        return lengths

    @staticmethod
    def _share_out(chances: ListOf[float], most: ListOf[int], price: float, max_drafted: int) -> list[int]:
        lengths, gains = [0] * len(chances), list(chances)
        tokens, steps = float(len(chances)), 1.0  # the tokens that the step yields, and its cost in steps
        while sum(lengths) < max_drafted:
            best = max(range(len(gains)), key=gains.__getitem__)
            if gains[best] < 0.0 or gains[best] <= MARGIN * price * tokens / steps:
                break
            if lengths[best] >= most[best]:
                gains[best] = -1.0
                continue
            lengths[best] += 1
            tokens += gains[best]
            steps += price
            gains[best] *= chances[best]
        return lengths


def _lookup_of(sequence: Generation) -> PromptLookup:
    if sequence.lookup is None:
        sequence.lookup = PromptLookup()
    return sequence.lookup
