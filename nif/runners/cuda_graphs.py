"""Decode steps as CUDA graphs: a step is padded to one of a few numbers of rows, each captured once and replayed.

All of a step is in its graph: where its tokens come from, the forward, the head, the draws. Padding rows have slot -1
and length 0: they write nothing and attend to nothing, and what is drawn in them is read by nobody.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch

from genbatch.nif.batch import RaggedBatch
from genbatch.nif.batch_check import BatchLimits
from genbatch.nif.engine_options import GraphKey, GraphOptions
from genbatch.nif.runners.batch_upload import BatchUpload, packed_size
from genbatch.nif.runners.decode_step import DecodeStep
from genbatch.nif.sampling.draw_table import NUM_PARAMS

log = logging.getLogger("genbatch")

_WARM_UP_RUNS = 2  # kernels compile and libraries allocate workspaces before anything is captured


def graph_key(batch: RaggedBatch, options: GraphOptions, longest: int) -> GraphKey | None:
    """The graph that serves a batch; None where the step is not one token a row, each with its logits, or has adapters:
    which ones is no input of a graph."""
    num_tokens = len(batch.input_ids)
    if batch.adapters is not None:
        return None
    if batch.max_query_len != 1 or len(batch.logit_rows) != num_tokens:
        return None
    if not torch.equal(batch.logit_rows, torch.arange(num_tokens)):
        return None
    return options.key(num_tokens, batch.max_kv_len, longest)


def pad_decodes(batch: RaggedBatch, key: GraphKey, block_size: int) -> RaggedBatch:
    """A decode batch on the CPU with padding rows up to the key's size, its tables as wide as the key's length."""
    missing = key.num_tokens - len(batch.input_ids)
    width = -(-key.kv_len // block_size)

    def longer(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, missing), value=value)

    return RaggedBatch(
        input_ids=longer(batch.input_ids, 0),
        positions=longer(batch.positions, 0),
        query_starts=torch.arange(key.num_tokens + 1, dtype=torch.int32),
        kv_lens=longer(batch.kv_lens, 0),
        slots=tuple(longer(slots, -1) for slots in batch.slots),
        block_tables=tuple(
            # Columns past the longest sequence may exist; what they hold is not read.
            torch.nn.functional.pad(table[:, :width], (0, max(0, width - table.shape[1]), 0, missing)).contiguous()
            for table in batch.block_tables
        ),
        logit_rows=torch.arange(key.num_tokens),
        max_query_len=1,
        max_kv_len=key.kv_len,
    )


def pad_step(step: DecodeStep, key: GraphKey, block_size: int) -> DecodeStep:
    """As `pad_decodes`; padding rows draw greedily."""
    missing = key.num_tokens - len(step.draws)
    return DecodeStep(pad_decodes(step.batch, key, block_size), torch.nn.functional.pad(step.draws, (0, 0, 0, missing)))


def empty_step(key: GraphKey, num_groups: int, block_size: int) -> DecodeStep:
    """A step of nothing but padding rows, to capture with."""
    nothing = torch.empty(0, dtype=torch.int64)
    batch = RaggedBatch(
        input_ids=nothing,
        positions=nothing,
        query_starts=torch.zeros(1, dtype=torch.int32),
        kv_lens=nothing.int(),
        slots=(nothing,) * num_groups,
        block_tables=(torch.empty((0, 1), dtype=torch.int32),) * num_groups,
        logit_rows=nothing,
        max_query_len=1,
        max_kv_len=key.kv_len,
    )
    return pad_step(DecodeStep(batch, _greedy(0)), key, block_size)


def _greedy(num_rows: int) -> torch.Tensor:
    return torch.zeros((num_rows, NUM_PARAMS), dtype=torch.float64)


class Replayable(Protocol):
    """A captured step."""

    inputs: torch.Tensor  # [bytes] uint8 on the device, what it reads: a padded step as `BatchUpload` packs it

    def replay(self) -> torch.Tensor:
        """Runs the step over `inputs`; returns logits [num_tokens, vocab_size] float32, the next replay's too."""
        ...

    def finish(self) -> None:
        """Waits for a replay that is under way; to be called before this is dropped."""
        ...


class GraphCache:
    """The captured graphs by size, least recently used first.

    Args:
        capture: makes the graph of a size.
        max_cached_graphs: how many are kept.
    """

    def __init__(self, capture: Callable[[GraphKey], Replayable], max_cached_graphs: int) -> None:
        self._capture = capture
        self._max_cached_graphs = max_cached_graphs
        self._graphs: OrderedDict[GraphKey, Replayable] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def get(self, key: GraphKey) -> Replayable:
        """The graph of this size, captured if it is not there."""
        graph = self._graphs.get(key)
        if graph is None:
            # Room first: the new graph can then reuse the old one's memory.
            while len(self._graphs) >= self._max_cached_graphs:
                self._drop_oldest()
            graph = self._graphs[key] = self._capture(key)
        self._graphs.move_to_end(key)
        return graph

    def _drop_oldest(self) -> None:
        # Its own function: no name may hold the graph any longer when the next one is captured.
        _, oldest = self._graphs.popitem(last=False)
        oldest.finish()


class DecodeGraphs:
    """Runs decode steps through captured graphs.

    Args:
        options: sizes and limits.
        decode: one step on the device, which returns its logits and leaves its tokens in `drawn`.
        drawn: [max_batch_size or more] int64 on the device.
        upload: the way there.
        limits: of the pool and the model.
        device: a CUDA device.
    """

    def __init__(
        self,
        options: GraphOptions,
        decode: Callable[[DecodeStep], torch.Tensor],
        drawn: torch.Tensor,
        upload: BatchUpload,
        limits: BatchLimits,
        device: torch.device,
    ) -> None:
        self._options = options
        self._decode = decode
        self._drawn = drawn
        self._upload = upload
        self._limits = limits
        self._device = device
        self._memory: Any = None  # one pool of memory for all graphs
        self.cache = GraphCache(self._capture, options.max_cached_graphs)

    def warm_up(self) -> None:
        """Captures what may come, so that nothing is captured while requests wait."""
        keys = self._options.captured_keys(self._limits.max_position)
        started = time.monotonic()
        for key in keys:
            self.cache.get(key)
            log.debug("captured decode steps of %d rows", key.num_tokens)
        log.info("captured decode steps of %d sizes in %.1f s", len(keys), time.monotonic() - started)

    def find(self, step: DecodeStep) -> tuple[Replayable, DecodeStep] | None:
        """The graph of a step on the CPU, and the step padded to it; None where none applies."""
        key = graph_key(step.batch, self._options, self._limits.max_position)
        if key is None:
            return None
        return self.cache.get(key), pad_step(step, key, self._limits.block_size)

    def run(self, batch: RaggedBatch) -> torch.Tensor | None:
        """The batch's logits [T, vocab_size], or None where no graph applies."""
        num_tokens = len(batch.input_ids)
        found = self.find(DecodeStep(batch, _greedy(num_tokens)))
        if found is None:
            return None
        graph, step = found
        self._upload.upload_step(step, into=graph.inputs)
        # The next replay writes to the same memory.
        return graph.replay()[:num_tokens].clone()

    def _capture(self, key: GraphKey) -> Replayable:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        sample = empty_step(key, len(self._limits.num_blocks), self._limits.block_size)
        # Warming up draws, too, while a step may be under way whose tokens the next one goes on with.
        drawn = self._drawn.clone()
        graph = CapturedStep(sample, self._decode, self._upload, self._device, self._memory)
        self._drawn.copy_(drawn)
        return graph


class CapturedStep:
    """One size's step: its inputs' place on the device, its graph and its logits."""

    def __init__(
        self,
        sample: DecodeStep,
        decode: Callable[[DecodeStep], torch.Tensor],
        upload: BatchUpload,
        device: torch.device,
        memory: Any,
    ) -> None:
        self.inputs = torch.empty(packed_size(sample), dtype=torch.uint8, device=device)
        step = upload.upload_step(sample, into=self.inputs)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                decode(step)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory):
            self._logits = decode(step)

    def replay(self) -> torch.Tensor:
        """Runs the step over `inputs`; its logits are overwritten by the next replay."""
        self._graph.replay()
        return self._logits

    def finish(self) -> None:
        """Waits for a replay that is under way."""
        torch.cuda.current_stream(self.inputs.device).synchronize()
