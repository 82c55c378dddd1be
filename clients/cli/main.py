"""The command `genbatch`.

Of the commands only the one that runs is imported, so that `genbatch --help` and a short question to a running service
answer at once. What the list in `--help` says of each stands here for that.
"""

from importlib import import_module
from typing import Annotated, Any

import typer

# Command -> its module beside this one, and what the list says of it: its help's first sentences.
COMMANDS = {
    "demo": ("demo", "Send eight prompts at once over ZeroMQ and watch the answers side by side."),
    "serve": (
        "serve",
        "Serve models to many callers, until Ctrl-C or SIGTERM; a second one does not wait for open requests.",
    ),
    "pull": ("hub", "Download models of the Hugging Face hub, so that they are served without a network."),
    "list": ("hub", "List the models in the Hugging Face cache, with their size and last use."),
    "rm": ("hub", "Delete models from the Hugging Face cache. A service that has one loaded goes on with it."),
    "generate": ("generate", "Answer one prompt, streamed to standard output."),
    "chat": ("chat", "Talk with the model."),
    "embed": ("generate", "Print an embedding for each text: a line of JSON, in their order."),
    "batch": ("batch", "Run a file of requests; killed and started again, it goes on where it stopped."),
    "bench": ("bench", "Measure a running service, or a private one, under a scripted load."),
    "stats": ("stats", "Show what a running service has counted."),
    "config": (
        "settings",
        "Show every option of a service, what `genbatch serve` would take with the same flags, and where that is from.",
    ),
    "top": ("stats", "Watch a service: slots, queue, KV memory, pace and tenants. q or Ctrl-C leaves."),
    "replay": (
        "replay",
        "Play a flight record to the real scheduler and KV cache, and compare each tick with the recorded one.",
    ),
    "plan": ("plan", "Simulate a trace on fleets of several sizes, and find the smallest that keeps a target."),
    "adapters": ("stats", "Load, list and unload the LoRA adapters of a running service."),
    "keys": ("keys", "Make keys and tokens, so that other machines may use a service."),
}


# Commands with the name of a type of Python's.
_FUNCTIONS = {"list": "list_models"}


class _Commands(typer.core.TyperGroup):
    """Lists its commands as they were added, by name and help alone, and runs the real ones."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and load(name), rest


def load(name: str) -> Any:
    """The command of this name, with its flags: its module is imported."""
    module, _ = COMMANDS[name]
    command = getattr(import_module(f"genbatch.clients.cli.{module}"), _FUNCTIONS.get(name, name))
    if isinstance(command, typer.Typer):  # one with commands of its own
        return typer.main.get_command(command)
    alone = typer.Typer(add_completion=False, **_LOOK)
    alone.command(name)(command)
    return typer.main.get_command(alone)


_LOOK: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(
    help="Many callers, one language model: continuous batching as an actor.",
    cls=_Commands,
    no_args_is_help=True,
    **_LOOK,
)


def _listed() -> None:
    """Stands in the list for a command that is imported when it runs."""


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, help=_help)(_listed)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # with a parser of e-mail: a tenth of the time of --help

        typer.echo(f"genbatch {version('genbatch')}")
        raise typer.Exit


@app.callback()
def _global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point."""
    app()
