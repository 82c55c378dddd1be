"""Scores through the Batcher: each is its text's own, whatever else is in the batch, and as transformers has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from genbatch.actors.batcher.messages import Embed, Embedded
from genbatch.nif.context.engine import choose_runner, load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.runner import Runner
from genbatch.nif.runners.encoder_runner import EncoderRunner
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import DeadlineExceeded, InvalidRequest, PromptTooLong
from genbatch.proto.messages import EmbedRequest, ScoreRequest
from genbatch.proto.service_messages import StatsRequest
from tests.actors.batcher.bench import Bench, batcher
from tests.nif.scorers import SCORERS, ScoreOracle

pytestmark = pytest.mark.trio
ScorerOf = Callable[[str], Path]
QUERY = "What is the capital of France?"
DOCUMENTS = ["The capital of France is Paris.", "A pool of blocks", "", "é 世界 0123456789", "def attend(query, keys)"]


@pytest.fixture(scope="module")
def scorer(scorer_dir: ScorerOf) -> Callable[[str], Model]:
    loaded: dict[str, Model] = {}

    def model(kind: str) -> Model:
        if kind not in loaded:
            loaded[kind] = load_model(str(scorer_dir(kind)), dtype="float32", n_gpu_layers=0)
        return loaded[kind]

    return model


def runner_of(model: Model) -> Runner:
    assert model.pooling is not None
    return EncoderRunner(model) if model.pooling.reads_whole else TorchRunner(model)


def rows(answer: Embedded) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(vector), dtype=torch.float32) for vector in answer.vectors])


async def score(bench: Bench, documents: Any, query: Any = None, *, client: str = "", **params: Any) -> Embedded:
    request = ScoreRequest(documents=documents, query=query, **params)
    answer = await bench.ref.call(Embed(request, client), timeout=None)
    assert isinstance(answer, Embedded)
    return answer


@pytest.mark.parametrize("kind", SCORERS)
async def test_each_pair_has_the_scores_that_it_has_alone(
    scorer: Callable[[str], Model], scorer_dir: ScorerOf, kind: str
) -> None:
    """In chunks, in turns, beside another request, and once more with what the prefix cache has by then."""
    model, oracle = scorer(kind), ScoreOracle(kind, scorer_dir(kind))
    queries = [f"query {number}?" for number in range(len(DOCUMENTS))]
    found: dict[str, Embedded] = {}
    async with batcher(model, new_runner=runner_of, n_parallel=3, max_batch_tokens=7, n_ctx=256) as bench:

        async def ask(name: str, query: Any) -> None:
            found[name] = await score(bench, DOCUMENTS, query, raw_scores=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "one", QUERY)
            nursery.start_soon(ask, "each", queries)
        await ask("again", QUERY)
        assert (await bench.ref.call(StatsRequest()))["embedded_texts"] == 3 * len(DOCUMENTS)
    same = torch.stack([oracle.score(QUERY, document) for document in DOCUMENTS])
    each = torch.stack([oracle.score(query, document) for query, document in zip(queries, DOCUMENTS, strict=True)])
    for name, wanted in (("one", same), ("again", same), ("each", each)):
        torch.testing.assert_close(rows(found[name]), wanted, atol=3e-5, rtol=1e-4)
    assert same.std(0).min() > 1e-3  # else any answer would do


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        ("bert", torch.sigmoid),
        ("bert raw", lambda scores: scores),
        ("roberta of three", lambda scores: scores.softmax(0)),
        ("gemma2 of three", torch.sigmoid),
        ("qwen3 yes or no", torch.sigmoid),
    ],
)
async def test_scores_go_through_the_activation_that_the_files_name(
    scorer: Callable[[str], Model], scorer_dir: ScorerOf, kind: str, activation: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model, oracle = scorer(kind), ScoreOracle(kind, scorer_dir(kind))
    async with batcher(model, new_runner=runner_of, n_parallel=2) as bench:
        found = rows(await score(bench, DOCUMENTS[:1], QUERY))
    torch.testing.assert_close(found[0], activation(oracle.score(QUERY, DOCUMENTS[0])), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "roberta of three", "llama"])
async def test_a_text_by_itself_is_scored(scorer: Callable[[str], Model], scorer_dir: ScorerOf, kind: str) -> None:
    model, oracle = scorer(kind), ScoreOracle(kind, scorer_dir(kind))
    async with batcher(model, new_runner=runner_of, n_parallel=2) as bench:
        found = rows(await score(bench, [DOCUMENTS[0], DOCUMENTS[3]], raw_scores=True))
    wanted = torch.stack([oracle.score(None, DOCUMENTS[0]), oracle.score(None, DOCUMENTS[3])])
    torch.testing.assert_close(found, wanted, atol=3e-5, rtol=1e-4)


async def test_an_instruction_takes_the_place_of_the_templates_own(
    scorer: Callable[[str], Model], scorer_dir: ScorerOf
) -> None:
    kind = "qwen3 yes or no"
    model, oracle = scorer(kind), ScoreOracle(kind, scorer_dir(kind))
    async with batcher(model, new_runner=runner_of, n_parallel=2) as bench:
        found = rows(await score(bench, DOCUMENTS[:1], QUERY, raw_scores=True, instruction="Find blocks"))
        with pytest.raises(InvalidRequest, match="scores a document by a query") as refused:
            await score(bench, DOCUMENTS[:1])
    assert refused.value.field == "query"
    torch.testing.assert_close(found[0], oracle.score(QUERY, DOCUMENTS[0], "Find blocks"), atol=1e-5, rtol=1e-4)
    assert (found[0] - oracle.score(QUERY, DOCUMENTS[0])).abs() > 1e-3


@pytest.mark.parametrize("runner", ["native", "torch"])
async def test_a_yes_or_no_model_runs_on_any_runner_and_still_generates(scorer_dir: ScorerOf, runner: str) -> None:
    kind = "qwen3 yes or no"
    oracle = ScoreOracle(kind, scorer_dir(kind))
    options = EngineOptions(model_path=str(scorer_dir(kind)), dtype="float32", n_gpu_layers=0, runner=runner)
    engine = load_engine(options)
    async with batcher(engine.model, new_runner=lambda model: choose_runner(model, options)(2), n_parallel=2) as bench:
        found = rows(await score(bench, DOCUMENTS, QUERY, raw_scores=True))
        answer = await bench.generate(None, token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True)
    assert len(answer.token_ids) == 4
    wanted = torch.stack([oracle.score(QUERY, document) for document in DOCUMENTS])
    torch.testing.assert_close(found, wanted, atol=3e-5, rtol=1e-4)


async def test_each_fault_names_its_field(scorer: Callable[[str], Model]) -> None:
    async with batcher(scorer("bert"), new_runner=runner_of, n_parallel=2) as bench:
        for field, documents, params in (
            ("documents", [], {}),
            ("documents[1]", ["a", ""], {}),
            ("query", ["a"], {"query": ""}),
            ("query", ["a"], {"query": ["a", "b"]}),
            ("query[1]", ["a", "b"], {"query": ["a", ""]}),
            ("instruction", ["a"], {"query": "a", "instruction": "b"}),
            ("deadline_s", ["a"], {"deadline_s": -1.0}),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await score(bench, documents, **params)
            assert refused.value.field == field
        with pytest.raises(InvalidRequest, match="gives no embeddings") as refused:
            await bench.ref.call(Embed(EmbedRequest(input="a")), timeout=None)
        assert refused.value.field == "input"
        with pytest.raises(InvalidRequest, match="does not generate text"):
            await bench.generate(None, token_ids=[5], max_tokens=1)


async def test_a_document_that_is_too_long_is_refused_or_cut(
    scorer: Callable[[str], Model], scorer_dir: ScorerOf
) -> None:
    oracle = ScoreOracle("bert", scorer_dir("bert"))
    long = "0123456789" * 20
    async with batcher(scorer("bert"), new_runner=runner_of, n_parallel=2) as bench:
        with pytest.raises(PromptTooLong, match="reads at most 96") as refused:
            await score(bench, ["a", long], "query")
        assert refused.value.field == "documents[1]"
        found = await score(bench, [long], "query", truncate=True, raw_scores=True)
        assert found.prompt_tokens == 96
        with pytest.raises(PromptTooLong):  # the query alone is too long
            await score(bench, ["a"], long, truncate=True)
    kept = next(length for length in range(len(long), 0, -1) if oracle.num_tokens("query", long[:length]) <= 96)
    torch.testing.assert_close(rows(found)[0], oracle.score("query", long[:kept]), atol=1e-5, rtol=1e-4)


async def test_a_deadline_ends_a_request_without_scores(scorer: Callable[[str], Model]) -> None:
    async with batcher(scorer("llama"), new_runner=runner_of, n_parallel=1, max_batch_tokens=4) as bench:
        with pytest.raises(DeadlineExceeded):
            await score(bench, ["a" * 200] * 50, deadline_s=1e-6)
        assert len(rows(await score(bench, ["a"]))) == 1


async def test_a_model_that_scores_nothing_refuses(tiny_model: Callable[[str], Model]) -> None:
    async with batcher(tiny_model("llama"), n_parallel=2) as bench:
        with pytest.raises(InvalidRequest, match="scores no texts") as refused:
            await score(bench, ["a"], "b")
    assert refused.value.field == "model"
