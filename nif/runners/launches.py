"""Launches: launches decode steps ahead, so that the host reads a step's tokens while the next step runs.

    compute    [ step N ][tokens out][ step N+1        ][tokens out]
    copies          [batch N+1 in]           [batch N+2 in]
    host       launch N+1, wait for N's tokens, launch N+2, ...

Each step has one of two pairs of buffers, so that the host fills one while the device may still read the other.

A step is padded to one of a few numbers of rows. Each number is captured once as a CUDA graph and replayed. The graph
holds the whole step: the choice of input tokens, the forward, the head and the draws. Padding rows have slot -1 and
length 0: they write nothing and attend to nothing, and their draws are not read.
"""

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from genbatch.nif.cuda_device import on_device, sent
from genbatch.nif.engine_options import GraphKey, GraphOptions
from genbatch.nif.kernels.sample import NONE
from genbatch.nif.runner import BatchLimits, Launched
from genbatch.nif.runners.block_transfer import SideStream
from genbatch.nif.runners.device_lora import DeviceLora, LoraTables
from genbatch.nif.runners.lean_llama import Products
from genbatch.nif.runners.torch_runner import TensorBatch
from genbatch.nif.sampling.device_draws import LateDraws
from genbatch.nif.sampling.sampler import NUM_PARAMS, SamplerState


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode batch and the parameters for drawing each row's next token."""

    batch: TensorBatch  # an input id of -1 - row means the token that the previous step drew in that row
    draws: torch.Tensor  # [R, NUM_PARAMS] float64, see DrawTable
    adapters: torch.Tensor | None = None  # [R] int32, see `DeviceLora.numbers`


_ALIGNMENT = 16  # bytes; lets kernels use their widest loads
_NUM_STAGES = 2  # one is filled while the copy from the other may still be under way


@dataclass(slots=True)
class _Stage:
    host: torch.Tensor  # [bytes] uint8, pinned where the device is a GPU
    copied: torch.cuda.Event | None = None  # recorded after the last copy out of `host`; None before the first


class BatchUpload:
    """Packs batches into staging memory and copies them to the device.

    Args:
        device: where the kernels run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stages = [_Stage(self._new_host(4096)) for _ in range(_NUM_STAGES)]
        self._next = 0

    def upload(self, batch: TensorBatch) -> TensorBatch:
        """Copy a batch from the CPU to the device."""
        return _rebuilt(batch, self._send(_tensors(batch), None))

    def upload_step(self, step: DecodeStep, into: torch.Tensor) -> DecodeStep:
        """Copy a step from the CPU to the device, on the current stream.

        Args:
            into: [bytes] uint8 on the device, at least `packed_size(step)`. Steps of equal shapes get equal addresses
                in the buffer, because a captured graph reads from fixed addresses.
        """
        draws, *parts = self._send(_step_tensors(step), into)
        adapters = None if step.adapters is None else parts.pop(0)
        return DecodeStep(_rebuilt(step.batch, parts), draws, adapters)

    def _send(self, parts: Sequence[torch.Tensor], into: torch.Tensor | None) -> list[torch.Tensor]:
        """Copy the tensors to the device, into the buffer `into`; None allocates a buffer."""
        offsets, size = _offsets(parts)
        stage = self._stages[self._next]
        self._next = (self._next + 1) % _NUM_STAGES
        if stage.copied is not None:
            # guard: staging memory is filled when it has been copied
            stage.copied.synchronize()
        if len(stage.host) < size:
            stage.host = self._new_host(2 * size)
        for part, offset in zip(parts, offsets, strict=True):
            _view(stage.host, offset, part).copy_(part)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device) if into is None else into
        buffer[:size].copy_(stage.host[:size], non_blocking=True)
        if self._on_gpu:
            stage.copied = stage.copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            stage.copied.record()
        return [_view(buffer, offset, part) for part, offset in zip(parts, offsets, strict=True)]

    def _new_host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)


def packed_size(step: DecodeStep) -> int:
    """Return the bytes that `BatchUpload.upload_step` needs for the step."""
    return _offsets(_step_tensors(step))[1]


def tables_offset(step: DecodeStep) -> int:
    """Return the offset in bytes of a packed step's block tables, which come last."""
    return _offsets(_step_tensors(step))[0][-len(step.batch.block_tables)]


def _step_tensors(step: DecodeStep) -> list[torch.Tensor]:
    return [step.draws, *([] if step.adapters is None else [step.adapters]), *_tensors(step.batch)]


def _tensors(batch: TensorBatch) -> list[torch.Tensor]:
    return [
        batch.input_ids,
        batch.positions,
        batch.query_starts,
        batch.kv_lens,
        batch.logit_rows,
        *batch.slots,
        *batch.block_tables,
    ]


def _rebuilt(batch: TensorBatch, parts: Sequence[torch.Tensor]) -> TensorBatch:
    num_groups = len(batch.slots)
    input_ids, positions, query_starts, kv_lens, logit_rows = parts[:5]
    return TensorBatch(
        input_ids=input_ids,
        positions=positions,
        query_starts=query_starts,
        kv_lens=kv_lens,
        slots=tuple(parts[5 : 5 + num_groups]),
        block_tables=tuple(parts[5 + num_groups :]),
        logit_rows=logit_rows,
        max_query_len=batch.max_query_len,
        max_kv_len=batch.max_kv_len,
        adapters=batch.adapters,
    )


def _offsets(parts: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return each tensor's offset in bytes, and the total size in bytes."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


log = logging.getLogger("genbatch")

_TIMED_REPLAYS = 5
_WARM_UP_RUNS = 2  # kernels compile and libraries allocate workspaces before anything is captured


def graph_key(batch: TensorBatch, options: GraphOptions, longest: int) -> GraphKey | None:
    """Return the key of the graph that serves a batch, or None.

    A graph serves only batches of one token per row with logits for each row.
    """
    num_tokens = len(batch.input_ids)
    if batch.max_query_len != 1 or len(batch.logit_rows) != num_tokens:
        return None
    if not torch.equal(batch.logit_rows, torch.arange(num_tokens)):
        return None
    return options.key(num_tokens, batch.max_kv_len, longest)


def pad_decodes(batch: TensorBatch, key: GraphKey, block_size: int) -> TensorBatch:
    """Pad a decode batch on the CPU to the key's rows. Its block tables stay as narrow as they are."""
    missing = key.num_tokens - len(batch.input_ids)
    width = -(-key.kv_len // block_size)

    def longer(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, missing), value=value)

    return TensorBatch(
        input_ids=longer(batch.input_ids, 0),
        positions=longer(batch.positions, 0),
        query_starts=torch.arange(key.num_tokens + 1, dtype=torch.int32),
        kv_lens=longer(batch.kv_lens, 0),
        slots=tuple(longer(slots, -1) for slots in batch.slots),
        block_tables=tuple(
            # Cut the columns past the longest sequence: no row reads them.
            torch.nn.functional.pad(table[:, :width], (0, 0, 0, missing)).contiguous()
            for table in batch.block_tables
        ),
        logit_rows=torch.arange(key.num_tokens),
        max_query_len=1,
        max_kv_len=key.kv_len,
    )


def pad_step(step: DecodeStep, key: GraphKey, block_size: int) -> DecodeStep:
    """Pad a step as `pad_decodes` does; padding rows draw greedily and have no adapter."""
    missing = key.num_tokens - len(step.draws)
    pad = torch.nn.functional.pad
    return DecodeStep(
        pad_decodes(step.batch, key, block_size),
        pad(step.draws, (0, 0, 0, missing)),
        None if step.adapters is None else pad(step.adapters, (0, missing), value=-1),
    )


def empty_step(key: GraphKey, num_groups: int, block_size: int, *, adapted: bool = False) -> DecodeStep:
    """Return a step of padding rows only, for a capture.

    Args:
        adapted: whether the step has a number of an adapter for each row.
    """
    batch = empty_batch(key.kv_len, num_groups, block_size)
    adapters = torch.empty(0, dtype=torch.int32) if adapted else None
    return pad_step(DecodeStep(batch, _greedy(0), adapters), key, block_size)


def empty_batch(kv_len: int, num_groups: int, block_size: int) -> TensorBatch:
    """Return a batch without tokens. Its tables have room for sequences of up to `kv_len` positions."""
    nothing = torch.empty(0, dtype=torch.int64)
    width = -(-kv_len // block_size)
    return TensorBatch(
        input_ids=nothing,
        positions=nothing,
        query_starts=torch.zeros(1, dtype=torch.int32),
        kv_lens=nothing.int(),
        slots=(nothing,) * num_groups,
        block_tables=(torch.empty((0, width), dtype=torch.int32),) * num_groups,
        logit_rows=nothing,
        max_query_len=1,
        max_kv_len=kv_len,
    )


def _greedy(num_rows: int) -> torch.Tensor:
    return torch.zeros((num_rows, NUM_PARAMS), dtype=torch.float64)


class Replayable(Protocol):
    """A captured step."""

    def seconds(self) -> float:
        """Return the seconds that a replay takes on the device."""
        ...

    def load(self, step: DecodeStep, packed: torch.Tensor) -> None:
        """Copy a padded step into the graph's input.

        Args:
            step: on the device, as `BatchUpload.upload_step` returned it.
            packed: [bytes] uint8, the buffer that it was uploaded into.
        """
        ...

    def replay(self) -> torch.Tensor:
        """Run the loaded step; returns logits [num_tokens, vocab_size] float32. The next replay overwrites them."""
        ...

    def finish(self) -> None:
        """Wait for a replay that is under way. Call this before dropping the object."""
        ...


class GraphCache:
    """An LRU cache of captured graphs, by size.

    Args:
        capture: captures the graph of a size.
        max_cached_graphs: most graphs that are kept.
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
        """Return the graph of this size; captures the graph on a miss."""
        graph = self._graphs.get(key)
        if graph is None:
            # Evict first, so that the new graph can reuse the old graph's memory.
            while len(self._graphs) >= self._max_cached_graphs:
                self._drop_oldest()
            graph = self._graphs[key] = self._capture(key)
        self._graphs.move_to_end(key)
        return graph

    def clear(self) -> None:
        """Drop every graph."""
        while self._graphs:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        # A separate function drops its references at return; a live reference would keep the graph's memory in use.
        _, oldest = self._graphs.popitem(last=False)
        oldest.finish()


class DecodeGraphs:
    """Runs decode steps through captured graphs.

    A step computes matrix products with our kernels or with the library's; see `lean_llama`. At the start both kinds
    are captured and timed for every number of rows with which either may be faster, and the faster graph is kept.

    Args:
        options: sizes and limits.
        decode: runs one step on the device, by default or with `products`; it returns logits and leaves the tokens in
            `drawn`.
        drawn: [max_batch_size or more] int64 on the device.
        place: where graphs are captured.
        products: returns the kinds of products that a step of so many rows can have.
        lora: the adapters. Steps with adapters have separate graphs. Such a graph is captured at its first use, and
            again after the adapters' tables were replaced.
    """

    def __init__(
        self,
        options: GraphOptions,
        decode: Callable[..., torch.Tensor],
        drawn: torch.Tensor,
        place: "CapturePlace",
        products: Callable[[int], Sequence[Products]] = lambda _: (),
        lora: DeviceLora | None = None,
    ) -> None:
        self._options = options
        self._decode = decode
        self._products = products
        self._faster: dict[int, Products] = {}  # by rows
        self._drawn = drawn
        self._limits = place.limits
        self._place = place
        self._lora = lora
        self.cache = GraphCache(self._capture, options.max_cached_graphs)
        self._adapted: tuple[LoraTables, GraphCache] | None = None

    def warm_up(self) -> None:
        """Capture every configured size now, so that no request waits for a capture."""
        keys = self._options.captured_keys(self._limits.max_position)
        started = time.monotonic()
        for key in keys:
            self.cache.get(key)
            log.debug("captured decode steps of %d rows", key.num_tokens)
        log.info("captured decode steps of %d sizes in %.1f s", len(keys), time.monotonic() - started)
        by_library = [rows for rows, faster in sorted(self._faster.items()) if faster == "library"]
        if self._faster:
            log.info("of %d sizes that were timed, the library's products are faster for %s", len(self._faster),
                     ", ".join(map(str, by_library)) or "none")  # fmt: skip

    def find(self, step: DecodeStep) -> tuple[Replayable, DecodeStep] | None:
        """Return the graph for a step on the CPU, and the padded step; None if no graph applies."""
        key = graph_key(step.batch, self._options, self._limits.max_position)
        if key is None:
            return None
        assert step.batch.adapters is None or step.adapters is not None, "a graph needs the adapters' numbers"
        cache = self.cache if step.adapters is None else self._adapted_cache()
        return cache.get(key), pad_step(step, key, self._limits.block_size)

    def _adapted_cache(self) -> GraphCache:
        """Return the graphs of steps with adapters, which read the adapters' current tables."""
        assert self._lora is not None
        tables = self._lora.tables
        if self._adapted is None or self._adapted[0] is not tables:
            if self._adapted is not None:
                self._adapted[1].clear()
            capture = partial(self._capture_adapted, tables)
            self._adapted = tables, GraphCache(capture, self._options.max_cached_graphs)
        return self._adapted[1]

    def run(self, batch: TensorBatch) -> torch.Tensor | None:
        """Run a batch through its graph; returns logits [T, vocab_size], or None if no graph applies."""
        num_tokens = len(batch.input_ids)
        adapters = None if self._lora is None else self._lora.numbers(batch.adapters)
        replay = self.find(DecodeStep(batch, _greedy(num_tokens), adapters))
        if replay is None:
            return None
        graph, step = replay
        packed = torch.empty(packed_size(step), dtype=torch.uint8, device=self._place.inputs.device)
        graph.load(self._place.upload.upload_step(step, into=packed), packed)
        # Clone, because the next replay writes to the same memory.
        return graph.replay()[:num_tokens].clone()

    def _capture(self, key: GraphKey) -> Replayable:
        sample = empty_step(key, len(self._limits.num_blocks), self._limits.block_size)
        # The capture's warm-up runs overwrite `drawn`, and a step under way may have left its tokens there.
        drawn = self._drawn.clone()
        choices = self._products(key.num_tokens)
        if len(choices) > 1 and key.num_tokens not in self._faster:
            graph, self._faster[key.num_tokens] = self._fastest(sample, choices)
        else:  # Time nothing: a longer size of the same number of rows is captured while a request waits.
            products = self._faster.get(key.num_tokens)
            graph = CapturedStep(sample, partial(self._decode, products=products), self._place)
        self._drawn.copy_(drawn)
        return graph

    def _capture_adapted(self, tables: LoraTables, key: GraphKey) -> Replayable:
        sample = empty_step(key, len(self._limits.num_blocks), self._limits.block_size, adapted=True)
        drawn = self._drawn.clone()
        decode = partial(self._decode, products=self._faster.get(key.num_tokens), tables=tables)
        graph = CapturedStep(sample, decode, self._place)
        self._drawn.copy_(drawn)
        return graph

    def _fastest(self, sample: DecodeStep, choices: Sequence[Products]) -> tuple[Replayable, Products]:
        captured: list[tuple[Replayable, Products]] = []
        for products in choices:
            decode = partial(self._decode, products=products)
            captured.append((CapturedStep(sample, decode, self._place), products))
        return min(captured, key=lambda entry: entry[0].seconds())


@dataclass(frozen=True, slots=True)
class CapturePlace:
    """The stream, memory and limits that all captured graphs share.

    Args:
        stream: the stream of every capture. cuBLAS keeps a workspace of 32 MiB for each stream that it has computed on.
        memory: the pool of memory that graphs allocate from.
        inputs: [bytes] uint8 on the device, for the largest packed step. One graph runs at a time, so all graphs share
            this buffer.
        upload: copies steps to the device.
        limits: the pool's and the model's limits.
    """

    stream: torch.cuda.Stream
    memory: Any
    inputs: torch.Tensor
    upload: BatchUpload
    limits: BatchLimits

    @classmethod
    def on(cls, device: torch.device, size: int, upload: BatchUpload, limits: BatchLimits) -> "CapturePlace":
        """Return a place on a CUDA device, for packed steps of up to `size` bytes."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        inputs = torch.empty(size, dtype=torch.uint8, device=device)
        return cls(stream, torch.cuda.graph_pool_handle(), inputs, upload, limits)


class CapturedStep:
    """A captured step of one size: its input on the device, its graph and its logits.

    Args:
        sample: a step of this size.
        decode: runs a step on the device; it returns logits.
        place: where the graph is captured.
    """

    def __init__(
        self,
        sample: DecodeStep,
        decode: Callable[[DecodeStep], torch.Tensor],
        place: CapturePlace,
    ) -> None:
        stream, self._inputs = place.stream, place.inputs
        device = self._inputs.device
        self._tables_at = tables_offset(sample)
        step = place.upload.upload_step(sample, into=self._inputs)
        self._tables = step.batch.block_tables
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                decode(step)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Another thread may load an adapter meanwhile; its allocations must not break this thread's capture.
        with torch.cuda.graph(self._graph, pool=place.memory, stream=stream, capture_error_mode="thread_local"):
            self._logits = decode(step)

    def load(self, step: DecodeStep, packed: torch.Tensor) -> None:
        """Copy a padded step into the graph's input; see `Replayable`.

        The graph's tables have a column for each block of the longest sequence possible. Only this step's columns are
        copied, because no row reads a later column. With 131,072 positions a table of 256 rows takes 8 MB.
        """
        self._inputs[: self._tables_at].copy_(packed[: self._tables_at])
        for table, source in zip(self._tables, step.batch.block_tables, strict=True):
            table[:, : source.shape[1]].copy_(source)

    def replay(self) -> torch.Tensor:
        """Run the loaded step; the next replay overwrites the logits."""
        self._graph.replay()
        return self._logits

    def seconds(self) -> float:
        """Return the seconds that a replay takes on the device."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._graph.replay()
        began.record()
        for _ in range(_TIMED_REPLAYS):
            self._graph.replay()
        ended.record()
        ended.synchronize()
        milliseconds: float = began.elapsed_time(ended)
        return milliseconds / 1000 / _TIMED_REPLAYS

    def finish(self) -> None:
        """Wait for a replay that is under way."""
        torch.cuda.current_stream(self._inputs.device).synchronize()


_NUM_PAIRS = 2


class Launches:
    """Launches decode steps.

    Args:
        device: the kernels' device.
        drawn: [most rows] int64 on the device; `decode` leaves the tokens there.
        upload: copies steps to the device.
        decode: runs one step on the device.
        graphs: captured decode steps; None runs each step eagerly.
    """

    def __init__(
        self,
        device: torch.device,
        drawn: torch.Tensor,
        upload: BatchUpload,
        decode: Callable[[DecodeStep], torch.Tensor],
        graphs: DecodeGraphs | None,
    ) -> None:
        self._drawn = drawn
        self._upload = upload
        self._decode = decode
        self._graphs = graphs
        self._copies = SideStream(device)
        self._pairs = [_BufferPair(device, len(drawn)) for _ in range(_NUM_PAIRS)]
        self._turn = 0
        self._latest: LaunchedStep | None = None

    def launch(
        self, step: DecodeStep, after: Launched | None, after_rows: Sequence[int] | None = None
    ) -> "LaunchedStep":
        """Launch a step from CPU tensors; see `LaunchingRunner.launch`."""
        assert after is None or after is self._latest, "only the latest step's tokens are still on the device"
        pair = self._pairs[self._turn]
        assert pair.holds is None or pair.holds.is_read, "the tokens of two launched steps are unread"
        rows = len(step.draws)
        if after is not None:
            ids = -1 - (torch.arange(rows) if after_rows is None else torch.tensor(after_rows))
            step = dataclasses.replace(step, batch=dataclasses.replace(step.batch, input_ids=ids))
        captured = None if self._graphs is None else self._graphs.find(step)
        graph = None
        if captured is not None:
            graph, step = captured
        size = packed_size(step)
        try:
            # guard: a step's input is memory of the stream that writes it
            with self._copies.open():
                # Allocate on the stream that writes the buffer. The compute stream's allocator may return memory that
                # the running step has freed and still uses.
                inputs = pair.inputs_of(size)
                arrived = self._upload.upload_step(step, into=inputs)
            # guard: a step waits for its input
            self._copies.hold_up_compute()
            if self._latest is not None:
                self._latest.forget_logits()
            if graph is not None:
                graph.load(arrived, inputs)
                logits = graph.replay()
            else:
                logits = self._decode(arrived)
        except BaseException:
            self._copies.finish()  # launched kernels may still read these buffers
            raise
        self._latest = pair.holds = LaunchedStep(logits, self._drawn[:rows], pair.tokens[:rows])
        self._turn = (self._turn + 1) % _NUM_PAIRS
        return self._latest

    def finish(self) -> None:
        """Wait for every launched step: the steps use the buffers until then."""
        self._copies.finish()


class LaunchedStep:
    """A launched step. Implements `Launched`.

    Args:
        logits: [R or more, vocab_size] float32 on the device, which the next step may overwrite.
        drawn: [R] int64 on the device, the step's tokens once the step has run; the next step may overwrite them.
        tokens: [R] int64 on the host, pinned for a GPU; the step's tokens are copied there.
    """

    def __init__(self, logits: torch.Tensor, drawn: torch.Tensor, tokens: torch.Tensor) -> None:
        self._logits: torch.Tensor | None = logits
        self._drawn = drawn
        self._tokens = tokens
        self._arrived: torch.cuda.Event | None = None
        self._send()
        self.is_read = False

    def redraw(self, rows: Sequence[int], states: Sequence[SamplerState], positions: Sequence[int]) -> LateDraws:
        """See `Launched.redraw`."""
        assert self._logits is not None, "a later step may have overwritten these logits"
        with torch.inference_mode(), on_device(self._drawn.device):
            places = sent(np.array(rows, np.int64), self._drawn.device)
            draws = LateDraws(self._logits[places], states, positions)
            # guard: the next step reads the tokens that were drawn again
            self._drawn[places] = draws.tokens
            draws.send()
            self._send()
        return draws

    def forget_logits(self) -> None:
        """Release the logits, so that the next step can reuse their memory."""
        self._logits = None

    def _send(self) -> None:
        # The copy is queued behind the step's kernels, so it is complete before the next step draws.
        self._tokens.copy_(self._drawn, non_blocking=True)
        if self._drawn.device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[int | None]:
        """Wait for each row's token; None if the row's logits are not finite. Call this once."""
        assert not self.is_read, "a later step may have overwritten the step's tokens"
        self.is_read = True
        if self._arrived is not None:
            # guard: tokens are read when they have arrived
            self._arrived.synchronize()
        return [None if token == NONE else token for token in self._tokens.tolist()]


class _BufferPair:
    """A step's input buffer on the device and its token buffer on the host.

    `BatchUpload` holds the host side of the input, and `drawn` is the device side of the tokens.
    """

    def __init__(self, device: torch.device, most_rows: int) -> None:
        self.tokens = torch.empty(most_rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.holds: LaunchedStep | None = None
        self._inputs = torch.empty(0, dtype=torch.uint8, device=device)

    def inputs_of(self, size: int) -> torch.Tensor:
        """Return [at least `size`] uint8 on the device. A new, larger buffer is allocated on the current stream."""
        if len(self._inputs) < size:
            self._inputs = torch.empty(2 * size, dtype=torch.uint8, device=self._inputs.device)
        return self._inputs
