"""Finds the wheel's compiled kernels: one library for each kind of CPU, by the CPU's flags.

`make wheel` compiles them (tests/wheel_kernels.py). A library's name has a digest of the C sources, so a library never
runs with the Python code of other sources. A machine without a matching library compiles its own.
"""

import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIRECTORY = Path(__file__).parent
PACKAGED = SOURCE_DIRECTORY / "packaged"

_V3 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of CPU.

    Args:
        name: the level's part of the file name.
        flags: the compiler's flags.
        needs: the flags of such a CPU in /proc/cpuinfo.
        vendor: the CPU's vendor, if only this vendor's CPUs gain from the flags.
    """

    name: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    vendor: str = ""


LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        Level(
            "v4-vnni-bf16",
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-DDOT_BF16"),
            (*_V4, "avx512_vnni", "avx512_bf16"),
            "AuthenticAMD",
        ),
        Level("v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), (*_V4, "avx512_vnni")),
        Level("v4", ("-march=x86-64-v4",), _V4),
        Level("v3-vnni", ("-march=x86-64-v3", "-mavxvnni"), (*_V3, "avx_vnni")),
        Level("v3", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (
        Level("arm-i8mm", ("-mcpu=generic+dotprod+i8mm",), ("asimd", "asimddp", "i8mm")),
        Level("arm-dotprod", ("-mcpu=generic+dotprod",), ("asimd", "asimddp")),
        Level("arm", ("-mcpu=generic",), ("asimd",)),
    ),
}
"""By machine, the kinds of CPUs that the C code distinguishes, the fastest first."""


def level_of(cpu: str, machine: str) -> Level | None:
    """Return the best level for a CPU.

    Args:
        cpu: lines of /proc/cpuinfo.
        machine: a key of `LEVELS`; other machines have no libraries.
    """
    words = set(cpu.split())
    return next(
        (
            level
            for level in LEVELS.get(machine, ())
            if words.issuperset(level.needs) and (not level.vendor or level.vendor in words)
        ),
        None,
    )


def packaged_library(cpu: str, folder: Path = PACKAGED) -> Path | None:
    """Return this installation's library for a CPU; None if there is none."""
    level = level_of(cpu, platform.machine()) if sys.platform == "linux" else None
    path = None if level is None else folder / library_name(level)
    return path if path is not None and path.is_file() else None


def library_name(level: Level) -> str:
    """Return the file name of a level's library, for the sources of this installation."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCE_DIRECTORY.glob("*.c"), *SOURCE_DIRECTORY.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{level.name}-{digest.hexdigest()[:16]}.so"
