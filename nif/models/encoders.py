"""Recognizes and loads encoders: models that give embeddings and scores, but generate no text."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from genbatch.nif.errors import ModelError
from genbatch.nif.json_files import one_line
from genbatch.nif.runner import LayerGroup, LayerShape
from genbatch.nif.scoring import is_classifier

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


GROUPS = (LayerGroup((0,)),)
"""One group of one layer. Its blocks store a text's token ids; see EncoderRunner."""

LAYERS = (LayerShape(1, 1, 1),)

# The length of a tokenizer without a limit.
_NO_BOUND = 10**9


def is_encoder(config: "PreTrainedConfig") -> bool:
    """Return whether a model with this configuration is bidirectional."""
    settings: Any = config.get_text_config()
    if settings.is_encoder_decoder or getattr(settings, "is_decoder", False):
        return False
    if getattr(settings, "use_bidirectional_attention", None) is True or getattr(settings, "is_causal", None) is False:
        return True
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and type(config) in MODEL_MAPPING


def encoder_class(source: str, config: Any) -> Any:
    """Return transformers' class of an encoder, without a head or with a head that scores texts.

    Raises:
        ModelError: there is no such class, or the weights belong to another kind of head.
    """
    written = getattr(config, "architectures", None) or [""]
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING

    if is_classifier(config):
        model_class: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    elif written[0].endswith(("Classification", "Answering", "RewardModel")):
        raise ModelError(source, f"its weights are a {written[0]}, which gives neither embeddings nor scores of texts")
    else:
        model_class = MODEL_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(source, f"transformers has no {written[0] or 'encoder'} of the kind {config.model_type}")
    return model_class


def load_encoder(
    source: str, directory: Path, config: Any, dtype: torch.dtype, device: torch.device
) -> tuple[Any, frozenset[str]]:
    """Load an encoder's module; also returns the names of the files' tensors that the module does not have.

    Raises:
        ModelError: the weights cannot be read or are incomplete, or `encoder_class` finds no class.
    """
    model_class = encoder_class(source, config)
    try:
        hf, report = model_class.from_pretrained(
            directory, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except Exception as fault:
        raise ModelError(source, f"its weights cannot be read: {one_line(fault)}") from fault
    # A pooler is a head for classification: files of encoders often lack it, and embeddings do not need it.
    missing = sorted(name for name in report["missing_keys"] if "pooler." not in name or is_classifier(config))
    if missing:
        raise ModelError(source, f"its weights lack {missing[0]} ({len(missing)} tensors missing)")
    return hf.eval().requires_grad_(False).to(device), frozenset(report["unexpected_keys"])


def encoder_positions(source: str, hf: "PreTrainedModel", tokenizer_bound: int | None) -> int:
    """Return the most tokens of one text.

    Args:
        tokenizer_bound: the tokenizer's own limit.

    Raises:
        ModelError: neither the configuration nor the tokenizer has a limit.
    """
    config: Any = hf.config
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int):
        # RoBERTa's family counts positions from the padding's id + 1 on.
        table = getattr(getattr(getattr(hf, "base_model", hf), "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        limit -= 0 if padding is None else padding + 1
    bounds = [bound for bound in (limit, tokenizer_bound) if isinstance(bound, int) and 0 < bound < _NO_BOUND]
    if not bounds:
        raise ModelError(source, "neither config.json nor its tokenizer gives the most positions of a text")
    return min(bounds)
