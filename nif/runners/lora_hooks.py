"""LoraHooks: adapters beside a module's own linears, each for its rows of the step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from genbatch.nif.lora import LoraAdapter, LoraLinear


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one adapter."""

    rows: torch.Tensor  # [n] int64 on the device
    linears: Mapping[str, LoraLinear]


class LoraHooks:
    """Adds adapters' parts to what the linears of a module give; a module without adapters runs as it is.

    Args:
        hf: transformers' module.
        device: where it computes.
    """

    def __init__(self, hf: torch.nn.Module, device: torch.device) -> None:
        self._hf = hf
        self._device = device
        self._linears: dict[int, Mapping[str, LoraLinear]] = {}  # by handle
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._parts: list[_Part] = []  # of the step under way

    def add(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner.add_adapter`."""
        self._linears[adapter.handle] = {
            name: LoraLinear(linear.a.to(self._device), linear.b.to(self._device), linear.scale)
            for name, linear in adapter.linears.items()
        }

    def drop(self, adapter: LoraAdapter) -> None:
        """See `AdaptingRunner.drop_adapter`."""
        del self._linears[adapter.handle]

    @contextmanager
    def applied(self, adapters: torch.Tensor | None) -> Iterator[None]:
        """Around a forward of tokens with these adapters; on the thread that runs the module.

        Args:
            adapters: [T] int64 on the CPU, or None; see RaggedBatch.
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
        """Takes the hooks off: the module may be run by others."""
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
