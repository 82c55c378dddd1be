"""The flags of a service's options, made of the options themselves: a new field has its flag without a line here.

    @with_flag_groups
    def serve(context: typer.Context, *, flags: ServiceFlags) -> None:
        settings = settings_of(context, model, file, flags)

`n_parallel` is `--n-parallel`, and its help is what the field's line under "Args:" says. `fair_share`, which is on by
default, is `--no-fair-share`; `--fair-share`, for where a file turns it off, works too and is not in the help.
`system_prompts` is `--system-prompt` again and again, a limit of requests `--limit NAME=VALUE`. Here is only what a
flag looks like: under which heading it stands, and what its value is called.

The options themselves are read from the dataclasses that hold them: name, type, default and what each means. That
also makes the key of the file, the variable of the environment, and the rows of `genbatch config` and
docs/options.md.
"""

import inspect
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from inspect import Parameter
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from rich.markup import escape

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.service.options import ServiceOptions
from genbatch.nif.engine_options import CpuDefault, EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.validation import RequestLimits

SECTIONS = {
    EngineOptions: "Model and memory",
    BatcherOptions: "Batching",
    RequestLimits: "What one request may ask for",
    ServiceOptions: "Service",
}
LIMITS = "limits"
# What the command takes where a program takes something else: `genbatch serve` outlives its engine.
_OF_COMMANDS = {"engine": "process"}
# Whose values are shown to nobody.
_SECRET = re.compile(r"(^|_)(secret|password|token|api_key)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Args:
        name: its key in the file, and keyword in Python; a request limit's is "limits.NAME".
        owner: the class that has it.
        field: its name there.
        kind: a type made of plain values, to be read from text or TOML.
        default: what `genbatch serve` takes.
        text: what it means.
    """

    name: str
    owner: type[Any]
    field: str
    kind: Any
    default: Any
    text: str

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"GENBATCH_{self.name.upper().replace('.', '__')}"

    @property
    def is_secret(self) -> bool:
        """Whether its value must not be shown."""
        return _SECRET.search(self.field) is not None

    def plain(self, value: Any) -> Any:
        """The value as JSON has it."""
        return int(value) if isinstance(value, CpuDefault) else value

    def shown(self, value: Any) -> str:
        """The value as a person reads it; nothing of a secret."""
        if value is None:
            return "none"
        if self.is_secret:
            return "(secret)"
        if isinstance(value, Enum):
            return str(value.value)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple | list):
            return ", ".join(map(repr, value)) or "none"
        return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def options() -> Mapping[str, Option]:
    """All of them by name, in the order of their classes."""
    found: dict[str, Option] = {}
    for owner in SECTIONS:
        texts = arguments_of(owner)
        for name, kind, default in _fields(owner):
            shown = "model" if name == "model_path" else f"{LIMITS}.{name}" if owner is RequestLimits else name
            assert shown not in found, f"two options are called {shown}"
            kind, default = _plain(kind), _OF_COMMANDS.get(name, default)
            found[shown] = Option(name=shown, owner=owner, field=name, kind=kind, default=default, text=texts[name])
    return found


def markdown_table() -> str:
    """The tables of docs/options.md: every option with its default and its meaning, a table for each class."""
    tables = []
    for owner, title in SECTIONS.items():
        lines = [f"**{title}**", "", "| option | default | |", "|---|---|---|"]
        for option in options().values():
            if option.owner is owner:
                text = option.text.replace("|", "\\|").removesuffix(".")
                lines.append(f"| `{option.name}` | {option.shown(option.default)} | {text} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _fields(owner: type[Any]) -> list[tuple[str, Any, Any]]:
    """(name, type, default) of what can be given to the class."""
    hints = get_type_hints(owner)
    if issubclass(owner, msgspec.Struct):
        return [(field.name, hints[field.name], field.default) for field in msgspec.structs.fields(owner)]
    return [
        (field.name, hints[field.name], field.default)
        for field in fields(owner)
        if field.init and field.default is not MISSING  # the limits, which have a section of their own, have a factory
    ]


def _plain(kind: Any) -> Any:
    """The part of a type that text or TOML can give."""
    if get_origin(kind) in (Union, types.UnionType):
        members = [_plain(member) for member in get_args(kind) if _is_plain(member)]
        return Union[tuple(members)]  # noqa: UP007  # made of a tuple
    return tuple[str, ...] if get_origin(kind) in (Sequence, tuple) else kind


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) in (Literal, Sequence, tuple):
        return True
    return inspect.isclass(kind) and issubclass(kind, str | int | float | bool | Enum | types.NoneType)


def arguments_of(owner: type[Any]) -> dict[str, str]:
    """The entries of "Args:", by name."""
    section = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")[2].split("\n\n")[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", "\n" + section)[1:]:
        names, _, text = " ".join(entry.split()).partition(": ")
        found.update(dict.fromkeys(names.split(", "), text))
    return found


DEFAULT_MODEL = EngineOptions().model_path

# Option -> the heading that begins with it, in the order of the fields.
_HEADINGS = {
    "served_model_name": "Model",
    "use_cuda_graph": "CUDA graphs",
    "n_ctx": "KV pool",
    "lora": "Adapters",
    "n_parallel": "Batching",
    "max_queue": "Waiting",
    "scheduler": "Scheduling",
    "system_prompts": "Shared prompts",
    "record": "Flight recorder",
    "bind": "Listening",
    "keys": "Security",
    "models": "Models on demand",
    "engine": "Processes",
    "log_format": "Log",
}
_REQUESTS = "Requests"
# What a flag's value is called, where the type does not say it.
_VALUES = {
    **dict.fromkeys(("bind", "rpc_bind"), "ADDRESS"),
    **dict.fromkeys(("chat_template", "tokens", "tls_cert", "tls_key", "record"), "FILE"),
    **dict.fromkeys(("http", "metrics"), "[HOST]:PORT"),
    "allowed_hosts": "NAME",
    "allowed_origins": "ORIGIN",
    **dict.fromkeys(("batch_dir", "prefix_cache_dir", "session_dir"), "DIR"),
    "keep_alive": "SECONDS",
    "model_memory": "GIB",
    "models": "PATH",
    "keys": "DIR",
    "lora": "NAME=DIR",
    "system_prompts": "TEXT",
    **dict.fromkeys(("cpu_offload_space", "prefix_cache_space", "session_space", "weights_cache"), "GIB"),
    "record_limit": "MIB",
}
_MORE_FLAGS = {"bind": ("-b",), "scheduler": ("--scheduler-type",), "block_size": ("--page-size",)}
_NOT = "no_"  # in front of the parameter that turns an option off
_LIMIT_NAMES = ", ".join(RequestLimits.__struct_fields__)


class OptionFlags:
    """The values of some options' flags.

    Args:
        values: by option; one that is not there has its default.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **values: Any) -> None:
        self.values: Mapping[str, Any] = {**{name: options()[name].default for name in self.names}, **values}

    @classmethod
    def parameters(cls) -> list[Parameter]:
        """What typer is to see: a keyword parameter an option."""
        headings = _headings()
        return [flag for name in cls.names for flag in _parameters(options()[name], headings[name])]

    def changed(self) -> list[str]:
        """The options whose value is not the default."""
        return [name for name, value in self.values.items() if value != options()[name].default]


class ModelFlags(OptionFlags):
    """Which model runs and how: what every command takes that can run one itself."""

    names = (
        *("served_model_name", "chat_template", "dtype", "n_gpu_layers", "runner", "quantize", "pooling", "n_threads"),
        *("tensor_parallel", "n_ctx"),
    )

    def options(self, model: str) -> EngineOptions:
        """The engine's options for `model`.

        Raises:
            OptionError: a value is out of range; the message names the option.
        """
        return EngineOptions(model_path=model, **self.values)


class ServiceFlags(OptionFlags):
    """Every option of a service, read by `settings_of`."""

    names = tuple(name for name, option in options().items() if option.owner is not RequestLimits and name != "model")

    def __init__(self, *, limit: list[str] | None = None, **values: Any) -> None:
        super().__init__(**values)
        self.limits = limit or []

    @classmethod
    def parameters(cls) -> list[Parameter]:
        """See OptionFlags; and --limit, for all limits of requests."""
        flag = typer.Option(
            metavar="NAME=VALUE",
            help=f"What one request may ask for; may be given again. Names: {_LIMIT_NAMES}.",
            rich_help_panel=_REQUESTS,
        )
        limit = Parameter("limit", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, flag])
        return [*super().parameters(), limit]

    def given(self, context: typer.Context) -> dict[str, Any]:
        """The options that the command line names, by name.

        Raises:
            OptionError: there is no such limit, or its value is of the wrong type; an option is turned on and off.
        """
        given: dict[str, Any] = {}
        for parameter, value in self.values.items():
            if is_given(context, parameter):
                name = parameter.removeprefix(_NOT)
                if name in given:
                    raise OptionError(name, "is turned on and off at once")
                given[name] = not value if name != parameter else tuple(value) if isinstance(value, list) else value
        return given | {f"{LIMITS}.{name}": value for name, value in limits_of(self.limits).items()}


def is_given(context: typer.Context, parameter: str) -> bool:
    """Whether the command line names the parameter."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def limits_of(assignments: list[str]) -> dict[str, Any]:
    """The limits of requests that NAME=VALUE says.

    Raises:
        OptionError: it is not NAME=VALUE, or the value is of the wrong type.
    """
    named: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise OptionError("limit", f"{assignment!r} is not NAME=VALUE")
        if name not in RequestLimits.__struct_fields__:
            raise OptionError("limit", f"{name!r} is none of {_LIMIT_NAMES}")
        named[name] = value
    try:
        limits = msgspec.convert(named, RequestLimits, strict=False)
    except msgspec.ValidationError as error:
        raise OptionError("limit", str(error)) from error
    return {name: getattr(limits, name) for name in named}


def _headings() -> dict[str, str]:
    """The heading that each option stands under: the last that began before it."""
    found: dict[str, str] = {}
    heading = ""
    for name in options():
        heading = _HEADINGS.get(name, heading)
        found[name] = heading
    return found


def _parameters(option: Option, heading: str) -> list[Parameter]:
    """An option's flag; of one that is on or off the flag that changes it, and out of sight the other one."""
    flag = f"--{option.name.replace('_', '-')}"
    negative = f"--no-{re.sub('^--(allow|enable|use)?-?', '', flag)}"
    if option.kind is bool:
        on = _parameter(option.name, bool, False, _look(option, heading, flag, hidden=option.default))
        text = f"Turn off: {option.text}"
        off = _look(option, heading, negative, text=text, hidden=not option.default)
        return [on, _parameter(f"{_NOT}{option.name}", bool, False, off)]
    if bool in get_args(option.kind):
        return [_parameter(option.name, option.kind, None, _look(option, heading, f"{flag}/{negative}"))]
    if option.kind == tuple[str, ...]:
        look = _look(
            option, heading, flag.removesuffix("s"), text=f"{option.text.removesuffix('.')}; may be given again"
        )
        return [_parameter(option.name, list[str] | None, None, look)]
    return [_parameter(option.name, option.kind, option.default, _look(option, heading, flag))]


def _parameter(name: str, kind: Any, default: Any, look: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, look])


def _look(option: Option, heading: str, flag: str, *, text: str = "", hidden: bool = False) -> Any:
    return typer.Option(
        *(flag, *_MORE_FLAGS.get(option.name, ())),
        metavar=_value(option),
        case_sensitive=False,
        help=escape(sentence(text or option.text)),
        rich_help_panel=heading,
        hidden=hidden,
    )


def _value(option: Option) -> str | None:
    """What its value is called; None leaves it to the type."""
    if option.name in _VALUES:
        return _VALUES[option.name]
    if option.name.endswith("_s"):
        return "SECONDS"
    for kind in (option.kind, *get_args(option.kind)):
        if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, str | Enum)):
            return "NAME"
    return None


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."
