"""BatchStore: uploaded files and batches, in a directory that outlives the service.

    DIR/files/file-ID          an uploaded file, or the answers of a batch
    DIR/files/file-ID.json     its name, purpose and owner
    DIR/batches/batch_ID.json  a batch's state, written anew at each change

A batch's answers are appended line by line, so a restarted service continues after the last whole line.

The methods read and write files. The event loop calls them by `BatchStore.run`, which uses a thread.
"""

import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import trio
from filelock import FileLock, Timeout

from genbatch.actors.gateways.http.bodies import Refusal
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import InvalidRequest, Unavailable

# The most bytes of all files together. An upload beyond this is refused until files are deleted.
MAX_STORE_BYTES = 2**30
Status = Literal["validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"]
# The states of a batch that has not ended.
OPEN: tuple[Status, ...] = ("validating", "in_progress", "cancelling")


class StoredFile(msgspec.Struct):
    """A file, as the API shows it, and its owner.

    Args:
        owner: the caller who may read and delete it.
        bytes: its size.
        created_at: seconds since 1970.
        filename: the name that it was uploaded with; no path of this machine.
    """

    id: str
    owner: str
    bytes: int
    created_at: int
    filename: str
    purpose: str


class Counts(msgspec.Struct):
    """Counts of a batch's requests."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct):
    """A batch's state.

    Args:
        owner: the caller who may see and cancel it.
        tenant: the tenant of its requests.
        ended_at: seconds since 1970; the status tells how it ended.
        errors: the reasons why no request was evaluated.
    """

    id: str
    owner: str
    tenant: str | None
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    counts: Counts = msgspec.field(default_factory=Counts)
    errors: list[dict[str, Any]] = []
    metadata: dict[str, str] | None = None


T = TypeVar("T", StoredFile, Batch)
R = TypeVar("R")
logger = logging.getLogger(__name__)
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")


class BatchStore:
    """Opens the directory for this process alone; `close` unlocks it for others.

    Args:
        directory: a missing directory is made; no other user may read it.
        waits: whether to wait for a service that still uses the directory, because this service replaces it.

    Raises:
        OptionError: others can read the directory, it cannot be made, or another service uses it.
    """

    def __init__(self, directory: Path, *, waits: bool = False) -> None:
        self._files, self._batches = directory / "files", directory / "batches"
        try:
            for folder in (directory, self._files, self._batches):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.stat()
        except OSError as error:
            raise OptionError("batch_dir", f"{directory} cannot be made: {error.strerror}") from error
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise OptionError("batch_dir", f"{directory} is not a directory of this user alone (mode 0700)")
        self._turns = trio.CapacityLimiter(1)
        self._unsaved: dict[str, Batch] = {}  # ended batches that the disk has no room for
        self._lock = FileLock(directory / "lock", thread_local=False)  # its calls run on several threads
        if not self.acquire() and not waits:
            raise OptionError("batch_dir", f"another service uses {directory}")

    def acquire(self) -> bool:
        """Lock the directory if no other service has it; return whether this service has the lock."""
        if not self._lock.is_locked:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                return False
        return True

    def check_ours(self) -> None:
        """Check that this service holds the directory's lock.

        Raises:
            Unavailable: another service has the directory, so nothing may be written there.
        """
        if not self._lock.is_locked:
            raise Unavailable("another service has the files and batches for now", retry_after_ms=1000)

    def close(self) -> None:
        """Unlock the directory for another service."""
        self._lock.release()

    async def run(self, work: Callable[..., R], *args: Any) -> R:
        """Call a function on a thread; the calls of a store run one after another.

        Raises:
            Unavailable: the operating system refuses, such as for a full disk.
        """
        try:
            return await trio.to_thread.run_sync(partial(work, *args), limiter=self._turns)
        except OSError as error:
            raise Unavailable(f"the batch directory cannot be used: {error.strerror}", retry_after_ms=1000) from error

    # Files

    def add_file(self, owner: str, filename: str, purpose: str, content: bytes) -> StoredFile:
        """Store a file.

        Raises:
            InvalidRequest: there is no room for it.
            Unavailable: another service has the directory.
        """
        self.check_ours()
        num_bytes = sum(path.stat().st_size for path in self._files.iterdir())
        if num_bytes + len(content) > MAX_STORE_BYTES:
            raise InvalidRequest("file", f"{num_bytes} of {MAX_STORE_BYTES} bytes are in use: delete files first")
        stored = StoredFile(_new_id("file-"), owner, len(content), int(time.time()), filename, purpose)
        try:
            self.path(stored.id).write_bytes(content)
            _write(self._files / f"{stored.id}.json", stored)
        except OSError:
            self.path(stored.id).unlink(missing_ok=True)
            raise
        return stored

    def append(self, file_id: str, data: bytes) -> None:
        """Append to a file: all of the data, or nothing."""
        with self.path(file_id).open("ab", buffering=0) as file:
            before = file.tell()
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(before)
                raise

    def file(self, owner: str, file_id: str) -> StoredFile:
        """Return a file of the owner, with its current size.

        Raises:
            Refusal: there is none of this id.
        """
        stored = _read(self._files, file_id, owner, StoredFile, "file")
        stored.bytes = self.size(file_id)
        return stored

    def files(self, owner: str) -> list[StoredFile]:
        """Return the owner's files, the newest first."""
        stored = [self.file(owner, file.id) for file in _all(self._files, StoredFile) if file.owner == owner]
        return sorted(stored, key=lambda file: (-file.created_at, file.id))

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._files / file_id

    def size(self, file_id: str) -> int:
        """Return a file's size in bytes."""
        return self.path(file_id).stat().st_size

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file.

        Raises:
            Refusal: the owner has no such file.
            InvalidRequest: a batch that has not ended needs it.
            Unavailable: another service has the directory.
        """
        self.check_ours()
        self.file(owner, file_id)
        if any(
            file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id) for batch in self.open_batches()
        ):
            raise InvalidRequest("file_id", "a batch that has not ended needs this file")
        (self._files / f"{file_id}.json").unlink()
        self.path(file_id).unlink()

    # Batches

    def save(self, batch: Batch) -> None:
        """Store a batch's current state."""
        _write(self._batches / f"{batch.id}.json", batch)

    def end(self, batch: Batch) -> None:
        """Keep the state of a batch that has ended, and delete its result files without content.

        If the disk is full, the state stays in memory. A service that starts again then goes on with the batch.
        """
        self._unsaved[batch.id] = batch
        try:
            results = [result for result in (batch.output_file_id, batch.error_file_id) if result is not None]
            empty = [result for result in results if not self.size(result)]
            batch.output_file_id = None if batch.output_file_id in empty else batch.output_file_id
            batch.error_file_id = None if batch.error_file_id in empty else batch.error_file_id
            for unsaved in list(self._unsaved.values()):
                self.save(unsaved)
                del self._unsaved[unsaved.id]
            for file_id in empty:
                self.delete_file(batch.owner, file_id)
        except OSError:
            logger.exception("the state of batch %s cannot be written", batch.id)

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Return a batch of the owner.

        Raises:
            Refusal: there is none of this id.
        """
        saved = _read(self._batches, batch_id, owner, Batch, "batch")
        return self._unsaved.get(batch_id, saved)

    def batches(self, owner: str) -> list[Batch]:
        """Return the owner's batches, the newest first."""
        batches = [batch for batch in self._all_batches() if batch.owner == owner]
        return sorted(batches, key=lambda batch: (-batch.created_at, batch.id))

    def open_batches(self) -> list[Batch]:
        """Return the batches of all owners that have not ended, the oldest first."""
        batches = [batch for batch in self._all_batches() if batch.status in OPEN]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id))

    def _all_batches(self) -> Iterator[Batch]:
        return (self._unsaved.get(batch.id, batch) for batch in _all(self._batches, Batch))

    def result_file(self, batch: Batch, kind: str) -> str:
        """Return the id of a new, empty file for a batch's answers or errors."""
        return self.add_file(batch.owner, f"{batch.id}_{kind}.jsonl", "batch_output", b"").id


def new_batch_id() -> str:
    """Return an id that no batch has."""
    return _new_id("batch_")


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def _write(path: Path, state: StoredFile | Batch) -> None:
    """Replace a file as a whole, so that a kill leaves the old state or the new one."""
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.encode(state))
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _read(folder: Path, name: str, owner: str, kind: type[T], what: str) -> T:
    # guard: ids that are paths
    if _ID.fullmatch(name):
        try:
            record = msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=kind)
        except FileNotFoundError:
            pass
        else:
            # guard: another owner's files and batches
            if record.owner == owner:
                return record
    raise Refusal(HTTPStatus.NOT_FOUND, "not_found", f"there is no {what} {name[:64]!r}")


def _all(folder: Path, kind: type[T]) -> Iterator[T]:
    for path in folder.glob("*.json"):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=kind)
        except (msgspec.DecodeError, FileNotFoundError) as error:  # damaged, or just deleted
            logger.warning("%s cannot be read: %s", path, error)
