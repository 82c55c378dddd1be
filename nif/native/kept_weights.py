"""Kept weights: a model's packed weights in a file, so that the next engine maps them and packs nothing.

    place = kept_place(model.identity, "int8", library)
    kept = open_weights(place, library)              # None if the file is missing or damaged
    keep_in_background(place, struct, arena, library, max_bytes)   # after packing

The file's name is a digest of the model's files, of this code and of the kernels, which are compiled for this CPU. A
file is mapped only if no other user could have written it, and if its checksums are right. It is written under another
name and then renamed, so a file is complete or missing. Engines map it shared, so all engines on a machine need the
memory once.

    genbatch weights 1 DIGEST LENGTH \\n
    head        JSON: the key, the weights' spans with their checksums, the lengths of image and pointers
    image       the structs for C, one after another; their pointers are zero
    pointers    [pointers, 3] int64: the place in the image, the target (WEIGHTS or IMAGE), and the place in the target
    weights     at the next multiple of 2 MiB: the packed memory

The digest (SHA-256) covers everything between itself and the weights.
"""

import atexit
import ctypes
import errno
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock

from genbatch.nif.host import available_cores
from genbatch.nif.models.model_source import cache_directory
from genbatch.nif.native.library import ModelStruct, NativeArena
from genbatch.nif.trusted_files import NotOurs, is_ours, last_used_ns, private_folder

log = logging.getLogger("genbatch")

_MAGIC = b"genbatch weights 1"
_ENDING = ".weights"
_ALIGNMENT = 1 << 21  # the size of a huge page, which a file system with large folios maps whole
_SPAN = 1 << 24  # bytes with one checksum
_MAX_HEAD = 1 << 30
EXIT_S = 10.0  # seconds that a program waits at its end until its packed weights are written
_WEIGHTS, _IMAGE = range(2)
# The lengths of arrays that a struct points to, by the pointer's name: a field of the struct or of the model. Other
# pointers are addresses of numbers, or point to a single struct.
_LENGTHS = {
    "layers": "num_layers",
    "parts": "num_parts",
    "gate_up": "count",
    "down": "count",
    **dict.fromkeys(("meet", "give"), "num_heads"),
    "merge": "num_streams",
}
_SINGLE = ("recurrence", "latent", "experts", "altup", "pair", "clusters", "predictor")


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Mapped weights, and the structs that point into them.

    Args:
        struct: the model.
        num_bytes: the size of the mapped weights.
        memory: the objects that own the memory.
    """

    struct: ModelStruct
    num_bytes: int
    memory: Sequence[Any]


def kept_place(identity: str, form: str, library: ctypes.CDLL) -> Path:
    """Return the path of a model's packed weights.

    Args:
        identity: a digest of the model's files and of this code; see `files_identity`.
        form: dtype and quantisation.
        library: the result of `native_library`.
    """
    digest = hashlib.sha256(kernels_digest(library).encode())
    for part in (identity, form):
        digest.update(part.encode() + b"\0")
    return cache_directory() / "packed" / f"{digest.hexdigest()[:32]}{_ENDING}"


def kernels_digest(library: ctypes.CDLL) -> str:
    """Return a digest of the compiled kernels, and of the kernels that they choose on this CPU."""
    chosen = f"digits {library.digits_pay()}"
    return hashlib.sha256(Path(library._name).read_bytes() + chosen.encode()).hexdigest()


# Reading


def open_weights(place: Path, library: ctypes.CDLL) -> KeptWeights | None:
    """Map a file that exists, is ours and is complete; else return None."""
    try:
        if not is_ours(place):
            return None
        with place.open("rb") as file:
            kept = _opened(place, file, library)
        with suppress(OSError):  # a read-only disk
            os.utime(place)  # the most recently used files stay
        return kept
    except (OSError, ValueError, KeyError, TypeError, IndexError) as fault:
        if isinstance(fault, OSError) and fault.errno != errno.EIO:
            log.debug("%s is not mapped: %s", place, fault)
            return None
        log.warning("the packed weights %s are damaged and will be packed again: %s", place, fault)
        with suppress(OSError):
            place.unlink()  # so that the new weights are kept
    return None


def _opened(place: Path, file: BinaryIO, library: ctypes.CDLL) -> KeptWeights:
    """Map a file's weights.

    Raises:
        ValueError, KeyError, TypeError, IndexError: the file is damaged.
        OSError: the file cannot be read.
    """
    line = file.readline(256).removesuffix(b"\n")
    magic, digest, length = line.rsplit(b" ", 2)
    start, size = len(line) + 1, int(length)
    rest = file.read(size) if 0 <= size <= _MAX_HEAD else b""
    # guard: a damaged head of kept weights
    if magic != _MAGIC or not rest or hashlib.sha256(rest).hexdigest().encode() != digest:
        raise ValueError("the digest of its head is wrong")
    words, data = rest.split(b"\n", 1)
    head = json.loads(words)
    # guard: weights of another model
    if head["key"] != place.stem:
        raise ValueError("it belongs to another model or format")
    mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    content = np.frombuffer(mapped, np.uint8)
    begin = _padded(start + size)
    address = content.ctypes.data + begin
    if begin + max(at + count for at, count, _ in head["spans"]) > len(content):
        raise ValueError("it is cut short")

    def is_right(span: tuple[int, int, int]) -> bool:
        at, count, checksum = span
        # guard: weights that the disk cannot read
        if not library.readable(address + at, count):
            raise OSError(errno.EIO, "the disk cannot read its weights")
        return bool(library.checksum(address + at, count) == checksum)

    with ThreadPoolExecutor(available_cores()) as threads:
        # guard: damaged weights
        if not all(threads.map(is_right, head["spans"])):
            raise ValueError("a checksum of its weights is wrong")
    image = bytearray(data[: head["image"]])
    pointers = np.frombuffer(data, np.int64, offset=head["image"]).reshape(-1, 3)
    bases = np.array([address, ctypes.addressof(ctypes.c_char.from_buffer(image))])
    np.frombuffer(image, np.int64)[pointers[:, 0] // 8] = bases[pointers[:, 1]] + pointers[:, 2]
    struct = ModelStruct.from_buffer(image)
    return KeptWeights(struct, sum(count for _, count, _ in head["spans"]), (mapped, content, image))


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


# Writing


class _Image:
    """The structs for C, copied one after another, and the places of their pointers.

    Args:
        struct: the model.
        parts: the memory of its weights.
    """

    def __init__(self, struct: ModelStruct, parts: Sequence[np.ndarray]) -> None:
        self._model = struct
        self.data = bytearray()
        self.pointers: list[tuple[int, int, int]] = []
        self.offsets = []  # of the parts among the weights
        end = 0
        for part in parts:
            self.offsets.append(end)
            end += _padded(len(part))
        ends = zip(parts, self.offsets, strict=True)
        self._parts = [(part.ctypes.data, len(part), offset) for part, offset in ends]
        self._add(struct)

    def _add(self, struct: Any) -> int:
        at = len(self.data)
        self.data += bytes(struct)
        self._point(struct, at)
        return at

    def _point(self, struct: Any, at: int) -> None:
        """Add the pointers of a struct, or of an array of structs, at the place `at` in the image."""
        if isinstance(struct, ctypes.Array):
            for index, item in enumerate(struct):
                self._point(item, at + index * ctypes.sizeof(item))
            return
        for name, kind in struct._fields_:
            place, value = at + getattr(type(struct), name).offset, getattr(struct, name)
            if issubclass(kind, ctypes.Structure):
                self._point(value, place)
            elif kind is ctypes.c_void_p:
                if value is not None:
                    self.pointers.append((place, _WEIGHTS, self._offset(value)))
            elif issubclass(kind, ctypes._Pointer) and value:
                assert name in _LENGTHS or name in _SINGLE, f"the number of structs at {name} is unknown"
                length = _LENGTHS.get(name)
                count = 1 if length is None else getattr(struct if hasattr(struct, length) else self._model, length)
                array = ctypes.cast(value, ctypes.POINTER(kind._type_ * count)).contents
                self.pointers.append((place, _IMAGE, self._add(array)))

    def _offset(self, address: int) -> int:
        for begin, size, offset in self._parts:
            if begin <= address < begin + size:
                return offset + address - begin
        raise AssertionError("a pointer of the model is outside its packed weights")


def keep_weights(
    place: Path,
    struct: ModelStruct,
    arena: NativeArena,
    library: ctypes.CDLL,
    max_bytes: int,
    rest: Callable[[float], object],
) -> None:
    """Write packed weights to `place`; logs the reason if they cannot be written.

    Args:
        struct: the model, with pointers into `arena`.
        max_bytes: most bytes of all kept weights; the least recently used files are removed.
        rest: sleeps for some seconds; called between two pieces of the weights.
    """
    try:
        private_folder(place.parent)
        # guard: one writer of kept weights at a time
        with FileLock(place.parent / "lock"):
            if not (place.is_file() and is_ours(place)):
                place.unlink(missing_ok=True)
                _write(place, struct, arena, library, max_bytes, rest)
    except (NotOurs, OSError) as fault:
        log.warning("the packed weights are not kept, so the next start is slower: %s", fault)


def keep_in_background(
    place: Path, struct: ModelStruct, arena: NativeArena, library: ctypes.CDLL, max_bytes: int
) -> threading.Thread:
    """Call `keep_weights` on a thread, for which the process waits EXIT_S seconds at its end."""
    ends = threading.Event()
    arguments = (place, struct, arena, library, max_bytes, ends.wait)
    thread = threading.Thread(target=keep_weights, args=arguments, name="keep weights", daemon=True)
    thread.start()
    atexit.register(_finish, thread, ends)
    return thread


def _finish(thread: threading.Thread, ends: threading.Event) -> None:
    """Wait for the thread, which from now on writes without rests."""
    ends.set()
    thread.join(EXIT_S)
    if thread.is_alive():
        log.warning("the packed weights are not kept: writing them at the program's end takes more than %g s", EXIT_S)


def _write(
    place: Path,
    struct: ModelStruct,
    arena: NativeArena,
    library: ctypes.CDLL,
    max_bytes: int,
    rest: Callable[[float], object],
) -> None:
    parts = arena.parts()
    image = _Image(struct, parts)
    total = sum(map(_padded, map(len, parts)))
    if not _make_room(place.parent, total, max_bytes):
        return
    spans = []
    for part, offset in zip(parts, image.offsets, strict=True):
        for at in range(0, len(part), _SPAN):
            count = min(_SPAN, len(part) - at)
            spans.append((offset + at, count, library.checksum(part.ctypes.data + at, count)))
    pointers = np.array(image.pointers, np.int64).tobytes()
    head = json.dumps({"key": place.stem, "spans": spans, "image": len(image.data)}).encode()
    described = head + b"\n" + bytes(image.data) + pointers
    line = b"%s %s %d\n" % (_MAGIC, hashlib.sha256(described).hexdigest().encode(), len(described))
    descriptor, name = tempfile.mkstemp(dir=place.parent, suffix=".partial")  # for this user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(line + described)
            begin = _padded(len(line) + len(described))
            for piece, at in _pieces(parts, image.offsets, rest):
                file.seek(begin + at)
                file.write(piece.data)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(place)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _pieces(
    parts: Sequence[np.ndarray], offsets: Sequence[int], rest: Callable[[float], object]
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the weights in pieces, and rest as long as each piece took, because requests need the cores, too."""
    for part, offset in zip(parts, offsets, strict=True):
        for at in range(0, len(part), _SPAN):
            began = time.monotonic()
            yield part[at : at + _SPAN], offset + at
            rest(time.monotonic() - began)


def _make_room(folder: Path, size: int, max_bytes: int) -> bool:
    """Remove the least recently used files and remains of interrupted writes; returns whether `size` bytes fit."""
    free = shutil.disk_usage(folder).free
    # guard: the bound of kept weights
    if size > max_bytes:
        message = "the packed weights take %d MB and are not kept: weights_cache allows %d MB"
        log.info(message, size >> 20, max_bytes >> 20)
        return False
    if size > free:
        raise OSError(f"{folder} has {free >> 20} MB free, and the weights take {size >> 20} MB")
    for left in folder.glob("*.partial"):
        left.unlink(missing_ok=True)
    kept = sorted(folder.glob(f"*{_ENDING}"), key=lambda path: last_used_ns(path.stat()), reverse=True)
    for path in kept:
        size += path.stat().st_size
        if size > max_bytes:
            with suppress(OSError):
                path.unlink()  # engines that have mapped the file keep its content
    return True
