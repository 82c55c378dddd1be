"""Who has no key gets nowhere, and who has one gets no further than its own: over real sockets."""

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import zmq

from genbatch.actors.gateways import zeromq_guard
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime import zeromq_socket
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.zeromq_socket import open_socket
from genbatch.actors.security.curve_keys import ClientKeys, KeyPair, KeyStore
from genbatch.actors.security.key_files import InsecureBind
from genbatch.actors.security.security import Security
from tests.actors.gateways.guarded import (
    Guarded,
    ask,
    dealer,
    guarded,
    hear,
    listening,
    tell,
)
from tests.actors.gateways.scripted_batcher import ScriptedBatcher

pytestmark = pytest.mark.trio

NO_DETAIL = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


async def shut_out(address: str, keys: ClientKeys | None = None) -> int:
    """Sends as a client with these keys and waits for its handshake to fail; the event that says so."""
    async with open_socket(zmq.DEALER) as socket:
        for option, value in () if keys is None else keys.options():
            socket.set(option, value)
        failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | NO_DETAIL
        async with zeromq_socket.monitored(socket, failed | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            socket.connect(address)
            event, *_ = await monitor.recv()
            return int.from_bytes(event[:2], "little")


async def test_a_client_with_a_key_on_the_list_is_served_in_its_own_name(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service, dealer(service.address, service.client_key("alice")) as socket:
        assert (await ask(socket, [0, 1, "generate", [{"prompt": "a b"}]]))[3]["text"] == "ab"
        assert (await ask(socket, [0, 2, "generate", [{"prompt": "a b", "tenant": "alice"}]]))[3]["text"] == "ab"
        assert [sent.request.tenant for sent in service.batcher.requests] == ["alice", "alice"]
        assert {sent.client for sent in service.batcher.requests} == {"tenant:alice"}


async def test_a_client_cannot_speak_in_anothers_name(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service, dealer(service.address, service.client_key("alice")) as socket:
        service.store.new_client("bob")
        _, _, error, _ = await ask(socket, [0, 1, "generate", [{"prompt": "a b", "tenant": "bob"}]])
        assert (error["code"], error["field"]) == ("invalid_request", "tenant")
        assert service.batcher.requests == []


async def test_the_service_cannot_be_drained_by_its_clients(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service, dealer(service.address, service.client_key("alice")) as socket:
        assert (await ask(socket, [0, 1, "drain", [{"timeout_s": 0.0}]]))[2]["code"] == "forbidden"


async def test_plain_clients_get_no_frame_in_and_the_service_lives(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        # It sees that they speak different mechanisms, unless the service has closed the connection before it looks.
        assert await shut_out(service.address) & (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | NO_DETAIL)
        async with dealer(service.address) as socket:
            await tell(socket, [0, 1, "generate", [{"prompt": "let me in"}]])
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert service.batcher.requests == []
        assert await service.is_well(service.client_key("alice"))


async def test_a_key_that_is_not_on_the_list_gets_nowhere(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        alice = service.client_key("alice")
        strangers = KeyStore(tmp_path / "strangers")
        strangers.new_server()
        key = str(strangers.new_client("alice"))  # the same name, another key
        refused = await shut_out(service.address, ClientKeys.load(key, str(service.store.server_key)))
        assert refused == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        # It believes that another service answers: that one cannot even read its hello.
        assert await shut_out(service.address, ClientKeys.load(key)) == NO_DETAIL
        assert service.batcher.requests == []
        assert await service.is_well(alice)


async def test_a_secret_key_is_needed_for_a_public_key_of_the_list(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        alice = ClientKeys.load(service.client_key("alice"))
        thief = ClientKeys(alice.server, KeyPair(alice.pair.public, zmq.curve_keypair()[1]))
        assert await shut_out(service.address, thief) == NO_DETAIL


async def test_a_key_taken_off_the_list_counts_no_more_even_for_open_connections(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        key = service.client_key("alice")
        kept = ClientKeys.load(key)
        async with dealer(service.address, key) as socket:
            await tell(socket, [0, 1, "stream", [{"prompt": "hold"}]])
            held = await service.batcher.arrival("hold")
            held.emit("un")
            assert (await hear(socket))[1] == "token"
            service.store.revoke("alice")
            await tell(socket, [0, 2, "generate", [{"prompt": "a b"}]])
            finals = [await hear(socket) for _ in range(2)]
            assert {msgid: error["code"] for _, msgid, error, _ in finals} == {
                1: "unauthenticated",
                2: "unauthenticated",
            }
            await service.batcher.release("hold")
            assert len(service.batcher.requests) == 1
        assert await shut_out(service.address, kept) == zmq.EVENT_HANDSHAKE_FAILED_AUTH


async def test_a_revoked_clients_stream_ends_though_it_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genbatch.actors.gateways.zeromq_gateway.SWEEP_S", 0.05)
    async with guarded(tmp_path) as service, dealer(service.address, service.client_key("alice")) as socket:
        await tell(socket, [0, 1, "stream", [{"prompt": "hold"}]])
        await service.batcher.arrival("hold")
        service.store.revoke("alice")
        assert (await hear(socket))[2]["code"] == "unauthenticated"
        await service.batcher.release("hold")


async def never(_: object) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize("is_guard_late", [False, True])
async def test_an_identity_gives_no_access_to_anothers_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_guard_late: bool
) -> None:
    if is_guard_late:  # the task that waits for connections to end does not get its turn
        monkeypatch.setattr(zeromq_guard.ZeroMQConnections, "changed", never)
    async with guarded(tmp_path) as service:
        alice, mallory = (service.client_key(name) for name in ("alice", "mallory"))
        async with dealer(service.address, alice, identity=b"a") as hers:
            await tell(hers, [0, 1, "stream", [{"prompt": "hold"}]])
            held = await service.batcher.arrival("hold")
        # Her connection ends; whoever has the identity next would be sent what was hers.
        async with open_socket(zmq.DEALER) as socket:
            for option, value in [*ClientKeys.load(mallory).options(), (zmq.IDENTITY, b"a")]:
                socket.set(option, value)
            async with zeromq_socket.monitored(socket, zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                socket.connect(service.address)
                await monitor.recv()
                for index in range(50):
                    held.emit(f"secret {index}")
                await service.batcher.release("hold")
                # Nothing but the answer to its own request, in its own name.
                _, msgid, error, result = await ask(socket, [0, 7, "generate", [{"prompt": "a b"}]])
                assert (msgid, error, result["text"]) == (7, None, "ab")
        assert service.batcher.requests[-1].request.tenant == "mallory"


async def test_a_taken_identity_is_not_handed_over(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        alice, mallory = (service.client_key(name) for name in ("alice", "mallory"))
        async with dealer(service.address, alice, identity=b"a") as hers:
            await tell(hers, [0, 1, "stream", [{"prompt": "hold"}]])
            held = await service.batcher.arrival("hold")
            async with dealer(service.address, mallory, identity=b"a") as socket:
                await tell(socket, [0, 7, "generate", [{"prompt": "a b"}]])
                for index in range(20):
                    held.emit(f"hers {index}")
                    assert (await hear(hers))[2][3] == f"hers {index}"
                with trio.move_on_after(0.05):
                    pytest.fail(f"heard {await hear(socket)}")
            assert len(service.batcher.requests) == 1


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*"])
async def test_every_interface_may_be_bound_with_keys_and_none_without(tmp_path: Path, address: str) -> None:
    with pytest.raises(InsecureBind, match="genbatch keys new"):
        await ZeroMQGateway(Dispatcher(await start_down()), address).run()
    async with guarded(tmp_path, address=address) as service:
        local = Guarded(service.batcher, service.gateway, service.store, f"tcp://127.0.0.1:{service.port}")
        assert await local.is_well(service.client_key("alice"))


async def start_down() -> Any:
    async with trio.open_nursery() as nursery:
        ref = await start(nursery, ScriptedBatcher())
        nursery.cancel_scope.cancel()
    return ref


async def test_on_this_machine_without_keys_the_tenant_is_as_told(tmp_path: Path) -> None:
    async with listening(f"ipc://{tmp_path / 'socket'}", Security()) as (batcher, gateway):
        async with dealer(gateway.address) as socket:
            assert (await ask(socket, [0, 1, "generate", [{"prompt": "a b", "tenant": "team"}]]))[2] is None
        assert [sent.request.tenant for sent in batcher.requests] == ["team"]


async def test_a_clients_end_is_noticed_before_any_token_or_lease(tmp_path: Path) -> None:
    async with listening(f"ipc://{tmp_path / 'socket'}", Security()) as (batcher, gateway):
        async with dealer(gateway.address) as socket:
            await tell(socket, [0, 1, "stream", [{"prompt": "hold"}]])
            await batcher.arrival("hold")
        await batcher.release("hold")
        while gateway.num_calls:
            await trio.lowlevel.checkpoint()
