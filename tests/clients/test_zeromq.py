"""What the trio client over ZeroMQ does beside what all do: services that are killed, silent, or wrong."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import trio.testing
import zmq

from genbatch.actors.gateways import rpc_gateway, zeromq_gateway
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.supervisor import ChildSpec, Supervisor
from genbatch.actors.runtime.zeromq_socket import ZeroMQSocket, open_socket
from genbatch.clients import remote, transports
from genbatch.clients.interface import Client, ClientClosed
from genbatch.clients.remote import Retry, ZeroMQClient
from genbatch.clients.sync import SyncZeroMQClient
from genbatch.proto.errors import GenbatchError, MalformedMessage, Unavailable
from genbatch.proto.messages import DrawnTokens
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher, served

pytestmark = pytest.mark.trio

# Stands in for a service that is killed: it takes requests and answers none.
DOOMED_SERVICE = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while b"stream" not in socket.recv_multipart()[-1]:
    pass
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:notaport"])
async def test_an_address_that_is_none_is_unavailable_at_once(address: str) -> None:
    with pytest.raises(Unavailable, match="not an address"):
        async with ZeroMQClient(address):
            pass


async def test_a_service_that_is_killed_ends_open_calls_at_once(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 'socket'}"
    command = [sys.executable, "-c", DOOMED_SERVICE, address]
    process = await trio.to_thread.run_sync(
        lambda: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        with trio.fail_after(PATIENCE_S):
            once = ZeroMQClient(address, timeout=3600, retry=Retry(max_attempts=1))
            async with once as client, client.stream("hold") as stream:
                await trio.to_thread.run_sync(process.stdout.readline)
                os.kill(process.pid, signal.SIGKILL)
                with pytest.raises(Unavailable, match="was lost"):
                    async for _ in stream:
                        pass
    finally:
        process.kill()
        await trio.to_thread.run_sync(process.wait)
        process.stdin.close()
        process.stdout.close()


STOPPED_CLIENT = """
import sys, trio
from genbatch import RPCClient, ZeroMQClient
from genbatch.clients import remote

remote.HEARTBEAT_S, remote.LEASE_S = 0.1, 2.0

async def main():
    kind = ZeroMQClient if sys.argv[1].startswith("ipc") else RPCClient
    async with kind(sys.argv[1], timeout=float(sys.argv[2])) as client, client.stream("hold", seed=5) as stream:
        async for token in stream:
            print("token", token.text, flush=True)
    print("result", stream.result.text, flush=True)

trio.run(main)
"""


@pytest.mark.parametrize("transport", ["ipc", "unix"])
async def test_a_client_whose_machine_stood_still_for_longer_than_its_lease_continues_its_stream(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gateway in (zeromq_gateway, rpc_gateway):
        monkeypatch.setattr(gateway, "SWEEP_S", 0.02)
    async with served(tmp_path, transport) as service:
        command = [sys.executable, "-c", STOPPED_CLIENT, service.address, str(PATIENCE_S)]
        process = await trio.to_thread.run_sync(lambda: subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert process.stdout is not None
        try:
            with trio.fail_after(PATIENCE_S):
                held = await service.batcher.arrival("hold")
                held.emit("a")
                assert await trio.to_thread.run_sync(process.stdout.readline) == "token a\n"
                process.send_signal(signal.SIGSTOP)
                await service.batcher.release("hold")
                process.send_signal(signal.SIGCONT)
                again = await service.batcher.arrival("hold")
                assert again.message.drawn == (DrawnTokens([100]),)
                again.emit("b")
                again.finish()
                rest = await trio.to_thread.run_sync(process.stdout.read)
                told = [line for line in rest.splitlines() if line.startswith(("token", "result"))]
                assert told == ["token b", "result b"]  # the scripted result has its own tokens only
        finally:
            process.kill()
            await trio.to_thread.run_sync(process.wait)
            process.stdout.close()


@pytest.mark.parametrize("client_type", [ZeroMQClient, SyncZeroMQClient])
async def test_a_stream_continues_when_its_gateway_failed_and_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client_type: type[ZeroMQClient | SyncZeroMQClient]
) -> None:
    receive, fails = ZeroMQSocket.recv_many_signed, [False]

    async def fail_once(socket: ZeroMQSocket, *limits: int) -> Any:
        messages = await receive(socket, *limits)
        if fails[0]:
            fails[0] = False
            raise ZeroDivisionError
        return messages

    monkeypatch.setattr(ZeroMQSocket, "recv_many_signed", fail_once)
    batcher, address, told = ScriptedBatcher(), f"ipc://{tmp_path / 'socket'}", list[str]()

    def read_plainly(client: SyncZeroMQClient) -> None:
        with client as opened, opened.stream("hold", seed=5) as stream:
            told.extend(token.text for token in stream)

    async def read(client: ZeroMQClient) -> None:
        async with client as opened, opened.stream("hold", seed=5) as stream:
            async for token in stream:
                told.append(token.text)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            ref = await start(nursery, batcher)
            gateways = ChildSpec("zeromq", lambda: ZeroMQGateway(Dispatcher(ref), address).run)
            await nursery.start(Supervisor([gateways], name="gateways").run)
            async with trio.open_nursery() as reading:
                client = client_type(address, timeout=PATIENCE_S)
                if isinstance(client, SyncZeroMQClient):
                    reading.start_soon(trio.to_thread.run_sync, read_plainly, client)
                else:
                    reading.start_soon(read, client)
                first = await batcher.arrival("hold")
                for text in ("a", "b"):
                    first.emit(text)
                while len(told) < 2:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                fails[0] = True  # the next heartbeat meets it
                await batcher.release("hold")
                second = await batcher.arrival("hold")
                assert second.message.drawn == (DrawnTokens([100, 101]),)
                assert second.message.request.seed == 5 and not second.message.is_admitted
                second.emit("c")
                second.finish()
            nursery.cancel_scope.cancel()
    assert told == ["a", "b", "c"]


async def test_a_connection_that_does_not_come_about_ends_no_request_that_waits_for_one(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with ZeroMQClient(f"ipc://{path}", timeout=PATIENCE_S) as client, trio.open_nursery() as nursery:
        texts: list[str] = []

        async def ask() -> None:
            texts.append((await client.generate("a b")).text)

        nursery.start_soon(ask)
        with trio.socket.socket(trio.socket.AF_UNIX) as dying:
            await dying.bind(str(path))
            dying.listen()
            for _ in range(2):  # when it comes again, it knows of the first
                (await dying.accept())[0].close()
        path.unlink()
        async with served(tmp_path):
            while not texts:
                await trio.testing.wait_all_tasks_blocked(0.01)
    assert texts == ["ab"]


async def test_what_is_sent_after_the_news_of_a_lost_connection_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ tells of the end before it takes its own end away, and loses what it is given between the two."""
    tell, told = trio.open_memory_channel[int](1)

    class News:
        async def recv(self) -> list[bytes]:
            return [struct.pack("=HI", await told.receive(), 0)]

    @asynccontextmanager
    async def monitored(socket: ZeroMQSocket, events: int) -> AsyncIterator[News]:
        yield News()

    monkeypatch.setattr(transports, "monitored", monitored)
    lost: list[GenbatchError] = []
    async with open_socket(zmq.ROUTER) as router, trio.open_nursery() as nursery:
        transport = transports.ZeroMQTransport(f"ipc://{tmp_path / 's'}")
        router.bind(transport.address)
        await nursery.start(transport.run, lambda *_: None, lambda error, _: lost.append(error))
        await tell.send(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        await transport.send([b"first"])
        assert (await router.recv())[1] == b"first"
        await tell.send(zmq.EVENT_DISCONNECTED)
        while not lost:
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(transport.send, [b"second"])
        with trio.move_on_after(0.1):
            pytest.fail(f"sent into the connection that was lost: {await router.recv()}")
        await tell.send(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert (await router.recv())[1] == b"second"
        nursery.cancel_scope.cancel()


async def test_who_waits_for_a_connection_is_told_when_the_client_closes(tmp_path: Path) -> None:
    ends: list[Exception] = []

    async def ask(client: ZeroMQClient) -> None:
        try:
            await client.generate("a b")
        except (GenbatchError, ClientClosed) as error:
            ends.append(error)

    async with trio.open_nursery() as nursery:
        with trio.fail_after(PATIENCE_S):
            async with ZeroMQClient(f"ipc://{tmp_path / 'nobody'}", timeout=10 * PATIENCE_S) as client:
                nursery.start_soon(ask, client)
                await trio.testing.wait_all_tasks_blocked(0.01)
            while not ends:
                await trio.testing.wait_all_tasks_blocked(0.01)


async def answer_with(router: ZeroMQSocket, messages: list[Any]) -> None:
    """Answers the first request with these messages, whatever they are."""
    while True:
        identity, data = await router.recv()
        if msgpack.unpackb(data)[0] == 0:
            for message in messages:
                await router.send([identity, msgpack.packb(message)])
            return


async def test_a_service_that_is_silent_for_the_timeout_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HEARTBEAT_S", 0.02)
    async with open_socket(zmq.ROUTER) as silent, ZeroMQClient(f"ipc://{tmp_path / 's'}") as client:
        silent.bind(client.address)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_with, silent, [[1, 1, None, {"steps": 1}]])
            await client.stats()
        client.timeout = 0.2  # which it needed for connecting until now
        with pytest.raises(Unavailable, match="silent"):
            await client.generate("a")


async def test_a_service_that_is_heard_may_take_longer_than_the_timeout(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with open_socket(zmq.ROUTER) as slow, ZeroMQClient(f"ipc://{tmp_path / 's'}") as client:
        slow.bind(client.address)

        async def beat() -> None:
            while trio.current_time() < 3 * client.timeout:
                identity, data = await slow.recv()
                if msgpack.unpackb(data)[1] == "heartbeat":
                    await slow.send([identity, msgpack.packb([2, "heartbeat", []])])
                    await trio.testing.wait_all_tasks_blocked(0.001)
                    while client._last_heard < trio.current_time():
                        await trio.testing.wait_all_tasks_blocked(0.001)
                    mock_clock.jump(remote.HEARTBEAT_S)
            await slow.send([identity, msgpack.packb([1, 1, None, {"steps": 1}])])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            assert await client.stats() == {"steps": 1}


@pytest.mark.parametrize(
    "message",
    [
        [2, "token", [1, 3, 5, "a gap"]],
        [1, 1, None, {"text": "no usage"}],
        [1, 1, None, 5],
        [1, 1, "untyped", None],
        [7],
    ],
    ids=str,
)
async def test_a_service_that_breaks_the_protocol_ends_the_call_with_an_error(tmp_path: Path, message: Any) -> None:
    async with open_socket(zmq.ROUTER) as router, ZeroMQClient(f"ipc://{tmp_path / 's'}") as client:
        router.bind(client.address)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_with, router, [message])
            with pytest.raises(MalformedMessage):
                async with client.stream("a") as stream:
                    async for _ in stream:
                        pass


async def test_it_has_the_shared_interface() -> None:
    client: Client = ZeroMQClient("ipc:///nowhere")
    assert client
