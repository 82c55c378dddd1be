"""Session files are written whole or not at all, kept by tenant, bounded in size and private."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from genbatch.actors.batcher import session_files
from genbatch.actors.batcher.session_files import SessionFiles
from genbatch.proto.errors import InvalidRequest, Unavailable
from genbatch.proto.messages import KeepSessionRequest, Message, ResumeSessionRequest

STATE = b"state" * 100


def keep(name: str, tenant: str = "") -> KeepSessionRequest:
    return KeepSessionRequest(name=name, messages=[Message(role="user", content="Hi")], tenant=tenant)


def resume(name: str, tenant: str = "") -> ResumeSessionRequest:
    return ResumeSessionRequest(name=name, tenant=tenant)


def only_file(folder: Path) -> Path:
    [path] = folder.glob("*/*")
    return path


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    files = SessionFiles(tmp_path / "s", 10_000)
    assert files.write(keep("a"), STATE) == 32 + len(STATE)
    assert files.read(resume("a")) == STATE
    path = only_file(tmp_path / "s")
    whole = path.read_bytes()
    for damaged in (whole[:-1], b"", whole[:40] + b"?" + whole[41:], b"?" + whole[1:], whole + b"1"):
        path.write_bytes(damaged)
        with pytest.raises(InvalidRequest, match="is damaged"):
            files.read(resume("a"))
    path.write_bytes(whole)
    path.chmod(0o666)
    with pytest.raises(InvalidRequest, match="another user could have written"):
        files.read(resume("a"))
    path.chmod(0o600)
    other = tmp_path / "other"
    path.rename(other)
    path.symlink_to(other)
    with pytest.raises(Unavailable):
        files.read(resume("a"))
    path.unlink()
    os.mkfifo(path, 0o600)  # nobody writes to it, and a read must not wait for that
    with pytest.raises(InvalidRequest, match="another user could have written"):
        files.read(resume("a"))


def test_the_tenant_with_the_most_loses_its_oldest_session(tmp_path: Path) -> None:
    files = SessionFiles(tmp_path / "s", 5 * (32 + len(STATE)))
    for name in ("a", "b", "c", "d"):
        files.write(keep(name, "greedy"), STATE)
    for age, path in enumerate(sorted((tmp_path / "s").glob("*/*"))):
        os.utime(path, ns=(age, age))
    files.read(resume("a", "greedy"))
    for name in ("x", "y"):
        files.write(keep(name, "polite"), STATE)
    found = []
    for name, tenant in [*((name, "greedy") for name in "abcd"), ("x", "polite"), ("y", "polite")]:
        try:
            files.read(resume(name, tenant))
            found.append(name)
        except InvalidRequest:
            pass
    assert found == ["a", "c", "d", "x", "y"]
    files.write(keep("y", "polite"), STATE[:-1])  # replaces, and needs no room
    assert len(list((tmp_path / "s").glob("*/*"))) == 5
    with pytest.raises(InvalidRequest, match="session_space"):
        files.write(keep("huge"), STATE * 6)


def test_a_session_of_a_clock_that_was_set_back_counts_as_the_oldest(tmp_path: Path) -> None:
    files = SessionFiles(tmp_path / "s", 2 * (32 + len(STATE)))
    for name in ("a", "b"):
        files.write(keep(name, "greedy"), STATE)
    [ahead, _] = (tmp_path / "s").glob("*/*")
    os.utime(ahead, (2**33, 2**33))
    files.write(keep("c", "greedy"), STATE)
    left = {path.name for path in (tmp_path / "s").glob("*/*")}
    assert len(left) == 2 and "c.session" in left and ahead.name not in left


def test_other_files_of_the_operators_folder_stay_and_are_not_counted(tmp_path: Path) -> None:
    others = [tmp_path / "photos" / "a.jpg", tmp_path / "photos" / "a.session", tmp_path / "notes.txt"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10_000))
    files = SessionFiles(tmp_path, 2 * (32 + len(STATE)))
    for name in ("a", "b", "c"):
        files.write(keep(name), STATE)
    assert all(path.exists() for path in others)
    assert files.read(resume("c")) == STATE


def test_what_a_killed_service_left_is_removed_and_a_living_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SessionFiles(tmp_path, 10_000)
    files.write(keep("a"), STATE)
    [path] = tmp_path.glob("*/*.session")
    partial = path.with_name("tmpabc.partial")
    partial.write_bytes(STATE)
    monkeypatch.setattr(session_files, "_LOCK_S", 0.01)
    with FileLock(tmp_path / "lock"), pytest.raises(Unavailable, match="lock") as refusal:
        files.write(keep("a"), b"new")  # another service writes
    assert refusal.value.retry_after_ms and partial.exists() and files.read(resume("a")) == STATE
    files.write(keep("a"), b"new")
    assert not partial.exists() and files.read(resume("a")) == b"new"


def test_a_disk_that_takes_nothing_is_unavailable_and_the_old_session_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SessionFiles(tmp_path / "s", 10_000)
    files.write(keep("a"), STATE)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unavailable, match="No space left") as refusal:
        files.write(keep("a"), b"new")
    assert refusal.value.retry_after_ms
    assert files.read(resume("a")) == STATE and len(list((tmp_path / "s").glob("*/*"))) == 1


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    open_ = tmp_path / "open"
    open_.mkdir()
    open_.chmod(0o777)
    with pytest.raises(Unavailable, match="other users may write"):
        SessionFiles(open_ / "s", 10_000).write(keep("a"), STATE)
