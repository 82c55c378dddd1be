"""Failing disks: file systems that a test mounts, small, read-only, or losing their content while they are mounted."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

BYTES = 64 << 20


@contextmanager
def mounted_disk(folder: Path, options: str) -> Iterator[None]:
    """Mount a file system of its own at a new folder, with these options of tmpfs."""
    folder.mkdir(mode=0o700)
    _mount([["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "none", str(folder)]])
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def breakable_disk(image: Path, folder: Path) -> Iterator[Callable[[Sequence[Path]], None]]:
    """Mount a new file system at `folder`; the returned function makes each read of these files fail with EIO."""
    folder.mkdir(mode=0o700)
    with image.open("wb") as file:
        file.truncate(BYTES)
    _mount([["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]])

    def break_disk(paths: Sequence[Path]) -> None:
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.truncate(image, 4096)

    try:
        folder.chmod(0o700)
        yield break_disk
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(commands: Sequence[Sequence[str]]) -> None:
    """Run the commands; skip the test where one is missing or fails."""
    for command in commands:
        if not shutil.which(command[0]) or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this system mounts no file system for a test")
