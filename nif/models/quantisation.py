"""Reads the quantisation of a checkpoint's weights from its configuration, and refuses unsupported ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genbatch.nif.errors import ModelError
from genbatch.nif.json_files import one_line, read_object
from genbatch.nif.models.file_checks import check_counts, shown

_REMEDY = (
    "use the original model with quantize int8 or int4, or its GPTQ, AWQ or compressed-tensors form in 4 or 8 bits, "
    "its FP8 form, or a GGUF file"
)
CODE_BITS = (4, 8)
"""The bits of a code in groups."""
_MLX_BITS = (2, 3, 4, 5, 6, 8)
_FP8_METHODS = ("fp8", "fbgemm_fp8")
_COMPRESSED_FORMATS = (
    *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)
_MODELOPT_ALGORITHMS = ("FP8", "NVFP4")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A configuration's description of its checkpoint's quantised weights.

    Args:
        method: "gptq", "awq", "compressed-tensors", "fp8", "modelopt", "mxfp4", "bitsandbytes" or "mlx".
        bits: bits of a code; None if linears differ or have no codes.
        groups: every number of inputs that share a scale in some linears; -1 means all inputs of a linear.
        less_one: whether zeros are stored less one, as in GPTQ's first format.
        tile: outputs and inputs that share a scale of FP8; None if scales are not for tiles.
        own: bits and group of linears that differ from `bits` and `groups`, by name.
    """

    method: str
    bits: int | None = None
    groups: tuple[int, ...] = ()
    less_one: bool = False
    tile: tuple[int, int] | None = None
    own: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def quantisation_of(source: str, config: Any, directory: Path) -> Quantisation | None:
    """Return a checkpoint's quantisation; None for a plain checkpoint.

    Args:
        source: the user's name of the model, for errors.
        config: transformers' configuration.
        directory: the directory of config.json. It may also have the quantize_config.json of GPTQ's first tools, or
            ModelOpt's hf_quant_config.json.

    Raises:
        ModelError: the quantisation is not supported; the reason names the field and an alternative.
    """
    where = "quantization_config"
    stated = getattr(config, where, None) or getattr(config, "compression_config", None)
    if stated is None and (stated := getattr(config, "quantization", None)) is not None:
        where = "quantization"  # the field of older MLX checkpoints
    if stated is None and (directory / "quantize_config.json").is_file():
        where = "quantize_config.json"
        stated = {"quant_method": "gptq", **read_object(source, directory / where)}
        check_counts(source, where, stated)
    if stated is None and (directory / "hf_quant_config.json").is_file():
        where = "hf_quant_config.json"
        stated = read_object(source, directory / where).get("quantization")
        stated = {"quant_method": "modelopt", **stated} if isinstance(stated, Mapping) else stated
    if stated is None:
        return None
    fields: Any = stated if isinstance(stated, Mapping) or not hasattr(stated, "to_dict") else stated.to_dict()
    if not isinstance(fields, Mapping):
        raise ModelError(source, f"{where} is {shown(fields)}, not an object")
    return _Reading(source, where, fields).scheme()


class _Reading:
    """The fields of a quantization_config, and the errors that name them."""

    def __init__(self, source: str, where: str, fields: Mapping[str, Any]) -> None:
        self._source = source
        self._where = where
        self._fields = fields

    def scheme(self) -> Quantisation:
        method = str(self._fields.get("quant_method", ""))
        known = {"gptq": self._gptq, "awq": self._awq, "compressed-tensors": self._compressed, "mlx": self._mlx}
        if not method and {"bits", "group_size"} <= self._fields.keys():
            method = "mlx"  # its configurations name no method
        if method in ("mxfp4", "bitsandbytes"):
            return Quantisation(method)
        if method in _FP8_METHODS:
            return self._fp8()
        if method.startswith("modelopt"):
            if (algorithm := self._fields.get("quant_algo")) not in _MODELOPT_ALGORITHMS:
                raise self._refused(f"quant_algo is {algorithm!r}")
            return Quantisation("modelopt")
        if method not in known:
            raise self._refused(f"quant_method is {method!r}")
        try:
            return known[method]()
        except (TypeError, ValueError, AttributeError, OverflowError) as fault:
            raise ModelError(self._source, f"{self._where} contradicts itself: {one_line(fault)}") from fault

    def _refused(self, what: str) -> ModelError:
        return ModelError(self._source, f"{self._where}: {what}, which is not supported; {_REMEDY}")

    def _first(self, *names: str) -> Any:
        """Return the first of these fields that is set."""
        return next((self._fields[name] for name in names if self._fields.get(name) is not None), None)

    def _bits(self, *names: str) -> int:
        bits = self._first(*names)
        if isinstance(bits, bool) or bits not in CODE_BITS:
            raise self._refused(f"{names[0]} is {bits!r}")
        return int(bits)

    def _gptq(self) -> Quantisation:
        layout = self._first("checkpoint_format", "format") or "gptq"
        if self._fields.get("is_marlin_format"):
            layout = "marlin"
        if layout not in ("gptq", "gptq_v2"):
            raise self._refused(f"checkpoint_format is {layout!r}")
        if self._fields.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
            raise self._refused(f"pack_dtype is {self._fields['pack_dtype']!r}")
        bits, groups = self._bits("bits"), [int(self._fields.get("group_size") or -1)]
        # GPTQModel has settings for some linears: "-:" excludes them, other entries may change bits and groups.
        own = [value for value in (self._fields.get("dynamic") or {}).values() if isinstance(value, Mapping)]
        for value in own:
            if value.get("bits", bits) not in CODE_BITS:
                raise self._refused(f"dynamic names {value['bits']!r} bits")
            groups.append(int(value.get("group_size", groups[0])))
        mixed = any(value.get("bits", bits) != bits for value in own)
        return Quantisation("gptq", None if mixed else bits, tuple(groups), layout == "gptq")

    def _awq(self) -> Quantisation:
        layout = str(self._first("version", "checkpoint_format", "format") or "gemm").lower()
        if layout != "gemm":
            raise self._refused(f"version is {layout!r}")
        bits = self._bits("bits", "w_bit")
        if bits != 4:
            raise self._refused(f"bits is {bits} of AWQ")
        return Quantisation("awq", bits, (int(self._first("group_size", "q_group_size") or -1),))

    def _compressed(self) -> Quantisation:
        formats = [self._fields.get("format") or "dense"]
        sparse = (self._fields.get("sparsity_config") or {}).get("format", "dense")
        if sparse != "dense":
            raise self._refused(f"sparsity_config.format is {sparse!r}")
        if (self._fields.get("transform_config") or {}).get("config_groups"):
            raise self._refused("transform_config transforms activations")
        groups: list[int] = []
        tile: tuple[int, int] | None = None
        for name, group in (self._fields.get("config_groups") or {}).items():
            if group.get("format"):
                formats.append(group["format"])
            weights = group.get("weights") or {}
            bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
            if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8), ("float", 4)):
                raise self._refused(f"config_groups.{name}.weights is {kind} of {bits} bits")
            groups.append(int(weights.get("group_size") or -1))
            if weights.get("strategy") == "block":
                tile = _tile(weights.get("block_structure"))
        several = len(formats) > 1 and formats[0] == "mixed-precision"
        for layout in formats[1:] if several else formats:
            if layout not in _COMPRESSED_FORMATS:
                raise self._refused(f"format is {layout!r}")
        return Quantisation("compressed-tensors", None, tuple(groups), tile=tile)

    def _mlx(self) -> Quantisation:
        if (mode := self._fields.get("mode", "affine")) != "affine":
            raise self._refused(f"mode is {mode!r} of MLX")
        sizes: dict[str, tuple[int, int]] = {}
        for name, value in (("", self._fields), *self._fields.items()):
            if isinstance(value, Mapping):  # else it is false, and the linear has plain numbers
                bits, group = value["bits"], int(value["group_size"])
                if bits not in _MLX_BITS or group < 1:
                    raise self._refused(f"bits is {bits!r} in groups of {group} of MLX")
                sizes[name] = bits, group
        bits, group = sizes.pop("")
        return Quantisation("mlx", bits, (group,), own=sizes)

    def _fp8(self) -> Quantisation:
        try:
            tile = self._fields.get("weight_block_size")
            return Quantisation("fp8", tile=None if tile is None else _tile(tile))
        except (TypeError, ValueError) as fault:
            raise ModelError(self._source, f"{self._where}: weight_block_size is {tile!r}: {fault}") from fault


def _tile(tile: Any) -> tuple[int, int]:
    """Read the outputs and inputs of a tile, from a list or from "128x128"."""
    outputs, inputs = tile.split("x") if isinstance(tile, str) else tile
    if not (int(outputs) > 0 and int(inputs) > 0):
        raise ValueError(f"a tile of {outputs} x {inputs}")
    return int(outputs), int(inputs)
