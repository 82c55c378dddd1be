"""Embeddings through the Batcher: each is its text's own, whatever else is in the batch, and nothing leaks."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batcher.messages import Embed, Embedded, Generate
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.runner import Runner
from genbatch.nif.runners.encoder_runner import EncoderRunner
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import DeadlineExceeded, EngineError, InvalidRequest, PromptTooLong, QueueFull
from genbatch.proto.messages import EmbedRequest, GenerateRequest, Token
from genbatch.proto.service_messages import StatsRequest
from tests.actors.batcher.bench import Bench, batcher, prompt_of
from tests.nif.embedders import EMBEDDERS, ENCODERS, EmbeddingOracle
from tests.oracle import Oracle

pytestmark = pytest.mark.trio
EmbedderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def embedder(embedder_dir: EmbedderOf) -> Callable[[str], Model]:
    loaded: dict[str, Model] = {}

    def model(kind: str) -> Model:
        if kind not in loaded:
            loaded[kind] = load_model(str(embedder_dir(kind)), dtype="float32", n_gpu_layers=0)
        return loaded[kind]

    return model


def runner_of(model: Model) -> Runner:
    assert model.pooling is not None
    return EncoderRunner(model) if model.pooling.reads_whole else TorchRunner(model)


def vectors(answer: Embedded) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(vector), dtype=torch.float32) for vector in answer.vectors])


async def embed(bench: Bench, texts: Any, *, client: str = "", **params: Any) -> Embedded:
    answer = await bench.ref.call(Embed(EmbedRequest(input=texts, **params), client), timeout=None)
    assert isinstance(answer, Embedded)
    return answer


@pytest.mark.parametrize("kind", EMBEDDERS)
async def test_each_text_has_the_embedding_that_it_has_alone(
    embedder: Callable[[str], Model], embedder_dir: EmbedderOf, kind: str
) -> None:
    """In chunks, in turns, two requests at once, with a pool that holds two of the long ones."""
    model, oracle = embedder(kind), EmbeddingOracle(kind, embedder_dir(kind))
    texts = [prompt_of(length, length) for length in (1, 40, 2, 17, 33, 60, 5, 60, 12, 3, 3)]
    found: dict[int, Embedded] = {}
    async with batcher(model, new_runner=runner_of, n_parallel=3, max_batch_tokens=7, n_ctx=128) as bench:

        async def ask(index: int, some: list[list[int]]) -> None:
            found[index] = await embed(bench, some)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0, texts)
            nursery.start_soon(ask, 1, texts[3:6])
        again = await embed(bench, texts)  # with what the prefix cache has of them by now
        assert (await bench.ref.call(StatsRequest()))["embedded_texts"] == 2 * len(texts) + 3
    expected = torch.stack([oracle.embed(text) for text in texts])
    for answer, wanted in ((found[0], expected), (found[1], expected[3:6]), (again, expected)):
        torch.testing.assert_close(vectors(answer), wanted, atol=2e-5, rtol=1e-4)
    assert found[0].prompt_tokens == sum(map(len, texts))


async def test_a_text_is_read_as_the_models_tokenizer_reads_it(
    embedder: Callable[[str], Model], embedder_dir: EmbedderOf
) -> None:
    """With the special tokens of its template, on the event loop and, where there is much of it, off it."""
    model, oracle = embedder("bert mean"), EmbeddingOracle("bert mean", embedder_dir("bert mean"))
    texts = ["The capital of France", "a", "blocks"] * 700
    async with batcher(model, new_runner=runner_of, max_batch_tokens=256) as bench:
        [[lone]] = [vectors(await embed(bench, "The capital of France"))]
        many = vectors(await embed(bench, texts[:2048]))
    tokens = model.tokenizer.encode("The capital of France")
    assert (tokens[0], tokens[-1]) == (0, 2)
    torch.testing.assert_close(lone, oracle.embed(tokens), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(many[0], lone, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(many[2046:], many[:2], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3 last", "llama mean"])
async def test_what_is_generated_beside_embeddings_is_generates_own(
    embedder: Callable[[str], Model], embedder_dir: EmbedderOf, kind: str
) -> None:
    model, oracle = embedder(kind), EmbeddingOracle(kind, embedder_dir(kind))
    generate = Oracle(embedder_dir(kind)).generate
    prompts = [prompt_of(length, length) for length in (5, 30, 12)]
    texts = [prompt_of(length, 100 + length) for length in (20, 3, 31, 7, 9, 50)]
    async with batcher(model, n_parallel=4, max_batch_tokens=16, n_ctx=256) as bench:
        answers: dict[int, list[int]] = {}
        made: list[torch.Tensor] = []

        async def ask(index: int) -> None:
            params: dict[str, Any] = {"prompt_logprobs": 0} if index == 2 else {}
            answers[index] = (await bench.generate(token_ids=prompts[index], max_tokens=16, **params)).token_ids

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(ask, index)
            made.append(vectors(await embed(bench, texts)))
    assert [answers[index] for index in range(3)] == [generate(prompt, 16) for prompt in prompts]
    torch.testing.assert_close(made[0], torch.stack([oracle.embed(t) for t in texts]), atol=2e-5, rtol=1e-4)


async def test_embeddings_are_those_of_one_pass_after_a_pause(
    embedder: Callable[[str], Model], embedder_dir: EmbedderOf
) -> None:
    """A pool in which a generation outgrows the text beside it: somebody gives way and begins again."""
    kind = "llama mean"
    model, oracle = embedder(kind), EmbeddingOracle(kind, embedder_dir(kind))
    texts = [prompt_of(40, seed) for seed in range(8)]
    async with batcher(model, n_parallel=3, max_batch_tokens=8, n_ctx=64) as bench, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: bench.generate(token_ids=prompt_of(4, 9), max_tokens=50, ignore_eos=True))
        await wait_all_tasks_blocked()
        made = vectors(await embed(bench, texts))
    assert bench.actor.stats.preemptions
    torch.testing.assert_close(made, torch.stack([oracle.embed(t) for t in texts]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "request_fields", "field", "rule"),
    [
        ("bert mean", {"input": ""}, "input", "empty"),
        ("bert mean", {"input": []}, "input", "empty"),
        ("bert mean", {"input": ["a", ""]}, "input[1]", "empty"),
        ("bert mean", {"input": [[1], []]}, "input[1]", "empty"),
        ("bert mean", {"input": ["a", [1]]}, "input", "side by side"),
        ("bert mean", {"input": ["a", 1]}, "input", "side by side"),
        ("bert mean", {"input": [3, -1]}, "input[1]", "negative"),
        ("bert mean", {"input": [[3], [4, 320]]}, "input[1][1]", "320"),
        ("bert mean", {"input": ["a"] * 2049}, "input", "2048"),
        ("bert mean", {"input": "a\ud800"}, "input", "surrogate"),
        ("bert mean", {"input": "a", "dimensions": 16}, "dimensions", "not trained for others"),
        ("qwen3 last", {"input": "a", "dimensions": 12}, "dimensions", "8, 16"),
        ("qwen3 last", {"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ("bert mean", {"input": "a", "deadline_s": 0.0}, "deadline_s", "more than 0"),
        ("bert mean", {"input": "a", "tenant": "x" * 129}, "tenant", "128"),
        ("bert mean", {"input": "a", "priority": 101}, "priority", "100"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    embedder: Callable[[str], Model], kind: str, request_fields: dict[str, Any], field: str, rule: str
) -> None:
    async with batcher(embedder(kind), new_runner=runner_of) as bench:
        with pytest.raises(InvalidRequest, match=rule) as refused:
            await bench.ref.call(Embed(EmbedRequest(**request_fields)), timeout=None)
        assert refused.value.field == field


async def test_a_text_that_is_too_long_is_refused_and_not_cut(embedder: Callable[[str], Model]) -> None:
    async with batcher(embedder("roberta mean"), new_runner=runner_of) as bench:
        longest = prompt_of(64, 0)
        assert len((await embed(bench, longest)).vectors) == 1
        with pytest.raises(PromptTooLong, match="65 tokens") as refused:
            await embed(bench, [longest, [*longest, 5]])
        assert refused.value.field == "input[1]"
    async with batcher(embedder("qwen3 last"), n_ctx=32) as bench:
        assert len((await embed(bench, prompt_of(32, 0))).vectors) == 1
        with pytest.raises(PromptTooLong, match="33 tokens"):
            await embed(bench, prompt_of(33, 0))


async def test_shorter_embeddings_are_cut_and_brought_to_length_one_again(embedder: Callable[[str], Model]) -> None:
    async with batcher(embedder("qwen3 last")) as bench:
        whole = vectors(await embed(bench, [[5, 6, 7]]))[0]
        cut = vectors(await embed(bench, [[5, 6, 7]], dimensions=8))[0]
    torch.testing.assert_close(cut, whole[:8] / whole[:8].norm())


@pytest.mark.parametrize("kind", [*ENCODERS[:1], "qwen3 without a head"])
async def test_a_model_without_text_refuses_to_generate(embedder: Callable[[str], Model], kind: str) -> None:
    async with batcher(embedder(kind), new_runner=runner_of) as bench:
        with pytest.raises(InvalidRequest, match="does not generate text") as refused:
            await bench.generate(prompt="a")
        assert refused.value.field == "model"


async def test_a_model_without_embeddings_refuses_them(tiny_model: Callable[[str], Model]) -> None:
    async with batcher(tiny_model("llama")) as bench:
        with pytest.raises(InvalidRequest, match="no embeddings"):
            await embed(bench, "a")


async def test_a_deadline_and_a_caller_that_leaves_end_their_texts(
    embedder: Callable[[str], Model], mock_clock: MockClock
) -> None:
    options: dict[str, Any] = {"n_parallel": 2, "batch_timeout": 1e6}  # nothing is evaluated for 1000 s
    async with batcher(embedder("bert mean"), new_runner=runner_of, **options) as bench:
        ends: list[Exception] = []

        async def late() -> None:
            try:
                await embed(bench, [[5]], deadline_s=3.0)
            except DeadlineExceeded as error:
                ends.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(late)
            await wait_all_tasks_blocked()
            mock_clock.jump(3.5)
        assert "before all texts" in str(ends[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(embed, bench, [[5]])
            await wait_all_tasks_blocked()
            assert len(bench.actor.slots.pending) == 1
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        bench.assert_idle()


async def test_a_list_takes_no_more_places_than_there_are_slots(embedder: Callable[[str], Model]) -> None:
    """So that a list of thousands is accepted, and others find their places."""
    options: dict[str, Any] = {"n_parallel": 2, "max_queue": 4, "batch_timeout": 1e9, "batch_size": 100}
    async with batcher(embedder("qwen3 last"), **options) as bench, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: embed(bench, [[5]] * 300, client="many"))
        await wait_all_tasks_blocked()
        assert len(bench.actor.slots.pending) == 2
        nursery.start_soon(lambda: embed(bench, [[6]] * 2, client="more"))
        await wait_all_tasks_blocked()
        with pytest.raises(QueueFull):  # of the queue embeddings have half, and what the free slots take
            await embed(bench, [[7]], client="others")
        nursery.start_soon(lambda: bench.generate(token_ids=[5, 6], max_tokens=1))
        await wait_all_tasks_blocked()
        assert len(bench.actor.slots.pending) == 5
        nursery.cancel_scope.cancel()
    async with batcher(embedder("qwen3 last"), n_parallel=2, max_queue=4) as bench:
        assert len((await embed(bench, [[5]] * 300, client="many")).vectors) == 300


async def test_a_flood_of_embeddings_and_a_generation_of_one_client_take_turns(
    embedder: Callable[[str], Model],
) -> None:
    async with batcher(embedder("qwen3 last"), n_parallel=2, max_queue=64, max_batch_tokens=8) as bench:
        order: list[str] = []
        flood = [prompt_of(8, seed) for seed in range(60)]

        async def embeds() -> None:
            await embed(bench, flood, client="one")
            order.append("embeddings")

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(embeds)
            await wait_all_tasks_blocked()
            request = GenerateRequest(token_ids=[5, 6, 7], max_tokens=12, ignore_eos=True)
            await bench.ref.call(Generate(request, client="one"), timeout=None)
            order.append("generation")
    assert order[0] == "generation"


async def test_states_that_are_no_numbers_fail_the_request_and_no_other(
    embedder: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = EncoderRunner.forward_states

    def poisoned(self: EncoderRunner, batch: Any) -> tuple[Any, Any]:
        logits, pooled = forward(self, batch)
        return logits, np.where(batch.kv_lens[:, None] == 3, np.float32(np.nan), pooled)

    monkeypatch.setattr(EncoderRunner, "forward_states", poisoned)
    async with batcher(embedder("bert cls"), new_runner=runner_of) as bench:
        good: list[Embedded] = []

        async def ask() -> None:
            good.append(await embed(bench, [[5, 6], [7, 8]]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            with pytest.raises(EngineError, match="finite"):
                await embed(bench, [[5, 6, 7]])
        assert len(good[0].vectors) == 2


async def test_tokens_of_others_still_stream_while_a_list_is_embedded(embedder: Callable[[str], Model]) -> None:
    """Each step of a flood has room for whoever decodes."""
    async with batcher(embedder("qwen3 last"), n_parallel=3, max_batch_tokens=8) as bench:
        tokens: list[Token] = []
        steps: list[int] = []

        def seen(token: Token) -> None:
            tokens.append(token)
            steps.append(bench.actor.stats.steps)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(embed, bench, [prompt_of(16, seed) for seed in range(40)])
            await bench.generate(seen, token_ids=[5, 6, 7], max_tokens=10, ignore_eos=True)
        assert max(after - before for before, after in pairwise(steps)) == 1
