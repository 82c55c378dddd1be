"""Options as they travel to another process: msgpack, checked field by field against the class they become."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import msgspec

from genbatch.nif.errors import OptionError

T = TypeVar("T")

# Fields that may also hold an object, and what of them can be sent.
_SENT_AS: dict[str, Any] = {"scheduler": str}


def encode_options(options: Any) -> msgspec.Raw:
    """The bytes of an options dataclass.

    Raises:
        OptionError: a value is an object of this process only.
    """
    named = {field.name: getattr(options, field.name) for field in fields(options) if field.init}
    for name, value in named.items():
        try:
            msgspec.msgpack.encode(value)
        except TypeError as error:
            raise OptionError(name, f"cannot be sent to another process: {error}") from error
    return msgspec.Raw(msgspec.msgpack.encode(named))


def decode_options(data: bytes | msgspec.Raw, kind: Callable[..., T]) -> T:
    """The options that `encode_options` sent.

    Raises:
        OptionError: a name or a type is not the class's, or a value is out of range.
    """
    hints = get_type_hints(kind)
    options_class: Any = kind
    names = {field.name for field in fields(options_class) if field.init}
    values: dict[str, Any] = {}
    for name, raw in msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw]).items():
        if name not in names:
            raise OptionError(name, "there is no such option")
        try:
            value = msgspec.msgpack.decode(raw, type=_SENT_AS.get(name, hints[name]))
        except msgspec.ValidationError as error:
            raise OptionError(name, str(error)) from error
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)
