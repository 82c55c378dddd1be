"""Peers that speak ZeroMQ byte by byte, in versions and ways that no client of today does: they end alone."""

import ctypes
import struct

import msgpack
import pytest
import trio
import zmq

from genbatch.actors.gateways.session import RPCSession
from genbatch.actors.runtime.zeromq_socket import ZeroMQSocket, open_socket
from genbatch.actors.security.security import Security
from tests.actors.gateways.guarded import ask, dealer, hear, listening, tell, until_closed
from tests.actors.gateways.scripted_batcher import ScriptedBatcher
from tests.waiting import received_until

pytestmark = pytest.mark.trio

# Seconds on a busy machine; a connection ends within milliseconds.
CUT_OFF_S = 20.0
DRAIN = msgpack.packb([0, 1, "drain", [{"timeout_s": 0.0}]])
BOMB = b"\xdd\xff\xff\xff\xff" * 1000  # arrays of 4,294,967,295 elements inside one another
POST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\nContent-Length: 200\r\n\r\n"


def frame_1(body: bytes, *, more: bool = False) -> bytes:
    """A frame of ZMTP 1.0: its length, with that of the flags."""
    return bytes([len(body) + 1, more]) + body


def frame_2(body: bytes, *, more: bool = False) -> bytes:
    """A frame of ZMTP 2.0 and later, in the long form."""
    return bytes([2 | more]) + struct.pack(">Q", len(body)) + body


SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
DEALER_2 = SIGNATURE + b"\x01\x05" + frame_2(b"")  # the revision, the socket's type, its identity
GREETING_3 = SIGNATURE + b"\x03\x00"
REFUSED = {
    "zmtp 1.0": b"\x01\x00" + frame_1(DRAIN),
    "zmtp 1.0 with an identity": frame_1(b"name") + frame_1(b"", more=True) + frame_1(DRAIN),
    "zmtp 1.0 in the long form": b"\xff" + struct.pack(">Q", 1) + b"\x00" + frame_1(DRAIN),
    "zmtp 1.0 behind a signature": SIGNATURE + b"\x00\x01\x00" + frame_1(DRAIN),
    "zmtp 2.0": DEALER_2 + frame_2(DRAIN),
    "a bomb over zmtp 2.0": DEALER_2 + frame_2(BOMB),
    "many messages over zmtp 2.0": DEALER_2 + frame_2(DRAIN) * 1000,
    "a web page's post": POST + DRAIN + bytes(200),
    "a web socket": b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "zeros": bytes(1000),
    "another mechanism": GREETING_3 + b"PLAIN" + bytes(15) + bytes(32),
    "a mechanism nobody has": GREETING_3 + b"WHATEVER" + bytes(12) + bytes(32),
    "garbage behind a greeting": GREETING_3 + b"NULL" + bytes(48) + b"\xa5" * 1000,
    "a message before the handshake": GREETING_3 + b"NULL" + bytes(48) + frame_2(DRAIN),
    "a command nobody knows": GREETING_3 + b"NULL" + bytes(48) + b"\x04\x08\x05WRONGxx",
    "a socket that does not fit": GREETING_3
    + b"NULL"
    + bytes(48)
    + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB",
}  # fmt: skip


async def goes_on(batcher: ScriptedBatcher, socket: ZeroMQSocket) -> None:
    """Lets the request that was held all the time end."""
    batcher.held["hold on"].finish()
    assert (await hear(socket))[:3] == [1, 1, None]


@pytest.mark.parametrize("said", REFUSED.values(), ids=REFUSED)
async def test_a_peer_of_another_protocol_or_version_is_cut_off_and_disturbs_nobody(said: bytes) -> None:
    async with (
        listening("tcp://127.0.0.1:*", Security()) as (batcher, gateway),
        dealer(gateway.address) as honest,
    ):
        await tell(honest, [0, 1, "generate", [{"prompt": "hold on"}]])
        await batcher.arrival("hold on")
        for _ in range(3):
            async with await trio.open_tcp_stream("127.0.0.1", int(gateway.address.rpartition(":")[2])) as stream:
                try:
                    await stream.send_all(said)
                except trio.BrokenResourceError:
                    continue
                with trio.fail_after(CUT_OFF_S):
                    await until_closed(stream)
        assert (await ask(honest, [0, 2, "generate", [{"prompt": "a b"}]]))[3]["text"] == "ab"
        assert len(batcher.requests) == 2
        await goes_on(batcher, honest)


def ready(properties: dict[str, bytes]) -> bytes:
    """A READY command with these properties of the connection."""
    fields = b"".join(
        bytes([len(name)]) + name.encode() + struct.pack(">I", len(value)) + value for name, value in properties.items()
    )
    return b"\x04" + bytes([len(fields) + 6]) + b"\x05READY" + fields


async def test_a_peer_cannot_claim_another_connection_or_user() -> None:
    async with (
        listening("tcp://127.0.0.1:*", Security()) as (batcher, gateway),
        dealer(gateway.address) as honest,
    ):
        await tell(honest, [0, 1, "generate", [{"prompt": "hold on"}]])
        await batcher.arrival("hold on")
        (connection,) = gateway._peers_by_connection
        claims = {"Socket-Type": b"DEALER", "__fd": b"%d" % connection, "User-Id": b"operator"}
        async with await trio.open_tcp_stream("127.0.0.1", int(gateway.address.rpartition(":")[2])) as stream:
            await stream.send_all(GREETING_3 + b"NULL" + bytes(48))
            await stream.send_all(ready(claims))
            # A message that overtakes the other side's READY breaks the protocol: libzmq ends its connection.
            await received_until(stream, b"READY")
            await stream.send_all(frame_2(msgpack.packb([0, 1, "generate", [{"prompt": "a b"}]])))
            await received_until(stream, b"finish_reason")
        assert [peer.key for peer in gateway._peers.values()] == ["", ""]
        await goes_on(batcher, honest)


async def test_nobody_can_foresee_the_number_of_the_next_client_and_claim_it() -> None:
    """libzmq aborts the process that gives a client a number that another one has claimed."""
    numbers = []
    for _ in range(2):
        ctypes.CDLL(None).srand(1)  # as a new process begins
        async with open_socket(zmq.ROUTER) as router, open_socket(zmq.DEALER) as honest:
            honest.connect(router.bind("tcp://127.0.0.1:*"))
            await honest.send([b"a"])
            (message,) = await router.recv_many_signed(1, 1000)
            numbers.append(int.from_bytes(message.parts[0]))
    assert abs(numbers[0] - numbers[1]) > 1000


async def test_a_message_of_an_unknown_connection_is_dropped_alone() -> None:
    """As ZeroMQ gives it to a socket without a domain: neither its connection nor a user is known."""
    async with open_socket(zmq.ROUTER) as router, open_socket(zmq.DEALER) as honest:
        address = router.bind("tcp://127.0.0.1:*")
        honest.connect(address)
        async with await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2])) as stream:
            await stream.send_all(REFUSED["zmtp 1.0"])
            (old,) = await router.recv_many_signed(1, 1000)
            assert old.connection is None and old.parts[1] == DRAIN
            await honest.send([b"a"])
            (new,) = await router.recv_many_signed(1, 1000)
            assert new.connection is not None


async def test_our_own_fault_at_a_message_ends_its_client_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receive = RPCSession.receive

    def fail_at_some(session: RPCSession, data: bytes, *, may_stream: bool = True) -> None:
        if b"unlucky" in data:
            raise ZeroDivisionError
        receive(session, data, may_stream=may_stream)

    monkeypatch.setattr(RPCSession, "receive", fail_at_some)
    async with (
        listening("tcp://127.0.0.1:*", Security()) as (batcher, gateway),
        dealer(gateway.address) as honest,
        dealer(gateway.address) as unlucky,
    ):
        await tell(honest, [0, 1, "generate", [{"prompt": "hold on"}]])
        await batcher.arrival("hold on")
        await tell(unlucky, [0, 1, "generate", [{"prompt": "hold this"}]])
        await batcher.arrival("hold this")
        await tell(unlucky, [0, 2, "generate", [{"prompt": "unlucky"}]])
        await batcher.release("hold this")
        assert (await ask(unlucky, [0, 3, "generate", [{"prompt": "a b"}]]))[3]["text"] == "ab"  # it connects again
        await goes_on(batcher, honest)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
