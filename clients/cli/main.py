"""The command `genbatch`.

Nothing here, nor in what it imports, imports torch: `genbatch --help` answers at once.
"""

from importlib.metadata import version
from typing import Annotated

import typer

from genbatch.clients.cli.batch import batch
from genbatch.clients.cli.bench import bench
from genbatch.clients.cli.chat import chat
from genbatch.clients.cli.demo import demo
from genbatch.clients.cli.generate import embed, generate
from genbatch.clients.cli.keys import keys
from genbatch.clients.cli.plan import plan
from genbatch.clients.cli.replay import replay
from genbatch.clients.cli.serve import serve
from genbatch.clients.cli.settings import config
from genbatch.clients.cli.stats import adapters, stats, top

app = typer.Typer(
    help="Many callers, one language model: continuous batching as an actor.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, serve, generate, chat, embed, batch, bench, stats, config, top, replay, plan):
    app.command()(command)
app.add_typer(adapters)
app.add_typer(keys)


def _print_version(wanted: bool) -> None:
    if wanted:
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
