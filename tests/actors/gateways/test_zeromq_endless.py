"""Messages without an end, and frames that claim to be huge, byte by byte: nothing that libzmq would send itself."""

from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from genbatch.actors.gateways import zeromq_gateway, zeromq_guard
from genbatch.actors.security.security import Security
from genbatch.proto.codec import MAX_TRANSPORT_BYTES
from tests.actors.gateways.guarded import ask, dealer, listening, until_closed, zmtp_stream

pytestmark = pytest.mark.trio

PART = b"\x03" + (2**16).to_bytes(8, "big") + b"x" * 2**16  # one of a message that goes on
# It is cut off long before that, whatever the machine is busy with.
MOST = 2**29


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_a_message_of_parts_without_an_end_is_cut_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_gateway, "SWEEP_S", 0.02)
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


async def test_whoever_sends_whole_messages_may_send_any_number_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zeromq_guard, "MAX_BYTES_BETWEEN", 1000)
    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway), dealer(gateway.address) as client:
        for msgid in range(20):
            assert (await ask(client, [0, msgid, "generate", [{"prompt": "x" * 500}]]))[1] == msgid
            for _ in range(2):  # with a message since the last one, and without
                gateway._guard.connections.sweep()
    assert "cut off" not in caplog.text


async def test_a_frame_that_claims_a_gibibyte_ends_its_connection_before_it_comes() -> None:
    async with listening("tcp://127.0.0.1:*", Security()) as (_, gateway), dealer(gateway.address) as honest:
        before = resident_bytes()
        async with await zmtp_stream(int(gateway.address.rpartition(":")[2])) as stream:
            await stream.send_all(b"\x02" + (2**30).to_bytes(8, "big"))
            await until_closed(stream)
        assert resident_bytes() - before < MAX_TRANSPORT_BYTES
        assert (await ask(honest, [0, 1, "generate", [{"prompt": "a b"}]]))[2] is None
