"""Model: a causal language model or an encoder in memory. `load_model` makes it, and runners read it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from genbatch.nif.cuda_device import Device
from genbatch.nif.pooling import Pooling
from genbatch.nif.runner import LayerGroup, LayerShape
from genbatch.nif.text.pairs import PairReader
from genbatch.nif.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # a model with a kept description needs neither torch nor transformers
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from genbatch.nif.models.weight_source import WeightSource

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""torch's names of a model's numbers, with their bytes."""


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """The names and shapes of a transformers module. All its linears are plain.

    Args:
        kind: the name of the module's class.
        tensors: each tensor's shape.
        parts: by name, the modules without submodules: (outputs, inputs) for a linear, None for the head and the rest.
    """

    kind: str
    tensors: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[int, int] | None]


class Lazy:
    """A stand-in that creates an object when an attribute is first read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def _value(self) -> Any:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


@dataclass(frozen=True)
class Model:
    """A loaded model. It is immutable, and all runners share it.

    Args:
        name: the model's name for users.
        hf: transformers' module in eval mode, with attention through `ATTENTION_NAME`. If `weights` has the weights,
            it is on the "meta" device, without weights. If `shape` is set, it is a Lazy.
        config: the text decoder's configuration.
        tokenizer: the model's own.
        dtype: the type of the weights and of the KV cache, one of DTYPES.
        device: the device of the weights and of the KV cache.
        groups: the layers, grouped by the positions that they read.
        layers: the shapes of each layer's entries in the KV cache.
        vocab_size: the width of the logits; every token id is below it.
        eos_token_ids: each of these ids ends a generation.
        max_position: most positions of a sequence.
        weights: the tensors in their files, for a runner that packs them; None if `hf` has the weights.
        pooling: the way to make embeddings or scores; None for neither.
        pairs: makes the tokens of a query and a document; None if the model scores nothing.
        generates: whether the model generates text.
        sampling: the sampling parameters that the model's makers recommend, by a request's names; may be empty.
        codes: the files of a quantised checkpoint, in addition to the values in `hf`; None for other checkpoints.
        shape: the module's names and shapes if they were kept; else None.
        identity: a digest of the model's files and of this code; "" if packed weights are not kept.
        sample: the result of `weights_sample` when the model was described; "" for a new description.
    """

    name: str
    hf: "PreTrainedModel"
    config: "PreTrainedConfig"
    tokenizer: Tokenizer
    dtype: str
    device: Device
    groups: tuple[LayerGroup, ...]
    layers: tuple[LayerShape, ...]
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_position: int
    weights: "WeightSource | None" = None
    pooling: Pooling | None = None
    pairs: PairReader | None = None
    generates: bool = True
    sampling: Mapping[str, float] = field(default_factory=dict)
    codes: "WeightSource | None" = None
    shape: ModuleShape | None = None
    identity: str = ""
    sample: str = ""

    @property
    def torch_dtype(self) -> "torch.dtype":
        """Return `dtype` as a torch.dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def torch_device(self) -> "torch.device":
        """Return `device` as a torch.device."""
        import torch

        return torch.device(str(self.device))


_SAMPLED_BYTES = 256  # of each tensor


def weights_sample(model: Model) -> str:
    """Return a digest of each tensor's first weights, because further training may leave most tensors unchanged."""
    if model.sample:
        return model.sample
    digest, source = hashlib.sha256(), model.weights
    if source is None:
        from genbatch.nif.models.weight_source import ModuleWeights  # imports torch

        source = ModuleWeights(model.hf)
    for name in sorted(source.names()):
        digest.update(source.tensor(name).rows.reshape(-1)[:_SAMPLED_BYTES].tobytes())
    return digest.hexdigest()


def module_shape(model: Model) -> ModuleShape:
    """Return the names and shapes of the model's module."""
    if model.shape is not None:
        return model.shape
    import torch

    hf: Any = model.hf
    head = hf.get_output_embeddings() if hasattr(hf, "get_output_embeddings") else None
    parts = {
        name: (part.out_features, part.in_features) if isinstance(part, torch.nn.Linear) and part is not head else None
        for name, part in hf.named_modules()
        if not list(part.children())
    }
    return ModuleShape(
        type(hf).__name__, {name: tuple(tensor.shape) for name, tensor in hf.state_dict().items()}, parts
    )
