"""LoRA adapters: reads and checks PEFT's adapters of a model's linears, and keeps them by name.

    adapters = Adapters(model, AdapterLimits())
    adapters.add(adapters.read("sql", Path("adapters/sql")))     # adapter_config.json, adapter_model.safetensors
    adapters["sql"].linears["model.layers.0.mlp.up_proj"]        # LoraLinear: a, b, scale

A linear with an adapter computes  x W^T + scale * (x A^T) B^T.  If an adapter would give other results than PEFT, it is
refused, and the error names the field or the tensor. Unknown fields are never ignored silently.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import regex
from safetensors import SafetensorError, deserialize

from genbatch.nif.errors import AdapterError
from genbatch.nif.models.architectures import ARCHITECTURES
from genbatch.nif.models.loaded_model import module_shape
from genbatch.nif.models.model_names import written_path
from genbatch.nif.runner import LoraAdapter, LoraLinear
from genbatch.nif.text.expressions import check_repeats
from genbatch.nif.trusted_files import NotOurs, check_ours

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model

Matrix = npt.NDArray[np.float32]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_MAX_CONFIG_BYTES = 2**20
_MAX_PATTERN_CHARS = 8192
_MATCHING_S = 5.0  # for all expressions of an adapter; expressions of real adapters take milliseconds
_MAX_FACTOR = 1e6  # limit of r and lora_alpha, which are below 1000 in working adapters
# Fields of adapter_config.json that change a linear's output in ways that are not computed here.
_REFUSED = {
    "use_dora": "DoRA is not computed",
    "modules_to_save": "whole modules of an adapter are not served",
    "lora_bias": "biases are not added",
    "fan_in_fan_out": "transposed weights (Conv1D) are not adapted",
    "target_parameters": "only linears are adapted, and no other parameters",
    "trainable_token_indices": "embeddings are not adapted",
    "layer_replication": "layers are not repeated",
    "alora_invocation_tokens": "adapters that begin within a prompt are not computed",
    "use_qalora": "QALoRA is not computed",
    "use_bdlora": "block-diagonal adapters are not computed",
    "arrow_config": "mixtures of adapters are not computed",
    "kasa_config": "KaSA is not computed",
    "monteclora_config": "MonteCLoRA is not computed",
}
# These initialisations also change the base weights, which are not in the adapter's files.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Tensors of other kinds, by a part of their names.
_REFUSED_TENSORS = {
    "lora_magnitude_vector": "DoRA is not computed",
    "lora_embedding": "embeddings are not adapted",
    "modules_to_save": "whole modules of an adapter are not served",
    ".bias": "biases are not added",
}

_handles = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """Limits for loading adapters.

    Args:
        max_loras: most adapters that are loaded at a time.
        max_lora_rank: the highest rank of an adapter.
        max_memory_percent: the fraction of the free memory that one adapter may take.
    """

    max_loras: int = 32
    max_lora_rank: int = 128
    max_memory_percent: float = 0.9


class Adapters(Mapping[str, LoraAdapter]):
    """A model's loaded adapters by name; they outlive the contexts that use them.

    Args:
        model: the adapted model.
        limits: the limits of number and size.
        refusal: the reason why no adapter can be loaded; None if adapters can be loaded.
        probe: returns the bytes of free memory; None if unknown.
    """

    def __init__(
        self,
        model: "Model",
        limits: AdapterLimits | None = None,
        refusal: str | None = None,
        probe: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.base = ""  # another name of the model
        self._model = model
        self._limits = limits or AdapterLimits()
        self._refusal = refusal
        self._probe = probe
        self._loaded: dict[str, LoraAdapter] = {}
        self._retired: set[str] = set()

    def __getitem__(self, name: str) -> LoraAdapter:
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def check(self, name: str) -> None:
        """Check that another adapter may have this name; raises AdapterError otherwise."""
        if self._refusal is not None:
            raise AdapterError(name, self._refusal)
        if _NAME.fullmatch(name) is None:
            rule = "1 to 128 letters, digits and ._:/-, of which the first is a letter or a digit"
            raise AdapterError(name[:128], f"a name is {rule}")
        if name in self._loaded:
            raise AdapterError(name, f"an adapter with this name is loaded already, from {self._loaded[name].path}")
        if name in (self.base, self._model.name):
            raise AdapterError(name, "the model itself has this name")
        if len(self._loaded) >= self._limits.max_loras:
            raise AdapterError(name, f"{len(self._loaded)} adapters are loaded, and max_loras allows no more")

    def read(self, name: str, path: Path) -> LoraAdapter:
        """Read an adapter from a directory without adding it. This may take seconds, and any thread may call it.

        Raises:
            AdapterError: the adapter cannot be served; the message names the file, and the field or the tensor.
        """
        self.check(name)
        return read_lora(name, path, self._model, self._limits, self._probe())

    def add(self, adapter: LoraAdapter) -> None:
        """Add an adapter.

        Raises:
            AdapterError: `check` refuses the name.
        """
        self.check(adapter.name)
        self._loaded[adapter.name] = adapter

    def find(self, name: str) -> LoraAdapter | None:
        """Return the adapter for a new request; None if no adapter has the name, or the adapter is retired."""
        return None if name in self._retired else self._loaded.get(name)

    def serving(self) -> list[LoraAdapter]:
        """Return the adapters for new requests."""
        return [adapter for name, adapter in self._loaded.items() if name not in self._retired]

    def retire(self, name: str) -> None:
        """Retire an adapter: refuse new requests for it, but keep it loaded for open requests."""
        self._retired.add(name)

    def remove(self, name: str) -> LoraAdapter:
        """Remove an adapter."""
        self._retired.discard(name)
        return self._loaded.pop(name)


def read_lora(name: str, path: Path, model: "Model", limits: AdapterLimits, free: int | None = None) -> LoraAdapter:
    """Read and check the two files of an adapter, within the given bytes of free memory; see `Adapters.read`."""
    path = _directory(name, path)
    raw, config = _read_config(name, path / CONFIG)
    linears = _targets(model)
    tensors, digest = _read_tensors(name, path / WEIGHTS, linears, limits, free)
    patterns = _Patterns(name, config)
    expected = _expected(config, model, patterns)
    for module in tensors.keys() - set(expected):
        raise AdapterError(name, f"{WEIGHTS} has {_key(module, 'A')}, but {CONFIG} does not adapt {module}")
    for module in expected:
        if module not in linears:
            raise AdapterError(name, f"{CONFIG}: target_modules: {_why_not(module)}")
        if module not in tensors:
            raise AdapterError(name, f"{WEIGHTS}: {_key(module, 'A')} is missing")
    scales = _Scales(name, config, patterns)
    adapted = {module: LoraLinear(a, b, scales.of(module, len(a))) for module, (a, b) in tensors.items()}
    digest.update(raw)
    return LoraAdapter(name, path, digest.hexdigest(), next(_handles), adapted)


# The directory and its configuration


def _directory(name: str, path: Path) -> Path:
    try:
        path = written_path(path).absolute()
        is_directory = path.is_dir()
    except (OSError, ValueError) as error:  # a missing permission, or a NUL
        raise AdapterError(name, f"{path} cannot be read: {error}") from None
    if not is_directory:
        raise AdapterError(name, f"{path} is not a directory")
    for file in (path / CONFIG, path / WEIGHTS):
        if not file.is_file():
            also = " (adapter_model.bin is a pickle, and not read)" if (path / "adapter_model.bin").exists() else ""
            raise AdapterError(name, f"{path}: {file.name} is missing{also}")
        try:
            check_ours(file)
        except NotOurs as error:
            raise AdapterError(name, str(error)) from None
        except OSError as error:
            raise AdapterError(name, f"{file} cannot be read: {error.strerror}") from None
    return path


def _read_config(name: str, file: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_CONFIG_BYTES + 1)
        config = json.loads(raw)
    except OSError as error:
        raise AdapterError(name, f"{CONFIG} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(name, f"{CONFIG} is not JSON: {' '.join(str(error).split())[:200]}") from None
    if len(raw) > _MAX_CONFIG_BYTES or not isinstance(config, dict):
        raise AdapterError(name, f"{CONFIG} is not an object of at most {_MAX_CONFIG_BYTES} bytes")

    def refuse(field: str, reason: str) -> AdapterError:
        return AdapterError(name, f"{CONFIG}: {field} is {str(config.get(field))[:64]!r}: {reason}")

    if config.get("peft_type") != "LORA":
        raise refuse("peft_type", "only LORA is served")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise refuse("task_type", "only CAUSAL_LM is served")
    if config.get("bias", "none") != "none":
        raise refuse("bias", "biases are not added")
    for field, reason in _REFUSED.items():
        if config.get(field):
            raise refuse(field, reason)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise refuse("init_lora_weights", "it needs changed base weights; convert it to a plain adapter when saving")
    for field in ("r", "lora_alpha"):
        if not _is_factor(config.get(field)):
            raise refuse(field, "must be a number")
    if not isinstance(config["r"], int) or config["r"] < 1:
        raise refuse("r", "must be an integer of at least 1")
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(field) or {}
        if not (isinstance(patterns, dict) and all(map(_is_factor, patterns.values()))):
            raise refuse(field, "must give a number for each pattern")
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if not (isinstance(targets, str) or _are_texts(targets)):
        raise refuse("target_modules", "must be names of modules, or one expression for all of them")
    if not (excluded is None or isinstance(excluded, str) or _are_texts(excluded)):
        raise refuse("exclude_modules", "must be names of modules, or one expression for all of them")
    layers = config.get("layers_to_transform")
    numbers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in numbers):
        raise refuse("layers_to_transform", "must be numbers of layers")
    return raw, config


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MAX_FACTOR <= value <= _MAX_FACTOR


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


class _Patterns:
    """The regular expressions of adapter_config.json. Each is compiled once, and all of them share one time limit.

    An expression such as `(.*.*)*z` would run for years. The library `regex` has a timeout, and `re` has none.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name = name
        self._until = time.monotonic() + _MATCHING_S
        self._compiled: dict[str, regex.Pattern[str]] = {}
        for field in ("rank_pattern", "alpha_pattern"):
            for pattern in config.get(field) or {}:
                self._compile(field, pattern, rf"(.*\.)?({pattern})")  # as PEFT reads them
        for field in ("target_modules", "exclude_modules"):
            if isinstance(pattern := config.get(field), str):
                self._compile(field, pattern, pattern)

    def _compile(self, field: str, pattern: str, whole: str) -> None:
        try:
            if len(pattern) > _MAX_PATTERN_CHARS:
                raise ValueError(f"it has more than {_MAX_PATTERN_CHARS} characters")
            check_repeats(pattern)
            self._compiled[f"{field}:{pattern}"] = regex.compile(whole)
        except (regex.error, ValueError, RecursionError, OverflowError, MemoryError) as error:
            reason = f"{pattern[:64]!r} is not a supported regular expression: {error}"
            raise AdapterError(self._name, f"{CONFIG}: {field}: {reason}") from None

    def matches(self, field: str, pattern: str, module: str) -> bool:
        """Return whether an expression of a field matches a module.

        Raises:
            AdapterError: the adapter's expressions take too long.
        """
        try:
            left = self._until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            return self._compiled[f"{field}:{pattern}"].fullmatch(module, timeout=left, concurrent=True) is not None
        except TimeoutError:
            reason = f"{pattern[:64]!r} takes more than {_MATCHING_S:g} seconds to compare with the modules"
            raise AdapterError(self._name, f"{CONFIG}: {field}: {reason}") from None


class _Scales:
    """The scale of each linear, as PEFT computes it."""

    def __init__(self, name: str, config: Mapping[str, Any], patterns: _Patterns) -> None:
        self._name = name
        self._config = config
        self._patterns = patterns

    def of(self, module: str, rank: int) -> float:
        """Return the scale of a module with matrices of this rank."""
        stated_rank = self._pattern("rank_pattern", module, self._config["r"])
        if rank != stated_rank:
            key = _key(module, "A")
            raise AdapterError(self._name, f"{WEIGHTS}: {key} has rank {rank}, but {CONFIG} has {stated_rank:g}")
        alpha = self._pattern("alpha_pattern", module, self._config["lora_alpha"])
        return alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank

    def _pattern(self, field: str, module: str, default: float) -> float:
        for pattern, value in (self._config.get(field) or {}).items():
            if self._patterns.matches(field, pattern, module):
                return float(value)
        return default


# Which linears


def _targets(model: "Model") -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every linear that an adapter may change, by name. All runners can adapt these."""
    shape = module_shape(model)
    linears = {name: size for name, size in shape.parts.items() if size is not None}
    if shape.kind not in ARCHITECTURES:
        return linears
    tensors = ARCHITECTURES[shape.kind](model.config).tensors
    names = (*tensors.qkv, tensors.out, *tensors.gate_up, tensors.down)
    starts = [tensors.layer.format(index) for index in range(len(model.layers))]
    known = {start + name for start in starts for name in names}
    return {name: size for name, size in linears.items() if name in known}


def _expected(config: Mapping[str, Any], model: "Model", patterns: _Patterns) -> list[str]:
    """Return the modules that the configuration adapts."""

    def names(field: str, module: str) -> bool:
        """Return whether PEFT's list of endings, or its expression, matches a module."""
        targets = config.get(field)
        if isinstance(targets, str):
            return bool(targets) and patterns.matches(field, targets, module)
        return any(module == name or module.endswith(f".{name}") for name in targets or ())

    every = config["target_modules"] == "all-linear"
    return [
        name
        for name, size in module_shape(model).parts.items()
        if (size is not None if every else names("target_modules", name))
        and not names("exclude_modules", name)
        and _in_layers(config, name)
    ]


def _in_layers(config: Mapping[str, Any], module: str) -> bool:
    layers = config.get("layers_to_transform")
    if layers is None:
        return True
    number = re.search(r"\.(\d+)\.", module)
    return number is not None and int(number[1]) in (layers if isinstance(layers, list) else [layers])


def _why_not(module: str) -> str:
    return f"{module} is not a linear of attention or MLP; only these are adapted"


# The tensors


def _read_tensors(
    name: str, file: Path, linears: Mapping[str, tuple[int, int]], limits: AdapterLimits, free: int | None
) -> tuple[dict[str, tuple[Matrix, Matrix]], Any]:
    """Return A and B of each module in float32, and a digest of the file's bytes."""

    def refuse(reason: str) -> AdapterError:
        return AdapterError(name, f"{WEIGHTS}: {reason}")

    by_module: dict[str, dict[str, Matrix]] = {}
    digest = hashlib.sha256()
    try:
        size = file.stat().st_size
        # Weights of 16 bits take 32 bits in memory, twice: once here, and once packed by a runner.
        if free is not None and 4 * size > free * limits.max_memory_percent:
            raise refuse(f"{size} bytes would take up to {4 * size} of the {free} bytes of memory that are free")
        raw = file.read_bytes()  # not mapped, so that the digest is right even if the file changes later
        digest.update(raw)
        tensors = deserialize(raw)  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise refuse(f"cannot be read: {' '.join(str(error).split())[:200]}") from None
    del raw
    for key, tensor in tensors:
        module, which = _parsed(refuse, key)
        if module not in linears:
            raise refuse(f"{key}: {_why_not(module)}")
        _check_shape(refuse, key, which, tuple(tensor["shape"]), linears[module], limits.max_lora_rank)
        plain = _floats(tensor)
        if plain is None:
            raise refuse(f"{key} is of type {tensor['dtype']}; F32, F16 and BF16 are supported")
        if not np.isfinite(plain).all():
            raise refuse(f"{key} has values that are not finite")
        by_module.setdefault(module, {})[which] = plain
    if not by_module:
        raise refuse("it has no tensor")
    pairs = {}
    for module, pair in by_module.items():
        for which in "AB":
            if which not in pair:
                raise refuse(f"{_key(module, which)} is missing")
        if len(pair["A"]) != pair["B"].shape[1]:
            raise refuse(f"{_key(module, 'B')} has rank {pair['B'].shape[1]}, but its A has {len(pair['A'])}")
        pairs[module] = pair["A"], pair["B"]
    return pairs, digest


def _floats(tensor: Mapping[str, Any]) -> Matrix | None:
    """Return a tensor of a safetensors file as float32; None if its type is not F32, F16 or BF16."""
    content, shape = tensor["data"], tensor["shape"]
    match tensor["dtype"]:
        case "F32":
            return np.frombuffer(content, "<f4").reshape(shape).copy()
        case "F16":
            return np.frombuffer(content, "<f2").reshape(shape).astype(np.float32)
        case "BF16":  # the upper half of a float32
            return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        case _:
            return None


def _parsed(refuse: Any, key: str) -> tuple[str, str]:
    """Split a tensor's name into its module and its matrix."""
    shown = key[:256]
    for part, reason in _REFUSED_TENSORS.items():
        if part in key:
            raise refuse(f"{shown}: {reason}")
    matched = _KEY.fullmatch(key)
    if matched is None:
        raise refuse(f"{shown} is not a tensor of a LoRA adapter")
    return matched[1], matched[2]


def _check_shape(
    refuse: Any, key: str, which: str, shape: tuple[int, ...], linear: tuple[int, int], max_rank: int
) -> None:
    outputs, inputs = linear
    if len(shape) != 2:
        raise refuse(f"{key} has the shape {list(shape)}; it must be a matrix")
    rank, width = shape if which == "A" else shape[::-1]
    expected = inputs if which == "A" else outputs
    if width != expected:
        side = "inputs" if which == "A" else "outputs"
        raise refuse(
            f"{key} has the shape {list(shape)}, but the model's linear has {expected} {side}; "
            "is the adapter for another base model?"
        )
    if not 1 <= rank <= max_rank:
        raise refuse(f"{key} has rank {rank}; 1 to {max_rank} is allowed (max_lora_rank)")


def _key(module: str, which: str) -> str:
    return f"base_model.model.{module}.lora_{which}.weight"
