"""What clients over msgpack-RPC do beside what all do: tokens, services that vanish, bytes that make no sense."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgpack
import pytest
import trio
import trio.testing

from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.runtime.actor import start
from genbatch.actors.security.key_files import TokenFile, hash_token
from genbatch.actors.security.security import Security
from genbatch.clients.interface import Client
from genbatch.clients.remote import RPCClient
from genbatch.clients.sync import SyncRPCClient
from genbatch.clients.transports import RPCAddress, read_rpc_address
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


@pytest.mark.parametrize("token", [None, "genbatch_mallory"])
async def test_a_client_without_the_right_token_is_told_so(
    guarded: tuple[ScriptedBatcher, str], token: str | None
) -> None:
    batcher, address = guarded
    with trio.fail_after(PATIENCE_S):
        for method in ("generate", "tokenize"):
            async with RPCClient(address, token=token) as client:
                with pytest.raises(Unauthenticated):
                    await getattr(client, method)("a")

        def sync() -> None:
            with SyncRPCClient(address, token=token) as client, pytest.raises(Unauthenticated):
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
    [(b"", Unavailable), (b"\xc1", MalformedMessage), (msgpack.packb([7]), MalformedMessage)],
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
            with pytest.raises(error):
                await client.generate("a")


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
    with pytest.raises(Unavailable, match="no address"):
        async with RPCClient(address):
            pass


async def test_it_has_the_shared_interface() -> None:
    client: Client = RPCClient("unix:///nowhere")
    assert client
