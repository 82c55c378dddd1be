"""AdapterWeights: an adapter's matrices as lora.c reads them, beside whatever form the model's own weights have.

Queries, keys and values are one linear of the kernels, and so are gates and ups. Their adapters' ranks stand one after
another, and each half block of outputs knows which of them it needs.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from genbatch.nif.lora import LoraAdapter, LoraLinear
from genbatch.nif.models.architectures import Architecture, head_dim_of, kv_heads_of
from genbatch.nif.native.library import LORA_COLUMNS, LORA_PLACES, Lora
from genbatch.nif.native.memory import NativeArena
from genbatch.nif.native.weights import interleave_gate_up

_HALF = np.dtype([("first", np.int32), ("count", np.int32), ("at", np.int64)])  # `lora_half` of genbatch.h
_NOWHERE = -1  # an output that pads


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Where the outputs of one linear of the kernels come from.

    Args:
        modules: transformers' names.
        module: of each output, which of them it is of; _NOWHERE pads.
        row: and which of that one's outputs it is.
    """

    modules: tuple[str, ...]
    module: np.ndarray
    row: np.ndarray


class AdapterWeights:
    """One adapter, packed; its memory lives as long as this object.

    Args:
        library: what `native_library` returned.
        adapter: what was read.
        architecture: how the model names and merges its linears.
        config: the model's.
        sizes: outputs of each of its modules.
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
        """In the order of `enum lora_place`; a layer with experts has no gates, ups and downs that are adapted."""
        tensors = architecture.tensors
        start = tensors.layer.format(layer)
        qkv, gate_up = ([start + name for name in names] for names in (tensors.qkv, tensors.gate_up))
        places = [
            self._by_head(qkv[0], config) if architecture.qkv_by_head else self._in_order(qkv),
            self._in_order([start + tensors.out]),
        ]
        if gate_up[0] in self._sizes:
            places.append(self._interleaved(gate_up) if architecture.gated else self._in_order(gate_up))
            places.append(self._in_order([start + tensors.down]))
        return places

    def _in_order(self, modules: Sequence[str]) -> _Outputs:
        sizes = [self._sizes[module] for module in modules]
        module = np.repeat(np.arange(len(modules)), sizes)
        return _Outputs(tuple(modules), module, np.concatenate([np.arange(size) for size in sizes]))

    def _by_head(self, module: str, config: Any) -> _Outputs:
        """One module that has, for each KV head, its queries, key and value; see `_Loader._qkv`."""
        kv_heads = kv_heads_of(config)
        per_head = config.num_attention_heads // kv_heads
        rows = np.arange(self._sizes[module]).reshape(kv_heads, per_head + 2, head_dim_of(config))
        order = [rows[:, :per_head].ravel(), rows[:, per_head].ravel(), rows[:, per_head + 1].ravel()]
        return _Outputs((module,), np.zeros(rows.size, np.int64), np.concatenate(order))

    def _interleaved(self, modules: Sequence[str]) -> _Outputs:
        """Gates and ups in runs; the upper and the lower half where one module has both."""
        plain = self._in_order(modules)
        halves = [torch.from_numpy(part + 1) for part in np.split(np.arange(len(plain.row)), 2)]
        places = interleave_gate_up(*halves).numpy() - 1  # what pads is 0 there, and _NOWHERE here
        pads = places == _NOWHERE
        return _Outputs(plain.modules, np.where(pads, _NOWHERE, plain.module[places]), plain.row[places])

    def _pack(self, outputs: _Outputs, linears: Sequence[LoraLinear | None]) -> Lora:
        """The matrices of one linear of the kernels."""
        there = [linear for linear in linears if linear is not None]
        ranks = sum(linear.rank for linear in there)
        self.most_ranks = max(self.most_ranks, ranks)
        padded = -(-len(outputs.row) // LORA_COLUMNS) * LORA_COLUMNS
        whole = np.zeros((padded, ranks), np.float32)
        uses = np.zeros((padded // LORA_COLUMNS, len(linears)), bool)  # which modules a half block has outputs of
        firsts, ends, end = np.zeros(len(linears), np.int64), np.zeros(len(linears), np.int64), 0
        for index, linear in enumerate(linears):
            if linear is None:
                continue
            firsts[index], end = end, end + linear.rank
            ends[index] = end
            columns = np.flatnonzero(outputs.module == index)
            whole[columns, firsts[index] : end] = linear.b.numpy()[outputs.row[columns]]
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
            a=self._hold(torch.cat([linear.a for linear in there]).numpy()),
            scales=self._hold(scales),
            b=self._hold(np.concatenate(parts)),
            halves=self._hold(halves),
            ranks=ranks,
        )

    def _hold(self, array: np.ndarray) -> int:
        """The address of a copy that stays."""
        plain = np.ascontiguousarray(array)
        address, place = self._arena.reserve(plain.nbytes)
        place.copy_(torch.from_numpy(plain.reshape(-1).view(np.uint8)))
        return address
