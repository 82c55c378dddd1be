"""The native runner as an engine of `model_files`: steps without a Batcher."""

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from genbatch.nif.models.model import describe_model
from genbatch.nif.native.runner import native_runner
from genbatch.nif.runner import RaggedBatch
from tests.benchmarks.model_files import CONTEXT, FIRST, PREFILL, rate

BLOCK_SIZE = 16
KEPT_STATES = 3  # blocks of states of one sequence


class Ours:
    """The native runner."""

    def __init__(self, path: str, mode: str, batches: Sequence[int], threads: int | None) -> None:
        started_at = time.perf_counter()
        model = describe_model(path, dtype="float32")
        assert model is not None, "a family that the native runner does not know"
        self._vocab_size = model.vocab_size
        self._runner = native_runner(model, quantize="int8" if mode == "int8" else "none", n_threads=threads)
        self._threads = threads
        self._blocks = CONTEXT // BLOCK_SIZE
        blocks = max(max(batches) * self._blocks, PREFILL // BLOCK_SIZE)
        recurring = max(max(batches) * KEPT_STATES, PREFILL // BLOCK_SIZE)
        groups = self._recurs = [group.recurs for group in self._runner.groups]
        self._runner.allocate([recurring if recurs else blocks for recurs in groups], BLOCK_SIZE)
        self._prefill(FIRST)()
        self.first_token_s = time.perf_counter() - started_at

    def decode(self, count: int) -> float:
        """Decode tokens a second of `count` sequences, each of the last block's positions as often as the others."""
        end = CONTEXT - BLOCK_SIZE
        for seq_id in range(count):  # so that states are read from memory that was written
            self._runner.forward_largest(self._batch([seq_id], end - BLOCK_SIZE, end), with_logits=False)
        batches = itertools.cycle([self._batch(range(count), place, place + 1) for place in range(end, CONTEXT)])
        return rate(lambda: self._runner.forward_largest(next(batches), with_logits=False), count, self._threads)

    def prefill(self) -> float:
        """Prompt tokens a second."""
        return rate(self._prefill(PREFILL), PREFILL, self._threads)

    def _prefill(self, length: int) -> Callable[[], None]:
        batch = self._batch([0], 0, length)
        return lambda: self._runner.forward_largest(batch, with_logits=False)

    def _batch(self, seq_ids: Sequence[int], start: int, end: int) -> RaggedBatch:
        """A step that evaluates the same positions of sequences."""
        count, length = len(seq_ids), end - start
        tables = {recurs: self._tables(seq_ids, end, recurs) for recurs in self._recurs}
        positions = np.tile(np.arange(start, end), count)
        entries = np.repeat(np.arange(count), length)
        slots = {
            recurs: table[entries, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            for recurs, table in tables.items()
        }
        return RaggedBatch(
            input_ids=np.random.default_rng(start).integers(self._vocab_size, size=count * length),
            positions=positions,
            query_starts=np.arange(0, count * length + 1, length, dtype=np.int32),
            kv_lens=np.full(count, end, np.int32),
            slots=tuple(slots[recurs] for recurs in self._recurs),
            block_tables=tuple(tables[recurs] for recurs in self._recurs),
            logit_rows=np.arange(length - 1, count * length, length),
            max_query_len=length,
            max_kv_len=end,
        )

    def _tables(self, seq_ids: Sequence[int], end: int, recurs: bool) -> np.ndarray:
        """Blocks by sequence; states of a decoded sequence take turns in KEPT_STATES blocks, as behind a window."""
        blocks = np.arange(-(-end // BLOCK_SIZE), dtype=np.int32)[None]
        if recurs and end <= CONTEXT:
            return blocks % KEPT_STATES + KEPT_STATES * np.array(seq_ids, np.int32)[:, None]
        return blocks + self._blocks * np.array(seq_ids, np.int32)[:, None]
