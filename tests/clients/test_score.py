"""Scores over every door, from one service of each kind, and in the shapes that other servers have."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from genbatch.clients.in_process import BatcherClient
from genbatch.clients.remote import RPCClient, ZeroMQClient
from genbatch.clients.sync import SyncRPCClient, SyncZeroMQClient
from genbatch.proto.errors import InvalidRequest, PromptTooLong
from genbatch.proto.messages import ranking_of
from tests.clients.test_embed import address_of, service_of
from tests.nif.scorers import ScoreOracle

pytestmark = pytest.mark.trio
ScorerOf = Callable[[str], Path]
QUERY = "What is the capital of France?"
DOCUMENTS = ["A pool of blocks", "The capital of France is Paris.", "0123456789"]
ROOT = Path(__file__).resolve().parents[2]
OTHERS = ROOT / ".venv-clients" / "bin" / "python"
COHERE = """
import sys, cohere
url, model = sys.argv[1:]
query, documents = "What is the capital of France?", ["A pool of blocks", "The capital of France is Paris."]
newer = cohere.ClientV2("none", base_url=url).rerank(model=model, query=query, documents=documents, top_n=1)
older = cohere.Client("none", base_url=url).rerank(model=model, query=query, documents=documents, return_documents=True)
assert len(newer.results) == 1 and len(older.results) == 2, (newer, older)
assert newer.results[0].relevance_score == older.results[0].relevance_score
assert older.results[0].document.text == documents[older.results[0].index]
assert newer.meta.api_version.version
try:
    cohere.ClientV2("none", base_url=url).rerank(model=model, query="", documents=documents)
except cohere.errors.BadRequestError as error:
    assert "query" in str(error.body), error.body
else:
    raise AssertionError("an empty query is refused")
"""


async def test_every_door_gives_the_same_ranking(scorer_dir: ScorerOf, tmp_path: Path) -> None:
    directory = scorer_dir("bert")
    oracle = ScoreOracle("bert", directory)
    async with service_of(directory, tmp_path) as service:
        zeromq, rpc = (address_of(service, kind) for kind in ("ipc", "unix"))
        inside = await BatcherClient(service).rerank(QUERY, DOCUMENTS)
        async with ZeroMQClient(zeromq) as client:
            assert await client.rerank(QUERY, DOCUMENTS) == inside
            (card,) = await client.models()
            assert (card.labels, card.embedding_size, card.generates) == (("LABEL_0",), None, False)
            best = await client.rerank(QUERY, DOCUMENTS, top_n=1, deadline_s=60.0, tenant="t")
            raw = await client.score(DOCUMENTS, QUERY, raw_scores=True)
            with pytest.raises(InvalidRequest) as refused:
                await client.rerank(QUERY, DOCUMENTS, top_n=0)
            assert refused.value.field == "top_n"
            with pytest.raises(InvalidRequest) as refused:
                await client.score("one text", QUERY)
            assert refused.value.field == "documents"
            with pytest.raises(PromptTooLong) as too_long:
                await client.rerank(QUERY, ["a", "0123456789" * 20])
            assert too_long.value.field == "documents[1]"
        async with RPCClient(rpc) as client:
            assert await client.rerank(QUERY, DOCUMENTS) == inside

        def ask() -> list[Any]:
            with SyncZeroMQClient(zeromq) as one, SyncRPCClient(rpc) as two:
                return [one.rerank(QUERY, DOCUMENTS), ranking_of(two.score(DOCUMENTS, QUERY))]

        assert await trio.to_thread.run_sync(ask) == [inside, inside]
    scores = [float(oracle.score(QUERY, document).sigmoid()) for document in DOCUMENTS]
    order = sorted(range(3), key=scores.__getitem__, reverse=True)
    assert [one.index for one in inside.results] == order
    assert [one.score for one in inside.results] == pytest.approx([scores[index] for index in order], abs=1e-5)
    assert best.results == inside.results[:1]
    assert [row[0] for row in raw.scores] == pytest.approx(
        [float(oracle.score(QUERY, document)) for document in DOCUMENTS], abs=1e-5
    )


async def test_rerankings_have_the_shapes_of_other_servers(scorer_dir: ScorerOf, tmp_path: Path) -> None:
    directory = scorer_dir("bert")
    long = "0123456789" * 20
    async with service_of(directory, tmp_path) as service:
        inside = await BatcherClient(service).rerank(QUERY, DOCUMENTS)
        wanted = [(one.index, pytest.approx(one.score, abs=1e-6)) for one in inside.results]
        async with httpx2.AsyncClient(base_url=address_of(service, "http")) as client:

            async def post(path: str, **body: Any) -> Any:
                answer = await client.post(path, json={"query": QUERY, **body})
                return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"])

            jina = await post("/v1/rerank", model=directory.name, documents=DOCUMENTS, user="me")
            objects = await post("/rerank", documents=[{"text": text, "title": "t"} for text in DOCUMENTS], top_n=2)
            cohere = await post("/v2/rerank", model=directory.name, documents=[*DOCUMENTS, long], max_tokens_per_doc=8)
            plain = await post("/rerank", texts=DOCUMENTS)
            shown = await post("/rerank", texts=DOCUMENTS, return_text=True, raw_scores=True)
            pairs = await post("/v1/score", query=None, text_1=QUERY, text_2=DOCUMENTS)
            each = await post("/score", query=None, queries=[QUERY] * 3, documents=DOCUMENTS, use_activation=False)
            classes = await post("/v1/classify", query=None, input=DOCUMENTS[0])
            faults = [
                await post(path, **body)
                for path, body in (
                    ("/v1/rerank", {"documents": []}),
                    ("/v1/rerank", {"documents": ["a", {"title": "t"}]}),
                    ("/v1/rerank", {"documents": ["a"], "top_n": 0}),
                    ("/v1/rerank", {"documents": ["a", long]}),
                    ("/v1/rerank", {"documents": ["a"], "texts": ["a"]}),
                    ("/v1/rerank", {"documents": ["a"], "rank_fields": ["title"]}),
                    ("/v1/score", {"query": None, "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
                    ("/v1/score", {"query": None, "text_1": "a"}),
                    ("/v1/embeddings", {"query": None, "input": "a"}),
                )
            ]
    assert [(one["index"], one["relevance_score"]) for one in jina["results"]] == wanted
    assert [one["document"]["text"] for one in jina["results"]] == [DOCUMENTS[index] for index, _ in wanted]
    assert (jina["model"], jina["usage"]["total_tokens"]) == (directory.name, inside.usage.prompt_tokens)
    assert [one["index"] for one in objects["results"]] == [index for index, _ in wanted[:2]]
    assert objects["results"][0]["document"]["title"] == "t"
    assert len(cohere["results"]) == 4 and "document" not in cohere["results"][0]
    assert [(one["index"], one["score"]) for one in plain] == wanted and "text" not in plain[0]
    assert shown[0]["text"] == DOCUMENTS[wanted[0][0]]
    assert [one["score"] for one in pairs["data"]] == [dict(wanted)[index] for index in range(3)]
    assert [one["score"] for one in each["data"]] == pytest.approx(
        [one["score"] for one in sorted(shown, key=lambda one: one["index"])], abs=1e-6
    )
    (one_class,) = classes["data"]
    assert (one_class["label"], one_class["num_classes"], len(one_class["probs"])) == ("LABEL_0", 1, 1)
    assert [(status, error["param"]) for status, error in faults] == [
        (400, "documents"),
        (400, "documents[1].text"),
        (400, "top_n"),
        (400, "documents[1]"),
        (400, "documents"),
        (400, "rank_fields"),
        (400, "text_1"),
        (400, "text_2"),
        (404, None),
    ]


async def test_a_classifier_names_its_labels_and_ranks_nothing(scorer_dir: ScorerOf, tmp_path: Path) -> None:
    directory = scorer_dir("roberta of three")
    oracle = ScoreOracle("roberta of three", directory)
    async with (
        service_of(directory, tmp_path) as service,
        httpx2.AsyncClient(base_url=address_of(service, "http")) as client,
    ):
        found = (await client.post("/classify", json={"input": DOCUMENTS})).json()["data"]
        listed = (await client.get("/v1/models")).json()["data"][0]
        ranked = await client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS})
    for one, document in zip(found, DOCUMENTS, strict=True):
        wanted = oracle.score(None, document).softmax(0)
        assert one["probs"] == pytest.approx(wanted.tolist(), abs=1e-5)
        assert one["label"] == ["no", "maybe", "yes"][int(wanted.argmax())]
    assert listed["labels"] == ["no", "maybe", "yes"]
    assert (ranked.status_code, ranked.json()["error"]["param"]) == (400, "model")


async def test_an_engine_process_scores(scorer_dir: ScorerOf, tmp_path: Path) -> None:
    directory = scorer_dir("llama")
    oracle = ScoreOracle("llama", directory)
    service = service_of(directory, tmp_path, engine="process")
    async with service as running, ZeroMQClient(running.addresses[0]) as client:
        found = await client.score(DOCUMENTS, QUERY, raw_scores=True)
    wanted = [float(oracle.score(QUERY, document)) for document in DOCUMENTS]
    assert [row[0] for row in found.scores] == pytest.approx(wanted, abs=3e-5)


async def test_a_client_that_leaves_frees_its_documents(scorer_dir: ScorerOf, tmp_path: Path) -> None:
    async with service_of(scorer_dir("llama"), tmp_path) as service, ZeroMQClient(service.addresses[0]) as client:
        with trio.move_on_after(0.2) as scope:
            await client.rerank(QUERY, ["0123456789" * 20] * 2000)
        assert scope.cancelled_caught
        assert len((await client.score(["a"])).scores) == 1
        stats = await client.stats()
        while stats["requests_running"] or stats["requests_waiting"]:
            stats = await client.stats()
    assert stats["embedded_texts"] < 2001


async def test_coheres_client_works_as_it_is(scorer_dir: ScorerOf, tmp_path: Path) -> None:
    python = str(OTHERS) if OTHERS.exists() else sys.executable
    there = await trio.run_process([python, "-c", "import cohere"], capture_stderr=True, check=False)
    if there.returncode:
        pytest.skip("cohere is not installed; make clients")
    directory = scorer_dir("bert")
    async with service_of(directory, tmp_path) as service:
        command = [python, "-W", "ignore", "-c", COHERE, address_of(service, "http"), directory.name]
        done = await trio.run_process(command, capture_stderr=True, stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
