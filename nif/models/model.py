"""Model: a causal language model in memory, checked to run over the paged KV cache.

model = load_model("smollm2")
runner = TorchRunner(model)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from genbatch.nif.errors import ModelError, OptionError
from genbatch.nif.layer_group import LayerGroup
from genbatch.nif.layer_shape import LayerShape
from genbatch.nif.models.model_layout import layer_groups, max_position
from genbatch.nif.models.model_source import resolve_model
from genbatch.nif.models.quiet_transformers import Progress, no_progress, quiet_transformers
from genbatch.nif.models.self_check import check_paged_path, probe_layers
from genbatch.nif.runners.attention import ATTENTION_NAME, register_attention
from genbatch.nif.text.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The values of the option `dtype`, beside "auto"."""

_LOAD_STEPS = 3  # tokenizer, weights, check


@dataclass(frozen=True)
class Model:
    """A loaded model; immutable, shared by whatever runs it.

    Args:
        name: what to call it towards users.
        hf: transformers' module in eval mode, its attention going through `ATTENTION_NAME`.
        config: of the text decoder.
        tokenizer: the model's own.
        dtype: of the weights and of the KV cache.
        device: where both live.
        groups: the layers by how far they look back.
        layers: what each layer keeps in the KV cache.
        vocab_size: width of the logits; token ids are below it.
        eos_token_ids: any of them ends a generation.
        max_position: positions one sequence may have.
    """

    name: str
    hf: PreTrainedModel
    config: PreTrainedConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    groups: tuple[LayerGroup, ...]
    layers: tuple[LayerShape, ...]
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_position: int


def load_model(source: str, *, dtype: str = "auto", n_gpu_layers: int = -1, progress: Progress | None = None) -> Model:
    """Finds, loads and checks a model.

    Args:
        source: a name ("smollm2"), a Hugging Face directory, a .gguf file, or a Hugging Face id.
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 on a GPU that has it, else float32.
        n_gpu_layers: -1 puts every layer on the GPU if there is one; 0 keeps all on the CPU.
        progress: called as progress(stage, done, total) with the stages "download", "convert" and "load".

    Raises:
        ModelError: the model cannot be found, read, or served over a paged KV cache.
        OptionError: `dtype` or `n_gpu_layers` has another value.
    """
    report = progress or no_progress
    device = _device(n_gpu_layers)
    torch_dtype = _dtype(dtype, device)
    found = resolve_model(source, report)
    register_attention()
    with quiet_transformers():
        report("load", 0, _LOAD_STEPS)
        model_class, config = _supported_class(source, found.directory)
        text_config = config.get_text_config(decoder=True)
        groups = layer_groups(source, text_config)
        tokenizer = _load_tokenizer(source, found.directory)
        report("load", 1, _LOAD_STEPS)
        hf = _load_weights(source, model_class, config, found.directory, torch_dtype, device)
        report("load", 2, _LOAD_STEPS)
        layers, vocab_size = probe_layers(source, hf, groups)
        model = Model(
            name=found.name,
            hf=hf,
            config=text_config,
            tokenizer=tokenizer,
            dtype=torch_dtype,
            device=device,
            groups=groups,
            layers=layers,
            vocab_size=vocab_size,
            eos_token_ids=_eos_token_ids(hf, tokenizer),
            max_position=max_position(source, text_config),
        )
        check_paged_path(source, model)
        report("load", _LOAD_STEPS, _LOAD_STEPS)
    return model


def _device(n_gpu_layers: int) -> torch.device:
    if n_gpu_layers not in (-1, 0) or isinstance(n_gpu_layers, bool):
        raise OptionError(
            "n_gpu_layers", f"{n_gpu_layers!r} is not possible: all layers go to the GPU (-1) or none (0)"
        )
    return torch.device("cuda", 0) if n_gpu_layers == -1 and torch.cuda.is_available() else torch.device("cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if on_gpu else torch.float32
    if name not in DTYPES:
        raise OptionError("dtype", f"{name!r} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _supported_class(source: str, directory: Path) -> tuple[Any, PreTrainedConfig]:
    """The subclass of PreTrainedModel for the model, once it is known to be one that can run here."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as fault:
        raise ModelError(source, f"config.json is not one that transformers can read: {_line(fault)}") from fault
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(source, f"{kind} is an encoder-decoder; only decoder-only causal models are served")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(source, f"transformers has no causal language model of the kind {kind}")
    written = getattr(config, "architectures", None) or [model_class.__name__]
    if any(name.endswith(("Classification", "Answering", "MaskedLM", "RewardModel")) for name in written):
        raise ModelError(source, f"its weights are a {written[0]}, which is not a causal language model")
    if getattr(model_class, "_is_stateful", False):
        raise ModelError(source, f"{kind} keeps a recurrent state; only attention over a KV cache is served")
    if not model_class.is_backend_compatible():
        raise ModelError(source, f"transformers' {kind} does not let its attention be replaced")
    return model_class, config


def _load_tokenizer(source: str, directory: Path) -> Tokenizer:
    try:
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as fault:
        raise ModelError(source, f"its tokenizer cannot be read: {_line(fault)}") from fault
    if not loaded.is_fast:
        raise ModelError(source, "its tokenizer has no fast form (tokenizer.json)")
    return Tokenizer(loaded)


def _load_weights(
    source: str,
    model_class: Any,
    config: PreTrainedConfig,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """The model with its weights; safetensors only."""
    try:
        hf, report = model_class.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except Exception as fault:
        raise ModelError(source, f"its weights cannot be read: {_line(fault)}") from fault
    # transformers fills what is missing with random numbers.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(source, f"its weights lack {missing[0]} ({len(missing)} tensors missing)")
    model: PreTrainedModel = hf.eval().requires_grad_(False).to(device)
    return model


def _eos_token_ids(hf: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    configured = hf.generation_config.eos_token_id if hf.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token_id for token_id in [*ids, tokenizer.eos_token_id] if token_id is not None)


def _line(fault: Exception) -> str:
    """What a foreign exception says, on one line."""
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text[:300]}" if text else type(fault).__name__
