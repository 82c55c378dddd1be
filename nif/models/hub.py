"""Downloads models of the Hugging Face hub, and lists and deletes them in the cache. It does not import torch.

    directory = download("someone/model", progress)
    cached_models()                     # the models in the cache, with size and last use
    delete(["someone/model"])

The cache is the hub client's own ($HF_HOME, $HF_HUB_CACHE), which other programs share.
"""

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genbatch.nif.errors import ModelError
from genbatch.nif.models.model_names import known_names

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total). Stages are "download", "convert", "load", "compile" and "pack"; an unknown
total is 0."""

# Download weights, configuration, tokenizer and template, but no pickled weights and no code.
# guard: no pickles fetched
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer*", "*.model"]
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the hub's cache.

    Args:
        num_bytes: the size of the model's files on the disk.
        used_at: the time of the last read of any of these files, in seconds since the epoch.
    """

    name: str
    num_bytes: int
    used_at: float


def download(source: str, progress: Progress) -> Path:
    """Download the missing files of a model, and return its directory.

    Args:
        progress: called with the stage "download" and bytes.

    Raises:
        ModelError: the hub has no such model or cannot be reached, the disk has no room, or a file is damaged.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress("download", 0, 0)
    before = _blobs(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bar = _reporting_bar(progress)
            folder = huggingface_hub.snapshot_download(source, allow_patterns=PATTERNS, tqdm_class=bar)
    except LocalEntryNotFoundError as fault:
        raise ModelError(
            source,
            f"it is no local path, no known name ({known_names()}) and not in the Hugging Face cache, and "
            f"{_hub()} cannot be reached; on a machine that reaches it, run: hf download {source}",
        ) from fault
    except (HfHubHTTPError, HFValidationError, OSError) as fault:
        reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
        if isinstance(fault, OSError) and fault.errno is not None:
            raise ModelError(source, f"its files cannot be written to {_cache()}: {fault.strerror}") from fault
        raise ModelError(source, f"{_hub()} refused it: {reason}") from fault
    _check_blobs(source, _blobs(source) - before)
    return Path(folder)


def check_room(source: str) -> None:
    """Refuse a download that the disk has no room for. If the hub cannot be reached, `download` reports it later.

    Raises:
        ModelError: the missing files are larger than the free space.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        bar = _reporting_bar(lambda stage, done, total: None)
        files: Any = huggingface_hub.snapshot_download(source, allow_patterns=PATTERNS, tqdm_class=bar, dry_run=True)
    except (HfHubHTTPError, HFValidationError, OSError):
        return
    missing = sum([file.file_size or 0 for file in files if file.will_download])
    folder = next(folder for folder in (_cache(), *_cache().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ModelError(
            source, f"the download needs {missing / 1e6:.1f} MB, and {folder} has {free / 1e6:.1f} MB free"
        )


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, by name."""
    repos = sorted(_scanned().values(), key=lambda repo: str(repo.repo_id))
    return [CachedModel(repo.repo_id, repo.size_on_disk, repo.last_accessed) for repo in repos]


def delete(names: Iterable[str]) -> None:
    """Delete models from the cache.

    Raises:
        ModelError: the cache lacks a model; then no model is deleted.
    """
    repos = _scanned()
    for name in names:
        if name not in repos:
            raise ModelError(name, f"it is not in the cache at {_cache()}")
    for name in names:
        shutil.rmtree(repos[name].repo_path)


def _scanned() -> dict[str, Any]:
    import huggingface_hub

    if not _cache().is_dir():
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info: Any = huggingface_hub.scan_cache_dir(_cache())
    return {repo.repo_id: repo for repo in info.repos if repo.repo_type == "model"}


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _hub() -> str:
    from huggingface_hub import constants

    return re.sub(r"^https?://", "", constants.ENDPOINT)


def _blobs(source: str) -> set[Path]:
    """Return the complete files of a model in the cache."""
    folder = _cache() / f"models--{source.replace('/', '--')}" / "blobs"
    return {path for path in folder.glob("*") if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", path.name)}


def _check_blobs(source: str, blobs: Iterable[Path]) -> None:
    """Compare new files with the hashes in their names: SHA-256 for large files, git's hash for small files.

    Raises:
        ModelError: a file is damaged; it is deleted, so that the next download gets it again.
    """
    for blob in sorted(blobs):
        with blob.open("rb") as file:
            if len(blob.name) == hashlib.sha256().digest_size * 2:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                header = f"blob {os.fstat(file.fileno()).st_size}\0".encode()
                digest = hashlib.sha1(header + file.read(), usedforsecurity=False).hexdigest()
        # guard: damaged downloads
        if digest != blob.name:
            blob.unlink()
            for link in blob.parent.parent.glob("snapshots/**/*"):
                if link.is_symlink() and not link.exists():
                    link.unlink()
            raise ModelError(
                source, f"a file was damaged during the download: its hash is {digest}, not {blob.name}; try again"
            )


def _reporting_bar(progress: Progress) -> Any:
    """Return a progress bar class for the Hugging Face client that draws nothing and reports bytes."""
    from huggingface_hub import utils

    client: Any = utils
    drawn = client.tqdm

    def start(bar: Any, *args: Any, **kwargs: Any) -> None:
        bar.counts_bytes = kwargs.get("unit") == "B"
        drawn.__init__(bar, *args, **{**kwargs, "disable": True})

    def update(bar: Any, n: float | None = 1) -> None:
        bar.n += n or 0
        if bar.counts_bytes:
            progress("download", int(bar.n), int(bar.total or 0))

    return type("ReportingBar", (drawn,), {"__init__": start, "update": update})
