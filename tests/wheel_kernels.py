"""Compiles the kernels of every level of a machine into a folder, with Zig's C compiler.

python tests/wheel_kernels.py aarch64 .venv-wheel/bin/python-zig nif/native/packaged

Zig brings the headers and the symbols of each glibc, so a library needs no newer glibc than the one that is named, and
one machine compiles for others.
"""

import sys
from pathlib import Path

from genbatch.nif.native.build import FLAGS, SOURCE_DIRECTORY, compile_sources
from genbatch.nif.native.packaged import LEVELS, library_name

# The oldest for which pip has wheels on each kind of machine: manylinux2014.
GLIBC = "2.17"


def main() -> None:
    """Compile every level into the folder that the command line names."""
    machine, zig, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]).absolute()
    folder.mkdir()
    sources = tuple(sorted(SOURCE_DIRECTORY.glob("*.c")))
    for level in LEVELS[machine]:
        target = ("-target", f"{machine}-linux-gnu.{GLIBC}", f"-mcpu={level.cpu}", "-s")  # without names for a debugger
        compile_sources(zig, ("cc", *target, *FLAGS, *level.macros), sources, folder / library_name(level))
    for left in folder.glob("*.o"):
        left.unlink()


if __name__ == "__main__":
    main()
