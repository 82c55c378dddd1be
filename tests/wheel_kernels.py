"""Compiles the kernels of every level of a machine into a folder.

python tests/wheel_kernels.py aarch64 .venv-wheel/bin/python-zig nif/native/packaged

GCC compiles for this machine, since its kernels are faster: a prompt's take 0.8 of the time of Clang's. Zig links. It
brings the symbols of each glibc, so a library needs no newer glibc than the one that is named. For another machine Zig
compiles too, as it brings the headers and Clang.
"""

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from genbatch.nif.native.build import FLAGS, SOURCE_DIRECTORY, compile_sources
from genbatch.nif.native.packaged import LEVELS, library_name

# The oldest for which pip has wheels on each kind of machine: manylinux2014.
GLIBC = "2.17"


def main() -> None:
    """Compile every level into the folder that the command line names."""
    machine, zig, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]).absolute()
    folder.mkdir()
    linker = (zig, "cc", "-target", f"{machine}-linux-gnu.{GLIBC}")
    compiler = ("cc",) if machine == platform.machine() else linker
    sources = tuple(sorted(SOURCE_DIRECTORY.glob("*.c")))
    for level in LEVELS[machine]:
        with tempfile.TemporaryDirectory() as scratch:
            flags = (*compiler[1:], *FLAGS, *level.flags)
            compile_sources(compiler[0], flags, sources, Path(scratch) / "for_this_glibc.so")
            objects = sorted(map(str, Path(scratch).glob("*.o")))
            library = folder / library_name(level)
            subprocess.run([*linker, "-shared", "-pthread", "-s", *objects, "-o", str(library), "-lm"], check=True)


if __name__ == "__main__":
    main()
