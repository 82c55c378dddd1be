"""Assistant: a small model that reads the model's keys guesses tokens, for the model to verify (Gemma 4).

    assistant = Assistant(runner, kv, vocab_size)
    assistant.stepped(steps, None, assistant.reads(batch), states)      # after each step of a few sequences
    guesses = assistant.propose([Drafted(7, 0, tokens, sampler), ...], lengths=[2, ...])

The assistant reads the newest token, and the row that the model had in front of its head one position before. Its
layers attend to the keys and values in the blocks of the model's last layers. It writes no keys of its own:

    model        x0  x1  x2  x3                 its keys, and the row h3 in front of the head
    assistant    x4h3 -> d5   d5g -> d6         x4 is drawn, and d5 is the first guess; g: the assistant's own row

All guesses of a draft are made at the position of x4, over the same keys. So guesses need no blocks, and the code that
shares, copies, saves and restores the model's blocks does not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from genbatch.nif.context.drafters import Drafted, Seen, StateDrafter, StateRows
from genbatch.nif.context.runs import block_tables
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import Largest, PredictingRunner, RaggedBatch


@dataclass(frozen=True, slots=True)
class _Newest:
    """What the assistant reads of one sequence.

    Args:
        num_keys: the number of positions whose keys it reads.
        token: the newest token, or the last guess.
        state: [hidden], the row that belongs to `token`.
        position: the position of the token that is guessed.
    """

    seq_id: int
    num_keys: int
    token: int
    state: StateRows
    position: int

    def following(self, token_id: int, state: StateRows) -> "_Newest":
        """See `Guess`."""
        return replace(self, token=token_id, state=state, position=self.position + 1)


class Assistant(StateDrafter[_Newest]):
    """Guesses with the runner's assistant; see `StateDrafter`."""

    name = "assistant"

    def __init__(self, runner: PredictingRunner, kv: KVCache, vocab_size: int) -> None:
        self._newest: dict[int, tuple[int, StateRows]] = {}  # by seq_id: its positions, and the row of the last one
        super().__init__(runner, kv, vocab_size)

    def reads(self, batch: RaggedBatch) -> npt.NDArray[np.int64]:
        """See `StateDrafter`: only the rows that are drawn from, because a guess follows a draw."""
        return np.unique(batch.logit_rows)

    def missed(self, seq_ids: Sequence[int]) -> None:
        """See `StateDrafter`."""
        for seq_id in seq_ids:
            self._newest.pop(seq_id, None)

    def copied(self, src: int, dst: int) -> None:
        """See `StateDrafter`."""
        self.missed([dst])
        if src in self._newest:
            self._newest[dst] = self._newest[src]

    def close(self) -> None:
        """Forget all rows."""
        self._newest.clear()

    def _see(self, parts: Sequence[Seen]) -> None:
        for part in parts:
            self.missed([part.seq_id])
            for state in part.states[part.places == part.count - 1]:
                self._newest[part.seq_id] = part.n_past + part.count, state.copy()

    def _propose(self, sequences: Sequence[Drafted], lengths: Sequence[int], drafts: list[list[int]]) -> None:
        parts, samplers = {}, {}
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            num_keys, state = self._newest.get(sequence.seq_id, (0, None))
            count = len(sequence.tokens)
            if length and state is not None and num_keys == count - 1:
                parts[i] = _Newest(sequence.seq_id, num_keys, sequence.tokens[-1], state, count)
                samplers[i] = sequence.sampler.fork(logprobs=None)
        while parts:
            parts = self._draw(parts, samplers, drafts, lengths)

    def _read(self, parts: Sequence[_Newest], *, with_logits: bool) -> tuple[StateRows | None, Largest, StateRows]:
        count = len(parts)
        keys = np.array([part.num_keys for part in parts], np.int64)
        width, groups = -(-int(keys.max()) // self._kv.block_size), range(len(self._kv.groups))
        seq_ids = [part.seq_id for part in parts]
        batch = RaggedBatch(
            input_ids=np.array([part.token for part in parts], np.int64),
            positions=keys,
            query_starts=np.arange(count + 1, dtype=np.int32),
            kv_lens=keys.astype(np.int32),
            slots=tuple(np.zeros(count, np.int64) for _ in groups),  # no key is written
            block_tables=tuple(block_tables(self._kv, group, seq_ids, width) for group in groups),
            logit_rows=np.arange(count),
            max_query_len=1,
            max_kv_len=int(keys.max()),
        )
        return self.runner.predict(batch, np.stack([part.state for part in parts]), with_logits=with_logits)

    def _rehearse(self) -> None:
        reservation = self._kv.reserve([(0, (0,), 0)])
        try:
            state = np.zeros(self.runner.hidden_size, np.float32)
            self._read([_Newest(0, 1, 0, state, 2)], with_logits=False)
        finally:
            reservation.rollback()
