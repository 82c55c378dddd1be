"""Trusted files: files that only this user, or root, could have created or changed.

    folder = private_folder(cache / "native")     # made for this user alone where it is missing
    if is_ours(folder / "kernels.so"): ...

A library that is loaded from a cache runs with this user's rights. So another user must not own the file, and must not
be able to rename or link it. Every folder and every link on the path counts. A folder with the sticky bit, such as
/tmp, protects each user's files from other users, so the path may lead through it.
"""

import grp
import os
import pwd
import stat
import time
from pathlib import Path

from genbatch.nif.errors import NativeError

# As many links as the kernel follows.
_MAX_LINKS = 40
_CLOCK_SLACK_NS = 60 * 10**9  # a clock that is set by so little changes no order that matters


class NotOurs(NativeError):
    """Another user could have written the file; the message says who, where, and what to do."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}: genbatch does not trust this file")
        self.path = path


def private_folder(path: Path) -> Path:
    """Return `path` as a folder that only this user may write to; create missing folders.

    If others may write to the user's own folder, their permission is removed. `is_ours` then finds files that they
    left there.

    Raises:
        NotOurs: another user owns the folder or a folder on the path, or may write to it.
        OSError: the file system refuses.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid == os.geteuid() and _may_others_write(status):
        path.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
    check_ours(path)
    return path


def is_ours(path: Path) -> bool:
    """Return whether a file, or a folder with its whole content, exists and is trusted."""
    try:
        check_ours(path)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            return all(is_ours(child) for child in path.iterdir())
        return stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    except (NotOurs, FileNotFoundError):
        return False


def is_private(status: os.stat_result) -> bool:
    """Return whether only this user, or root, could have written an open file in a private folder."""
    is_own = status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
    return is_own and stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def last_used_ns(status: os.stat_result) -> int:
    """Return when a file was last used, in ns since 1970, so that the files that were used longest ago are removed.

    A time that lies ahead is not believed: the clock was set back since. The file counts as the oldest; it would stay
    for ever otherwise, and new files would be removed in its place.
    """
    ahead = status.st_mtime_ns > time.time_ns() + _CLOCK_SLACK_NS
    return 0 if ahead else status.st_mtime_ns


def check_ours(path: Path) -> None:
    """Check a path, and every folder and link on it.

    Raises:
        NotOurs: a user other than this one and root could have created the file, or may change it.
        OSError: the file does not exist, or cannot be examined.
    """
    links = 0
    done = Path("/")
    left = list(Path(os.path.abspath(path)).parts[1:])  # noqa: PTH100 - links are followed below, one at a time
    _check_one(done)
    while left:
        name = left.pop(0)
        if name == "..":
            done = done.parent
            continue
        entry = done / name
        _check_one(entry)
        if not entry.is_symlink():
            done = entry
            continue
        links += 1
        if links > _MAX_LINKS:
            raise NotOurs(path, "has too many links on its way")
        target = entry.readlink()
        if target.is_absolute():
            done = Path("/")
        left[:0] = [part for part in target.parts if part != "/"]


def _check_one(entry: Path) -> None:
    status = entry.lstat()
    if status.st_uid not in (0, os.geteuid()):
        raise NotOurs(entry, f"belongs to {_user(status.st_uid)}")
    if stat.S_ISLNK(status.st_mode) or not _may_others_write(status):
        return
    if not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        raise NotOurs(entry, "may be written to by others (chmod go-w would end that)")


def _may_others_write(status: os.stat_result) -> bool:
    if status.st_mode & 0o002:
        return True
    return bool(status.st_mode & 0o020) and not _is_own_group(status.st_gid)


def _is_own_group(gid: int) -> bool:
    """Return whether only this user is in the group: many systems give each user a group, and open folders to it."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
