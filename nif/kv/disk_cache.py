"""DiskCache: blocks of the prefix cache in a folder, so that a prompt is not evaluated again after a restart.

    disk = DiskCache(folder, identity, max_bytes, block_bytes)
    disk.follow(copy, is_same)
    disk.offer(name, block, version)  # writes a block that became whole, on a thread of its own
    disk.num_known(names)             # how many of the first blocks are on disk
    disk.read(names)                  # their content, up to the first that is missing or damaged

A file holds one block, and the block's name is the file's name: SHA-256 over the tenant, the adapter and all tokens up
to the block's end. Each identity (model, format, kernels) has a folder of its own. A file begins with SHA-256 over its
name and content, so a damaged, half-written or renamed file is a miss. Files are written under another name and
renamed. Several processes may share the folder.

The bound counts the files of all identities. One process at a time removes the files that were used longest ago.
"""

import errno
import hashlib
import logging
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from genbatch.nif.trusted_files import NotOurs, is_private, last_used_ns, private_folder

log = logging.getLogger("genbatch")

_DIGEST_BYTES = 32
_ENDING = ".block"
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(r"[0-9a-f]{64}\.block")
_PARTIAL = re.compile(r"tmp\w+\.partial")
_MAX_QUEUED = 1 << 14  # blocks that wait to be written; later ones are left out
_PAUSE_S = 60.0  # after an error the disk gets no blocks for so long
_READ_S = 1.0  # the longest wait for a prompt's blocks
_LEFT_SHARE = 0.9  # the share of the bound that stays when files are removed
_UNCOUNTED_SHARE = 0.05  # the share of the bound that is written before the files of all processes are counted again
_STALE_S = 3600.0  # a partial file of this age has no writer any more

Copy = Callable[[int], bytes]
IsSame = Callable[[int, int], bool]


class DiskCache:
    """Blocks in a folder; any thread may use it.

    Args:
        folder: the operator's folder, made if it is missing.
        identity: a digest of the model, its format and the kernels; see `fingerprint`.
        max_bytes: the bound of the folder.
        block_bytes: bytes of a block.

    Attributes:
        num_read: blocks that were read.
        num_written: blocks that were written.
        num_damaged: files with other content than was written.
        num_errors: errors of the disk.

    Raises:
        NotOurs: another user could write to the folder.
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, identity: str, max_bytes: int, block_bytes: int) -> None:
        self.num_read = self.num_written = self.num_damaged = self.num_errors = 0
        self._root = private_folder(folder)
        self._folder = private_folder(folder / identity[:32])
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._copy: Copy = lambda block: b""
        self._is_same: IsSame = lambda block, version: False
        self._known: set[bytes] = set()
        self._uncounted = 0  # bytes that were written since the files were counted
        self._queue: queue.SimpleQueue[tuple[bytes, int, int] | None] = queue.SimpleQueue()
        self._copying = threading.Lock()
        self._closed = False
        self._retry_at = 0.0
        self._logged: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="prefix cache on disk", daemon=True)
        self._thread.start()

    def follow(self, copy: Copy, is_same: IsSame) -> None:
        """Set the functions that read the pool.

        Args:
            copy: returns a block's content; it runs beside steps.
            is_same: whether a block still has the version that `offer` was called with.
        """
        self._copy, self._is_same = copy, is_same

    # Writing

    def offer(self, name: bytes, block: int, version: int) -> None:
        """Queue a block that became whole; a block that loses its content before its turn is left out."""
        fits = _DIGEST_BYTES + self._block_bytes <= self._max_bytes
        if fits and name not in self._known and self._queue.qsize() < _MAX_QUEUED:
            self._queue.put((name, block, version))

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the queued blocks, for `timeout_s` at most, and stop reading the pool."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        with self._copying:
            self._closed = True

    def _work(self) -> None:
        self._find()
        while (offered := self._queue.get()) is not None and not self._closed:
            name, block, version = offered
            if name in self._known or time.monotonic() < self._retry_at:
                continue
            with self._copying:
                if self._closed:
                    return
                content = self._copy(block)
                # guard: a block that was overwritten during the copy
                if not self._is_same(block, version):
                    continue
            try:
                self._write(name, content)
            except (NotOurs, OSError) as fault:
                self._failed("takes no blocks", fault)

    def _find(self) -> None:
        """Learn which blocks earlier processes have written."""
        try:
            for entry in os.scandir(self._folder):
                if _BLOCK.fullmatch(entry.name):
                    self._known.add(bytes.fromhex(entry.name.removesuffix(_ENDING)))
            self._make_room()
        except OSError as fault:
            self._failed("cannot be tidied", fault)

    def _write(self, name: bytes, content: bytes) -> None:
        if not self._folder.is_dir():  # someone has emptied the operator's folder
            self._known.clear()
            private_folder(self._root)
            private_folder(self._folder)
        size = _DIGEST_BYTES + len(content)
        self._uncounted += size
        if self._uncounted > _UNCOUNTED_SHARE * self._max_bytes:
            self._make_room(size)
        descriptor, partial = tempfile.mkstemp(dir=self._folder, suffix=".partial")  # for this user alone
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_digest(name, content))
                file.write(content)
            Path(partial).replace(self._path(name))
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        self._known.add(name)
        self.num_written += 1

    def _make_room(self, size: int = 0) -> None:
        """Remove the blocks of all identities that were used longest ago, so that `size` bytes fit within the bound."""
        try:
            # guard: one process makes room for blocks at a time
            with FileLock(self._root / "lock", timeout=0):
                blocks = sorted(self._all_blocks())
                size += sum(block[1] for block in blocks)
                self._uncounted = 0
                if size <= (1 - _UNCOUNTED_SHARE) * self._max_bytes:
                    return
                for _, count, path in blocks:
                    if size <= _LEFT_SHARE * self._max_bytes:
                        break
                    Path(path).unlink(missing_ok=True)
                    size -= count
                    self._known.discard(bytes.fromhex(Path(path).stem))
        except Timeout:  # another process makes room
            return

    def _all_blocks(self) -> Iterator[tuple[int, int, str]]:
        """Yield time, size and path of all blocks; remove the partial files of killed writers.

        The operator may have named a folder with other content: a mount point has lost+found, for example.
        """
        for folder in os.scandir(self._root):
            # guard: other files in the folder of the prefix cache
            if not (_IDENTITY.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                continue
            for entry in os.scandir(folder.path):
                with suppress(FileNotFoundError):  # another process has renamed or removed it
                    status = entry.stat(follow_symlinks=False)
                    if _BLOCK.fullmatch(entry.name):
                        yield last_used_ns(status), status.st_size, entry.path
                    elif _PARTIAL.fullmatch(entry.name) and status.st_mtime < time.time() - _STALE_S:
                        Path(entry.path).unlink(missing_ok=True)

    # Reading

    def num_known(self, names: Sequence[bytes]) -> int:
        """Return how many of the first blocks seem to be on disk."""
        count = next((index for index, name in enumerate(names) if name not in self._known), len(names))
        return 0 if self._closed else count

    def read(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the blocks' content up to the first that is missing or damaged, or that would take too long."""
        contents: list[bytes] = []
        began = time.monotonic()
        for name in names:
            try:
                content = self._read(name)
            except FileNotFoundError:  # another process made room
                content = None
            except OSError as fault:
                self._failed("cannot be read", fault)
                content = None
            if content is None:
                self._known.discard(name)
                break
            contents.append(content)
            self.num_read += 1
            if time.monotonic() - began > _READ_S:
                warning = "the prefix cache on disk %s is slow: %d blocks took more than %g s"
                self._tell("slow", warning, len(contents), _READ_S)
                break
        return contents

    def _read(self, name: bytes) -> bytes | None:
        path = self._path(name)
        # Do not block: the path may be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            size = _DIGEST_BYTES + self._block_bytes
            # guard: a block that others could have written
            if not is_private(status) or status.st_size != size:
                self._damaged(path)
                return None
            data = file.read(size)
        content = data[_DIGEST_BYTES:]
        # guard: a damaged block
        if data[:_DIGEST_BYTES] != _digest(name, content):
            self._damaged(path)
            return None
        with suppress(OSError):  # a read-only disk
            os.utime(path)  # the files that were used last stay
        return content

    def _damaged(self, path: Path) -> None:
        self.num_damaged += 1
        self._tell("damaged", "the prefix cache on disk %s has a damaged block %s, which is evaluated anew", path.name)
        with suppress(OSError):
            path.unlink()

    # Helpers

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{_ENDING}"

    def _failed(self, what: str, fault: NotOurs | OSError) -> None:
        self.num_errors += 1
        self._retry_at = time.monotonic() + _PAUSE_S
        reason = errno.errorcode.get(getattr(fault, "errno", None) or 0, "an error")
        self._tell(reason, f"the prefix cache on disk %s {what}: %s", fault)

    def _tell(self, what: str, text: str, *arguments: object) -> None:
        """Log a fault once."""
        if what not in self._logged:
            self._logged.add(what)
            log.warning(text, self._folder, *arguments)


def _digest(name: bytes, content: bytes) -> bytes:
    return hashlib.sha256(name + content).digest()
