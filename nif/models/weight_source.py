"""Weight sources: tensors under transformers' names, each in its file's own format.

source = SafetensorsWeights("llama", directory)      # or GgufWeights, or ModuleWeights
tensor = source.tensor("model.layers.0.mlp.up_proj.weight")
tensor.kind, tensor.shape                            # "BF16", (1536, 576)
packer.linear([tensor])                              # nif/native/weights.py packs it straight from the file

Files are mapped: a tensor is a view of its file until it is packed, and `release` returns the read pages to the system.
So loading needs memory for the packed model and a few rows at a time.
"""

import json
import math
import mmap
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from genbatch.nif.errors import ModelError, TensorError

if TYPE_CHECKING:  # imported where tensors are made, because a model with kept packed weights makes no tensors
    import torch

FLOAT_KINDS = {"F32": 4, "F16": 2, "BF16": 2}
"""The kinds of plain numbers, with their bytes. Every other kind is in `GROUP_KINDS`, `FP8_KINDS` or `FP4_KINDS`, or is
one of GGML's types of blocks."""

GROUP_KINDS = {"G4_32": (4, 32), "G4_64": (4, 64), "G4_128": (4, 128), "G8_32": (8, 32), "G8_128": (8, 128)}
"""Bits of a code, and inputs of a block. A block has a scale as float32, a zero as float16, and codes in the inputs'
order; of two codes of 4 bits the first is in the low half of a byte. A weight is scale * (code - zero)."""

FP8_KINDS = {"F8_32": 32, "F8_128": 128}
"""Inputs of a block. A block has a scale as float32, and numbers in FP8 (E4M3). A weight is the product in float32."""

FP4_KINDS = {"N4_32": 32, "N4_128": 128}
"""Inputs of a block of NVFP4, as in safetensors. A block has the matrix's scale as float32, a scale in FP8 (E4M3) for
every 16 inputs, and codes of 4 bits (E2M1) in the inputs' order, the first in the low half of a byte."""

CODE_KINDS = {"Q1_0": (41, 128, 1), "Q2_0": (42, 64, 2)}
"""Types of llama.cpp that the package `gguf` does not compute: GGML's number, weights of a block, bits of a code. A
block has a scale as float16, and codes in the weights' order, low bits first. A weight is scale * (code - 1); a code of
one bit counts as 2."""

# Further types of safetensors, for the parts of quantised checkpoints.
_PART_KINDS = {"I8": 1, "U8": 1, "I16": 2, "I32": 4, "U32": 4, "I64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
# torch's names of these types.
_TORCH_NAMES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U8": "uint8",
    "U32": "uint32",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
}

_MAX_HEADER_BYTES = 1 << 27  # limit for a safetensors file; the format's own limit is 100 MB


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in its file's format.

    Args:
        name: transformers' name.
        kind: "F32", "F16", "BF16", a block type such as "Q4_K", or one of `GROUP_KINDS`, `FP8_KINDS` or `FP4_KINDS`.
        shape: transformers' shape.
        rows: [product of all but the last dimension, bytes of a row] uint8, usually a view of the file.
        row_order: if the file has another order of rows: row i of the tensor is `rows[row_order[i]]`.
        offset: an addend to every element; files for llama.cpp have some norms plus one.
        column_order: if the file has another order of columns: column i of the tensor is the file's column_order[i].
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rows: np.ndarray
    row_order: np.ndarray | None = None
    offset: float = 0.0
    column_order: np.ndarray | None = None

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of the file."""
        return int(self.rows.shape[1])

    def addresses(self) -> np.ndarray:
        """Return the address of each row, [rows] uint64; valid as long as `rows`."""
        start, stride = self.rows.ctypes.data, self.rows.strides[0]
        order = np.arange(len(self.rows)) if self.row_order is None else self.row_order
        return (order * stride + start).astype(np.uint64)

    def part(self, index: int) -> "StoredTensor":
        """Return one matrix of a tensor of three dimensions, such as an expert's."""
        count = int(np.prod(self.shape[1:-1]))
        rows = slice(index * count, (index + 1) * count)
        taken = self.rows[rows if self.row_order is None else self.row_order[rows]]
        return StoredTensor(self.name, self.kind, self.shape[1:], taken)

    def floats(self, first: int = 0, end: int | None = None) -> "torch.Tensor":
        """Return the exact values of the rows from `first` to before `end`: float32, [rows, last dimension].

        Raises:
            TensorError: a value is NaN or infinite.
        """
        import torch

        rows = self.rows[first:end] if self.row_order is None else self.rows[self.row_order[first:end]]
        if self.kind in FLOAT_KINDS:
            values = torch.from_numpy(np.array(rows)).view(torch_type(self.kind)).float()
        elif self.kind in GROUP_KINDS:
            values = torch.from_numpy(_group_values(self.kind, rows))
        elif self.kind in FP8_KINDS:
            values = _fp8_values(self.kind, rows)
        elif self.kind in FP4_KINDS:
            values = _fp4_values(self.kind, rows)
        elif self.kind in CODE_KINDS:
            values = torch.from_numpy(_code_values(self.kind, rows))
        else:
            with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale is refused below
                import gguf  # here, because only GGUF files need the package

                values = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[self.kind]))
        if values.numel() and not is_finite(values):
            raise TensorError(self.name)
        if self.column_order is not None:
            values = values[:, torch.from_numpy(self.column_order)]
        return values + self.offset if self.offset else values

    def nibbles(self, size: int) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None":
        """Return codes of 4 bits in groups of `size` inputs with one scale and zero; None for other tensors.

        Returns:
            Codes [rows, groups, size] uint8, scales [rows, groups] float32, zeros [rows, groups] uint8.
        """
        import torch

        bits, inputs = GROUP_KINDS.get(self.kind, (0, 0))
        if bits != 4 or inputs % size or self.row_order is not None:
            return None
        blocks = self.rows.reshape(len(self.rows), -1, 6 + inputs // 2)
        scales = blocks[:, :, :4].copy().view("<f4")[:, :, 0].repeat(inputs // size, 1)
        zeros = blocks[:, :, 4:6].copy().view("<f2")[:, :, 0].astype(np.uint8).repeat(inputs // size, 1)
        codes = np.stack((blocks[:, :, 6:] & 15, blocks[:, :, 6:] >> 4), axis=3).reshape(len(blocks), -1, size)
        return torch.from_numpy(codes), torch.from_numpy(scales), torch.from_numpy(zeros)

    def whole(self) -> "torch.Tensor":
        """Return all exact values, float32, in the tensor's own shape."""
        return self.floats().reshape(self.shape)


class WeightSource(Protocol):
    """A model's tensors by the names that transformers gives them."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        ...

    def tensor(self, name: str) -> StoredTensor:
        """Return one tensor.

        Raises:
            ModelError: no tensor has the name, or the tensor's type is not supported; it names file and tensor.
        """
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it; raises the errors of `tensor`."""
        ...

    def release(self) -> None:
        """Return the read pages to the system; later reads come from the files again."""
        ...


def torch_type(kind: str) -> "torch.dtype":
    """Return torch's type of a safetensors type."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[kind])
    return dtype


def is_finite(values: "torch.Tensor") -> bool:
    """Return whether no value is NaN or infinite, in one pass and without a copy; `values` is not empty."""
    import torch

    lowest, highest = torch.aminmax(values)  # a NaN makes both results NaN
    return math.isfinite(float(lowest)) and math.isfinite(float(highest))


def bytes_per_row(kind: str, length: int) -> int | None:
    """Return the bytes of a row of `length` elements; None if these do not fill the kind's blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # only GGUF files need the package

    if kind in CODE_KINDS:
        _, per_block, bits = CODE_KINDS[kind]
        block_bytes = 2 + per_block * bits // 8
    else:
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return length // per_block * block_bytes if length % per_block == 0 else None


class MappedFile:
    """A file's bytes without a copy.

    Args:
        model: the user's name of the model, for errors.
        path: the file.

    Raises:
        ModelError: the file cannot be opened, or is empty.
    """

    def __init__(self, model: str, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as fault:
            raise ModelError(model, f"{path.name} cannot be read: {fault}") from fault
        self.path = path
        self.bytes = np.frombuffer(self._map, np.uint8)

    def release(self) -> None:
        """Drop the file's pages from this process; they stay in the system's cache while that has room."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


class SafetensorsWeights:
    """The tensors of a directory of safetensors, in one file or in shards.

    Args:
        model: the user's name of the model, for errors.
        directory: a directory with model.safetensors, or with model.safetensors.index.json and the files in this index.

    Raises:
        ModelError: a file is missing, cut short, or contradicts itself.
    """

    def __init__(self, model: str, directory: Path) -> None:
        self._model = model
        self._directory = directory
        self._files: list[MappedFile] = []
        self._entries: dict[str, tuple[MappedFile, str, tuple[int, ...], int, int]] = {}
        for path in _shards(model, directory):
            file = MappedFile(model, path)
            self._files.append(file)
            for name, entry in _entries(model, file):
                if name in self._entries:
                    both = f"{self._entries[name][0].path.name} and {path.name}"
                    raise ModelError(model, f"its weights cannot be read: {both} have a tensor {name}")
                self._entries[name] = (file, *entry)

    def _entry(self, name: str) -> tuple[MappedFile, str, tuple[int, ...], int, int]:
        if name not in self._entries:
            raise ModelError(self._model, f"its weights lack {name} ({self._directory.name})")
        return self._entries[name]

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._entries.keys()

    def tensor(self, name: str) -> StoredTensor:
        """See `WeightSource`."""
        file, kind, shape, start, end = self._entry(name)
        if kind not in FLOAT_KINDS:
            raise ModelError(self._model, f"{file.path.name}: {name} is of type {kind}, not F32, F16 or BF16")
        shape = shape or (1,)
        rows = file.bytes[start:end].reshape(math.prod(shape[:-1]), shape[-1] * FLOAT_KINDS[kind])
        return StoredTensor(name, kind, shape, rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`. The tensor may be of any type."""
        return self._entry(name)[2]

    def kind(self, name: str) -> str:
        """Return the safetensors type of an existing tensor."""
        return self._entries[name][1]

    def file(self, name: str) -> str:
        """Return the name of an existing tensor's file."""
        return self._entries[name][0].path.name

    def part(self, name: str, index: int | None = None) -> "torch.Tensor":
        """Return a copy of an existing tensor, in the file's type.

        Args:
            index: the matrix to copy, by the first dimension; None copies the whole tensor.

        Raises:
            ModelError: the type is not supported.
        """
        import torch

        file, kind, shape, start, end = self._entries[name]
        if kind not in _TORCH_NAMES:
            raise ModelError(self._model, f"{file.path.name}: {name} is of type {kind}, which is not supported")
        if index is not None:
            size = (end - start) // shape[0]
            start, end, shape = start + index * size, start + (index + 1) * size, shape[1:]
        return torch.from_numpy(np.array(file.bytes[start:end])).view(torch_type(kind)).reshape(shape)

    def release(self) -> None:
        """See `WeightSource`."""
        for file in self._files:
            file.release()


_TEXT_PARTS = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
"""Prefixes of names in a checkpoint with a text model and other parts, and in a checkpoint of the text model."""


class TextWeights:
    """The tensors of a checkpoint that also reads pictures, by its text model's names. Implements `WeightSource`.

    Args:
        files: the whole checkpoint; tensors of its other parts keep their names.
    """

    def __init__(self, files: WeightSource) -> None:
        self._files = files
        self._stored = {self._own(name): name for name in files.names()}

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._stored.keys()

    def tensor(self, name: str) -> StoredTensor:
        """See `WeightSource`."""
        return replace(self._files.tensor(self._stored.get(name, name)), name=name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self._files.shape(self._stored.get(name, name))

    def release(self) -> None:
        """See `WeightSource`."""
        self._files.release()

    @staticmethod
    def _own(name: str) -> str:
        for start, own in _TEXT_PARTS:
            if name.startswith(start):
                return own + name.removeprefix(start)
        return name


class JoinedWeights:
    """Joins a convolution's channels, which some checkpoints have in parts. Implements `WeightSource`.

    Args:
        files: the whole checkpoint.
    """

    PARTS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
    WHOLE = "conv1d.weight"

    def __init__(self, files: WeightSource) -> None:
        self.files = files
        names = files.names()
        starts = [name.removesuffix(self.PARTS[0]) for name in names if name.endswith(f".{self.PARTS[0]}")]
        self._joined = {start + self.WHOLE: [start + part for part in self.PARTS] for start in starts}
        parts = {part for joined in self._joined.values() for part in joined}
        self._names = {name for name in names if name not in parts} | self._joined.keys()

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._names

    def tensor(self, name: str) -> StoredTensor:
        """See `WeightSource`."""
        if name not in self._joined:
            return self.files.tensor(name)
        parts = [self.files.tensor(part) for part in self._joined[name]]
        rows = np.concatenate([part.rows for part in parts])
        return StoredTensor(name, parts[0].kind, self.shape(name), rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        if name not in self._joined:
            return self.files.shape(name)
        shapes = [self.files.shape(part) for part in self._joined[name]]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def release(self) -> None:
        """See `WeightSource`."""
        self.files.release()


def joined(files: WeightSource) -> WeightSource:
    """Return the checkpoint, as JoinedWeights if it has a convolution's channels in parts."""
    return JoinedWeights(files) if any(name.endswith(JoinedWeights.PARTS[0]) for name in files.names()) else files


def stored(name: str, values: "torch.Tensor") -> StoredTensor:
    """Return numbers in memory, of one of `FLOAT_KINDS`, as a tensor of a file."""
    import torch

    values = values.contiguous()
    values = values.reshape(values.shape or 1)
    kind = next(kind for kind in FLOAT_KINDS if torch_type(kind) == values.dtype)
    rows = values.reshape(-1, values.shape[-1]).cpu().view(torch.uint8).numpy()
    return StoredTensor(name, kind, tuple(values.shape), rows)


class ModuleWeights:
    """The tensors of a module in memory.

    Args:
        hf: transformers' module, on the CPU.
    """

    def __init__(self, hf: "torch.nn.Module") -> None:
        self._tensors = dict(hf.state_dict())

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._tensors.keys()

    def tensor(self, name: str) -> StoredTensor:
        """See `WeightSource`."""
        return stored(name, self._tensors[name].detach())

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return tuple(self._tensors[name].shape)

    def release(self) -> None:
        """Do nothing, because no file is mapped."""


def _group_values(kind: str, rows: np.ndarray) -> np.ndarray:
    """Return the weights [rows, inputs] float32 of rows of a kind of `GROUP_KINDS`."""
    bits, inputs = GROUP_KINDS[kind]
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, 6 + inputs * bits // 8)
    scales = blocks[:, :, :4].copy().view("<f4")  # [rows, blocks, 1]
    zeros = blocks[:, :, 4:6].copy().view("<f2").astype(np.float32)
    codes = blocks[:, :, 6:]
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=3).reshape(*codes.shape[:2], inputs)
    values: np.ndarray = (scales * (codes.astype(np.float32) - zeros)).reshape(len(rows), -1)
    return values


def _code_values(kind: str, rows: np.ndarray) -> np.ndarray:
    """Return the weights [rows, inputs] float32 of rows of a kind of `CODE_KINDS`."""
    _, inputs, bits = CODE_KINDS[kind]
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, 2 + inputs * bits // 8)
    scales = blocks[:, :, :2].copy().view("<f2").astype(np.float32)  # [rows, blocks, 1]
    planes = np.unpackbits(blocks[:, :, 2:], axis=2, bitorder="little").reshape(*blocks.shape[:2], inputs, bits)
    codes = planes @ np.array([2] if bits == 1 else [1, 2], np.float32)
    values: np.ndarray = (scales * (codes - 1)).reshape(len(rows), -1)
    return values


def _fp8_values(kind: str, rows: np.ndarray) -> "torch.Tensor":
    """Return the weights [rows, inputs] float32 of rows of a kind of `FP8_KINDS`."""
    import torch

    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, 4 + FP8_KINDS[kind])
    scales = torch.from_numpy(blocks[:, :, :4].copy().view("<f4"))  # [rows, blocks, 1]
    return (_e4m3(blocks[:, :, 4:]) * scales).reshape(len(rows), -1)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _fp4_values(kind: str, rows: np.ndarray) -> "torch.Tensor":
    """Return the weights [rows, inputs] float32 of rows of a kind of `FP4_KINDS`."""
    import torch

    inputs = FP4_KINDS[kind]
    groups = inputs // 16
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, 4 + groups + inputs // 2)
    whole = torch.from_numpy(blocks[:, :, :4].copy().view("<f4"))  # [rows, blocks, 1]
    scales = (_e4m3(blocks[:, :, 4 : 4 + groups]) * whole)[:, :, :, None]
    codes = blocks[:, :, 4 + groups :]
    pairs = np.stack((codes & 15, codes >> 4), axis=3).reshape(*codes.shape[:2], groups, 16)
    return (torch.from_numpy(_E2M1[pairs]) * scales).reshape(len(rows), -1)


def _e4m3(codes: np.ndarray) -> "torch.Tensor":
    import torch

    return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float()


def _shards(model: str, directory: Path) -> list[Path]:
    """Return the weight files of a directory."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as fault:
        raise ModelError(model, f"its weights cannot be read: {index.name}: {fault!r}") from fault
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise ModelError(model, f"its weights cannot be read: {index.name} names the file {name!r}")
        if not (directory / name).is_file():
            raise ModelError(model, f"its weights cannot be read: {name} is missing")
    return [directory / name for name in sorted(files)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object and refuse one with a duplicate key."""
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"the key {key!r} occurs twice")
        members[key] = value
    return members


def _entries(model: str, file: MappedFile) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int, int]]]:
    """Iterate over a safetensors file's tensors: name, type, shape, first byte, and the byte after the last."""

    def broken(what: str) -> ModelError:
        return ModelError(model, f"its weights cannot be read: {file.path.name}: {what}")

    size = len(file.bytes)
    if size < 8:
        raise broken(f"a safetensors file has more than {size} bytes")
    (header_bytes,) = struct.unpack("<Q", file.bytes[:8].tobytes())
    start = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or start > size:
        raise broken(f"a header of {header_bytes} bytes in a file of {size}")
    try:
        header: Any = json.loads(file.bytes[8:start].tobytes(), object_pairs_hook=_object)
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        last, used = "", 0
        for name, entry in sorted(entries, key=lambda item: tuple(item[1]["data_offsets"])):
            first, end = entry["data_offsets"]
            shape, kind = tuple(entry["shape"]), entry["dtype"]
            if not all(type(n) is int and n >= 0 for n in (first, end, *shape)) or not isinstance(kind, str):
                raise broken(f"the entry of {name} is {str(entry)[:200]}")
            if first < used and end > first:
                raise broken(f"{name} begins at byte {start + first}, within {last}")
            last, used = name, max(used, end)
            if first > end or start + end > size:
                raise broken(f"{name} ends at byte {start + end} of {size}")
            item_bytes = FLOAT_KINDS.get(kind) or _PART_KINDS.get(kind)
            if item_bytes is not None and end - first != int(np.prod(shape, dtype=object)) * item_bytes:
                raise broken(f"{name} has {end - first} bytes, which do not fit {kind} of shape {list(shape)}")
            yield name, (kind, shape, start + first, start + end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise broken(f"its header is not readable: {fault!r}") from fault
