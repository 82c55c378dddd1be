"""Model: a causal language model or an encoder in memory. `load_model` makes it, runners read it."""

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

if TYPE_CHECKING:  # a model that was described before needs nothing of torch and transformers
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from genbatch.nif.models.weight_source import WeightSource

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The numbers that a model computes in, by torch's names, and their bytes."""


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """transformers' module in words. All its linears are plain.

    Args:
        kind: its class's name.
        tensors: each tensor's shape.
        parts: its modules without modules inside, by name: (outputs, inputs) of a linear that is not the head.
    """

    kind: str
    tensors: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[int, int] | None]


class Lazy:
    """An object that is made when an attribute of it is first read."""

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
        name: what to call it towards users.
        hf: transformers' module in eval mode, its attention going through `ATTENTION_NAME`; on the "meta" device, a
            description without weights, where `weights` has them. Lazy where `shape` is there.
        config: of the text decoder.
        tokenizer: the model's own.
        dtype: of the weights and of the KV cache, one of DTYPES.
        device: where both live.
        groups: the layers by how far they look back.
        layers: what each layer keeps in the KV cache.
        vocab_size: width of the logits; token ids are below it.
        eos_token_ids: any of them ends a generation.
        max_position: positions one sequence may have.
        weights: the tensors in their files, for a runner that packs them itself; None where `hf` holds them.
        pooling: how embeddings or scores are made; None where there are none.
        pairs: makes the tokens of what it scores; None where it scores nothing.
        generates: whether it continues text.
        sampling: how its makers say to draw, by the names of a request's parameters; nothing where they say nothing.
        codes: the files of a checkpoint that is quantised already, beside the values that `hf` holds; else None.
        shape: what a native runner asks of `hf`, where that was described before; else None.
        identity: a digest of the model's files and of this code; "" where packed weights are not kept.
        sample: what `weights_sample` returned when the model was described; "" before.
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
        """Return `dtype` as torch has it."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def torch_device(self) -> "torch.device":
        """Return `device` as torch has it."""
        import torch

        return torch.device(str(self.device))


_SAMPLED_BYTES = 256  # of each tensor


def weights_sample(model: Model) -> str:
    """Return a digest of each tensor's first weights: further training may leave most tensors as they were."""
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
    """Return the model's module in words."""
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
