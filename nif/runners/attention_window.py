"""Limits how far a model attends, as if it had been built with a sliding window."""

from dataclasses import replace

from genbatch.nif.errors import OptionError
from genbatch.nif.layer_group import LayerGroup
from genbatch.nif.models.model import Model


def with_attention_window(model: Model, window: int) -> Model:
    """The same weights, every layer attending to at most the last `window` positions, itself included.

    A layer that the model already limits to fewer keeps its own limit.

    Raises:
        OptionError: the window is less than one position.
    """
    if window < 1:
        raise OptionError("max_attention_window", f"must be at least 1, not {window}")
    if window >= model.max_position:
        return model
    layers_of: dict[int, list[int]] = {}
    for group in model.groups:
        reach = window if group.window is None else min(window, group.window)
        layers_of.setdefault(reach, []).extend(group.layers)
    groups = tuple(LayerGroup(tuple(sorted(layers)), reach) for reach, layers in layers_of.items())
    return replace(model, groups=groups)
