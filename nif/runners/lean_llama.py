"""The layer loop of the Llama family over transformers' parameters: merged projections, fused kernels.

Rounds where the model's own modules round, so that both take the same tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding, linear

from genbatch.nif.batch import RaggedBatch
from genbatch.nif.kernels.attention_tiles import choose_num_splits
from genbatch.nif.kernels.paged_attention import paged_attention
from genbatch.nif.kernels.rms_norm import add_rms_norm
from genbatch.nif.kernels.rope_cache import rope_and_write
from genbatch.nif.kernels.silu_mul import silu_mul
from genbatch.nif.runners.attention import LayerPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from genbatch.nif.models.model import Model

_FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_size, hidden]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_size]
    key_norm: torch.Tensor | None
    attention_out: torch.nn.Linear
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    mlp_out: torch.nn.Linear
    group: int
    window: int | None


def why_not_lean(model: "Model") -> str | None:
    """Why the model cannot run in this loop; None if it can."""
    kind = type(model.hf).__name__
    if kind not in _FAMILIES:
        return f"{kind} is none of {', '.join(_FAMILIES)}"
    if model.config.hidden_act != "silu":
        return f"its activation is {model.config.hidden_act}, not silu"
    head_size = model.layers[0].key_dim
    decoder: Any = model.hf.model
    if 2 * decoder.rotary_emb.inv_freq.numel() != head_size:
        return "it rotates a part of each head only"
    return None


class LeanLlama:
    """A model of the Llama family, ready to step.

    Merging replaces the module's separate projections by views of the merged ones, so the weights exist once and the
    module keeps working.

    Args:
        model: one for which `why_not_lean` is None.
        num_processors: multiprocessors of the GPU, which decide how decodes are split.
    """

    def __init__(self, model: "Model", num_processors: int) -> None:
        config, decoder = model.config, model.hf.model
        self._num_processors = num_processors
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads = model.layers[0].num_kv_heads
        self._head_size = model.layers[0].key_dim
        self._eps: float = config.rms_norm_eps
        self._embedding: torch.Tensor = decoder.embed_tokens.weight
        self._final_norm: torch.Tensor = decoder.norm.weight
        self._head: torch.nn.Linear = model.hf.lm_head
        group_of = {layer: index for index, group in enumerate(model.groups) for layer in group.layers}
        self._layers = [
            _layer(module, group_of[index], model.groups[group_of[index]].window)
            for index, module in enumerate(decoder.layers)
        ]
        positions = torch.arange(model.max_position, device=model.device)[None]
        with torch.inference_mode():
            like = torch.empty(1, dtype=torch.float32, device=model.device)
            cos, sin = decoder.rotary_emb(like, positions)
        half = self._head_size // 2
        self._cos, self._sin = (table[0, :, :half].contiguous() for table in (cos, sin))  # [max_position, D / 2]

    def forward(self, batch: RaggedBatch, pools: "Sequence[LayerPool]") -> torch.Tensor:
        """One step; `batch` lies on the device, `pools` are one a layer. Returns logits [R, vocab_size] float32."""
        residual = embedding(batch.input_ids, self._embedding)  # [T, hidden]
        delta: torch.Tensor | None = None
        for layer, pool in zip(self._layers, pools, strict=True):
            hidden = add_rms_norm(residual, delta, layer.input_norm, self._eps)
            attended = self._attend(layer, hidden, batch, pool)
            delta = linear(attended, layer.attention_out.weight, layer.attention_out.bias)
            hidden = add_rms_norm(residual, delta, layer.mlp_norm, self._eps)
            gated = silu_mul(linear(hidden, layer.gate_up, layer.gate_up_bias))
            delta = linear(gated, layer.mlp_out.weight, layer.mlp_out.bias)
        assert delta is not None
        rows = batch.logit_rows
        hidden = add_rms_norm(residual[rows], delta[rows], self._final_norm, self._eps)
        return linear(hidden, self._head.weight, self._head.bias).float()

    def _attend(
        self, layer: _Layer, hidden: torch.Tensor, batch: RaggedBatch, pool: LayerPool
    ) -> torch.Tensor:  # [T, heads * head_size]
        query = rope_and_write(
            linear(hidden, layer.qkv, layer.qkv_bias),
            pool.keys,
            pool.values,
            batch.slots[layer.group],
            batch.positions,
            self._cos,
            self._sin,
            num_heads=self._num_heads,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=self._eps,
        )
        num_sequences = len(batch.kv_lens)
        out = paged_attention(
            query,
            pool.keys,
            pool.values,
            batch.block_tables[layer.group],
            batch.query_starts,
            batch.kv_lens,
            scale=self._head_size**-0.5,
            max_query_len=batch.max_query_len,
            window=layer.window,
            num_splits=choose_num_splits(num_sequences, self._num_kv_heads, batch.max_kv_len, self._num_processors),
        )
        return out.flatten(1)


def _layer(module: Any, group: int, window: int | None) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    qkv, qkv_bias = _merge([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, gate_up_bias = _merge([mlp.gate_proj, mlp.up_proj])
    return _Layer(
        input_norm=module.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        attention_out=attention.o_proj,
        mlp_norm=module.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        mlp_out=mlp.down_proj,
        group=group,
        window=window,
    )


def _merge(projections: "list[torch.nn.Linear]") -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight (and bias) for several projections of the same input, whose own become views of it."""
    weight = _merge_tensors([projection.weight for projection in projections])
    biases = [projection.bias for projection in projections]
    return weight, None if biases[0] is None else _merge_tensors(biases)


def _merge_tensors(parts: "Sequence[torch.Tensor]") -> torch.Tensor:
    """The parts end to end, of which they become views."""
    whole = _merged_before(parts)
    if whole is None:
        whole = torch.cat([part.data for part in parts])
        begin = 0
        for part in parts:
            part.data, begin = whole[begin : begin + len(part)], begin + len(part)
    return whole


def _merged_before(parts: "Sequence[torch.Tensor]") -> torch.Tensor | None:
    """The whole whose consecutive views the parts already are, if another runner merged them."""
    first, rows = parts[0], sum(len(part) for part in parts)
    expected = first.data_ptr()
    for part in parts:
        if part.data_ptr() != expected or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        expected += part.nbytes
    return first.data.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
