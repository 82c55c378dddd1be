"""Groups of command line flags: a dataclass whose fields become a command's options.

    @dataclass
    class Sampling:
        temperature: Annotated[float, typer.Option(help="...")] = 0.0

    @app.command()
    @with_flag_groups
    def generate(prompt: str, *, sampling: Sampling) -> None: ...

typer sees `generate(prompt, *, temperature)`; the function gets a `Sampling`.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def with_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with each parameter that is a dataclass replaced by one keyword parameter per field."""
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
            groups[parameter.name] = parameter.annotation
            parameters.extend(_flags(parameter.annotation))
        else:
            parameters.append(parameter)

    @wraps(command)
    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    keyword_only = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    expanded.__signature__ = Signature(keyword_only)  # type: ignore[attr-defined]  # what typer reads
    expanded.__annotations__ = {}
    return expanded


def _flags(group: type[Any]) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]
