"""Packs weight matrices for the C kernels, in parallel and directly to their final memory."""

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
"""The kinds that are multiplied by activations in 8 bits."""

U4_GROUP = 32
# Floats of a matrix that are packed at a time: 4 MB, and as much again while they are merged. With 16 or 64 MB the
# allocator keeps 100 MB after they are freed.
_FLOATS_AT_ONCE = 1 << 20
_FINE = ("Q2_K", "Q3_K", "Q6_K", "IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4", *FP4_KINDS)  # types with a scale for 16 inputs
# The largest distance of a weight from its 4-bit grid, relative to the group's largest weight, at which it counts as on
# the grid. The tolerance covers rounding to the matrix's type: bfloat16 rounds a weight by 2^-9, and so the grid, too.
_GRID_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return rows in runs of 16 gates and their 16 ups, so that one block has both.

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
        return None  # FP8 has no integers; int8 with a finer scale loses less than the rounding to FP8 did
    if kind in EIGHT_BIT_ROWS and tensor.kind == "Q4_1":
        return None  # packing finds its grid, and WEIGHT_U4 has the same bits and a faster kernel
    return STORED_KINDS.get(tensor.kind)


@cache
def _patterns(kind: str) -> np.ndarray | None:
    """Return a type's table of patterns, [patterns, inputs] uint8; None for a type without patterns.

    A code is the index of a value among the type's values in ascending order.
    """
    import gguf  # here, because few files have such types

    reader: Any = getattr(gguf.quants, kind, None)
    values = getattr(reader, "grid_map", None)
    if not values:
        return None
    reader.init_grid()
    grid = reader.grid.reshape(reader.grid_shape)
    return np.ascontiguousarray(np.searchsorted(np.array(values, np.float32), grid), np.uint8)


_Rows = Callable[[int, int], torch.Tensor]  # (first, end) -> the rows from `first` to before `end`, float32, [rows, k]


def _merged(tensors: Sequence[StoredTensor], interleaved: bool) -> tuple[int, _Rows]:
    """Merge matrices without a copy of the whole; returns the number of rows, and a function that reads some rows.

    Args:
        tensors: matrices with the same k.
        interleaved: whether two tensors are merged as by `interleave_gate_up`; else they lie one below the other.
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
        parts = zip(tensors, counts, spans, strict=False)
        return torch.cat([tensor.floats(a, min(b, count)) for tensor, count, (a, b) in parts if a < min(b, count)])

    return starts[-1], stacked


def _interleaved(gates: np.ndarray, ups: np.ndarray) -> np.ndarray:
    """Interleave the rows' addresses as `interleave_gate_up` does; 0 stands for padding rows."""
    half = COLUMNS // 2
    parts = [np.pad(rows, (0, -len(rows) % half)).reshape(-1, half) for rows in (gates, ups)]
    return np.stack(parts, axis=1).reshape(-1)


class WeightPacker:
    """Packs matrices with pack.c.

    Args:
        library: the result of `native_library`.
        n_threads: threads that share the work on a matrix.
    """

    def __init__(self, library: ctypes.CDLL, n_threads: int) -> None:
        self._library = library
        self._n_threads = n_threads
        self.arena = NativeArena(library)
        self._parts: list[Any] = []  # kept alive, because linears point to them

    def put(self, tensor: torch.Tensor) -> int:
        """Copy a tensor; returns the copy's address. The copy lives as long as this object."""
        plain = tensor.detach().contiguous()
        address, target = self.arena.reserve(plain.nbytes)
        target[:] = plain.reshape(-1).view(torch.uint8).numpy()
        return address

    def put_floats(self, vector: torch.Tensor) -> int:
        """Copy a tensor to float32; returns the copy's address. The copy lives as long as this object."""
        return self.put(vector.float())

    def linear(
        self, kind: int, tensors: Sequence[StoredTensor], *, group: int = 64, interleaved: bool = False
    ) -> Linear:
        """Pack `tensors` from their files into one linear, with their outputs one after another.

        Blocks of a GGUF file stay unchanged, and so do floats of 16 bits with WEIGHT_F32.

        Args:
            kind: WEIGHT_F32, WEIGHT_BF16, WEIGHT_I8 or WEIGHT_U4; see `pack`.
            tensors: matrices [n, k] with the same k.
            group: inputs that share a scale of WEIGHT_I8.
            interleaved: whether gates and ups are merged in runs of 16 rows; see `interleave_gate_up`.
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
            addresses: the address of each row, uint64; 0 for a row of zeros.
            k: inputs.
            name: the tensors' name, for errors.

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

    def pack(self, kind: int, matrix: torch.Tensor, group: int) -> Linear:
        """Pack a matrix into a linear without a bias; its memory lives as long as this object.

        Args:
            kind: WEIGHT_F32, WEIGHT_BF16, WEIGHT_I8 or WEIGHT_U4. WEIGHT_I8 becomes WEIGHT_U4 if that loses nothing.
                WEIGHT_U4 becomes WEIGHT_I8 if the inputs do not fill groups of 32, or if float16 cannot hold a grid.
            matrix: [n, k].
            group: inputs that share a scale of WEIGHT_I8.
        """
        plain = matrix.detach()
        n, k = plain.shape
        return self._pack(kind, lambda first, end: plain[first:end].float(), (n, k), group, matrix.dtype)

    def _pack(self, kind: int, rows: "_Rows", shape: tuple[int, int], group: int, dtype: torch.dtype) -> Linear:
        """Pack rows as `pack` does, but read some rows at a time."""
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
        # Reserve memory for 8 bits, because it is unknown yet whether 4 bits suffice. Then release the rest.
        address, _ = self.arena.reserve(blocks * COLUMNS * (k_padded + 2 * (k_padded // group)))
        on_grid, near = (False, _GRID_TOLERANCE[dtype]), (True, math.inf)
        for choice in ((on_grid, near) if kind == WEIGHT_U4 else (on_grid,)) if k % U4_GROUP == 0 else ():
            if self._pack_with(self._library.pack_u4, rows, shape, choice, address):
                self.arena.shrink(blocks * COLUMNS * (k // 2 + 4 * (k // U4_GROUP)))
                return Linear(kind=WEIGHT_U4, n=n, k=k, group=U4_GROUP, weights=address)
        self._pack_with(self._library.pack_i8, rows, shape, (group,), address)
        return Linear(kind=WEIGHT_I8, n=n, k=k_padded, group=group, weights=address)

    def _pack_with(
        self, function: Any, rows: "_Rows", shape: tuple[int, int], arguments: tuple[Any, ...], address: int
    ) -> bool:
        """Run a function of pack.c over the matrix, some blocks at a time; returns whether all calls succeeded."""
        n, k = shape
        blocks, at_once = -(-n // COLUMNS), max(self._n_threads, _FLOATS_AT_ONCE // (COLUMNS * k))
        for first in range(0, blocks, at_once):
            end = min(first + at_once, blocks)
            floats = rows(first * COLUMNS, min(end * COLUMNS, n)).contiguous()
            # C counts rows from row 0, but reads only the rows of its blocks.
            source = floats.data_ptr() - first * COLUMNS * k * floats.itemsize
            if not self._share(range(first, end), function, (source, n, k, *arguments), address):
                return False
        return True

    def _share(self, blocks: range, function: Any, arguments: tuple[Any, ...], address: int) -> bool:
        """Run a function of pack.c over blocks in all threads; returns whether every part succeeded."""
        ends = [blocks.start + len(blocks) * i // self._n_threads for i in range(self._n_threads + 1)]
        with ThreadPoolExecutor(self._n_threads) as threads:  # ctypes releases the GIL
            parts = pairwise(ends)
            done = threads.map(lambda part: function(*arguments, *part, address), parts)
            results = list(done)  # wait for every part, because the memory is used afterwards
        return False not in results
