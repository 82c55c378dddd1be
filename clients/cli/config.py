"""`genbatch config`: every option of a service, what is in force, and where that is from."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from genbatch.clients.cli.command import report, with_flag_groups
from genbatch.clients.cli.option_fields import SECTIONS, markdown_table, options
from genbatch.clients.cli.option_flags import DEFAULT_MODEL, ServiceFlags, is_given

if TYPE_CHECKING:  # takes a quarter of a second that --help does not need
    from genbatch.clients.cli.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFlags:
    """The file with a service's options."""

    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A TOML file of options; if not given, $GENBATCH_CONFIG or genbatch/config.toml in $XDG_CONFIG_HOME.",
        ),
    ] = None


@with_flag_groups
def config(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As for `genbatch serve`.")] = DEFAULT_MODEL,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of docs/options.md.")] = False,
    file: ConfigFlags,
    flags: ServiceFlags,
) -> None:
    """Show every option of a service, what `genbatch serve` would take with the same flags, and where that is from.

    Flags win over GENBATCH_ variables, these over the file, and the file over the defaults.

    Examples:

      genbatch config

      genbatch config --config ./genbatch.toml --n-parallel 16

      GENBATCH_DTYPE=float32 genbatch config --json
    """

    def show() -> None:
        from genbatch.clients.cli.settings import unknown_variables

        if markdown:
            sys.stdout.write(markdown_table())
            return
        settings = settings_of(context, model, file, flags)
        if json:
            sys.stdout.write(msgspec.json.encode(_plain(settings)).decode() + "\n")
            return
        console = Console()
        console.print(settings_table(settings))
        for name in unknown_variables():
            console.print(Text(f"{name} is no option and is not read", style="yellow"))

    try:
        show()
    except Exception as error:
        raise typer.Exit(report(error)) from None


def settings_of(context: typer.Context, model: str, file: ConfigFlags, flags: ServiceFlags) -> "Settings":
    """The settings that a command's flags, the environment and the file come to.

    Raises:
        OptionError: see `read_settings`.
    """
    from genbatch.clients.cli.settings import read_settings

    given = {"model": model} if is_given(context, "model") else {}
    return read_settings(given | flags.given(context), config=file.config)


def settings_table(settings: "Settings") -> Table:
    """A row an option; what is not a default stands out."""
    from genbatch.clients.cli.settings import DEFAULT

    table = Table(box=None, padding=(0, 2), header_style="bold")
    for title in ("option", "value", "from"):
        table.add_column(title, overflow="fold")
    section = None
    for option in options().values():
        if option.owner is not section:
            section = option.owner
            table.add_row(Text(SECTIONS[section], style="bold cyan"))
        origin = settings.origin(option.name)
        style = "dim" if origin == DEFAULT else "green"
        value = option.shown(settings.value(option.name))
        table.add_row(Text(f"  {option.name}"), Text(value, style=style), Text(origin, style=style))
    return table


def _plain(settings: "Settings") -> dict[str, Any]:
    return {
        option.name: {
            "value": "(secret)" if option.is_secret else settings.value(option.name),
            "from": settings.origin(option.name),
        }
        for option in options().values()
    }
