"""Other machines are let in only past keys, or tokens and TLS."""

import socket
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import trio

from genbatch.actors.gateways.addresses import check_nobody_listens, host_and_port, is_listening, prepare_socket_file
from genbatch.actors.security.key_files import AddressError, InsecureBind
from genbatch.actors.security.security import check_bind, is_loopback

OTHERS_CAN_REACH = ["0.0.0.0", "*", "", "[::]", "::", "192.0.2.1", "10.0.0.1", "eth0", "example.org"]
# They look like this machine, and are not, or not for sure.
LOOK_ALIKES = ["127.0.0.1.example.org", "localhost.example.org", "127.1", "0177.0.0.1", "2130706433", "0"]


@pytest.mark.parametrize("host", OTHERS_CAN_REACH + LOOK_ALIKES)
def test_a_host_that_others_may_reach_is_refused_with_the_option_and_what_to_do(host: str) -> None:
    with pytest.raises(InsecureBind, match=r"bind: .*--keys DIR, made by `genbatch keys new DIR`") as info:
        check_bind("bind", f"tcp://{host}:5555", host, lacking=["keys"])
    assert (info.value.option, info.value.lacking) == ("bind", ("keys",))
    assert f"tcp://{host}:5555" in str(info.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "::1", "[::1]"])
def test_this_machine_may_always_call(host: str) -> None:
    assert is_loopback(host)
    check_bind("bind", host, host, lacking=["keys"])


@pytest.mark.parametrize("host", OTHERS_CAN_REACH)
def test_nothing_is_refused_once_nothing_lacks(host: str) -> None:
    check_bind("rpc_bind", host, host, lacking=[])


def test_every_lacking_option_is_named() -> None:
    with pytest.raises(InsecureBind, match=r"--tokens FILE.* and --tls-cert FILE.* and --tls-key FILE"):
        check_bind("http", "0.0.0.0:8000", "0.0.0.0", lacking=["tokens", "tls_cert", "tls_key"])


@pytest.mark.parametrize("rest", ["", ":80", "here", "here:", "here:x", "here:-1", "here:65536", "here:²"])
def test_what_is_no_host_and_port_is_no_address(rest: str) -> None:
    with pytest.raises(AddressError, match="tcp://HOST:PORT"):
        host_and_port(f"tcp://{rest}", rest)
    assert host_and_port("tcp://[::1]:65535", "[::1]:65535") == ("[::1]", 65535)
    assert host_and_port("tcp://here:*", "here:*") == ("here", 0)


def test_a_port_where_connections_are_only_dying_is_free() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the gateways' listeners have it
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = listener.accept()
            with pytest.raises(AddressError, match="listens there"):
                check_nobody_listens(f"tcp://127.0.0.1:{port}")
            served.close()  # first, so that the system keeps this end for a while
            assert client.recv(1) == b""
    check_nobody_listens(f"tcp://127.0.0.1:{port}")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue refuses, as nobody does who listens")
@pytest.mark.trio
async def test_a_socket_to_which_too_many_connect_is_taken(tmp_path: Path) -> None:
    """To ask takes no longer than where nobody waits."""
    path = tmp_path / "s"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(1)
        with pytest.raises(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(path))
        prepare = partial(prepare_socket_file, f"unix://{path}", path)
        with trio.fail_after(100):
            assert await trio.to_thread.run_sync(is_listening, path, abandon_on_cancel=True)
            with pytest.raises(AddressError, match="another service listens there"):
                await trio.to_thread.run_sync(prepare, abandon_on_cancel=True)
    prepare()
    assert not path.exists(), "what a dead service left is removed"
