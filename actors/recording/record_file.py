"""The file of a flight record: a first line, then frames of length, CRC-32 and a record in msgpack."""

import os
import struct
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO

import msgspec

from genbatch.actors.recording.records import Record

MAGIC = b"genbatch flight record\n"
_FRAME = struct.Struct("<II")
MAX_RECORD = 2**28


class RecordError(Exception):
    """A file is no flight record, or cannot be played."""


class RecordWriter:
    """Appends records to a new file that its owner alone may read; never to one that is there.

    Args:
        path: taken as it is, or with ".1", ".2", … where such a file is there already.
        max_bytes: after which nothing is written.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path, self._file = _create(path)
        self._left = max_bytes - self._file.write(MAGIC)
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, record: Record) -> bool:
        """Buffers one record; returns whether there was room for it."""
        data = self._encoder.encode(record)
        self._left -= _FRAME.size + len(data)
        if self._left < 0:
            return False
        self._file.write(_FRAME.pack(len(data), zlib.crc32(data)) + data)
        return True

    def flush(self) -> None:
        """Hands the buffer to the system, so that it outlives the process."""
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes."""
        self._file.close()


def _create(path: str) -> tuple[str, BinaryIO]:
    for number in count():
        name = f"{path}.{number}" if number else path
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        return name, os.fdopen(descriptor, "wb", buffering=2**16)
    raise AssertionError


class RecordReader:
    """The records of a file, up to its end or its first damage; `fault` then says where and what.

    Args:
        path: of the file.

    Raises:
        RecordError: it is no flight record.
    """

    def __init__(self, path: Path) -> None:
        self.fault: str | None = None
        try:
            self._data = path.read_bytes()
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror}") from error
        if not self._data.startswith(MAGIC):
            raise RecordError(f"{path} is no flight record")

    def __iter__(self) -> Iterator[Record]:
        data, at = memoryview(self._data), len(MAGIC)
        decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
        for number in count(1):
            if at == len(data):
                return
            begin = at + _FRAME.size
            length, check = _FRAME.unpack_from(data, at) if begin <= len(data) else (0, 0)
            if begin > len(data) or (begin + length > len(data) and length <= MAX_RECORD):
                self.fault = f"the file ends inside record {number}, at byte {at} (its writer was killed)"
                return
            payload = data[begin : begin + length]
            if length > MAX_RECORD or zlib.crc32(payload) != check:
                self.fault = f"record {number}, at byte {at}, is damaged; nothing after it is read"
                return
            try:
                yield decoder.decode(payload)
            except msgspec.DecodeError as error:
                self.fault = f"record {number}, at byte {at}, is of another version of genbatch: {error}"
                return
            at = begin + length
