"""The native runner as an engine of `model_files`: steps without a Batcher."""

import itertools
import time
from collections.abc import Callable, Sequence

import torch

from genbatch.nif.models.model import describe_model
from genbatch.nif.native.runner import native_runner
from genbatch.nif.runner import RaggedBatch
from tests.benchmarks.model_files import CONTEXT, FIRST, PREFILL, rate

BLOCK_SIZE = 16


class Ours:
    """The native runner."""

    def __init__(self, path: str, mode: str, batches: Sequence[int], threads: int | None) -> None:
        started_at = time.perf_counter()
        model = describe_model(path, dtype="float32")
        assert model is not None, "a family that the native runner does not know"
        self._vocab_size = model.vocab_size
        self._runner = native_runner(model, quantize="int8" if mode == "int8" else "none", n_threads=threads)
        self._threads = threads
        blocks = max(max(batches) * -(-CONTEXT // BLOCK_SIZE), PREFILL // BLOCK_SIZE)
        self._groups = len(self._runner.groups)
        self._runner.allocate([blocks] * self._groups, BLOCK_SIZE)
        self._prefill(FIRST)()
        self.first_token_s = time.perf_counter() - started_at

    def decode(self, count: int) -> float:
        """Decode tokens a second of `count` sequences, each of the last block's positions as often as the others."""
        batches = itertools.cycle([self._decoding(count, CONTEXT - offset) for offset in range(BLOCK_SIZE)])
        return rate(lambda: self._runner.forward_largest(next(batches), with_logits=False), count, self._threads)

    def prefill(self) -> float:
        """Prompt tokens a second."""
        return rate(self._prefill(PREFILL), PREFILL, self._threads)

    def _decoding(self, count: int, length: int) -> RaggedBatch:
        blocks = CONTEXT // BLOCK_SIZE
        tables = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
        return RaggedBatch(
            input_ids=torch.randint(self._vocab_size, (count,), generator=torch.Generator().manual_seed(length)),
            positions=torch.full((count,), length - 1),
            query_starts=torch.arange(count + 1, dtype=torch.int32),
            kv_lens=torch.full((count,), length, dtype=torch.int32),
            slots=(tables[:, -1].long() * BLOCK_SIZE + (length - 1) % BLOCK_SIZE,) * self._groups,
            block_tables=(tables,) * self._groups,
            logit_rows=torch.arange(count),
            max_query_len=1,
            max_kv_len=length,
        )

    def _prefill(self, length: int) -> Callable[[], None]:
        batch = RaggedBatch(
            input_ids=torch.randint(self._vocab_size, (length,), generator=torch.Generator().manual_seed(1)),
            positions=torch.arange(length),
            query_starts=torch.tensor([0, length], dtype=torch.int32),
            kv_lens=torch.tensor([length], dtype=torch.int32),
            slots=(torch.arange(length),) * self._groups,
            block_tables=(torch.arange(length // BLOCK_SIZE, dtype=torch.int32)[None],) * self._groups,
            logit_rows=torch.tensor([length - 1]),
            max_query_len=length,
            max_kv_len=length,
        )
        return lambda: self._runner.forward_largest(batch, with_logits=False)
