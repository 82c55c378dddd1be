"""The msgpack-RPC gateway over real sockets, spoken to in plain msgpack: nothing of ours vouches for the bytes."""

import socket as sockets
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import trio.testing

from genbatch.actors.gateways import rpc_gateway, session
from genbatch.actors.gateways.accepting import Peer
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.gateways.session import CallHost, OpenCall, Outbox, RPCSession
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.supervisor import Registry
from genbatch.actors.security.key_files import AddressError
from genbatch.proto.codec import MAX_TRANSPORT_BYTES
from genbatch.proto.errors import Unavailable
from genbatch.proto.rpc import ServerConnection, StreamOptions
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher, Served, served

pytestmark = pytest.mark.trio


class Socket:
    """A plain connection that speaks msgpack."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._unpacker = msgpack.Unpacker(strict_map_key=False)

    async def tell(self, message: Any) -> None:
        await self.stream.send_all(message if isinstance(message, bytes) else msgpack.packb(message))

    async def hear(self) -> Any:
        """The next message; None at the end."""
        while True:
            for message in self._unpacker:
                return message
            data = await self.stream.receive_some()
            if not data:
                return None
            self._unpacker.feed(data)

    async def ask(self, message: Any) -> Any:
        await self.tell(message)
        return await self.hear()


@asynccontextmanager
async def connected(service: Served, *, says_hello: bool = True) -> AsyncIterator[Socket]:
    """A client; over TCP one that has said hello, unless it does not."""
    transport, _, rest = service.address.partition("://")
    if transport == "unix":
        stream = await trio.open_unix_socket(rest)
    else:
        host, port = rest.split(":")
        stream = await trio.open_tcp_stream(host, int(port))
    async with stream:
        socket = Socket(stream)
        if transport != "unix" and says_hello:
            assert (await socket.ask([0, 0, "hello", []]))[3]["tenant"] is None
        yield socket


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_generate_and_stream_are_as_over_zeromq(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, connected(service) as socket:
        result = {
            "text": "ab",
            "token_ids": [100, 101],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1},
        }
        assert await socket.ask([0, 2**64 - 1, "generate", [{"prompt": "a b", "max_tokens": 4}]]) == [
            *(1, 2**64 - 1, None),
            result,
        ]
        assert await socket.ask([0, 5, "stream", [{"prompt": "a b"}]]) == [2, "token", [5, 0, 100, "a"]]
        assert await socket.hear() == [2, "token", [5, 1, 101, "b"]]
        assert await socket.hear() == [1, 5, None, result]


async def test_requests_may_be_cut_and_joined_in_any_way(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service, connected(service) as socket:
        packed = b"".join(msgpack.packb([0, n, "generate", [{"prompt": f"p{n}"}]]) for n in range(30))
        for start in range(0, len(packed), 7):
            await socket.tell(packed[start : start + 7])
        texts = {}
        for _ in range(30):
            _, msgid, error, result = await socket.hear()
            assert error is None
            texts[msgid] = result["text"]
        assert texts == {n: f"p{n}" for n in range(30)}


async def test_the_end_of_a_connection_frees_its_requests_at_once(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service:
        async with connected(service) as socket:
            await socket.tell([0, 1, "stream", [{"prompt": "hold"}]])
            await service.batcher.arrival("hold")
        await service.batcher.release("hold")
        while service.gateway.num_calls:
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_client_that_only_ends_its_own_side_gets_its_answers(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, connected(service) as socket:
        await socket.tell([0, 1, "generate", [{"prompt": "hold a"}]])
        await socket.tell([0, 2, "stream", [{"prompt": "hold b"}]])
        await socket.stream.send_eof()
        whole, streamed = [await service.batcher.arrival(f"hold {name}") for name in "ab"]
        for _ in range(5):
            await trio.testing.wait_all_tasks_blocked(0.02)
        streamed.emit("x")
        whole.finish()
        streamed.finish()
        heard = []
        while (message := await socket.hear()) is not None:
            if message != [2, "heartbeat", []]:
                heard.append(message[:2] if message[0] == 1 else message)
        assert sorted(heard) == [[1, 1], [1, 2], [2, "token", [2, 0, 100, "x"]]]
        assert sorted(service.batcher.freed) == []


async def test_a_client_that_is_gone_frees_its_requests_over_tcp_too(tmp_path: Path) -> None:
    async with served(tmp_path, "tcp") as service:
        async with connected(service) as socket:
            await socket.tell([0, 1, "generate", [{"prompt": "hold"}]])
            await service.batcher.arrival("hold")
        await service.batcher.release("hold")


async def test_bytes_without_an_end_get_a_last_error_and_others_go_on(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service, connected(service) as honest:
        for data, msgid, code in (
            (b"\x94\x00\x07\xc1", 7, "malformed_message"),
            (b"\x91" * 5000, None, "malformed_message"),
            (b"\x94\x00\x07\xdb\xff\xff\xff\xff" + b"x" * MAX_TRANSPORT_BYTES, 7, "frame_too_large"),
        ):
            async with connected(service) as socket:
                await socket.tell([0, 1, "stream", [{"prompt": "hold"}]])
                await service.batcher.arrival("hold")
                with trio.testing.assert_checkpoints():
                    await socket.tell(data)
                kind, got, error, _ = await socket.hear()
                assert (kind, got, error["code"]) == (1, msgid, code)
                assert await socket.hear() is None
            await service.batcher.release("hold")
            service.batcher.freed.clear()
        assert (await honest.ask([0, 1, "generate", [{"prompt": "ok"}]]))[3]["text"] == "ok"


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_who_is_still_writing_hears_the_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(rpc_gateway, "LINGER_S", PATIENCE_S)
    async with served(tmp_path, transport) as service, connected(service) as socket:
        await socket.tell(b"\xc1")
        assert (await socket.hear())[2]["code"] == "malformed_message"
        assert await socket.hear() is None  # nothing more comes, and what is on its way is still taken
        for _ in range(10):
            await socket.tell(bytes(1000))


async def test_our_own_fault_at_a_call_ends_that_call_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ServerConnection.result

    def fail_once(connection: ServerConnection, msgid: int, value: object) -> bytes:
        monkeypatch.setattr(ServerConnection, "result", result)
        raise ZeroDivisionError

    async with served(tmp_path, "unix") as service, connected(service) as socket, connected(service) as other:
        await other.tell([0, 1, "generate", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        monkeypatch.setattr(ServerConnection, "result", fail_once)
        assert (await socket.ask([0, 7, "stats", []]))[2]["code"] == "engine_error"
        assert (await socket.ask([0, 7, "stats", []]))[3]["steps"] == 7  # the msgid is free again
        held.finish()
        assert (await other.hear())[:3] == [1, 1, None]


async def test_what_follows_a_message_is_a_message_of_its_own(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service, connected(service) as socket:
        await socket.tell(msgpack.packb([0, 7, "generate", [{"prompt": "x"}]]) + b"\x91\x00")
        answers = [await socket.hear(), await socket.hear()]
        assert {answer[1] for answer in answers} == {None, 7}
        assert [answer[2]["code"] for answer in answers if answer[1] is None] == ["malformed_message"]
        assert (await socket.ask([0, 7, "stats", []]))[3]["steps"] == 7


DRAIN = msgpack.packb([0, 1, "drain", [{"timeout_s": 0.0}]])
POST = b"POST /v1 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("said", [POST + DRAIN * 3, b"\x00" + DRAIN, b"\x93\xc2\x01\xa1x" + DRAIN, b"\x90" + DRAIN])
async def test_who_speaks_another_protocol_is_cut_off_and_nothing_behind_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, transport: str, said: bytes
) -> None:
    calls: list[str] = []
    call = Dispatcher.call

    async def remember(dispatcher: Dispatcher, method: str, *args: Any, **named: Any) -> object:
        calls.append(method)
        return await call(dispatcher, method, *args, **named)

    monkeypatch.setattr(Dispatcher, "call", remember)
    caplog.set_level("INFO")
    async with served(tmp_path, transport) as service, connected(service, says_hello=False) as socket:
        await socket.tell(said)
        kind, msgid, error, _ = await socket.hear()
        assert (kind, msgid) == (1, None) and error["code"] in ("malformed_message", "unauthenticated")
        assert await socket.hear() is None
    assert not calls
    assert len(caplog.records) == 1


async def test_over_tcp_nothing_is_done_before_a_hello(tmp_path: Path) -> None:
    async with served(tmp_path, "tcp") as service:
        for first in ([0, 1, "drain", [{}]], [0, 1, "generate", [{"prompt": "a"}]], [0, 1, "hello", [{"x": 1}]], [3]):
            async with connected(service, says_hello=False) as socket:
                await socket.tell([2, "anything", [1.0]])  # a notification is passed over
                kind, msgid, error, _ = await socket.ask(first)
                assert (kind, msgid, error["code"]) == (1, first[1] if len(first) > 1 else None, "unauthenticated")
                assert "hello" in error["message"]
                assert await socket.hear() is None
        assert not service.batcher.requests
        async with connected(service) as socket:
            assert (await socket.ask([0, 1, "drain", [{"timeout_s": 3.0}]]))[3] == {"num_cancelled": 3}


async def test_a_hello_in_pieces_has_its_time_from_the_connections_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_gateway, "HELLO_S", 0.1)
    async with served(tmp_path, "tcp") as service, connected(service, says_hello=False) as socket:
        with trio.move_on_after(PATIENCE_S), suppress(trio.BrokenResourceError):
            for byte in b"\x94\x00\x00\xda\x04\x00" + b"x" * 1024:
                await socket.tell(bytes([byte]))
                await trio.sleep(0.01)
            raise AssertionError("it is still read")
        error = (await socket.hear())[2]
        assert (error["code"], error["message"]) == ("unauthenticated", "no hello came within 0.1 s")


async def test_messages_without_an_end_share_a_bound_which_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_gateway, "MAX_HALF_MESSAGES", 1_000_000)
    begin = b"\x94\x00\x07\xa8generate\x91\x81\xa6prompt\xdb\x00\x03\xe8\x00"  # 256,000 bytes follow
    async with served(tmp_path, "unix") as service, AsyncExitStack() as stack:
        assert isinstance(service.gateway, RPCGateway)
        budget, most = service.gateway._budget, 0
        honest = await stack.enter_async_context(connected(service))
        await honest.tell(begin)
        flood = []
        for _ in range(12):
            socket = await stack.enter_async_context(connected(service))
            flood.append(socket)
            await socket.tell(begin + bytes(200_000))
            await honest.tell(b"x" * 1000)
            await trio.testing.wait_all_tasks_blocked()
            most = max(most, budget.num_bytes)
        connections = list(service.gateway._connections)
        assert 800_000 < most <= 1_000_000
        for socket in flood[:7]:
            kind, msgid, error, _ = await socket.hear()
            assert (kind, msgid, error["code"], error["retry_after_ms"]) == (1, 7, "unavailable", 1000)
            assert await socket.hear() is None
        assert (await honest.ask(b"x" * (256_000 - 12_000)))[3]["token_ids"] == [100]  # it never stood still
        await stack.aclose()
        while service.gateway._connections:
            await trio.testing.wait_all_tasks_blocked()
        assert budget.num_bytes == 0
        assert not any(connection._splitter.num_held for connection in connections)


async def test_a_message_that_is_begun_must_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_gateway, "MESSAGE_S", 0.05)
    async with served(tmp_path, "unix") as service, connected(service) as idle, connected(service) as socket:
        kind, msgid, error, _ = await socket.ask(b"\x94\x00")
        assert (kind, msgid, error["code"]) == (1, None, "unavailable")
        assert await socket.hear() is None
        assert (await idle.ask([0, 1, "stats", []]))[3]["steps"] == 7  # who has begun nothing may be silent


async def test_a_client_that_does_not_read_loses_its_calls_and_its_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_WAITING", 50)
    async with served(tmp_path, "unix") as service, connected(service) as slow, connected(service) as other:
        await slow.tell([0, 5, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        while not service.batcher.freed:
            held.emit("x" * 20_000)
            await trio.testing.wait_all_tasks_blocked()
        assert (await other.ask([0, 1, "generate", [{"prompt": "quick"}]]))[3]["text"] == "quick"
        heard = [await slow.hear()]
        while heard[-1][0] == 2:
            heard.append(await slow.hear())
        indices = [params[1] for _, _, params in heard[:-1]]
        assert indices == list(range(len(indices)))  # gap-free as far as they came
        assert heard[-1][2]["code"] == "cancelled"
        assert (await slow.ask([0, 6, "generate", [{"prompt": "back"}]]))[3]["text"] == "back"


async def test_a_client_that_takes_nothing_for_long_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_gateway, "STALLED_S", 0.05)
    async with served(tmp_path, "unix") as service, connected(service) as slow:
        await slow.tell([0, 5, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        for _ in range(200):
            held.emit("x" * 20_000)
        await service.batcher.release("hold")
        while service.gateway.num_calls:
            await trio.testing.wait_all_tasks_blocked()


async def test_a_client_that_only_writes_is_read_no_further(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service, connected(service) as flood, connected(service) as other:
        bad = msgpack.packb([0, 1, "x" * 4000, []])
        with trio.move_on_after(0.3) as scope:
            while True:
                await flood.tell(bad * 16)
        assert scope.cancelled_caught
        assert isinstance(service.gateway, RPCGateway)
        assert all(one._outbox.num_waiting <= session.MAX_WAITING for one in service.gateway._connections)
        assert (await other.ask([0, 1, "generate", [{"prompt": "ok"}]]))[3]["text"] == "ok"


async def test_a_silent_client_with_a_lease_loses_its_calls_and_one_without_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_gateway, "SWEEP_S", 0.02)
    async with served(tmp_path, "unix") as service, connected(service) as silent, connected(service) as simple:
        await simple.tell([0, 1, "generate", [{"prompt": "hold simple"}]])
        held = await service.batcher.arrival("hold simple")
        await silent.tell([0, 1, "generate", [{"prompt": "hold silent"}]])
        await service.batcher.arrival("hold silent")
        await silent.tell([2, "heartbeat", [0.1]])
        await service.batcher.release("hold silent")
        heard = await silent.hear()
        while heard == [2, "heartbeat", []]:
            heard = await silent.hear()
        assert heard[2]["code"] == "unavailable" and heard[2]["retry_after_ms"]
        held.finish()
        assert (await simple.hear())[:3] == [1, 1, None]


async def test_credit_paces_one_stream_alone(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service, connected(service) as socket:
        await socket.tell([0, 1, "stream", [{"prompt": "hold a"}, {"credit": 2}]])
        await socket.tell([0, 2, "stream", [{"prompt": "hold b"}]])
        slow, quick = await service.batcher.arrival("hold a"), await service.batcher.arrival("hold b")
        for word in "abcd":
            slow.emit(word)
        slow.finish()
        assert [(await socket.hear())[2][3] for _ in range(2)] == ["a", "b"]
        quick.emit("x")
        assert await socket.hear() == [2, "token", [2, 0, 100, "x"]]
        await socket.tell([2, "credit", [1, 1]])
        assert await socket.hear() == [2, "token", [1, 2, 102, "c"]]
        await socket.tell([2, "credit", [1, 1000]])
        assert await socket.hear() == [2, "token", [1, 3, 103, "d"]]
        assert (await socket.hear())[3]["text"] == "abcd"  # after the last token, though it was there before
        quick.finish()
        assert (await socket.hear())[:2] == [1, 2]


async def test_a_stream_without_credit_for_long_is_cancelled_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_gateway, "SWEEP_S", 0.02)
    monkeypatch.setattr(session, "STALLED_S", 0.1)
    async with served(tmp_path, "unix") as service, connected(service) as socket:
        await socket.tell([0, 1, "stream", [{"prompt": "hold a"}, {"credit": 0}]])
        await socket.tell([0, 2, "stream", [{"prompt": "hold b"}, {"credit": 0}]])
        slow, idle = await service.batcher.arrival("hold a"), await service.batcher.arrival("hold b")
        slow.emit("a")
        kind, msgid, error, _ = await socket.hear()
        assert (kind, msgid, error["code"]) == (1, 1, "cancelled")
        await service.batcher.release("hold a")
        assert service.batcher.freed == ["hold a"]  # the other has no token that waits
        idle.finish()
        assert (await socket.hear())[:3] == [1, 2, None]


async def test_the_tokens_that_wait_for_credit_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_HELD", 5)
    async with served(tmp_path, "unix") as service, connected(service) as socket:
        await socket.tell([0, 1, "stream", [{"prompt": "hold"}, {"credit": 1}]])
        held = await service.batcher.arrival("hold")
        for _ in range(7):
            held.emit("x")
        assert await socket.hear() == [2, "token", [1, 0, 100, "x"]]
        error = (await socket.hear())[2]
        assert error["code"] == "cancelled"
        assert "more than 5 tokens" in error["message"]  # and not only after a stalled stream's time


async def test_tokens_that_wait_for_the_socket_share_messages_if_the_client_said_so(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service, connected(service) as socket:
        await socket.tell([0, 1, "stream", [{"prompt": "hold a"}, {"coalesce": True}]])
        await socket.tell([0, 2, "stream", [{"prompt": "hold b"}, {"coalesce": True}]])
        await socket.tell([0, 3, "stream", [{"prompt": "hold c"}]])
        first, second, plain = [await service.batcher.arrival(f"hold {name}") for name in "abc"]
        first.emit("a")
        assert await socket.hear() == [2, "token", [1, 0, 100, "a"]]
        first.emit("b")
        second.emit("c")
        first.emit("d")
        assert await socket.hear() == [2, "tokens", [[1, 1, 101, "b"], [2, 0, 100, "c"], [1, 2, 102, "d"]]]
        plain.emit("x")
        plain.emit("y")
        assert await socket.hear() == [2, "token", [3, 0, 100, "x"]]
        assert await socket.hear() == [2, "token", [3, 1, 101, "y"]]


async def test_stopping_ends_open_calls_and_removes_the_file(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service, connected(service) as socket:
        path = trio.Path(service.address.removeprefix("unix://"))
        assert stat.S_IMODE((await path.stat()).st_mode) == 0o600
        await socket.tell([0, 1, "stream", [{"prompt": "hold"}]])
        await service.batcher.arrival("hold")
        service.gateway_scope.cancel()
        kind, msgid, error, _ = await socket.hear()
        assert (kind, msgid, error["code"]) == (1, 1, "unavailable")
        assert await socket.hear() is None
        await service.batcher.release("hold")
        await socket.stream.aclose()
        while await path.exists():
            await trio.testing.wait_all_tasks_blocked()


async def test_connections_that_have_ended_are_forgotten(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service:
        assert isinstance(service.gateway, RPCGateway)
        for _ in range(3):
            async with connected(service) as socket:
                assert (await socket.ask([0, 1, "stats", []]))[3]["steps"] == 7
        with trio.fail_after(100):
            while service.gateway._connections:
                await trio.testing.wait_all_tasks_blocked(0.01)


async def test_too_many_connections_are_told_so(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service, connected(service) as socket:
        assert isinstance(service.gateway, RPCGateway)
        service.gateway._limit.most = 1
        assert (await socket.ask([0, 1, "stats", []]))[3]["steps"] == 7
        async with connected(service) as late:
            error = (await late.hear())[2]
            assert (error["code"], error["retry_after_ms"]) == ("unavailable", 1000)
            assert await late.hear() is None
        assert (await socket.ask([0, 1, "stats", []]))[3]["steps"] == 7


async def test_who_is_pushed_out_is_told_to_come_again_and_who_has_spoken_is_not(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service, AsyncExitStack() as stack:
        assert isinstance(service.gateway, RPCGateway)
        service.gateway._limit.most = 8
        path = service.address.removeprefix("unix://")
        # All of them are connected before the gateway has accepted the first.
        flood = [stack.enter_context(sockets.socket(sockets.AF_UNIX)) for _ in range(80)]
        honest = flood[40]
        for one in flood:
            one.connect(path)
        honest.send(msgpack.packb([0, 1, "stats", []]))
        streams = [trio.SocketStream(trio.socket.from_stdlib_socket(one)) for one in flood]
        for stream in streams:
            stack.push_async_callback(stream.aclose)
        for number, stream in enumerate(streams[:70]):
            socket = Socket(stream)
            if flood[number] is honest:
                assert (await socket.hear())[3]["steps"] == 7
                assert (await socket.ask([0, 2, "stats", []]))[3]["steps"] == 7
            else:
                error = (await socket.hear())[2]
                assert (error["code"], error["retry_after_ms"]) == ("unavailable", 1000)
                assert await socket.hear() is None


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://0.0.0.0:0", "strangers"),
        ("tcp://*:0", "strangers"),
        ("tcp://127.0.0.1", "HOST:PORT"),
        ("tcp://127.0.0.1:99999", "HOST:PORT"),
        ("ipc:///tmp/x", "must start with"),
        ("unix://", "path of a file"),
        ("unix:///" + "x" * 120, "bytes"),
    ],
)
async def test_an_address_that_others_can_reach_or_that_is_none_is_refused(address: str, reason: str) -> None:
    with pytest.raises(AddressError, match=reason):
        await RPCGateway(Dispatcher(Registry().ref("batcher")), address).run()


async def test_an_address_in_use_is_refused_and_a_dead_services_file_is_not(tmp_path: Path) -> None:
    async with served(tmp_path, "unix") as service:
        with pytest.raises(AddressError, match="another service"):
            await RPCGateway(Dispatcher(service.ref), service.address).run()
    dead = trio.socket.socket(trio.socket.AF_UNIX)
    await dead.bind(str(tmp_path / "socket"))
    dead.close()
    async with served(tmp_path, "unix") as service, connected(service) as socket:
        assert (await socket.ask([0, 1, "stats", []]))[3]["steps"] == 7


async def test_what_arrives_while_the_gateway_stops_is_answered_and_never_begun() -> None:
    """Its nursery takes no tasks any more, and whoever started one would wait for it for ever."""
    batcher = ScriptedBatcher()
    async with trio.open_nursery() as nursery:
        ref = await start(nursery, batcher)
        async with trio.open_nursery() as calls:
            host = CallHost(calls)
            box = Outbox()
            peer = RPCSession(Dispatcher(ref), host, box, lambda: None, peer=Peer("c", "c"))
            host.closing = Unavailable("the service is stopping")
            peer.receive(msgpack.packb([0, 1, "generate", [{"prompt": "hold"}]]))
        peer.receive(msgpack.packb([0, 2, "generate", [{"prompt": "hold"}]]))
        answers = [msgpack.unpackb(message) for message in iter(partial(_taken, box), None)]
        assert [(answer[1], answer[2]["code"]) for answer in answers] == [(1, "unavailable"), (2, "unavailable")]
        assert not batcher.requests and not peer.num_calls
        await ref.stop()


def _taken(box: Outbox) -> bytes | None:
    message = box.head()
    if message is not None:
        box.pop()
    return message


async def test_credit_that_comes_late_pays_for_as_many_of_the_tokens_that_wait() -> None:
    outbox = Outbox()
    call = OpenCall(StreamOptions(credit=1), outbox)
    sent = [call.deliver([1, index, 0, "a"]) for index in range(5)]
    assert sent == [True, False, False, False, False]
    call.grant(2)
    assert outbox.num_waiting == 3 and not call.deliver([1, 5, 0, "a"])
    call.grant(10)
    assert outbox.num_waiting == 6
