"""MultiTokenHead: a model's own layer of multi-token prediction (MTP) guesses tokens, for the model to verify.

    head = MultiTokenHead(runner, kv, vocab_size)
    head.saw(entries, states)                                    # after each step of few sequences
    guesses = head.propose([Drafted(7, 0, tokens, sampler), ...], lengths=[2, ...])

The layer reads the token at position p + 1 and the row in front of the model's head at p, and guesses the token at
p + 2. Its keys for p lie in the model's own blocks, so that forks, pauses and the prefix cache bring them along.

    model        x0  x1  x2  x3                       its rows in front of the head: h0 h1 h2 h3
    layer        x1h0 x2h1 x3h2 x4h3 -> d5            x4 is drawn, and d5 is the first guess
                                     d5g3 -> d6       g3: the layer's own row; behind the positions that are reserved

Rows wait here until the layer reads them, several at once. A guess changes no answer. So where rows are missing the
layer begins to read after the gap.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from genbatch.nif.context.drafters import DRAFTED_SEQUENCES, NEWEST_TIME, Drafted, HitRates
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import Largest, PredictingRunner, RaggedBatch
from genbatch.nif.sampling.choice import choose
from genbatch.nif.sampling.sampler import SamplerState

log = logging.getLogger("genbatch")

StateRows = npt.NDArray[np.float32]

# With this many rows of a sequence the layer reads them at once, without a draft.
MAX_WAITING = 32
# The share of a block's positions, as a divisor, that may lack the layer's keys: more of them are a gap.
GAP = 8


@dataclass(slots=True)
class _Waiting:
    """A sequence's rows that the layer has not read.

    Args:
        first: the position of the first row.
        rows: [positions, hidden] each, one after another.
    """

    first: int
    rows: list[StateRows]

    @property
    def end(self) -> int:
        """Return the position after the last row."""
        return self.first + sum(map(len, self.rows))


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions of one sequence that the layer reads.

    Args:
        begin: the position that the layer takes for the sequence's first one; it begins a block.
        first: the first position to read.
        tokens: of each position the token that follows.
        states: [positions, hidden].
    """

    seq_id: int
    begin: int
    first: int
    tokens: Sequence[int]
    states: StateRows


class MultiTokenHead:
    """Follows the steps of up to `DRAFTED_SEQUENCES` sequences. Implements `Drafter`.

    An error of the layer never fails a request: it is logged once, and drafting ends.

    Args:
        runner: computes the layer.
        kv: holds the sequences, none so far.
        vocab_size: the width of the logits.
    """

    def __init__(self, runner: PredictingRunner, kv: KVCache, vocab_size: int) -> None:
        assert runner.mtp_group is not None
        self._runner = runner
        self._kv = kv
        self._group = runner.mtp_group
        self._vocab_size = vocab_size
        self._waiting: dict[int, _Waiting] = {}  # by seq_id
        self._has_failed = False
        self._rates = HitRates()
        self.seconds = 0.0  # spent on drafts, in all
        self._rehearse()  # touches the layer's weights
        self.forward_s = self._rehearse()

    def chance(self, key: int) -> float:
        """Return the estimated probability that a drafted token of this sequence is right."""
        return 0.0 if self._has_failed else self._rates.chance(key)

    def verified(self, key: int, num_drafted: int, num_right: int) -> None:
        """Learn from a step of the model: how many of the drafted tokens were right."""
        self._rates.verified(key, num_drafted, num_right)

    def close(self) -> None:
        """Forget all rows."""
        self._waiting.clear()

    def _rehearse(self) -> float:
        """Return the seconds of a forward that drafts one token."""
        began = time.perf_counter()
        reservation = self._kv.reserve([(0, (0,), 0)])
        try:
            part = _Part(0, 0, 0, (0,), np.zeros((1, self._runner.hidden_size), np.float32))
            self._read([part], draws=True, with_logits=False)
        finally:
            reservation.rollback()
            self._runner.predicted[:] = False
        return time.perf_counter() - began

    # The model's steps

    def follows(self, num_sequences: int) -> bool:
        """Whether the layer reads the rows of a step of so many sequences; more of them would wait too long for it."""
        return num_sequences <= DRAFTED_SEQUENCES and not self._has_failed

    def saw(self, entries: Sequence[tuple[int, int, int]], states: Sequence[StateRows]) -> None:
        """Take the rows of a step that was committed.

        Args:
            entries: each sequence's slot, the positions that it had, and the positions that were added.
            states: each sequence's rows, [tokens of the step, hidden]; those of the added positions come first.
        """
        try:
            parts = []
            for (seq_id, n_past, count), rows in zip(entries, states, strict=True):
                waiting = self._waiting.get(seq_id)
                if waiting is None or waiting.end != n_past:
                    waiting = self._waiting[seq_id] = _Waiting(n_past, [])
                waiting.rows.append(rows[:count].copy())  # a view would keep the whole step's rows in memory
                if waiting.end - waiting.first > MAX_WAITING:
                    parts += self._take(seq_id, self._kv.tokens(seq_id), waiting)
            if parts:
                self._read(parts, draws=False, with_logits=False)
        except Exception:
            self._fail()

    def missed(self, seq_ids: Sequence[int]) -> None:
        """Note that the rows of a step were not computed."""
        for seq_id in seq_ids:
            self._waiting.pop(seq_id, None)

    def copied(self, src: int, dst: int) -> None:
        """Let `dst`, which shares all positions of `src` now, have the rows that wait for `src`."""
        waiting = self._waiting.get(src)
        if waiting is None:
            self._waiting.pop(dst, None)
        else:
            self._waiting[dst] = _Waiting(waiting.first, list(waiting.rows))

    # Drafts

    def propose(self, sequences: Sequence[Drafted], lengths: Sequence[int]) -> list[list[int]]:
        """Draft up to `lengths[i]` tokens for each sequence; [] where the newest row is missing."""
        began = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in sequences]
        try:
            self._propose(sequences, lengths, drafts)
        except OutOfBlocks:
            pass  # the first tokens of the drafts need no further block
        except Exception:
            self._fail()
            return [[] for _ in sequences]
        finally:
            self.seconds += time.perf_counter() - began
        return drafts

    def _propose(self, sequences: Sequence[Drafted], lengths: Sequence[int], drafts: list[list[int]]) -> None:
        parts: dict[int, _Part] = {}
        samplers = {}
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            waiting = self._waiting.get(sequence.seq_id)
            if not length or waiting is None or waiting.end != len(sequence.tokens) - 1:
                continue
            for part in self._take(sequence.seq_id, sequence.tokens, waiting):
                parts[i], samplers[i] = part, sequence.sampler.fork(logprobs=None)
        if not parts:
            return
        parts = self._draw(parts, samplers, drafts, lengths)
        if not parts:
            return
        # The next guesses are read behind the sequences' ends, in blocks that they give back at once.
        reservation = self._kv.reserve(
            [(part.seq_id, (0,) * (lengths[i] - 1), part.first) for i, part in parts.items()]
        )
        try:
            for group, pairs in enumerate(reservation.copies):
                if pairs:
                    self._runner.copy_blocks(group, pairs)
            while parts:
                parts = self._draw(parts, samplers, drafts, lengths)
        finally:
            reservation.rollback()

    def _draw(
        self,
        parts: dict[int, _Part],
        samplers: dict[int, SamplerState],
        drafts: list[list[int]],
        lengths: Sequence[int],
    ) -> dict[int, _Part]:
        """Read the parts and append a draw to each draft; return the parts that draw the next tokens."""
        began = time.perf_counter()
        states = [samplers[i] for i in parts]
        rows, largest, hidden = self._read(
            list(parts.values()), draws=True, with_logits=any(state.reads_logits for state in states)
        )
        ends = [part.first + len(part.tokens) for part in parts.values()]
        drawn = choose(rows, largest, states, [end + 1 for end in ends])
        following = {}
        for (i, part), end, draw, row in zip(parts.items(), ends, drawn, hidden, strict=True):
            if draw.failed or draw.token_id >= self._vocab_size:
                continue
            drafts[i].append(draw.token_id)
            samplers[i].accept(draw.token_id)
            if len(drafts[i]) < lengths[i] and not samplers[i].is_slow:
                following[i] = _Part(part.seq_id, part.begin, end, (draw.token_id,), row[None])
        self.forward_s += NEWEST_TIME * (time.perf_counter() - began - self.forward_s)
        return following

    # The layer

    def _take(self, seq_id: int, tokens: Sequence[int], waiting: _Waiting) -> list[_Part]:
        """Take the waiting rows that have a following token; return them as a part, or nothing behind a gap.

        Args:
            tokens: of the sequence; one more than the sequence holds if the next one was drawn.
        """
        end = min(waiting.end, len(tokens) - 1)
        rows = np.concatenate(waiting.rows)
        taken = rows[: end - waiting.first]
        first, waiting.first, waiting.rows = waiting.first, end, [rows[end - waiting.first :].copy()]
        begin = self._begin(seq_id, first)
        if begin > first:  # the rows up to the next block follow a gap in their own
            first, taken = begin, taken[begin - first :]
        if not len(taken):
            return []
        return [_Part(seq_id, begin, first, tokens[first + 1 : end + 1], taken)]

    def _begin(self, seq_id: int, first: int) -> int:
        """Return the position from which the layer's keys are there without a gap; beyond `first` in the next block."""
        size = self._kv.block_size
        blocks = self._blocks(seq_id)[: -(-first // size)]
        there = self._runner.predicted[blocks]
        if first % size:
            there[-1, first % size :] = True
        missing = size - there.sum(axis=1)
        gaps = np.flatnonzero(missing > size // GAP)
        return int(gaps[-1] + 1) * size if gaps.size else 0

    def _read(
        self, parts: Sequence[_Part], *, draws: bool, with_logits: bool
    ) -> tuple[StateRows | None, Largest, StateRows]:
        """Run the layer over the parts; returns logits and rows of the last position of each part if it `draws`."""
        size, num_groups = self._kv.block_size, len(self._kv.groups)
        counts = np.array([len(part.tokens) for part in parts], np.int64)
        n_past = np.array([part.first - part.begin for part in parts], np.int64)
        ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(parts)), counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts - n_past, counts)
        kv_lens = n_past + counts
        table = np.zeros((len(parts), -(-int(kv_lens.max()) // size)), np.int32)
        for row, part in zip(table, parts, strict=True):
            own = self._blocks(part.seq_id)[part.begin // size :][: len(row)]
            row[: len(own)] = own
        slots = table[owner, positions // size].astype(np.int64) * size + positions % size
        # The layer reads no other group.
        unused = np.zeros_like(table), np.zeros_like(slots)
        batch = RaggedBatch(
            input_ids=np.concatenate([np.asarray(part.tokens, np.int64) for part in parts]),
            positions=positions,
            query_starts=np.concatenate(([0], ends)).astype(np.int32),
            kv_lens=kv_lens.astype(np.int32),
            slots=tuple(slots if group == self._group else unused[1] for group in range(num_groups)),
            block_tables=tuple(table if group == self._group else unused[0] for group in range(num_groups)),
            logit_rows=ends - 1 if draws else np.empty(0, np.int64),
            max_query_len=int(counts.max()),
            max_kv_len=int(kv_lens.max()),
        )
        return self._runner.predict(batch, np.concatenate([part.states for part in parts]), with_logits=with_logits)

    def _blocks(self, seq_id: int) -> npt.NDArray[np.int32]:
        # A copy: an error keeps the arrays of its frames, and a table with a view cannot be rolled back.
        return np.array(self._kv.block_table(self._group, seq_id), np.int32)

    def _fail(self) -> None:
        log.exception("the multi-token head failed; it drafts nothing from now on")
        self._has_failed = True
        self._waiting.clear()
