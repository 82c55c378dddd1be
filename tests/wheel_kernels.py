"""Compiles the kernels of every level into a folder, and prints the platform tag of a wheel with them.

python tests/wheel_kernels.py nif/native/packaged
"""

import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from genbatch.nif.native.build import FLAGS, SOURCE_DIRECTORY, compile_sources
from genbatch.nif.native.packaged import LEVELS, library_name


def platform_tag(libraries: Collection[bytes]) -> str:
    """The tag of a wheel with these libraries: the oldest glibc that has every symbol which they need."""
    versions = [tuple(map(int, found)) for data in libraries for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)]
    major, minor = max(versions)
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def main() -> None:
    """Compiles every level into the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for level in LEVELS:
        with tempfile.TemporaryDirectory() as scratch:
            library = Path(scratch) / library_name(level)
            compile_sources("cc", (*FLAGS, *level.flags), tuple(sorted(SOURCE_DIRECTORY.glob("*.c"))), library)
            shutil.move(library, folder)
    print(platform_tag([path.read_bytes() for path in folder.glob("*.so")]))


if __name__ == "__main__":
    main()
