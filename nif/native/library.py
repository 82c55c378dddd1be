"""The C library's interface in ctypes: the structs of genbatch.h and the functions of step.c.

NativeMemory is memory that C reads and torch writes: page-aligned, zeroed, on huge pages where the system has them.
"""

import ctypes
import weakref
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch

from genbatch.nif.native.build import NativeUnavailable, build_library

ABI_VERSION = 15
COLUMNS = 32
LORA_COLUMNS = 16
LORA_QKV, LORA_OUT, LORA_GATE_UP, LORA_DOWN, LORA_PLACES = range(5)
MAX_GROUPS = 4
MAX_ROPES = 2
MAX_HEAD_DIM = 512
ALL_POSITIONS = 2**31 - 1  # the window of a layer without a window

WEIGHT_F32, WEIGHT_BF16, WEIGHT_I8, WEIGHT_U4 = range(4)
# The types that stay as their file has them; a file's BF16 keeps its bits here, and meets float rows.
STORED = (
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "G4_32",
    "G4_64",
    "G4_128",
    "G8_32",
    "G8_128",
    "MXFP4",
    "NVFP4",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "TQ1_0",
    "TQ2_0",
    "N4_32",
    "N4_128",
    "F8_32",
    "F8_128",
)
STORED_KINDS = {name: WEIGHT_U4 + 1 + place for place, name in enumerate(STORED)}
WEIGHT_I24 = WEIGHT_U4 + 1 + len(STORED)  # of rows alone, where their weights are stored blocks
KV_F32, KV_BF16, KV_I8 = range(3)

# In the order of enum step_error; "%d" is the index that step.c reports.
STEP_ERRORS = (
    "",
    "token %d has an id outside the vocabulary",
    "token %d is not at the position that follows its predecessors",
    "token %d would be written outside the KV pool",
    "the query starts are wrong at entry %d",
    "entry %d has an impossible number of positions",
    "entry %d has a block table that is too short or names a block outside the pool",
    "logit row %d is not a token of the batch",
    "token %d has an adapter that is not there",
    "no memory for the step",
)
STEP_NO_MEMORY = len(STEP_ERRORS) - 1


class Part(Structure):
    """Outputs of a linear that keep their weights in the file's format."""

    _fields_ = (
        ("kind", c_int32),
        ("n", c_int32),
        ("column", c_int32),
        ("first_block", c_int32),
        ("weights", c_void_p),
    )


class Linear(Structure):
    """One merged weight matrix."""

    _fields_ = (
        ("kind", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("group", c_int32),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("parts", POINTER(Part)),
        ("num_parts", c_int32),
        ("pad", c_int32),
    )


class Norm(Structure):
    """Weights of a norm; without any there is no norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Experts(Structure):
    """A mixture of experts."""

    _fields_ = (
        ("router", Linear),
        ("gate_up", POINTER(Linear)),
        ("down", POINTER(Linear)),
        ("count", c_int32),
        ("chosen", c_int32),
        ("normalised", c_int32),
        ("shared", c_int32),
        ("gated", c_int32),
        ("sigmoid", c_int32),
        ("groups", c_int32),
        ("best_groups", c_int32),
        ("correction", c_void_p),
        ("scales", c_void_p),
        ("router_norm", Norm),
        ("input_norm", Norm),
        ("sum_norm", Norm),
        ("beside_norm", Norm),
        ("scale", c_float),
        ("intermediate", c_int32),
    )


class StateLayer(Structure):
    """A layer of heads with a recurrent state."""

    _fields_ = (
        ("inputs", Linear),
        ("out", Linear),
        ("taps", c_void_p),
        ("tap_bias", c_void_p),
        ("rates", c_void_p),
        ("step_bias", c_void_p),
        ("skips", c_void_p),
        ("places", c_void_p),
        ("gate_norm", Norm),
        ("kernel", c_int32),
        ("channels", c_int32),
        ("heads", c_int32),
        ("key_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("corrects", c_int32),
        ("norm_groups", c_int32),
        ("gate_first", c_int32),
        ("group", c_int32),
        ("index_in_group", c_int32),
        ("gate_eps", c_float),
        ("strength", c_float),
        ("pad", c_int32),
    )


class Layer(Structure):
    """One decoder layer."""

    _fields_ = (
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("attention_norm", Norm),
        ("mlp_norm", Norm),
        ("attention_post", Norm),
        ("mlp_post", Norm),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("v_norm", Norm),
        ("input_gate", Linear),
        ("input_projection", Linear),
        ("input_post", Norm),
        ("sinks", c_void_p),
        ("taps", c_void_p),
        ("tap_bias", c_void_p),
        ("recurrence", POINTER(StateLayer)),
        ("experts", POINTER(Experts)),
        ("group", c_int32),
        ("index_in_group", c_int32),
        ("window", c_int32),
        ("rope", c_int32),
        ("rotary_dim", c_int32),
        ("num_kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("shares", c_int32),
        ("intermediate", c_int32),
        ("sink_tokens", c_int32),
        ("scale", c_float),
    )


class Table(Structure):
    """Rows of embeddings."""

    _fields_ = (
        ("rows", c_void_p),
        ("kind", c_int32),
        ("width", c_int32),
        ("count", c_int32),
        ("scale", c_float),
    )


class ModelStruct(Structure):
    """The whole model."""

    _fields_ = (
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("num_heads", c_int32),
        ("num_layers", c_int32),
        ("vocab_size", c_int32),
        ("num_groups", c_int32),
        ("norm_kind", c_int32),
        ("qk_norm", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("parallel", c_int32),
        ("interleaved", c_int32),
        ("num_ropes", c_int32),
        ("gated_attention", c_int32),
        ("norm_eps", c_float),
        ("score_scale", c_float),
        ("score_cap", c_float),
        ("logit_cap", c_float),
        ("residual_scale", c_float),
        ("logit_divisor", c_float),
        ("gate_slope", c_float),
        ("gate_limit", c_float),
        ("layer_width", c_int32),
        ("inputs_scale", c_float),
        ("joined_scale", c_float),
        ("embedding", Table),
        ("layer_embedding", Table),
        ("inputs", Linear),
        ("inputs_norm", Norm),
        ("embedding_norm", Norm),
        ("final_norm", Norm),
        ("layers", POINTER(Layer)),
        ("head", Linear),
    )


class Cache(Structure):
    """The KV pool of one layer group."""

    _fields_ = (
        ("base", c_void_p),
        ("layer_stride", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("values_offset", c_int64),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("kind", c_int32),
        ("padded_keys", c_int32),
    )


class Step(Structure):
    """One ragged batch."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_entries", c_int32),
        ("num_logit_rows", c_int32),
        ("num_positions", c_int32),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("kv_lens", c_void_p),
        ("slots", c_void_p * MAX_GROUPS),
        ("block_tables", c_void_p * MAX_GROUPS),
        ("table_width", c_int32 * MAX_GROUPS),
        ("logit_rows", c_void_p),
        ("cosines", c_void_p * MAX_ROPES),
        ("sines", c_void_p * MAX_ROPES),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("num_adapters", c_int32),
        ("lora_ranks", c_int32),
        ("adapters", c_void_p),
        ("adapter_of", c_void_p),
    )


class Lora(Structure):
    """An adapter's matrices for one linear."""

    _fields_ = (
        ("a", c_void_p),
        ("scales", c_void_p),
        ("b", c_void_p),
        ("halves", c_void_p),
        ("ranks", c_int32),
        ("pad", c_int32),
    )


def open_library(path: Path) -> ctypes.CDLL:
    """Loads a library that `build_library` made and declares its functions.

    Raises:
        NativeUnavailable: the library does not load, or its structs differ from those above.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as fault:
        raise NativeUnavailable(f"the compiled kernels do not load: {fault}") from fault
    library.struct_bytes.restype = c_int64
    library.struct_bytes.argtypes = (c_int,)
    structs: tuple[type[Structure], ...] = (Linear, Experts, StateLayer, Layer, ModelStruct, Cache, Step, Lora)
    sizes = [library.struct_bytes(i) for i in range(len(structs))]
    if library.abi_version() != ABI_VERSION or sizes != [ctypes.sizeof(struct) for struct in structs]:
        raise NativeUnavailable("the compiled kernels and the Python code disagree about their structs")
    library.memory_allocate.restype = c_void_p
    library.memory_allocate.argtypes = (c_int64,)
    library.memory_free.restype = None
    library.memory_free.argtypes = (c_void_p, c_int64)
    library.engine_create.restype = c_void_p
    library.engine_create.argtypes = (POINTER(ModelStruct), POINTER(Cache), c_int)
    library.engine_destroy.restype = None
    library.engine_destroy.argtypes = (c_void_p,)
    library.engine_step.restype = c_int
    library.engine_step.argtypes = (c_void_p, POINTER(Step), POINTER(c_int64))
    library.step_bytes.restype = c_int64
    library.step_bytes.argtypes = (POINTER(ModelStruct), POINTER(Step), c_int)
    library.recurrence_bytes.restype = c_int64
    library.recurrence_bytes.argtypes = (POINTER(StateLayer), c_int)
    library.linear_probe.restype = c_int
    library.linear_probe.argtypes = (POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p)
    span = (c_int64, c_int64, c_void_p)  # first block, end block, out
    library.pack_f32.restype = library.pack_bf16.restype = library.pack_i8.restype = None
    library.pack_f32.argtypes = library.pack_bf16.argtypes = (c_void_p, c_int64, c_int64, *span)
    library.pack_i8.argtypes = (c_void_p, c_int64, c_int64, c_int64, *span)
    library.pack_stored.restype = c_bool
    library.pack_stored.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, *span)
    library.stored_block_bytes.restype = c_int64
    library.stored_block_bytes.argtypes = (c_int, c_int64)
    library.digits_pay.restype = c_bool
    library.digits_pay.argtypes = ()
    library.stored_row.restype = None
    library.stored_row.argtypes = (c_int, c_void_p, c_int64, c_int, c_void_p)
    library.pack_u4.restype = c_bool
    library.pack_u4.argtypes = (c_void_p, c_int64, c_int64, c_bool, c_float, *span)
    return library


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL:
    """The library for this machine, built and loaded at the first call.

    Raises:
        NativeUnavailable: it cannot be built or loaded.
    """
    return open_library(build_library())


_CHUNK_BYTES = 1 << 26
_LINE_BYTES = 64


class NativeMemory:
    """One allocation, released with the object or by `close`.

    Args:
        library: what `native_library` returned.
        size: bytes.

    Raises:
        MemoryError: the system refused.
    """

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        address = library.memory_allocate(size)
        if not address:
            raise MemoryError(f"cannot allocate {size} bytes")
        self.address: int = address
        buffer = (ctypes.c_uint8 * max(size, 1)).from_address(address)
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)[:size]  # [size] uint8
        self._release = weakref.finalize(self, library.memory_free, address, size)

    def close(self) -> None:
        """Releases the memory; `tensor` must not be used any more."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._release()


class NativeArena:
    """Reserves memory end to end from a few large allocations, and releases it with the object.

    Args:
        library: what `native_library` returned.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunks: list[NativeMemory] = []
        self._start = 0  # of what was handed out last, in the last chunk
        self._used = 0  # bytes of the last chunk

    def reserve(self, size: int) -> tuple[int, torch.Tensor]:
        """`size` bytes that start on a cache line of their own.

        Returns:
            Their address, and the same memory as [size] uint8.

        Raises:
            MemoryError: the system refused.
        """
        if not self._chunks or self._used + size > self._chunks[-1].tensor.numel():
            self._chunks.append(NativeMemory(self._library, max(_CHUNK_BYTES, size)))
            self._used = 0
        self._start, chunk = self._used, self._chunks[-1]
        self.shrink(size)
        return chunk.address + self._start, chunk.tensor[self._start : self._start + size]

    def shrink(self, size: int) -> None:
        """Shrink the last reservation to its first `size` bytes."""
        self._used = self._start + size + -size % _LINE_BYTES
