"""DraftModel: a small model that guesses the next tokens of a few sequences, for a larger model to verify.

    draft_model = DraftModel(context)                       # of the small model
    guesses = draft_model.propose([Drafted(7, tokens, sampler), ...], lengths=[4, ...])

The draft model draws with a fork of the sequence's own sampler: the same parameters, seed, positions, penalties and
grammar. So its draw equals the large model's draw wherever both give nearly the same probabilities, at every
temperature. All of this runs on the thread of the large model.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from genbatch.nif.context.context import Context
from genbatch.nif.context.drafters import DRAFTED_SEQUENCES, Drafted, Drafter
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.runner import Entry, Logits
from genbatch.nif.sampling.sampler import SamplerState

# Each drafted sequence has a sequence in the draft model's context, and a scratch sequence for its draft.
NUM_SLOTS = 2 * DRAFTED_SEQUENCES
# The most tokens of a prompt that the draft model reads between two steps of the large model, so that no gap between
# two tokens grows much.
MAX_CATCH_UP = 64


@dataclass(slots=True)
class _Follower:
    """A sequence of the draft model.

    Args:
        seq_id: its slot in the draft model's context.
        evaluated: the number of the sequence's tokens in the slot.
    """

    seq_id: int
    evaluated: int = 0


class DraftModel(Drafter):
    """Follows up to `DRAFTED_SEQUENCES` sequences, the most recent ones, in a context of its own; see `Drafter`.

    Args:
        context: the draft model's context, of `NUM_SLOTS` sequences; DraftModel closes it.
        vocab_size: the width of the large model's logits; no token beyond it is drafted.
    """

    name = "draft model"

    def __init__(self, context: Context, vocab_size: int) -> None:
        self._ctx = context
        self._followers: OrderedDict[int, _Follower] = OrderedDict()  # by key, the least recently used first
        self._free = list(range(DRAFTED_SEQUENCES))
        self._scratch = list(range(DRAFTED_SEQUENCES, NUM_SLOTS))
        self._vocab_size = vocab_size
        super().__init__()

    def close(self) -> None:
        """Release the draft model's KV pool."""
        self._ctx.close()

    def _rehearse(self) -> None:
        self._ctx.rehearse(1)

    def _propose(self, sequences: Sequence[Drafted], lengths: Sequence[int], drafts: list[list[int]]) -> None:
        try:
            self._draft(sequences, lengths, drafts)
        except OutOfBlocks:
            for key in list(self._followers):
                self._forget(key)

    def _draft(self, sequences: Sequence[Drafted], lengths: Sequence[int], drafts: list[list[int]]) -> None:
        samplers: dict[int, SamplerState] = {}  # forks, which accept what is drafted
        drafting = scratch = self._first_tokens(sequences, lengths, samplers, drafts)
        # Further tokens go into scratch sequences. So the followers hold only tokens that the large model drew, and
        # their windows and recurrent states never go back.
        for i in drafting:
            self._ctx.seq_cp(self._followers[sequences[i].key].seq_id, self._scratch[i])
        try:
            while drafting:
                batch = {
                    i: Entry(
                        self._scratch[i],
                        (drafts[i][-1],),
                        len(sequences[i].tokens) + len(drafts[i]) - 1,
                        Logits.LAST,
                    )
                    for i in drafting
                }
                began = time.perf_counter()
                drawn = self._draw(batch, samplers, drafts)
                self._measured(began)
                drafting = [i for i in drawn if len(drafts[i]) < lengths[i]]
        finally:
            for i in scratch:
                self._ctx.seq_rm(self._scratch[i])

    def _first_tokens(
        self,
        sequences: Sequence[Drafted],
        lengths: Sequence[int],
        samplers: dict[int, SamplerState],
        drafts: list[list[int]],
    ) -> list[int]:
        """Evaluate the followers' missing tokens and draft one token each; return the sequences that draft more."""
        batch: dict[int, Entry] = {}
        is_reading = False
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            if not length or len(sequence.tokens) + length > self._ctx.max_positions:
                continue
            follower = self._follow(sequence.key, sequences)
            missing = sequence.tokens[follower.evaluated :]
            if len(missing) <= MAX_CATCH_UP:
                batch[i] = Entry(follower.seq_id, missing, follower.evaluated, Logits.LAST)
                samplers[i] = sequence.sampler.fork(logprobs=None)
            elif not is_reading:
                is_reading = True
                self._ctx.eval([Entry(follower.seq_id, missing[:MAX_CATCH_UP], follower.evaluated, Logits.NONE)])
                follower.evaluated += MAX_CATCH_UP
        drawn = self._draw(batch, samplers, drafts) if batch else []
        for i in batch:
            self._followers[sequences[i].key].evaluated = len(sequences[i].tokens)
        return [i for i in drawn if lengths[i] > 1]

    def _draw(
        self, batch: Mapping[int, Entry], samplers: Mapping[int, SamplerState], drafts: Sequence[list[int]]
    ) -> list[int]:
        """Run a forward and append each draw to its draft; return the indices of the sequences that can draft more."""
        _, draws = self._ctx.step(list(batch.values()), [samplers[i] for i in batch], with_logits=False)
        drawn = []
        for i, draw in zip(batch, draws, strict=True):
            if draw is not None and not draw.failed and draw.token_id < self._vocab_size:
                drafts[i].append(draw.token_id)
                samplers[i].accept(draw.token_id)
                if not samplers[i].is_slow:
                    drawn.append(i)
        return drawn

    def _follow(self, key: int, sequences: Sequence[Drafted]) -> _Follower:
        """Return the sequence's follower; a new one takes the slot of the least recently used."""
        follower = self._followers.get(key)
        if follower is None:
            if not self._free:
                current = {sequence.key for sequence in sequences}
                self._forget(next(other for other in self._followers if other not in current))
            follower = self._followers[key] = _Follower(self._free.pop())
        self._followers.move_to_end(key)
        return follower

    def _forget(self, key: int) -> None:
        seq_id = self._followers.pop(key).seq_id
        self._ctx.seq_rm(seq_id)
        self._free.append(seq_id)
