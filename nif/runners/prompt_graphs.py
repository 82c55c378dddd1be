"""PromptGraphs: runs steps with prompts through captured graphs.

A step of up to some 2,000 tokens takes longer to launch than to run: 28 layers are 300 launches, which took 13 ms of
host time on the first machine that was measured. So such a step is padded to one of a few numbers of tokens and
replayed. The padding tokens belong to a separate entry without positions, so they write nothing and attend to nothing.
Larger steps run eagerly, because the GPU takes longer for them than the host.
"""

import logging
import time
from collections.abc import Callable

import torch

from genbatch.nif.engine_options import GraphKey, GraphOptions
from genbatch.nif.runner import BatchLimits
from genbatch.nif.runners.launches import (
    CapturedStep,
    CapturePlace,
    DecodeStep,
    Replayable,
    empty_batch,
    empty_step,
    packed_size,
)
from genbatch.nif.runners.torch_runner import TensorBatch
from genbatch.nif.sampling.sampler import NUM_PARAMS

log = logging.getLogger("genbatch")

_MIN_LOGIT_ROWS = 64  # also where fewer sequences decode, because each drafted token needs a row


class PromptGraphs:
    """Captured steps with prompts, by their padded number of tokens.

    Args:
        options: sizes and limits.
        evaluate: runs a step on the device; it returns the logits of `logit_rows`.
        place: where graphs are captured.
    """

    def __init__(
        self,
        options: GraphOptions,
        evaluate: Callable[[TensorBatch], torch.Tensor],
        place: CapturePlace,
    ) -> None:
        self._most_entries = options.max_batch_size
        self._evaluate = evaluate
        self._limits = place.limits
        self._place = place
        self._sizes = options.prompt_sizes()
        self._graphs: dict[int, Replayable] = {}  # by number of tokens

    def warm_up(self) -> None:
        """Capture every size."""
        started = time.monotonic()
        for size in reversed(self._sizes):  # smaller graphs then fit into the memory of larger ones
            sample = empty_prompt(size, self._most_entries, self._limits)
            self._graphs[size] = CapturedStep(sample, self._evaluate_step, self._place)
        log.info("captured steps with prompts of %d sizes in %.1f s", len(self._sizes), time.monotonic() - started)

    def _evaluate_step(self, step: DecodeStep) -> torch.Tensor:
        return self._evaluate(step.batch)

    def run(self, batch: TensorBatch) -> torch.Tensor | None:
        """Run a batch through its graph; returns logits [R, vocab_size], or None if no graph applies."""
        num_rows = len(batch.logit_rows)
        size = next((size for size in self._sizes if size >= len(batch.input_ids)), None)
        if size is None or batch.adapters is not None or len(batch.kv_lens) > self._most_entries:
            return None
        if num_rows > most_logit_rows(size, self._most_entries):
            return None
        graph = self._graphs[size]
        step = _undrawn(pad_prompts(batch, size, self._most_entries, self._limits))
        packed = torch.empty(packed_size(step), dtype=torch.uint8, device=self._place.inputs.device)
        graph.load(self._place.upload.upload_step(step, into=packed), packed)
        # Clone, because the next replay writes to the same memory.
        return graph.replay()[:num_rows].clone()


def most_logit_rows(num_tokens: int, num_entries: int) -> int:
    """Return the rows of logits of a captured step of `num_tokens` tokens, for up to `num_entries` sequences."""
    return max(num_entries, min(num_tokens, _MIN_LOGIT_ROWS))


def pad_prompts(batch: TensorBatch, num_tokens: int, num_entries: int, limits: BatchLimits) -> TensorBatch:
    """Pad a batch on the CPU to `num_tokens` tokens and to the rows of logits that `most_logit_rows` returns.

    The result has `num_entries` + 1 entries. The last entry has all padding tokens. No padding entry has a position, so
    attention gives zeros to the padding tokens.
    """
    more_tokens = num_tokens - len(batch.input_ids)
    more_entries = num_entries + 1 - len(batch.kv_lens)
    width = -(-limits.max_position // limits.block_size)
    pad = torch.nn.functional.pad
    return TensorBatch(
        input_ids=pad(batch.input_ids, (0, more_tokens)),
        positions=pad(batch.positions, (0, more_tokens)),
        query_starts=torch.cat(
            [
                pad(batch.query_starts, (0, more_entries - 1), value=len(batch.input_ids)),
                batch.query_starts.new_tensor([num_tokens]),
            ]
        ),
        kv_lens=pad(batch.kv_lens, (0, more_entries)),
        slots=tuple(pad(slots, (0, more_tokens), value=-1) for slots in batch.slots),
        # Cut the columns past the longest sequence: no row reads them.
        block_tables=tuple(pad(table[:, :width], (0, 0, 0, more_entries)).contiguous() for table in batch.block_tables),
        logit_rows=pad(batch.logit_rows, (0, most_logit_rows(num_tokens, num_entries) - len(batch.logit_rows))),
        max_query_len=num_tokens,
        max_kv_len=limits.max_position,
    )


def input_size(options: GraphOptions, limits: BatchLimits) -> int:
    """Return the bytes of the largest packed step that the options capture."""
    largest = GraphKey(options.max_batch_size, limits.max_position)
    steps = [empty_step(largest, len(limits.num_blocks), limits.block_size, adapted=True)]
    steps += [empty_prompt(num_tokens, options.max_batch_size, limits) for num_tokens in options.prompt_sizes()[-1:]]
    return max(map(packed_size, steps))


def empty_prompt(num_tokens: int, num_entries: int, limits: BatchLimits) -> DecodeStep:
    """Return a step of padding only, for a capture."""
    batch = empty_batch(limits.max_position, len(limits.num_blocks), limits.block_size)
    return _undrawn(pad_prompts(batch, num_tokens, num_entries, limits))


def _undrawn(batch: TensorBatch) -> DecodeStep:
    """Return a step that draws no row on the device."""
    return DecodeStep(batch, torch.empty((0, NUM_PARAMS), dtype=torch.float64))
