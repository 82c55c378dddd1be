"""A socket is made only where nobody else could put one in its place."""

import os
import socket
from pathlib import Path

import pytest

from genbatch.actors.gateways.addresses import prepare_socket_file
from genbatch.actors.security.key_files import AddressError

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    prepare_socket_file("unix://rpc.sock", folder / "rpc.sock")
    assert folder.stat().st_mode & 0o777 == 0o700, "a missing folder is made for this user alone"
    return folder / "rpc.sock"


@pytest.mark.parametrize("place", [".", ".."])
def test_a_folder_on_the_way_that_others_may_write_to_is_refused(path: Path, place: str) -> None:
    (path.parent / place).chmod(0o777)
    with pytest.raises(AddressError, match="may be written to by others"):
        prepare_socket_file("unix://rpc.sock", path)
    (path.parent / place).chmod(0o1777)  # as /tmp is: nobody renames what is another's
    prepare_socket_file("unix://rpc.sock", path)


@needs_root
@pytest.mark.parametrize("place", [".", ".."])
def test_another_users_folder_is_refused(path: Path, place: str) -> None:
    os.chown(path.parent / place, NOBODY, NOBODY)
    with pytest.raises(AddressError, match="belongs to"):
        prepare_socket_file("unix://rpc.sock", path)


def test_a_link_in_the_folders_place_leads_nowhere_else(path: Path, tmp_path: Path) -> None:
    opened = tmp_path / "open"
    opened.mkdir()
    opened.chmod(0o777)
    (opened / "hop").symlink_to(path.parent)
    with pytest.raises(AddressError, match="may be written to by others"):
        prepare_socket_file("unix://rpc.sock", opened / "hop" / "rpc.sock")


def test_what_is_no_socket_and_what_somebody_listens_at_stays(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(AddressError, match="is no socket"):
        prepare_socket_file("unix://rpc.sock", path)
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to("elsewhere")
    with pytest.raises(AddressError, match="is no socket"):
        prepare_socket_file("unix://rpc.sock", path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(AddressError, match="another service listens there"):
            prepare_socket_file("unix://rpc.sock", path)
    prepare_socket_file("unix://rpc.sock", path)
    assert not path.exists(), "what a dead service left is removed"
