"""Floods of connections, messages and garbage: they end themselves, and honest clients are served meanwhile."""

import socket
import struct
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import cast

import pytest
import trio
import zmq

from genbatch.actors.gateways import zeromq_guard
from genbatch.actors.gateways.zeromq_guard import ZeroMQConnections
from genbatch.actors.runtime import zeromq_socket
from genbatch.actors.runtime.zeromq_socket import ZeroMQSocket
from genbatch.actors.security.security import Security
from tests.actors.gateways.guarded import ask, dealer, guarded, listening, until_closed, zmtp_stream

pytestmark = pytest.mark.trio


async def test_a_flood_of_connections_that_never_speak_pushes_itself_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq_guard, "max_connections", lambda: 20)
    monkeypatch.setattr(zeromq_socket, "HANDSHAKE_IVL", 3_600_000)  # an hour: no handshake times out here
    async with (
        guarded(tmp_path) as service,
        dealer(service.address, service.client_key("alice")) as socket,
        AsyncExitStack() as stack,
    ):
        assert (await ask(socket, [0, 1, "generate", [{"prompt": "a b"}]]))[2] is None
        flood = [
            await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", service.port)) for _ in range(100)
        ]
        # Who is in is served, and who comes now gets in.
        for msgid in range(2, 30):
            assert (await ask(socket, [0, msgid, "generate", [{"prompt": "a b"}]]))[2] is None
        assert await service.is_well(service.client_key("bob"))
        for stream in flood[:80]:
            await until_closed(stream)
        assert len(service.gateway._guard.connections) <= 20
        assert (await ask(socket, [0, 99, "generate", [{"prompt": "a b"}]]))[2] is None


async def test_connections_that_never_speak_end_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_socket, "HANDSHAKE_IVL", 100)
    async with guarded(tmp_path) as service, await trio.open_tcp_stream("127.0.0.1", service.port) as stream:
        await until_closed(stream)


async def test_a_flood_that_ends_with_a_reset_does_not_take_the_process_down() -> None:
    message, ping = b"\x00\x01x", b"\x04\x07\x04PING\x00\x00"
    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway):
        port = int(gateway.address.rpartition(":")[2])
        for _ in range(3):
            # With a bounded queue libzmq stops reading in the middle, and aborts when it goes on after the reset.
            stream = await zmtp_stream(port)
            await stream.send_all((message * 10 + ping) * 300)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await stream.aclose()
        async with dealer(gateway.address) as honest:
            assert (await ask(honest, [0, 1, "generate", [{"prompt": "a b"}]]))[3]["text"] == "ab"


async def test_who_sends_too_much_at_once_is_cut_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_guard, "MAX_MESSAGES_AT_ONCE", 500)
    monkeypatch.setattr(zeromq_socket, "HEARTBEAT_IVL", 0)  # else it would end for want of a pong
    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway):
        port = int(gateway.address.rpartition(":")[2])
        async with dealer(gateway.address) as honest, await zmtp_stream(port) as stream:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(b"\x00\x01x" * 20_000)
            for msgid in range(20):
                assert (await ask(honest, [0, msgid, "generate", [{"prompt": "a b"}]]))[2] is None
            await until_closed(stream)
            assert (await ask(honest, [0, 99, "generate", [{"prompt": "a b"}]]))[2] is None


async def test_garbage_before_the_handshake_ends_only_the_connection_it_came_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq_socket, "HANDSHAKE_IVL", 200)
    garbage = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\x03" + b"NULL",
        b"\xff" + bytes(7) + b"\x01\x7f\x03\x00CURVE" + bytes(15) + b"\0" + bytes(31) + b"\x06" + b"\xff" * 8,
        bytes(2**16),
        b"\x93\x00\x01\xa5stats",
    ]
    async with guarded(tmp_path) as service:
        for data in garbage:
            async with await trio.open_tcp_stream("127.0.0.1", service.port) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(data)
                await until_closed(stream)
        assert service.batcher.requests == []
        assert await service.is_well(service.client_key("alice"))


async def test_who_has_spoken_is_not_pushed_out_before_it_was_heard() -> None:
    class Monitor:
        def __init__(self) -> None:
            self.begun: list[int] = []

        async def recv_many(self, most: int) -> list[list[bytes]]:
            return self.try_recv_many(most)

        def try_recv_many(self, most: int) -> list[list[bytes]]:
            begun, self.begun = self.begun[:most], self.begun[most:]
            return [[struct.pack("=HI", zmq.EVENT_ACCEPTED, one), b""] for one in begun]

    monitor, has_unread = Monitor(), True
    connections = ZeroMQConnections(cast(ZeroMQSocket, monitor), 8, lambda: has_unread)
    honest, others = 100, range(101, 109)
    monitor.begun = [honest, *others]
    await connections.changed()
    assert honest in connections  # it was silent for longest, but what has come is not read yet
    connections.ended()  # asked for in the middle of what has come
    assert honest in connections
    connections.heard(honest, b"")
    has_unread = False
    connections.emptied()
    assert honest in connections and others[0] not in connections
    monitor.begun, has_unread = list(range(200, 220)), True
    await connections.changed()
    assert sum(one in connections for one in range(100, 220)) == 10  # so far it is put off, and no further
    assert honest in connections
