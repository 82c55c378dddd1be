"""A service takes the place of another under load: what clients see, and what happens where it fails."""

import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from genbatch import RPCClient, ZeroMQClient
from genbatch.actors.engine.child_process import ControlChannel
from genbatch.actors.gateways.addresses import runtime_directory
from genbatch.actors.gateways.listening import ListeningSockets
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.service import take_over
from genbatch.actors.service.take_over import Succession, ToLater, find_predecessor
from tests.actors.gateways.scripted_batcher import PATIENCE_S
from tests.actors.service.running_service import RunningService
from tests.waiting import a_moment

# Seconds that clients and processes have on a loaded machine.
LOADED_S = 120.0


@pytest.fixture(autouse=True)
def _own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def http_status(port: int, connection: trio.SocketStream | None = None) -> int:
    """The status of one answer, over a connection of its own or over one that is kept."""
    stream = connection or await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await stream.receive_some()
    if connection is None:
        await stream.aclose()
    return int(answer.split()[1])


class Load:
    """Clients at every door, from before a take-over until after it."""

    def __init__(self, service: RunningService, port: int, rpc: str) -> None:
        self._service, self._port, self._rpc = service, port, rpc
        self.statuses: set[int] = set()
        self.texts: dict[str, set[str]] = {"zeromq": set(), "rpc": set()}
        self.num_answers = 0
        self._is_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_over_http)
            nursery.start_soon(self._ask, "zeromq", ZeroMQClient(self._service.address, timeout=LOADED_S))
            nursery.start_soon(self._ask, "rpc", RPCClient(self._rpc, timeout=LOADED_S))
            yield
            self._is_over = True

    async def more(self) -> None:
        """Waits for answers of each kind."""
        wanted = self.num_answers + 6
        while self.num_answers < wanted:
            await a_moment()

    async def _ask_over_http(self) -> None:
        while not self._is_over:
            self.statuses.add(await http_status(self._port))
            self.num_answers += 1

    async def _ask(self, door: str, client: ZeroMQClient | RPCClient) -> None:
        async with client:
            while not self._is_over:
                async with client.stream([5, 6, 7], max_tokens=20, ignore_eos=True) as stream:
                    assert [token.index async for token in stream] == [*range(20)]
                self.texts[door].add(stream.result.text)
                self.num_answers += 1


@pytest.mark.long
@pytest.mark.trio
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc")
@pytest.mark.parametrize("on_demand", [False, True], ids=["loaded", "on demand"])
async def test_a_take_over_under_load_loses_nothing_and_refuses_nobody(
    on_demand: bool, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    port, rpc = free_port(), f"unix://{tmp_path}/rpc.sock"
    flags = ("--http", f":{port}", "--rpc-bind", rpc, "--shutdown-timeout-s", "60")
    model, missing = tiny_model_dir("llama"), tmp_path / "no model"
    if on_demand:
        (tmp_path / "models").mkdir()
        (tmp_path / "models/tiny").symlink_to(model)

    def service(source: Path, *more: str) -> RunningService:
        if on_demand:
            source = tmp_path / "models" if source is model else source
            return RunningService(None, tmp_path, *flags, "--models", str(source), *more)
        return RunningService(source, tmp_path, *flags, *more)

    with trio.fail_after(3 * LOADED_S), service(model) as earlier, ExitStack() as services:
        load = Load(earlier, port, rpc)
        async with load.running():
            await load.more()
            # One that does not start changes nothing.
            failing = service(missing, "--take-over")
            failed = await trio.to_thread.run_sync(run_to_its_end, failing)
            assert failed.returncode != 0 and "no model" in failed.stdout
            await load.more()
            assert earlier.process.poll() is None
            starting = service(model, "--take-over")
            later = await trio.to_thread.run_sync(services.enter_context, starting)
            await load.more()
            assert await trio.to_thread.run_sync(earlier.process.wait, LOADED_S) == 0
            await load.more()
            assert later.process.poll() is None and "took_over" in later.log and " retiring " in earlier.log
        assert load.statuses == {200}
        assert len(load.texts["zeromq"] | load.texts["rpc"]) == 1


def run_to_its_end(service: RunningService) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        service._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=service._environment
    )


# Without processes


@asynccontextmanager
async def offering(path: Path, refusal: str = "") -> AsyncIterator[tuple[Succession, ListeningSockets]]:
    """A service that can be taken over, without a gateway."""
    sockets = ListeningSockets({"rpc": f"unix://{path}"})
    with trio.fail_after(PATIENCE_S):
        await sockets.open_all()
        async with trio.open_nursery() as nursery:
            succession = Succession(sockets, refusal)
            await nursery.start(succession.run)
            yield succession, sockets
            nursery.cancel_scope.cancel()
        sockets.close()


@pytest.mark.trio
async def test_the_later_service_gets_the_sockets_and_the_earlier_one_leaves_when_told(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with offering(path) as (succession, sockets):
        async with find_predecessor({"rpc": f"unix://{path}", "http": "tcp://127.0.0.1:1"}) as predecessor:
            assert predecessor is not None and predecessor.pid == os.getpid()
            assert [made.getsockname() for made in predecessor.sockets["rpc"]] == [str(path)]
            assert "http" not in predecessor.sockets and not succession.leaving.is_set()
            await predecessor.leave()
            assert succession.leaving.is_set()
            for made in predecessor.sockets["rpc"]:
                made.close()
        sockets.close()
        assert path.exists()  # it is the later one's
    assert not [*runtime_directory().glob("serve-*")]


@pytest.mark.trio
async def test_a_service_that_still_serves_its_last_clients_stands_in_nobodys_way(tmp_path: Path) -> None:
    address = {"rpc": f"unix://{tmp_path}/rpc.sock"}
    async with offering(tmp_path / "rpc.sock") as (succession, _):
        earlier = take_over._connect(runtime_directory() / f"serve-{os.getpid()}.sock")
        assert earlier is not None and await earlier.receive() is not None  # a third service, that goes on later
        async with find_predecessor(address) as predecessor:
            assert predecessor is not None
            await predecessor.leave()
            assert succession.leaving.is_set()
            async with find_predecessor(address) as another:
                assert another is None
            await earlier.send(take_over.AskForSockets())
            assert await earlier.receive() is None
            for made in predecessor.sockets["rpc"]:
                made.close()
        earlier.close()


@pytest.mark.trio
async def test_a_later_service_that_ends_before_it_listens_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with offering(path) as (succession, _):
        async with find_predecessor({"rpc": f"unix://{path}"}) as predecessor:
            assert predecessor is not None
            with pytest.raises(AddressError, match="another service is taking the place of process"):
                async with find_predecessor({"rpc": f"unix://{path}"}):
                    pass
            for made in predecessor.sockets["rpc"]:
                made.close()
        while not await is_offered(path):
            await a_moment()
        await trio.testing.wait_all_tasks_blocked(0.01)  # the earlier one has seen the end of that look
        assert not succession.leaving.is_set()
    assert not path.exists()


@pytest.mark.trio
async def test_a_service_that_cannot_be_taken_over_says_why_and_keeps_its_addresses(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with offering(path, "it started Ray itself") as (succession, _):
        with pytest.raises(AddressError, match=f"process {os.getpid()} cannot be taken over: it started Ray itself"):
            async with find_predecessor({"rpc": f"unix://{path}"}):
                pass
        end = take_over._connect(runtime_directory() / f"serve-{os.getpid()}.sock")
        assert end is not None
        await end.receive()
        await end.send(take_over.AskForSockets())  # an earlier version, which does not know of refusals
        assert await end.receive() is None
        end.close()
        async with find_predecessor({"rpc": f"unix://{path}2"}) as other:
            assert other is None
        assert not succession.leaving.is_set()
    assert not path.exists()


async def is_offered(path: Path) -> bool | None:
    """Whether a service offers its sockets; None while it waits for another one."""
    try:
        async with find_predecessor({"rpc": f"unix://{path}"}) as predecessor:
            for made in predecessor.sockets["rpc"] if predecessor else ():
                made.close()
            return predecessor is not None
    except AddressError:
        return None


@pytest.mark.trio
async def test_a_service_with_other_addresses_is_left_alone_and_one_with_another_protocol_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    async with find_predecessor({"rpc": f"unix://{path}"}) as nobody:
        assert nobody is None
    async with offering(path):
        async with find_predecessor({"rpc": f"unix://{path}2"}) as other:
            assert other is None
        with pytest.raises(AddressError, match="serves rpc there, which cannot become zeromq"):
            async with find_predecessor({"zeromq": f"unix://{path}"}):
                pass


@pytest.mark.trio
async def test_another_user_takes_nothing_over_and_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, user = tmp_path / "s", os.getuid()
    async with offering(path) as (succession, _):
        monkeypatch.setattr(take_over, "_user_of", lambda connection: user + 1)
        async with find_predecessor({"rpc": f"unix://{path}"}) as predecessor:
            assert predecessor is None
        end = socket.socket(socket.AF_UNIX)
        end.connect(str(next(runtime_directory().glob("serve-*.sock"))))
        channel: ControlChannel[Any] = ControlChannel(end, ToLater)
        assert await channel.receive() is None
        channel.close()
        assert not succession.leaving.is_set()
    assert not path.exists()


@pytest.mark.trio
async def test_a_directory_that_others_may_use_is_refused(tmp_path: Path) -> None:
    runtime_directory().mkdir(mode=0o777)
    runtime_directory().chmod(0o777)
    with pytest.raises(AddressError, match="not a directory of this user alone"):
        async with find_predecessor({"rpc": "unix:///tmp/s"}):
            pass
