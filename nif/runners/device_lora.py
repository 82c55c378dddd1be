"""DeviceLora: adapters on the device, for the layer loop of the Llama family.

The projections of a layer are merged, and so are an adapter's matrices for these projections. Tables on the device
hold the addresses of each adapter's matrices. So a captured step can serve any adapter: the step's input has, for each
row, the number of an adapter in the tables. Steps of few rows, and captured steps, have a kernel that reads each row's
adapter. In other steps the library computes one pair of products for each adapter's rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from genbatch.nif.cuda_device import sent
from genbatch.nif.kernels.lora import LoraParts, NormedRows, lora_delta
from genbatch.nif.runner import LoraAdapter, LoraLinear

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model

QKV, OUT, GATE_UP, DOWN = range(4)  # the places of a layer's merged projections
PROJECTIONS = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    OUT: ("self_attn.o_proj",),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    DOWN: ("mlp.down_proj",),
}
_INITIAL_CAPACITY = 32  # adapters; the tables double when they are full


@dataclass(frozen=True, slots=True)
class _Pair:
    """An adapter's matrices for one merged projection."""

    a: torch.Tensor  # [ranks, inputs] float32
    b: torch.Tensor  # [outputs, ranks] float32, scaled


_Pairs = Mapping[tuple[int, int], _Pair]  # by layer and place


@dataclass(frozen=True, slots=True, eq=False)
class LoraTables:
    """The addresses and ranks of the adapters' matrices. A captured step reads the tables of its capture.

    Args:
        matrices: [layers, places, 2, capacity] int64 on the device, addresses of a and b.
        ranks: [layers, places, capacity] int32 on the device; 0 where an adapter does not adapt a projection.
        most_ranks: the highest rank of any adapter for each adapted projection, by layer and place.
    """

    matrices: torch.Tensor
    ranks: torch.Tensor
    most_ranks: Mapping[tuple[int, int], int]
    keeps: object = None  # the owner of the matrices' memory, if nothing else keeps it alive

    def parts(self, layer: int, place: int) -> LoraParts | None:
        """Return the matrices for one projection; None if no adapter adapts the projection."""
        most = self.most_ranks.get((layer, place))
        if most is None:
            return None
        a, b = self.matrices[layer, place]
        return LoraParts(a, b, self.ranks[layer, place], most)


class DeviceLora:
    """Holds the adapters on the device.

    Args:
        model: a model of the Llama family.
    """

    def __init__(self, model: "Model") -> None:
        self._device = model.torch_device
        modules = dict(model.hf.named_modules())
        self._sizes = {
            name: module.out_features for name, module in modules.items() if isinstance(module, torch.nn.Linear)
        }
        self._num_layers = len(model.layers)
        self._pairs: dict[int, _Pairs] = {}  # by handle
        self._numbers: dict[int, int] = {}  # by handle, the adapters' numbers in the tables
        self.tables = _empty_tables(self._num_layers, _INITIAL_CAPACITY, self._device)

    def add(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner.add_adapter`. Meanwhile another thread may launch steps with other adapters."""
        pairs: dict[tuple[int, int], _Pair] = {}
        for layer in range(self._num_layers):
            for place, names in PROJECTIONS.items():
                modules = [f"model.layers.{layer}.{name}" for name in names]
                linears = [adapter.linears.get(module) for module in modules]
                if any(linear is not None for linear in linears):
                    pairs[layer, place] = self._merged(linears, [self._sizes[module] for module in modules])
        taken = {*self._numbers.values()}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        tables = self.tables
        if number == tables.ranks.shape[2]:
            larger = _empty_tables(self._num_layers, 2 * number, self._device)
            larger.matrices.narrow(-1, 0, number).copy_(tables.matrices)
            larger.ranks.narrow(-1, 0, number).copy_(tables.ranks)
            tables = LoraTables(larger.matrices, larger.ranks, tables.most_ranks)
        _write(tables, number, pairs)
        ranks = {key: max(len(pair.a), tables.most_ranks.get(key, 0)) for key, pair in pairs.items()}
        most_ranks = {**tables.most_ranks, **ranks}
        if tables is not self.tables or most_ranks != tables.most_ranks:
            self.tables = LoraTables(tables.matrices, tables.ranks, most_ranks)
        self._pairs[adapter.handle] = pairs
        self._numbers[adapter.handle] = number

    def drop(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner.drop_adapter`."""
        del self._pairs[adapter.handle]
        self.tables.ranks.select(-1, self._numbers.pop(adapter.handle)).zero_()

    def numbers(self, adapters: torch.Tensor | None) -> torch.Tensor | None:
        """Return each token's adapter number [T] int32, -1 without an adapter; None if no token has an adapter.

        Args:
            adapters: [T] int64 on the CPU; see TensorBatch.
        """
        if adapters is None:
            return None
        handles, places = np.unique(adapters.numpy(), return_inverse=True)
        numbers = [self._numbers[handle] if handle else -1 for handle in handles.tolist()]
        return torch.from_numpy(np.array(numbers, np.int32)[places])

    def rows(self, adapters: torch.Tensor | None) -> "LoraRows | None":
        """Return the adapters of a step that is not captured; None if no row has an adapter.

        Args:
            adapters: [T] int64 on the CPU; see TensorBatch.
        """
        numbers = self.numbers(adapters)
        if numbers is None:
            return None
        owners = numbers.numpy()
        there = [
            (self._pairs[handle], sent(rows, self._device))
            for handle, number in self._numbers.items()
            if len(rows := np.flatnonzero(owners == number))
        ]
        return LoraRows(self.tables, sent(owners, self._device), there)

    def _merged(self, linears: Sequence[LoraLinear | None], sizes: Sequence[int]) -> _Pair:
        ranks = sum(linear.rank for linear in linears if linear is not None)
        b = torch.zeros((sum(sizes), ranks))
        row = rank = 0
        for part, size in zip(linears, sizes, strict=True):
            if part is not None:
                b[row : row + size, rank : rank + part.rank] = torch.from_numpy(part.b) * part.scale
                rank += part.rank
            row += size
        a = torch.cat([torch.from_numpy(linear.a) for linear in linears if linear is not None])
        return _Pair(a.to(self._device), b.to(self._device))


class LoraRows:
    """The adapters of a step's rows.

    Args:
        tables: the adapters' tables.
        owners: [R] int32 on the device, each row's adapter number, -1 for a row without an adapter.
        pairs: each adapter's matrices and its rows; with None every product reads the tables.
    """

    def __init__(
        self,
        tables: LoraTables,
        owners: torch.Tensor,
        pairs: Sequence[tuple[_Pairs, torch.Tensor]] | None = None,
    ) -> None:
        self._tables = tables
        self._owners = owners
        self._pairs = pairs

    def delta(self, layer: int, place: int, x: NormedRows, width: int) -> torch.Tensor | None:
        """Return the adapters' addend to a product of few rows, [R, width] float32; None if no adapter adapts it."""
        parts = self._tables.parts(layer, place)
        return None if parts is None else lora_delta(x, self._owners, parts, width)

    def add_to(self, layer: int, place: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the adapters' products to `out`, the product of the rows `x`, in place; returns `out`."""
        if self._pairs is None:
            delta = self.delta(layer, place, NormedRows(x, None, None), out.shape[1])
            return out if delta is None else out.copy_(delta.add_(out))
        for pairs, rows in self._pairs:
            pair = pairs.get((layer, place))
            if pair is not None and len(rows):
                added = x[rows].float() @ pair.a.T @ pair.b.T
                out[rows] = (out[rows].float() + added).to(out.dtype)
        return out


def zero_adapter(
    num_layers: int, widths: Mapping[int, tuple[int, int]], num_rows: int, device: torch.device, *, by_tables: bool
) -> LoraRows:
    """Return rows with one adapter of zeros on every projection of every layer.

    Args:
        widths: inputs and outputs of the merged projections, by place.
        by_tables: whether every product reads the tables.
    """
    pairs = {
        (layer, place): _Pair(torch.zeros((1, inputs), device=device), torch.zeros((outputs, 1), device=device))
        for place, (inputs, outputs) in widths.items()
        for layer in range(num_layers)
    }
    empty = _empty_tables(num_layers, 1, device)
    _write(empty, 0, pairs)
    tables = LoraTables(empty.matrices, empty.ranks, dict.fromkeys(pairs, 1), keeps=pairs)
    owners = torch.zeros(num_rows, dtype=torch.int32, device=device)
    if by_tables:
        return LoraRows(tables, owners)
    return LoraRows(tables, owners, [(pairs, torch.arange(num_rows, device=device))])


def _empty_tables(num_layers: int, capacity: int, device: torch.device) -> LoraTables:
    shape = (num_layers, len(PROJECTIONS))
    matrices = torch.zeros((*shape, 2, capacity), dtype=torch.int64, device=device)
    return LoraTables(matrices, torch.zeros((*shape, capacity), dtype=torch.int32, device=device), {})


def _write(tables: LoraTables, number: int, pairs: _Pairs) -> None:
    """Write an adapter's addresses and ranks to the tables."""
    num_layers, num_places, _ = tables.ranks.shape
    matrices = torch.zeros((num_layers, num_places, 2), dtype=torch.int64)
    ranks = torch.zeros((num_layers, num_places), dtype=torch.int32)
    for key, pair in pairs.items():
        matrices[key] = torch.tensor([pair.a.data_ptr(), pair.b.data_ptr()])
        ranks[key] = len(pair.a)
    tables.matrices.select(-1, number).copy_(matrices)
    tables.ranks.select(-1, number).copy_(ranks)
