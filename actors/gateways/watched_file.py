"""WatchedFile: what a file or a directory says, read again when it has changed."""

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from genbatch.actors.gateways.errors import KeyFileError

logger = logging.getLogger(__name__)

T = TypeVar("T")
SETTLED_NS = 1_000_000_000
# Device, inode, modification time in nanoseconds, size: replacing a file changes the inode, writing to it the others.
_Stamp = tuple[int, int, int, int]
# What a file says apart from its first fault, and that.
Parsed = tuple[T, KeyFileError | None]


class WatchedFile(Generic[T]):
    """A parsed file; a look at an unchanged one costs one system call.

    Args:
        path: a file, or a directory whose entries are added and removed, not written in place.
        parse: reads it.
        nothing: what a file says that cannot be read, or that others than its owner may write.
    """

    def __init__(self, path: Path, parse: Callable[[Path], Parsed[T]], nothing: T) -> None:
        self.path = path
        self._parse = parse
        self._nothing = nothing
        self._stamp: _Stamp | None = None
        self._parsed: Parsed[T] = (nothing, None)

    def read(self) -> T:
        """What it says now.

        Raises:
            KeyFileError: it cannot be read, it is faulty, or others than its owner may write it.
        """
        said, fault = self._look()
        if fault is not None:
            raise fault
        return said

    def watch(self) -> T:
        """What it says now apart from its faults, which are logged once: one bad entry locks nobody else out."""
        before = str(self._parsed[1])
        said, fault = self._look()
        if fault is not None and str(fault) != before:
            logger.error("left out: %s", fault)
        return said

    def _look(self) -> Parsed[T]:
        try:
            status = self.path.stat()
        except OSError as error:
            self._stamp = None
            self._parsed = self._nothing, KeyFileError(self.path, error.strerror or str(error))
            return self._parsed
        stamp = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            self._parsed = self._read(status)
            # What changed just now may change again without a later time: a file system's clock ticks in milliseconds.
            is_settled = time.time_ns() - status.st_mtime_ns > SETTLED_NS
            self._stamp = stamp if is_settled else None
        return self._parsed

    def _read(self, status: os.stat_result) -> Parsed[T]:
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return self._nothing, KeyFileError(self.path, "others may write it; run chmod go-w on it")
        try:
            return self._parse(self.path)
        except (OSError, ValueError) as error:
            return self._nothing, KeyFileError(self.path, str(error))
