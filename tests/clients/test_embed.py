"""Embeddings over every door, from one service of each kind."""

import base64
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import Service, open_service
from genbatch.clients.in_process import BatcherClient
from genbatch.clients.remote import RPCClient, ZeroMQClient
from genbatch.clients.sync import SyncRPCClient, SyncZeroMQClient
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.errors import InvalidRequest, PromptTooLong
from tests.nif.embedders import EmbeddingOracle
from tests.waiting import ENGINE_PATIENCE_S

# The client leaves its own generators as they are when a stream says that it is done.
pytestmark = [
    pytest.mark.trio,
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2|openai|httpcore2).* was garbage collected"),
]
EmbedderOf = Callable[[str], Path]
TEXTS = ["The capital of France", "a", "blocks of a pool"]


@asynccontextmanager
async def service_of(directory: Path, place: Path, **options: Any) -> AsyncIterator[Service]:
    engine = EngineOptions(model_path=str(directory), dtype="float32", n_gpu_layers=0, n_ctx=1024)
    doors = ServiceOptions(bind=f"ipc://{place}/z.sock", rpc_bind=f"unix://{place}/r.sock", http=":0", **options)
    with trio.fail_after(ENGINE_PATIENCE_S):
        async with open_service(engine, BatcherOptions(batch_timeout=1.0), doors) as service:
            yield service


def address_of(service: Service, kind: str) -> str:
    return next(address for address in service.addresses if address.startswith(kind))


async def program(*arguments: str, text: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    """`genbatch embed` with these."""
    command = [sys.executable, "-c", "from genbatch.clients.cli.main import main; main()", "embed", *arguments]
    return await trio.run_process(command, stdin=text, capture_stdout=True, capture_stderr=True, check=False)


async def test_every_door_gives_the_same_vectors(embedder_dir: EmbedderOf, tmp_path: Path) -> None:
    directory = embedder_dir("qwen3 last")
    async with service_of(directory, tmp_path) as service:
        zeromq, rpc, http = (address_of(service, kind) for kind in ("ipc", "unix", "http"))
        fresh = await BatcherClient(service).embed(TEXTS)
        # The rest are found in the cache but for their last tokens. In torch that changes the last bits.
        inside = await BatcherClient(service).embed(TEXTS)
        for one, other in zip(fresh.embeddings, inside.embeddings, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
        async with ZeroMQClient(zeromq) as client:
            assert await client.embed(TEXTS) == inside
            assert (await client.models())[0].embedding_size == 32
            cut = await client.embed(TEXTS[0], dimensions=8, deadline_s=60.0, tenant="t")
            with pytest.raises(InvalidRequest, match="negative") as refused:
                await client.embed([[5, -1]])
            assert refused.value.field == "input[0][1]"
        async with RPCClient(rpc) as client:
            assert await client.embed(TEXTS) == inside

        def ask() -> list[Any]:
            with SyncZeroMQClient(zeromq) as one, SyncRPCClient(rpc) as two:
                return [one.embed(TEXTS), two.embed(TEXTS)]

        assert await trio.to_thread.run_sync(ask) == [inside, inside]
        async with openai.AsyncOpenAI(base_url=f"{http}/v1", api_key="none", max_retries=0) as client:
            over_http = await client.embeddings.create(model=directory.name, input=TEXTS)
        printed = await program(*TEXTS, "--connect", zeromq)
    assert [vector.embedding for vector in over_http.data] == inside.embeddings
    assert [json.loads(line) for line in printed.stdout.splitlines()] == [
        pytest.approx(vector, rel=1e-6) for vector in inside.embeddings
    ]
    assert [len(vector) for vector in cut.embeddings] == [8]
    assert over_http.usage.prompt_tokens == inside.usage.prompt_tokens > 0


async def test_openais_client_gets_what_it_asks_for(embedder_dir: EmbedderOf, tmp_path: Path) -> None:
    directory = embedder_dir("bert mean")
    oracle = EmbeddingOracle("bert mean", directory)
    async with service_of(directory, tmp_path) as service:
        url = address_of(service, "http")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0]
            assert model.model_extra is not None and model.model_extra["embedding_size"] == 32
            one = await client.embeddings.create(model=model.id, input="The capital")  # asks for base64 by itself
            ids = await client.embeddings.create(model=model.id, input=[5, 6, 7], encoding_format="float")
            lists = await client.embeddings.create(model=model.id, input=[[5, 6, 7], [8]], user="me")
            assert (one.object, one.model, one.data[0].index, one.data[0].object) == ("list", model.id, 0, "embedding")
            expected = oracle.embed([5, 6, 7]).tolist()
            assert ids.data[0].embedding == pytest.approx(expected, abs=2e-5)
            assert [row.index for row in lists.data] == [0, 1]
            assert lists.data[0].embedding == pytest.approx(expected, abs=2e-5)
            assert (lists.usage.prompt_tokens, lists.usage.total_tokens) == (4, 4)
            with pytest.raises(openai.BadRequestError) as bad:
                await client.embeddings.create(model=model.id, input="a", dimensions=7)
            assert bad.value.param == "dimensions"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.embeddings.create(model=model.id, input=["a", ""])
            assert bad.value.param == "input[1]"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.embeddings.create(model=model.id, input="word " * 100)
            assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "input")
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="ada", input="a")
            with pytest.raises(openai.BadRequestError, match="does not generate text") as bad:
                await client.completions.create(model=model.id, prompt="a")
            assert bad.value.param == "model"
        async with httpx2.AsyncClient(base_url=url) as plain:
            answer = await plain.post("/v1/embeddings", json={"input": "The capital", "encoding_format": "base64"})
            written = answer.json()["data"][0]["embedding"]
            assert len(base64.b64decode(written)) == 4 * 32
            assert (await plain.get("/openapi.json")).json()["paths"]["/v1/embeddings"]["post"]["requestBody"]
            unknown = await plain.post("/v1/embeddings", json={"input": "a", "encoding": "float"})
            assert (unknown.status_code, unknown.headers["x-ignored-fields"]) == (200, "encoding")
            metrics = (await plain.get("/metrics")).text
            assert re.search(r"embedded_texts_total{[^}]*} [1-9]", metrics)


async def test_langchains_embeddings_work_as_they_are(embedder_dir: EmbedderOf, tmp_path: Path) -> None:
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    source = (
        "import sys\n"
        "from langchain_openai import OpenAIEmbeddings\n"
        "e = OpenAIEmbeddings(base_url=sys.argv[1], api_key='none', model=sys.argv[2], chunk_size=2,"
        " check_embedding_ctx_length=False)\n"
        "found = e.embed_documents(['a first text', 'a second one', 'a third'])\n"
        "assert len(found) == 3 and len(found[0]) == 32, found\n"
        "near = max(abs(a - b) for a, b in zip(e.embed_query('a second one'), found[1]))\n"
        "assert near < 1e-5, near\n"
    )
    directory = embedder_dir("bert mean")
    async with service_of(directory, tmp_path) as service:
        command = [sys.executable, "-W", "ignore", "-c", source, f"{address_of(service, 'http')}/v1", directory.name]
        done = await trio.run_process(command, capture_stderr=True, stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


async def test_a_client_that_leaves_frees_its_texts(embedder_dir: EmbedderOf, tmp_path: Path) -> None:
    async with service_of(embedder_dir("llama mean"), tmp_path) as service:
        texts = [[5 + number % 300] * 200 for number in range(2000)]
        async with ZeroMQClient(service.addresses[0]) as client:
            with trio.move_on_after(0.2) as scope:
                await client.embed(texts)
            assert scope.cancelled_caught
            assert len((await client.embed("a")).embeddings) == 1
            while True:
                stats = await client.stats()
                if not stats["requests_running"] and not stats["requests_waiting"]:
                    break
            assert stats["embedded_texts"] < 2001


@pytest.mark.long
async def test_the_program_embeds_by_itself_and_says_what_is_wrong(embedder_dir: EmbedderOf) -> None:
    flags = ("--model", str(embedder_dir("bert cls")), "--dtype", "float32", "--n-gpu-layers", "0")
    whole = await program("-", "--json", *flags, text=b"one\ntwo\n")
    found = json.loads(whole.stdout)
    assert (len(found["embeddings"]), found["usage"]["completion_tokens"]) == (2, 0)
    refused = await program("a", "--dimensions", "3", *flags)
    assert refused.returncode == 2 and b"dimensions" in refused.stderr
    nothing = await program("-", *flags)
    assert nothing.returncode == 2 and b"standard input" in nothing.stderr


async def test_what_is_too_long_keeps_its_class_on_the_wire(embedder_dir: EmbedderOf, tmp_path: Path) -> None:
    async with service_of(embedder_dir("bert cls"), tmp_path) as service, ZeroMQClient(service.addresses[0]) as client:
        with pytest.raises(PromptTooLong) as refused:
            await client.embed(["a", "word " * 100])
        assert refused.value.field == "input[1]"
