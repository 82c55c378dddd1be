"""A disk that breaks: a file system in a file, which loses its content while it is mounted."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

BYTES = 64 << 20


@contextmanager
def breakable_disk(image: Path, folder: Path) -> Iterator[Callable[[Sequence[Path]], None]]:
    """Mount a new file system at `folder`; the returned function makes each read of these files fail with EIO."""
    folder.mkdir(mode=0o700)
    with image.open("wb") as file:
        file.truncate(BYTES)
    make = ["mkfs.ext4", "-q", str(image)]
    mount = ["mount", "-o", "loop", str(image), str(folder)]
    done = shutil.which(make[0]) and all(
        not subprocess.run(command, capture_output=True, check=False).returncode for command in (make, mount)
    )
    if not done:
        pytest.skip("this system mounts no file system for a test")

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
