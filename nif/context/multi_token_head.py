"""MultiTokenHead: a model's own layer of multi-token prediction (MTP) guesses tokens, for the model to verify.

    head = MultiTokenHead(runner, kv, vocab_size)
    head.stepped(steps, None, head.reads(batch), states)         # after each step of a few sequences
    guesses = head.propose([Drafted(7, 0, tokens, sampler), ...], lengths=[2, ...])

The layer reads the token at position p + 1 and the row in front of the model's head at p, and guesses the token at
p + 2. Its keys for p lie in the model's own blocks, so forks, pauses and the prefix cache keep them.

    model        x0  x1  x2  x3                       its rows in front of the head: h0 h1 h2 h3
    layer        x1h0 x2h1 x3h2 x4h3 -> d5            x4 is drawn, and d5 is the first guess
                                     d5g3 -> d6       g3: the layer's own row; d5 has no reserved position

Rows wait here until the layer reads several of them at once. A guess changes no answer. So if rows are missing, the
layer begins to read after the gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from genbatch.nif.context.drafters import Drafted, Seen, StateDrafter, StateRows
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import Largest, PredictingRunner, RaggedBatch

# When this many rows of a sequence wait, the layer reads them without a draft.
MAX_WAITING = 32
# One part in GAP of a block's positions may lack the layer's keys; with more the block is a gap.
GAP = 8


@dataclass(slots=True)
class _Waiting:
    """A sequence's rows that the layer has not read.

    Args:
        first: the position of the first row.
        rows: arrays [positions, hidden] of consecutive positions.
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
        tokens: the token after each position.
        states: [positions, hidden].
    """

    seq_id: int
    begin: int
    first: int
    tokens: Sequence[int]
    states: StateRows

    @property
    def position(self) -> int:
        """See `Guess`."""
        return self.first + len(self.tokens) + 1

    def following(self, token_id: int, state: StateRows) -> "_Part":
        """See `Guess`."""
        return _Part(self.seq_id, self.begin, self.position - 1, (token_id,), state[None])


class MultiTokenHead(StateDrafter[_Part]):
    """Guesses with the model's own layer of multi-token prediction; see `StateDrafter`."""

    name = "multi-token head"

    def __init__(self, runner: PredictingRunner, kv: KVCache, vocab_size: int) -> None:
        assert runner.mtp_group is not None
        self._group = runner.mtp_group
        self._waiting: dict[int, _Waiting] = {}  # by seq_id
        super().__init__(runner, kv, vocab_size)

    def close(self) -> None:
        """Forget all rows."""
        self._waiting.clear()

    def _rehearse(self) -> None:
        reservation = self._kv.reserve([(0, (0,), 0)])
        try:
            self._read([_Part(0, 0, 0, (0,), np.zeros((1, self.runner.hidden_size), np.float32))], with_logits=False)
        finally:
            reservation.rollback()
            self.runner.predicted[:] = False

    # The model's steps

    def reads(self, batch: RaggedBatch) -> npt.NDArray[np.int64]:
        """See `StateDrafter`: all rows, because the layer has keys for each position."""
        return np.arange(batch.input_ids.size)

    def _see(self, parts: Sequence[Seen]) -> None:
        read = []
        for part in parts:
            waiting = self._waiting.get(part.seq_id)
            if waiting is None or waiting.end != part.n_past:
                waiting = self._waiting[part.seq_id] = _Waiting(part.n_past, [])
            waiting.rows.append(part.states[: part.count].copy())  # a view would keep the whole step's rows in memory
            if waiting.end - waiting.first > MAX_WAITING:
                read += self._take(part.seq_id, self._kv.tokens(part.seq_id), waiting)
        if read:
            self._read(read, draws=False, with_logits=False)

    def missed(self, seq_ids: Sequence[int]) -> None:
        """See `StateDrafter`."""
        for seq_id in seq_ids:
            self._waiting.pop(seq_id, None)

    def copied(self, src: int, dst: int) -> None:
        """See `StateDrafter`: the rows that wait for `src` wait for `dst`, too."""
        waiting = self._waiting.get(src)
        if waiting is None:
            self._waiting.pop(dst, None)
        else:
            self._waiting[dst] = _Waiting(waiting.first, list(waiting.rows))

    # Drafts

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
        try:
            reservation = self._kv.reserve(
                [(part.seq_id, (0,) * (lengths[i] - 1), part.first) for i, part in parts.items()]
            )
        except OutOfBlocks:
            return
        try:
            for group, pairs in enumerate(reservation.copies):
                if pairs:
                    self.runner.copy_blocks(group, pairs)
            while parts:
                parts = self._draw(parts, samplers, drafts, lengths)
        finally:
            reservation.rollback()

    # The layer

    def _take(self, seq_id: int, tokens: Sequence[int], waiting: _Waiting) -> list[_Part]:
        """Take the waiting rows that have a following token; return them as a part, or nothing behind a gap.

        Args:
            tokens: the sequence's tokens; the last one was drawn and has no position yet, if there is one more.
        """
        end = min(waiting.end, len(tokens) - 1)
        rows = np.concatenate(waiting.rows)
        taken = rows[: end - waiting.first]
        first, waiting.first, waiting.rows = waiting.first, end, [rows[end - waiting.first :].copy()]
        begin = self._begin(seq_id, first)
        if begin > first:  # the rows up to the next block follow a gap in their own block
            first, taken = begin, taken[begin - first :]
        if not len(taken):
            return []
        return [_Part(seq_id, begin, first, tokens[first + 1 : end + 1], taken)]

    def _begin(self, seq_id: int, first: int) -> int:
        """Return the position from which the layer has keys without a gap; after a gap, the next block's first one."""
        size = self._kv.block_size
        blocks = self._blocks(seq_id)[: -(-first // size)]
        there = self.runner.predicted[blocks]
        if first % size:
            there[-1, first % size :] = True
        missing = size - there.sum(axis=1)
        gaps = np.flatnonzero(missing > size // GAP)
        return int(gaps[-1] + 1) * size if gaps.size else 0

    def _read(
        self, parts: Sequence[_Part], *, with_logits: bool, draws: bool = True
    ) -> tuple[StateRows | None, Largest, StateRows]:
        """See `StateDrafter`; without `draws` it only writes the layer's keys."""
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
        return self.runner.predict(batch, np.concatenate([part.states for part in parts]), with_logits=with_logits)

    def _blocks(self, seq_id: int) -> npt.NDArray[np.int32]:
        # The array is a copy: an error keeps its frames' arrays, and a table with a view cannot be rolled back.
        return np.array(self._kv.block_table(self._group, seq_id), np.int32)
