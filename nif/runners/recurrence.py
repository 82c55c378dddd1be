"""Recurrent layers over the paged cache: transformers' own modules, run block by block.

A block of a recurrent group holds the layer's input at each of its positions. Once it is whole, it holds the state at
its end. A token is computed from the state at the end of the block before its own, and from its own block's inputs. So
all that is done to blocks (sharing, copying, cutting, saving, finding again) is done to states.
"""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from genbatch.nif.runners.attention import AttentionStep

RECURRENT = frozenset(
    {
        "BambaForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
"""transformers' names of the models whose states are served."""

_MODULES = (
    "BambaMixer",
    "GraniteMoeHybridMambaLayer",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
)


def page_recurrences(hf: torch.nn.Module) -> None:
    """Makes the recurrent layers of a module read the pool; in a forward without a step they stay as they were."""
    for module in hf.modules():
        if type(module).__name__ in _MODULES:
            module.forward = partial(_recur, module, Recurrence(module.forward))


def _recur(
    module: Any,
    recurrence: "Recurrence",
    hidden_states: torch.Tensor,  # [1, T, hidden]
    genbatch_step: AttentionStep | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    if genbatch_step is None:
        own: torch.Tensor = recurrence.forward(hidden_states, **kwargs)
        return own
    return genbatch_step.recur(module.layer_idx, hidden_states[0], recurrence)[None]


class Recurrence:
    """One layer's own forward, from a state to a state.

    Args:
        forward: the module's.
    """

    def __init__(self, forward: Any) -> None:
        self.forward = forward
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []  # of a state's tensors

    def __call__(self, inputs: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layer over some positions.

        Args:
            inputs: [n, hidden].
            state: [elements] float32, as this returned it; None at a text's beginning.

        Returns:
            Its outputs [n, hidden], and the state after them.
        """
        cache = _State(None if state is None else self._unpacked(state))
        output = self.forward(inputs[None], cache_params=cache)[0]
        tensors = [cache.inputs, cache.matrix]
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return output, torch.cat([tensor.flatten().float() for tensor in tensors])

    def _unpacked(self, state: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(state, [shape.numel() for shape, _ in self._shapes])
        # Copies: some modules change a state in place, and the one given belongs to a whole block.
        pairs = zip(parts, self._shapes, strict=True)
        return [part.view(shape).to(dtype, copy=True) for part, (shape, dtype) in pairs]


class _State:
    """Stands for transformers' cache in the forward of one recurrent layer."""

    def __init__(self, tensors: list[torch.Tensor] | None) -> None:
        self.begun = tensors is not None
        self.inputs, self.matrix = (torch.empty(0), torch.empty(0)) if tensors is None else tensors

    def is_recording_past(self, layer: int) -> bool:
        """Whether one token goes the way of several."""
        return True

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        """Whether there is a state to go on from."""
        return self.begun

    def get_conv_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """The convolution's last inputs."""
        return self.inputs if self.begun else None

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """The matrix that each token changes."""
        return self.matrix if self.begun else None

    def update_conv_state(self, inputs: torch.Tensor, layer: int, conv_kernel_size: int, **kwargs: Any) -> torch.Tensor:
        """Keeps the last inputs; returns those before and these, [1, channels, length]."""
        whole = torch.cat([self.inputs, inputs], dim=-1) if self.begun else inputs
        missing = max(0, conv_kernel_size - 1 - whole.shape[-1])
        self.inputs = pad(whole, (missing, 0))[..., 1 - conv_kernel_size :]
        return whole

    def update_recurrent_state(self, matrix: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        """Keeps the matrix."""
        self.matrix = matrix
        return matrix
