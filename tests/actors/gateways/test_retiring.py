"""A gateway that another service has taken over from: who is connected is served, new connections are the other's."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import trio.testing

from genbatch import RPCClient, SyncRPCClient, SyncZeroMQClient, ZeroMQClient
from genbatch.actors.gateways.addresses import parse_http_address
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.http.http_gateway import HTTPGateway
from genbatch.actors.gateways.listening import GatewayKind, ListeningSockets
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.actor import start
from genbatch.proto.messages import DrawnTokens
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher
from tests.waiting import a_moment

pytestmark = pytest.mark.trio

KINDS = ["ipc", "zeromq", "unix", "rpc"]


@dataclass
class Pair:
    """Two gateways at one address; the earlier one retires."""

    address: str
    earlier: ZeroMQGateway | RPCGateway | HTTPGateway
    earlier_batcher: ScriptedBatcher
    later_batcher: ScriptedBatcher


@asynccontextmanager
async def pair(directory: Path, kind: str) -> AsyncIterator[Pair]:
    door: GatewayKind = "zeromq" if kind in ("ipc", "zeromq") else "http" if kind == "http" else "rpc"
    at = f"{kind}://{directory / 'socket'}" if kind in ("ipc", "unix") else "tcp://127.0.0.1:0"
    batchers = [ScriptedBatcher(), ScriptedBatcher()]
    with trio.fail_after(PATIENCE_S):
        sockets = ListeningSockets({door: at})
        async with trio.open_nursery() as nursery:
            await sockets.open_all()
            gateways: list[Any] = []
            address = ""
            for batcher in batchers:
                dispatcher = Dispatcher(await start(nursery, batcher))
                gateways.append(new_gateway(door, dispatcher, sockets))
                address = await nursery.start(gateways[-1].run)
                if len(gateways) == 1:  # the later one gets copies, as over a channel
                    copies = ListeningSockets(sockets.addresses, {door: sockets.copies(door)})
                    sockets, first = copies, sockets
            yield Pair(address, gateways[0], *batchers)
            nursery.cancel_scope.cancel()
        sockets.close()
        first.close()


def new_gateway(door: GatewayKind, dispatcher: Dispatcher, sockets: ListeningSockets) -> Any:
    address = sockets.addresses[door]
    if door == "zeromq":
        return ZeroMQGateway(dispatcher, address, sockets=sockets)
    if door == "rpc":
        return RPCGateway(dispatcher, address, sockets=sockets)
    return HTTPGateway(dispatcher, parse_http_address(address.removeprefix("tcp://")), sockets=sockets)


def client_at(address: str, kind: str) -> ZeroMQClient | RPCClient:
    client = ZeroMQClient if kind in ("ipc", "zeromq") else RPCClient
    return client(address, timeout=PATIENCE_S)


async def until_gone(gateway: Any) -> None:
    while gateway.num_connections:
        await a_moment()


async def to_the_earlier(gateways: Pair, client: ZeroMQClient | RPCClient) -> bool:
    """Whether the client is connected to the earlier gateway: whoever looks first gets a connection."""
    await client.generate("hello")
    return bool(gateways.earlier_batcher.requests)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_open_stream_ends_where_it_is_and_new_requests_go_to_the_later_gateway(
    tmp_path: Path, kind: str
) -> None:
    async with pair(tmp_path, kind) as gateways:
        while True:
            async with client_at(gateways.address, kind) as client:
                if not await to_the_earlier(gateways, client):
                    continue
                async with client.stream("hold on") as stream:
                    held = await gateways.earlier_batcher.arrival("hold on")
                    held.emit("a")
                    assert (await anext(stream)).text == "a"
                    gateways.earlier.retire()
                    while len(gateways.later_batcher.requests) < 2:
                        assert (await client.generate("new request")).text == "newrequest"
                    num_earlier = len(gateways.earlier_batcher.requests)
                    held.emit("b")
                    held.finish()
                    assert [token.text async for token in stream] == ["b"]
                assert stream.result.text == "ab"
                await until_gone(gateways.earlier)
                assert (await client.generate("one more")).text == "onemore"
                assert len(gateways.earlier_batcher.requests) == num_earlier
                break


@pytest.mark.parametrize("kind", KINDS)
async def test_an_idle_client_changes_over_without_an_error(tmp_path: Path, kind: str) -> None:
    async with pair(tmp_path, kind) as gateways:
        while True:
            async with client_at(gateways.address, kind) as client:
                if await to_the_earlier(gateways, client):
                    gateways.earlier.retire()
                    await until_gone(gateways.earlier)
                    assert (await client.generate("after")).text == "after"
                    assert gateways.later_batcher.requests[-1].request.prompt == "after"
                    break


@pytest.mark.parametrize("kind", KINDS)
async def test_new_connections_go_to_the_later_gateway_alone(tmp_path: Path, kind: str) -> None:
    async with pair(tmp_path, kind) as gateways:
        gateways.earlier.retire()
        for number in range(8):
            async with client_at(gateways.address, kind) as client:
                assert (await client.generate(f"number {number}")).text == f"number{number}"
        assert not gateways.earlier_batcher.requests


@pytest.mark.parametrize("kind", KINDS)
async def test_a_plain_client_changes_over_once_its_call_has_ended(tmp_path: Path, kind: str) -> None:
    kind_of = SyncZeroMQClient if kind in ("ipc", "zeromq") else SyncRPCClient
    async with pair(tmp_path, kind) as gateways:

        def talk() -> bool:
            with kind_of(gateways.address, timeout=PATIENCE_S) as client:
                client.generate("hello")
                if not gateways.earlier_batcher.requests:
                    return False
                assert client.generate("hold on").text == "end"
                assert client.generate("after").text == "after"
                trio.from_thread.run(until_gone, gateways.earlier)
                return True

        async def hold() -> None:
            held = await gateways.earlier_batcher.arrival("hold on")
            gateways.earlier.retire()
            held.emit("end")
            await trio.testing.wait_all_tasks_blocked()
            held.finish()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            while not await trio.to_thread.run_sync(talk):
                pass
        assert gateways.later_batcher.requests[-1].request.prompt == "after"


async def test_a_client_that_does_not_know_the_notification_is_served_where_it_is(tmp_path: Path) -> None:
    async with pair(tmp_path, "unix") as gateways:
        gateways.earlier.retire()  # nobody accepts there any more
    async with pair(tmp_path, "unix") as gateways:
        while True:
            stream = await trio.open_unix_socket(gateways.address.removeprefix("unix://"))
            async with stream:
                await stream.send_all(msgpack.packb([0, 1, "generate", [{"prompt": "a b"}]]))
                assert msgpack.unpackb(await stream.receive_some())[3]["text"] == "ab"
                if not gateways.earlier_batcher.requests:
                    continue
                gateways.earlier.retire()
                assert msgpack.unpackb(await stream.receive_some()) == [2, "goaway", []]
                await stream.send_all(msgpack.packb([0, 2, "generate", [{"prompt": "c d"}]]))
                assert msgpack.unpackb(await stream.receive_some())[3]["text"] == "cd"
                break


async def test_an_answer_over_http_says_that_its_connection_ends_and_the_next_connection_is_the_laters(
    tmp_path: Path,
) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def ask(stream: trio.SocketStream) -> bytes:
        await stream.send_all(request)
        answer = b""
        while not (b"\r\n\r\n" in answer and answer.endswith(b"}")):
            answer += await stream.receive_some() or pytest.fail(f"ended after {answer!r}")
        return answer

    async with pair(tmp_path, "http") as gateways:
        host, port = gateways.address.removeprefix("http://").split(":")
        streams = []
        while not gateways.earlier.num_connections:
            streams.append(await trio.open_tcp_stream(host, int(port)))
            assert b"connection: close" not in (await ask(streams[-1])).lower()
        gateways.earlier.retire()
        closing = [b"connection: close" in (await ask(stream)).lower() for stream in streams]
        assert closing.count(True) == 1
        assert await streams[closing.index(True)].receive_some() == b""
        for stream in streams:
            await stream.aclose()
        await until_gone(gateways.earlier)
        for _ in range(8):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                assert b" 200 " in await ask(stream)
        assert not gateways.earlier.num_connections


async def test_copies_of_sockets_keep_their_file_until_the_owner_closes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    sockets = ListeningSockets({"rpc": f"unix://{path}"}, {"rpc": [made]})
    sockets.own()
    copies = ListeningSockets(sockets.addresses, {"rpc": sockets.copies("rpc")})
    copies.close()
    assert path.exists()
    sockets.close()
    assert not path.exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_outlasts_the_earlier_service_continues_at_the_later_one(tmp_path: Path, kind: str) -> None:
    told: list[str] = []

    async def read(client: ZeroMQClient | RPCClient) -> None:
        async with client.stream("hold") as stream:
            async for token in stream:
                told.append(token.text)  # noqa: PERF401 - the test looks at it meanwhile

    async with pair(tmp_path, kind) as two:
        assert not isinstance(two.earlier, HTTPGateway)
        while not told:
            async with client_at(two.address, kind) as client, trio.open_nursery() as nursery:
                nursery.start_soon(read, client)
                while not two.earlier_batcher.held and not two.later_batcher.held:
                    await a_moment()
                if two.later_batcher.held:  # either may accept
                    nursery.cancel_scope.cancel()
                    continue
                first = two.earlier_batcher.held["hold"]
                first.emit("a")
                while not told:
                    await a_moment()
                two.earlier.retire()
                two.earlier.hand_over()
                second = await two.later_batcher.arrival("hold")
                assert second.message.drawn == (DrawnTokens([100]),)
                second.emit("b")
                second.finish()
    assert told == ["a", "b"]
