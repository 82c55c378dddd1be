"""The command `genbatch`.

Only the command that runs is imported, so that `genbatch --help` and a short request to a running service are fast. So
the texts of the list in `--help` are here.
"""

import errno
import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

# Command -> its module in this folder, and its text in the list: the first sentences of its help.
COMMANDS = {
    "demo": ("demo", "Send eight prompts at once over ZeroMQ and watch the answers side by side."),
    "serve": (
        "serve",
        "Serve models to many callers until Ctrl-C or SIGTERM. A second signal does not wait for open requests.",
    ),
    "pull": ("hub", "Download models from the Hugging Face hub, to serve them without a network."),
    "list": ("hub", "List the models in the Hugging Face cache, with their size and last use."),
    "rm": ("hub", "Delete models from the Hugging Face cache. A running service keeps its loaded models."),
    "generate": ("generate", "Answer one prompt, streamed to standard output."),
    "chat": ("chat", "Talk with the model."),
    "embed": ("generate", "Print an embedding for each text, as lines of JSON in the order of the texts."),
    "batch": ("batch", "Run a file of requests. A run that was killed continues where it stopped."),
    "bench": ("bench", "Measure a running or a private service under a scripted load."),
    "stats": ("stats", "Show the counters of a running service."),
    "config": (
        "settings",
        "Show every option of a service, its value with these flags, and the origin of the value.",
    ),
    "top": ("stats", "Watch a service: slots, queue, KV memory, speed and tenants. Leave with q or Ctrl-C."),
    "replay": (
        "replay",
        "Play a flight record to the real scheduler and KV cache, and compare each tick with the recorded one.",
    ),
    "plan": ("plan", "Simulate a trace on fleets of several sizes, and find the smallest fleet that meets a target."),
    "adapters": ("stats", "Load, list and unload the LoRA adapters of a running service."),
    "keys": ("keys", "Make keys and tokens for clients on other machines."),
}


# The function of a command that has the name of a Python type.
_FUNCTIONS = {"list": "list_models"}


class _Commands(typer.core.TyperGroup):
    """Lists the commands by name and text, and imports the command that runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and load(name), rest


def load(name: str) -> Any:
    """Import a command's module, and return the command with its flags."""
    module, _ = COMMANDS[name]
    command = getattr(import_module(f"genbatch.clients.cli.{module}"), _FUNCTIONS.get(name, name))
    if isinstance(command, typer.Typer):  # a group of commands
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
    """A placeholder in the list for a command that is imported when it runs."""


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, help=_help)(_listed)


def _print_version(prints: bool) -> None:
    if prints:
        from importlib.metadata import version  # imported late: it takes a tenth of the time of --help

        typer.echo(f"genbatch {version('genbatch')}")
        raise typer.Exit


@app.callback()
def _global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    _prepare_standard_files()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        from genbatch.clients.cli.command import FAILURE, print_error

        print_error(OSError(f"{error.filename or 'standard output'} cannot be written: {error.strerror}"))
        # Python writes the rest of the buffer when it ends, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(FAILURE)


def _prepare_standard_files() -> None:
    """Let standard output take every character, and open /dev/null in the place of closed standard files.

    Else the next opened files would get the numbers of closed files.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model writes characters that many encodings do not have
        sys.stdout.reconfigure(errors="replace")
