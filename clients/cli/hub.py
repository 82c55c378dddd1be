"""`genbatch pull`, `list` and `rm`: the models in this machine's Hugging Face cache.

`genbatch serve` and other programs use the same cache.
"""

import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated

import msgspec
import trio
import typer

from genbatch.clients.cli.command import UsageError, run_command
from genbatch.clients.cli.connection import LoadingBars
from genbatch.nif.errors import ModelError
from genbatch.nif.models import hub
from genbatch.nif.models.model_names import NAMED_MODELS, check_directory, check_source, written_path

_MODELS = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Hugging Face ids, such as someone/model.")]


def pull(models: _MODELS) -> None:
    """Download models from the Hugging Face hub, to serve them without a network.

    Files in the cache are not downloaded again. $HF_TOKEN gives access to private models, $HF_ENDPOINT names another
    hub, and $HF_HOME another cache.

    Example:

      genbatch pull Qwen/Qwen3-0.6B
    """

    async def run() -> None:
        for model in models:
            _check_id(model)
        with LoadingBars() as bars:
            for model in models:
                await trio.to_thread.run_sync(_pull, model, bars, abandon_on_cancel=True)
        for model in models:
            typer.echo(f"{model} is downloaded")

    run_command(run)


def _check_id(model: str) -> None:
    check_source(model)
    if model in NAMED_MODELS or written_path(model).exists():
        raise UsageError(f"model: {model!r} is on this machine or in a package; pull downloads Hugging Face ids")
    if not hub.HUB_ID.fullmatch(model):
        raise UsageError(f"model: {model!r} is not a Hugging Face id (OWNER/NAME)")


def _pull(model: str, progress: Callable[[str, int, int], None]) -> None:
    hub.check_room(model)
    check_directory(model, hub.download(model, progress))


def list_models(
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the models in the Hugging Face cache, with their size and last use."""

    async def run() -> None:
        models = hub.cached_models()
        if json:
            sys.stdout.write(msgspec.json.encode(models).decode() + "\n")
            return
        width = max([len(model.name) for model in models], default=0)
        for model in models:
            typer.echo(f"{model.name:{width}}  {_size(model.num_bytes):>9}  used {_ago(model.used_at, time.time())}")

    run_command(run)


def rm(
    models: _MODELS,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete models from the Hugging Face cache. A running service keeps its loaded models."""

    async def run() -> None:
        known = {model.name: model for model in hub.cached_models()}
        chosen = dict.fromkeys(models)
        for name in chosen:
            if name not in known:
                raise ModelError(name, "it is not in the cache; `genbatch list` shows the cache")
        if not yes:
            total = _size(sum([known[name].num_bytes for name in chosen]))
            if not sys.stdin.isatty():
                raise UsageError("rm: without a terminal, confirm with --yes")
            if not typer.confirm(f"Delete {', '.join(chosen)} ({total})?"):
                return
        hub.delete(chosen)
        for name in chosen:
            typer.echo(f"{name} is deleted")

    run_command(run)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _ago(then: float, now: float) -> str:
    """Return the time as a phrase, such as "2 days ago"."""
    seconds = now - then
    for name, unit in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        count = int(seconds // unit)
        if name == "day" and count > 30:
            return f"on {datetime.fromtimestamp(then).date()}"  # the user's own day
        if count:
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
