"""SessionFiles: the sessions of a service, in the operator's folder.

    files = SessionFiles(Path(folder), max_bytes)
    files.write(request, state)      # KeepSessionRequest: writes the whole file, or leaves the earlier one
    files.read(request)              # ResumeSessionRequest

A session is FOLDER/TENANT/NAME.session, and TENANT is a digest of the tenant's name. A client gives names, which the
protocol checks, and never paths. A file begins with the SHA-256 of its other bytes. A session can set any state of the
model, so only this user may write to the folder. When the folder would exceed `max_bytes`, the tenant with the most
bytes loses the session that was used longest ago.
"""

import hashlib
import os
import re
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from genbatch.nif.trusted_files import NotOurs, is_private, last_used_ns, private_folder
from genbatch.proto.errors import InvalidRequest, Unavailable
from genbatch.proto.messages import KeepSessionRequest, ResumeSessionRequest, SessionRequest
from genbatch.proto.validation import validate_session

_ENDING = ".session"
_DIGEST_BYTES = 32
_TENANT = "[0-9a-f]" * 32
_PARTIAL = re.compile(r"tmp\w+\.partial")
# Seconds to wait for the lock. Another service over the same folder may be writing a gigabyte.
_LOCK_S = 10.0
# Milliseconds after which to retry when the disk refuses.
_RETRY_AFTER_DISK_MS = 30_000


class SessionFiles:
    """Reads and writes sessions; use it on one thread.

    Args:
        folder: the operator's folder; it is made when the first session is written.
        max_bytes: the most bytes of all sessions together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def write(self, request: KeepSessionRequest, state: bytes) -> int:
        """Write a session in place of an earlier one of its name; returns its bytes.

        Raises:
            InvalidRequest: it is larger than the folder may be.
            Unavailable: the disk is full or read-only, or another user could write to the folder.
        """
        size = _DIGEST_BYTES + len(state)
        # guard: the bound of sessions
        if size > self._max_bytes:
            raise InvalidRequest("messages", f"the session takes {size} bytes; session_space allows {self._max_bytes}")
        try:
            path = self._path(request)
            private_folder(self._folder)
            # One service writes at a time, so a partial file is one that a killed service has left.
            with FileLock(self._folder / "lock", timeout=_LOCK_S):
                self._make_room(size, path)
                self._write(path, state)
        except NotOurs as fault:
            raise _not_kept("other users may write to its folder") from fault
        except OSError as fault:
            raise _not_kept(fault.strerror or str(fault)) from fault
        return size

    def _write(self, path: Path, state: bytes) -> None:
        folder = private_folder(path.parent)
        descriptor, partial = tempfile.mkstemp(dir=folder, suffix=".partial")  # for this user alone
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(state).digest())
                file.write(state)
                file.flush()
                os.fsync(descriptor)
            Path(partial).replace(path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise

    def read(self, request: ResumeSessionRequest) -> bytes:
        """Return the bytes of a session.

        Raises:
            InvalidRequest: there is no such session, or it is damaged.
            Unavailable: the disk gives an error.
        """
        path = self._path(request)
        try:
            private_folder(self._folder)
            # The path may be a pipe.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                # guard: a session that others could have written
                if not is_private(status):
                    raise InvalidRequest("name", f"another user could have written the session {request.name!r}")
                data = file.read()
        except FileNotFoundError:
            raise InvalidRequest("name", f"there is no session {request.name!r}") from None
        except (NotOurs, OSError) as fault:
            raise Unavailable("the session cannot be read", retry_after_ms=_RETRY_AFTER_DISK_MS) from fault
        # guard: a damaged session
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            raise InvalidRequest("name", f"the session {request.name!r} is damaged; keep it again")
        with suppress(OSError):  # a read-only disk
            os.utime(path)  # the sessions that were used last stay
        return data[_DIGEST_BYTES:]

    def _path(self, request: SessionRequest) -> Path:
        validate_session(request)
        tenant = hashlib.sha256(request.tenant.encode()).hexdigest()[:32]
        return self._folder / tenant / f"{request.name}{_ENDING}"

    def _make_room(self, size: int, replaced: Path) -> None:
        """Remove partial files of interrupted writes, and then sessions until `size` bytes fit.

        Other content of the operator's folder stays.
        """
        files: dict[Path, os.stat_result] = {}
        for path in self._folder.glob(f"{_TENANT}/*"):
            if _PARTIAL.fullmatch(path.name):
                path.unlink(missing_ok=True)
            elif path.suffix == _ENDING and path != replaced:
                files[path] = path.lstat()
        sizes = Counter[Path]()
        for path, status in files.items():
            sizes[path.parent] += status.st_size
        while sizes.total() + size > self._max_bytes:
            [(tenant, _)] = sizes.most_common(1)
            oldest = min((path for path in files if path.parent == tenant), key=lambda path: last_used_ns(files[path]))
            sizes[tenant] -= files.pop(oldest).st_size
            oldest.unlink(missing_ok=True)


def _not_kept(reason: str) -> Unavailable:
    return Unavailable(f"the session cannot be kept: {reason}", retry_after_ms=_RETRY_AFTER_DISK_MS)
