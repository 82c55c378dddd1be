"""Keeps a model's description on disk, so that its next start needs no module of transformers.

    model = kept_model(source, files, "float32", describe)   # None if the model has no description or has changed
    keep_model(files, model)                                 # after `describe_model`

transformers' configurations and modules take two seconds to import. A native runner needs only the configuration's
numbers, the tensors' shapes and the tokenizer. The cache directory keeps these. The file's name depends on the model's
files (sizes, times, inodes), on this code and on transformers. A file is read only if no other user could have written
it and if its digest is right. Before a description is kept, it is read back and compared with the original. So a
configuration is not kept if its fields do not describe it completely.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from genbatch.nif.cuda_device import CPU
from genbatch.nif.errors import ModelError
from genbatch.nif.models.architecture import LINEAR_MODULES
from genbatch.nif.models.architectures import ARCHITECTURES, layer_groups, layer_shapes, max_position
from genbatch.nif.models.loaded_model import Lazy, Model, ModuleShape, module_shape, weights_sample
from genbatch.nif.models.model_source import ModelSource, cache_directory, quiet_transformers
from genbatch.nif.models.rope import Frequencies, rope_frequencies
from genbatch.nif.text.tokenizer import Tokenizer
from genbatch.nif.trusted_files import NotOurs, is_ours, last_used_ns, private_folder

if TYPE_CHECKING:
    from genbatch.nif.models.weight_source import WeightSource

log = logging.getLogger("genbatch")

_MAGIC = b"genbatch model 1 "
_DIGEST_BYTES = 64
MAX_KEPT = 32  # descriptions of some megabytes each; the most recently used ones stay
_MAX_FILES = 1000  # of a directory


class KeptConfig:
    """A configuration's fields as attributes, like transformers' own.

    Args:
        fields: the result of its `to_dict`.
        attributes: every attribute that JSON can express.
        frequencies: the rotary embeddings' frequencies.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        attributes: Mapping[str, Any],
        frequencies: Sequence[Sequence[Any]],
    ) -> None:
        vars(self).update(attributes)
        self._fields = fields
        self.kept_frequencies = [Frequencies(*each) for each in frequencies]

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration's fields."""
        return self._fields

    def get_text_config(self, decoder: bool = False) -> "KeptConfig":
        """Return this configuration, because only decoders are kept."""
        return self


@dataclass
class KeptTokenizer:
    """The part of transformers' tokenizer that `Tokenizer` uses.

    Args:
        text: the text of tokenizer.json.
        size: the number of its ids.
    """

    text: str
    size: int
    all_special_ids: list[int]
    eos_token_id: int | None
    chat_template: Any
    special_tokens_map: dict[str, Any]
    response_template: Any

    def __len__(self) -> int:
        return self.size

    @cached_property
    def backend_tokenizer(self) -> Backend:
        """Return the tokenizer of the library `tokenizers`."""
        return Backend.from_str(self.text)


def kept_model(source: str, files: ModelSource, dtype: str, describe: Callable[[], Model | None]) -> Model | None:
    """Load the model that `keep_model` described, with its weights in its files; None if there is no description.

    Args:
        source: the user's name of the model, for errors.
        files: the model's files.
        dtype: the weights' dtype.
        describe: makes the model with its module, for the few callers that need the module.

    Raises:
        ModelError: the configuration is wrong. Unreadable weights raise ModelError when they are first read.
    """
    path = _place(files)
    description = None if path is None else _read(path)
    if description is None:
        return None
    try:
        config: Any = KeptConfig(description["config"], description["attributes"], description["frequencies"])
        # With kept packed weights the files' headers are never read.
        weights: Any = Lazy(partial(_weights, source, files.path, config))
        sizes = {name: tuple(size) for name, size in description["tensors"].items()}
        parts = {name: None if size is None else (size[0], size[1]) for name, size in description["parts"].items()}
        shape = ModuleShape(description["kind"], sizes, parts)
        return Model(
            name=files.name,
            hf=Lazy(partial(_module, describe)),  # type: ignore[arg-type]
            config=config,
            tokenizer=Tokenizer(KeptTokenizer(**description["tokenizer"])),
            dtype=dtype,
            device=CPU,
            groups=layer_groups(source, config),
            layers=layer_shapes(config),
            vocab_size=config.vocab_size,
            eos_token_ids=frozenset(description["end_tokens"]),
            max_position=max_position(source, config),
            weights=weights,
            sampling=description["sampling"],
            shape=shape,
            sample=description["sample"],
        )
    except ModelError:
        raise
    except Exception as fault:  # the digest is right, so keep_model has written wrong content
        log.warning("the description of %s in %s is not used: %r", files.name, path, fault)
        return None


def keep_model(files: ModelSource, model: Model) -> None:
    """Write the description of a model from `describe_model`; logs the reason if it cannot be written."""
    from genbatch.nif.models.gguf_file import GgufWeights
    from genbatch.nif.models.weight_source import JoinedWeights, SafetensorsWeights

    path = _place(files)
    weights = model.weights.files if isinstance(model.weights, JoinedWeights) else model.weights
    if path is None or type(weights) not in (GgufWeights, SafetensorsWeights):
        return
    try:
        with quiet_transformers():  # some of a configuration's attributes are deprecated
            description = _described(model)
        if description is None:
            return
        payload = json.dumps(description).encode()
        digest = hashlib.sha256(payload).hexdigest().encode()
        private_folder(path.parent)
        _write(path, _MAGIC + digest + b"\n" + payload)
        _forget_oldest(path.parent)
    except (NotOurs, OSError) as fault:
        log.warning("the description of %s is not kept, so the next start is slower: %s", model.name, fault)


def _module(describe: Callable[[], Model | None]) -> Any:
    model = describe()
    assert model is not None, "these files were described before"
    return model.hf


def _weights(source: str, path: Path, config: Any) -> "WeightSource":
    # Here, because these import torch, which a model with kept weights does not need.
    from genbatch.nif.models.gguf_file import GgufFile, GgufWeights
    from genbatch.nif.models.weight_source import SafetensorsWeights, joined

    if path.is_file():
        return GgufWeights(GgufFile(source, path), config)
    return joined(SafetensorsWeights(source, path))


def _described(model: Model) -> dict[str, Any] | None:
    """Return the description's content; None if reading it back would not give the same model."""
    hf, shape = model.hf, module_shape(model)
    import torch  # here, because `describe_model` has imported it already

    linears = [part for part in hf.modules() if isinstance(part, torch.nn.Linear)]
    if not all(type(part).__module__.startswith(LINEAR_MODULES) for part in linears):
        return None
    try:
        description = _facts_to_keep(model, shape)
        read = json.loads(json.dumps(description))
        config: Any = KeptConfig(read["config"], read["attributes"], read["frequencies"])
        is_same = _facts(shape.kind, model.name, config) == _facts(shape.kind, model.name, model.config)
    except Exception as fault:  # a configuration may have any object, and lack any attribute
        log.debug("%s is not kept: %r", model.name, fault)
        return None
    return description if is_same else None


def _facts_to_keep(model: Model, shape: ModuleShape) -> dict[str, Any]:
    own = model.tokenizer.hf
    partial_rotary = ARCHITECTURES[shape.kind](model.config).partial_rotary
    frequencies = rope_frequencies(model.config, partial=partial_rotary)
    return {
        "kind": shape.kind,
        "tensors": shape.tensors,
        "parts": shape.parts,
        "config": model.config.to_dict(),
        "attributes": _attributes(model.config),
        "frequencies": [[each.kind, list(each.values), each.scale] for each in frequencies],
        "tokenizer": {
            "text": model.tokenizer.backend.to_str(),
            "size": len(own),
            "all_special_ids": own.all_special_ids,
            "eos_token_id": own.eos_token_id,
            "chat_template": own.chat_template,
            "special_tokens_map": own.special_tokens_map,
            "response_template": getattr(own, "response_template", None),
        },
        "end_tokens": sorted(model.eos_token_ids),
        "sampling": model.sampling,
        "sample": weights_sample(model),
    }


def _facts(kind: str, name: str, config: Any) -> list[Any]:
    """Return everything that a native runner derives from a configuration."""
    fields = json.dumps(config.to_dict(), sort_keys=True, default=str)
    heads = ("head_dim", "num_attention_heads", "num_key_value_heads")
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", *heads)
    sizes = [getattr(config, size, None) for size in names]
    ropes = [getattr(config, part, None) for part in ("rope_parameters", "layer_types", "tie_word_embeddings")]
    shapes = layer_groups(name, config), layer_shapes(config), max_position(name, config)
    return [fields, sizes, ropes, shapes, ARCHITECTURES[kind](config)]


def _attributes(config: Any) -> dict[str, Any]:
    """Return the attributes that JSON can express: a configuration's own, its class's properties and its aliases."""
    names = {name for name in vars(config) if not name.startswith("_")} | set(config.attribute_map)
    names |= {name for name in dir(type(config)) if isinstance(getattr(type(config), name, None), property)}
    values = {}
    for name in names:
        try:
            value = getattr(config, name)
            json.dumps(value)  # with infinities, which Python reads again
        except Exception:  # a property may need missing fields; the needed attributes are compared later
            continue
        values[name] = value
    return values


# The file


def _place(source: ModelSource) -> Path | None:
    """Return the path of the description of a model's files; None if the files cannot be identified."""
    identity = files_identity(source)
    try:
        return cache_directory() / "described" / f"{identity}.json" if identity else None
    except ModelError:
        return None


def files_identity(source: ModelSource) -> str:
    """Return a digest of this code and of the model's files, by size, times and inode; "" if there is none."""
    try:
        paths = [source.path]
        if source.path.is_dir():
            paths = sorted(path for path in source.path.rglob("*") if path.is_file())
        if len(paths) > _MAX_FILES:
            return ""
        digest = hashlib.sha256(_version())
        for path in paths:
            status = path.stat()
            # A program can set a file's modification time (mtime). Only the system sets the inode's time (ctime).
            facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            digest.update(f"{os.path.realpath(path)}\0{facts}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()[:32]
    except (OSError, RuntimeError):
        return ""


@cache
def _version() -> bytes:
    """Return a digest of this layer's code and of the versions of the libraries that describe a model."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    for library in ("transformers", "tokenizers", "torch"):
        digest.update(importlib.metadata.version(library).encode() + b"\0")
    return digest.digest()


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a file that exists, is ours and is complete; else None."""
    try:
        if not is_ours(path):
            return None
        data = path.read_bytes()
        os.utime(path)
    except OSError as fault:
        log.debug("%s is not read: %s", path, fault)
        return None
    start = len(_MAGIC) + _DIGEST_BYTES + 1
    digest = hashlib.sha256(data[start:]).hexdigest().encode()
    # guard: a damaged description
    if data[:start] != _MAGIC + digest + b"\n":
        log.warning("the model's description %s is damaged and will be written again", path)
        return None
    description: dict[str, Any] = json.loads(data[start:])
    return description


def _write(path: Path, data: bytes) -> None:
    """Write the file completely, or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")  # for this user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _forget_oldest(folder: Path) -> None:
    """Keep the most recently used descriptions, and delete the rest with remains of interrupted writes."""
    with suppress(OSError):  # another process does the same
        used = sorted(folder.iterdir(), key=lambda path: last_used_ns(path.stat()), reverse=True)
        for path in used[MAX_KEPT:]:
            path.unlink(missing_ok=True)
