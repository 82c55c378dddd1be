"""Attention over the paged KV cache: the function that transformers' modules call, and its plain-torch form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.nn.functional import conv1d, pad, scaled_dot_product_attention
from transformers import AttentionInterface

from genbatch.nif.runner import LayerGroup
from genbatch.nif.runners.tensor_batch import TensorBatch

ATTENTION_NAME = "genbatch_paged"
"""What `attn_implementation` is set to. transformers builds no mask for a name it does not know one for."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A layer's arguments to attention for the T tokens of a step; the tensors may be strided views."""

    layer: int
    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [T, Hkv, D]
    value: torch.Tensor  # [T, Hkv, Dv]
    scaling: float
    softcap: float | None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None  # [H], one more score per head; it takes softmax weight and adds no value
    window: int | None  # the module's own setting; the layer group's window is used


class AttentionStep(Protocol):
    """Attention, convolutions and recurrences of one step: each writes to the pool and reads from it."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the layer's attention output, [T, H, Dv]."""
        ...

    def convolve(self, layer: int, inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return a short convolution of each entry's inputs, [T, channels]; the arguments are those of `convolved`."""
        ...

    def recur(self, layer: int, inputs: torch.Tensor, run: "StateScan") -> torch.Tensor:
        """Return a recurrent layer's output for each entry's inputs, [T, hidden]."""
        ...


def register_attention() -> None:
    """Register `ATTENTION_NAME` with transformers; a second call changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, Dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    genbatch_step: AttentionStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for transformers, which calls this registered function; `genbatch_step` holds the step.

    Raises:
        ValueError: the layer needs a feature that attention over block tables does not have.
    """
    layer = getattr(module, "layer_idx", None)
    if genbatch_step is None:
        owner = type(module).__name__
        raise ValueError(
            f"{owner} was called without a step: the layer around it passes no keyword arguments on to attention, "
            "so only the native runner can run such a model"
        )
    if not isinstance(layer, int):
        raise ValueError(f"{type(module).__name__} does not know its layer index")
    if attention_mask is not None:
        raise ValueError(f"layer {layer} brings its own attention mask")
    if position_bias is not None:
        raise ValueError(f"layer {layer} adds a position bias to its scores")
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise ValueError(f"layer {layer} attends to later tokens")
    call = AttentionCall(
        layer=layer,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sinks=s_aux,
        window=sliding_window,
    )
    return genbatch_step.attend(call).unsqueeze(0), None


# Maps inputs [n, hidden] and the state before them (None at a text's beginning) to outputs [n, hidden] and a state.
StateScan: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


_NO_STATES = torch.empty(0)


@dataclass(frozen=True, slots=True)
class LayerPool:
    """One layer's share of the KV pool."""

    keys: torch.Tensor  # [num_blocks, Hkv, block_size, D]
    values: torch.Tensor  # [num_blocks, Hkv, block_size, Dv]
    states: torch.Tensor = _NO_STATES  # [num_blocks, elements] float32, at each block's end, of a recurrent layer


@dataclass(frozen=True, slots=True)
class _Span:
    """One entry's rows of the batch and the keys that they can reach."""

    start: int
    stop: int
    blocks: torch.Tensor  # [n] int64, the blocks with a reachable key, the sinks' blocks first
    sinks: int  # sink keys at the blocks' beginning, before the window begins
    skip: int  # keys in these blocks before the window's first key
    length: int  # keys within the rows' windows
    mask: torch.Tensor | None  # [stop - start, sinks + length] bool, True attends; None: all rows attend to all keys


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """The step's plan that all layers of one group share."""

    blocks: torch.Tensor  # [T] int64, the block of each new token
    offsets: torch.Tensor  # [T] int64, each new token's position in its block
    spans: list[_Span]
    table: torch.Tensor  # [B, max_blocks] int32
    kv_lens: list[int]  # [B]


class TorchStep:
    """Runs a step in plain torch: it gathers each entry's keys and attends with SDPA (fp32 accumulation).

    This step is the oracle of the faster steps and runs on every device. An entry reads only the keys in its own row
    of the block table, up to its own length. So no key of another sequence can reach the entry.

    Args:
        batch: the step's ragged layout.
        groups: the model's layer groups, in the order of `batch.slots`.
        pools: one pool per layer.
        block_size: positions per block.
    """

    def __init__(
        self, batch: TensorBatch, groups: Sequence[LayerGroup], pools: Sequence[LayerPool], block_size: int
    ) -> None:
        self._pools = pools
        self._block_size = block_size
        self._plans: dict[int, _GroupPlan] = {}
        starts, kv_lens = batch.query_starts.tolist(), batch.kv_lens.tolist()
        for index, group in enumerate(groups):
            slots = batch.slots[index]
            table = batch.block_tables[index]
            spans = [
                _span(starts[b], starts[b + 1], kv_lens[b], table[b], group, block_size) for b in range(len(kv_lens))
            ]
            plan = _GroupPlan(slots // block_size, slots % block_size, spans, table, kv_lens)
            self._plans.update(dict.fromkeys(group.layers, plan))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the layer's keys and values, then attend entry by entry; returns [T, H, Dv]."""
        plan, pool = self._plans[call.layer], self._pools[call.layer]
        pool.keys[plan.blocks, :, plan.offsets] = call.key.to(pool.keys.dtype)
        pool.values[plan.blocks, :, plan.offsets] = call.value.to(pool.values.dtype)
        rows = [_attend_span(call, pool, span) for span in plan.spans]
        return torch.cat(rows).to(call.query.dtype)

    def convolve(self, layer: int, inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Write the layer's inputs, then convolve entry by entry; returns [T, channels]."""
        plan, pool = self._plans[layer], self._pools[layer]
        pool.keys[plan.blocks, 0, plan.offsets] = inputs.to(pool.keys.dtype)
        parts = [convolved(_gather(pool.keys, span)[0], span.stop - span.start, taps, bias) for span in plan.spans]
        return torch.cat(parts).to(inputs.dtype)

    def recur(self, layer: int, inputs: torch.Tensor, run: StateScan) -> torch.Tensor:
        """Write the layer's inputs, then run the layer entry by entry and block by block; returns [T, hidden].

        Each block runs from its beginning, so positions of earlier steps run again; their outputs are dropped.
        """
        plan, pool, size = self._plans[layer], self._pools[layer], self._block_size
        pool.keys[plan.blocks, 0, plan.offsets] = inputs.to(pool.keys.dtype)
        rows = []
        for span, row, kv_len in zip(plan.spans, plan.table, plan.kv_lens, strict=True):
            n_past = kv_len - (span.stop - span.start)
            for index in range(n_past // size, -(-kv_len // size)):
                first, end = index * size, min(kv_len, (index + 1) * size)
                state = pool.states[row[index - 1]] if index else None
                outputs, after = run(pool.keys[row[index], 0, : end - first], state)
                rows.append(outputs[max(n_past - first, 0) :])
                if end - first == size:
                    pool.states[row[index]] = after
        return torch.cat(rows).to(inputs.dtype)


def _span(start: int, stop: int, kv_len: int, table: torch.Tensor, group: LayerGroup, block_size: int) -> _Span:
    n_past, window = kv_len - (stop - start), group.window
    lowest = 0 if window is None else max(0, n_past - window + 1)
    sinks = group.sink_tokens
    if lowest <= sinks:  # no gap lies between the sinks and the window
        lowest, sinks = 0, 0
    first_block, num_sink_blocks = lowest // block_size, -(-sinks // block_size)
    blocks = table[first_block : -(-kv_len // block_size)].long()
    if sinks:
        blocks = torch.cat((table[:num_sink_blocks].long(), blocks))
    mask = None
    if stop - start > 1:
        queries = torch.arange(n_past, kv_len, device=table.device)[:, None]
        keys = torch.arange(lowest, kv_len, device=table.device)[None]
        if sinks:
            keys = torch.cat((torch.arange(sinks, device=table.device)[None], keys), dim=1)
        mask = keys <= queries
        if window is not None:
            mask &= (keys > queries - window) | (keys < group.sink_tokens)
    skip = (num_sink_blocks - first_block) * block_size + lowest
    return _Span(start, stop, blocks, sinks, skip, kv_len - lowest, mask)


def _attend_span(call: AttentionCall, pool: LayerPool, span: _Span) -> torch.Tensor:
    """Attend one entry's rows to its own keys; returns [n, H, Dv]."""
    keys, values = _gather(pool.keys, span), _gather(pool.values, span)  # [Hkv, L, D], [Hkv, L, Dv]
    num_rows, num_heads, dim = span.stop - span.start, call.query.shape[1], call.query.shape[2]
    num_kv_heads = keys.shape[0]
    per_kv_head = num_heads // num_kv_heads
    # Fold the query heads that share a KV head into the query positions. So keys are never repeated, and SDPA's
    # bfloat16 path on CPU is several times faster than with enable_gqa.
    query = call.query[span.start : span.stop].to(keys.dtype)
    query = query.view(num_rows, num_kv_heads, per_kv_head, dim).permute(1, 2, 0, 3)
    query = query.reshape(num_kv_heads, per_kv_head * num_rows, dim)
    mask = None if span.mask is None else span.mask.repeat(per_kv_head, 1)
    if call.softcap is None and call.sinks is None:
        # Pass four dimensions, because SDPA's fused kernels refuse three.
        bias = None if mask is None else mask[None, None]
        out = scaled_dot_product_attention(query[None], keys[None], values[None], bias, scale=call.scaling)[0]
    else:
        sinks = None if call.sinks is None else call.sinks.view(num_kv_heads, per_kv_head)
        out = _explicit_attention(call, query, keys, values, mask, sinks)
    out = out.view(num_kv_heads, per_kv_head, num_rows, -1).permute(2, 0, 1, 3)
    return out.reshape(num_rows, num_heads, -1)


def _gather(pool: torch.Tensor, span: _Span) -> torch.Tensor:
    """Gather the span's keys or values, [Hkv, sinks + L, D]."""
    # Select before transposing: index_select of a strided view would copy the whole pool first.
    gathered = pool.index_select(0, span.blocks).transpose(0, 1).flatten(1, 2)
    within = gathered[:, span.skip : span.skip + span.length]
    return torch.cat((gathered[:, : span.sinks], within), dim=1) if span.sinks else within


def convolved(inputs: torch.Tensor, num_rows: int, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the last rows of a causal depthwise convolution.

    Args:
        inputs: [L, channels], from the first position within the kernel's reach.
        num_rows: rows of the result.
        taps: [channels, 1, kernel].
        bias: [channels].

    Returns:
        [num_rows, channels].
    """
    kernel = taps.shape[-1]
    padded = pad(inputs.T, (max(0, kernel - 1 + num_rows - len(inputs)), 0))
    return conv1d(padded[None], taps, bias, groups=len(taps))[0].T[-num_rows:]


def _explicit_attention(
    call: AttentionCall,
    query: torch.Tensor,  # [Hkv, G * n, D]
    keys: torch.Tensor,  # [Hkv, L, D]
    values: torch.Tensor,  # [Hkv, L, Dv]
    mask: torch.Tensor | None,  # [G * n, L]
    sinks: torch.Tensor | None,  # [Hkv, G]
) -> torch.Tensor:
    """Compute attention step by step in float32, with softcap and sinks, which SDPA lacks; returns [Hkv, G * n, Dv]."""
    scores = query.float() @ keys.float().transpose(1, 2) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        rows_per_head = scores.shape[1] // sinks.shape[1]
        extra = sinks.float().repeat_interleave(rows_per_head, dim=1).unsqueeze(-1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return (weights @ values.float()).to(values.dtype)
