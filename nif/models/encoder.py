"""Encoders: models that read a text in both directions, of which there are embeddings and no generated text."""

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from genbatch.nif.errors import ModelError
from genbatch.nif.layer_group import LayerGroup
from genbatch.nif.layer_shape import LayerShape

GROUPS = (LayerGroup((0,)),)
"""One group of one layer, whose blocks hold a text's token ids; see EncoderRunner."""
LAYERS = (LayerShape(1, 1, 1),)

# What a tokenizer says that knows no bound.
_NO_BOUND = 10**9


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether a model of this configuration reads a text in both directions."""
    settings: Any = config.get_text_config()
    if settings.is_encoder_decoder or getattr(settings, "is_decoder", False):
        return False
    if getattr(settings, "use_bidirectional_attention", None) is True or getattr(settings, "is_causal", None) is False:
        return True
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and type(config) in MODEL_MAPPING


def load_encoder(source: str, directory: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The module, without any head.

    Raises:
        ModelError: its weights cannot be read, lack something, or belong to a head that decides something else.
    """
    written = getattr(config, "architectures", None) or [""]
    if written[0].endswith(("Classification", "Answering", "RewardModel")):
        raise ModelError(source, f"its weights are a {written[0]}, which gives no embeddings")
    model_class: Any = MODEL_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(source, f"transformers has no encoder of the kind {config.model_type}")
    try:
        hf, report = model_class.from_pretrained(
            directory, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except Exception as fault:
        raise ModelError(source, f"its weights cannot be read: {' '.join(str(fault).split())[:300]}") from fault
    # A pooler is a head for classification: files of encoders often lack it, and no embedding goes through it.
    missing = sorted(name for name in report["missing_keys"] if "pooler." not in name)
    if missing:
        raise ModelError(source, f"its weights lack {missing[0]} ({len(missing)} tensors missing)")
    return hf.eval().requires_grad_(False).to(device)


def encoder_positions(source: str, hf: PreTrainedModel, tokenizer_bound: int | None) -> int:
    """How many tokens one text may have.

    Args:
        tokenizer_bound: what the tokenizer says.

    Raises:
        ModelError: nobody says.
    """
    config: Any = hf.config
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int):
        # RoBERTa's family begins to count behind the padding's id.
        table = getattr(getattr(hf, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        limit -= 0 if padding is None else padding + 1
    bounds = [bound for bound in (limit, tokenizer_bound) if isinstance(bound, int) and 0 < bound < _NO_BOUND]
    if not bounds:
        raise ModelError(source, "neither config.json nor its tokenizer gives the most positions of a text")
    return min(bounds)
