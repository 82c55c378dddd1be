"""What another user could have written is not believed, wherever on the way to it they could have done it."""

import ctypes
import hashlib
import os
from pathlib import Path

import pytest

from genbatch.clients.cli.chat import Session, SessionFile, SessionFileError
from genbatch.nif.errors import ModelError
from genbatch.nif.models import model_source
from genbatch.nif.models.model_source import resolve_model
from genbatch.nif.native import build
from genbatch.nif.trusted_files import NotOurs, check_ours, is_ours, private_folder

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of this user's with a file in it."""
    tmp_path.chmod(0o755)
    folder = private_folder(tmp_path / "cache" / "native")
    (folder / "library.so").write_bytes(b"ours")
    (folder / "library.so").chmod(0o644)
    assert is_ours(folder / "library.so") and is_ours(folder)
    return tmp_path / "cache"


def test_missing_folders_are_made_for_this_user_alone(home: Path) -> None:
    assert [path.stat().st_mode & 0o777 for path in (home / "native",)] == [0o700]


@pytest.mark.parametrize("place", ["native/library.so", "native", "."])
def test_what_others_may_write_to_is_not_believed(home: Path, place: str) -> None:
    (home / place).chmod(0o777)
    assert not is_ours(home / "native" / "library.so")
    with pytest.raises(NotOurs, match="may be written to by others"):
        check_ours(home / "native" / "library.so")


@needs_root
@pytest.mark.parametrize("place", ["native/library.so", "native", "."])
def test_what_is_anothers_is_not_believed(home: Path, place: str) -> None:
    os.chown(home / place, NOBODY, NOBODY)
    assert not is_ours(home / "native" / "library.so")
    with pytest.raises(NotOurs, match="belongs to"):
        check_ours(home / "native" / "library.so")


@needs_root
@pytest.mark.parametrize(("group", "is_believed"), [(0, True), (1, False), (NOBODY, False)])
def test_what_a_group_may_write_to_is_believed_if_nobody_else_is_in_it(
    group: int, is_believed: bool, home: Path
) -> None:
    os.chown(home / "native", 0, group)
    (home / "native").chmod(0o775)
    assert is_ours(home / "native" / "library.so") is is_believed


def test_a_folder_of_ours_is_closed_and_what_others_left_in_it_is_told(home: Path) -> None:
    (home / "native").chmod(0o777)
    (home / "native" / "theirs.so").write_bytes(b"theirs")
    (home / "native" / "theirs.so").chmod(0o666)
    private_folder(home / "native")
    assert is_ours(home / "native" / "library.so")
    assert not is_ours(home / "native" / "theirs.so") and not is_ours(home / "native")


def test_links_are_followed_one_at_a_time(home: Path, tmp_path: Path) -> None:
    """A link of ours through a folder that others may write to leads where they like."""
    (tmp_path / "good").symlink_to(home)
    check_ours(tmp_path / "good" / "native" / "library.so")
    opened = tmp_path / "open"
    opened.mkdir()
    opened.chmod(0o777)
    (opened / "hop").symlink_to(home)
    (tmp_path / "bad").symlink_to(opened / "hop")
    with pytest.raises(NotOurs):
        check_ours(tmp_path / "bad" / "native" / "library.so")
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(NotOurs, match="too many links"):
        check_ours(tmp_path / "round")
    opened.chmod(0o1777)  # as /tmp is: nobody renames what is another's
    check_ours(tmp_path / "bad" / "native" / "library.so")


def test_a_second_name_of_a_file_and_a_link_in_its_place_are_no_library(home: Path) -> None:
    library = home / "native" / "library.so"
    os.link(library, home / "native" / "second.so")
    assert not is_ours(library)
    (home / "native" / "second.so").unlink()
    (home / "native" / "link.so").symlink_to(library)
    assert is_ours(library) and not is_ours(home / "native" / "link.so")


@needs_root
@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_planted_library_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """Anyone can compute its name. It is replaced, or another is built where nobody else can write."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("GENBATCH_CACHE", str(cache))
    monkeypatch.setattr(
        build, "compile_sources", lambda _compiler, _flags, _sources, output: output.write_bytes(b"ours")
    )
    target = build.build_library()
    assert target.parent == cache / "native"
    target.write_bytes(b"planted")
    os.chown(target if place == "file" else target.parent, NOBODY, NOBODY)
    built = build.build_library()
    assert built.read_bytes() == b"ours" and (is_ours(built) or built.parent == Path("/proc/self/fd"))
    assert (built == target) == (place == "file")
    assert ("compiled for this process only" in caplog.text) == (place == "folder")


@needs_root
def test_a_cache_of_another_users_is_refused_for_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = private_folder(tmp_path / "cache")
    os.chown(cache, NOBODY, NOBODY)
    monkeypatch.setenv("GENBATCH_CACHE", str(cache))
    monkeypatch.setattr("genbatch.nif.models.model_source._installed_gguf", lambda _packaged: None)
    with pytest.raises(ModelError, match=r"belongs to .*GENBATCH_CACHE"):
        resolve_model("smollm2")


def spoil(path: Path, how: str) -> None:
    """What another user could have done to it."""
    if how == "open":
        path.chmod(0o666)
    elif how == "theirs":
        os.chown(path, NOBODY, NOBODY)
    elif how == "second name":
        os.link(path, path.with_name("second"))
    else:
        path.rename(path.with_name("moved"))
        path.symlink_to("moved")


SPOILT = ["open", pytest.param("theirs", marks=needs_root), "second name", "link"]


@pytest.mark.parametrize("how", SPOILT)
def test_a_planted_conversion_is_removed_and_made_again(tmp_path: Path, how: str) -> None:
    target = tmp_path / "converted" / "model"
    for content in ("ours", "made again"):
        with model_source._building("tiny", target) as scratch:
            assert scratch is not None
            scratch.mkdir()
            (scratch / "model.safetensors").write_text(content)
            scratch.replace(target)
        with model_source._building("tiny", target) as scratch:
            assert scratch is None, "what is ours is there"
        assert (target / "model.safetensors").read_text() == content
        spoil(target / "model.safetensors", how)


@pytest.mark.parametrize("how", ["open", pytest.param("theirs", marks=needs_root)])
def test_a_planted_word_that_a_download_is_what_it_should_be_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("GENBATCH_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"ours")
    right = hashlib.sha256(b"ours").hexdigest()
    assert model_source._has_sha256(file, right)
    [known] = (tmp_path / "cache" / "verified").iterdir()
    times = file.stat()
    file.write_bytes(b"evil")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_source._has_sha256(file, right), "it is known by size and time"
    spoil(known, how)
    assert not model_source._has_sha256(file, right)


def test_a_session_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    file = SessionFile(tmp_path / "chat.session")
    file.write(Session(system="Be kind."))
    file.path.chmod(0o666)
    with pytest.raises(SessionFileError, match="may be written to by others"):
        file.read()


@needs_root
def test_a_session_of_another_users_is_refused(tmp_path: Path) -> None:
    file = SessionFile(tmp_path / "chat.session")
    file.write(Session(system="Be kind."))
    assert file.read().system == "Be kind."
    os.chown(file.path, NOBODY, NOBODY)
    with pytest.raises(SessionFileError, match="belongs to"):
        file.read()


def test_this_process_has_the_libraries_that_it_loads() -> None:
    """What `CDLL` opened is believed: its path is one that `is_ours` says yes to."""
    assert is_ours(build.build_library())
    ctypes.CDLL(str(build.build_library()))
