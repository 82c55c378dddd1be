"""Clients that bring keys to services that ask for them, and what they say when they are not let in."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch import SyncZeroMQClient, ZeroMQClient
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.actors.security.key_files import InsecureBind, KeyFileError
from genbatch.actors.security.security import Security
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import Service, open_service
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import Unauthenticated, Unavailable
from tests.actors.gateways.guarded import guarded, listening
from tests.actors.gateways.scripted_batcher import PATIENCE_S

pytestmark = pytest.mark.trio


def answer_of_sync(address: str, **keys: Any) -> str:
    with SyncZeroMQClient(address, **keys) as client:
        return client.generate("a b").text


async def answer_of_async(address: str, **keys: Any) -> str:
    async with ZeroMQClient(address, **keys) as client:
        return (await client.generate("a b")).text


async def answer_of_sync_on_a_thread(address: str, **keys: Any) -> str:
    return await trio.to_thread.run_sync(lambda: answer_of_sync(address, **keys))


both = pytest.mark.parametrize("answer_of", [answer_of_async, answer_of_sync_on_a_thread])


@both
async def test_a_client_with_its_file_is_served(tmp_path: Path, answer_of: Callable[..., Any]) -> None:
    async with guarded(tmp_path) as service:
        assert await answer_of(service.address, client_key=service.client_key("alice")) == "ab"
        assert service.batcher.requests[0].request.tenant == "alice"


@both
async def test_a_client_that_is_not_on_the_list_is_told_at_once(tmp_path: Path, answer_of: Callable[..., Any]) -> None:
    async with guarded(tmp_path) as service:
        stranger = KeyStore(tmp_path / "strangers")
        stranger.new_server()
        key = str(stranger.new_client("alice"))
        with pytest.raises(Unauthenticated, match="on its list"):
            await answer_of(
                service.address, client_key=key, server_key=str(service.store.server_key), timeout=PATIENCE_S
            )


@both
async def test_a_client_without_keys_is_told_that_the_service_asks_for_them(
    tmp_path: Path, answer_of: Callable[..., Any]
) -> None:
    async with guarded(tmp_path) as service:
        with pytest.raises(Unauthenticated, match="--client-key"):
            await answer_of(service.address, timeout=PATIENCE_S)


@both
async def test_a_client_with_keys_does_not_talk_to_a_service_without(
    tmp_path: Path, answer_of: Callable[..., Any]
) -> None:
    store = KeyStore(tmp_path / "keys")
    store.new_server()
    async with listening("tcp://127.0.0.1:*", Security()) as (batcher, gateway):
        with pytest.raises(Unauthenticated, match="has no keys"):
            await answer_of(gateway.address, client_key=str(store.new_client("alice")), timeout=PATIENCE_S)
        assert batcher.requests == []


@both
async def test_a_client_does_not_talk_to_another_service_than_it_was_given_the_key_of(
    tmp_path: Path, answer_of: Callable[..., Any]
) -> None:
    async with guarded(tmp_path) as service:
        other = KeyStore(tmp_path / "other")
        other.new_server()
        with pytest.raises(Unavailable, match="another service than the server key belongs to"):
            await answer_of(service.address, client_key=str(other.new_client("alice")), timeout=0.3)


async def test_keys_that_cannot_be_used_are_told_before_connecting(tmp_path: Path) -> None:
    for client in (ZeroMQClient, SyncZeroMQClient):
        with pytest.raises(KeyFileError, match="No such file"):
            client("tcp://127.0.0.1:1", client_key=str(tmp_path / "none"))
        with pytest.raises(ValueError, match="server_key without client_key"):
            client("tcp://127.0.0.1:1", server_key="x")


@pytest.fixture
def serve(tiny_model_dir: Callable[[str], Path]) -> Any:
    engine = EngineOptions(model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=1024)

    @asynccontextmanager
    async def running(**options: Any) -> AsyncIterator[Service]:
        with trio.fail_after(PATIENCE_S):
            async with open_service(engine, BatcherOptions(batch_timeout=1.0), ServiceOptions(**options)) as service:
                yield service

    return running


async def test_a_prompt_is_shared_within_a_key_and_never_across_keys(tmp_path: Path, serve: Any) -> None:
    store = KeyStore(tmp_path / "keys")
    store.new_server()
    alice, bob = str(store.new_client("alice")), str(store.new_client("bob"))
    prompt = list(range(3, 100))
    async with serve(bind="tcp://127.0.0.1:*", keys=str(store.directory)) as service:
        cached = []
        for key in (alice, alice, bob, alice, bob):
            async with ZeroMQClient(service.addresses[0], client_key=key) as client:
                cached.append((await client.generate(prompt, max_tokens=1)).usage.cached_tokens)
    first, again, others_first, third, others_again = cached
    assert (first, others_first) == (0, 0)
    assert min(again, third, others_again) > 0


async def test_an_unsafe_service_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    engine = EngineOptions(model_path="/no/such/model")
    for options, error in [
        ({"bind": "tcp://0.0.0.0:5555"}, InsecureBind),
        ({"bind": f"ipc://{tmp_path}/s", "keys": str(tmp_path / "none")}, KeyFileError),
        ({"tokens": str(tmp_path / "none")}, KeyFileError),
    ]:
        with pytest.raises(error):
            async with open_service(engine, BatcherOptions(), ServiceOptions(**options)):  # type: ignore[arg-type]
                pass
    with pytest.raises(OptionError, match="tls_key"):
        ServiceOptions(tls_cert="cert.pem")
