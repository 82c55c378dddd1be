"""Messages without an end, and frames that claim to be huge, byte by byte: nothing that libzmq would send itself."""

import errno
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import msgpack
import pytest
import trio
import trio.testing
import zmq

from genbatch.actors.gateways import zeromq_guard
from genbatch.actors.gateways.zeromq_gateway import MESSAGES_PER_TURN
from genbatch.actors.gateways.zeromq_guard import UnfinishedMessages
from genbatch.actors.runtime import zeromq_socket
from genbatch.actors.runtime.zeromq_socket import Signed
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.actors.security.security import Security, open_security
from genbatch.proto.codec import MAX_TRANSPORT_BYTES
from tests.actors.gateways.guarded import ask, dealer, hear, listening, tell, until_closed, zmtp_stream
from tests.waiting import a_moment, received_until

pytestmark = pytest.mark.trio

PART = b"\x03" + (2**16).to_bytes(8, "big") + b"x" * 2**16  # one of a message that goes on
# It is cut off long before that, whatever the machine is busy with.
MOST = 2**29


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_a_message_of_parts_without_an_end_is_cut_off_alone() -> None:
    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway), dealer(gateway.address) as honest:
        port = int(gateway.address.rpartition(":")[2])
        assert (await ask(honest, [0, 1, "generate", [{"prompt": "a b"}]]))[2] is None
        before, sent = resident_bytes(), 0
        async with await zmtp_stream(port) as stream:
            with suppress(trio.BrokenResourceError):
                while sent < MOST:
                    await stream.send_all(PART)
                    sent += len(PART)
        assert sent < MOST
        assert resident_bytes() - before < 100 * MAX_TRANSPORT_BYTES
        assert sent > MAX_TRANSPORT_BYTES
        assert (await ask(honest, [0, 2, "generate", [{"prompt": "a b"}]]))[2] is None


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_client_may_send_any_number_of_whole_messages_and_stay_idle_for_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, encrypted: bool
) -> None:
    """Both kinds of bytes come in numbers that would be far too many, if they were those of one message."""
    monkeypatch.setattr(zeromq_guard, "MAX_BYTES_BETWEEN", 1000)
    monkeypatch.setattr(zeromq_guard, "LOOK_S", 0.001)
    monkeypatch.setattr(zeromq_socket, "HEARTBEAT_IVL", 5)
    store = KeyStore(tmp_path / "keys")
    store.new_server()
    security = open_security(keys=str(store.directory)) if encrypted else Security()
    key = str(store.new_client("alice")) if encrypted else None
    async with listening("tcp://127.0.0.1:*", security) as (_, gateway), dealer(gateway.address, key) as client:
        for msgid in range(40):
            assert (await ask(client, [0, msgid, "generate", [{"prompt": "x" * 40 * msgid}]]))[1] == msgid
        unfinished = gateway._guard.connections.unfinished
        (arrived,) = unfinished._arrived.values()
        while arrived.num_held < 10_000:  # heartbeats
            await a_moment()
        assert (await ask(client, [0, 99, "generate", [{"prompt": "a b"}]]))[1] == 99
        assert unfinished.num_held < 1000  # a whole message settles all before it
    assert "cut off" not in caplog.text


async def held(unfinished: UnfinishedMessages, least: int, most: int) -> None:
    """Waits until libzmq holds so many bytes of messages that have not ended."""
    while not least <= unfinished.num_held <= most:
        await a_moment()


HALF = 2**16
BEGUN = {
    "frame": b"\x02" + (2**20).to_bytes(8, "big") + bytes(HALF),
    "many frames without content": b"\x01\x00" * (HALF // 2),
}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
async def test_messages_without_an_end_share_a_bound_which_is_given_back(
    monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(zeromq_guard, "MAX_UNFINISHED", 5 * HALF)
    async with (
        listening("tcp://127.0.0.1:*", Security()) as (batcher, gateway),
        dealer(gateway.address) as honest,
        AsyncExitStack() as stack,
    ):
        await tell(honest, [0, 1, "generate", [{"prompt": "hold on"}]])
        await batcher.arrival("hold on")
        unfinished, port = gateway._guard.connections.unfinished, int(gateway.address.rpartition(":")[2])
        streams = []
        for _ in range(30):
            streams.append(await stack.enter_async_context(await zmtp_stream(port)))
            with suppress(trio.BrokenResourceError):
                await streams[-1].send_all(begun)
        for stream in streams[:20]:
            await until_closed(stream)
        await held(unfinished, 1, 5 * HALF)
        assert (await ask(honest, [0, 2, "generate", [{"prompt": "a b"}]]))[1] == 2
        batcher.held["hold on"].finish()
        assert (await hear(honest))[:3] == [1, 1, None]
        await stack.aclose()
        await held(unfinished, 0, HALF // 2)


async def test_what_libzmq_holds_is_counted_to_the_byte_beside_whole_messages() -> None:
    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway):
        unfinished = gateway._guard.connections.unfinished
        async with await zmtp_stream(int(gateway.address.rpartition(":")[2])) as stream:
            for number in range(50):  # each ends the one before it, and begins another
                half = 1000 * number
                message = msgpack.packb([0, number, "generate", [{"prompt": "x" * 2 * half}]])
                frame = b"\x02" + len(message).to_bytes(8, "big") + message
                await stream.send_all(frame[: half + 9])
                await held(unfinished, half + 9, half + 1024)
                await stream.send_all(frame[half + 9 :])
                await received_until(stream, b"\x94\x01" + msgpack.packb(number))


class Scripted:
    """Connections, what has come by them as it is told here, and which were ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[int, int] = {}
        self.has_unread = False
        self.ended: list[int] = []
        self.unfinished = UnfinishedMessages(self.ended.append, lambda: self.has_unread, is_encrypted=False)
        monkeypatch.setattr(zeromq_guard, "bytes_read", lambda copy: (self.read[copy], False))

    def come(self, connection: int, num_bytes: int) -> None:
        if connection not in self.read:
            copy = cast(socket.socket, connection)
            self.unfinished._arrived[connection] = zeromq_guard.HeldBytes(copy, since=trio.current_time())
        self.read[connection] = self.read.get(connection, 0) + num_bytes
        self.unfinished._look([connection])


async def test_who_has_sent_nothing_more_for_longest_makes_room_and_who_has_only_heartbeats_comes_last(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(zeromq_guard, "MAX_UNFINISHED", 100_000)
    scripted = Scripted(monkeypatch)
    idle, slow, stalled, newest = range(4)
    scripted.come(idle, 40)
    await trio.sleep(5000)
    scripted.come(idle, 40_000)
    for connection in (slow, stalled):
        scripted.come(connection, 25_000)
        await trio.sleep(1)
    scripted.come(slow, 1000)
    scripted.come(newest, 8000)
    assert not scripted.ended
    scripted.come(newest, 8000)
    assert scripted.ended == [stalled]
    scripted.come(newest, 40_000)
    assert scripted.ended == [stalled, slow]
    scripted.unfinished.took(newest, [bytes(55_000)])
    await trio.sleep(50_000)
    scripted.come(newest, 40_000)
    assert scripted.ended == [stalled, slow]
    await trio.sleep(5000)
    scripted.come(idle, 40_000)  # nobody has more than heartbeats: the one with most
    assert scripted.ended == [stalled, slow, idle]


async def test_whole_messages_that_wait_to_be_taken_have_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_guard, "MAX_UNFINISHED", 100_000)
    scripted = Scripted(monkeypatch)
    scripted.has_unread = True
    scripted.come(1, 300_000)
    scripted.come(2, 90_000)
    assert not scripted.ended
    scripted.unfinished.took(1, [bytes(299_000)])
    scripted.has_unread = False
    scripted.come(2, 1)
    assert not scripted.ended
    scripted.come(2, 20_000)
    assert scripted.ended == [2]


async def test_the_clients_with_most_small_messages_make_room_and_small_queues_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zeromq_guard, "MAX_UNFINISHED", 500_000)  # and four times as much for whole messages
    scripted = Scripted(monkeypatch)
    scripted.has_unread = True
    large, flood, polite = range(3)
    scripted.come(large, 900_000)
    scripted.come(polite, 60)
    scripted.come(flood, 30_000)
    scripted.unfinished.took(large, [bytes(100_000)])
    scripted.unfinished.took(polite, [bytes(28)])
    assert not scripted.ended
    scripted.unfinished.took(
        flood, [b"x"]
    )  # so its other bytes are messages of one byte: each costs more than its bytes
    scripted.come(flood, 0)
    assert scripted.ended == [flood]
    scripted.come(large, 1)
    scripted.come(polite, 1)
    assert scripted.ended == [flood] or scripted.ended == [flood, large]
    assert polite not in scripted.ended


async def test_a_newcomer_is_not_ended_because_others_have_filled_the_room_and_a_flood_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted = Scripted(monkeypatch)
    scripted.has_unread = True
    scripted.unfinished._left = 2 * zeromq_guard.MAX_UNFINISHED * zeromq_guard.SPARE_FOR_WHOLE
    scripted.unfinished._weight = float(zeromq_guard.FRAME_COST)  # of messages of one byte
    newcomer, large, flood = range(3)
    scripted.come(newcomer, 139)  # its handshake, and a request
    scripted.come(large, zeromq_guard.HANDSHAKE_BYTES + 2000)
    assert not scripted.ended
    scripted.come(flood, 30_000)
    assert scripted.ended == [flood]


async def test_the_event_of_a_connection_that_has_ended_ends_no_other_that_has_its_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    unfinished = UnfinishedMessages(ended.append, lambda: True, is_encrypted=False)
    reader, writer = os.pipe()
    os.close(reader)
    unfinished.begin(reader)
    assert ended == []
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", Mock(side_effect=OSError(errno.EMFILE, "no descriptor is left")))
        unfinished.begin(writer)
    assert ended == [writer]
    os.close(writer)


async def test_the_events_of_all_connections_are_read_before_a_message_is_judged() -> None:
    class Monitor:
        def __init__(self) -> None:
            self.begun = [*range(100, 3100)]

        def try_recv_many(self, most: int) -> list[list[bytes]]:
            begun, self.begun = self.begun[:most], self.begun[most:]
            return [[struct.pack("=HI", zmq.EVENT_ACCEPTED, one), b""] for one in begun]

    connections = zeromq_guard.ZeroMQConnections(cast(zeromq_socket.ZeroMQSocket, Monitor()), 5000)
    connections.ended()
    assert connections.took(3099, b"\0" + bytes(4), [b"a request"])


async def test_what_an_ended_connection_has_left_is_dropped_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    may_take = trio.Event()
    take, judge = zeromq_socket.ZeroMQSocket.recv_many_signed, zeromq_guard.ZeroMQConnections.took
    judged: Counter[bytes] = Counter()

    async def take_later(socket: zeromq_socket.ZeroMQSocket, most: int, most_bytes: int) -> list[Signed]:
        await may_take.wait()
        return await take(socket, most, most_bytes)

    def count(
        connections: zeromq_guard.ZeroMQConnections, connection: int | None, identity: bytes, frames: Sequence[bytes]
    ) -> bool:
        judged[identity] += 1
        return judge(connections, connection, identity, frames)

    monkeypatch.setattr(zeromq_socket.ZeroMQSocket, "recv_many_signed", take_later)
    monkeypatch.setattr(zeromq_guard.ZeroMQConnections, "took", count)
    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway), dealer(gateway.address) as honest:
        port, connections = int(gateway.address.rpartition(":")[2]), gateway._guard.connections
        await tell(honest, [0, 1, "generate", [{"prompt": "a b"}]])
        async with await zmtp_stream(port) as stream:
            await stream.send_all(b"\x00\x01x" * 5000)
            while len(connections) < 2:
                await a_moment()
        while len(connections) > 1:
            await a_moment()
        may_take.set()
        assert (await hear(honest))[3]["text"] == "ab"
        assert (await ask(honest, [0, 2, "generate", [{"prompt": "a b"}]]))[3]["text"] == "ab"
        while gateway._socket.has_messages():
            await a_moment()
        assert 2 in judged.values() and max(judged.values()) <= MESSAGES_PER_TURN
        assert connections.unfinished._left == 0


async def test_who_floods_whole_messages_and_connects_again_waits_until_they_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zeromq_guard, "MAX_UNFINISHED", 2**16)
    may_take = trio.Event()
    take = zeromq_socket.ZeroMQSocket.recv_many_signed

    async def take_later(socket: zeromq_socket.ZeroMQSocket, most: int, most_bytes: int) -> list[Signed]:
        await may_take.wait()
        return await take(socket, most, most_bytes)

    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway), dealer(gateway.address) as honest:
        assert (await ask(honest, [0, 1, "generate", [{"prompt": "a b"}]]))[2] is None
        monkeypatch.setattr(zeromq_socket.ZeroMQSocket, "recv_many_signed", take_later)
        unfinished, port = gateway._guard.connections.unfinished, int(gateway.address.rpartition(":")[2])
        assert (await ask(honest, [0, 2, "generate", [{"prompt": "a b"}]]))[2] is None  # the last one that is taken
        num_floods = 0
        while not unfinished.full.is_set():
            num_floods += 1
            assert num_floods < 100, "nobody is refused"
            async with await zmtp_stream(port) as stream:
                await stream.send_all(b"\x00\x01x" * 5000)
            while len(gateway._guard.connections) > 1:  # it has ended
                await a_moment()
        await tell(honest, [0, 3, "generate", [{"prompt": "a b"}]])
        async with dealer(gateway.address) as newcomer, await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await tell(newcomer, [0, 1, "generate", [{"prompt": "a b"}]])
            await stream.send_all(b"\xff" + bytes(8) + b"\x7f")
            for _ in range(20):
                await a_moment()
            assert len(gateway._guard.connections) == 1  # nobody new was accepted
            may_take.set()
            assert (await hear(honest))[1] == 3
            assert (await hear(newcomer))[1] == 1
            await received_until(stream, b"\x7f")  # who waited in the queue was not sent away
        assert unfinished.fits.is_set() and unfinished._left == 0


async def test_the_bytes_of_a_connection_that_was_cut_off_reach_libzmq_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        connection, _ = server.accept()
        with connection:
            connection.setblocking(False)
            unfinished = UnfinishedMessages(lambda _: None, lambda: True, is_encrypted=False)
            unfinished.begin(connection.fileno())
            peer.sendall(b"\x00\x01x" * 1000)
            while not zeromq_guard.bytes_read(connection)[1]:
                await a_moment()
            assert unfinished.shut_down(connection.fileno())
            assert connection.recv(10_000) == b""
            unfinished.ended(connection.fileno())
            assert unfinished._left == 0  # libzmq has none of them


@pytest.mark.parametrize("former", ["the number before", b"chosen"])
async def test_messages_that_an_ended_connection_left_do_not_end_the_calls_of_the_client_with_its_descriptor(
    monkeypatch: pytest.MonkeyPatch, former: bytes | str
) -> None:
    monkeypatch.setattr(zeromq_guard, "MAX_MESSAGES_AT_ONCE", 50)
    async with listening("tcp://127.0.0.1:*", Security()) as (batcher, gateway), dealer(gateway.address) as honest:
        await tell(honest, [0, 1, "generate", [{"prompt": "hold on"}]])
        await batcher.arrival("hold on")
        (peer,) = gateway._peers.values()
        if isinstance(former, str):
            number = int.from_bytes(peer.identity[1:]) - 1
            former = b"\0" + (number % 2**32).to_bytes(4)
        for _ in range(100):
            gateway._receive(Signed("", peer.connection, [former, msgpack.packb([0, 1, "stats", []])]))
        batcher.held["hold on"].finish()
        assert (await hear(honest))[:3] == [1, 1, None]


async def test_messages_that_an_ended_connection_left_do_not_end_a_client_that_has_said_nothing_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zeromq_guard, "MAX_MESSAGES_AT_ONCE", 50)
    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway), dealer(gateway.address) as newcomer:
        connections = gateway._guard.connections
        while not len(connections):
            await a_moment()
        (connection,) = connections._open
        left = [b"\0" + bytes(4), b"x" * 100]
        connections.unfinished._left = cost = 200 * (102 + zeromq_guard.FRAME_COST)
        for _ in range(200):
            gateway._receive(Signed("", connection, left))
        assert connection in connections
        assert connections.unfinished._left < cost // 50  # they count as what they are
        assert (await ask(newcomer, [0, 1, "generate", [{"prompt": "a b"}]]))[3]["text"] == "ab"


async def test_a_frame_that_claims_a_gibibyte_ends_its_connection_before_it_comes() -> None:
    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway), dealer(gateway.address) as honest:
        before = resident_bytes()
        async with await zmtp_stream(int(gateway.address.rpartition(":")[2])) as stream:
            await stream.send_all(b"\x02" + (2**30).to_bytes(8, "big"))
            await until_closed(stream)
        assert resident_bytes() - before < MAX_TRANSPORT_BYTES
        assert (await ask(honest, [0, 1, "generate", [{"prompt": "a b"}]]))[2] is None
