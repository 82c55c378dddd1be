"""Checks a model's files before anything is built from them (ADR 37).

    fields = read_object("model", directory / "config.json")    # reads a bounded number of bytes
    check_counts("model", "config.json", fields)                # then transformers may make a configuration
    check_numbers("model", "config.json", config)               # then transformers may make a module
    check_all_used("model", config, weights, used)              # every tensor is used, superfluous, or refused
    token_ids("model", "eos_token_id", value, vocab_size)       # ids below the logits' width

A file may have any content. So a number is compared with a bound or with the file's own tensors before it sizes a loop,
a list or a module. A check raises ModelError, and the message names the field or the tensor.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from genbatch.nif.errors import ModelError
from genbatch.nif.json_files import one_line, read_object
from genbatch.nif.models.architecture import Architecture, kv_sources
from genbatch.nif.models.architectures import DESCRIPTIONS
from genbatch.nif.models.weight_source import WeightSource, is_finite

if TYPE_CHECKING:  # a model with a kept description needs neither
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger("genbatch")

_MAX_NUMBER = 2**31 - 1  # positions, rows and token ids are 32-bit numbers in the kernels

# Limits for numbers to which transformers counts while it makes a configuration or a module. Each limit is at least ten
# times the number of any published model. The exact value is compared with the file's tensors later.
_HIGHEST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_hidden_groups"), 2048),
    **dict.fromkeys(("num_decoder_layers", "encoder_layers", "decoder_layers", "depth", "max_window_layers"), 2048),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads"), 4096),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 8192),
    **dict.fromkeys(("head_dim", "num_nextn_predict_layers"), 1 << 16),
    "num_labels": 1 << 20,
}
_MODULE_SLACK = 1 << 20  # numbers that a module may have in addition to its files' numbers, such as a pooler
# Sizes of a decoder, which are integers of at least 1 if a configuration has them.
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)
_AT_LEAST_1 = "it must be an integer of at least 1"
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def shown(value: object) -> str:
    """Return a file's value for a message, in at most 64 characters."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


def read_config(source: str, directory: Path) -> Any:
    """Return transformers' configuration in a directory, without running code of the model.

    Raises:
        ModelError: `check_counts` refuses config.json, or transformers cannot read it.
    """
    from transformers import AutoConfig

    check_counts(source, "config.json", read_object(source, directory / "config.json"))
    try:
        # guard: no code of a model
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as fault:
        raise ModelError(source, f"transformers cannot read config.json: {one_line(fault)}") from fault


# Numbers


def check_counts(source: str, where: str, fields: Mapping[str, Any]) -> None:
    """Check the numbers to which transformers counts while it makes a configuration from these fields.

    Args:
        where: the file's name, for errors.
        fields: the file's fields, before transformers reads them.

    Raises:
        ModelError: a number is not finite or is above its limit; the reason names the field.
    """
    classes = fields.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise ModelError(source, f"{where}: architectures is {shown(classes)}, not a list of names")
    for name, value in _leaves(fields):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        # guard: finite numbers of a configuration
        if not -math.inf < value < math.inf:  # also compares integers that are too large for a float
            raise ModelError(source, f"{where}: {name} is {shown(value)}, not a finite number")
        if name in _SIZES and value < 1:
            raise ModelError(source, f"{where}: {name} is {shown(value)}; {_AT_LEAST_1}")
        # guard: highest numbers of a configuration
        if (highest := _HIGHEST.get(name)) is not None and value > highest:
            raise ModelError(source, f"{where}: {name} is {shown(value)}; it must be at most {highest}")


def check_numbers(source: str, where: str, config: Any) -> None:
    """Check the numbers of a text decoder's configuration.

    Raises:
        ModelError: a size is not an integer of at least 1, the heads do not divide among KV heads, or another number
            is out of its range; the reason names the field.
    """

    def refused(name: str, value: object, rule: str) -> ModelError:
        return ModelError(source, f"{where}: {name} is {shown(value)}; {rule}")

    for name in _SIZES:
        value = getattr(config, name, None)
        if value is None or isinstance(value, list | tuple):  # some families have a size for each layer
            continue
        # guard: sizes of a configuration
        if not _is_whole(value) or not 1 <= value <= _MAX_NUMBER:
            raise refused(name, value, _AT_LEAST_1)
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    # guard: heads are shared out
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise refused("num_attention_heads", heads, f"it must be a multiple of num_key_value_heads, {kv_heads}")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) is not False and not _is_whole(window, 1):
        raise refused("sliding_window", window, _AT_LEAST_1)
    padding, vocabulary = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    # In some old files -1 means no padding token.
    # guard: padding within the vocabulary
    if isinstance(vocabulary, int) and padding is not None and not (_is_whole(padding, -1) and padding < vocabulary):
        raise refused("pad_token_id", padding, f"the vocabulary has {vocabulary} tokens")
    for name in _EPSILONS:
        value = getattr(config, name, None)
        # guard: epsilons of a configuration
        if value is not None and not (_is_number(value) and 0 <= value < 1):
            raise refused(name, value, "it must be a number of at least 0 and below 1")
    _check_rope(source, where, config)


def _check_rope(source: str, where: str, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if not isinstance(rope, Mapping):
        raise ModelError(source, f"{where}: rope_parameters is {shown(rope)}, not an object")
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, Mapping)]
    for kind in kinds:
        for name in ("rope_theta", "factor", "partial_rotary_factor"):
            value = kind.get(name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ModelError(source, f"{where}: {name} is {shown(value)}; it must be a number above 0")
        if (share := kind.get("partial_rotary_factor")) is not None and share > 1:
            raise ModelError(source, f"{where}: partial_rotary_factor is {share}; it must be at most 1")


def _is_whole(value: object, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the values that are not containers, each with the name of its field."""
    left = [(name, value)]
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping):
            left += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            left += [(name, item) for item in value]
        else:
            yield name, value


# Token ids


def token_ids(source: str, field: str, value: Any, vocab_size: int) -> frozenset[int]:
    """Return the token ids in a field, which may have one id, a list of ids, or None.

    Raises:
        ModelError: an id is not an integer within the logits' width; the reason names the field.
    """
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for token_id in ids:
        # guard: end tokens within the logits
        if not _is_whole(token_id, 0) or token_id >= vocab_size:
            raise ModelError(source, f"{field} is {shown(value)}; token ids go from 0 to {vocab_size - 1}")
    return frozenset(ids)


# Tensors

# Superfluous tensors that no module has: computed tables, masks, and scales of other numeric formats.
_SUPERFLUOUS = re.compile(
    r"(.*\.)?("
    r"(rotary_emb|rotary_pos_emb|rope|rotary)\.(inv_freq|freqs|cos_cached|sin_cached)|rotary_emb\.(cos|sin)_cached"
    r"|(attn|attention|self_attn|self_attention)\.(bias|masked_bias)|causal_mask|attention_mask"
    r"|position_ids|token_type_ids|num_batches_tracked"
    r"|([kvq]|prob|input|output|kv|activation)_scale|([kvq]_|input_|output_)?zero_point|g_idx"
    r"|(attn_rot_embd|rope_freqs)\.weight"
    r")"
)
# Parts of a larger model outside its text decoder.
_LEFT_OUT = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_encoder|vision_embed_tokens|visual|multi_modal_projector|mm_projector"
    r"|multimodal_projector|embed_vision|embed_audio|image_newline|audio_tower|audio_model|audio_projector|talker"
    r"|code2wav|mtp|mtp_layers|eagle)\..*|(v|mm|a)\.(blk|patch_embd|position_embd|post_ln|pre_ln|\d+)\..*"
)
# Heads of encoders, which no embedding needs.
_HEADS = re.compile(
    r"([a-z0-9_]+\.)?(cls|lm_head|classifier|qa_outputs|pooler|predictions|head|decoder|score|span_detector"
    r"|pre_classifier|entity_predictions|pred_layer|sequence_summary"
    r"|vocab_transform|vocab_layer_norm|vocab_projector|(discriminator|generator)_(predictions|lm_head))\..*"
    r"|dense\..*"
)
_NEXTN = re.compile(r"(?:.*\.)?(?:layers|h|blk)\.(\d+)\..*")


def left_out(name: str) -> bool:
    """Return whether a tensor belongs to a part outside the text decoder."""
    return _LEFT_OUT.fullmatch(name) is not None


def check_all_used(
    source: str, config: Any, weights: WeightSource, used: Collection[str], *, is_encoder: bool = False
) -> None:
    """Refuse a file with a tensor that the configuration does not use, because the model's output would be wrong.

    Args:
        config: the configuration of the text decoder or the encoder.
        weights: the file's tensors.
        used: the names of the tensors that are read.
        is_encoder: whether the model is an encoder, which needs no heads.

    Raises:
        ModelError: a tensor is neither used nor known to be superfluous; the reason names the tensor.
    """
    layers = getattr(config, "num_hidden_layers", None)
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    others = set()
    for name in sorted(set(weights.names()) - set(used)):
        if _SUPERFLUOUS.fullmatch(name) or (is_encoder and _HEADS.fullmatch(name)):
            continue
        if left_out(name):
            others.add(name.removeprefix("model.").partition(".")[0])
            continue
        layer = _NEXTN.fullmatch(name)
        if layer and isinstance(layers, int) and isinstance(extra, int) and layers <= int(layer[1]) < layers + extra:
            others.add("NextN layers")
            continue
        if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in used and _is_zero(weights, name):
            continue  # GPTQ's tools write a bias for every linear
        # guard: unused tensors
        raise ModelError(
            source,
            f"its weights have {name}, which the configuration does not use: its number of layers or of experts, or "
            "the tensor's name is wrong",
        )
    if others:
        log.info("%s: only the text decoder is served, without %s", source, ", ".join(sorted(others)))


def check_complete(
    source: str, kind: str, config: Any, make: Callable[[], "PreTrainedModel"], weights: WeightSource
) -> "PreTrainedModel":
    """Compare the tensors of a module with those of its files, before any tensor is read.

    Args:
        kind: the name of transformers' class, which has an Architecture.
        config: the text decoder's configuration.
        make: makes the module.
        weights: the file's tensors. Experts are checked when they are packed.

    Returns:
        The module, on the "meta" device.

    Raises:
        ModelError: a tensor is missing, has another shape, or is not used.
    """
    for name in _SIZES:
        if not isinstance(value := getattr(config, name, None), list | tuple):
            continue
        if "list" not in str(type(config).__annotations__.get(name)):
            raise ModelError(source, f"{name} is {shown(value)}; a {kind} has one size for all layers")
        if not all(_is_whole(size) and 1 <= size <= _MAX_NUMBER for size in value):
            raise ModelError(source, f"{name} is {shown(value)}; each must be an integer of at least 1")
    try:
        architecture = DESCRIPTIONS[kind](config)
    except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as fault:
        raise ModelError(source, f"its configuration does not describe a {kind}: {one_line(fault)}") from fault
    for name, value in ((field.name, getattr(architecture, field.name)) for field in dataclasses.fields(architecture)):
        if isinstance(value, int | float) and not -math.inf < value < math.inf:
            raise ModelError(source, f"its configuration gives {shown(value)} as {name}")
    tensors, experts, names = architecture.tensors, architecture.experts, weights.names()
    renamed = (tensors.layer.replace(part, written) for part, written in tensors.in_files)
    _check_layers(source, config, {tensors.layer, *renamed}, names)
    hf = _on_meta(source, make)
    parameters = hf.state_dict()
    if experts is not None:
        parameters = {
            name: value for name, value in parameters.items() if not any(part in name for part in experts.whole)
        }
    pairs = _latent_pairs(architecture, config.num_hidden_layers, names)
    parameters = {name: value for name, value in parameters.items() if name not in pairs}
    stored = {name: tensors.stored(name, names) for name in parameters}
    head = stored.get(f"{tensors.head}.weight")
    if config.tie_word_embeddings and head not in names:
        parameters.pop(f"{tensors.head}.weight", None)
    # guard: missing tensors
    if missing := sorted(name for name in parameters if stored[name] not in names):
        raise ModelError(source, f"its weights lack {missing[0]} ({len(missing)} tensors missing)")
    for name, parameter in parameters.items():
        _check_shape(source, name, weights.shape(stored[name]), parameter)
    used = {stored[name] for name in parameters}.union(*pairs.values())
    for layer in kv_sources(config):  # files have keys and values for these layers, which are not read
        start = tensors.layer.format(layer)
        used |= {f"{start}{name}.weight" for name in (*tensors.qkv[1:], tensors.k_norm)}
    if architecture.mtp is not None:
        used |= {name for name in names if name.startswith("mtp.")}
    if experts is not None:
        used |= {tensors.stored(name, names) for name in _expert_names(architecture, config.num_hidden_layers)}
    check_all_used(source, config, weights, used)
    return hf


def _check_layers(source: str, config: Any, layers: Collection[str], names: Collection[str]) -> None:
    """Compare the number of layers with the file's, because the module would lack the weights of further layers."""
    starts = "|".join(map(re.escape, sorted(layers))).replace(r"\{\}", r"(?:\d{1,6})")
    numbers = re.compile(f"({starts}).*")
    count = len({match[1] for name in names if (match := numbers.fullmatch(name))})
    if config.num_hidden_layers > count:
        raise ModelError(
            source, f"the configuration has {config.num_hidden_layers} layers, and its weights have only {count}"
        )


def _latent_pairs(architecture: Architecture, num_layers: int, names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Map a module's tensor of keys and values to the two tensors that some files have instead."""
    latent = architecture.latent
    if latent is None:
        return {}
    starts = [architecture.tensors.layer.format(layer) for layer in range(num_layers)]
    pairs = {
        f"{start}{latent.keys_values}.weight": (f"{start}{latent.keys}.weight", f"{start}{latent.values}.weight")
        for start in starts
    }
    return {whole: pair for whole, pair in pairs.items() if all(name in names for name in pair)}


def _expert_names(architecture: Architecture, num_layers: int) -> Iterator[str]:
    """Return every name that a tensor of experts may have; a file has one of three forms."""
    experts, tensors = architecture.experts, architecture.tensors
    assert experts is not None
    for layer in range(num_layers) if experts.layers is None else experts.layers:
        start = tensors.layer.format(layer)
        for name in experts.whole:
            yield start + name
            yield f"{start}{name}_bias"
        yield from (f"{start}{name}.{part}" for name in experts.stacked for part in ("weight", "bias"))
        yield from (f"{start}{name.format(i)}.weight" for name in experts.single for i in range(experts.count))


def _check_shape(source: str, name: str, shape: tuple[int, ...], parameter: "torch.Tensor") -> None:
    # guard: shapes of tensors
    if shape != tuple(parameter.shape):
        raise ModelError(
            source,
            f"its weights cannot be read: {name} has the shape {list(shape)}, the configuration says "
            f"{list(parameter.shape)}",
        )


def check_size(source: str, make: Callable[[], "PreTrainedModel"], weights: WeightSource) -> None:
    """Compare a module's size and shapes with its files, before memory is allocated for the module.

    transformers may rename a tensor while it loads, so only tensors with one of the module's names are compared.

    Args:
        make: makes the module.

    Raises:
        ModelError: the configuration describes no module, or a module that is much larger than the files, or a tensor
            has another shape; the reason names the tensor.
    """
    names = frozenset(weights.names())
    hf = _on_meta(source, make)
    needed = sum(parameter.numel() for parameter in hf.parameters())
    stored = sum(math.prod(weights.shape(name)) for name in names)
    # guard: module much larger than its files
    if needed > 2 * stored + _MODULE_SLACK:  # tied and shared tensors are stored once
        raise ModelError(source, f"its configuration needs {needed} numbers, and its weights have {stored}")
    prefix = f"{hf.base_model_prefix}."
    for name, parameter in hf.state_dict().items():
        for alias in (name, prefix + name, name.removeprefix(prefix)):
            if alias in names:
                _check_shape(source, alias, weights.shape(alias), parameter)
                break


def _on_meta(source: str, make: Callable[[], "PreTrainedModel"]) -> "PreTrainedModel":
    import torch

    try:
        with torch.device("meta"):
            hf: Any = make()
            module: PreTrainedModel = hf.eval().requires_grad_(False)
            return module
    except Exception as fault:  # transformers and torch raise many types about sizes that contradict each other
        raise ModelError(source, f"its configuration describes no module: {one_line(fault)}") from fault


def check_finite(source: str, hf: "torch.nn.Module") -> None:
    """Check the weights of a module in memory for NaN and infinities.

    Raises:
        ModelError: a weight is not finite; the reason names the tensor.
    """
    for name, parameter in hf.named_parameters():
        # guard: finite weights
        if parameter.numel() and not is_finite(parameter.detach()):
            raise ModelError(source, f"its weights are not all finite: {name} has NaN or an infinity")


def _is_zero(weights: WeightSource, name: str) -> bool:
    return not bool(np.any(weights.tensor(name).whole().numpy()))
