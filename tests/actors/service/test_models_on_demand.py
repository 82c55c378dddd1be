"""`genbatch serve --models` as processes: models are loaded by their first request and go for one another."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import trio

from genbatch import Retry, RPCClient, ZeroMQClient
from genbatch.clients import remote
from genbatch.proto.errors import ModelNotFound, Unavailable
from tests.actors.service.running_service import TIMEOUT_S, RunningService
from tests.waiting import a_moment

pytestmark = [
    pytest.mark.trio,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc"),
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2|openai|httpcore2).* was garbage collected"),
]


@pytest.fixture
def service(
    tiny_model_dir: Callable[[str], Path], embedder_dir: Callable[[str], Path], tmp_path: Path
) -> Iterator[RunningService]:
    """Three models with room for one: one that answers, one that embeds, and one that cannot be loaded."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')
    (broken / "model.safetensors").write_bytes(b"nonsense")
    file = tmp_path / "models.toml"
    file.write_text(
        f'[answers]\nmodel = "{tiny_model_dir("native_llama")}"\nn_ctx = 1024\nn_parallel = 3\n'
        f'[embeds]\nmodel = "{embedder_dir("bert mean")}"\nkeep_alive = -1\n'
        f'[broken]\nmodel = "{broken}"\n'
    )
    flags = ("--models", str(file), "--model-memory", "0.01", "--http", ":0", "--stall-s", "60")
    flags += ("--default-deadline-s", "0")  # on a busy machine a load takes long
    flags += ("--rpc-bind", f"unix://{tmp_path}/rpc.sock")
    with RunningService(None, tmp_path, *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEASE_S", 60.0)  # this process may wait for its turn


@pytest.mark.long
async def test_models_come_and_go_over_every_door(
    service: RunningService, oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    expected = oracle("native_llama").generate([5, 6, 7], 8)
    url = f"http://{service.log.partition('http://')[2].split()[0]}"
    assert "on demand" in service.log and service.engines == []
    once = Retry(max_attempts=1)
    async with (
        ZeroMQClient(service.address, timeout=TIMEOUT_S, retry=once) as client,
        RPCClient(f"unix://{tmp_path}/rpc.sock", timeout=TIMEOUT_S) as rpc,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as http,
        httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S) as plain,
    ):
        states = {card.id: card.state for card in await client.models()}
        assert states == dict.fromkeys(("answers", "embeds", "broken"), "unloaded")
        assert (await client.health()).status == "ready"

        # Loaded by a stream, and again after its engine's death.
        async with rpc.stream([5, 6, 7], max_tokens=240, ignore_eos=True, model="answers") as tokens:
            seen = []
            async for token in tokens:
                seen.append(token.token_id)
                if len(seen) == 3:
                    [first] = service.engines
                    os.kill(first, signal.SIGKILL)
        assert len(seen) == 240 and seen[: len(expected) - 1] == expected[:-1]
        stats = (await client.stats())["by_model"]["answers"]
        assert (stats["loads"], stats["engine_restarts"], stats["state"]) == (2, 1, "loaded")
        [card] = [card for card in await client.models() if card.id == "answers"]
        assert card.n_parallel == 3, "an option of its table"

        vectors = await http.embeddings.create(model="embeds", input=[5, 6, 7])  # the other one goes for it
        assert len(vectors.data[0].embedding) == 32
        assert len(service.engines) == 1
        assert (await plain.post("/models/unload", json={"model": "embeds"})).json() == {"success": True}

        with pytest.raises(Unavailable, match="the model broken could not be loaded") as failed:
            await client.generate([5], max_tokens=1, model="broken")
        assert failed.value.retry_after_ms and str(tmp_path) not in str(failed.value)
        listed = {row["id"]: row["status"]["value"] for row in (await plain.get("/v1/models")).json()["data"]}
        assert listed.pop("broken") in ("failed", "unloaded")  # the pause may be over
        assert listed == {"answers": "unloaded", "embeds": "unloaded"}
        assert (await plain.get("/api/ps")).json() == {"models": []}

        body = {"model": "answers", "prompt": "a", "keep_alive": "1h", "options": {"num_predict": 2}, "stream": False}
        assert (await plain.post("/api/generate", json=body)).json()["done"]
        [loaded] = (await plain.get("/api/ps")).json()["models"]
        assert loaded["name"] == "answers" and loaded["size"] > 0

        os.kill(service.gateway or 0, signal.SIGKILL)  # the engine stays, and the next gateway knows of it
        service.wait_for("supervisor.restart")
        [engine] = service.engines
        assert (await client.generate([5, 6, 7], max_tokens=8, model="answers")).token_ids == expected
        assert service.engines == [engine]
        unload = {"model": "answers", "messages": [], "keep_alive": 0}
        assert (await plain.post("/api/chat", json=unload)).json()["done_reason"] == "unload"
        while service.engines:
            await a_moment()
        await stop_during_a_load(service, client)


async def stop_during_a_load(service: RunningService, client: ZeroMQClient) -> None:
    """A request that waits for a load is refused with a retry hint, and the service ends."""
    failures: list[Unavailable] = []

    async def ask() -> None:
        with pytest.raises(Unavailable) as refused:
            await client.generate([5], max_tokens=1, model="answers")
        failures.append(refused.value)

    loads = service.log.count("model_loading")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        while service.log.count("model_loading") == loads:
            await a_moment()
        service.process.terminate()
    assert failures[0].retry_after_ms
    await trio.to_thread.run_sync(service.process.wait)
    assert service.process.returncode == 0


async def test_a_model_that_appears_in_the_directory_is_served_too(
    tiny_model_dir: Callable[[str], Path], oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "early").symlink_to(tiny_model_dir("native_llama"))
    with RunningService(None, tmp_path, "--models", str(models), "--stall-s", "60") as service:
        async with ZeroMQClient(service.address, timeout=TIMEOUT_S) as client:
            assert [card.id for card in await client.models()] == ["early"]
            (models / "late").symlink_to(tiny_model_dir("native_llama"))
            while [card.id for card in await client.models()] != ["early", "late"]:
                await a_moment()
            os.kill(service.gateway or 0, signal.SIGKILL)  # the next gateway knows it too
            service.wait_for("supervisor.restart")
            expected = oracle("native_llama").generate([5, 6, 7], 8)
            assert (await client.generate([5, 6, 7], max_tokens=8, model="late")).token_ids == expected
            (models / "last").symlink_to(tiny_model_dir("native_llama"))
            while "last" not in [card.id for card in await client.models()]:
                await a_moment()
            assert (await client.generate([5, 6, 7], max_tokens=8, model="last")).token_ids == expected
            stats = (await client.stats())["by_model"]
            assert {name: stats[name]["loads"] for name in stats} == {"early": 0, "late": 1, "last": 1}


async def test_a_model_that_leaves_the_directory_ends_its_answers_and_is_found_no_longer(
    tiny_model_dir: Callable[[str], Path],
    oracle: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("first", "second"):
        (models / name).symlink_to(tiny_model_dir("native_llama"))
    monkeypatch.setattr(remote, "WINDOW", 8)  # a reader that stands still holds the stream open
    with RunningService(None, tmp_path, "--models", str(models), "--keep-alive", "-1", "--stall-s", "60") as service:
        async with ZeroMQClient(service.address, timeout=TIMEOUT_S) as client:

            async def until_listed(*names: str) -> None:
                while [card.id for card in await client.models()] != [*names]:
                    await a_moment()

            await client.generate([5], max_tokens=1, model="second")
            async with client.stream([5, 6, 7], max_tokens=240, ignore_eos=True, model="first") as tokens:
                assert (await anext(aiter(tokens))).index == 0
                for name in ("first", "second"):
                    (models / name).unlink()
                await until_listed()
                assert len([token async for token in tokens]) == 239
            while service.engines:
                await a_moment()
            for asked in ("first", None):
                with pytest.raises(ModelNotFound):
                    await client.generate([5], max_tokens=1, model=asked)
            assert (await client.health()).status == "ready"
            os.kill(service.gateway or 0, signal.SIGKILL)  # the next gateway knows that they have gone
            service.wait_for("supervisor.restart")
            await until_listed()
            (models / "second").symlink_to(tiny_model_dir("native_llama"))
            await until_listed("second")
            expected = oracle("native_llama").generate([5, 6, 7], 8)
            assert (await client.generate([5, 6, 7], max_tokens=8)).token_ids == expected
