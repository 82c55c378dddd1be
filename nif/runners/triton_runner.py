"""TritonRunner: runs the model over the paged pool with Triton kernels on a GPU; tests interpret them on the CPU."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton

from genbatch.nif.cuda_device import on_device, runs_on_device
from genbatch.nif.engine_options import GraphOptions
from genbatch.nif.errors import BatchError, ModelError, OptionError
from genbatch.nif.kernels.attend_keys import max_shares
from genbatch.nif.kernels.elementwise import copy_blocks, write_kv
from genbatch.nif.kernels.paged_attention import AttentionSetting, paged_attention
from genbatch.nif.kernels.sample import draw_tokens, next_tokens
from genbatch.nif.runner import BatchLimits, Content, Launched, LoraAdapter, RaggedBatch, Rows, check_batch
from genbatch.nif.runners.block_transfer import BlockTransfer
from genbatch.nif.runners.device_lora import DeviceLora, LoraRows, LoraTables
from genbatch.nif.runners.launches import BatchUpload, CapturePlace, DecodeGraphs, DecodeStep, Launches
from genbatch.nif.runners.lean_llama import LeanLlama, LeanStep, Products, plan_groups, why_not_lean
from genbatch.nif.runners.prompt_graphs import PromptGraphs, input_size, most_logit_rows
from genbatch.nif.runners.torch_runner import AttentionCall, LayerPool, LoraHooks, TensorBatch, rows_of, tensors
from genbatch.nif.runners.warm_up import WarmUp

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model

Tier: TypeAlias = Literal["auto", "general", "lean"]

_MAX_HEAD_SIZE = 256
_INTERPRETED_PROCESSORS = 1  # the interpreter's number of multiprocessors, so that each program takes several shares
_CUBLAS_WORKSPACE = 32 * 2**20  # bytes for each stream that cuBLAS has used (sm_90; smaller on other GPUs)
_BYTES_PER_GRAPH = 2 * 2**20  # driver memory for some 200 kernels with their arguments


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """The packed numbers of a runner on the device.

    Args:
        weights: one of `packed_weight.KINDS`.
        cache: "float8" keeps keys and values in FP8 (E4M3); None keeps them in the model's dtype.
    """

    weights: str = "none"
    cache: str | None = None


_UNPACKED = Precision()


class TritonRunner:
    """Runs a model with Triton kernels. Implements `LaunchingRunner`, `AdaptingRunner` and `BackgroundCopies`.

    A batch's indices are checked on the host, so that no kernel reads an id outside the pool. Then one copy moves all
    of them to the device.

    Args:
        model: a model that `load_model` returned.
        tier: "lean" is our own layer loop for the Llama family. "general" is the model's own modules with our
            attention. "auto" takes the lean tier if it can run the model, else the general tier.
        graphs: options for capturing decode steps as CUDA graphs; None runs every step eagerly.
        longest: most positions of one sequence; None takes the model's own limit.
        batch_invariant: whether a row's logits must be equal, bit for bit, in every batch.
        precision: the packed numbers of weights, keys and values.

    Raises:
        ModelError: the kernels cannot serve the model.
        OptionError: the tier, the graphs, the packing or the device do not fit.
    """

    def __init__(
        self,
        model: "Model",
        *,
        tier: Tier = "auto",
        graphs: GraphOptions | None = None,
        longest: int | None = None,
        batch_invariant: bool = False,
        precision: Precision = _UNPACKED,
    ) -> None:
        check_model(model)
        quantize, kv_dtype = precision.weights, precision.cache
        unfit = why_not_lean(model)
        if tier == "lean" and unfit is not None:
            raise OptionError("tier", f"lean cannot run {model.name}: {unfit}")
        if graphs is not None and model.device.type != "cuda":
            raise OptionError("graphs", f"CUDA graphs need a CUDA device, and {model.name} is on {model.device}")
        lean = tier == "lean" or (tier == "auto" and unfit is None)
        reason = unfit or "the option tier is general"
        if graphs is not None and not lean:
            # No graphs: the model's own modules may wait for the device or allocate differently in each step.
            raise OptionError("graphs", f"only the lean tier can be captured: {reason}")
        if batch_invariant and not lean:
            raise OptionError("batch_invariant", f"only the lean tier's rows are independent: {reason}")
        if quantize != "none" and not lean:
            raise OptionError("quantize", f"only the lean tier reads packed weights: {reason}")
        for option, value in (("quantize", quantize), ("kv_cache_dtype", kv_dtype)):
            on_gpu = value in ("fp8", "float8") and model.device.type == "cuda"
            if on_gpu and torch.cuda.get_device_capability(str(model.device)) < (8, 9):
                raise OptionError(option, f"{value} needs a GPU of compute capability 8.9 or newer")
        self.quantize = quantize
        self.name = "triton, lean loop" if lean else "triton, general"
        if quantize != "none":
            self.name += f", {quantize} weights"
        if kv_dtype is not None:
            self.name += f", {kv_dtype} cache"
        self._device = model.torch_device
        self._dtype, self._kv_dtype = model.torch_dtype, torch.float8_e4m3fn if kv_dtype else model.torch_dtype
        self.vocab_size = model.vocab_size
        self.groups = model.groups
        self._model = model
        self._longest = min(model.max_position, longest or model.max_position)
        self._setting = _attention_setting(self._device, in_order=batch_invariant)
        with on_device(self._device):
            self._lean = LeanLlama(model, self._setting, quantize) if lean else None
            self._lora = DeviceLora(model) if lean else LoraHooks(model.hf, self._device)
            self._upload = BatchUpload(self._device)
            self._transfer = BlockTransfer(self._device)
        self._graph_options = graphs
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._launches: Launches | None = None
        self._drawn = torch.empty(0, dtype=torch.int64)  # [most rows] on the device, the last decode step's tokens
        self._logits: torch.Tensor | None = None  # [most captured rows, vocab_size] float32, the latest step's logits
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.hf.forward).parameters
        self._limits: BatchLimits | None = None
        self._storages: list[torch.Tensor] = []  # per group [num_blocks, elements of a block]
        self._pools: list[LayerPool] = []  # per layer, views of its group's storage

    def placed_at(self) -> torch.device:
        """Return the kernels' device."""
        return self._device

    def bytes_per_block(self, group: int, block_size: int) -> int:
        """Return the bytes of KV in one block of `group`, over all the group's layers."""
        shapes = [self._model.layers[layer] for layer in self.groups[group].layers]
        elements = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
        return elements * block_size * self._kv_dtype.itemsize

    def own_bytes(self, num_sequences: int, block_size: int) -> int:
        """Return the device bytes that this runner needs in addition to the pool and a step's activations.

        Args:
            num_sequences: most sequences that decode in one step.
        """
        num_heads: int = self._model.config.num_attention_heads
        shares = max_shares(num_sequences, self._longest, self._setting.share)
        largest_head = max(shape.key_dim for shape in self._model.layers)
        # Count each share's weighted sum, maximum and total in float32, for one layer at a time.
        shared = shares * num_heads * (largest_head + 2) * 4
        shared += _CUBLAS_WORKSPACE if self._device.type == "cuda" else 0
        unpacked = 0 if self._lean is None else self._lean.unpacked_bytes
        shared += unpacked
        if self._graph_options is None:
            return shared
        shared += _CUBLAS_WORKSPACE + unpacked  # for the capture stream, and for the graphs
        options = self._graph_options
        sizes = options.prompt_sizes() if self._lean is not None else []
        num_graphs = 2 * len(options.row_sizes()) + len(sizes)  # with adapters and without
        limits = BatchLimits((0,) * len(self.groups), block_size, self.vocab_size, self._longest)
        # All graphs share one input buffer; each step arrives in one of three other buffers.
        shared += 4 * input_size(options, limits)
        logit_rows = most_logit_rows(options.max_prompt_tokens, options.max_batch_size)
        shared += logit_rows * self.vocab_size * (4 + self._dtype.itemsize)
        if sizes and self._lean is not None:
            shared += sizes[-1] * self._lean.bytes_per_token
        shared += num_graphs * _BYTES_PER_GRAPH  # an estimate
        return shared

    @runs_on_device
    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        """Allocate the KV pool, `num_blocks[g]` zeroed blocks for group g, and capture graphs if enabled."""
        assert self._limits is None, "allocate is called once"
        pools: dict[int, LayerPool] = {}
        for index, (group, count) in enumerate(zip(self.groups, num_blocks, strict=True)):
            elements = self.bytes_per_block(index, block_size) // self._kv_dtype.itemsize
            # torch cannot copy blocks of FP8, so the storage holds bytes.
            kind = torch.uint8 if self._kv_dtype.itemsize == 1 else self._kv_dtype
            self._storages.append(torch.zeros((count, elements), dtype=kind, device=self._device))
            storage = self._storages[-1].view(self._kv_dtype)
            begin = 0
            for layer in group.layers:
                shape = self._model.layers[layer]
                size = (shape.num_kv_heads, block_size, shape.key_dim)
                length = shape.num_kv_heads * block_size * shape.key_dim
                keys, values = (
                    storage[:, start : start + length].view(count, *size) for start in (begin, begin + length)
                )
                pools[layer] = LayerPool(keys, values)
                begin += 2 * length
        self._pools = [pools[layer] for layer in range(len(pools))]
        self._limits = BatchLimits(tuple(num_blocks), block_size, self.vocab_size, self._longest)
        device = self._device
        # Each decoding sequence writes to a block of its own, so more rows need padding by a graph.
        captured_rows = self._graph_options.max_batch_size if self._graph_options else 0
        self._drawn = torch.zeros(max(min(num_blocks), captured_rows), dtype=torch.int64, device=device)
        if device.type == "cuda":
            self._warm_up()
        if self._graph_options is not None:
            assert self._lean is not None, "only the lean tier can be captured"
            rows = most_logit_rows(self._graph_options.max_prompt_tokens, captured_rows)
            self._logits = torch.empty((rows, self.vocab_size), dtype=torch.float32, device=device)
            place = CapturePlace.on(device, input_size(self._graph_options, self._limits), self._upload, self._limits)
            self._graphs = DecodeGraphs(
                self._graph_options,
                self._decode,
                self._drawn,
                place,
                self._lean.products,
                self._lora if isinstance(self._lora, DeviceLora) else None,
            )
            self._graphs.warm_up()
            if self._graph_options.max_prompt_tokens:
                graphs = PromptGraphs(self._graph_options, self._evaluate, place)
                graphs.warm_up()
                self._prompt_graphs = graphs
        self._launches = Launches(device, self._drawn, self._upload, self._decode, self._graphs)

    @runs_on_device
    def forward(self, batch: RaggedBatch) -> Rows:
        """Write the batch's keys and values to its slots; returns logits [R, vocab_size] float32.

        Raises:
            BatchError: an index is outside the pool or the model; nothing was written.
        """
        assert self._limits is not None, "forward needs a pool"
        check_batch(batch, self._limits)
        step = tensors(batch)
        if self._graphs is not None:
            logits = self._graphs.run(step)
            if logits is None and self._prompt_graphs is not None:
                logits = self._prompt_graphs.run(step)
            if logits is not None:
                return rows_of(logits)
        every_row = torch.equal(step.logit_rows, torch.arange(len(step.input_ids)))
        return rows_of(self._run(self._upload.upload(step), every_row))

    @runs_on_device
    def launch(
        self,
        batch: RaggedBatch,
        draws: npt.NDArray[np.float64],
        after: Launched | None,
        rows: Sequence[int] | None = None,
    ) -> Launched:
        """Launch a decode step and its draws; see `LaunchingRunner.launch`.

        Raises:
            BatchError: an index is outside the pool or the model; nothing was written.
        """
        assert self._limits is not None and self._launches is not None, "a step needs a pool"
        assert len(batch.input_ids) == len(batch.logit_rows) == len(draws), "a decode step draws in every row"
        check_batch(batch, self._limits)
        step = tensors(batch)
        numbers = self._lora.numbers(step.adapters) if isinstance(self._lora, DeviceLora) else None
        return self._launches.launch(DecodeStep(step, torch.from_numpy(draws), numbers), after, rows)

    @runs_on_device
    def add_adapter(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner`. Decode steps with adapters have graphs of their own; prompts run eagerly."""
        self._lora.add(adapter)

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner`."""
        self._lora.drop(adapter)

    @runs_on_device
    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination); every source is read before any block is written.

        Raises:
            BatchError: a block id is outside the pool.
        """
        if not pairs:
            return
        storage = self._storages[group]
        self._check_blocks(group, [block for pair in pairs for block in pair])
        # Pin the memory: a copy from unpinned memory could block the host until the step under way ends.
        ids = torch.tensor(pairs, dtype=torch.int64, pin_memory=storage.device.type == "cuda")
        ids = ids.to(storage.device, non_blocking=True)
        targets = [target for _, target in pairs]
        if len({*targets}) == len(targets) and not {*targets} & {source for source, _ in pairs}:
            copy_blocks(storage, ids)
        else:  # one program's target is another program's source, so one launch would race
            storage[ids[:, 1]] = storage[ids[:, 0]]

    @runs_on_device
    def read_blocks(self, group: int, blocks: Sequence[int]) -> Content:
        """Copy the blocks' content to a tensor on the host, pinned if from a GPU.

        A copy from a GPU completes later; see `BackgroundCopies`.
        """
        self._check_blocks(group, blocks)
        return self._transfer.read(self._storages[group], blocks)

    @runs_on_device
    def write_blocks(self, group: int, blocks: Sequence[int], content: Content) -> None:
        """Write the content that `read_blocks` returned into blocks, which may be other blocks than before."""
        self._check_blocks(group, blocks)
        self._transfer.write(self._storages[group], blocks, torch.as_tensor(content))

    def finish_copies(self) -> None:
        """Wait until every tensor that `read_blocks` returned holds its content."""
        self._transfer.finish()

    def close(self) -> None:
        """Release the KV pool and the graphs that refer to it."""
        if self._launches is not None:
            self._launches.finish()
        self._launches = None
        self._graphs = None
        self._prompt_graphs = None
        self._pools = []
        self._storages = []
        if isinstance(self._lora, LoraHooks):
            self._lora.close()

    def _warm_up(self) -> None:
        """Run every kind of step once; see `WarmUp`."""
        assert self._limits is not None
        lean = self._lean

        def lora(num_rows: int, adapted: bool, by_tables: bool) -> LoraRows | None:
            return lean.empty_lora(num_rows, by_tables=by_tables) if lean is not None and adapted else None

        def evaluate(batch: TensorBatch, adapted: bool) -> object:
            if lean is None:
                return self._run(batch, False)
            return lean.forward(LeanStep(batch, self._pools, False, lora(len(batch.input_ids), adapted, False)))

        WarmUp(
            limits=self._limits,
            device=self._device,
            decode=lambda step, adapted: self._decode(step, lora(len(step.draws), adapted, True)),
            evaluate=evaluate,
            storages=self._storages,
            most_rows=len(self._drawn),
            adapts=lean is not None,
        ).run()

    def _decode(
        self,
        step: DecodeStep,
        lora: LoraRows | None = None,
        *,
        products: Products | None = None,
        tables: LoraTables | None = None,
    ) -> torch.Tensor:
        """Run one decode step on the device; returns its logits and leaves its tokens there for the next step.

        Args:
            tables: the tables to which the step's adapter numbers refer; None takes the current tables.
        """
        rows = len(step.draws)
        if self._lean is not None:
            # All graphs and eager steps share one buffer: in one stream a step draws before the next writes its logits.
            out = None if self._logits is None or rows > len(self._logits) else self._logits[:rows]
            if step.adapters is not None:
                assert isinstance(self._lora, DeviceLora)
                lora = LoraRows(tables or self._lora.tables, step.adapters)
            logits = self._lean.forward(LeanStep(step.batch, self._pools, True, lora, self._drawn, out, products))
        else:
            ids = next_tokens(step.batch.input_ids, self._drawn)
            logits = self._run(dataclasses.replace(step.batch, input_ids=ids), True)
        draw_tokens(logits, step.draws, out=self._drawn)
        return logits

    def _evaluate(self, batch: TensorBatch) -> torch.Tensor:
        """Run one captured step with prompts; returns its logits, in the buffer that all graphs share."""
        assert self._lean is not None and self._logits is not None
        return self._lean.forward(LeanStep(batch, self._pools, False, out=self._logits[: len(batch.logit_rows)]))

    def _run(self, batch: TensorBatch, every_row: bool) -> torch.Tensor:
        """Run one step over a batch on the device."""
        if self._lean is not None:
            return self._lean.forward(LeanStep(batch, self._pools, every_row, self._lean_lora(batch)))
        options = {"logits_to_keep": batch.logit_rows} if self._keeps_logits else {}
        assert isinstance(self._lora, LoraHooks)
        with self._lora.applied(batch.adapters):
            output = self._model.hf(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                genbatch_step=TritonStep(self._model, batch, self._pools, self._setting),
                **options,
            )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._keeps_logits else logits[batch.logit_rows]).float()

    def _lean_lora(self, batch: TensorBatch) -> LoraRows | None:
        assert isinstance(self._lora, DeviceLora)
        return self._lora.rows(batch.adapters)

    def _check_blocks(self, group: int, blocks: Sequence[int]) -> None:
        count = len(self._storages[group])
        for block in blocks:
            if not 0 <= block < count:
                raise BatchError(f"group {group}: block id {block} is outside 0..{count - 1}")


def _attention_setting(device: torch.device, *, in_order: bool) -> AttentionSetting:
    if device.type != "cuda":
        return AttentionSetting(_INTERPRETED_PROCESSORS, in_order=in_order)
    properties = torch.cuda.get_device_properties(device)
    return AttentionSetting(
        properties.multi_processor_count, properties.shared_memory_per_multiprocessor, in_order=in_order
    )


class TritonStep:
    """One step of the general tier, which transformers' modules call for attention. Implements `AttentionStep`."""

    def __init__(
        self, model: "Model", batch: TensorBatch, pools: Sequence[LayerPool], setting: AttentionSetting
    ) -> None:
        self._batch = batch
        self._pools = pools
        self._groups = {
            layer: (index, group.window) for index, group in enumerate(model.groups) for layer in group.layers
        }
        self._plans = plan_groups(batch, [group.window for group in model.groups], setting)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the layer's keys and values, then attend over its blocks; returns [T, H, D]."""
        group, window = self._groups[call.layer]
        batch, pool = self._batch, self._pools[call.layer]
        query, key, value = (_unit_stride(part) for part in (call.query, call.key, call.value))
        write_kv(key, value, pool.keys, pool.values, batch.slots[group])
        out = paged_attention(
            query if pool.keys.dtype.itemsize == 1 else query.to(pool.keys.dtype),
            pool.keys,
            pool.values,
            batch.block_tables[group],
            batch.query_starts,
            batch.kv_lens,
            self._plans[group],
            scale=call.scaling,
            max_query_len=batch.max_query_len,
            window=window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return out.to(query.dtype)


def _unit_stride(part: torch.Tensor) -> torch.Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()


def check_model(model: "Model") -> None:
    """Check that the kernels can run this model on this device; raises an error otherwise."""
    interpreted = bool(triton.knobs.runtime.interpret)
    if model.device.type != "cuda" and not interpreted:
        raise OptionError("device", f"Triton kernels need a CUDA device, and {model.name} is on {model.device}")
    if interpreted and model.dtype == "bfloat16":
        raise OptionError("dtype", "Triton's interpreter computes bfloat16 wrongly; use float32 or float16")
    if any(group.sink_tokens for group in model.groups):
        raise ModelError(model.name, "it attends to sink tokens beside its window, which the Triton kernels do not do")
    if any(group.convolves or group.recurs for group in model.groups):
        raise ModelError(model.name, "it has convolutions or recurrences, which the Triton kernels do not compute")
    for layer, shape in enumerate(model.layers):
        if shape.key_dim != shape.value_dim:
            reason = f"layer {layer} has keys of {shape.key_dim} and values of {shape.value_dim} elements"
            raise ModelError(model.name, f"{reason}; the Triton kernels need equal sizes")
        if shape.key_dim > _MAX_HEAD_SIZE:
            reason = f"layer {layer} has heads of {shape.key_dim} elements"
            raise ModelError(model.name, f"{reason}; the Triton kernels take at most {_MAX_HEAD_SIZE}")
