"""Short convolutions over the paged cache: they read a window of inputs from blocks, as attention reads keys."""

from functools import partial
from typing import Any

import torch

from genbatch.nif.runners.attention import AttentionStep

_MODULES = ("Lfm2ShortConv", "Lfm2MoeShortConv")


def page_convolutions(hf: torch.nn.Module) -> None:
    """Make a module's short convolutions read the pool. A forward without a step runs the original code."""
    for module in hf.modules():
        if type(module).__name__ in _MODULES:
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
