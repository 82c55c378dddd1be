"""NativeRunner: runs models on the CPU, with one call into C for a whole step.

runner = native_runner(load_model("smollm2"), quantize="int8")
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from genbatch.nif.errors import BatchError, OptionError
from genbatch.nif.host import available_cores
from genbatch.nif.models.loaded_model import module_shape
from genbatch.nif.native.abi import HEADER
from genbatch.nif.native.adapter_weights import AdapterWeights
from genbatch.nif.native.kept_weights import kernels_digest
from genbatch.nif.native.library import (
    KV_BF16,
    KV_F32,
    KV_I8,
    MAX_GROUPS,
    STEP_ERRORS,
    STEP_NO_MEMORY,
    WEIGHT_BF16,
    WEIGHT_F32,
    WEIGHT_I8,
    Cache,
    Layer,
    NativeMemory,
    Step,
)
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.runner import Content, Largest, LoraAdapter, RaggedBatch

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model

_WEIGHT_NAMES = {WEIGHT_F32: "float32", WEIGHT_BF16: "bfloat16"}
_KV_KINDS = {"float32": KV_F32, "bfloat16": KV_BF16, "int8": KV_I8}
_KV_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_KV_DTYPES = {WEIGHT_F32: "float32", WEIGHT_BF16: "bfloat16", WEIGHT_I8: "int8"}  # the defaults
_KEY_LANES = 16  # scores per vector; a block's keys are padded to a multiple
_HUGE_PAGE, _SMALL_PAGE = 1 << 21, 1 << 12
_FACTOR_BYTES = 12  # bytes of a token's factors in 8 bits: see attention_int8.c
_LARGEST = HEADER.dtype("largest")


def native_runner(
    model: "Model",
    *,
    quantize: str = "none",
    kv_dtype: str | None = None,
    n_threads: int | None = None,
) -> "NativeRunner":
    """Build the kernels if needed, pack the weights and start the threads.

    Args:
        model: a model that `load_model` returned, in float32 or bfloat16 on the CPU.
        quantize: "none" keeps the model's own dtype. "int8" uses 8 bits for activations, keys, values and weights;
            weights that have 4 bits already keep them. "int4" is "int8" with 4-bit weights in groups of 32, except for
            the head and some projections of some layers (`keeps_8_bits`). Weights that are quantised in their files
            stay unchanged.
        kv_dtype: "float32", "bfloat16" or "int8"; None means the weights' dtype.
        n_threads: threads of a step; None means the cores that this process may use.

    Raises:
        NativeUnavailable: this machine or this model is not supported; the reason is for a log line.
        OptionError: an option does not have this value.
    """
    return NativeRunner(ModelWeights(model, quantize), kv_dtype=kv_dtype, n_threads=n_threads)


class NativeRunner:
    """Runs steps in C. Implements all runner interfaces in `nif/runner.py` but those of GPUs and encoders.

    A row's logits depend only on its own sequence, bit for bit. The rest of the batch, the row's place in the batch,
    the prompt's chunks and the number of threads change nothing.

    Args:
        weights: the packed weights, shared by successive runners.
        kv_dtype: "float32", "bfloat16" or "int8"; None means the weights' dtype.
        n_threads: threads of a step; None means the cores that this process may use.

    Raises:
        OptionError: an option does not have this value.
    """

    rows_are_invariant: Literal[True] = True

    def __init__(self, weights: ModelWeights, *, kv_dtype: str | None = None, n_threads: int | None = None) -> None:
        if kv_dtype is not None and kv_dtype not in _KV_KINDS:
            raise OptionError("kv_dtype", f"{kv_dtype} is not one of {', '.join(_KV_KINDS)}")
        if n_threads is not None and n_threads < 1:
            raise OptionError("n_threads", f"must be at least 1, not {n_threads}")
        self._n_threads = n_threads or available_cores()
        plural = "s" if self._n_threads > 1 else ""
        numbers = _WEIGHT_NAMES[weights.kind] if weights.quantize == "none" else weights.quantize
        self.name = f"native ({numbers}, {self._n_threads} thread{plural})"
        self.quantize = weights.quantize
        self.vocab_size = weights.model.vocab_size
        self.groups = weights.groups
        self.hidden_size = int(weights.struct.hidden)
        self.predicts = bool(weights.struct.predictor)
        self.mtp_group = weights.mtp_group
        self.predicted = np.empty((0, 0), np.bool_)
        self._weights = weights
        self._library = weights.library
        self._shape = weights.struct
        self._kv_dtype = kv_dtype or _KV_DTYPES[weights.kind]
        self._rope = weights.rope
        self._pools: list[NativeMemory] = []
        self._caches: ctypes.Array[Cache] | None = None
        self._engine: int | None = None
        self._adapters: dict[int, AdapterWeights] = {}  # by handle

    def bytes_per_block(self, group: int, block_size: int) -> int:
        """Return the bytes of KV in one block of `group`, over all the group's layers."""
        return len(self.groups[group].layers) * self._layer_bytes(group, block_size)

    def own_bytes(self, num_sequences: int, block_size: int) -> int:
        """See `HoldsMemory`: the system counts pages of mapped weights as available memory."""
        return self._weights.num_mapped

    def step_bytes(self, num_tokens: int, num_sequences: int) -> int:
        """See `KnowsStep`."""
        rows = {"num_rows": num_tokens, "num_logit_rows": num_tokens}
        # C only reads whether `best` is NULL.
        step = Step(num_tokens=num_tokens, num_entries=num_sequences, **rows, best=1)
        models = [self._shape, self._shape.predictor.contents] if self.predicts else [self._shape]
        sizes = [self._library.step_bytes(ctypes.byref(each), ctypes.byref(step), self._n_threads) for each in models]
        return int(max(sizes)) + 2 * self.predicts * num_tokens * self.hidden_size * 4

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        """Allocate the KV pool: `num_blocks[g]` zeroed blocks for group g."""
        assert self._caches is None, "allocate is called once"
        caches = (Cache * len(self.groups))()
        for i, (group, count) in enumerate(zip(self.groups, num_blocks, strict=True)):
            num_layers, block_stride = len(group.layers), self._layer_bytes(i, block_size)
            layer_stride = apart(count * block_stride, num_layers)
            pool = NativeMemory(self._library, layer_stride * num_layers)
            self._pools.append(pool)
            caches[i] = Cache(
                base=pool.address,
                layer_stride=layer_stride,
                block_stride=block_stride,
                head_stride=block_stride // max(1, self._layer(i).num_kv_heads),
                values_offset=self._key_bytes(i, block_size),
                num_blocks=count,
                block_size=block_size,
                kind=_KV_KINDS[self._kv_dtype],
                padded_keys=_padded(block_size, _KEY_LANES),
            )
        if self.mtp_group is not None:
            self.predicted = np.zeros((num_blocks[self.mtp_group], block_size), np.bool_)
        self._caches = caches
        self._engine = self._library.engine_create(ctypes.byref(self._shape), caches, self._n_threads)
        if not self._engine:
            raise MemoryError("cannot allocate the native engine")
        # Garbage collection stops the threads of a runner that was not closed. At a program's end a step may still run.
        self._destroy = weakref.finalize(self, self._library.engine_destroy, self._engine)
        self._destroy.atexit = False

    def reserve(self, num_tokens: int, num_sequences: int) -> None:
        """See `KnowsStep`."""
        assert self._engine is not None, "the buffers belong to the engine"
        if not self._library.engine_reserve(self._engine, self.step_bytes(num_tokens, num_sequences)):
            raise MemoryError(STEP_ERRORS[STEP_NO_MEMORY])

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        """Write the batch's keys and values to its slots; returns logits [R, vocab_size] float32.

        Raises:
            BatchError: a token, slot, position or block is out of range; nothing was written.
            MemoryError: there is no memory for the step's activations.
        """
        logits = np.empty((batch.logit_rows.size, self.vocab_size), np.float32)
        self._run(batch, logits, None)
        return logits

    def forward_largest(
        self, batch: RaggedBatch, *, with_logits: bool, **rows: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.float32] | None, Largest]:
        """Run `forward`; returns logits (None without `with_logits`) and each row's largest, lowest id among equals.

        Args:
            rows: keyword arguments of `_run`.
        """
        count = batch.logit_rows.size
        logits = np.empty((count, self.vocab_size), np.float32) if with_logits else None
        best = np.empty(count, _LARGEST)
        self._run(batch, logits, best, **rows)
        return logits, Largest(best["value"], best["column"])

    def forward_states(
        self, batch: RaggedBatch, tokens: npt.NDArray[np.int64], *, with_logits: bool
    ) -> tuple[npt.NDArray[np.float32] | None, Largest, npt.NDArray[np.float32]]:
        """See `PredictingRunner`."""
        rows = np.concatenate((batch.logit_rows, np.setdiff1d(tokens, batch.logit_rows)))
        states = np.empty((rows.size, self.hidden_size), np.float32)
        logits, largest = self.forward_largest(batch, with_logits=with_logits, rows=rows, states_out=states)
        place = np.empty(batch.input_ids.size, np.int64)
        place[rows] = np.arange(rows.size)
        return logits, largest, states[place[tokens]]

    def predict(
        self, batch: RaggedBatch, states: npt.NDArray[np.float32], *, with_logits: bool
    ) -> tuple[npt.NDArray[np.float32] | None, Largest, npt.NDArray[np.float32]]:
        """See `PredictingRunner`."""
        out = np.empty((batch.logit_rows.size, self.hidden_size), np.float32)
        return *self.forward_largest(batch, with_logits=with_logits, states=states, states_out=out), out

    def _run(
        self,
        batch: RaggedBatch,
        logits: np.ndarray | None,
        best: np.ndarray | None,
        *,
        rows: npt.NDArray[np.int64] | None = None,
        states: npt.NDArray[np.float32] | None = None,
        states_out: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Run the step in C; raises the errors of `forward`.

        Args:
            rows: the tokens that run on after the last layer's keys; tokens with logits come first. None means only the
                tokens with logits.
            states: the predictor's inputs; None runs the model.
            states_out: receives the head's inputs, or the predictor's states for its next row.
        """
        assert self._engine is not None, "forward needs a pool"
        rows = batch.logit_rows if rows is None else rows
        rope = self._rope if states is None else self._weights.predictor_rope
        tables = rope.up_to(batch.max_kv_len + 1)  # an assistant's position is one after its last key
        _check_sizes(batch, len(self.groups))
        arrays = _KeptArrays()
        step = Step(
            num_tokens=batch.input_ids.size,
            num_entries=batch.kv_lens.size,
            num_rows=rows.size,
            num_logit_rows=batch.logit_rows.size,
            num_positions=len(tables[0].cosines),
            input_ids=arrays.address(batch.input_ids, np.int64),
            positions=arrays.address(batch.positions, np.int64),
            query_starts=arrays.address(batch.query_starts, np.int32),
            kv_lens=arrays.address(batch.kv_lens, np.int32),
            rows=arrays.address(rows, np.int64),
            logits=None if logits is None else logits.ctypes.data,
            best=None if best is None else best.ctypes.data,
            states=None if states is None else arrays.address(states, np.float32),
            states_out=None if states_out is None else states_out.ctypes.data,
        )
        if batch.adapters is not None:
            self._name_adapters(step, batch.adapters, arrays)
        for i, table in enumerate(tables):
            step.cosines[i], step.sines[i] = table.cosines.ctypes.data, table.sines.ctypes.data
        for i in range(len(self.groups)):
            step.slots[i] = arrays.address(batch.slots[i], np.int64)
            step.block_tables[i] = arrays.address(batch.block_tables[i], np.int32)
            step.table_width[i] = batch.block_tables[i].shape[1]
        where = ctypes.c_int64()
        error = self._library.engine_step(self._engine, ctypes.byref(step), ctypes.byref(where))
        if error == STEP_NO_MEMORY:
            raise MemoryError(STEP_ERRORS[error])
        if error:
            raise BatchError(STEP_ERRORS[error] % where.value)
        if self.mtp_group is not None:
            self.predicted.reshape(-1)[batch.slots[self.mtp_group]] = states is not None

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner`; the matrices are always in float32."""
        model = self._weights.model
        sizes = {name: size[0] for name, size in module_shape(model).parts.items() if size is not None}
        packed = AdapterWeights(self._library, adapter, self._weights.architecture, model.config, sizes)
        self._adapters[adapter.handle] = packed

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner`."""
        del self._adapters[adapter.handle]

    def _name_adapters(self, step: Step, adapters: npt.NDArray[np.int64], arrays: "_KeptArrays") -> None:
        """Set each token's adapter in the step, as an index into the step's adapters."""
        handles, places = np.unique(adapters, return_inverse=True)
        named = [self._adapters[handle] for handle in handles.tolist() if handle]
        owners = places - int(handles[0] == 0)
        addresses = np.array([adapter.address for adapter in named], np.int64)
        step.num_adapters, step.lora_ranks = len(named), max(adapter.most_ranks for adapter in named)
        step.adapters = arrays.address(addresses, np.int64)
        step.adapter_of = arrays.address(owners, np.int32)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination); every source is read before any block is written."""
        if pairs:
            sources, destinations = (list(ids) for ids in zip(*pairs, strict=True))
            blocks = self._blocks(group)
            blocks[:, destinations] = blocks[:, sources]
            if group == self.mtp_group:
                self.predicted[destinations] = self.predicted[sources]

    def read_blocks(self, group: int, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the blocks' content."""
        pool = self._blocks(group)
        return pool[:, list(blocks)].transpose(1, 0, 2).reshape(len(blocks), pool.shape[0] * pool.shape[2])

    @property
    def kernels(self) -> str:
        """See `ReadsBlocks`."""
        return kernels_digest(self._library)

    def block_content(self, group: int, block: int) -> bytes:
        """See `ReadsBlocks`."""
        return self._blocks(group)[:, block].tobytes()

    def write_blocks(self, group: int, blocks: Sequence[int], content: Content) -> None:
        """Write the content that `read_blocks` returned into blocks, which may be other blocks than before."""
        into = self._blocks(group)
        into[:, list(blocks)] = np.asarray(content).reshape(len(blocks), *into.shape[::2]).transpose(1, 0, 2)
        if group == self.mtp_group:
            self.predicted[list(blocks)] = True  # this is unknown, so assume it

    def close(self) -> None:
        """Stop the threads and release the KV pool; the weights stay for the next runner."""
        if self._engine is not None:
            self._destroy()
            self._engine = None
        for pool in self._pools:
            pool.close()
        self._pools = []
        self._caches = None

    def _layer_bytes(self, group: int, block_size: int) -> int:
        """Return the bytes of one block of one layer; convolutions and recurrences always store floats."""
        if self.groups[group].convolves:
            return block_size * int(self._shape.hidden) * 4
        if self.groups[group].recurs:
            return int(self._library.recurrence_bytes(self._layer(group).recurrence, block_size))
        size, layer = _KV_BYTES[self._kv_dtype], self._layer(group)
        values = _padded(block_size, 4 // size) * layer.value_dim * size
        return int(layer.num_kv_heads * (self._key_bytes(group, block_size) + values))

    def _key_bytes(self, group: int, block_size: int) -> int:
        """Return the bytes from a KV head's first key in a block to its first value: keys and factors."""
        factors = _FACTOR_BYTES if self._kv_dtype == "int8" else 0
        return int(_padded(block_size, _KEY_LANES) * (self._layer(group).key_dim * _KV_BYTES[self._kv_dtype] + factors))

    def _layer(self, group: int) -> Layer:
        """Return the first layer of a group; all its layers have the same shape."""
        layers = self._weights.layers
        layer: Layer = layers[self.groups[group].layers[0] % len(layers)]
        return layer

    def _blocks(self, group: int) -> npt.NDArray[np.uint8]:
        """Return the group's pool as [layers, num_blocks, bytes of a layer's block]."""
        assert self._caches is not None, "there is no pool yet"
        cache = self._caches[group]
        size = len(self.groups[group].layers), cache.num_blocks, cache.block_stride
        strides = cache.layer_stride, cache.block_stride, 1
        return np.lib.stride_tricks.as_strided(self._pools[group].bytes, size, strides)


class _KeptArrays:
    """Keeps a step's arrays in memory while C uses their addresses."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def address(self, array: np.ndarray, dtype: type[np.number]) -> int:
        """Return the array's address; copies the array if its layout differs."""
        plain = np.ascontiguousarray(array, dtype)
        self._arrays.append(plain)
        return plain.ctypes.data


def _check_sizes(batch: RaggedBatch, num_groups: int) -> None:
    """Check that all arrays of a batch have lengths that fit, because C cannot check lengths."""
    tokens, entries = batch.input_ids.size, batch.kv_lens.size
    sizes = [batch.positions.size, *(slots.size for slots in batch.slots)]
    tables = [table.shape[0] for table in batch.block_tables]
    if (
        set(sizes) != {tokens}
        or batch.query_starts.size != entries + 1
        or set(tables) != {entries}
        or not len(batch.slots) == len(tables) == num_groups <= MAX_GROUPS
    ):
        raise BatchError("the lengths of the batch's arrays do not fit together")


def apart(size: int, num_layers: int) -> int:
    """Return the distance between two layers of `size` bytes each, at which layers reach new huge pages in turn.

    A page gets its memory when it is first written to, which takes up to 5 ms in a virtual machine. Blocks are first
    used in order. If all layers were at the same place in their pages, one step would wait for a page of every layer.
    """
    if size < _HUGE_PAGE or num_layers == 1:
        return size
    return _padded(size, _HUGE_PAGE) + _HUGE_PAGE // num_layers // _SMALL_PAGE * _SMALL_PAGE


def _padded(size: int, to: int) -> int:
    return size + -size % to
