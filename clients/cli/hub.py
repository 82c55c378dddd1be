"""`genbatch pull`, `list` and `rm`: the models of the Hugging Face hub on this machine.

They are in the hub client's own cache, where `genbatch serve` and other programs find them.
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
    """Download models of the Hugging Face hub, so that they are served without a network.

    What was downloaded already is not downloaded again. $HF_TOKEN lets private models be read, $HF_ENDPOINT names
    another hub, and $HF_HOME another cache.

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
            typer.echo(f"{model} is here")

    run_command(run)


def _check_id(model: str) -> None:
    check_source(model)
    if model in NAMED_MODELS or written_path(model).exists():
        raise UsageError(f"model: {model!r} is on this machine, or comes with a package; pull is for Hugging Face ids")
    if not hub.HUB_ID.fullmatch(model):
        raise UsageError(f"model: {model!r} is no Hugging Face id, which is OWNER/NAME")


def _pull(model: str, progress: Callable[[str, int, int], None]) -> None:
    hub.check_room(model)
    check_directory(model, hub.download(model, progress))


def list_models(
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the models in the Hugging Face cache, with their size and last use."""

    async def run() -> None:
        found = hub.cached_models()
        if json:
            sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
            return
        width = max([len(model.name) for model in found], default=0)
        for model in found:
            typer.echo(f"{model.name:{width}}  {_size(model.num_bytes):>9}  used {_ago(model.used_at, time.time())}")

    run_command(run)


def rm(
    models: _MODELS,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")] = False,
) -> None:
    """Delete models from the Hugging Face cache. A service that has one loaded goes on with it."""

    async def run() -> None:
        known = {model.name: model for model in hub.cached_models()}
        wanted = dict.fromkeys(models)
        for name in wanted:
            if name not in known:
                raise ModelError(name, "it is not in the cache; `genbatch list` shows what is")
        if not yes:
            total = _size(sum([known[name].num_bytes for name in wanted]))
            if not sys.stdin.isatty():
                raise UsageError("rm: say --yes where nobody can be asked")
            if not typer.confirm(f"Delete {', '.join(wanted)} ({total})?"):
                return
        hub.delete(wanted)
        for name in wanted:
            typer.echo(f"{name} is deleted")

    run_command(run)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _ago(then: float, now: float) -> str:
    """When it was, in the words of a person."""
    seconds = now - then
    for name, unit in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        count = int(seconds // unit)
        if name == "day" and count > 30:
            return f"on {datetime.fromtimestamp(then).date()}"  # the user's own day
        if count:
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
