"""Reads a GGUF file without converting it: metadata, tensors as views, and transformers' configuration and tokenizer.

file = GgufFile("model.gguf", Path("model.gguf"))
config, tokenizer = gguf_config(file), gguf_tokenizer(file)
weights = GgufWeights(file, config)                   # a WeightSource

The header is read by hand: gguf's own reader takes seconds for a vocabulary, trusts every length it meets, and is
called once for the configuration, once for the tokenizer and once for the weights. Nothing here trusts a number of the
file.
"""

import importlib.util
import math
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from genbatch.nif.errors import ModelError, TensorError
from genbatch.nif.models.architecture import read_whole
from genbatch.nif.models.file_checks import check_counts, token_ids
from genbatch.nif.models.gguf_families import GgufFamily, family_of
from genbatch.nif.models.weight_source import FLOAT_KINDS, MappedFile, StoredTensor, bytes_per_row

if TYPE_CHECKING:  # at run time where it is used: a model that was described before needs nothing of transformers
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 2  # arrays of arrays; nobody writes more
BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("MXFP4", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"),
)
_READABLE = frozenset((*FLOAT_KINDS, *BLOCKS))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the file's table of tensors."""

    kind: int
    shape: tuple[int, ...]  # as numpy has it: rows first
    start: int  # byte of the file


class GgufFile:
    """The header of a GGUF file, checked, and its tensors as views.

    Args:
        model: what the user called the model, for errors.
        path: the file.

    Attributes:
        metadata: every key with its value; arrays of numbers are numpy arrays.

    Raises:
        ModelError: it is no GGUF file, is cut short, or contradicts itself; the reason names the file and the place.
    """

    def __init__(self, model: str, path: Path) -> None:
        self.model = model
        self.path = path
        self._file = MappedFile(model, path)
        self._view = self._file.bytes.data
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, _Entry] = {}
        try:
            self._read_header()
        except struct.error as fault:
            raise self.fault(f"the file ends within its header ({len(self._view)} bytes)") from fault

    def fault(self, reason: str) -> ModelError:
        """Return an error that names this file, always on one line."""
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
            raise self.fault(f"tensor {name} is of type {kind}; read are {', '.join(sorted(_READABLE))}")
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
        """Drops the file's pages from this process."""
        self._file.release()

    # The header

    def _read_header(self) -> None:
        if self._view[:4].tobytes() != _MAGIC:
            raise self.fault(f"it is no GGUF file: it begins with {self._view[:4].tobytes()!r}")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self._view, 4)
        if version not in _VERSIONS:
            raise self.fault(f"it is GGUF of version {version}; versions 2 and 3 in little endian are read")
        at = 24
        for _ in range(num_keys):
            key, at = self._string(at, "a key")
            (kind,) = struct.unpack_from("<I", self._view, at)
            if key in self.metadata:
                raise self.fault(f"the key {key!r} occurs twice")
            self.metadata[key], at = self._value(at + 4, kind, key, 0)
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
                raise self.fault(f"tensor {name} begins at offset {entry.start}, no multiple of {alignment}")
            if begin + entry.start > len(self._view):
                at = begin + entry.start
                raise self.fault(f"tensor {name} begins at byte {at}, the file ends at {len(self._view)}")
            self._entries[name] = _Entry(entry.kind, entry.shape, begin + entry.start)
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        last, end = "", 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].start):
            if entry.start < end:
                raise self.fault(f"tensor {last} ends at byte {end}, beyond the beginning of {name} at {entry.start}")
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
            raise self.fault(f"{what} at byte {at} is no UTF-8") from fault

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
        for _ in range(count):  # a hostile count ends at the file's end: every element takes 8 bytes or more
            item, at = self._value(at, kind, key, depth + 1)
            items.append(item)
        return items, at


def _kind_name(kind: int) -> str:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # here: only GGUF files need the package

    try:
        return GGMLQuantizationType(kind).name if GGMLQuantizationType(kind) in GGML_QUANT_SIZES else str(kind)
    except ValueError:
        return str(kind)


_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.([\w.]+?)(?:\.(weight|bias))?")
_MORE_SETTINGS = {"nextn_predict_layers": "num_nextn_predict_layers"}
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
        of_config = _OF_CONFIG if file.architecture == "phi3" else _OF_CONFIG[:1]
        self._stored: dict[str, str] = {}  # by transformers' names
        self._row: dict[str, int] = {}  # of transformers' tensors that are one row of a stored one
        self._parts: dict[str, dict[int, str]] = {}  # of transformers' tensors that are several stored ones, by place
        for name in file.names():
            if name not in of_config:
                self._add(name)

    def names(self) -> Collection[str]:
        """As in `WeightSource`."""
        return self._stored.keys()

    def tensor(self, name: str) -> StoredTensor:
        """As in `WeightSource`."""
        if name not in self._stored:
            raise self._file.fault(f"the tensor for {name} is missing")
        if name in self._parts:
            return self._joined(name)
        found = self._file.tensor(self._stored[name])
        if (row := self._row.get(name)) is not None:
            return StoredTensor(name, found.kind, found.shape[-1:], found.rows[row : row + 1])
        shape, rows = found.shape, found.rows
        if name.endswith(self._family.flattened) and len(shape) == 2:
            shape, rows = (math.prod(shape),), rows.reshape(1, -1)
        order = self._order(name, shape[0])
        if order is not None and len(shape) == 1:  # a bias: its elements lie in one row
            rows, order = rows.reshape(len(order), -1)[order].reshape(1, -1), None
        if name.endswith(self._family.single_rows) and len(shape) == 1:
            shape = (1, *shape)
        if name.endswith(_CONVOLUTIONS) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        norm = "norm" in name and name.endswith(".weight") and not name.endswith(self._family.as_stored)
        offset = self._family.norm_offset if norm else 0.0
        stored = StoredTensor(name, found.kind, shape, rows, order, offset, self._column_order(name))
        return self._logs(stored) if name.endswith(self._family.negated_logs) else stored

    def shape(self, name: str) -> tuple[int, ...]:
        """As in `WeightSource`."""
        return self.tensor(name).shape

    def release(self) -> None:
        """As in `WeightSource`."""
        self._file.release()

    def _add(self, stored: str) -> None:
        """Enters the names of a stored tensor, its own where the family has none for it."""
        match = _LAYER.fullmatch(stored)
        per_head = None if match is None else self._family.per_head.get(match[2])
        if match is not None and match[3] == "weight" and match[2] in self._family.joined:
            ours, place = self._family.joined[match[2]]
            name = f"{self._family.layer.format(match[1])}{ours}.weight"
            self._stored[name] = stored
            self._parts.setdefault(name, {})[place] = stored
            return
        if match is None or per_head is None:
            self._stored[self._name_of(stored) or stored] = stored
            return
        for head in range(len(self._file.tensor(stored).rows)):
            name = self._family.layer.format(match[1]) + per_head.format(head)
            self._stored[name], self._row[name] = stored, head

    def _name_of(self, stored: str) -> str | None:
        family = self._family
        if match := _LAYER.fullmatch(stored):
            layer = family.layer.format(match[1])
            if bare := family.bare.get(match[2] if match[3] is None else f"{match[2]}.{match[3]}"):
                return layer + bare
            ours = family.layer_names.get(match[2])
            return None if ours is None or match[3] is None else f"{layer}{ours}.{match[3]}"
        top, _, suffix = stored.rpartition(".")
        return f"{family.top_names[top]}.{suffix}" if top in family.top_names else None

    def _joined(self, name: str) -> StoredTensor:
        """Return stored tensors one below the other; those of several types become floats, which keeps every value."""
        places = self._parts[name]
        if sorted(places) != [0, 1]:
            raise self._file.fault(f"tensor {self._stored[name]} lacks the one that it belongs to")
        parts = [self._file.tensor(places[place]) for place in sorted(places)]
        kinds, widths = {part.kind for part in parts}, {part.shape[-1] for part in parts}
        if len(widths) > 1:
            raise self._file.fault(f"tensors {places[0]} and {places[1]} differ in their inputs")
        shape = (sum(part.shape[0] for part in parts), *widths)
        if len(kinds) == 1:
            kind, rows = parts[0].kind, np.concatenate([part.rows for part in parts])
        else:
            kind, rows = "F32", torch.cat([part.floats() for part in parts]).view(torch.uint8).numpy()
        order = self._mixed_order(name, shape[0]) if self._family.mixed_heads else None
        return StoredTensor(name, kind, shape, rows, order)

    def _mixed_order(self, name: str, count: int) -> np.ndarray:
        """For each row of a module's in_proj_qkvz the file's row, which has all queries, keys, values and gates."""
        config = self._config
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads * config.linear_value_head_dim
        sizes = (keys * config.linear_key_head_dim,) * 2 + (values,) * 2
        if sum(sizes) != count:
            raise self._file.fault(f"tensor {self._stored[name]} makes {count} rows where {sum(sizes)} belong")
        kinds = np.split(np.arange(count), np.cumsum(sizes)[:-1])
        return np.concatenate([rows.reshape(keys, -1) for rows in kinds], axis=1).reshape(-1)

    def _logs(self, stored: StoredTensor) -> StoredTensor:
        values = stored.whole()
        if not (values < 0).all():
            raise self._file.fault(f"tensor {self._stored[stored.name]} has a rate that is not negative")
        rows = (-values).log().reshape(1, -1).contiguous().view(torch.uint8).numpy()
        return StoredTensor(stored.name, "F32", stored.shape, rows)

    def _grouped(self, size: int) -> np.ndarray:
        """Undoes turns of key heads: for each row of values, of `size` a head, where the file has it."""
        keys, heads = self._config.linear_num_key_heads, self._config.linear_num_value_heads
        return np.arange(heads * size).reshape(heads // keys, keys, size).swapaxes(0, 1).reshape(-1)

    def _column_order(self, name: str) -> np.ndarray | None:
        if not self._family.tiled_heads or not name.endswith("linear_attn.out_proj.weight"):
            return None
        order = self._grouped(self._config.linear_value_head_dim)
        return None if np.array_equal(order, np.arange(len(order))) else order

    def _value_order(self, name: str, count: int) -> np.ndarray | None:
        """As `_order`, of the rows of a recurrent layer that belong to heads of values."""
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
        """For each row of a module's tensor the row of the file's; None where they lie in the same order.

        Undoes what llama.cpp's converter does to Llama's queries and keys, and to GPT-NeoX's.
        """
        if self._family.tiled_heads:
            return self._value_order(name, count)
        if self._family.qkv_together and ".query_key_value." in name:
            heads, parts = self._config.num_attention_heads, 3
        elif self._family.rotates_pairs and (found := re.search(r"\.([qk])_proj\.(weight|bias)$", name)):
            heads = self._config.num_attention_heads if found[1] == "q" else self._config.num_key_value_heads
            parts = 2
        else:
            return None
        if count % (parts * heads):
            raise self._file.fault(f"tensor {self._stored[name]} has {count} rows for {heads} heads")
        order = np.arange(count)
        if parts == 3:  # all queries, keys and values, in the module head by head
            return np.ascontiguousarray(order.reshape(3, heads, -1).swapaxes(0, 1)).reshape(-1)
        return np.ascontiguousarray(order.reshape(heads, -1, 2).swapaxes(1, 2)).reshape(-1)


# Configuration and tokenizer


def gguf_config(file: GgufFile) -> "PreTrainedConfig":
    """Build the configuration that transformers would make of the file's metadata.

    Raises:
        ModelError: the metadata are incomplete or contradictory.
    """
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    architecture = file.architecture
    family = family_of(architecture, file.metadata)
    known: Any = GGUF_CONFIG_MAPPING
    names = known.get(architecture) if family is None or not family.settings else family.settings
    if names is None:
        raise file.fault(f"transformers does not know the architecture {architecture!r}")
    present = {} if family is None else {setting: name in file.names() for setting, name in family.present.items()}
    named_mistral = "mistral" in str(file.metadata.get("general.name")).lower()
    # A Mistral has no biases.
    kind = "mistral" if architecture == "llama" and named_mistral and not any(present.values()) else architecture
    settings: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(kind) or {}) | present
    if family is not None:
        kind = family.kind or kind
        settings.update(family.fixed)
    settings["tie_word_embeddings"] = "output.weight" not in file.names()
    for key, value in file.metadata.items():
        prefix, _, rest = key.partition(".")
        if prefix == architecture and (name := names.get(rest, _MORE_SETTINGS.get(rest))) not in (None, -1):
            settings[name] = value.tolist() if isinstance(value, np.ndarray) else value
    for role in ("bos", "eos", "unknown", "padding"):
        token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            settings[{"unknown": "unk", "padding": "pad"}.get(role, role) + "_token_id"] = token_id
    settings["vocab_size"] = file.tensor("token_embd.weight").shape[0]
    pattern = file.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if family is not None and family.windows_by_layer and isinstance(pattern, np.ndarray):
        settings["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern.tolist()]
    if (head_dim := file.metadata.get(f"{architecture}.attention.key_length")) is not None:
        settings["head_dim"] = head_dim
    try:
        if family is not None:
            _settle_layers(file, family, settings)
        settle = _settle_attention if family is None or family.settle is None else family.settle
        settle(file, settings)
        check_counts(file.model, file.path.name, settings)
        if extra := settings.get("num_nextn_predict_layers"):  # block_count counts these too; they are not evaluated
            settings["num_hidden_layers"] -= extra
        config: PreTrainedConfig = AutoConfig.for_model(kind, **settings)
    except ModelError:
        raise
    except Exception as fault:
        raise file.fault(f"its metadata are no configuration of {kind}: {fault}") from fault
    read_whole(config)
    return config


def _settle_layers(file: GgufFile, family: GgufFamily, settings: dict[str, Any]) -> None:
    """Translate the metadata about layers without attention to the configuration's settings."""
    heads = settings.get("num_key_value_heads")
    if family.other_layers is not None and isinstance(heads, list):
        if len({*heads} - {0}) != 1:
            raise file.fault(f"{file.architecture}.attention.head_count_kv is {heads}: layers differ in their KV heads")
        kinds = [family.other_layers if count == 0 else "full_attention" for count in heads]
        widths = settings.get("intermediate_size")
        if family.mlp_layers is not None and isinstance(widths, list):
            kinds = [family.mlp_layers if width else kind for width, kind in zip(widths, kinds, strict=True)]
            settings["intermediate_size"] = max(widths)
        settings["layer_types" if family.mlp_layers is None else "layers_block_type"] = kinds
        settings["num_key_value_heads"] = max(heads)
    if family.inner_size is not None:
        name, per = family.inner_size
        inner, count = file.metadata.get(f"{file.architecture}.ssm.inner_size"), settings.get(per)
        if not isinstance(inner, int) or not isinstance(count, int) or count < 1 or inner % count:
            raise file.fault(f"{file.architecture}.ssm.inner_size is {inner!r} for {per} {count!r}")
        settings[name] = inner // count
        if family.expands is not None:
            settings[family.expands] = inner // max(settings.get("hidden_size") or 1, 1)
    for key, (name, true, false) in family.choices.items():
        settings[name] = true if file.metadata.get(f"{file.architecture}.{key}") else false


_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the one that scales its scores by its width


def _settle_attention(file: GgufFile, settings: dict[str, Any]) -> None:
    """Translate the scale of scores and the rotary embedding from the metadata to the configuration's settings."""
    head_dim = settings.get("head_dim")
    if head_dim is None and settings.get("hidden_size") and settings.get("num_attention_heads"):
        head_dim = settings["hidden_size"] // settings["num_attention_heads"]
        settings.setdefault("head_dim", head_dim)
    if file.architecture in _LARGEST_GEMMA and head_dim:
        largest = file.metadata.get(f"{file.architecture}.block_count") == _LARGEST_GEMMA[file.architecture]
        settings["query_pre_attn_scalar"] = (
            settings["hidden_size"] // settings["num_attention_heads"] if largest else head_dim
        )
    if rope := _rope_parameters(file, settings, head_dim):
        # Where kinds of layers have embeddings of their own, transformers gives the scaling to those it is for.
        settings["rope_scaling" if file.architecture in _ROPES_BY_LAYER else "rope_parameters"] = rope


_YARN_AS_EVER = {"yarn_log_multiplier": 0.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}  # all transformers has
_YARN_KEYS = ("yarn_beta_fast", "yarn_beta_slow", *_YARN_AS_EVER)
_ROPE_SCALING = ("type", "factor", "original_context_length", "attn_factor", "finetuned", *_YARN_KEYS)
_ROPES_BY_LAYER = ("gemma3",)


def _rope_parameters(file: GgufFile, settings: dict[str, Any], head_dim: int | None) -> dict[str, Any] | None:
    """transformers' `rope_parameters`, where the file says more of them than their base; takes the base along.

    The tensor `rope_freqs` divides each pair's frequency. Llama 3's files have it in place of the numbers that
    transformers computes the same factors from, so they are given as a "longrope" that is one for every length.

    Raises:
        ModelError: transformers has no such embedding; the reason names the key or the tensor.
    """
    architecture, prefix = file.architecture, f"{file.architecture}.rope.scaling."
    for key in file.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _ROPE_SCALING:
            raise file.fault(f"{key} is a scaling of rotary embeddings that is not known")
    kind = file.metadata.get(f"{prefix}type", "linear")  # llama.cpp's default
    rotated = file.metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    family = family_of(architecture, file.metadata)
    rotates_part = family is not None and family.rotates_part
    if rotated != head_dim and head_dim and not rotates_part:
        raise file.fault(
            f"{architecture}.rope.dimension_count is {rotated!r} in heads of {head_dim}: only whole heads are rotated"
        )
    base = _positive(file, f"{architecture}.rope.freq_base", 10000.0)
    if kind == "yarn" and base <= 1:
        raise file.fault(f"{architecture}.rope.freq_base is {base}; yarn needs one above 1")
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope_factors_short.weight" in file.names() and architecture == "phi3":
        if kind not in ("linear", "longrope"):
            raise file.fault(f"{prefix}type is {kind!r} beside the tensor rope_factors_short.weight")
        rope["rope_type"] = "longrope"
        for length in ("short", "long"):
            rope[f"{length}_factor"] = _rope_factors(file, f"rope_factors_{length}.weight", rotated)
        if (original := file.metadata.get(f"{prefix}original_context_length")) is not None:
            settings["original_max_position_embeddings"] = original
        if f"{prefix}attn_factor" in file.metadata:
            rope["attention_factor"] = _positive(file, f"{prefix}attn_factor", 1.0)
    elif kind == "yarn":
        rope.update(_yarn(file, prefix, settings))
    elif kind in ("none", "linear"):
        rope.update(_divided(file, prefix, settings, rotated))
    else:
        raise file.fault(f"{prefix}type is {kind!r}; none, linear and yarn are read, and phi3's longrope")
    if rotates_part and rotated and head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if architecture in _ROPES_BY_LAYER:
        if rope["rope_type"] not in ("default", "linear"):
            raise file.fault(f"{prefix}type or rope_freqs.weight: {architecture} is read with linear scaling only")
        return rope if rope["rope_type"] == "linear" else None
    if len(rope) == 1 and not rotates_part:
        return None
    return {**rope, "rope_theta": settings.pop("rope_theta", 10000.0)}


def _divided(file: GgufFile, prefix: str, settings: dict[str, Any], rotated: Any) -> dict[str, Any]:
    """Frequencies divided by one factor, by a factor each, or by both."""
    factor = 1.0
    if file.metadata.get(f"{prefix}type") != "none":
        old = f"{file.architecture}.rope.scale_linear"
        key = old if old in file.metadata and f"{prefix}factor" not in file.metadata else f"{prefix}factor"
        factor = 1.0 if file.metadata.get(key) == 0 else _positive(file, key, 1.0)  # 0 is llama.cpp's word for none
    if (scale := _positive(file, f"{prefix}attn_factor", 1.0)) != 1.0:
        raise file.fault(f"{prefix}attn_factor is {scale}; without yarn only 1 is read")
    if "rope_freqs.weight" in file.names():
        factors = [one * factor for one in _rope_factors(file, "rope_freqs.weight", rotated)]
        length = _positive(file, f"{file.architecture}.context_length", settings.get("max_position_embeddings", 2048))
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": int(length),
        }
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn(file: GgufFile, prefix: str, settings: dict[str, Any]) -> dict[str, Any]:
    if "rope_freqs.weight" in file.names():
        raise file.fault(f"tensor rope_freqs.weight beside {prefix}type yarn: only one of them is read")
    for name, usual in _YARN_AS_EVER.items():
        if (value := file.metadata.get(prefix + name, usual)) != usual:
            raise file.fault(f"{prefix}{name} is {value!r}; only {usual:g} is read")
    if f"{prefix}factor" not in file.metadata:
        raise file.fault(f"{prefix}factor is missing beside {prefix}type yarn")
    factor = _positive(file, f"{prefix}factor", 1.0)
    original = _positive(file, f"{prefix}original_context_length", settings.get("max_position_embeddings", 2048))
    usual_scale = 1.0 + 0.1 * math.log(max(factor, 1.0))
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original),
        "attention_factor": _positive(file, f"{prefix}attn_factor", 1.0) * usual_scale,
        "beta_fast": _positive(file, f"{prefix}yarn_beta_fast", 32.0),
        "beta_slow": _positive(file, f"{prefix}yarn_beta_slow", 1.0),
        **({"truncate": False} if file.architecture == "gpt-oss" else {}),
    }


def _rope_factors(file: GgufFile, name: str, rotated: Any) -> list[float]:
    try:
        factors = file.tensor(name).whole().flatten().tolist()
    except TensorError as fault:
        raise file.fault(f"tensor {name} has a factor that is no positive number") from fault
    if rotated is not None and len(factors) * 2 != rotated:
        raise file.fault(f"tensor {name} has {len(factors)} factors for {rotated} rotated elements")
    if not all(0 < factor < math.inf for factor in factors):
        raise file.fault(f"tensor {name} has a factor that is no positive number")
    return factors


def _positive(file: GgufFile, key: str, default: float) -> float:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise file.fault(f"{key} is {value!r}, not a positive number")
    return float(value)


def check_unscaled(file: GgufFile) -> None:
    """Refuse a file with a scaled rotary embedding that transformers would silently read as a plain one.

    Raises:
        ModelError: the reason names the key or the tensor.
    """
    key = f"{file.architecture}.rope.scaling.type"
    if (kind := file.metadata.get(key, "none")) != "none":
        raise file.fault(f"{key} is {kind!r}, which is not read for files of this architecture")
    for name in ("rope_freqs.weight", "rope_factors_short.weight"):
        if name in file.names():
            raise file.fault(f"tensor {name} is not read for files of the architecture {file.architecture}")


_TOKENIZER_KEYS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "precompiled_charsmap": "precompiled_charsmap",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def gguf_tokenizer(file: GgufFile) -> "PreTrainedTokenizerBase":
    """Build transformers' tokenizer from the file's vocabulary, with the file's chat template.

    Raises:
        ModelError: the vocabulary is missing, or transformers cannot read it.
    """
    from transformers import PreTrainedTokenizerFast

    described: dict[str, Any] = {}
    for key, name in _TOKENIZER_KEYS.items():
        value = file.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None:
            described[name] = value.tolist() if isinstance(value, np.ndarray) else value
    tokens = described.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise file.fault("the metadata lack the vocabulary tokenizer.ggml.tokens")
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for role, name in _SPECIAL.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        token_ids(file.model, f"{file.path.name}: tokenizer.ggml.{role}_token_id", token_id, len(tokens))
        settings[name] = None if token_id is None else tokens[token_id]
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    sentencepiece = described.get("tokenizer_type") == "llama"
    settings["add_bos_token"] = bool(file.metadata.get("tokenizer.ggml.add_bos_token", sentencepiece))
    settings["add_eos_token"] = bool(file.metadata.get("tokenizer.ggml.add_eos_token", False))
    name = "gguf" if importlib.util.find_spec("transformers.integrations.gguf") else "ggml"  # it moved in 5.23
    reader: Any = importlib.import_module(f"transformers.integrations.{name}")
    fast: Any = PreTrainedTokenizerFast
    try:
        backend, more = reader.convert_gguf_tokenizer(file.architecture, described)
        tokenizer: PreTrainedTokenizerBase = fast(tokenizer_object=backend, **{**settings, **more})
    except Exception as fault:
        raise file.fault(f"its tokenizer cannot be read: {fault}") from fault
    return tokenizer


_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")


def gguf_end_tokens(file: GgufFile, vocab_size: int) -> frozenset[int]:
    """Return the ids that end a generation: the end of the text, and the end of the turn if the file names it.

    Harmony's turns have several messages, each with its own end. There only the last message or a call ends an answer.

    Raises:
        ModelError: an id is no whole number below `vocab_size`, the width of the logits.
    """
    keys = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot")]
    named = [token_ids(file.model, f"{file.path.name}: {key}", file.metadata.get(key), vocab_size) for key in keys]
    ends: frozenset[int] = frozenset().union(*named)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and file.architecture == "gpt-oss":
        ids = {token: at for at, token in enumerate(tokens[:vocab_size]) if token in _HARMONY_ENDS}
        ends = ends - {ids.get("<|end|>")} | {at for token, at in ids.items() if token != "<|end|>"}
    return ends
