"""`genbatch config`: every option of a service, what is in force, and where that is from."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from genbatch.clients.cli.batcher_flags import BatcherFlags, limits_of
from genbatch.clients.cli.command import report, with_flag_groups
from genbatch.clients.cli.engine_flags import DEFAULT_MODEL, ModelFlags, PoolFlags
from genbatch.clients.cli.service_flags import ServiceFlags

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
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of all options that the README has.")
    ] = False,
    file: ConfigFlags,
    model_flags: ModelFlags,
    pool: PoolFlags,
    batcher: BatcherFlags,
    service: ServiceFlags,
) -> None:
    """Show every option of a service, what `genbatch serve` would take with the same flags, and where that is from.

    Flags win over GENBATCH_ variables, these over the file, and the file over the defaults.

    Examples:

      genbatch config

      genbatch config --config ./genbatch.toml --n-parallel 16

      GENBATCH_DTYPE=float32 genbatch config --json
    """

    def show() -> None:
        from genbatch.clients.cli.option_table import markdown_table
        from genbatch.clients.cli.settings import unknown_variables

        if markdown:
            sys.stdout.write(markdown_table())
            return
        settings = settings_of(context, model, file, model_flags, pool, batcher, service)
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


def settings_of(context: typer.Context, model: str, file: ConfigFlags, *groups: Any) -> "Settings":
    """The settings that a command's flags, the environment and the file come to.

    Raises:
        OptionError: see `read_settings`.
    """
    from genbatch.clients.cli.settings import read_settings

    return read_settings(_given(context, model, groups), config=file.config)


def settings_table(settings: "Settings") -> Table:
    """A row an option; what is not a default stands out."""
    from genbatch.clients.cli.option_fields import SECTIONS, options
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
    from genbatch.clients.cli.option_fields import options

    return {
        option.name: {
            "value": "(secret)" if option.is_secret else settings.value(option.name),
            "from": settings.origin(option.name),
        }
        for option in options().values()
    }


def _given(context: typer.Context, model: str, groups: tuple[Any, ...]) -> Mapping[str, Any]:
    """The options that the command line names, by name."""
    from genbatch.clients.cli.option_fields import LIMITS, option_of_flag

    given: dict[str, Any] = {"model": model} if _is_given(context, "model") else {}
    for group in groups:
        for field in fields(group):
            if not _is_given(context, field.name):
                continue
            name, opposite = option_of_flag(field.name)
            value = getattr(group, field.name)
            if name == LIMITS:
                given.update({f"{LIMITS}.{limit}": number for limit, number in limits_of(value).items()})
            else:
                given[name] = not value if opposite else tuple(value) if isinstance(value, list) else value
    return given


def _is_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
