"""What clients over msgpack-RPC do beside what all do: tokens, services that vanish, bytes that make no sense."""

import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgpack
import pytest
import trio
import trio.testing

from genbatch.actors.gateways.addresses import is_listening, prepare_socket_file
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.runtime.actor import start
from genbatch.actors.security.key_files import AddressError, TokenFile, hash_token
from genbatch.actors.security.security import Security
from genbatch.clients.interface import Client
from genbatch.clients.remote import RPCClient
from genbatch.clients.sync import SyncRPCClient, SyncRPCTransport
from genbatch.clients.transports import RPCAddress, RPCTransport, read_rpc_address
from genbatch.proto.errors import Forbidden, InvalidRequest, MalformedMessage, Unauthenticated, Unavailable
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher

pytestmark = pytest.mark.trio


def write_tokens(path: Path, **tokens: str) -> None:
    path.write_text("".join(f"{name} {hash_token(token)}\n" for name, token in tokens.items()))
    path.chmod(0o600)


@pytest.fixture
async def guarded(nursery: trio.Nursery, tmp_path: Path) -> tuple[ScriptedBatcher, str]:
    """A service that knows alice's token, and its address."""
    write_tokens(tmp_path / "tokens", alice="genbatch_alice")
    batcher = ScriptedBatcher()
    ref = await start(nursery, batcher)
    security = Security(tokens=TokenFile(tmp_path / "tokens"))
    address = await nursery.start(RPCGateway(Dispatcher(ref), f"unix://{tmp_path / 'socket'}", security).run)
    return batcher, address


async def test_a_token_is_shown_and_its_name_is_the_tenant(guarded: tuple[ScriptedBatcher, str]) -> None:
    batcher, address = guarded
    with trio.fail_after(PATIENCE_S):
        async with RPCClient(address, token="genbatch_alice") as client:
            assert (await client.generate("a b")).text == "ab"
            assert batcher.requests[0].request.tenant == "alice"
            with pytest.raises(InvalidRequest):
                await client.generate("a", tenant="bob")
            with pytest.raises(Forbidden):
                await client.drain()

        def sync() -> str:
            with SyncRPCClient(address, token="genbatch_alice") as client:
                return client.generate("c d").text

        assert await trio.to_thread.run_sync(sync) == "cd"


@pytest.mark.parametrize(
    ("token", "told"), [(None, r"asks for a token \(--token\)"), ("genbatch_mallory", "the token is not known")]
)
async def test_a_client_without_the_right_token_is_told_so(
    guarded: tuple[ScriptedBatcher, str], token: str | None, told: str
) -> None:
    batcher, address = guarded
    with trio.fail_after(PATIENCE_S):
        for method in ("generate", "tokenize"):
            async with RPCClient(address, token=token) as client:
                with pytest.raises(Unauthenticated, match=told):
                    await getattr(client, method)("a")

        def sync() -> None:
            with SyncRPCClient(address, token=token) as client, pytest.raises(Unauthenticated, match=told):
                client.generate("a")

        await trio.to_thread.run_sync(sync)
    assert batcher.requests == []


async def test_a_token_that_is_taken_away_ends_the_connection(
    guarded: tuple[ScriptedBatcher, str], tmp_path: Path
) -> None:
    batcher, address = guarded
    with trio.fail_after(PATIENCE_S):
        async with RPCClient(address, token="genbatch_alice") as client, client.stream("hold") as stream:
            await batcher.arrival("hold")
            write_tokens(tmp_path / "tokens", bob="genbatch_bob")
            with pytest.raises(Unauthenticated):
                await client.generate("a")
            await batcher.release("hold")
            with pytest.raises(Unauthenticated):
                async for _ in stream:
                    pass


async def test_a_first_message_that_is_large_or_slow_is_not_read_on(
    guarded: tuple[ScriptedBatcher, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = guarded
    with trio.fail_after(PATIENCE_S):
        for data, hello_s, code in (
            (msgpack.packb([0, 1, "hello", [{"token": "x" * 5000}]]), 3600.0, "frame_too_large"),
            (b"", 0.05, "unauthenticated"),
            (msgpack.packb([0, 1, "stats", []]), 3600.0, "unauthenticated"),
        ):
            monkeypatch.setattr("genbatch.actors.gateways.rpc_gateway.HELLO_S", hello_s)
            async with await trio.open_unix_socket(address.removeprefix("unix://")) as stream:
                await stream.send_all(data)
                answer = b""
                while piece := await stream.receive_some():
                    answer += piece
                assert msgpack.unpackb(answer)[2]["code"] == code


async def serve_once(path: Path, answer: Callable[[trio.SocketStream], Awaitable[None]]) -> None:
    with trio.socket.socket(trio.socket.AF_UNIX) as listener:
        await listener.bind(str(path))
        listener.listen()
        connection, _ = await listener.accept()
        async with trio.SocketStream(connection) as stream:
            await stream.receive_some()
            await answer(stream)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", Unavailable),
        (b"\xc1", MalformedMessage),
        (msgpack.packb([7]), MalformedMessage),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03", MalformedMessage),  # ZeroMQ's greeting
        (b"HTTP/1.1 400 Bad Request\r\n", MalformedMessage),
    ],
)
async def test_a_service_that_leaves_or_makes_no_sense_ends_the_call(
    nursery: trio.Nursery, tmp_path: Path, data: bytes, error: type[Exception]
) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        if data:
            await stream.send_all(data)

    nursery.start_soon(serve_once, tmp_path / "s", answer)
    with trio.fail_after(PATIENCE_S):
        async with RPCClient(f"unix://{tmp_path / 's'}") as client:
            with pytest.raises(error) as caught:
                await client.generate("a")
    if error is MalformedMessage and data[:1] != msgpack.packb([7])[:1]:
        assert f"what answers at unix://{tmp_path}/s does not speak msgpack-RPC" in str(caught.value)
        assert "--rpc-bind" in str(caught.value)


async def test_a_heartbeat_and_another_answer_may_come_before_that_to_the_greeting(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    answers = [[2, "heartbeat", []], [1, 1, None, {"text": "a"}], [1, 0, None, {}], [1, 2, None, {"text": "b"}]]
    read: list[str] = []

    async def answer(stream: trio.SocketStream) -> None:
        await both.wait()
        for one in answers:
            await stream.send_all(msgpack.packb(one))
        await stream.receive_some()

    both = trio.Event()
    nursery.start_soon(serve_once, tmp_path / "s", answer)
    with trio.fail_after(PATIENCE_S):
        async with RPCClient(f"unix://{tmp_path / 's'}", token="any") as client, trio.open_nursery() as calls:

            async def ask() -> None:
                read.append(await client.detokenize([1]))

            calls.start_soon(ask)
            calls.start_soon(ask)
            while len(client._calls) < 2 or client._unsent:
                await trio.lowlevel.checkpoint()
            both.set()
    assert sorted(read) == ["a", "b"]


@asynccontextmanager
async def crowded(path: Path) -> AsyncIterator[list[socket.socket]]:
    """The file of a service that accepts nobody for now, whose queue is full; and who listens, then who waits."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(1)
        sockets = [listener]
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            try:
                waiting.connect(str(path))
            except BlockingIOError:
                break
            sockets.append(waiting)
        yield sockets


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue refuses, as nobody does who listens")
@pytest.mark.parametrize("kind", [RPCClient, SyncRPCClient])
async def test_where_so_many_connect_that_the_queue_is_full_a_client_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[RPCClient | SyncRPCClient]
) -> None:
    path = tmp_path / "s"
    answers: list[str] = []
    tried = trio.Event()
    token = trio.lowlevel.current_trio_token()
    open_stream, connect = RPCTransport._open_stream, SyncRPCTransport._connect

    async def noted_open(transport: RPCTransport) -> trio.abc.Stream:
        try:
            return await open_stream(transport)
        finally:
            tried.set()

    def noted_connect(transport: SyncRPCTransport, timeout: float) -> socket.socket:
        try:
            return connect(transport, timeout)
        finally:
            token.run_sync_soon(tried.set)

    monkeypatch.setattr(RPCTransport, "_open_stream", noted_open)
    monkeypatch.setattr(SyncRPCTransport, "_connect", noted_connect)

    async def ask() -> None:
        if kind is RPCClient:
            async with RPCClient(f"unix://{path}", timeout=PATIENCE_S) as client:
                answers.append((await client.health()).status)
            return

        def ask() -> None:
            with SyncRPCClient(f"unix://{path}", timeout=PATIENCE_S) as client:
                answers.append(client.health().status)

        await trio.to_thread.run_sync(ask)

    with trio.fail_after(PATIENCE_S):
        health = {"status": "ready", "steps": 0, "requests_running": 0, "requests_waiting": 0, "stalled_s": 0.0}
        async with crowded(path) as (listener, *waiting), trio.open_nursery() as nursery:
            assert is_listening(path), "it is taken for dead"
            with pytest.raises(AddressError, match="another service"):
                prepare_socket_file(f"unix://{path}", path)
            nursery.start_soon(ask)
            await tried.wait()
            await trio.testing.wait_all_tasks_blocked()
            for _ in waiting:
                listener.accept()[0].close()
            listener.setblocking(False)
            await trio.lowlevel.wait_readable(listener)
            async with trio.SocketStream(trio.socket.from_stdlib_socket(listener.accept()[0])) as stream:
                unpacker = msgpack.Unpacker()
                while not answers:
                    unpacker.feed(await stream.receive_some() or b"")
                    for message in unpacker:
                        if message[0] == 0:
                            await stream.send_all(msgpack.packb([1, message[1], None, health]))
    assert answers == ["ready"]


async def test_a_client_whom_the_service_has_no_room_for_comes_again_when_it_said(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genbatch.actors.gateways.rpc_gateway.RETRY_AFTER_FULL_MS", 1)
    token = "genbatch_alice"
    write_tokens(tmp_path / "tokens", alice=token)
    batcher = ScriptedBatcher()
    security = Security(tokens=TokenFile(tmp_path / "tokens"))
    gateway = RPCGateway(Dispatcher(await start(nursery, batcher)), f"unix://{tmp_path / 'socket'}", security)
    address = await nursery.start(gateway.run)
    refuse, refused = gateway._full, trio.Event()

    def make_room() -> Unavailable:
        gateway._limit.most = 100
        refused.set()
        return refuse()

    monkeypatch.setattr(gateway, "_full", make_room)
    with trio.fail_after(PATIENCE_S):
        async with RPCClient(address, token=token) as first, RPCClient(address, token=token) as second:
            assert (await first.generate("a b")).text == "ab"
            gateway._limit.most = 1
            assert (await second.generate("c d")).text == "cd"
    assert refused.is_set()


@pytest.mark.parametrize(
    ("address", "read"),
    [
        ("unix:///a/b", RPCAddress(path="/a/b")),
        ("rpc://127.0.0.1:80", RPCAddress(host="127.0.0.1", port=80)),
        ("tcp://[::1]:80", RPCAddress(host="::1", port=80)),
        ("unix://", None),
        ("rpc://127.0.0.1", None),
        ("rpc://127.0.0.1:99999", None),
        ("ipc:///a", None),
    ],
)
async def test_an_address_is_a_file_or_a_host_and_a_port(address: str, read: RPCAddress | None) -> None:
    if read is not None:
        assert read_rpc_address(address) == read
        return
    with pytest.raises(Unavailable, match="not an address"):
        async with RPCClient(address):
            pass


async def test_it_has_the_shared_interface() -> None:
    client: Client = RPCClient("unix:///nowhere")
    assert client
