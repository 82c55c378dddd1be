"""AdapterWeights: an adapter's matrices in the layout of lora.c.

The kernels merge queries, keys and values into one linear, and also gates and ups. The ranks of their adapters lie one
after another. Each half block of outputs has the range of ranks that it needs.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from genbatch.nif.models.architecture import (
    Architecture,
    SomeRows,
    gated_rows,
    head_dim_of,
    kv_heads_of,
    latent_rows,
    qkv_names,
)
from genbatch.nif.native.abi import HEADER
from genbatch.nif.native.library import COLUMNS, LORA_COLUMNS, LORA_PLACES, Lora, NativeArena
from genbatch.nif.runner import LoraAdapter, LoraLinear

_HALF = HEADER.dtype("lora_half")
_PADDING = -1  # the module and row of a padding output


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The sources of one kernel linear's outputs.

    Args:
        modules: the modules' names in transformers.
        module: each output's index into `modules`; _PADDING for padding.
        row: each output's row in its module.
    """

    modules: tuple[str, ...]
    module: np.ndarray
    row: np.ndarray


class AdapterWeights:
    """One packed adapter; its memory lives as long as this object.

    Args:
        library: the result of `native_library`.
        adapter: the adapter's matrices.
        architecture: the names and merges of the model's linears.
        config: the model's configuration.
        sizes: the number of outputs of each module.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        adapter: LoraAdapter,
        architecture: Architecture,
        config: Any,
        sizes: dict[str, int],
    ) -> None:
        self._arena = NativeArena(library)  # in the order in which a step reads it
        self._sizes = sizes
        self.structs = (Lora * (config.num_hidden_layers * LORA_PLACES))()
        self.most_ranks = 0
        for layer in range(config.num_hidden_layers):
            for place, outputs in enumerate(self._places(architecture, config, layer)):
                linears = [adapter.linears.get(module) for module in outputs.modules]
                if any(linear is not None for linear in linears):
                    self.structs[layer * LORA_PLACES + place] = self._pack(outputs, linears)
        self.address = ctypes.addressof(self.structs)

    def _places(self, architecture: Architecture, config: Any, layer: int) -> list[_Outputs]:
        """Return a layer's linears in the order of `enum lora_place`. Linears of experts are not adapted."""
        tensors = architecture.tensors
        start = tensors.layer.format(layer)
        qkv, gate_up = ([start + name for name in names] for names in (tensors.qkv, tensors.gate_up))
        if architecture.latent is None:
            qkv = list(qkv_names(qkv, [f"{module}.weight" for module in qkv if module in self._sizes]))
        if qkv[0] in self._sizes:
            order = self._in_order(qkv)
            if architecture.latent is not None:
                own = [replace(some, name=start + some.name) for some in latent_rows(architecture.latent)]
                order = self._some_rows(own)
            elif architecture.gated_attention:
                order = self._some_rows(gated_rows(qkv, config))
            elif architecture.qkv_by_head:
                order = self._by_head(qkv[0], config)
            places = [order, self._in_order([start + tensors.out])]
        else:
            places = [_Outputs((), np.zeros(0, np.int64), np.zeros(0, np.int64))] * 2  # this layer has no attention
        if gate_up[0] in self._sizes:
            mixed = architecture.gated and layer not in architecture.sparse
            places.append(self._interleaved(gate_up) if mixed else self._in_order(gate_up))
            places.append(self._in_order([start + tensors.down]))
        return places

    def _in_order(self, modules: Sequence[str]) -> _Outputs:
        sizes = [self._sizes[module] for module in modules]
        module = np.repeat(np.arange(len(modules)), sizes)
        return _Outputs(tuple(modules), module, np.concatenate([np.arange(size) for size in sizes]))

    def _some_rows(self, rows: Sequence[SomeRows]) -> _Outputs:
        """Return some rows of several modules, as `LayerLoader._rows_of` merges them."""
        modules = list(dict.fromkeys(some.name for some in rows))
        orders = [np.concatenate(some.parts or (range(self._sizes[some.name]),)) for some in rows]
        owners = [np.full(len(order), modules.index(some.name)) for some, order in zip(rows, orders, strict=True)]
        return _Outputs(tuple(modules), np.concatenate(owners), np.concatenate(orders))

    def _by_head(self, module: str, config: Any) -> _Outputs:
        """Return the rows of one module that has queries, key and value of one KV head after another."""
        kv_heads = kv_heads_of(config)
        per_head = config.num_attention_heads // kv_heads
        rows = np.arange(self._sizes[module]).reshape(kv_heads, per_head + 2, head_dim_of(config))
        order = [rows[:, :per_head].ravel(), rows[:, per_head].ravel(), rows[:, per_head + 1].ravel()]
        return _Outputs((module,), np.zeros(rows.size, np.int64), np.concatenate(order))

    def _interleaved(self, modules: Sequence[str]) -> _Outputs:
        """Return gates and ups in runs; one module with both has the gates in its upper half."""
        plain = self._in_order(modules)
        half = COLUMNS // 2
        parts = np.split(np.arange(len(plain.row)), 2)
        runs = [np.pad(part, (0, -len(part) % half), constant_values=_PADDING).reshape(-1, half) for part in parts]
        places = np.stack(runs, axis=1).reshape(-1)
        pads = places == _PADDING
        return _Outputs(plain.modules, np.where(pads, _PADDING, plain.module[places]), plain.row[places])

    def _pack(self, outputs: _Outputs, linears: Sequence[LoraLinear | None]) -> Lora:
        """Pack the matrices for one linear of the kernels."""
        there = [linear for linear in linears if linear is not None]
        ranks = sum(linear.rank for linear in there)
        self.most_ranks = max(self.most_ranks, ranks)
        padded = -(-len(outputs.row) // LORA_COLUMNS) * LORA_COLUMNS
        whole = np.zeros((padded, ranks), np.float32)
        uses = np.zeros((padded // LORA_COLUMNS, len(linears)), bool)  # whether a half block has outputs of a module
        firsts, ends, end = np.zeros(len(linears), np.int64), np.zeros(len(linears), np.int64), 0
        for index, linear in enumerate(linears):
            if linear is None:
                continue
            firsts[index], end = end, end + linear.rank
            ends[index] = end
            columns = np.flatnonzero(outputs.module == index)
            whole[columns, firsts[index] : end] = linear.b[outputs.row[columns]]
            uses[columns // LORA_COLUMNS, index] = True
        halves = np.zeros(len(uses), _HALF)
        parts, at, begin = [], 0, 0
        for used, run in groupby(map(tuple, uses.tolist())):
            size = len(list(run))
            first = min((int(firsts[i]) for i, is_used in enumerate(used) if is_used), default=0)
            last = max((int(ends[i]) for i, is_used in enumerate(used) if is_used), default=0)
            rows = whole[begin * LORA_COLUMNS : (begin + size) * LORA_COLUMNS, first:last]
            parts.append(rows.reshape(size, LORA_COLUMNS, last - first).transpose(0, 2, 1).reshape(-1, LORA_COLUMNS))
            mine = halves[begin : begin + size]
            mine["first"], mine["count"] = first, last - first
            mine["at"] = at + (last - first) * np.arange(size)
            at, begin = at + (last - first) * size, begin + size
        scales = np.concatenate([np.full(linear.rank, linear.scale, np.float32) for linear in there])
        return Lora(
            a=self._hold(np.concatenate([linear.a for linear in there])),
            scales=self._hold(scales),
            b=self._hold(np.concatenate(parts)),
            halves=self._hold(halves),
            ranks=ranks,
        )

    def _hold(self, array: np.ndarray) -> int:
        """Copy the array into this object's memory, and return the copy's address."""
        plain = np.ascontiguousarray(array)
        address, place = self._arena.reserve(plain.nbytes)
        place[:] = plain.reshape(-1).view(np.uint8)
        return address
