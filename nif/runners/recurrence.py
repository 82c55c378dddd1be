"""Run transformers' own recurrent layers and short convolutions block by block over the paged cache.

A block of a recurrent group holds the layer's input at each of the block's positions. A whole block also holds the
state at the block's end. A token is computed from the previous block's state and from the inputs of the token's own
block. So each operation on blocks (sharing, copying, truncating, saving, prefix hits) works for states, too. A short
convolution reads a window of inputs from blocks, as attention reads keys.
"""

import inspect
import math
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutput

from genbatch.nif.runners.torch_runner import AttentionStep

RECURRENT = frozenset(
    {
        "BambaForCausalLM",
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "KimiLinearForCausalLM",
        "Mamba2ForCausalLM",
        "NemotronHForCausalLM",
        "OlmoHybridForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
"""transformers' names of the supported models with recurrent layers."""

_MODULES = (
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "KimiLinearDeltaAttention",
    "Mamba2Mixer",
    "NemotronHMamba2Mixer",
    "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
)

_CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")

_BESIDE_ATTENTION = ("FalconH1Mixer",)
"""Recurrent modules of layers that also attend: their states come after those of all layers; see `layer_groups`."""


def page_convolutions(hf: torch.nn.Module) -> None:
    """Make a module's short convolutions read the pool. A forward without a step runs the original code."""
    for module in hf.modules():
        if type(module).__name__ in _CONVOLUTIONS:
            module.forward = partial(_convolve, module, module.forward)


def _convolve(
    module: Any,
    own: Any,
    hidden_states: torch.Tensor,  # [1, T, hidden]
    genbatch_step: AttentionStep | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    if genbatch_step is None:
        result: torch.Tensor = own(hidden_states, **kwargs)
        return result
    gates, factors, inputs = module.in_proj(hidden_states)[0].chunk(3, dim=-1)
    taps, bias = module.conv.weight, module.conv.bias
    out: torch.Tensor = module.out_proj(factors * genbatch_step.convolve(module.layer_idx, gates * inputs, taps, bias))
    return out[None]


def page_recurrences(hf: Any) -> None:
    """Make a module's recurrent layers read the pool. A forward without a step runs the original code."""
    for module in hf.modules():
        kind = type(module).__name__
        if kind in _MODULES:
            after = hf.config.num_hidden_layers if kind in _BESIDE_ATTENTION else 0
            module.forward = partial(_recur, after + module.layer_idx, Recurrence(module.forward))
        if kind == "NemotronHMamba2Mixer":
            # transformers gives the time steps of a prompt a lower bound, but not those of a decode (ADR 78).
            module.time_step_limit = (0.0, math.inf)
    if type(hf).__name__ == "Mamba2ForCausalLM":
        hf.forward = partial(_pass_step, hf, hf.forward)


def _pass_step(
    hf: Any,
    own: Any,
    input_ids: torch.Tensor | None = None,
    logits_to_keep: int | torch.Tensor = 0,
    genbatch_step: AttentionStep | None = None,
    **kwargs: Any,
) -> Any:
    """Run Mamba2ForCausalLM, which does not pass keyword arguments on to its layers."""
    if genbatch_step is None:
        return own(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
    states = hf.backbone(input_ids, use_cache=False, genbatch_step=genbatch_step).last_hidden_state
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return CausalLMOutput(logits=hf.lm_head(states[:, kept]).float())


def _recur(
    layer: int,
    recurrence: "Recurrence",
    hidden_states: torch.Tensor,  # [1, T, hidden]
    genbatch_step: AttentionStep | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    if genbatch_step is None:
        own: torch.Tensor = recurrence.forward(hidden_states, **kwargs)
        return own
    return genbatch_step.recur(layer, hidden_states[0], recurrence)[None]


class Recurrence:
    """Runs one layer's own forward from a given state and returns the next state.

    Args:
        forward: the module's own forward.
    """

    def __init__(self, forward: Any) -> None:
        self.forward = forward
        # The argument's name in transformers from 5.24 on, and before.
        self._cache = "cache" if "cache" in inspect.signature(forward).parameters else "cache_params"
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []  # of a state's tensors

    def __call__(self, inputs: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over some positions.

        Args:
            inputs: [n, hidden].
            state: [elements] float32, returned by an earlier call; None at the beginning of a text.

        Returns:
            The outputs [n, hidden] and the state after the last position.
        """
        cache = _State(None if state is None else self._unpacked(state))
        output = self.forward(inputs[None], **{self._cache: cache})[0]
        tensors = [cache.inputs, cache.matrix]
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return output, torch.cat([tensor.flatten().float() for tensor in tensors])

    def _unpacked(self, state: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(state, [shape.numel() for shape, _ in self._shapes])
        # Copy the state: some modules change their state in place, and this state belongs to a whole block.
        pairs = zip(parts, self._shapes, strict=True)
        return [part.view(shape).to(dtype, copy=True) for part, (shape, dtype) in pairs]


class _State:
    """Replaces transformers' cache in the forward of one recurrent layer."""

    def __init__(self, tensors: list[torch.Tensor] | None) -> None:
        self.begun = tensors is not None
        self.inputs, self.matrix = (torch.empty(0), torch.empty(0)) if tensors is None else tensors

    def is_recording_past(self, layer: int) -> bool:
        """Return True, so that a single token takes the code path for several tokens."""
        return True

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        """Whether the layer continues from an earlier state."""
        return self.begun

    def get_conv_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the convolution's last inputs."""
        return self.inputs if self.begun else None

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent state, a matrix that each token changes."""
        return self.matrix if self.begun else None

    def update_conv_state(self, inputs: torch.Tensor, layer: int, conv_kernel_size: int, **kwargs: Any) -> torch.Tensor:
        """Store the last inputs; returns the earlier and the new inputs, [1, channels, length]."""
        whole = torch.cat([self.inputs, inputs], dim=-1) if self.begun else inputs
        missing = max(0, conv_kernel_size - 1 - whole.shape[-1])
        self.inputs = pad(whole, (missing, 0))[..., 1 - conv_kernel_size :]
        return whole

    def update_recurrent_state(self, matrix: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        """Store the recurrent state."""
        self.matrix = matrix
        return matrix
