"""msgpack-RPC for other machines: TLS and tokens over real sockets, and floods of those who bring neither."""

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trustme

from genbatch.actors.gateways import rpc_gateway
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.supervisor import Registry
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.actors.security.key_files import InsecureBind, KeyFileError, client_context, server_context
from genbatch.actors.security.security import open_security
from genbatch.clients.remote import RPCClient
from genbatch.proto.errors import Forbidden, InvalidRequest, Unauthenticated, Unavailable
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher

pytestmark = pytest.mark.trio


@dataclass(frozen=True)
class Secured:
    """A gateway with TLS and tokens, and what its operator has."""

    batcher: ScriptedBatcher
    address: str
    store: KeyStore
    trust: ssl.SSLContext

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def client(self, token: str | None, *, trust: ssl.SSLContext | None = None) -> RPCClient:
        """A client that asks for localhost, the name in the certificate."""
        return RPCClient(f"rpc://localhost:{self.port}", token=token, tls=trust or self.trust, timeout=60)


@asynccontextmanager
async def secured(directory: Path) -> AsyncIterator[Secured]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    own = authority.issue_cert("localhost")
    own.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))
    own.private_key_pem.write_to_path(str(directory / "key.pem"))
    (directory / "key.pem").chmod(0o600)
    store = KeyStore(directory / "keys")
    store.new_token("somebody")
    security = open_security(
        tokens=str(store.tokens), tls_cert=str(directory / "cert.pem"), tls_key=str(directory / "key.pem")
    )
    batcher = ScriptedBatcher()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            gateway = RPCGateway(Dispatcher(await start(nursery, batcher)), "tcp://0.0.0.0:0", security)
            await nursery.start(gateway.run)
            yield Secured(batcher, gateway.address, store, client_context(directory / "ca.pem"))
            nursery.cancel_scope.cancel()


async def test_a_client_with_a_token_is_served_in_its_own_name_over_tls(tmp_path: Path) -> None:
    async with secured(tmp_path) as service, service.client(service.store.new_token("alice")) as client:
        assert (await client.generate("a b")).text == "ab"
        assert [(sent.request.tenant, sent.client) for sent in service.batcher.requests] == [("alice", "tenant:alice")]
        with pytest.raises(InvalidRequest, match="tenant"):
            await client.generate("a b", tenant="somebody")
        with pytest.raises(Forbidden):
            await client.drain(0.0)


@pytest.mark.parametrize("token", [None, "", "genbatch_wrong", "somebody"])
async def test_a_wrong_token_gets_nowhere_and_the_service_lives(tmp_path: Path, token: str | None) -> None:
    async with secured(tmp_path) as service:
        with pytest.raises((Unauthenticated, Unavailable)):
            async with service.client(token) as client:
                await client.generate("a b")
        assert service.batcher.requests == []
        async with service.client(service.store.new_token("alice")) as client:
            assert (await client.generate("a b")).text == "ab"


async def test_a_client_does_not_show_its_token_to_a_service_it_does_not_trust(tmp_path: Path) -> None:
    async with secured(tmp_path) as service:
        stranger = ssl.create_default_context()
        with pytest.raises(Unauthenticated, match="not trusted"):
            async with service.client(service.store.new_token("alice"), trust=stranger) as client:
                await client.generate("a b")
        assert service.batcher.requests == []


async def test_connections_that_do_not_shake_hands_push_themselves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_gateway, "max_connections", lambda: 10)
    monkeypatch.setattr(rpc_gateway, "HELLO_S", 3600.0)
    async with (
        secured(tmp_path) as service,
        service.client(service.store.new_token("alice")) as settled,
        AsyncExitStack() as stack,
    ):
        assert (await settled.generate("a b")).text == "ab"
        flood = [
            await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", service.port)) for _ in range(50)
        ]
        async with service.client(service.store.new_token("bob")) as late:
            assert (await late.generate("a b")).text == "ab"
        for stream in flood[:40]:
            assert await stream.receive_some() == b""
        assert (await settled.generate("a b")).text == "ab"


@pytest.mark.parametrize("options", [set(), {"tokens"}, {"tls_cert", "tls_key"}])
async def test_other_machines_get_in_only_past_tokens_and_tls(tmp_path: Path, options: set[str]) -> None:
    async with secured(tmp_path):
        pass
    files = {
        "tokens": str(tmp_path / "keys" / "tokens"),
        "tls_cert": str(tmp_path / "cert.pem"),
        "tls_key": str(tmp_path / "key.pem"),
    }
    security = open_security(**{name: files[name] for name in options})
    with pytest.raises(InsecureBind, match="rpc_bind") as info:
        await RPCGateway(Dispatcher(Registry().ref("batcher")), "tcp://0.0.0.0:0", security).run()
    assert set(info.value.lacking) == {"tokens", "tls_cert", "tls_key"} - options


async def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    async with secured(tmp_path):
        pass
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(str(tmp_path / "other.pem"))
    for wrong in (tmp_path / "other.pem", certificate):
        wrong.chmod(0o600)
        with pytest.raises(KeyFileError, match="no certificate with the private key"):
            server_context(certificate, wrong)
    key.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        server_context(certificate, key)
    with pytest.raises(KeyFileError, match="no certificates to trust"):
        client_context(tmp_path / "none")
