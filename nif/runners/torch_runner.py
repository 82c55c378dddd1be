"""TorchRunner: runs any supported transformers model in plain torch over the paged pool, on CPU and CUDA.

    TorchRunner.forward -- TensorBatch --> the model's own modules --> paged_attention --> TorchStep: keys, values, SDPA
                                                 LoraHooks add adapters' rows

Only attention and the states of convolutions and recurrences are our code. The other runners in torch share
TensorBatch and the function that transformers' modules call. Tests compare these runners with TorchStep.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch.nn.functional import conv1d, pad, scaled_dot_product_attention
from transformers import AttentionInterface

from genbatch.nif.runner import Content, LayerGroup, LoraAdapter, RaggedBatch, Rows

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """The arrays of a RaggedBatch as tensors, all on one device.

    B entries, T tokens in all, G layer groups.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_starts: torch.Tensor  # [B + 1] int32
    kv_lens: torch.Tensor  # [B] int32
    slots: tuple[torch.Tensor, ...]  # per group [T] int64
    block_tables: tuple[torch.Tensor, ...]  # per group [B, max_blocks] int32
    logit_rows: torch.Tensor  # [R] int64
    max_query_len: int
    max_kv_len: int
    state_rows: torch.Tensor | None = None  # [S] int64
    adapters: torch.Tensor | None = None  # [T] int64, always on the CPU


def tensors(batch: RaggedBatch) -> TensorBatch:
    """Return the batch as tensors on the CPU, which share the arrays' memory."""
    return TensorBatch(
        input_ids=torch.from_numpy(batch.input_ids),
        positions=torch.from_numpy(batch.positions),
        query_starts=torch.from_numpy(batch.query_starts),
        kv_lens=torch.from_numpy(batch.kv_lens),
        slots=tuple(map(torch.from_numpy, batch.slots)),
        block_tables=tuple(map(torch.from_numpy, batch.block_tables)),
        logit_rows=torch.from_numpy(batch.logit_rows),
        max_query_len=batch.max_query_len,
        max_kv_len=batch.max_kv_len,
        state_rows=None if batch.state_rows is None else torch.from_numpy(batch.state_rows),
        adapters=None if batch.adapters is None else torch.from_numpy(batch.adapters),
    )


def to_device(batch: TensorBatch, device: torch.device) -> TensorBatch:
    """Return the batch with its tensors on the device; the adapters stay on the CPU."""
    if device.type == "cpu":
        return batch

    def copied(part: torch.Tensor) -> torch.Tensor:
        return part.to(device, non_blocking=True)

    return replace(
        batch,
        input_ids=copied(batch.input_ids),
        positions=copied(batch.positions),
        query_starts=copied(batch.query_starts),
        kv_lens=copied(batch.kv_lens),
        slots=tuple(map(copied, batch.slots)),
        block_tables=tuple(map(copied, batch.block_tables)),
        logit_rows=copied(batch.logit_rows),
        state_rows=None if batch.state_rows is None else copied(batch.state_rows),
    )


def rows_of(tensor: torch.Tensor) -> Rows:
    """Return rows of logits or states in the form that a runner returns: an array if the rows are on the host."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


ATTENTION_NAME = "genbatch_paged"
"""The value of `attn_implementation`. transformers builds no mask for a name without a registered mask function."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A layer's arguments to attention for the T tokens of a step; the tensors may be strided views."""

    layer: int
    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [T, Hkv, D]
    value: torch.Tensor  # [T, Hkv, Dv]
    scaling: float
    softcap: float | None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None  # [H], an additional score per head, which takes softmax weight and adds no value
    window: int | None  # the module's own setting; the layer group's window is used


class AttentionStep(Protocol):
    """The attention, convolutions and recurrences of one step. Each method writes to the pool and reads from it."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the layer's attention output, [T, H, Dv]."""
        ...

    def convolve(self, layer: int, inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return a short convolution of each entry's inputs, [T, channels]; `convolved` describes the arguments."""
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
            f"{owner} was called without a step: its layer does not pass keyword arguments on to attention, "
            "so only the native runner can run this model"
        )
    if not isinstance(layer, int):
        raise ValueError(f"{type(module).__name__} does not know its layer index")
    if attention_mask is not None:
        raise ValueError(f"layer {layer} has its own attention mask")
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


# Maps inputs [n, hidden] and the state before the inputs (None at the beginning of a text) to outputs [n, hidden] and
# the state after the inputs.
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

    Tests compare faster steps with this one, which runs on every device. An entry reads only the keys in its own row
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

        Each block runs from its beginning. So positions of earlier steps run again, and their outputs are dropped.
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
        inputs: [L, channels], from the first position that the kernel reads.
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


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A LoraLinear on the device."""

    a: torch.Tensor  # [rank, inputs] float32
    b: torch.Tensor  # [outputs, rank] float32
    scale: float


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one adapter."""

    rows: torch.Tensor  # [n] int64 on the device
    linears: Mapping[str, _Matrices]


class LoraHooks:
    """Adds the adapters' outputs to the outputs of a module's linears. A step without adapters runs unchanged.

    Args:
        hf: transformers' module.
        device: the module's device.
    """

    def __init__(self, hf: torch.nn.Module, device: torch.device) -> None:
        self._hf = hf
        self._device = device
        self._linears: dict[int, Mapping[str, _Matrices]] = {}  # by handle
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._parts: list[_Part] = []  # of the step under way

    def add(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner.add_adapter`."""
        self._linears[adapter.handle] = {
            name: _Matrices(
                torch.from_numpy(linear.a).to(self._device), torch.from_numpy(linear.b).to(self._device), linear.scale
            )
            for name, linear in adapter.linears.items()
        }

    def drop(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner.drop_adapter`."""
        del self._linears[adapter.handle]

    @contextmanager
    def applied(self, adapters: torch.Tensor | None) -> Iterator[None]:
        """Apply these adapters to a forward inside the `with` block; call this on the thread that runs the module.

        Args:
            adapters: [T] int64 on the CPU, or None; see TensorBatch.
        """
        if adapters is None:
            yield
            return
        for handle in sorted({*adapters.tolist()} - {0}):
            rows = (adapters == handle).nonzero()[:, 0].to(self._device)
            linears = self._linears[handle]
            self._parts.append(_Part(rows, linears))
            for name in linears.keys() - self._hooks.keys():
                self._hooks[name] = self._hf.get_submodule(name).register_forward_hook(self._hook(name))
        try:
            yield
        finally:
            self._parts.clear()

    def close(self) -> None:
        """Remove the hooks, because other code may run the module."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _hook(self, name: str) -> Callable[[torch.nn.Module, tuple[Any, ...], torch.Tensor], None]:
        def add_parts(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            for part in self._parts:
                linear = part.linears.get(name)
                if linear is not None:
                    x = inputs[0][0, part.rows].float()
                    output[0, part.rows] += (x @ linear.a.T @ linear.b.T * linear.scale).to(output.dtype)

        return add_parts


class TorchRunner:
    """Runs the model's own modules with our attention. Implements `Runner` and `AdaptingRunner`.

    Args:
        model: a model that `load_model` returned.
    """

    name = "torch"
    quantize = "none"

    def __init__(self, model: "Model") -> None:
        self.device = model.torch_device
        self.vocab_size = model.vocab_size
        self.groups = model.groups
        self._model = model
        self._dtype = model.torch_dtype
        self._block_size = 0
        self._pools: list[LayerPool] = []
        self._lora = LoraHooks(model.hf, self.device)
        # A few models always compute the logits of every token; the rows are selected afterwards.
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.hf.forward).parameters

    def bytes_per_block(self, group: int, block_size: int) -> int:
        """Return the bytes of KV in one block of `group`, over all the group's layers."""
        shapes = [self._model.layers[layer] for layer in self.groups[group].layers]
        elements = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
        states = sum(shape.state for shape in shapes) * torch.float32.itemsize
        return elements * block_size * self._dtype.itemsize + states

    @property
    def score_bytes(self) -> float:
        """Return the peak bytes that attention needs for each (head, query, key)."""
        config = self._model.config
        explicit = getattr(config, "attn_logit_softcapping", None) is not None or any(
            getattr(module, "sinks", None) is not None for module in self._model.hf.modules()
        )
        if explicit or self.device.type != "cpu":
            return 16.0  # scores, softcapped scores and weights in float32, and the mask as float32
        # SDPA on a CPU writes no scores. The heads that share keys need a mask, as bool and as float32.
        return 8.0 / max(shape.num_kv_heads for shape in self._model.layers)

    def allocate(self, num_blocks: Sequence[int], block_size: int) -> None:
        """Allocate the KV pool: `num_blocks[g]` zeroed blocks for group g."""
        assert not self._pools, "allocate is called once"
        blocks_of_layer: dict[int, int] = {}
        for group, count in zip(self.groups, num_blocks, strict=True):
            blocks_of_layer.update(dict.fromkeys(group.layers, count))
        for layer, shape in enumerate(self._model.layers):
            rows = (blocks_of_layer.get(layer, 0), shape.num_kv_heads, block_size)
            keys, values = (
                torch.zeros((*rows, dim), dtype=self._dtype, device=self.device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            states = torch.zeros((rows[0], shape.state), device=self.device)
            self._pools.append(LayerPool(keys, values, states))
        self._block_size = block_size

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Rows:
        """Write the batch's keys and values to its slots; returns logits [R, vocab_size] float32."""
        return rows_of(self._logits(to_device(tensors(batch), self.device)))

    def _logits(self, batch: TensorBatch) -> torch.Tensor:
        assert self._pools, "forward needs a pool"
        step = TorchStep(batch, self.groups, self._pools, self._block_size)
        options = {"logits_to_keep": batch.logit_rows} if self._keeps_logits else {}
        with self._lora.applied(batch.adapters):
            output = self._model.hf(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                genbatch_step=step,
                **options,
            )
        logits: torch.Tensor = output.logits[0]
        if not self._keeps_logits:
            logits = logits[batch.logit_rows]
        return logits.float()

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner`."""
        self._lora.add(adapter)

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner`."""
        self._lora.drop(adapter)

    @torch.inference_mode()
    def forward_states(self, batch: RaggedBatch) -> tuple[Rows, Rows]:
        """Run `forward`; also returns hidden states of `batch.state_rows` after the last norm, [S, hidden] float32."""
        seen: list[torch.Tensor] = []

        def see(module: torch.nn.Module, arguments: Any, output: Any) -> None:
            seen.append(output.last_hidden_state[0])

        hook = self._model.hf.base_model.register_forward_hook(see)
        try:
            step = to_device(tensors(batch), self.device)
            logits = self._logits(step)
        finally:
            hook.remove()
        assert step.state_rows is not None, "no states are requested"
        return rows_of(logits), rows_of(seen[0][step.state_rows].float())

    @torch.inference_mode()
    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination); every source is read before any block is written."""
        sources, destinations = (self._ids(ids) for ids in zip(*pairs, strict=True))
        for tensor in self._tensors(group):
            tensor[destinations] = tensor[sources]

    @torch.inference_mode()
    def read_blocks(self, group: int, blocks: Sequence[int]) -> Content:
        """Return the blocks' content, layer by layer."""
        ids = self._ids(blocks)
        parts = [tensor[ids].flatten(1).view(torch.uint8) for tensor in self._tensors(group)]
        return torch.cat(parts, dim=1).cpu().numpy()

    @torch.inference_mode()
    def write_blocks(self, group: int, blocks: Sequence[int], content: Content) -> None:
        """Write the content that `read_blocks` returned into blocks, which may be other blocks than before."""
        assert content.shape == (len(blocks), self.bytes_per_block(group, self._block_size))
        ids = self._ids(blocks)
        tensors = self._tensors(group)
        sizes = [tensor[0].nbytes for tensor in tensors]
        parts = torch.split(torch.as_tensor(content, device=self.device), sizes, dim=1)
        for tensor, part in zip(tensors, parts, strict=True):
            rows = part.contiguous().view(tensor.dtype)
            tensor[ids] = rows.view(len(blocks), *tensor.shape[1:])

    def close(self) -> None:
        """Release the KV pool."""
        self._pools = []
        self._lora.close()

    def _tensors(self, group: int) -> list[torch.Tensor]:
        """Return the nonempty keys, values and states of the group's layers, in the order of `read_blocks`."""
        pools = [self._pools[layer] for layer in self.groups[group].layers]
        return [tensor for pool in pools for tensor in (pool.keys, pool.values, pool.states) if tensor.numel()]

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.device)
