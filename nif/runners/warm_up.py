"""WarmUp: compiles every kernel variant that a request may need, before the first request comes.

Triton compiles a kernel at its first launch with new constants, and cuBLAS allocates at its first product. Each of
these takes up to a second, and every caller would wait. So WarmUp runs steps of padding rows, which have slot -1 and
write nothing to the pool.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from genbatch.nif.engine_options import GraphKey
from genbatch.nif.kernels.elementwise import copy_blocks
from genbatch.nif.kernels.sample import edit_logits, gather_logprobs
from genbatch.nif.runner import BatchLimits
from genbatch.nif.runners.launches import DecodeStep, empty_step
from genbatch.nif.runners.torch_runner import TensorBatch, to_device

log = logging.getLogger("genbatch")

_ROWS = (1, 2, 17, 33, 65, 129, 257)
"""A number of rows for each tile size of our own matrix products, packed and not, and one for the library's."""
_NUM_LOGIT_ROWS = 2  # rows of logits that the warm-up edits and reads


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Runs the kernels once before the first request.

    Args:
        limits: the pool's and the model's limits.
        device: the kernels' device.
        decode: runs a decode step on the device; its second argument says whether the rows have adapters.
        evaluate: runs a step with a prompt on the device; its second argument says whether the rows have adapters.
        storages: per layer group [num_blocks, elements of a block].
        most_rows: most rows of a decode step.
        adapts: whether `decode` and `evaluate` support rows with adapters.
    """

    limits: BatchLimits
    device: torch.device
    decode: Callable[[DecodeStep, bool], object]
    evaluate: Callable[[TensorBatch, bool], object]
    storages: Sequence[torch.Tensor]
    most_rows: int
    adapts: bool

    def run(self) -> None:
        """Run every kernel once; a hit in Triton's cache takes milliseconds."""
        started = time.monotonic()
        for name, work in self._works():
            begun = time.monotonic()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            log.debug("warmed %s in %.1f s", name, time.monotonic() - begun)
        log.info("kernels are ready after %.1f s", time.monotonic() - started)

    def _works(self) -> Iterator[tuple[str, Callable[[], object]]]:
        for adapted in (False, True) if self.adapts else (False,):
            suffix = " with adapters" if adapted else ""
            for rows in sorted({min(rows, self.most_rows) for rows in _ROWS}):
                yield f"decodes of {rows} rows{suffix}", partial(self._decode, rows, adapted)
            for tokens in sorted({min(1 + rows, self.limits.max_position) for rows in _ROWS}):
                yield f"a prompt of {tokens} tokens{suffix}", partial(self._evaluate, tokens, adapted)
        yield "penalties and log-probabilities", self._edit
        yield "copies of blocks", self._copy

    def _decode(self, rows: int, adapted: bool) -> None:
        step = empty_step(GraphKey(rows, self.limits.max_position), len(self.storages), self.limits.block_size)
        batch = to_device(step.batch, self.device)
        self.evaluate(batch, adapted)  # covers decode steps that are not launched ahead
        self.decode(DecodeStep(batch, step.draws.to(self.device)), adapted)

    def _evaluate(self, tokens: int, adapted: bool) -> None:
        positions = torch.arange(tokens)
        width = -(-tokens // self.limits.block_size)
        batch = TensorBatch(
            input_ids=torch.zeros(tokens, dtype=torch.int64),
            positions=positions,
            query_starts=torch.tensor([0, tokens], dtype=torch.int32),
            kv_lens=torch.tensor([tokens], dtype=torch.int32),
            slots=(torch.full((tokens,), -1),) * len(self.storages),
            block_tables=(torch.zeros((1, width), dtype=torch.int32),) * len(self.storages),
            logit_rows=positions[-1:],
            max_query_len=tokens,
            max_kv_len=tokens,
        )
        self.evaluate(to_device(batch, self.device), adapted)

    def _edit(self) -> None:
        logits = torch.zeros((_NUM_LOGIT_ROWS, self.limits.vocab_size), dtype=torch.float32, device=self.device)
        ones = np.ones(1, np.float32)
        edit_logits(logits, [(np.zeros(1, np.int64), ones, ones)] * _NUM_LOGIT_ROWS)
        gather_logprobs(logits, torch.zeros((_NUM_LOGIT_ROWS, 1), dtype=torch.int64, device=self.device))

    def _copy(self) -> None:
        nowhere = torch.full((1, 2), -1, dtype=torch.int64, device=self.device)
        for storage in self.storages:
            copy_blocks(storage, nowhere)
