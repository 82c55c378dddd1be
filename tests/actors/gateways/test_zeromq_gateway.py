"""The gateway over real sockets, spoken to in plain msgpack, so that nothing of ours vouches for the bytes."""

import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import trio.testing
import zmq

from genbatch.actors.gateways import session, zeromq_gateway
from genbatch.actors.gateways.addresses import default_address
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime import zeromq_socket
from genbatch.actors.runtime.supervisor import Registry
from genbatch.actors.runtime.zeromq_socket import ZeroMQSocket, open_socket
from genbatch.actors.security.key_files import AddressError
from genbatch.proto.codec import MAX_TRANSPORT_BYTES, REQUEST_LIMITS
from tests.actors.gateways.scripted_batcher import Held, Served, served

pytestmark = pytest.mark.trio

# Stands in for a client that is killed: it asks for tokens that do not come, and says so.
DOOMED_CLIENT = """
import sys, msgpack, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(msgpack.packb([2, "heartbeat", [60.0]]))
socket.send(msgpack.packb([0, 1, "stream", [{"prompt": "hold"}]]))
print("asked", flush=True)
socket.recv()
sys.stdin.read()
"""


@asynccontextmanager
async def dealer(service: Served, *, identity: bytes | None = None) -> AsyncIterator[ZeroMQSocket]:
    async with open_socket(zmq.DEALER, linger_ms=100) as socket:
        if identity is not None:
            socket.set(zmq.IDENTITY, identity)
        socket.connect(service.address)
        yield socket


async def tell(socket: ZeroMQSocket, message: Any) -> None:
    await socket.send([message if isinstance(message, bytes) else msgpack.packb(message)])


async def hear(socket: ZeroMQSocket) -> Any:
    (data,) = await socket.recv()
    return msgpack.unpackb(data, strict_map_key=False)


async def ask(socket: ZeroMQSocket, message: Any) -> Any:
    await tell(socket, message)
    return await hear(socket)


async def emit_until_freed(service: Served, held: Held, prompt: str) -> None:
    """Lets tokens come for as long as somebody is thought to want them."""
    while prompt not in service.batcher.freed:
        held.emit("word ")
        await trio.testing.wait_all_tasks_blocked(0.002)


async def test_generate_gets_one_response(tmp_path: Path) -> None:
    async with served(tmp_path) as service, dealer(service) as socket:
        assert await ask(socket, [0, 2**64 - 1, "generate", [{"prompt": "a b", "max_tokens": 4}]]) == [
            1,
            2**64 - 1,
            None,
            {
                "text": "ab",
                "token_ids": [100, 101],
                "finish_reason": "stop",
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1},
            },
        ]
        assert (await ask(socket, [0, 1, "stats", [{}]]))[3]["steps"] == 7


async def test_a_stream_is_tokens_and_then_the_response(tmp_path: Path) -> None:
    async with served(tmp_path) as service, dealer(service) as socket:
        await tell(socket, [0, 9, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        for index, word in enumerate(["un", "deux", "trois"]):
            held.emit(word)
            assert await hear(socket) == [2, "token", [9, index, 100 + index, word]]
        held.finish()
        kind, msgid, error, result = await hear(socket)
        assert (kind, msgid, error, result["text"]) == (1, 9, None, "undeuxtrois")
        while service.gateway.num_calls:
            await trio.lowlevel.checkpoint()


async def test_a_req_socket_gets_whole_replies_and_a_clear_error_for_a_stream(tmp_path: Path) -> None:
    async with served(tmp_path) as service, open_socket(zmq.REQ) as socket:
        socket.connect(service.address)
        assert (await ask(socket, [0, 1, "generate", [{"prompt": "a b"}]]))[3]["text"] == "ab"
        _, _, error, _ = await ask(socket, [0, 2, "stream", [{"prompt": "a b"}]])
        assert (error["code"], error["field"]) == ("invalid_request", "method")
        assert (await ask(socket, b"\xc1"))[2]["code"] == "malformed_message"
        assert (await ask(socket, [0, 3, "stats", []]))[3]["steps"] == 7


async def test_many_calls_of_many_clients_run_at_once_and_get_their_own_answers(tmp_path: Path) -> None:
    async def client(service: Served, name: str) -> None:
        async with dealer(service) as socket:
            for msgid in range(20):
                await tell(socket, [0, msgid, "generate", [{"prompt": f"{name} {msgid}"}]])
            texts = {}
            for _ in range(20):
                _, msgid, error, result = await hear(socket)
                assert error is None
                texts[msgid] = result["text"]
            assert texts == {msgid: f"{name}{msgid}" for msgid in range(20)}

    async with served(tmp_path) as service, trio.open_nursery() as clients:
        for name in "abcdefgh":
            clients.start_soon(client, service, name)


BAD = [
    ([0, 7, "generat", [{"prompt": "x"}]], 7, "unknown_method", None),
    ([0, 7, "generate", [{"prompt": "x", "temprature": 1.0}]], 7, "invalid_request", "temprature"),
    ([0, 7, "generate", [{"prompt": "x", "temperature": float("nan")}]], 7, "invalid_request", "temperature"),
    ([0, 7, "generate", [{"prompt": "x", "temperature": -1}]], 7, "invalid_request", "temperature"),
    ([0, 7, "generate", [{"prompt": "x", "max_tokens": 0}]], 7, "invalid_request", "max_tokens"),
    ([0, 7, "generate", [{"prompt": "x", "max_tokens": 2**64 - 1}]], 7, "invalid_request", "max_tokens"),
    ([0, 7, "generate", [{"prompt": "x", "seed": -(2**63)}]], 7, "invalid_request", "seed"),
    ([0, 7, "generate", [{"prompt": "x", "n": True}]], 7, "invalid_request", "n"),
    ([0, 7, "generate", [{"token_ids": [1, "2"]}]], 7, "invalid_request", "token_ids[1]"),
    ([0, 7, "generate", [{"token_ids": [1, -2]}]], 7, "invalid_request", "token_ids[1]"),
    ([0, 7, "generate", [{"messages": [{"role": 5}]}]], 7, "invalid_request", "messages[0].role"),
    ([0, 7, "generate", [{"prompt": ""}]], 7, "invalid_request", "prompt"),
    ([0, 7, "generate", [{}]], 7, "invalid_request", "prompt"),
    ([0, 7, "stats", [{"x": 1}]], 7, "invalid_request", "x"),
    ([0, 7, "generate", ["prompt"]], 7, "malformed_message", None),
    ([0, -1, "generate", [{}]], None, "malformed_message", None),
    ([0, 7, "fault", {}], 7, "malformed_message", None),
    (b"", None, "malformed_message", None),
    (b"\x91" * 5000, None, "malformed_message", None),
    (b"\xdd\xff\xff\xff\xff", None, "malformed_message", None),
    (msgpack.packb([0, 7, "generate", [{"prompt": "x"}]]) + b"\x00", 7, "malformed_message", None),
    ([0, 7, "generate", [{"prompt": "x" * REQUEST_LIMITS.max_bytes}]], 7, "frame_too_large", None),
]


async def test_every_bad_message_gets_a_typed_error_and_the_connection_survives_it(tmp_path: Path) -> None:
    async with served(tmp_path) as service, dealer(service) as socket:
        for message, msgid, code, field in BAD:
            kind, got, error, result = await ask(socket, message)
            assert (kind, got, error["code"], error.get("field"), result) == (1, msgid, code, field, None), message
            assert error["message"]
        await socket.send([b"two", b"frames"])
        assert (await hear(socket))[2]["code"] == "malformed_message"
        await socket.send([b"", b"", b""])
        assert msgpack.unpackb((await socket.recv())[-1])[2]["code"] == "malformed_message"
        assert (await ask(socket, [0, 7, "generate", [{"prompt": "still here"}]]))[3]["text"] == "stillhere"
        assert service.gateway.num_calls == 0


async def test_a_frame_beyond_the_transports_limit_ends_that_connection_only(tmp_path: Path) -> None:
    async with served(tmp_path) as service, dealer(service) as honest, open_socket(zmq.DEALER) as hostile:
        monitor = ZeroMQSocket(hostile.monitor(zmq.EVENT_DISCONNECTED))
        trio.lowlevel.spawn_system_task(monitor.pump)
        hostile.connect(service.address)
        await hostile.send([b"x" * (MAX_TRANSPORT_BYTES + 1)])
        await monitor.recv()
        monitor.close()
        assert (await ask(honest, [0, 1, "generate", [{"prompt": "ok"}]]))[3]["text"] == "ok"


async def test_a_failed_request_fails_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as service, dealer(service) as socket:
        await tell(socket, [0, 1, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        _, msgid, error, _ = await ask(socket, [0, 2, "generate", [{"prompt": "fault"}]])
        assert (msgid, error) == (2, {"code": "engine_error", "message": "the step failed", "retry_after_ms": 5})
        held.finish()
        assert (await hear(socket))[:3] == [1, 1, None]


async def test_b03_a_msgid_in_flight_is_refused_and_usable_again_after_its_final(tmp_path: Path) -> None:
    async with served(tmp_path) as service, dealer(service) as socket:
        await tell(socket, [0, 5, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        _, msgid, error, _ = await ask(socket, [0, 5, "stream", [{"prompt": "other"}]])
        assert (msgid, error["code"], error["field"]) == (None, "invalid_request", "msgid")
        held.emit("mine")
        assert await hear(socket) == [2, "token", [5, 0, 100, "mine"]]
        held.finish()
        assert (await hear(socket))[3]["text"] == "mine"
        assert (await ask(socket, [0, 5, "generate", [{"prompt": "again"}]]))[3]["text"] == "again"


async def test_cancel_frees_the_request_and_gets_its_final(tmp_path: Path) -> None:
    async with served(tmp_path) as service, dealer(service) as socket:
        await tell(socket, [0, 5, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        held.emit("a")
        await hear(socket)
        await tell(socket, [2, "cancel", [5]])
        _, msgid, error, result = await hear(socket)
        assert (msgid, error["code"], result) == (5, "cancelled", None)
        await service.batcher.release("hold")
        held.emit("too late")
        assert (await ask(socket, [0, 6, "generate", [{"prompt": "next"}]]))[1] == 6


async def test_a_client_that_closes_in_mid_stream_frees_its_requests(tmp_path: Path) -> None:
    async with served(tmp_path) as service:
        async with dealer(service) as socket:
            await tell(socket, [0, 5, "stream", [{"prompt": "hold"}]])
            held = await service.batcher.arrival("hold")
            held.emit("a")
            await hear(socket)
        await emit_until_freed(service, held, "hold")


async def test_a_client_killed_before_its_first_token_frees_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq_gateway, "SWEEP_S", 0.05)
    async with served(tmp_path) as service:
        process = await trio.to_thread.run_sync(
            lambda: subprocess.Popen([sys.executable, "-c", DOOMED_CLIENT, service.address], stdin=subprocess.PIPE)
        )
        await service.batcher.arrival("hold")
        process.kill()
        await trio.to_thread.run_sync(process.wait)
        assert process.stdin is not None
        process.stdin.close()
        await service.batcher.release("hold")


async def test_a_client_silent_for_longer_than_it_promised_loses_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq_gateway, "SWEEP_S", 0.02)
    async with served(tmp_path) as service, dealer(service) as silent, dealer(service) as unpromised:
        await tell(unpromised, [0, 1, "stream", [{"prompt": "hold it"}]])
        await service.batcher.arrival("hold it")
        await tell(silent, [0, 5, "stream", [{"prompt": "hold"}]])
        await service.batcher.arrival("hold")
        await tell(silent, [2, "heartbeat", [0.2]])
        await service.batcher.release("hold")
        heard = [await hear(silent)]
        while heard[-1][0] == 2:
            assert heard[-1] == [2, "heartbeat", []]
            heard.append(await hear(silent))
        assert heard[-1][:2] == [1, 5]
        assert heard[-1][2]["code"] == "unavailable" and heard[-1][2]["retry_after_ms"]
        assert service.batcher.freed == ["hold"]


async def test_a_client_that_does_not_read_loses_its_calls_and_others_do_not_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_WAITING", 50)
    async with served(tmp_path) as service, dealer(service) as slow, dealer(service) as other:
        await tell(slow, [0, 5, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        while not service.batcher.freed:
            held.emit("x" * 20_000)
            await trio.testing.wait_all_tasks_blocked(0.001)
        assert (await ask(other, [0, 1, "generate", [{"prompt": "quick"}]]))[3]["text"] == "quick"
        heard = [await hear(slow)]
        while heard[-1][0] == 2:
            heard.append(await hear(slow))
        indices = [params[0][1] for _, name, *params in heard[:-1] if name == "token"]
        assert indices == list(range(len(indices)))  # gap-free as far as they came
        assert len(indices) < len(held.tokens)
        assert heard[-1][:2] == [1, 5]
        assert heard[-1][2]["code"] == "cancelled"
        assert (await ask(slow, [0, 6, "generate", [{"prompt": "back"}]]))[3]["text"] == "back"


async def test_a_client_that_reads_nothing_for_long_loses_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq_gateway, "SWEEP_S", 0.02)
    monkeypatch.setattr(zeromq_gateway, "STALLED_S", 0.1)
    monkeypatch.setattr(zeromq_socket, "HEARTBEAT_IVL", 0)  # ZeroMQ's own would find out too, where the client has them
    async with served(tmp_path) as service, dealer(service) as slow:
        await tell(slow, [0, 5, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        (peer,) = service.gateway._peers.values()
        while "hold" not in service.batcher.freed:
            if not peer.outbox:  # what ZeroMQ holds on the way is full when the client has taken nothing for long
                held.emit("x" * 20_000)
            assert peer.outbox.num_waiting <= 1, "too little for it to be cut off for that"
            await trio.testing.wait_all_tasks_blocked(0.001)


async def test_after_each_row_of_sends_whoever_may_go_on_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[str] = []
    send, settle = ZeroMQSocket.try_send_unsettled, ZeroMQSocket.settle

    def noted_send(socket: ZeroMQSocket, parts: Sequence[bytes]) -> bool:
        rows.append("send")
        return len(rows) > 1 and send(socket, parts)  # the first finds no room, and is tried again

    def noted_settle(socket: ZeroMQSocket) -> None:
        rows.append("settle")
        settle(socket)

    monkeypatch.setattr(ZeroMQSocket, "try_send_unsettled", noted_send)
    monkeypatch.setattr(ZeroMQSocket, "settle", noted_settle)
    async with served(tmp_path) as service, dealer(service) as client:
        assert (await ask(client, [0, 1, "generate", [{"prompt": "quick"}]]))[3]["text"] == "quick"
        assert rows == ["send", "settle", "send", "settle"]


async def test_a_client_that_only_writes_cannot_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_WAITING", 20)
    largest, answered, post = 0, trio.Event(), session.Outbox.post

    def noted_post(box: session.Outbox, message: bytes) -> None:
        nonlocal largest
        post(box, message)
        largest = max(largest, box.num_waiting)
        answered.set()

    monkeypatch.setattr(session.Outbox, "post", noted_post)
    async with served(tmp_path) as service, dealer(service) as flood:
        bad = b"\xc1" * 4096
        for _ in range(20_000):
            await flood.send([bad])
        with trio.fail_after(100):
            await answered.wait()  # all of it may still be on its way
        assert largest <= 20 + 2 * zeromq_gateway.MESSAGES_PER_TURN  # a turn to take them, and one to send
        async with dealer(service) as other:
            assert (await ask(other, [0, 1, "generate", [{"prompt": "ok"}]]))[3]["text"] == "ok"


async def test_a_second_connection_with_the_same_identity_takes_nothing_over(tmp_path: Path) -> None:
    async with served(tmp_path) as service, dealer(service, identity=b"me") as first:
        await tell(first, [0, 5, "stream", [{"prompt": "hold"}]])
        held = await service.batcher.arrival("hold")
        async with dealer(service, identity=b"me") as second:
            await tell(second, [2, "cancel", [5]])
            await trio.testing.wait_all_tasks_blocked(0.05)
        held.emit("mine")
        assert await hear(first) == [2, "token", [5, 0, 100, "mine"]]


async def test_stopping_the_gateway_ends_open_calls_and_removes_its_file(tmp_path: Path) -> None:
    async with served(tmp_path) as service, dealer(service) as socket:
        await tell(socket, [0, 5, "stream", [{"prompt": "hold"}]])
        await service.batcher.arrival("hold")
        service.gateway_scope.cancel()
        _, msgid, error, _ = await hear(socket)
        assert (msgid, error["code"]) == (5, "unavailable")
        await service.batcher.release("hold")
        while Path(service.address.removeprefix("ipc://")).exists():  # noqa: ASYNC240
            await trio.testing.wait_all_tasks_blocked()


async def test_a_batcher_that_is_down_is_unavailable(tmp_path: Path, nursery: trio.Nursery) -> None:
    gateway = ZeroMQGateway(Dispatcher(Registry().ref("batcher")), f"ipc://{tmp_path / 'socket'}")
    address = await nursery.start(gateway.run)
    async with open_socket(zmq.DEALER) as socket:
        socket.connect(address)
        error = (await ask(socket, [0, 1, "generate", [{"prompt": "a"}]]))[2]
        assert error["code"] == "unavailable" and error["retry_after_ms"] > 0


async def test_idle_clients_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_gateway, "SWEEP_S", 0.02)
    monkeypatch.setattr(zeromq_gateway, "DEFAULT_LEASE_S", 0.05)
    async with served(tmp_path) as service, dealer(service) as socket:
        await ask(socket, [0, 1, "generate", [{"prompt": "a"}]])
        while service.gateway._peers:
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert (await ask(socket, [0, 2, "generate", [{"prompt": "a"}]]))[1] == 2


# Addresses


async def start_at(nursery: trio.Nursery, address: str) -> str:
    bound: str = await nursery.start(ZeroMQGateway(Dispatcher(Registry().ref("batcher")), address).run)
    return bound


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://0.0.0.0:5555", "--keys DIR"),
        ("tcp://*:5555", "--keys DIR"),
        ("tcp://[::]:5555", "--keys DIR"),
        ("tcp://192.0.2.1:5555", "--keys DIR"),
        ("tcp://eth0:5555", "--keys DIR"),
        ("tcp://127.0.0.1.example.org:5555", "--keys DIR"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("udp://127.0.0.1:5555", "must start with"),
        ("/tmp/socket", "must start with"),
        ("inproc://x", "must start with"),
        ("ipc://", "needs the path"),
        ("ipc://@abstract", "needs the path"),
        ("ipc://*", "needs the path"),
        ("ipc:///tmp/" + "x" * 120, "more than 103 bytes"),
        ("ipc:///proc/nowhere/socket", "cannot listen"),
    ],
)
async def test_an_address_that_others_can_reach_or_that_is_none_is_refused(
    address: str, reason: str, nursery: trio.Nursery
) -> None:
    with pytest.raises(AddressError, match=reason) as info:
        await start_at(nursery, address)
    assert address in str(info.value)


async def test_a_port_of_the_systems_choice_is_told(nursery: trio.Nursery) -> None:
    address = await start_at(nursery, "tcp://127.0.0.1:*")
    assert address.rpartition(":")[2].isdecimal()
    with pytest.raises(AddressError, match="in use"):
        await start_at(nursery, address)


async def test_only_the_owner_can_reach_the_socket_file(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / "new" / "socket"
    await start_at(nursery, f"ipc://{path}")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


async def test_a_dead_services_file_is_replaced_a_live_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    script = "import sys, zmq, os; s = zmq.Context().socket(zmq.ROUTER); s.bind(sys.argv[1]); os._exit(0)"
    await trio.run_process([sys.executable, "-c", script, f"ipc://{path}"])
    assert path.is_socket()
    async with trio.open_nursery() as nursery:
        await start_at(nursery, f"ipc://{path}")
        with pytest.raises(AddressError, match="another service listens there"):
            await start_at(nursery, f"ipc://{path}")
        assert path.is_socket()
        nursery.cancel_scope.cancel()
    assert not path.exists()
    path.write_text("precious")
    async with trio.open_nursery() as nursery:
        with pytest.raises(AddressError, match="no socket"):
            await start_at(nursery, f"ipc://{path}")
    assert path.read_text() == "precious"


async def test_the_default_directory_must_be_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = default_address()
    async with trio.open_nursery() as nursery:
        assert await start_at(nursery, address) == address
        nursery.cancel_scope.cancel()
    (tmp_path / "genbatch").chmod(0o755)
    async with trio.open_nursery() as nursery:
        with pytest.raises(AddressError, match="alone"):
            await start_at(nursery, address)
    (tmp_path / "genbatch").rmdir()
    (tmp_path / "genbatch").symlink_to(tmp_path)
    async with trio.open_nursery() as nursery:
        with pytest.raises(AddressError, match="alone"):
            await start_at(nursery, address)
