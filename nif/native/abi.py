"""Reads abi.h, the only definition of the interface between Python and C, and makes it available to ctypes.

    @c_struct("norm")
    class Norm(Structure): ...

gives `Norm` the fields of `norm` in abi.h.
"""

import ctypes
import re
from collections.abc import Callable
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

_VALUES: dict[str, Any] = {
    "bool": c_bool,
    "float": c_float,
    "int": c_int,
    "int32_t": c_int32,
    "int64_t": c_int64,
}
_DECLARATION = re.compile(r"(?:const )?(?:struct )?(\w+) (.+)", re.DOTALL)
_NAME = re.compile(r"(?P<stars>[* ]*(?:const )?\**)(?P<name>\w+)(?:\[(?P<count>\w+)\])?$")


class CHeader:
    """The contents of a C header in the plain style of abi.h.

    Args:
        text: the header.

    Attributes:
        constants: the value of each `#define NAME number`.
        enums: the members of each enum, in order.
        structs: the declarations of each struct's fields, as text.
        functions: the result type and the parameters of each function, as text.
    """

    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        self.constants = {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+)\s", text)}
        self.enums = {
            name: tuple(member.strip() for member in members.split(",") if member.strip())
            for name, members in re.findall(r"enum (\w+) \{(.*?)\};", text, re.DOTALL)
        }
        self.structs = {
            name: tuple(" ".join(field.split()) for field in fields.split(";") if field.strip())
            for fields, name in re.findall(r"typedef struct (?:\w+ )?\{(.*?)\} (\w+);", text, re.DOTALL)
        }
        self.functions = {
            name: (result.strip(), () if parameters == "void" else tuple(" ".join(parameters.split()).split(", ")))
            for result, name, parameters in re.findall(r"^(\w+ \*?)(\w+)\(([^)]*)\);", text, re.DOTALL | re.MULTILINE)
        }

    def fields(self, struct: str) -> list[tuple[str, Any]]:
        """Return the name and the ctypes type of each field of a struct."""
        fields = []
        for declaration in self.structs[struct]:
            base, names = _split(declaration)
            for name in names.split(","):
                match = _NAME.match(name.strip())
                assert match is not None, f"abi.py cannot read the field {declaration!r} of {struct}"
                kind = _type(base, match["stars"].count("*"))
                count = match["count"]
                fields.append((match["name"], kind * self.constants[count] if count else kind))
        return fields

    def dtype(self, struct: str) -> np.dtype:
        """Return a struct of numbers as a numpy dtype."""
        return np.dtype([(name, np.dtype(kind)) for name, kind in self.fields(struct)], align=True)

    def declare(self, library: ctypes.CDLL) -> None:
        """Tell ctypes the types of all functions of the header."""
        for name, (result, parameters) in self.functions.items():
            function = getattr(library, name)
            function.argtypes = [_type(base, rest.count("*")) for base, rest in map(_split, parameters)]
            base = result.rstrip(" *")
            function.restype = None if result == "void" else _type(base, result.count("*"))


def _split(declaration: str) -> tuple[str, str]:
    """Split "const float *a, *b" into the type's name and the rest."""
    match = _DECLARATION.fullmatch(declaration)
    assert match is not None, f"abi.py cannot read {declaration!r}"
    return match[1], match[2]


def _type(base: str, stars: int) -> Any:
    """Return the ctypes type of a C type. A pointer is a plain address, unless it points to a struct with a class."""
    if stars:
        return POINTER(_structs[base]) if stars == 1 and base in _structs else c_void_p
    return _structs[base] if base in _structs else _VALUES[base]


HEADER = CHeader((Path(__file__).parent / "abi.h").read_text())
_structs: dict[str, type[Structure]] = {}
_Struct = TypeVar("_Struct", bound=type[Structure])


def c_struct(name: str) -> Callable[[_Struct], _Struct]:
    """Give a ctypes class the fields of a struct of abi.h. Structs within it must have their classes already."""

    def with_fields(kind: _Struct) -> _Struct:
        _structs[name] = kind  # before the fields, because a struct may point to its own kind
        kind._fields_ = HEADER.fields(name)
        return kind

    return with_fields
