"""Turns a GGUF file into a Hugging Face directory with safetensors weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils

from genbatch.nif.models.quiet_transformers import Progress, quiet_transformers


def convert_gguf(path: Path, directory: Path, progress: Progress) -> None:
    """Writes weights, configuration, tokenizer and chat template of `path` into the new `directory`.

    The weights are dequantised in float32 and stored in the narrowest type that holds every one exactly, so
    that what is served equals the file.

    Args:
        progress: called with the stage "convert" and how many tensors are done.

    Raises:
        Exception: whatever transformers raises about a file that it cannot read.
    """
    progress("convert", 0, 0)
    place: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
    with quiet_transformers(), _tensors_reported(progress):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **place)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **place
        )
        model.to(_exact_dtype(model)).save_pretrained(directory)
        _name_special_tokens(tokenizer, model.config)
        tokenizer.save_pretrained(directory)


def _name_special_tokens(tokenizer: Any, config: Any) -> None:
    """Gives the tokenizer the special tokens that the file's metadata names: transformers 5.17 guesses some."""
    for role in ("bos", "eos", "pad", "unk"):
        token_id = getattr(config, f"{role}_token_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))


def _exact_dtype(model: torch.nn.Module) -> torch.dtype:
    """The narrowest floating type in which no weight changes."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(weight.to(dtype).float(), weight.float()) for weight in model.parameters()):
            return dtype
    return torch.float32


@contextmanager
def _tensors_reported(progress: Progress) -> Iterator[None]:
    """Replaces the bar that transformers draws over a GGUF file's tensors: it has no switch, nor a hook."""

    def reporting(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        everything = list(tensors)
        for done, tensor in enumerate(everything):
            progress("convert", done, len(everything))
            yield tensor
        progress("convert", len(everything), len(everything))

    reader: Any = modeling_gguf_pytorch_utils
    drawn = reader.tqdm
    reader.tqdm = reporting
    try:
        yield
    finally:
        reader.tqdm = drawn
