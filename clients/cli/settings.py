"""The settings of a service: flags, then GENBATCH_ variables, then a TOML file, then the defaults.

    settings = read_settings({"n_parallel": 16}, config=Path("genbatch.toml"))
    settings.batcher()                       # BatcherOptions
    settings.origin("n_parallel")            # "flag"

The file has the options as keys, and the limits of requests in the table [limits]. No file of the working directory is
read by default, since a file could name a scheduler, which is code.

`genbatch config` shows every option, its value, and the origin of the value.
"""

import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import msgspec
import pydantic
import typer

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.addresses import default_address
from genbatch.actors.service.on_demand import ModelOnDemand, on_demand_in
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.cli.command import report, with_flag_groups
from genbatch.clients.cli.option_flags import (
    DEFAULT_MODEL,
    LIMITS,
    SECTIONS,
    Option,
    ServiceFlags,
    is_given,
    markdown_table,
    options,
)
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.validation import RequestLimits

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings
    from rich.table import Table

_PREFIX = "GENBATCH_"
FILE_VARIABLE = "GENBATCH_CONFIG"
DEFAULT, FLAG = "default", "flag"
# Our variables that are not options.
_OTHER_VARIABLES = {FILE_VARIABLE, "GENBATCH_CACHE"}


T = TypeVar("T")


class Settings:
    """The value of every option, and its origin.

    Args:
        values: (value, origin) of the options that are set, by name.
    """

    def __init__(self, values: Mapping[str, tuple[Any, str]]) -> None:
        self._values = values

    def value(self, name: str) -> Any:
        """Return the value of an option."""
        return self._values[name][0] if name in self._values else options()[name].default

    def origin(self, name: str) -> str:
        """Return the origin of the value: "flag", a variable, a line of a file, or "default"."""
        return self._values[name][1] if name in self._values else DEFAULT

    def engine(self) -> EngineOptions:
        """Return the options; raise OptionError for a value out of range."""
        return self._make(EngineOptions)

    def batcher(self) -> BatcherOptions:
        """Return the options; raise OptionError or SchedulerError for a value out of range."""
        return self._make(BatcherOptions, limits=RequestLimits(**self._fields(RequestLimits)))

    def service(self) -> ServiceOptions:
        """Return the options; raise OptionError for a value out of range."""
        return self._make(ServiceOptions, bind=self.value("bind") or default_address())

    def _fields(self, owner: type[Any]) -> dict[str, Any]:
        return {option.field: self.value(option.name) for option in options().values() if option.owner is owner}

    def _make(self, owner: type[T], **others: Any) -> T:
        try:
            return owner(**{**self._fields(owner), **others})
        except OptionError as error:
            origin = self.origin(error.option)
            if origin in (DEFAULT, FLAG):
                raise
            raise OptionError(error.option, f"{error.reason} ({origin})") from error


def read_settings(flags: Mapping[str, Any], *, config: Path | None = None) -> Settings:
    """Merge flags, variables, file and defaults.

    Args:
        flags: the options on the command line.
        config: the TOML file; None takes $GENBATCH_CONFIG, or genbatch/config.toml in $XDG_CONFIG_HOME if it exists.

    Raises:
        OptionError: a key is unknown, a value has the wrong type, or the file cannot be read; it names the place.
    """
    values = {**_from_file(config or config_file()), **_from_environment()}
    return Settings(values | {name: (value, FLAG) for name, value in flags.items()})


def unknown_variables() -> list[str]:
    """Return GENBATCH_ variables that are no options. They are not an error, since orchestrators set such variables."""
    known = {option.variable for option in options().values()} | _OTHER_VARIABLES
    return sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)


def config_file() -> Path | None:
    """Return the default file; None if there is none."""
    if FILE_VARIABLE in os.environ:
        return Path(os.environ[FILE_VARIABLE])
    folder = config_folder()
    path = None if folder is None else folder / "config.toml"
    return path if path is not None and path.exists() else None


def config_folder() -> Path | None:
    """Return the folder of a user's options and keys; None for a user without a home, as in containers."""
    home = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(home) if home else Path.home() / ".config") / "genbatch"
    except RuntimeError:  # there is no $HOME, and the user is unknown to the system
        return None


# The environment


def _from_environment() -> dict[str, tuple[Any, str]]:
    if not any(name.upper().startswith(_PREFIX) for name in os.environ):
        return {}
    # Imported late: it takes a fifth of a short request to a running service.
    from pydantic_settings import EnvSettingsSource, SettingsError

    kind = _settings_class()
    try:
        nested = EnvSettingsSource(kind)()
    except SettingsError as error:
        raise OptionError(_named_in(str(error)), "is not JSON (in the environment)") from error
    settings = {}
    for name, value in _flattened(nested).items():
        option = _known(name, "the environment")
        settings[name] = (_checked(option, value, option.variable), option.variable)
    return settings


def _settings_class() -> "type[BaseSettings]":
    """Return the options as a class of pydantic-settings, which reads their variables."""
    from pydantic_settings import BaseSettings, SettingsConfigDict

    class Environment(BaseSettings):
        model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__", protected_namespaces=())

    limits: dict[str, Any] = {}
    flat: dict[str, Any] = {}
    for option in options().values():
        if option.owner is RequestLimits:
            limits[option.field] = (option.kind, option.default)
        else:
            flat[option.name] = (option.kind, option.default)
    table = pydantic.create_model("Limits", **limits)
    flat[LIMITS] = (table, table())
    return pydantic.create_model("Options", __base__=Environment, **flat)


def _named_in(text: str) -> str:
    match = re.search(r'field "(\w+)"', text)
    return match[1] if match else _PREFIX


# The file


def _from_file(path: Path | None) -> dict[str, tuple[Any, str]]:
    if path is None:
        return {}
    nested, text = _toml(path, "config")
    settings = {}
    for name, value in _flattened(nested).items():
        where = f"{path}, line {_line_of(name, text)}"
        settings[name] = (_checked(_known(name, where), value, where, strict=True), where)
    return settings


def _toml(path: Path, option: str) -> tuple[dict[str, Any], str]:
    """Return the content of a TOML file, and its text."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows programs begin a file with a byte order mark
        return tomllib.loads(text), text
    except OSError as error:
        raise OptionError(option, f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(option, f"{path} is not TOML: {error}") from error


def _flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by option; a table's keys follow its name, as in "limits.max_n"."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


def _line_of(name: str, text: str) -> int:
    """Return the line of a key, which tomllib does not report."""
    table, _, key = name.rpartition(".")
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.\"'-]+)\s*\]", line):
            current = header[1].strip("\"'")
            if current == table and not key:
                return number
        match = re.match(r"\s*([\w.\"' -]+?)\s*=", line)
        if match and ".".join(filter(None, (current, match[1].replace('"', "").replace(" ", "")))) in (name, table):
            return number
    return 1


# Models on demand


def models_on_demand(
    path: Path, engine: EngineOptions, batcher: BatcherOptions, keep_alive: float, *, may_be_none: bool = False
) -> list[ModelOnDemand]:
    """Return the models in a directory, or in a TOML file with a table for each model.

    Args:
        engine, batcher, keep_alive: the options of every model, unless its table sets others.
        may_be_none: whether there may be no model.

    Raises:
        OptionError: there is no model, a key is unknown, or a value is wrong; the message names the place.
    """
    tables: Mapping[str, Any]
    if path.is_dir():
        tables = {name: {"model": source} for name, source in on_demand_in(path).items()}
    else:
        tables = _toml(path, "models")[0]
    if not tables and not may_be_none:
        raise OptionError("models", f"there is no model in {path}")
    models = []
    for name, table in tables.items():
        where = f"{path}, table {name}"
        if not isinstance(table, Mapping) or "model" not in table:
            raise OptionError("models", f"each model needs a table with the key `model` ({where})")
        values: dict[type, dict[str, Any]] = {EngineOptions: {"served_model_name": name}, BatcherOptions: {}}
        for key, value in table.items():
            option = _known(key, where)
            if option.owner not in values and key != "keep_alive":
                raise OptionError(key, f"is not an option of a single model ({where})")
            values.setdefault(option.owner, {})[option.field] = _checked(option, value, where, strict=True)
        try:
            own_engine, own_batcher = (
                replace(engine, **values[EngineOptions]),
                replace(batcher, **values[BatcherOptions]),
            )
        except OptionError as error:
            raise OptionError(error.option, f"{error.reason} ({where})") from error
        own_keep_alive = values.get(ServiceOptions, {}).get("keep_alive", keep_alive)
        models.append(ModelOnDemand(own_engine, own_batcher, own_keep_alive))
    return models


# Values


def _known(name: str, where: str) -> Option:
    option = options().get(name)
    if option is None:
        close = difflib.get_close_matches(name, options(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise OptionError(name, f"there is no such option ({where}){hint}")
    return option


def _checked(option: Option, value: Any, where: str, *, strict: bool = False) -> Any:
    """Return a value as its type.

    Args:
        strict: whether a number in quotes is refused.
    """
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(_lenient_in_case(option.kind))
    try:
        if strict:
            return adapter.validate_json(json.dumps(value, default=str), strict=True)
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        [fault, *_] = error.errors()
        reason = fault["msg"][0].lower() + fault["msg"][1:]
        raise OptionError(option.name, f"{reason} ({where})") from error


def _lenient_in_case(kind: Any) -> Any:
    """Return the type, with enums by value in any case, as for flags."""
    for member in (kind, *get_args(kind)):
        if isinstance(member, type) and issubclass(member, Enum):
            return Annotated[kind, pydantic.BeforeValidator(partial(_member, member))]
    return kind


def _member(kind: type[Enum], value: object) -> object:
    return next((member for member in kind if str(value).casefold() == str(member.value).casefold()), value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFlags:
    """The file with a service's options."""

    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A TOML file of options; the default is $GENBATCH_CONFIG or genbatch/config.toml in $XDG_CONFIG_HOME.",
        ),
    ] = None


@with_flag_groups
def config(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As for `genbatch serve`.")] = DEFAULT_MODEL,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of docs/options.md.")] = False,
    file: ConfigFlags,
    flags: ServiceFlags,
) -> None:
    """Show every option of a service, its value with these flags, and the origin of the value.

    Flags have priority over GENBATCH_ variables, variables over the file, and the file over the defaults.

    Examples:

      genbatch config

      genbatch config --config ./genbatch.toml --n-parallel 16

      GENBATCH_DTYPE=float32 genbatch config --json
    """

    def show() -> None:
        if markdown:
            sys.stdout.write(markdown_table())
            return
        settings = settings_of(context, model, file, flags)
        if json:
            sys.stdout.write(msgspec.json.encode(_plain(settings)).decode() + "\n")
            return
        from rich.console import Console
        from rich.text import Text

        console = Console()
        console.print(settings_table(settings))
        for name in unknown_variables():
            console.print(Text(f"{name} is not an option and is ignored", style="yellow"))

    try:
        show()
    except Exception as error:
        raise typer.Exit(report(error)) from None


def settings_of(context: typer.Context, model: str, file: ConfigFlags, flags: ServiceFlags) -> Settings:
    """Return the settings from a command's flags, the environment and the file.

    Raises:
        OptionError: see `read_settings`.
    """
    chosen = {"model": model} if is_given(context, "model") else {}
    return read_settings(chosen | flags.from_command_line(context), config=file.config)


def settings_table(settings: Settings) -> "Table":
    """Return a table with a row for each option; values that are not defaults are highlighted."""
    from rich.table import Table
    from rich.text import Text

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


def _plain(settings: Settings) -> dict[str, Any]:
    return {
        option.name: {
            "value": "(secret)" if option.is_secret else option.plain(settings.value(option.name)),
            "from": settings.origin(option.name),
        }
        for option in options().values()
    }
