"""The batch manager's statistics, and the parameters whose effect shows in them."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.request import LlmRequest
from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.clients.gpt_manager.requests import KvCacheConfig, TrtGptModelOptionalParams
from genbatch.nif.models.loaded_model import Model
from tests.clients.gpt_manager.batch_client import BatchClient, inference_request, manager

TinyModel = Callable[[str], Model]
OracleOf = Callable[[str], Any]

IN_FLIGHT = [BatchingType.INFLIGHT_BATCHING, BatchingType.INFLIGHT_FUSED_BATCHING]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of requests, one for each time it was paused."""
    seen: list[int] = []
    pause = LlmRequest.pause

    def watch(request: LlmRequest) -> None:
        seen.append(request.request_id)
        pause(request)

    monkeypatch.setattr(LlmRequest, "pause", watch)
    return seen


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


def served(model: Model, requests: dict[int, tuple[list[int], int]], **options: Any) -> BatchClient:
    """A client whose requests, (prompt, exact output length) by id, have all been answered."""
    client = BatchClient(*(inference_request(i, prompt, length, end_id=-1) for i, (prompt, length) in requests.items()))
    with manager(model, client, **options):
        client.wait(*requests)
    return client


@pytest.mark.parametrize("model_type", list(BatchingType))
def test_b10_b11_every_iteration_reports_time_counter_requests_and_blocks(
    tiny_model: TinyModel, model_type: BatchingType
) -> None:
    requests = {i: (prompt_of(5 + i, i), 3 + i) for i in range(5)}
    client = served(tiny_model("llama"), requests, model_type=model_type, max_batch_size=3)
    for one in client.stats:
        time.strptime(one["Timestamp"], "%m-%d-%Y %H:%M:%S")
        assert one["Max Request Count"] == 3
        assert 1 <= one["Active Request Count"] <= 3
        assert one["Free KV cache blocks"] + one["Used KV cache blocks"] == one["Max KV cache blocks"]
        assert one["Tokens per KV cache block"] == 4
        assert one["Scheduled Requests"] <= one["Active Request Count"]
    assert all(a["Iteration Counter"] < b["Iteration Counter"] for a, b in pairwise(client.stats))
    assert max(one["Used KV cache blocks"] for one in client.stats) > 3
    assert client.stats[-1]["Used KV cache blocks"] == 0


@pytest.mark.parametrize("model_type", IN_FLIGHT)
def test_b12_in_flight_iterations_report_who_was_scheduled(tiny_model: TinyModel, model_type: BatchingType) -> None:
    requests = {i: (prompt_of(length, i), 4) for i, length in enumerate((5, 9, 13, 2))}
    client = served(tiny_model("llama"), requests, model_type=model_type, max_batch_size=2)
    for one in client.stats:
        assert one["Context Requests"] + one["Generation Requests"] == one["Scheduled Requests"]
        assert one["MicroBatch ID"] == 0
        assert (one["Total Context Tokens"] > 0) == (one["Context Requests"] > 0)
    assert client.stats[0]["Context Requests"] == 2
    assert client.stats[0]["Total Context Tokens"] == 14
    assert sum(one["Total Context Tokens"] for one in client.stats) == 5 + 9 + 13 + 2
    assert sum(one["Generation Requests"] for one in client.stats) == 4 * 3


def test_b13_v1_reports_the_padded_slots_of_a_ragged_batch(tiny_model: TinyModel) -> None:
    """Three requests of 2, 5 and 3 tokens run in lockstep; a fourth waits until all three have ended.

    The context step brings each its first token. Four generation steps follow, with 3, 2, 1 and 1 requests in the
    three slots: 0 + 1 + 2 + 2 slots stay empty.
    """
    requests = {1: (prompt_of(4, 1), 2), 2: (prompt_of(6, 2), 5), 3: (prompt_of(3, 3), 3), 4: (prompt_of(7, 4), 2)}
    client = served(tiny_model("llama"), requests, model_type=BatchingType.V1, max_batch_size=3)
    columns = ("Scheduled Requests", "Context Requests", "Total Context Tokens", "Total Generation Tokens")
    rows = [(*(one[name] for name in columns), one["Empty Generation Slots"]) for one in client.stats]
    assert rows == [
        (3, 3, 13, 3, 0),
        (3, 0, 0, 3, 0),
        (2, 0, 0, 2, 1),
        (1, 0, 0, 1, 2),
        (1, 0, 0, 1, 2),
        (1, 1, 7, 1, 0),
        (1, 0, 0, 1, 0),
    ]


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
def test_b17_b18_a_tiny_cache_pauses_only_under_max_utilization_and_the_tokens_stay(
    tiny_model: TinyModel, oracle: OracleOf, policy: SchedulerPolicy, pauses: list[int]
) -> None:
    requests = {i: (prompt_of(9, i), 30) for i in range(5)}
    client = served(tiny_model("llama"), requests, policy=policy, cache={"maxTokens": 64})
    for i, (prompt, _) in requests.items():
        expected = oracle("llama").generate(prompt, 30)
        assert client.output(i, prompt)[: len(expected)] == expected
    assert bool(pauses) == (policy is SchedulerPolicy.MAX_UTILIZATION)


def test_b19_b20_the_cache_is_the_smaller_of_max_tokens_and_the_memory_fraction(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 12 * 2**20
    monkeypatch.setattr("genbatch.nif.context.engine.free_host_memory", lambda: free)
    requests = {1: (prompt_of(5, 1), 2)}

    def blocks(**cache: Any) -> int:
        client = served(tiny_model("llama"), requests, max_batch_size=64, cache=cache)
        return int(client.stats[0]["Max KV cache blocks"])

    whole, most = blocks(), 64 * 256 // 4
    half = blocks(freeGpuMemoryFraction=0.5)
    assert 0 < half < whole < most, "64 sequences of 256 positions would fit neither"
    per_block = 4 * 4 * 2 * 8 * 2 * 4  # layers, positions, KV heads, elements, K and V, float32
    assert whole * per_block <= 0.9 * free
    assert blocks(maxTokens=100) == 25
    assert blocks(maxTokens=100, freeGpuMemoryFraction=0.5) == 25
    assert blocks(maxTokens=4 * (half + 1), freeGpuMemoryFraction=0.5) == half
    free = 2**33
    assert blocks() == most, "what every slot could fill, however much memory there is"


@pytest.mark.parametrize("sinks", [0, 1, 5])
@pytest.mark.parametrize("length", [3, 40])
def test_b21_an_attention_window_equals_a_masked_reference(
    tiny_model: TinyModel, oracle: OracleOf, length: int, sinks: int
) -> None:
    window, prompt = 6, prompt_of(length, length)
    client = BatchClient(inference_request(1, prompt, 12, end_id=-1), inference_request(2, prompt[:2], 3))
    build = {"gather_generation_logits": True, "max_num_tokens": 16}
    cache = {"maxAttentionWindow": window, "sinkTokenLength": sinks}
    with manager(tiny_model("llama"), client, cache=cache, **build):
        client.wait(1, 2)
    tokens = prompt + client.output(1, prompt)
    rows = masked_log_probs(oracle("llama"), tokens, window, sinks)[length - 1 : -1]
    logits = torch.from_numpy(client.responses[1][0].tensors.generation_logits[0, 0])
    torch.testing.assert_close(torch.log_softmax(logits, -1), rows, atol=2e-4, rtol=1e-4)
    unlimited = oracle("llama").log_probs(tokens)[length - 1 : -1]
    assert not torch.allclose(rows, unlimited, atol=1e-2)


@pytest.mark.parametrize("beam_width", [1, 2])
def test_b21_sinks_stay_in_sight_in_every_mix_of_batch_chunking_and_pausing(
    tiny_model: TinyModel, oracle: OracleOf, pauses: list[int], beam_width: int
) -> None:
    window, sinks = 6, 5
    cache = {"maxAttentionWindow": window, "sinkTokenLength": sinks}
    prompts = {i: prompt_of(length, i) for i, length in enumerate((2, 5, 9, 17, 33, 40))}
    # The first alone with all the room there is, the others in blocks for three, with steps too small for a prompt.
    small = {**cache, "maxTokens": 68}
    for options in ({"cache": cache}, {"cache": small, "chunked": True, "max_num_tokens": 7}):
        asked = [inference_request(i, prompt, 24, end_id=-1, beam_width=beam_width) for i, prompt in prompts.items()]
        client = BatchClient(*asked)
        with manager(tiny_model("llama"), client, max_beam_width=2, max_batch_size=6, **options):
            client.wait(*prompts)
        for i, prompt in prompts.items():
            said = client.output(i, prompt)
            rows = masked_log_probs(oracle("llama"), prompt + said, window, sinks)[len(prompt) - 1 : -1]
            if beam_width == 1:
                assert said == rows.argmax(-1).tolist()
            cumulative = client.responses[i][0].tensors.cum_log_probs
            if cumulative is not None:
                assert float(cumulative[0, 0]) == pytest.approx(
                    float(rows.gather(1, torch.tensor(said)[:, None]).sum()), abs=1e-3
                )
    assert pauses, "the small cache pauses"


@torch.inference_mode()
def masked_log_probs(oracle: Any, tokens: list[int], window: int, sinks: int) -> torch.Tensor:
    """transformers' own forward under a mask that shows each token the last `window` positions, and the first ones."""
    distance = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))[None]
    seen = (distance >= 0) & ((distance < window) | (torch.arange(len(tokens))[None] < sinks))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    logits = oracle._hf(torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def test_b22_block_reuse_prefills_a_repeated_prompt_no_more_and_gives_the_same_logits(tiny_model: TinyModel) -> None:
    prompt = prompt_of(33, 1)
    context_tokens: dict[bool, list[int]] = {}
    for reuse in (False, True):
        client = BatchClient(inference_request(1, prompt, 5, end_id=-1))
        build = {"gather_generation_logits": True}
        with manager(tiny_model("llama"), client, cache={"enableBlockReuse": reuse}, **build):
            client.wait(1)
            client.add(inference_request(2, prompt, 5, end_id=-1))
            client.wait(2)
        context_tokens[reuse] = [n for one in client.stats if (n := one["Total Context Tokens"])]
        first, second = (client.responses[one][0].tensors for one in (1, 2))
        np.testing.assert_array_equal(first.output_ids, second.output_ids)
        np.testing.assert_allclose(first.generation_logits, second.generation_logits, atol=1e-4, rtol=1e-4)
    assert context_tokens == {False: [33, 33], True: [33, 1]}


@pytest.mark.parametrize("model_type", IN_FLIGHT)
def test_b23_two_micro_batches_alternate_and_give_the_same_tokens(
    tiny_model: TinyModel, oracle: OracleOf, model_type: BatchingType, pauses: list[int]
) -> None:
    """Here they take turns; running at the same time needs a GPU's streams."""
    requests = {i: (prompt_of(5 + i, i), 12) for i in range(6)}
    for cache in ({}, {"maxTokens": 64}):
        client = served(tiny_model("llama"), requests, model_type=model_type, overlap=True, cache=cache)
        for i, (prompt, length) in requests.items():
            expected = oracle("llama").generate(prompt, length)
            assert client.output(i, prompt)[: len(expected)] == expected
        if not cache:
            ids = [one["MicroBatch ID"] for one in client.stats]
            assert all(a != b for a, b in pairwise(ids))
            assert set(ids) == {0, 1}
            assert max(one["Scheduled Requests"] for one in client.stats) == 3
    assert pauses, "the small cache pauses across micro-batches"


def test_b24_chunked_context_fills_the_steps_and_gives_the_same_logits(tiny_model: TinyModel) -> None:
    requests = {1: (prompt_of(3, 1), 20), 2: (prompt_of(10, 2), 4), 3: (prompt_of(10, 3), 4)}
    logits: dict[bool, Any] = {}
    for chunked in (False, True):
        client = BatchClient(inference_request(1, *requests[1], end_id=-1, streaming=True))
        added = False

        def join(request_id: int, response: Any) -> None:
            nonlocal added
            if not added:
                added = True
                for i in (2, 3):
                    client.add(inference_request(i, *requests[i], end_id=-1))  # noqa: B023  (called within the turn)

        client.on_send = join
        build = {"max_num_tokens": 16, "gather_generation_logits": True, "chunked": chunked}
        with manager(tiny_model("llama"), client, **build):
            client.wait(1, 2, 3)
        logits[chunked] = client.responses[3][0].tensors.generation_logits
        both = [one for one in client.stats if one["Context Requests"] and one["Generation Requests"]]
        sizes = [one["Total Context Tokens"] for one in both]
        assert sizes == ([15, 5] if chunked else [10, 10]), "the decode goes on beside each chunk"
    np.testing.assert_allclose(logits[False], logits[True], atol=1e-4, rtol=1e-4)


def test_the_documents_names_of_parameters_are_taken_as_well() -> None:
    named = TrtGptModelOptionalParams.named(
        kvCacheConfig=KvCacheConfig.named(
            maxTokens=5, maxAttentionWindow=6, freeGpuMemoryFraction=0.7, enableBlockReuse=False
        ),
        enableTrtOverlap=True,
        enableChunkedContext=True,
    )
    assert named == TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=5, max_attention_window=6, free_gpu_memory_fraction=0.7),
        enable_trt_overlap=True,
        enable_chunked_context=True,
    )
    defaults = TrtGptModelOptionalParams()
    assert (defaults.enable_trt_overlap, defaults.enable_chunked_context) == (False, False)
    assert defaults.kv_cache_config == KvCacheConfig(
        max_tokens=None, max_attention_window=None, free_gpu_memory_fraction=0.9, enable_block_reuse=False
    )
