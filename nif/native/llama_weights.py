"""LlamaWeights: a transformers model of the Llama family as the struct and the packed matrices that C reads."""

from typing import TYPE_CHECKING, Any

import torch

from genbatch.nif.errors import OptionError
from genbatch.nif.models.weight_source import ModuleWeights
from genbatch.nif.native.cores import available_cores
from genbatch.nif.native.errors import NativeUnavailable
from genbatch.nif.native.library import (
    ALL_POSITIONS,
    COLUMNS,
    MAX_GROUPS,
    MAX_HEAD_DIM,
    WEIGHT_BF16,
    WEIGHT_F32,
    WEIGHT_I8,
    Layer,
    Linear,
    ModelStruct,
    native_library,
)
from genbatch.nif.native.weights import WeightPacker, interleave_gate_up

if TYPE_CHECKING:
    from genbatch.nif.models.model import Model

QUANTIZE = ("none", "int8")
"""The values of the option `quantize` here."""

_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_HEAD_DIM_STEP = 16
_I8_GROUP = 64  # inputs that share a scale
_I8_HEAD_GROUP = 32  # the head decides between near ties: the finer scale brings two thirds of int8's loss back


def check_supported(model: "Model") -> None:
    """Whether the kernels compute this model.

    Raises:
        NativeUnavailable: they do not; the reason says which part.
    """
    config: Any = model.config
    kind = type(model.hf).__name__
    if kind not in _FAMILY:
        raise NativeUnavailable(f"{kind} is not of the Llama family ({', '.join(_FAMILY)})")
    if model.device.type != "cpu":
        raise NativeUnavailable(f"the model is on {model.device}, not on the CPU")
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise NativeUnavailable(f"weights in {model.dtype}; the kernels take float32 and bfloat16")
    if config.hidden_act != "silu":
        raise NativeUnavailable(f"the activation is {config.hidden_act}, not silu")
    attention = model.hf.model.layers[0].self_attn
    head_dim: int = attention.head_dim
    if head_dim % _HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        raise NativeUnavailable(
            f"heads of {head_dim} elements; the kernels take multiples of {_HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    if config.hidden_size % 2 or config.intermediate_size % 2:
        raise NativeUnavailable("hidden and intermediate sizes must be even")
    if len(model.groups) > MAX_GROUPS:
        raise NativeUnavailable(f"{len(model.groups)} layer groups; the kernels take {MAX_GROUPS}")
    rotary = model.hf.model.rotary_emb
    if rotary.rope_type in ("dynamic", "longrope") or rotary.inv_freq.numel() * 2 != head_dim:
        raise NativeUnavailable(f"rotary embedding of type {rotary.rope_type} over part of the head or of the range")
    if any(type(module) is not torch.nn.Linear for module in _linears(model)):
        raise NativeUnavailable("its linears are not plain torch.nn.Linear")


def _linears(model: "Model") -> list[torch.nn.Module]:
    layers = model.hf.model.layers
    in_attention = [getattr(layer.self_attn, f"{name}_proj") for layer in layers for name in "qkvo"]
    in_mlp = [getattr(layer.mlp, f"{name}_proj") for layer in layers for name in ("gate", "up", "down")]
    return [*in_attention, *in_mlp, model.hf.lm_head]


class LlamaWeights:
    """A model's weights packed once, for any number of runners.

    Attributes:
        model: whose they are.
        library: the kernels that read them.
        kind: WEIGHT_F32, WEIGHT_BF16 or WEIGHT_I8; of the last, what is on a 4-bit grid already is WEIGHT_U4.
        struct: the model as C sees it; valid as long as this object.

    Args:
        model: what `load_model` returned.
        quantize: "none" keeps the model's dtype; "int8" as `native_runner` describes.

    Raises:
        NativeUnavailable: the kernels cannot be built, or do not compute this model.
        OptionError: `quantize` has no such value.
    """

    def __init__(self, model: "Model", quantize: str = "none") -> None:
        if quantize not in QUANTIZE:
            raise OptionError("quantize", f"{quantize!r} is none of {', '.join(QUANTIZE)}")
        check_supported(model)
        self.model = model
        self.library = native_library()
        plain = WEIGHT_BF16 if model.dtype == torch.bfloat16 else WEIGHT_F32
        self.quantize = quantize
        self.kind = WEIGHT_I8 if quantize == "int8" else plain
        self._packer = WeightPacker(self.library, available_cores())
        self._source = model.weights or ModuleWeights(model.hf)
        decoder = model.hf.model
        self._layers = (Layer * len(decoder.layers))()
        for group_id, group in enumerate(model.groups):
            window = ALL_POSITIONS if group.window is None else group.window
            for index, layer in enumerate(group.layers):
                self._layers[layer] = self._layer(layer, group_id, index, window)
        attention = decoder.layers[0].self_attn
        config: Any = model.config
        embedding = self._source.tensor("model.embed_tokens.weight")
        self._embedding = embedding.whole().to(model.dtype).contiguous()  # read a row at a time
        head = embedding if config.tie_word_embeddings else self._source.tensor("lm_head.weight")
        self.struct = ModelStruct(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            num_layers=len(decoder.layers),
            vocab_size=model.vocab_size,
            num_groups=len(model.groups),
            norm_eps=config.rms_norm_eps,
            score_scale=attention.scaling,
            embedding_kind=plain,
            embedding=self._embedding.data_ptr(),
            final_norm=self._packer.vector(self._source.tensor("model.norm.weight")),
            layers=self._layers,
            head=self._packer.linear(self.kind, [head], group=_I8_HEAD_GROUP),
        )
        self._source.release()

    def _layer(self, layer: int, group: int, index: int, window: int) -> Layer:
        def norm(name: str) -> int | None:
            full = f"model.layers.{layer}.{name}.weight"
            return self._packer.vector(self._source.tensor(full)) if full in self._source.names() else None

        return Layer(
            qkv=self._linear(layer, [f"self_attn.{part}_proj" for part in "qkv"]),
            out=self._linear(layer, ["self_attn.o_proj"]),
            gate_up=self._linear(layer, ["mlp.gate_proj", "mlp.up_proj"], interleaved=True),
            down=self._linear(layer, ["mlp.down_proj"]),
            attention_norm=norm("input_layernorm"),
            mlp_norm=norm("post_attention_layernorm"),
            q_norm=norm("self_attn.q_norm"),
            k_norm=norm("self_attn.k_norm"),
            group=group,
            index_in_group=index,
            window=window,
        )

    def _linear(self, layer: int, names: list[str], *, interleaved: bool = False) -> Linear:
        names = [f"model.layers.{layer}.{name}" for name in names]
        tensors = [self._source.tensor(f"{name}.weight") for name in names]
        linear = self._packer.linear(self.kind, tensors, group=_I8_GROUP, interleaved=interleaved)
        if f"{names[0]}.bias" in self._source.names():
            biases = [self._source.tensor(f"{name}.bias").whole() for name in names]
            bias = interleave_gate_up(*biases) if interleaved else torch.cat(biases)
            linear.bias = self._packer.put_floats(torch.nn.functional.pad(bias, (0, -len(bias) % COLUMNS)))
        return linear
