"""Packs weight matrices for the C kernels, in parallel and directly into their final memory."""

import ctypes
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from genbatch.nif.errors import TensorError
from genbatch.nif.models.weight_source import FLOAT_KINDS, FP4_KINDS, FP8_KINDS, StoredTensor
from genbatch.nif.native.library import (
    COLUMNS,
    STORED,
    STORED_KINDS,
    WEIGHT_BF16,
    WEIGHT_F32,
    WEIGHT_I8,
    WEIGHT_I24,
    WEIGHT_U4,
    Linear,
    NativeArena,
    Part,
)

EIGHT_BIT_ROWS = (WEIGHT_I8, WEIGHT_U4)
"""The kinds that are multiplied with activations in 8 bits."""

U4_GROUP = 32
# Of a matrix that is packed: 4 MB, and as much again while they are merged. With stretches of 16 or 64 MB the allocator
# keeps 100 MB that are freed.
_FLOATS_AT_ONCE = 1 << 20
_FINE = ("Q2_K", "Q3_K", "Q6_K", "IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4", *FP4_KINDS)  # a scale for 16 inputs
# How far a weight may lie from its 4-bit grid, relative to its group's largest, and still count as on it: rounding to
# the type that carried it here (bfloat16 rounds the weight by 2^-9, and the grid that its neighbours give by as much).
_GRID_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows in runs of 16 gates and the 16 ups that they multiply, so that one block holds both.

    Args:
        gate, up: [intermediate, ...].

    Returns:
        [2 * intermediate padded to 16, ...].
    """
    half = COLUMNS // 2
    pad = (0, 0) * (gate.dim() - 1) + (0, -len(gate) % half)
    parts = [torch.nn.functional.pad(x, pad).reshape(-1, half, *x.shape[1:]) for x in (gate, up)]
    return torch.stack(parts, dim=1).flatten(0, 2)


def stored_kind(kind: int, tensor: StoredTensor) -> int | None:
    """Return the format of stored.h in which a tensor keeps its bytes; None if it is packed to `kind`."""
    if tensor.offset or tensor.column_order is not None or (kind != WEIGHT_F32 and tensor.kind in FLOAT_KINDS):
        return None
    if kind in EIGHT_BIT_ROWS and tensor.kind in FP8_KINDS:
        return None  # bytes that are no integers; 8 bits with a finer scale lose less than their own rounding did
    if kind in EIGHT_BIT_ROWS and tensor.kind == "Q4_1":
        return None  # packing finds its grid, and WEIGHT_U4 is the same bits with a kernel of its own
    return STORED_KINDS.get(tensor.kind)


@cache
def _patterns(kind: str) -> np.ndarray | None:
    """The patterns that a type's blocks name, [patterns, inputs] uint8; None of a type without any.

    A code is the place of a value among the type's own, the smallest first.
    """
    import gguf  # here: few files have such types

    reader: Any = getattr(gguf.quants, kind, None)
    values = getattr(reader, "grid_map", None)
    if not values:
        return None
    reader.init_grid()
    grid = reader.grid.reshape(reader.grid_shape)
    return np.ascontiguousarray(np.searchsorted(np.array(values, np.float32), grid), np.uint8)


_Rows = Callable[[int, int], torch.Tensor]  # the rows from one to before another, float32, [rows, k]


def _merged(tensors: Sequence[StoredTensor], interleaved: bool) -> tuple[int, _Rows]:
    """Matrices as one, without a copy of all of it: how many rows it has, and the rows of whole blocks.

    Args:
        tensors: matrices of one k.
        interleaved: of two tensors, as `interleave_gate_up`; else one stands below the other.
    """
    counts = [tensor.shape[0] for tensor in tensors]
    if interleaved:
        half = COLUMNS // 2

        def mixed(first: int, end: int) -> torch.Tensor:
            return interleave_gate_up(*(tensor.floats(first // 2, end // 2) for tensor in tensors))

        return 2 * (counts[0] + -counts[0] % half), mixed
    starts = [0, *accumulate(counts)]

    def stacked(first: int, end: int) -> torch.Tensor:
        spans = ((max(first - start, 0), end - start) for start in starts)
        held = zip(tensors, counts, spans, strict=False)
        return torch.cat([tensor.floats(a, min(b, count)) for tensor, count, (a, b) in held if a < min(b, count)])

    return starts[-1], stacked


def _interleaved(gates: np.ndarray, ups: np.ndarray) -> np.ndarray:
    """As `interleave_gate_up`, of the rows' addresses; 0 pads."""
    half = COLUMNS // 2
    parts = [np.pad(rows, (0, -len(rows) % half)).reshape(-1, half) for rows in (gates, ups)]
    return np.stack(parts, axis=1).reshape(-1)


class WeightPacker:
    """Packs matrices with pack.c.

    Args:
        library: what `native_library` returned.
        n_threads: how many share a matrix.
    """

    def __init__(self, library: ctypes.CDLL, n_threads: int) -> None:
        self._library = library
        self._n_threads = n_threads
        self.arena = NativeArena(library)
        self._parts: list[Any] = []  # what linears point to

    def put(self, tensor: torch.Tensor) -> int:
        """The address of a copy; it lives as long as this object."""
        plain = tensor.detach().contiguous()
        address, target = self.arena.reserve(plain.nbytes)
        target[:] = plain.reshape(-1).view(torch.uint8).numpy()
        return address

    def put_floats(self, vector: torch.Tensor) -> int:
        """The address of a float32 copy; it lives as long as this object."""
        return self.put(vector.float())

    def linear(
        self, kind: int, tensors: Sequence[StoredTensor], *, group: int = 64, interleaved: bool = False
    ) -> Linear:
        """Pack `tensors` from their files into one linear, with their outputs one after another.

        Blocks of a GGUF file stay what they are, and so do halves with WEIGHT_F32.

        Args:
            kind: WEIGHT_F32, WEIGHT_BF16, WEIGHT_I8 or WEIGHT_U4, as in `pack`.
            tensors: matrices [n, k] of one k.
            group: inputs that share a scale of WEIGHT_I8.
            interleaved: of two tensors, gate and up, in runs of 16 rows each; see `interleave_gate_up`.
        """
        kinds = [stored_kind(kind, tensor) for tensor in tensors]
        if None not in kinds:
            linear = self._stored([kind for kind in kinds if kind is not None], tensors, interleaved)
            blocks_only = not any(tensor.kind in FLOAT_KINDS or tensor.kind in FP8_KINDS for tensor in tensors)
            rounded = kind in EIGHT_BIT_ROWS
            if rounded or (blocks_only and self._library.digits_pay()):
                linear.kind = WEIGHT_I8 if rounded else WEIGHT_I24
                linear.group = 16 if any(tensor.kind in _FINE for tensor in tensors) else U4_GROUP
            return linear
        n, rows = _merged(tensors, interleaved)
        return self._pack(kind, rows, (n, tensors[0].shape[-1]), group, torch.float32)

    def blocks(self, kind: int, addresses: np.ndarray, k: int, name: str) -> int:
        """Return the address of rows in a format of stored.h.

        Args:
            kind: one of STORED_KINDS.
            addresses: where each row begins, uint64; 0 for a row of zeros.
            k: inputs.
            name: of the tensors that the rows belong to.

        Raises:
            TensorError: a scale, or a value of 16 bits, is NaN or infinite.
        """
        blocks = -(-len(addresses) // COLUMNS)
        address, _ = self.arena.reserve(blocks * self._library.stored_block_bytes(kind, k))
        rows = np.ascontiguousarray(addresses, np.uint64)
        patterns = _patterns(STORED[kind - WEIGHT_U4 - 1])
        arguments = (kind, None if patterns is None else patterns.ctypes.data, rows.ctypes.data, len(rows), k)
        if not self._share(range(blocks), self._library.pack_stored, arguments, address):
            raise TensorError(name)
        return address

    def _stored(self, kinds: Sequence[int], tensors: Sequence[StoredTensor], interleaved: bool) -> Linear:
        """Build a linear of parts, one for each run of tensors of one type."""
        k, name = tensors[0].shape[-1], " or ".join(tensor.name for tensor in tensors)
        rows = [tensor.addresses() for tensor in tensors]
        if interleaved and kinds[0] != kinds[1]:
            return self._halves(kinds, rows, k, name)
        if interleaved:
            rows, kinds = [_interleaved(*rows)], kinds[:1]
        runs: list[tuple[int, list[np.ndarray]]] = []
        for kind, addresses in zip(kinds, rows, strict=True):
            if not runs or runs[-1][0] != kind:
                runs.append((kind, []))
            runs[-1][1].append(addresses)
        parts = (Part * len(runs))()
        column = block = 0
        for part, (kind, merged) in zip(parts, runs, strict=True):
            addresses = np.concatenate(merged)
            part.kind, part.n, part.column, part.first_block = kind, len(addresses), column, block
            part.weights = self.blocks(kind, addresses, k, name)
            column += len(addresses)
            block += -(-len(addresses) // COLUMNS)
        self._parts.append(parts)
        return Linear(kind=WEIGHT_F32, n=column, k=k, group=1, parts=parts, num_parts=len(parts))

    def _halves(self, kinds: Sequence[int], rows: Sequence[np.ndarray], k: int, name: str) -> Linear:
        """Build gates and ups of two types as two parts; each part has zeros in the other part's rows."""
        gates, ups = rows
        placed = _interleaved(gates, np.zeros_like(ups)), _interleaved(np.zeros_like(gates), ups)
        parts = (Part * 2)()
        for part, kind, addresses in zip(parts, kinds, placed, strict=True):
            part.kind, part.n, part.weights = kind, len(addresses), self.blocks(kind, addresses, k, name)
        self._parts.append(parts)
        return Linear(kind=WEIGHT_F32, n=len(placed[0]), k=k, group=1, parts=parts, num_parts=2)

    def vector(self, tensor: StoredTensor) -> int:
        """The address of a tensor's values in float32, end to end; they live as long as this object."""
        return self.put_floats(tensor.whole())

    def pack(self, kind: int, matrix: torch.Tensor, group: int) -> Linear:
        """The matrix as C multiplies by it, without a bias; its memory lives as long as this object.

        Args:
            kind: WEIGHT_F32, WEIGHT_BF16, WEIGHT_I8 or WEIGHT_U4. WEIGHT_I8 becomes WEIGHT_U4 where that loses nothing,
                WEIGHT_U4 becomes WEIGHT_I8 where the inputs fill no groups of 32, or float16 holds no such grid.
            matrix: [n, k].
            group: inputs that share a scale of WEIGHT_I8.
        """
        plain = matrix.detach()
        n, k = plain.shape
        return self._pack(kind, lambda first, end: plain[first:end].float(), (n, k), group, matrix.dtype)

    def _pack(self, kind: int, rows: "_Rows", shape: tuple[int, int], group: int, dtype: torch.dtype) -> Linear:
        """Pack rows as `pack` does, and read some rows at a time."""
        n, k = shape
        blocks = -(-n // COLUMNS)
        if kind == WEIGHT_F32:
            address, _ = self.arena.reserve(blocks * COLUMNS * k * 4)
            self._pack_with(self._library.pack_f32, rows, shape, (), address)
            return Linear(kind=kind, n=n, k=k, group=1, weights=address)
        if kind == WEIGHT_BF16:
            k_padded = k + k % 2
            address, _ = self.arena.reserve(blocks * COLUMNS * k_padded * 2)
            self._pack_with(self._library.pack_bf16, rows, shape, (), address)
            return Linear(kind=kind, n=n, k=k_padded, group=1, weights=address)
        k_padded = k + -k % group
        # Reserve for 8 bits, because it is unknown yet whether 4 bits suffice. Then release the rest.
        address, _ = self.arena.reserve(blocks * COLUMNS * (k_padded + 2 * (k_padded // group)))
        on_grid, near = (False, _GRID_TOLERANCE[dtype]), (True, math.inf)
        for how in ((on_grid, near) if kind == WEIGHT_U4 else (on_grid,)) if k % U4_GROUP == 0 else ():
            if self._pack_with(self._library.pack_u4, rows, shape, how, address):
                self.arena.shrink(blocks * COLUMNS * (k // 2 + 4 * (k // U4_GROUP)))
                return Linear(kind=WEIGHT_U4, n=n, k=k, group=U4_GROUP, weights=address)
        self._pack_with(self._library.pack_i8, rows, shape, (group,), address)
        return Linear(kind=WEIGHT_I8, n=n, k=k_padded, group=group, weights=address)

    def _pack_with(
        self, function: Any, rows: "_Rows", shape: tuple[int, int], arguments: tuple[Any, ...], address: int
    ) -> bool:
        """Run a function of pack.c over the matrix, one stretch of blocks at a time; returns whether all succeeded."""
        n, k = shape
        blocks, at_once = -(-n // COLUMNS), max(self._n_threads, _FLOATS_AT_ONCE // (COLUMNS * k))
        for first in range(0, blocks, at_once):
            end = min(first + at_once, blocks)
            floats = rows(first * COLUMNS, min(end * COLUMNS, n)).contiguous()
            # Where row 0 would be: C counts rows from there, and reads those of its blocks alone.
            source = floats.data_ptr() - first * COLUMNS * k * floats.itemsize
            if not self._share(range(first, end), function, (source, n, k, *arguments), address):
                return False
        return True

    def _share(self, blocks: range, function: Any, arguments: tuple[Any, ...], address: int) -> bool:
        """Runs a function of pack.c over blocks; whether every part succeeded."""
        ends = [blocks.start + len(blocks) * i // self._n_threads for i in range(self._n_threads + 1)]
        with ThreadPoolExecutor(self._n_threads) as threads:  # ctypes releases the GIL
            parts = pairwise(ends)
            done = threads.map(lambda part: function(*arguments, *part, address), parts)
            results = list(done)  # all of them: every part must be finished before the memory is used
        return False not in results
