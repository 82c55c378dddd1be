"""The flags of a service's options, made of the options' dataclasses: a new field has its flag without a line here.

    @with_flag_groups
    def serve(context: typer.Context, *, flags: ServiceFlags) -> None:
        settings = settings_of(context, model, file, flags)

The option `n_parallel` has the flag `--n-parallel`, and the field's line under "Args:" is its help. `fair_share` is on
by default, so its flag is `--no-fair-share`. `--fair-share` overrides a file that turns it off; the help omits this
flag. `system_prompts` has `--system-prompt`, which may be repeated. A limit of requests is `--limit NAME=VALUE`. This
file has only the look of a flag: its heading, and the name of its value.

The dataclasses have the name, type, default and meaning of each option. These also give the key in the file, the
environment variable, and the rows of `genbatch config` and docs/options.md.
"""

import inspect
import re
import sys
import types
from collections import defaultdict
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
    RequestLimits: "Limits of a request",
    ServiceOptions: "Service",
}
LIMITS = "limits"
# Defaults of the command that differ from those of a program: `genbatch serve` outlives its engine.
_OF_COMMANDS = {"engine": "process"}
# The names of options with values that are never shown.
_SECRET = re.compile(r"(^|_)(secret|password|token|api_key)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a service.

    Args:
        name: the key in the file, and the keyword in Python; "limits.NAME" for a limit of requests.
        owner: the class with its field.
        field: the name of this field.
        kind: a type of plain values, for text and TOML.
        default: the default of `genbatch serve`.
        text: its meaning.
    """

    name: str
    owner: type[Any]
    field: str
    kind: Any
    default: Any
    text: str

    @property
    def variable(self) -> str:
        """The name of its environment variable."""
        return f"GENBATCH_{self.name.upper().replace('.', '__')}"

    @property
    def is_secret(self) -> bool:
        """Whether its value must not be shown."""
        return _SECRET.search(self.field) is not None

    def plain(self, value: Any) -> Any:
        """Return a value in the form of JSON."""
        return int(value) if isinstance(value, CpuDefault) else value

    def shown(self, value: Any) -> str:
        """Return a value as text for people, without secrets."""
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
    """Return all options by name, in the order of their classes."""
    all_options: dict[str, Option] = {}
    for owner in SECTIONS:
        texts = arguments_of(owner)
        for field, kind, default in _fields(owner):
            name = "model" if field == "model_path" else f"{LIMITS}.{field}" if owner is RequestLimits else field
            assert name not in all_options, f"two options have the name {name}"
            kind, default = _plain(kind), _OF_COMMANDS.get(field, default)
            all_options[name] = Option(
                name=name, owner=owner, field=field, kind=kind, default=default, text=texts[field]
            )
    return all_options


def markdown_table() -> str:
    """Return the tables of docs/options.md: for each class its options, with their defaults and meanings."""
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
    """Return the (name, type, default) of each field that the class takes."""
    hints = get_type_hints(owner)
    if issubclass(owner, msgspec.Struct):
        return [(field.name, hints[field.name], field.default) for field in msgspec.structs.fields(owner)]
    return [
        (field.name, hints[field.name], field.default)
        for field in fields(owner)
        if field.init and field.default is not MISSING  # the limits have a factory, and a section of their own
    ]


def _plain(kind: Any) -> Any:
    """Return the part of a type that text or TOML can express."""
    if get_origin(kind) in (Union, types.UnionType):
        members = [_plain(member) for member in get_args(kind) if _is_plain(member)]
        return Union[tuple(members)]  # noqa: UP007  # made of a tuple
    return tuple[str, ...] if get_origin(kind) in (Sequence, tuple) else kind


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) in (Literal, Sequence, tuple):
        return True
    return inspect.isclass(kind) and issubclass(kind, str | int | float | bool | Enum | types.NoneType)


def arguments_of(owner: type[Any]) -> dict[str, str]:
    """Return the entries of "Args:" in a docstring, by name. `python -OO` has no docstrings, and its help no texts."""
    if sys.flags.optimize > 1:
        return defaultdict(str)
    section = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")[2].split("\n\n")[0]
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", "\n" + section)[1:]:
        names, _, text = " ".join(entry.split()).partition(": ")
        texts.update(dict.fromkeys(names.split(", "), text))
    return texts


DEFAULT_MODEL = EngineOptions().model_path

# The first option of each heading, in the order of the fields.
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
# The name of a flag's value, if the type does not tell it.
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
_NOT = "no_"  # the prefix of a parameter that turns an option off
_LIMIT_NAMES = ", ".join(RequestLimits.__struct_fields__)


class OptionFlags:
    """The values of some options' flags.

    Args:
        values: by option; a missing option has its default.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **values: Any) -> None:
        self.values: Mapping[str, Any] = {**{name: options()[name].default for name in self.names}, **values}

    @classmethod
    def parameters(cls) -> list[Parameter]:
        """Return the parameters for typer, a keyword for each option."""
        headings = _headings()
        return [flag for name in cls.names for flag in _parameters(options()[name], headings[name])]

    def changed(self) -> list[str]:
        """Return the options with a value that is not the default."""
        return [name for name, value in self.values.items() if value != options()[name].default]


class ModelFlags(OptionFlags):
    """The flags of every command that can run a model by itself."""

    names = (
        *("served_model_name", "chat_template", "dtype", "n_gpu_layers", "runner", "quantize", "pooling", "n_threads"),
        *("tensor_parallel", "n_ctx", "draft"),
    )

    def options(self, model: str) -> EngineOptions:
        """Return the engine's options for `model`.

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
        """Return the parameters of all options, and --limit for all limits of requests."""
        flag = typer.Option(
            metavar="NAME=VALUE",
            help=f"A limit of a request; may be repeated. Names: {_LIMIT_NAMES}.",
            rich_help_panel=_REQUESTS,
        )
        limit = Parameter("limit", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, flag])
        return [*super().parameters(), limit]

    def from_command_line(self, context: typer.Context) -> dict[str, Any]:
        """Return the values of the options on the command line, by name.

        Raises:
            OptionError: there is no such limit, or its value is of the wrong type; an option is turned on and off.
        """
        values: dict[str, Any] = {}
        for parameter, value in self.values.items():
            if is_given(context, parameter):
                name = parameter.removeprefix(_NOT)
                if name in values:
                    raise OptionError(name, "is turned on and off at once")
                values[name] = not value if name != parameter else tuple(value) if isinstance(value, list) else value
        return values | {f"{LIMITS}.{name}": value for name, value in limits_of(self.limits).items()}


def is_given(context: typer.Context, parameter: str) -> bool:
    """Return whether the command line names a parameter."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def limits_of(assignments: list[str]) -> dict[str, Any]:
    """Return the limits of requests that NAME=VALUE arguments set.

    Raises:
        OptionError: an argument is not NAME=VALUE, or its value is of the wrong type.
    """
    named: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise OptionError("limit", f"{assignment!r} is not NAME=VALUE")
        if name not in RequestLimits.__struct_fields__:
            raise OptionError("limit", f"{name!r} is not one of {_LIMIT_NAMES}")
        named[name] = value
    try:
        limits = msgspec.convert(named, RequestLimits, strict=False)
    except msgspec.ValidationError as error:
        raise OptionError("limit", str(error)) from error
    return {name: getattr(limits, name) for name in named}


def _headings() -> dict[str, str]:
    """Return the heading of each option: the last heading that began before the option."""
    headings: dict[str, str] = {}
    heading = ""
    for name in options():
        heading = _HEADINGS.get(name, heading)
        headings[name] = heading
    return headings


def _parameters(option: Option, heading: str) -> list[Parameter]:
    """Return an option's flag. A switch has the flag that changes its default, and hides the opposite flag."""
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
        look = _look(option, heading, flag.removesuffix("s"), text=f"{option.text.removesuffix('.')}; may be repeated")
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
    """Return the name of an option's value; None uses the name of its type."""
    if option.name in _VALUES:
        return _VALUES[option.name]
    if option.name.endswith("_s"):
        return "SECONDS"
    for kind in (option.kind, *get_args(option.kind)):
        if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, str | Enum)):
            return "NAME"
    return None


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].removesuffix('.')}." if text else ""
