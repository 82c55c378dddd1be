"""LlamaWeights: a transformers model of the Llama family as the struct and the packed matrices that C reads."""

from typing import TYPE_CHECKING, Any

import torch

from genbatch.nif.errors import OptionError
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
        decoder = model.hf.model
        self._layers = (Layer * len(decoder.layers))()
        for group_id, group in enumerate(model.groups):
            window = ALL_POSITIONS if group.window is None else group.window
            for index, layer in enumerate(group.layers):
                self._layers[layer] = self._layer(decoder.layers[layer], group_id, index, window)
        attention = decoder.layers[0].self_attn
        config: Any = model.config
        # Read a row at a time, so the model's own matrix serves.
        self._embedding = decoder.embed_tokens.weight.detach().contiguous()
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
            final_norm=self._packer.put_floats(decoder.norm.weight),
            layers=self._layers,
            head=self._linear(model.hf.lm_head.weight, model.hf.lm_head.bias, _I8_HEAD_GROUP),
        )

    def _layer(self, module: Any, group: int, index: int, window: int) -> Layer:
        attention, mlp = module.self_attn, module.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        gate, up = mlp.gate_proj, mlp.up_proj
        gate_up_bias = None if gate.bias is None else interleave_gate_up(gate.bias, up.bias)
        return Layer(
            qkv=self._linear(
                torch.cat([part.weight for part in qkv]),
                None if qkv[0].bias is None else torch.cat([part.bias for part in qkv]),
            ),
            out=self._linear(attention.o_proj.weight, attention.o_proj.bias),
            gate_up=self._linear(interleave_gate_up(gate.weight, up.weight), gate_up_bias),
            down=self._linear(mlp.down_proj.weight, mlp.down_proj.bias),
            attention_norm=self._packer.put_floats(module.input_layernorm.weight),
            mlp_norm=self._packer.put_floats(module.post_attention_layernorm.weight),
            q_norm=self._packer.put_floats(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
            k_norm=self._packer.put_floats(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
            group=group,
            index_in_group=index,
            window=window,
        )

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None, group: int = _I8_GROUP) -> Linear:
        linear = self._packer.pack(self.kind, weight, group)
        if bias is not None:
            padded = torch.nn.functional.pad(bias.detach(), (0, -len(bias) % COLUMNS))
            linear.bias = self._packer.put_floats(padded)
        return linear
