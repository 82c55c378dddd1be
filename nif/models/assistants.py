"""Assistants are small models that guess tokens for a larger model, and read its keys and values (Gemma 4).

    found = resolve_model("gemma-4-E2B-it-assistant")
    if is_assistant(found):
        assistant = describe_assistant("gemma-4-E2B-it-assistant", found, model)
        layers_read(assistant, model)       # for each layer of the assistant, the layer of the model that it reads

An assistant has no keys of its own, and needs the model that it was trained for. So it cannot be served alone, and its
description has the other model's tokenizer.
"""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genbatch.nif.errors import ModelError, OptionError
from genbatch.nif.json_files import read_object
from genbatch.nif.models.architecture import kv_sources, read_whole
from genbatch.nif.models.architectures import ASSISTANTS, layer_groups, layer_shapes
from genbatch.nif.models.gguf_families import ASSISTANT
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model_source import ModelSource, quiet_transformers
from genbatch.nif.models.rope import rope_frequencies
from genbatch.nif.runner import LayerShape

if TYPE_CHECKING:  # imports torch, which a model with kept weights does not need
    from genbatch.nif.models.weight_source import StoredTensor, WeightSource

ASSISTANT_KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
"""transformers' `model_type` of assistants."""

NO_MODEL = "it is an assistant, which guesses tokens for another model: name it with draft"

_OWN_FIELDS = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
_MAX_TOKENS = 1 << 24  # integers up to this number are exact in float32


def is_assistant(found: ModelSource) -> bool:
    """Return whether the files' configuration or metadata name an assistant."""
    from genbatch.nif.models.gguf_file import GgufFile

    if found.path.is_file():
        return GgufFile(found.name, found.path, stop_at="general.architecture").architecture == ASSISTANT
    return read_object(found.name, found.path / "config.json").get("model_type") in ASSISTANT_KINDS


def describe_assistant(source: str, found: ModelSource, model: Model, identity: str = "") -> Model:
    """Describe an assistant for the native runner; its weights stay in their files.

    Args:
        source: the user's name of the assistant, for errors.
        model: the model for which the assistant was trained.
        identity: a digest of the assistant's files.

    Raises:
        ModelError: the files lack a tensor, or cannot be read.
    """
    import torch
    import transformers

    from genbatch.nif.models.file_checks import check_complete, check_numbers

    with quiet_transformers():
        config, weights = (_from_gguf if found.path.is_file() else _from_directory)(source, found.path)
        text = config.get_text_config(decoder=True)
        check_numbers(source, found.path.name, text)
        for name in _OWN_FIELDS:
            setattr(text, name, getattr(config, name))
        text.tie_word_embeddings = "lm_head.weight" not in weights.names()
        kind = next(kind for kind in ASSISTANTS if getattr(transformers, kind).config_class is type(config))
        dtype = getattr(torch, model.dtype)
        hf = check_complete(
            source, kind, text, lambda: getattr(transformers, kind)._from_config(config, dtype=dtype), weights
        )
    return Model(
        name=found.name,
        hf=hf,
        config=text,
        tokenizer=model.tokenizer,
        dtype=model.dtype,
        device=model.device,
        groups=layer_groups(source, text),
        layers=layer_shapes(text),
        vocab_size=text.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_position=model.max_position,
        weights=weights,
        generates=False,
        identity=identity,
    )


def _from_directory(source: str, directory: Path) -> "tuple[Any, WeightSource]":
    from genbatch.nif.models.file_checks import read_config

    config = read_config(source, directory)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(source, "it is a quantised assistant; only plain numbers and GGUF are read for assistants")
    read_whole(config)
    return config, _Weights(source, directory)


def _from_gguf(source: str, path: Path) -> "tuple[Any, WeightSource]":
    """Read an assistant's configuration from a GGUF file. Such files have no clusters: every token gets a logit."""
    from transformers import Gemma4AssistantConfig

    from genbatch.nif.models.gguf_config import gguf_config
    from genbatch.nif.models.gguf_file import GgufFile, GgufWeights

    file = GgufFile(source, path)
    text, width = gguf_config(file), file.metadata.get(f"{ASSISTANT}.embedding_length_out")
    if not isinstance(width, int):
        raise file.fault(f"{ASSISTANT}.embedding_length_out is {width!r}, not the width of a model's rows")
    try:
        config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=width)
    except Exception as fault:
        raise file.fault(f"its metadata do not describe an assistant: {fault}") from fault
    read_whole(config)
    return config, GgufWeights(file, text)


class _Weights:
    """The tensors of an assistant, with the order of its tokens as float32. Implements `WeightSource`."""

    def __init__(self, source: str, directory: Path) -> None:
        from genbatch.nif.models.weight_source import SafetensorsWeights

        self._source = source
        self._files = SafetensorsWeights(source, directory)

    def names(self) -> Collection[str]:
        """See `WeightSource`."""
        return self._files.names()

    def tensor(self, name: str) -> "StoredTensor":
        """See `WeightSource`."""
        from genbatch.nif.models.weight_source import StoredTensor

        if name not in self.names() or self._files.kind(name) not in ("I32", "I64"):
            return self._files.tensor(name)
        whole = self._files.part(name).numpy()
        if whole.size and not 0 <= whole.min() <= whole.max() < _MAX_TOKENS:
            raise ModelError(self._source, f"its weights cannot be read: {name} has numbers that are no token ids")
        return StoredTensor(name, "F32", whole.shape, whole.reshape(1, -1).astype("<f4").view("u1"))

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self._files.shape(name)

    def release(self) -> None:
        """See `WeightSource`."""
        self._files.release()


def layers_read(assistant: Model, model: Model) -> list[int]:
    """For each layer of the assistant, return the layer of the model from which it reads keys and values.

    Raises:
        OptionError: the assistant was trained for another model; the reason names the difference.
    """
    ours: Any = model.config
    theirs: Any = assistant.config

    def refused(reason: str) -> OptionError:
        return OptionError("draft", f"{assistant.name} was not trained for {model.name}: {reason}")

    def compare(statement: str, value: object, expected: object) -> None:
        if value != expected:
            raise refused(f"{statement} {value}, not {expected}")

    compare("it reads rows with a hidden size of", theirs.backbone_hidden_size, ours.hidden_size)
    compare("its vocabulary size is", assistant.vocab_size, model.vocab_size)
    kinds: list[str] = getattr(ours, "layer_types", None) or []
    sources, read = kv_sources(ours), []
    rotations, own_rotations = _rotations(theirs), _rotations(ours)
    for layer, kind in enumerate(theirs.layer_types):
        writers = [at for at, other in enumerate(kinds) if other == kind and at not in sources]
        if kind not in rotations or not writers:
            raise refused(f"the model has no layer of {kind}")
        read.append(writers[-1])
        compare(f"its layer {layer} reads", _heads(assistant.layers[layer]), _heads(model.layers[writers[-1]]))
        if rotations[kind] != own_rotations.get(kind):
            raise refused(f"its layer {layer} has other rotary embeddings")
        if kind == "sliding_attention":
            compare("its window is", theirs.sliding_window, ours.sliding_window)
    return read


def _heads(shape: LayerShape) -> str:
    return f"{shape.num_kv_heads} KV heads with keys of {shape.key_dim} and values of {shape.value_dim} elements"


def _rotations(config: Any) -> dict[Any, tuple[list[float], float]]:
    """Return the frequencies and the scale of each kind of layer."""
    return {each.kind: (list(each.values), each.scale) for each in rope_frequencies(config, partial=False)}
