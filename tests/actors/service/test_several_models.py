"""`genbatch serve` with two models: one answers, one embeds, and the death of one is not the other's affair."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import trio

from genbatch import ZeroMQClient
from genbatch.clients import remote
from genbatch.proto.errors import InvalidRequest, ModelNotFound
from tests.actors.service.running_service import TIMEOUT_S, RunningService
from tests.nif.embedders import EmbeddingOracle
from tests.waiting import a_moment

pytestmark = [
    pytest.mark.trio,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes through Linux's /proc"),
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2|openai|httpcore2).* was garbage collected"),
]


@pytest.fixture(scope="module")
def service(
    tiny_model_dir: Callable[[str], Path],
    embedder_dir: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningService]:
    directory = tmp_path_factory.mktemp("several")
    second = f"mini={embedder_dir('bert mean')}"
    flags = (second, "--http", ":0", "--max-restarts", "100", "--stall-s", "60", "--n-parallel", "4")
    with RunningService(tiny_model_dir("native_llama"), directory, *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEASE_S", 60.0)  # this process may wait for its turn


def connect(service: RunningService) -> ZeroMQClient:
    return ZeroMQClient(service.address, timeout=TIMEOUT_S)


def http_of(service: RunningService) -> str:
    return service.log.partition("http://")[2].split()[0]


async def program(*arguments: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-c", "from genbatch.clients.cli.main import main; main()", *arguments]
    return await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)


async def test_a_name_picks_the_model_over_every_door(
    service: RunningService,
    tiny_model_dir: Callable[[str], Path],
    embedder_dir: Callable[[str], Path],
    oracle: Callable[[str], Any],
) -> None:
    first = tiny_model_dir("native_llama").name
    expected = oracle("native_llama").generate([5, 6, 7], 8)
    vector = EmbeddingOracle("bert mean", embedder_dir("bert mean")).embed([5, 6, 7]).tolist()
    async with connect(service) as client:
        cards = await client.models()
        assert [(card.id, card.generates, card.embedding_size) for card in cards] == [
            (first, True, None),
            ("mini", False, 32),
        ]
        for model in (None, first):
            answer = await client.generate([5, 6, 7], max_tokens=8, model=model)
            assert answer.token_ids == expected
        found = await client.embed([5, 6, 7], model="mini")
        assert found.embeddings[0] == pytest.approx(vector, abs=2e-5)
        ids = await client.tokenize("a", model="mini")
        assert ids != await client.tokenize("a")
        assert await client.detokenize(ids, model="mini") == "a"
        for call in (client.generate("a", model="x"), client.embed("a", model="x"), client.tokenize("a", model="x")):
            with pytest.raises(ModelNotFound) as unknown:
                await call
            assert unknown.value.field == "model"
        with pytest.raises(InvalidRequest, match="does not generate text"):
            await client.generate("a", model="mini")
        with pytest.raises(InvalidRequest, match="no embeddings"):
            await client.embed("a")
        stats = await client.stats()
        assert stats["by_model"]["mini"]["embedded_texts"] == stats["embedded_texts"] == 1
        assert stats["by_model"][first]["generation_tokens"] == 2 * len(expected)
    flags = ("--connect", service.address)
    shown = await program("generate", "What?", "--max-tokens", "3", "--model", "mini", *flags)
    assert shown.returncode == 2 and b"does not generate text" in shown.stderr
    shown = await program("embed", "a", "--model", "mini", *flags)
    assert (shown.returncode, len(json.loads(shown.stdout))) == (0, 32)
    counted = await program("stats", *flags)
    assert first.encode() in counted.stdout and b"mini" in counted.stdout
    url = f"http://{http_of(service)}"
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as http:
        assert [model.id for model in (await http.models.list()).data] == [first, "mini"]
        texts = await http.completions.create(model=first, prompt=[5, 6, 7], max_tokens=8, logprobs=1)
        assert texts.model == first
        vectors = await http.embeddings.create(model="mini", input=[5, 6, 7])
        assert vectors.data[0].embedding == pytest.approx(vector, abs=2e-5)
        for unknown_call in (
            http.completions.create(model="gpt-9", prompt="a"),
            http.embeddings.create(model="ada", input="a"),
        ):
            with pytest.raises(openai.NotFoundError) as missing:
                await unknown_call
            assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError) as none:
            await http.embeddings.create(model=first, input="a")
        assert none.value.code == "no_embeddings"
    async with httpx2.AsyncClient(base_url=url) as plain:
        metrics = (await plain.get("/metrics")).text
        assert 'genbatch:embedded_texts_total{model_name="mini"} 3.0' in metrics
        assert f'genbatch:embedded_texts_total{{model_name="{first}"}} 0.0' in metrics


async def test_an_engine_that_dies_takes_nothing_of_the_others_along(service: RunningService) -> None:
    async with connect(service) as client:
        before = await client.embed("a", model="mini")
        stream = client.stream([5, 6, 7], max_tokens=240, ignore_eos=True)
        async with stream as tokens:
            seen = 0
            async for token in tokens:
                assert token.index == seen
                seen += 1
                if seen == 3:
                    old = service.engines[1]
                    os.kill(old, signal.SIGKILL)
        assert tokens.result.finish_reason == "length" and seen == 240
        assert await client.embed("a", model="mini") == before  # waits for its new engine
        assert service.engines[1] != old
        stats = (await client.stats())["by_model"]
        assert [own["engine_restarts"] for own in stats.values()] == [0, 1]
        while (await client.health()).status != "ready":
            await a_moment()
