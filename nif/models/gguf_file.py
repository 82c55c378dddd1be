"""Reads a GGUF file without converting it: its metadata, and its tensors as views by transformers' names.

file = GgufFile("model.gguf", Path("model.gguf"))
weights = GgufWeights(file, gguf_config(file))        # a WeightSource; gguf_config.py makes the configuration

This module parses the header itself, because gguf's reader takes seconds for a vocabulary, and trusts every length. It
would also run three times, for the configuration, the tokenizer and the weights. This parser checks every number of the
file.
"""

import math
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from genbatch.nif.errors import ModelError
from genbatch.nif.models.gguf_families import family_of
from genbatch.nif.models.gguf_family import MTP_LAYER
from genbatch.nif.models.weight_source import CODE_KINDS, FLOAT_KINDS, MappedFile, StoredTensor, bytes_per_row
from genbatch.nif.scoring import GGUF_RANK

if TYPE_CHECKING:  # a model with a kept description does not need transformers
    from transformers import PreTrainedConfig

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 2  # arrays of arrays; known files have no deeper arrays
BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("MXFP4", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"),
    *CODE_KINDS,
)
_READABLE = frozenset((*FLOAT_KINDS, *BLOCKS))


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the file's table of tensors."""

    kind: int
    shape: tuple[int, ...]  # in numpy's order: rows first
    start: int  # first byte in the file


class GgufFile:
    """The checked header of a GGUF file, and its tensors as views.

    Args:
        model: the user's name of the model, for errors.
        path: the file.
        stop_at: the last key of the metadata to read; None reads the whole header.

    Attributes:
        metadata: every key with its value; arrays of numbers are numpy arrays.

    Raises:
        ModelError: the file is no GGUF file, is cut short, or contradicts itself; the reason names file and place.
    """

    def __init__(self, model: str, path: Path, *, stop_at: str | None = None) -> None:
        self.model = model
        self.path = path
        self._stop_at = stop_at
        self._file = MappedFile(model, path)
        self._view = self._file.bytes.data
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, _Entry] = {}
        try:
            self._read_header()
        except struct.error as fault:
            raise self.fault(f"the file ends within its header ({len(self._view)} bytes)") from fault

    def fault(self, reason: str) -> ModelError:
        """Return an error that names this file, on one line."""
        return ModelError(self.model, f"{self.path.name}: {' '.join(reason.split())}")

    @property
    def architecture(self) -> str:
        """Return GGUF's name of the family, such as "llama"."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise self.fault("the metadata lack general.architecture")
        return name

    def names(self) -> Collection[str]:
        """Return the tensors' names in the file."""
        return self._entries.keys()

    def tensor(self, name: str) -> StoredTensor:
        """Return a view of one tensor, by its name in the file.

        Raises:
            ModelError: the tensor's type is not supported, or its bytes are outside the file.
        """
        if name not in self._entries:
            raise self.fault(f"tensor {name} is missing")
        entry = self._entries[name]
        kind = _kind_name(entry.kind)
        if kind not in _READABLE:
            raise self.fault(f"tensor {name} is of type {kind}; supported are {', '.join(sorted(_READABLE))}")
        row_bytes = bytes_per_row(kind, entry.shape[-1])
        if row_bytes is None:
            raise self.fault(f"tensor {name}: rows of {entry.shape[-1]} elements do not fill blocks of {kind}")
        count = int(np.prod(entry.shape[:-1], dtype=object))
        end = entry.start + count * row_bytes
        if end > len(self._view):
            raise self.fault(f"tensor {name} ends at byte {end}, the file at {len(self._view)}: it is cut short")
        rows = self._file.bytes[entry.start : end].reshape(count, row_bytes)
        return StoredTensor(name, kind, entry.shape, rows)

    def release(self) -> None:
        """Drop the file's pages from this process."""
        self._file.release()

    # The header

    def _read_header(self) -> None:
        if self._view[:4].tobytes() != _MAGIC:
            raise self.fault(f"it is not a GGUF file: it begins with {self._view[:4].tobytes()!r}")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self._view, 4)
        if version not in _VERSIONS:
            raise self.fault(f"it is GGUF of version {version}; supported are versions 2 and 3 in little endian")
        at = 24
        for _ in range(num_keys):
            key, at = self._string(at, "a key")
            (kind,) = struct.unpack_from("<I", self._view, at)
            if key in self.metadata:
                raise self.fault(f"the key {key!r} occurs twice")
            self.metadata[key], at = self._value(at + 4, kind, key, 0)
            if key == self._stop_at:
                return
        table = []
        for _ in range(num_tensors):
            name, at = self._string(at, "a tensor's name")
            entry, at = self._table_line(at, name)
            if name in self._entries:
                raise self.fault(f"tensor {name} occurs twice")
            self._entries[name] = entry
            table.append(name)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.fault(f"general.alignment is {alignment!r}, not a power of two")
        begin = -(-at // alignment) * alignment
        for name in table:
            entry = self._entries[name]
            if entry.start % alignment:
                raise self.fault(f"tensor {name} begins at offset {entry.start}, not a multiple of {alignment}")
            if begin + entry.start > len(self._view):
                at = begin + entry.start
                raise self.fault(f"tensor {name} begins at byte {at}, the file ends at {len(self._view)}")
            self._entries[name] = _Entry(entry.kind, entry.shape, begin + entry.start)
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        last, kind, end = "", "", 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].start):
            if entry.start < end:
                # PrismML's fork of llama.cpp uses the same number for blocks of 128 weights.
                older = "; Q2_0 has blocks of 64 weights, as in files named g64" if kind == "Q2_0" else ""
                raise self.fault(
                    f"tensor {last} ends at byte {end}, beyond the beginning of {name} at {entry.start}{older}"
                )
            kind = _kind_name(entry.kind)
            row_bytes = bytes_per_row(kind, entry.shape[-1]) if kind in _READABLE else 0
            last, end = name, entry.start + math.prod(entry.shape[:-1]) * (row_bytes or 0)

    def _table_line(self, at: int, name: str) -> tuple[_Entry, int]:
        (count,) = struct.unpack_from("<I", self._view, at)
        if not 1 <= count <= _MAX_DIMENSIONS:
            raise self.fault(f"tensor {name} has {count} dimensions")
        *dimensions, kind, offset = struct.unpack_from(f"<{count}QIQ", self._view, at + 4)
        if min(dimensions) < 1:
            raise self.fault(f"tensor {name} has the shape {dimensions[::-1]}")
        return _Entry(kind, tuple(reversed(dimensions)), offset), at + 16 + 8 * count

    def _string(self, at: int, what: str) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._view, at)
        end = at + 8 + length
        if end > len(self._view):
            raise self.fault(f"{what} of {length} bytes at byte {at} goes beyond the file's end at {len(self._view)}")
        try:
            return str(self._view[at + 8 : end], "utf-8"), end
        except UnicodeDecodeError as fault:
            raise self.fault(f"{what} at byte {at} is not UTF-8") from fault

    def _value(self, at: int, kind: int, key: str, depth: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            layout = "<" + _SCALARS[kind]
            return struct.unpack_from(layout, self._view, at)[0], at + struct.calcsize(layout)
        if kind == _STRING:
            return self._string(at, f"the value of {key!r}")
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise self.fault(f"the value of {key!r} is of the unknown type {kind}")
        kind, count = struct.unpack_from("<IQ", self._view, at)
        at += 12
        if kind in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[kind])
            end = at + count * size
            if end > len(self._view):
                raise self.fault(f"the array {key!r} of {count} elements goes beyond the file's end")
            return np.frombuffer(self._file.bytes[at:end], np.dtype("<" + _SCALARS[kind])), end
        items = []
        for _ in range(count):  # a hostile count fails at the file's end, because every element takes 8 bytes or more
            item, at = self._value(at, kind, key, depth + 1)
            items.append(item)
        return items, at


_CODE_KINDS = {number: kind for kind, (number, _, _) in CODE_KINDS.items()}


def _kind_name(kind: int) -> str:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # here, because only GGUF files need the package

    if kind in _CODE_KINDS:
        return _CODE_KINDS[kind]
    try:
        return GGMLQuantizationType(kind).name if GGMLQuantizationType(kind) in GGML_QUANT_SIZES else str(kind)
    except ValueError:
        return str(kind)


_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.([\w.]+?)(?:\.(weight|bias))?")
_IN_A_ROW = (".alpha_p", ".alpha_n")  # numbers that are rows of one element in a module
_CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
_OF_CONFIG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class GgufWeights:
    """A GGUF file's tensors by transformers' names. Implements `WeightSource`.

    Args:
        file: a file of a family in `FAMILIES`.
        config: the file's configuration from `gguf_config`.
    """

    def __init__(self, file: GgufFile, config: "PreTrainedConfig") -> None:
        self._file = file
        self._config: Any = config
        family = family_of(file.architecture, file.metadata)
        assert family is not None, "a file of another family is converted"
        self._family = family
        # A tensor without a name in the family keeps its own name, so that `check_all_used` reports it.
        of_config: tuple[str, ...] = _OF_CONFIG if file.architecture == "phi3" else _OF_CONFIG[:1]
        if file.metadata.get(f"{file.architecture}.pooling_type") == GGUF_RANK:
            of_config += ("cls.output.weight", "cls.output.bias")  # gguf_scoring reads them
        self._stored: dict[str, str] = {}  # by transformers' names
        self._place: dict[str, int] = {}  # by transformers' names, the index of a row or a matrix in a stored tensor
        self._parts: dict[str, dict[int, str]] = {}  # by transformers' names, the stored parts of a tensor by place
        self._numbers: dict[str, np.ndarray] = {}  # by transformers' names, numbers from the metadata
        for name in file.names():
            if name not in of_config:
                self._add(name)
        for key, part in family.numbers.items():
            self._add_numbers(key, part)

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._stored.keys()

    def tensor(self, name: str) -> StoredTensor:
        """See `WeightSource`."""
        if name not in self._stored:
            raise self._file.fault(f"the tensor for {name} is missing")
        if name in self._numbers:
            own: tuple[int, ...] = (1,) if name.endswith(_IN_A_ROW) else ()
            return StoredTensor(name, "F32", own, self._numbers[name].view(np.uint8).reshape(1, -1))
        if name in self._parts:
            return self._joined(name)
        tensor = self._file.tensor(self._stored[name])
        if (place := self._place.get(name)) is not None:
            if len(tensor.shape) > 2:
                return replace(tensor.part(place), name=name)
            return StoredTensor(name, tensor.kind, tensor.shape[-1:], tensor.rows[place : place + 1])
        shape, rows = tensor.shape, tensor.rows
        if name.endswith(self._family.flattened) and len(shape) == 2:
            shape, rows = (math.prod(shape),), rows.reshape(1, -1)
        order = self._order(name, shape[0])
        if order is not None and len(shape) == 1:  # the elements of a bias lie in one row
            rows, order = rows.reshape(len(order), -1)[order].reshape(1, -1), None
        if name.endswith(self._family.single_rows) and len(shape) == 1:
            shape = (1, *shape)
        if name.endswith(_CONVOLUTIONS) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        norm = "norm" in name and name.endswith(".weight") and not name.endswith(self._family.as_stored)
        offset = self._family.norm_offset if norm else 0.0
        stored = StoredTensor(name, tensor.kind, shape, rows, order, offset, self._column_order(name))
        return self._logs(stored) if name.endswith(self._family.negated_logs) else stored

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self.tensor(name).shape

    def release(self) -> None:
        """See `WeightSource`."""
        self._file.release()

    def _add(self, stored: str) -> None:
        """Add the names of a stored tensor: its own name, unless the family has names for it."""
        match = _LAYER.fullmatch(stored)
        each = self._family.stacked.get(stored.removesuffix(".weight"))
        if match is not None and (per_head := self._family.per_head.get(match[2])):
            each = self._family.layer.format(match[1]) + per_head
        if match is not None and match[3] == "weight" and match[2] in self._family.joined:
            ours, place = self._family.joined[match[2]]
            name = f"{self._family.layer.format(match[1])}{ours}.weight"
            self._stored[name] = stored
            self._parts.setdefault(name, {})[place] = stored
            return
        if each is None:
            self._stored[self._name_of(stored) or stored] = stored
            return
        for place in range(self._file.tensor(stored).shape[0]):
            name = each.format(place)
            self._stored[name], self._place[name] = stored, place

    def _add_numbers(self, key: str, part: str) -> None:
        """Add a key's number for each layer as a tensor."""
        value, count = self._file.metadata.get(key), self._config.num_hidden_layers
        values = np.broadcast_to(value, count) if isinstance(value, float) else value  # one number for all layers
        if not isinstance(values, np.ndarray) or values.shape != (count,) or not np.isfinite(values).all():
            raise self._file.fault(f"{key} is {value}, not a number for each of {count} layers")
        for layer, number in enumerate(values.astype(np.float32)):
            name = f"{self._family.layer.format(layer)}{part}"
            self._stored[name], self._numbers[name] = key, np.array([number])

    def _name_of(self, stored: str) -> str | None:
        family = self._family
        if match := _LAYER.fullmatch(stored):
            layer = family.layer.format(match[1])
            if family.mtp_names and int(match[1]) == self._config.num_hidden_layers:  # after all layers
                if mtp := family.mtp_names.get(match[2]):
                    return f"{mtp}.{match[3]}"
                layer = MTP_LAYER
            if bare := family.bare.get(match[2] if match[3] is None else f"{match[2]}.{match[3]}"):
                return layer + bare
            ours = family.layer_names.get(match[2])
            return None if ours is None or match[3] is None else f"{layer}{ours}.{match[3]}"
        top, _, suffix = stored.rpartition(".")
        return f"{family.top_names[top]}.{suffix}" if top in family.top_names else None

    def _joined(self, name: str) -> StoredTensor:
        """Return stored tensors one below the other. Different types become floats, which keeps every value."""
        places = self._parts[name]
        if sorted(places) != [0, 1]:
            raise self._file.fault(f"tensor {self._stored[name]} lacks its partner")
        parts = [self._file.tensor(places[place]) for place in sorted(places)]
        kinds, widths = {part.kind for part in parts}, {part.shape[-1] for part in parts}
        if len(widths) > 1:
            raise self._file.fault(f"tensors {places[0]} and {places[1]} differ in their inputs")
        shape = (sum(part.shape[0] for part in parts), *widths)
        if len(kinds) == 1:
            kind, rows = parts[0].kind, np.concatenate([part.rows for part in parts])
        else:
            kind, rows = "F32", np.concatenate([part.floats().numpy() for part in parts]).view(np.uint8)
        order = self._mixed_order(name, shape[0]) if self._family.mixed_heads else None
        return StoredTensor(name, kind, shape, rows, order)

    def _mixed_order(self, name: str, count: int) -> np.ndarray:
        """Return the file's row for each row of in_proj_qkvz; the file has queries, keys, values and gates in turn."""
        config = self._config
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads * config.linear_value_head_dim
        sizes = (keys * config.linear_key_head_dim,) * 2 + (values,) * 2
        if sum(sizes) != count:
            raise self._file.fault(
                f"tensor {self._stored[name]} and its other part have {count} rows, not {sum(sizes)}"
            )
        kinds = np.split(np.arange(count), np.cumsum(sizes)[:-1])
        return np.concatenate([rows.reshape(keys, -1) for rows in kinds], axis=1).reshape(-1)

    def _logs(self, stored: StoredTensor) -> StoredTensor:
        values = stored.whole()
        if not (values < 0).all():
            raise self._file.fault(f"tensor {self._stored[stored.name]} has a rate that is not negative")
        rows = (-values).log().reshape(1, -1).contiguous().numpy().view(np.uint8)
        return StoredTensor(stored.name, "F32", stored.shape, rows)

    def _grouped(self, size: int) -> np.ndarray:
        """Return the file's row for each row of values, `size` rows a head. The file has the key heads in turn."""
        keys, heads = self._config.linear_num_key_heads, self._config.linear_num_value_heads
        return np.arange(heads * size).reshape(heads // keys, keys, size).swapaxes(0, 1).reshape(-1)

    def _column_order(self, name: str) -> np.ndarray | None:
        if not self._family.tiled_heads or not name.endswith("linear_attn.out_proj.weight"):
            return None
        order = self._grouped(self._config.linear_value_head_dim)
        return None if np.array_equal(order, np.arange(len(order))) else order

    def _value_order(self, name: str, count: int) -> np.ndarray | None:
        """Return the order, as `_order` does, of the rows of a recurrent layer's tensor with heads of values."""
        if ".linear_attn." not in name or "norm" in name or "out_proj" in name:
            return None
        heads = self._config.linear_num_value_heads
        if count == heads:
            return self._grouped(1)
        values = heads * self._config.linear_value_head_dim
        before = count - values  # queries and keys
        if before not in (0, 2 * self._config.linear_num_key_heads * self._config.linear_key_head_dim):
            raise self._file.fault(f"tensor {self._stored[name]} has {count} rows for {heads} heads of values")
        return np.concatenate((np.arange(before), before + self._grouped(self._config.linear_value_head_dim)))

    def _order(self, name: str, count: int) -> np.ndarray | None:
        """Return the file's row for each row of a module's tensor; None if the order is the same.

        llama.cpp's converter reorders Llama's queries and keys, and GPT-NeoX's queries, keys and values.
        """
        if self._family.tiled_heads:
            return self._value_order(name, count)
        if self._family.qkv_together and ".query_key_value." in name:
            heads, parts = self._config.num_attention_heads, 3
        elif self._family.rotates_pairs and (match := re.search(r"\.([qk])_proj\.(weight|bias)$", name)):
            heads = self._config.num_attention_heads if match[1] == "q" else self._config.num_key_value_heads
            parts = 2
        else:
            return None
        if count % (parts * heads):
            raise self._file.fault(f"tensor {self._stored[name]} has {count} rows for {heads} heads")
        order = np.arange(count)
        if parts == 3:  # the file has all queries, then keys and values; the module has them head by head
            return np.ascontiguousarray(order.reshape(3, heads, -1).swapaxes(0, 1)).reshape(-1)
        return np.ascontiguousarray(order.reshape(heads, -1, 2).swapaxes(1, 2)).reshape(-1)
