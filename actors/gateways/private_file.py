"""Files with secrets: written so that nobody else can ever open them, refused if somebody else could."""

import os
import stat
from pathlib import Path

from genbatch.actors.gateways.errors import KeyFileError

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700


def check_private(path: Path) -> None:
    """Raises:
    KeyFileError: the file is missing, or others than its owner may read or write it.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise KeyFileError(path, error.strerror or str(error)) from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(path, "others may open this secret; run chmod 600 on it")


def make_private_directory(path: Path) -> None:
    """Makes the directory, for its owner alone, unless it is there.

    Raises:
        KeyFileError: it cannot be made, or is no directory.
    """
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        raise KeyFileError(path, error.strerror or str(error)) from None


def write_new(path: Path, text: str) -> None:
    """Writes a file that only its owner can open, and that was not there.

    Raises:
        KeyFileError: it was, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    except FileExistsError:
        raise KeyFileError(path, "exists already; nothing was changed") from None
    except OSError as error:
        raise KeyFileError(path, error.strerror or str(error)) from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def replace(path: Path, text: str) -> None:
    """Puts a file, that only its owner can open, in the place of another at one stroke.

    Raises:
        KeyFileError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    write_new(new, text)
    new.replace(path)
