"""The prefix cache on disk returns a written block or nothing, for every fault of the disk."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from genbatch.nif.kv import disk_cache
from genbatch.nif.kv.block_pool import prefix_key
from genbatch.nif.kv.disk_cache import DiskCache
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.runner import LayerGroup
from genbatch.nif.trusted_files import NotOurs
from tests.nif.failing_disks import breakable_disk, mounted_disk

SIZE = 100
GB = 2**30


def name_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def content_of(number: int) -> bytes:
    return bytes([number % 256]) * SIZE


def opened(folder: Path, identity: str = "one", max_bytes: int = GB) -> DiskCache:
    disk = DiskCache(folder, hashlib.sha256(identity.encode()).hexdigest(), max_bytes, SIZE)
    disk.follow(content_of, lambda block, version: True)
    return disk


def settle(disk: DiskCache) -> None:
    """Wait until the thread has looked at the folder and has nothing left to write."""
    disk._queue.put(None)
    disk._thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def written(folder: Path, numbers: range | list[int] = range(3)) -> list[Path]:
    """Write blocks, and return their files in this order."""
    disk = opened(folder)
    for number in numbers:
        disk.offer(name_of(number), number, 0)
    disk.close()
    assert disk.num_errors == 0
    return [disk._path(name_of(number)) for number in numbers]


def known(folder: Path, identity: str = "one") -> DiskCache:
    disk = opened(folder, identity)
    settle(disk)
    return disk


NAMES = [name_of(number) for number in range(3)]
CONTENTS = [content_of(number) for number in range(3)]


def test_blocks_are_read_by_the_next_process_up_to_the_first_that_is_missing(folder: Path) -> None:
    written(folder)
    disk = known(folder)
    assert disk.num_known([*NAMES, name_of(3), NAMES[0]]) == 3
    assert disk.read([*NAMES, name_of(3), NAMES[0]]) == CONTENTS
    assert (disk.num_read, disk.num_damaged, disk.num_errors) == (3, 0, 0)
    assert disk.num_known([name_of(3), *NAMES]) == 0


def test_blocks_of_another_identity_are_not_found(folder: Path) -> None:
    written(folder)
    assert known(folder, "another").num_known(NAMES) == 0


@pytest.mark.parametrize("damage", ["digest", "content", "cut", "longer", "empty", "renamed", "folder"])
def test_a_damaged_block_is_a_miss_and_is_removed(damage: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(folder)[1]
    data = bytearray(path.read_bytes())
    if damage in ("digest", "content"):
        data[{"digest": 3, "content": 90}[damage]] ^= 1
    path.write_bytes(data[: {"cut": -1, "empty": 0}.get(damage, len(data))] + b"1" * (damage == "longer"))
    if damage == "renamed":  # a whole block under another block's name
        shutil.copyfile(written(folder, [7])[0], path)
    if damage == "folder":
        path.unlink()
        path.mkdir()
    disk = known(folder)
    with caplog.at_level(logging.WARNING, "genbatch"):
        assert disk.read(NAMES) == CONTENTS[:1]
        assert disk.num_known(NAMES) == 1
    assert disk.num_damaged + disk.num_errors == 1
    assert len(caplog.messages) == 1 and str(folder) in caplog.text
    if damage != "folder":
        assert written(folder)[1].is_file() and known(folder).read(NAMES) == CONTENTS  # is written anew


def test_a_block_that_others_could_have_written_is_a_miss(folder: Path, tmp_path: Path) -> None:
    paths = written(folder)
    paths[0].chmod(0o666)
    assert known(folder).read(NAMES[:1]) == []
    (tmp_path / "other").hardlink_to(paths[1])
    assert known(folder).read(NAMES[1:2]) == []
    paths[2].rename(tmp_path / "third")
    paths[2].symlink_to(tmp_path / "third")
    assert known(folder).read(NAMES[2:]) == []
    if os.geteuid() == 0:
        [path] = written(folder, [0])
        os.chown(path, 12345, 12345)
        assert known(folder).read(NAMES[:1]) == []


def test_a_pipe_in_the_place_of_a_block_holds_nobody_up(folder: Path) -> None:
    path = written(folder)[0]
    path.unlink()
    os.mkfifo(path, 0o600)
    disk = known(folder)
    assert disk.read(NAMES) == [] and disk.num_damaged == 1 and not path.exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    open_ = tmp_path / "open"
    open_.mkdir()
    open_.chmod(0o777)
    with pytest.raises(NotOurs, match="may be written to by others"):
        opened(open_ / "kv")


def test_a_block_that_loses_its_content_during_the_copy_is_not_written(folder: Path) -> None:
    versions = {0: 1, 1: 5}

    def copy(block: int) -> bytes:
        versions[0] = 2  # the pool gives the block away meanwhile
        return content_of(block)

    disk = opened(folder)
    disk.follow(copy, lambda block, version: versions[block] == version)
    disk.offer(NAMES[0], 0, 1)
    disk.offer(NAMES[1], 1, 5)
    disk.close()
    assert disk.num_written == 1
    assert [known(folder).num_known([name]) for name in NAMES[:2]] == [0, 1]


def test_after_close_nothing_of_the_pool_is_read(folder: Path) -> None:
    disk = opened(folder)
    disk.close()
    disk.follow(lambda block: pytest.fail("the pool is gone"), lambda block, version: True)
    disk.offer(NAMES[0], 0, 0)
    time.sleep(0.01)
    assert not disk._thread.is_alive() and disk.num_known(NAMES) == 0


def test_the_blocks_that_were_used_last_stay_within_the_bound(folder: Path) -> None:
    room = 100 * (SIZE + 32)
    paths = written(folder, range(60))
    for age, path in enumerate(paths):
        os.utime(path, ns=(age, age))  # long ago
    assert known(folder).read([name_of(0)])  # is used
    disk = opened(folder, "another", room)  # the bound counts all identities
    for number in range(100, 160):
        disk.offer(name_of(number), number, 0)
    disk.close()
    sizes = [path.stat().st_size for path in folder.rglob("*.block")]
    assert sum(sizes) <= room and len(sizes) > 80
    left = known(folder)
    assert left.num_known([name_of(0)]) and left.num_known([name_of(59)]) and not left.num_known([name_of(1)])


def test_blocks_of_a_clock_that_was_set_back_are_the_first_to_be_removed(folder: Path) -> None:
    ahead = (time.time() + 10 * 365 * 86400,) * 2
    for path in written(folder, range(50)):
        os.utime(path, ahead)
    disk = opened(folder, max_bytes=50 * (SIZE + 32))
    for number in range(100, 120):
        disk.offer(name_of(number), number, 0)
    disk.close()
    left = known(folder)
    assert all(left.num_known([name_of(number)]) for number in range(100, 120))
    assert left.read([name_of(100)]) == [content_of(100)]


@pytest.mark.parametrize("years", [-30, 30])
def test_a_jump_of_the_clock_changes_no_block(
    years: int, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + years * 365 * 86400)
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    disk = opened(folder)
    for number in range(3, 60):
        disk.offer(name_of(number), number, 0)
    disk.close()
    again = known(folder)
    assert again.read(NAMES) == CONTENTS
    assert again.read([name_of(number) for number in range(60)]) == [content_of(number) for number in range(60)]
    assert not caplog.messages


def test_what_a_killed_writer_left_is_removed_later_and_never_read(folder: Path) -> None:
    path = written(folder)[0]
    partial = path.with_name("tmpabc.partial")
    partial.write_bytes(path.read_bytes()[:40])
    assert known(folder).num_known(NAMES) == 3 and partial.exists()  # its writer may live
    os.utime(partial, (0, 0))
    known(folder)
    assert not partial.exists()


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_bound_of_a_few_blocks_is_kept(blocks: int, folder: Path) -> None:
    disk = opened(folder, max_bytes=blocks * (SIZE + 32))
    for number in range(10):
        disk.offer(name_of(number), number, 0)
    settle(disk)
    sizes = [path.stat().st_size for path in folder.rglob("*.block")]
    assert sizes and sum(sizes) <= blocks * (SIZE + 32) and disk.num_written == 10


def test_a_bound_below_a_block_writes_none(folder: Path) -> None:
    disk = opened(folder, max_bytes=SIZE)
    disk.offer(name_of(0), 0, 0)
    settle(disk)
    assert not list(folder.rglob("*.block")) and not disk.num_written


def test_other_files_of_the_operators_folder_stay_and_are_not_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(folder, range(20))
    [blocks] = (path for path in folder.iterdir() if path.is_dir())
    others = [folder / "photos" / "a.jpg", folder / "photos" / f"{'a' * 64}.block", blocks / "notes.txt"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100_000))
        os.utime(path, (0, 0))
    (folder / "lost+found").symlink_to(folder / "photos")
    disk = opened(folder, "another", 20 * (SIZE + 32))
    for number in range(100, 110):
        disk.offer(name_of(number), number, 0)
    disk.close()
    assert all(path.exists() for path in others) and not caplog.messages
    assert len(list(blocks.glob("*.block"))) >= 8 and disk.num_written == 10


def test_a_file_that_vanishes_while_the_folder_is_read_is_no_error(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = written(folder)[0].with_name("tmpabc.partial")
    partial.touch()
    scan = os.scandir

    def scan_and_rename(path: Path) -> list[os.DirEntry[str]]:
        entries = list(scan(path))
        partial.unlink(missing_ok=True)  # as its writer does
        return entries

    monkeypatch.setattr(os, "scandir", scan_and_rename)
    disk = known(folder)
    assert disk.read(NAMES) == CONTENTS and not disk.num_errors and not caplog.messages


@pytest.fixture
def mounted(folder: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, with the mount options of the parameter."""
    with mounted_disk(folder, request.param):
        yield folder


@pytest.mark.parametrize("mounted", ["size=24k"], indirect=True)
def test_a_full_disk_is_named_once_and_what_fitted_is_read(
    mounted: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_PAUSE_S", 0.0)
    disk = opened(mounted)
    with caplog.at_level(logging.WARNING, "genbatch"):
        for number in range(20):
            disk.offer(name_of(number), number, 0)
        disk.close()
    assert [message for message in caplog.messages if "No space left" in message] == caplog.messages
    assert len(caplog.messages) == 1 and disk.num_errors > 1 and 0 < disk.num_written < 20
    names = [name_of(number) for number in range(20)]
    assert len(known(mounted).read(names)) == disk.num_written
    assert not list(mounted.rglob("*.partial"))


def test_after_an_error_the_disk_is_left_alone_for_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = opened(folder)
    tried = []

    def fail(*_: object, **__: object) -> None:
        tried.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_cache.tempfile, "mkstemp", fail)
    for number in range(20):
        disk.offer(name_of(number), number, 0)
    disk.close()
    assert len(tried) == disk.num_errors == 1


@pytest.mark.parametrize("mounted", ["size=1m"], indirect=True)
def test_a_disk_that_becomes_read_only_is_named_once_and_still_read(
    mounted: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_PAUSE_S", 0.0)
    written(mounted)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    disk = opened(mounted)
    with caplog.at_level(logging.WARNING, "genbatch"):
        for number in range(3, 9):
            disk.offer(name_of(number), number, 0)
        disk.close()
    assert len(caplog.messages) == 1 and "Read-only file system" in caplog.text
    assert known(mounted).read(NAMES) == CONTENTS


def test_a_disk_that_cannot_read_is_named_once_and_its_blocks_are_misses(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_PAUSE_S", 0.0)
    with breakable_disk(tmp_path / "image", folder) as break_disk:
        paths = written(folder)
        disk = known(folder)
        break_disk(paths)
        with caplog.at_level(logging.WARNING, "genbatch"):
            assert disk.read(NAMES) == [] and disk.read(NAMES[1:]) == []
        [told] = caplog.messages
        assert "cannot be read" in told and "Input/output error" in told
        assert disk.num_errors == 2 and disk.num_known(NAMES) == 0


def test_a_folder_that_vanishes_is_a_miss(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(folder)
    disk = known(folder)
    shutil.rmtree(folder)
    assert disk.read(NAMES) == [] and disk.num_known(NAMES) == 0
    assert not caplog.messages


def test_a_folder_that_was_removed_is_made_again_with_the_next_block(folder: Path) -> None:
    written(folder)
    disk = opened(folder)
    disk.offer(name_of(6), 6, 0)
    while not disk.num_written:  # its thread has looked through the folder, and holds no lock there
        time.sleep(0.001)
    shutil.rmtree(folder)
    disk.offer(name_of(7), 7, 0)
    while disk.num_written < 2:
        time.sleep(0.001)
    for number in range(3):  # they are not known any more, so they are written again
        disk.offer(NAMES[number], number, 0)
    disk.close()
    assert disk.num_errors == 0 and folder.stat().st_mode & 0o777 == 0o700
    assert known(folder).read([name_of(7), *NAMES]) == [content_of(7), *CONTENTS]


def test_a_file_in_the_place_of_the_folder_is_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(folder)
    disk = opened(folder)
    while not disk.num_known(NAMES):
        time.sleep(0.001)
    while folder.exists():  # the cache's thread may still be writing its lock there
        shutil.rmtree(folder, ignore_errors=True)
    folder.write_bytes(b"no folder")
    for number in range(5, 9):
        disk.offer(name_of(number), number, 0)
    disk.close()
    assert disk.read(NAMES) == [] and disk.num_written == 0
    assert len([told for told in caplog.messages if "takes no blocks" in told]) == 1


def test_while_another_process_makes_room_no_block_is_removed(folder: Path) -> None:
    paths = written(folder, range(60))
    with FileLock(folder / "lock"):
        settle(opened(folder, max_bytes=40 * (SIZE + 32)))
        assert all(path.exists() for path in paths)
    settle(opened(folder, max_bytes=40 * (SIZE + 32)))
    assert not all(path.exists() for path in paths)


def test_a_slow_disk_gives_what_it_has_in_time(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder)
    disk = known(folder)
    now = iter([0.0, 0.5, 1.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    assert disk.read(NAMES) == CONTENTS[:2]
    assert "is slow" in caplog.text


WRITER = """
import sys
from pathlib import Path
from tests.nif.kv.test_disk_cache import content_of, name_of, opened, settle
disk = opened(Path(sys.argv[1]), max_bytes=int(sys.argv[3]))
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 300):
    disk.offer(name_of(number), number, 0)
settle(disk)
assert disk.num_errors == 0, disk.num_errors
"""


def test_two_processes_write_read_and_evict_in_one_folder(folder: Path) -> None:
    room = 200 * (SIZE + 32)
    command = [sys.executable, "-c", WRITER, str(folder)]
    begin = [subprocess.Popen([*command, first, str(room)], cwd=Path(__file__).parents[3]) for first in ("0", "150")]
    assert [process.wait() for process in begin] == [0, 0]
    files = list(folder.rglob("*.block"))
    assert 100 < len(files) < 250
    disk = known(folder)
    for number in range(450):
        found = disk.read([name_of(number)])
        assert found in ([], [content_of(number)])
    assert disk.num_read == len(files) and not disk.num_damaged and not disk.num_errors


# The pool's side

BLOCK = 4


def cache(num_blocks: int = 8) -> KVCache:
    return KVCache([LayerGroup((0,))], num_blocks=[num_blocks], block_size=BLOCK, num_sequences=3)


def evaluate(kv: KVCache, seq_id: int, tokens: list[int], key: bytes = b"") -> int:
    found = kv.attach_prefix(seq_id, tokens, key)
    kv.reserve([(seq_id, tokens[found:], found)]).commit()
    return found


def test_whole_blocks_are_offered_once_with_the_name_that_is_looked_up(folder: Path) -> None:
    kv, disk = cache(), opened(folder)
    kv.follow(disk, content_of)
    tokens = list(range(11))
    evaluate(kv, 0, tokens)
    evaluate(kv, 1, tokens)
    blocks = list(kv.block_table(0, 0))
    settle(disk)
    assert disk.num_written == 2
    fresh = cache()
    names, cached = fresh.on_disk(disk, tokens, b"")
    assert (len(names), cached) == (2, 0) and disk.read(names) == [content_of(block) for block in blocks[:2]]
    # guard: the last token is evaluated, and so is its block
    assert len(fresh.on_disk(disk, tokens[:8], b"")[0]) == 1
    assert fresh.on_disk(disk, tokens, prefix_key("bob"))[0] == []
    assert fresh.on_disk(disk, [9, *tokens[1:]], b"")[0] == []
    assert kv.on_disk(disk, tokens, b"") == (names, 2)


def test_restored_blocks_are_found_by_a_prompt_and_are_free(folder: Path) -> None:
    kv, disk = cache(), opened(folder)
    kv.follow(disk, content_of)
    tokens = list(range(14))
    evaluate(kv, 0, tokens)
    settle(disk)
    fresh = cache()
    names, _ = fresh.on_disk(disk, tokens, b"")
    wrote: list[tuple[list[int], list[int]]] = []
    assert fresh.restore(names, 0, lambda places, blocks: wrote.append((places, blocks))) == 3
    assert wrote[0][0] == [0, 1, 2] and fresh.counts().used == 0
    fresh.check_integrity()
    assert evaluate(fresh, 0, tokens) == 12
    assert list(fresh.block_table(0, 0))[:3] == wrote[0][1]
    fresh.check_integrity()


@given(
    num_blocks=st.integers(3, 9),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6),
    portions=st.lists(st.integers(1, 4), min_size=6, max_size=6),
)
def test_restoring_into_a_used_pool_keeps_it_whole(num_blocks: int, lengths: list[int], portions: list[int]) -> None:
    kv = cache(num_blocks)
    prompt = list(range(100, 125))
    names = kv._tables.prefix_cache.names(prompt, b"", 6)  # type: ignore[union-attr]
    first = 0
    for length, portion in zip(lengths, portions, strict=False):
        kv.seq_rm(0)
        if kv.counts().free * BLOCK >= length:
            evaluate(kv, 0, list(range(length)))
        used = kv.counts().used

        def write(places: list[int], blocks: list[int], first: int = first) -> None:
            assert all(place >= first for place in places) and len(set(blocks)) == len(blocks)

        end = min(first + portion, 6)
        done = kv.restore(names[:end], first, write)
        assert done <= end and kv.counts().used == used
        kv.check_integrity()
        if done < end:  # there was no room
            return
        first = end
    kv.seq_rm(0)
    assert evaluate(kv, 0, prompt[: first * BLOCK + 1]) == first * BLOCK


def test_a_write_that_fails_leaves_no_names() -> None:
    kv = cache()
    names = kv._tables.prefix_cache.names(list(range(9)), b"", 2)  # type: ignore[union-attr]

    def fail(places: list[int], blocks: list[int]) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        kv.restore(names, 0, fail)
    kv.check_integrity()
    assert kv.counts().used == 0 and evaluate(kv, 0, list(range(9))) == 0
