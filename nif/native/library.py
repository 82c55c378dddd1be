"""Loads the C library with ctypes, and has the constants, structs and functions of abi.h.

NativeMemory is memory that C reads: page-aligned, zeroed, and on huge pages if the system has them.
"""

import ctypes
import weakref
from ctypes import Structure
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from genbatch.nif.native.abi import HEADER, c_struct
from genbatch.nif.native.build import NativeUnavailable, build_library

ALL_POSITIONS = 2**31 - 1  # the window of a layer without a window
COLUMNS = HEADER.constants["COLUMNS"]
LORA_COLUMNS = HEADER.constants["LORA_COLUMNS"]
MAX_GROUPS = HEADER.constants["MAX_GROUPS"]
MAX_ROPES = HEADER.constants["MAX_ROPES"]
MAX_HEAD_DIM = HEADER.constants["MAX_HEAD_DIM"]
MAX_STREAMS = HEADER.constants["MAX_STREAMS"]

LORA_PLACES = HEADER.enums["lora_place"].index("LORA_PLACES")  # adapted linears of a layer
KV_F32, KV_BF16, KV_I8 = range(len(HEADER.enums["kv_kind"]))
_WEIGHT_KINDS = {name.removeprefix("WEIGHT_"): kind for kind, name in enumerate(HEADER.enums["weight_kind"])}
WEIGHT_F32, WEIGHT_BF16, WEIGHT_I8, WEIGHT_U4, WEIGHT_I24 = (
    _WEIGHT_KINDS[name] for name in ("F32", "BF16", "I8", "U4", "I24")
)
# Types that keep the bits of their file; a file's BF16 is multiplied by float rows.
STORED_KINDS = {
    "BF16" if name == "WIDE" else name: kind for name, kind in _WEIGHT_KINDS.items() if WEIGHT_U4 < kind < WEIGHT_I24
}
STORED = tuple(STORED_KINDS)

# "%d" is the index that step.c reports.
_STEP_ERRORS = {
    "STEP_OK": "",
    "STEP_TOKEN_ID": "token %d has an id outside the vocabulary",
    "STEP_POSITION": "token %d is not at the position that follows its predecessors",
    "STEP_SLOT": "token %d would be written outside the KV pool",
    "STEP_QUERY_STARTS": "the query starts are wrong at entry %d",
    "STEP_KV_LEN": "entry %d has an impossible number of positions",
    "STEP_BLOCK_TABLE": "entry %d has a block table that is too short or names a block outside the pool",
    "STEP_ROW": "logit row %d is not a token of the batch",
    "STEP_ADAPTER": "token %d has an adapter that is not loaded",
    "STEP_NO_MEMORY": "there is no memory for the step",
}
STEP_ERRORS = tuple(_STEP_ERRORS[name] for name in HEADER.enums["step_error"])
STEP_NO_MEMORY = STEP_ERRORS.index(_STEP_ERRORS["STEP_NO_MEMORY"])


@c_struct("part")
class Part(Structure):
    """Some outputs of a linear, with weights in the file's format."""


@c_struct("linear")
class Linear(Structure):
    """One merged weight matrix."""


@c_struct("norm")
class Norm(Structure):
    """The weights of a norm; without weights there is no norm."""


@c_struct("experts")
class Experts(Structure):
    """A mixture of experts."""


@c_struct("recurrence")
class StateLayer(Structure):
    """A layer of heads with a recurrent state."""


@c_struct("latent")
class Latent(Structure):
    """A layer's attention over compressed keys and values."""


@c_struct("altup")
class AltUp(Structure):
    """A layer's alternating updates of several streams of the residual."""


@c_struct("layer")
class Layer(Structure):
    """One decoder layer."""


@c_struct("table")
class Table(Structure):
    """Rows of embeddings."""


@c_struct("pair")
class Pair(Structure):
    """The input of a model that predicts for another model."""


@c_struct("clusters")
class Clusters(Structure):
    """A head over clusters of tokens."""


@c_struct("model")
class ModelStruct(Structure):
    """The whole model."""


@c_struct("cache")
class Cache(Structure):
    """The KV pool of one layer group."""


@c_struct("step")
class Step(Structure):
    """One ragged batch."""


@c_struct("lora")
class Lora(Structure):
    """An adapter's matrices for one linear."""


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library that `build_library` returned, and declare its functions.

    Raises:
        NativeUnavailable: the library does not load, or it lacks a function of abi.h.
    """
    try:
        library = ctypes.CDLL(str(path))
        HEADER.declare(library)
    except (OSError, AttributeError) as fault:
        raise NativeUnavailable(f"the compiled kernels do not load: {fault}") from fault
    return library


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL:
    """Return the library for this machine; the first call builds and loads it.

    Raises:
        NativeUnavailable: the library cannot be built or loaded.
    """
    return open_library(build_library())


_CHUNK_BYTES = 1 << 26
_LINE_BYTES = 64


class NativeMemory:
    """One allocation, which is released with the object or by `close`.

    Args:
        library: the result of `native_library`.
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
        self.bytes: npt.NDArray[np.uint8] = np.ctypeslib.as_array(buffer)[:size]
        self._release = weakref.finalize(self, library.memory_free, address, size)
        # At the end of the program a thread may still read the memory, such as the thread that keeps packed weights.
        self._release.atexit = False

    def close(self) -> None:
        """Release the memory; `bytes` must not be used afterwards."""
        self.bytes = np.empty(0, np.uint8)
        self._release()


class NativeArena:
    """Reserves memory end to end from a few large allocations, and releases it with the object.

    Args:
        library: the result of `native_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunks: list[NativeMemory] = []
        self._sizes: list[int] = []  # bytes in use of each chunk except the last
        self._start = 0  # the last reservation's first byte in the last chunk
        self._used = 0  # bytes in use of the last chunk

    def reserve(self, size: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """Reserve `size` bytes from the beginning of a cache line on.

        Returns:
            The address of the bytes, and the same memory as [size] uint8.

        Raises:
            MemoryError: the system refused.
        """
        if not self._chunks or self._used + size > self._chunks[-1].bytes.size:
            self._sizes += [self._used] if self._chunks else []
            self._chunks.append(NativeMemory(self._library, max(_CHUNK_BYTES, size)))
            self._used = 0
        self._start, chunk = self._used, self._chunks[-1]
        self.shrink(size)
        return chunk.address + self._start, chunk.bytes[self._start : self._start + size]

    def shrink(self, size: int) -> None:
        """Shrink the last reservation to its first `size` bytes."""
        self._used = self._start + size + -size % _LINE_BYTES

    def parts(self) -> list[npt.NDArray[np.uint8]]:
        """Return the reserved memory in order, one [size] uint8 for each allocation."""
        sizes = [*self._sizes, self._used]
        return [chunk.bytes[:size] for chunk, size in zip(self._chunks, sizes, strict=False)]
