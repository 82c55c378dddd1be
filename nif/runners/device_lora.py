"""DeviceLora: adapters of the lean loop, whose merged projections have merged adapters.

Steps of few rows go through kernels of our own, which take each row's adapter as it comes; steps of many rows go
through the library's products, one pair for each adapter's rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from genbatch.nif.kernels.lora import LoraParts, NormedRows, lora_delta
from genbatch.nif.lora import LoraAdapter, LoraLinear

if TYPE_CHECKING:
    from genbatch.nif.models.model import Model

QKV, OUT, GATE_UP, DOWN = range(4)
_MODULES = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    OUT: ("self_attn.o_proj",),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    DOWN: ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class _Pair:
    """An adapter's matrices for one merged projection."""

    a: torch.Tensor  # [ranks, inputs] float32
    b: torch.Tensor  # [outputs, ranks] float32, scaled


_Pairs = Mapping[tuple[int, int], _Pair]  # by layer and place


class DeviceLora:
    """The adapters on the device.

    Args:
        model: of the Llama family.
    """

    def __init__(self, model: "Model") -> None:
        self._device = model.device
        modules = dict(model.hf.named_modules())
        self._sizes = {name: one.out_features for name, one in modules.items() if isinstance(one, torch.nn.Linear)}
        self._num_layers = len(model.layers)
        self._pairs: dict[int, _Pairs] = {}  # by handle
        self._last: tuple[tuple[int, ...], LoraRows] | None = None  # a run's steps have the same rows

    def add(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner.add_adapter`."""
        pairs: dict[tuple[int, int], _Pair] = {}
        for layer in range(self._num_layers):
            for place, names in _MODULES.items():
                modules = [f"model.layers.{layer}.{name}" for name in names]
                linears = [adapter.linears.get(module) for module in modules]
                if any(linear is not None for linear in linears):
                    pairs[layer, place] = self._merged(linears, [self._sizes[module] for module in modules])
        self._pairs[adapter.handle] = pairs

    def drop(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner.drop_adapter`."""
        del self._pairs[adapter.handle]
        self._last = None

    def rows(self, adapters: torch.Tensor | None) -> "LoraRows | None":
        """What the rows of a step have; None where nobody has an adapter.

        Args:
            adapters: [T] int64 on the CPU; see RaggedBatch.
        """
        if adapters is None:
            return None
        handles = tuple(adapters.tolist())
        if self._last is None or self._last[0] != handles:
            named = sorted({*handles} - {0})
            place_of = {handle: place for place, handle in enumerate(named)} | {0: -1}
            owners = torch.tensor([place_of[handle] for handle in handles], dtype=torch.int32)
            self._last = handles, LoraRows([self._pairs[handle] for handle in named], owners, self._device)
        return self._last[1]

    def _merged(self, linears: Sequence[LoraLinear | None], sizes: Sequence[int]) -> _Pair:
        ranks = sum(linear.rank for linear in linears if linear is not None)
        b = torch.zeros((sum(sizes), ranks))
        row = rank = 0
        for linear, size in zip(linears, sizes, strict=True):
            if linear is not None:
                b[row : row + size, rank : rank + linear.rank] = linear.b * linear.scale
                rank += linear.rank
            row += size
        a = torch.cat([linear.a for linear in linears if linear is not None])
        return _Pair(a.to(self._device), b.to(self._device))


class LoraRows:
    """The rows of a step, or some of them, and their adapters.

    Args:
        pairs: of each adapter of the step.
        owners: [R] int32 on the CPU, which of them a row has, -1 for none.
        device: where the step runs.
    """

    def __init__(self, pairs: Sequence[_Pairs], owners: torch.Tensor, device: torch.device) -> None:
        self._pairs = pairs
        self._device = device
        self._owners = owners.to(device, non_blocking=True)
        self._rows = [(owners == place).nonzero()[:, 0].to(device) for place in range(len(pairs))]
        self._parts: dict[tuple[int, int], LoraParts | None] = {}

    def delta(self, layer: int, place: int, x: NormedRows, width: int) -> torch.Tensor | None:
        """What to add to a product of few rows, [R, width] float32; None: nothing."""
        key = layer, place
        if key not in self._parts:
            self._parts[key] = self._gathered(key)
        parts = self._parts[key]
        return None if parts is None else lora_delta(x, self._owners, parts, width)

    def add_to(self, layer: int, place: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out`, a product of many rows `x`, with what the adapters add to it."""
        for pairs, rows in zip(self._pairs, self._rows, strict=True):
            pair = pairs.get((layer, place))
            if pair is not None and len(rows):
                added = x[rows].float() @ pair.a.T @ pair.b.T
                out[rows] = (out[rows].float() + added).to(out.dtype)
        return out

    def _gathered(self, key: tuple[int, int]) -> LoraParts | None:
        pairs = [one.get(key) for one in self._pairs]
        ranks = [0 if pair is None else len(pair.a) for pair in pairs]
        if not any(ranks):
            return None
        places = [(0, 0) if pair is None else (pair.a.data_ptr(), pair.b.data_ptr()) for pair in pairs]
        a, b = torch.tensor(places, dtype=torch.int64).T.contiguous().to(self._device)
        return LoraParts(a, b, torch.tensor(ranks, dtype=torch.int32).to(self._device), max(ranks))
