"""TorchRunner: any supported transformers model over the paged pool, in plain torch, on CPU and CUDA.

LoraHooks add each adapter's output to a module's own linears, for that adapter's rows of the step.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from genbatch.nif.runner import Content, LoraAdapter, RaggedBatch, Rows
from genbatch.nif.runners.attention import LayerPool, TorchStep
from genbatch.nif.runners.tensor_batch import TensorBatch, rows_of, tensors, to_device

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model


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
    """Adds the adapters' outputs to those of a module's linears. A step without adapters runs unchanged.

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
    """Runs the model's own modules; only attention is ours. Implements `Runner` and `AdaptingRunner`.

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
        """Return the bytes that attention needs at once per (head, query, key)."""
        config = self._model.config
        explicit = getattr(config, "attn_logit_softcapping", None) is not None or any(
            getattr(module, "sinks", None) is not None for module in self._model.hf.modules()
        )
        if explicit or self.device.type != "cpu":
            return 16.0  # scores, softcapped scores and weights in float32, and the mask as float32
        # SDPA on a CPU writes no scores: a mask of the heads that share keys, as bool and as float32.
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
        wanted = {"logits_to_keep": batch.logit_rows} if self._keeps_logits else {}
        with self._lora.applied(batch.adapters):
            output = self._model.hf(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                genbatch_step=step,
                **wanted,
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
        assert step.state_rows is not None, "no states are wanted"
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
