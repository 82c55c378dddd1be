"""Model: a causal language model or an encoder in memory. `load_model` makes it, runners read it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from genbatch.nif.models.weight_source import WeightSource
from genbatch.nif.pooling import Pooling
from genbatch.nif.runner import LayerGroup, LayerShape
from genbatch.nif.text.pairs import PairReader
from genbatch.nif.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # a model that was described before needs nothing of transformers
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """transformers' module in words: its class's name, and each tensor's shape. All its linears are plain."""

    kind: str
    tensors: Mapping[str, tuple[int, ...]]


class Lazy:
    """An object that is made when an attribute of it is first read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Any:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


@dataclass(frozen=True)
class Model:
    """A loaded model. It is immutable, and all runners share it.

    Args:
        name: what to call it towards users.
        hf: transformers' module in eval mode, its attention going through `ATTENTION_NAME`; on the "meta" device, a
            description without weights, where `weights` has them. Lazy where `shape` is there.
        config: of the text decoder.
        tokenizer: the model's own.
        dtype: of the weights and of the KV cache.
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
    """

    name: str
    hf: "PreTrainedModel"
    config: "PreTrainedConfig"
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    groups: tuple[LayerGroup, ...]
    layers: tuple[LayerShape, ...]
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_position: int
    weights: WeightSource | None = None
    pooling: Pooling | None = None
    pairs: PairReader | None = None
    generates: bool = True
    sampling: Mapping[str, float] = field(default_factory=dict)
    codes: WeightSource | None = None
    shape: ModuleShape | None = None
    identity: str = ""


def module_shape(model: Model) -> ModuleShape:
    """The model's module in words."""
    if model.shape is not None:
        return model.shape
    return ModuleShape(type(model.hf).__name__, {name: tuple(one.shape) for name, one in model.hf.state_dict().items()})
