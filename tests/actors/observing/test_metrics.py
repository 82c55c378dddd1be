"""/metrics: a scripted run of the real Batcher, and what a Prometheus parser reads of it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.observing.metrics import PREFIX, render
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import InvalidRequest, QueueFull
from genbatch.proto.messages import GenerateRequest, Token
from genbatch.proto.service_messages import StatsRequest
from tests.waiting import a_moment

TinyModel = Callable[[str], Model]

PROMPT = [5, 6, 7, 8, 9]
# vLLM's names, as dashboards have them.
VLLM_NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "num_preemptions": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "admission_rejections": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram",
}


@asynccontextmanager
async def batcher(model: Model, **others: Any) -> AsyncIterator[ActorRef]:
    options = BatcherOptions(
        **{"n_parallel": 1, "batch_timeout": 0.0, "max_batch_tokens": 16, "max_queue": 1, **others}
    )
    held = options.max_held_prompts

    def open_context() -> Context:
        return Context(model, TorchRunner(model), n_ctx=256, n_parallel=1, n_held=held, block_size=4, n_batch=16)

    async with trio.open_nursery() as nursery:
        ref = await start(nursery, Batcher(open_context, options), name="batcher")
        yield ref
        await ref.stop()


class Scrape:
    """The parsed exposition."""

    def __init__(self, stats: dict[str, Any]) -> None:
        body, content_type = render(stats)
        assert content_type.startswith("text/plain")
        self.model = stats["model"]
        self.families = {family.name: family for family in text_string_to_metric_families(body.decode())}

    def value(self, name: str, suffix: str = "", **labels: str) -> float:
        wanted = {"model_name": self.model, **labels}
        samples = self.families[PREFIX + name].samples
        [value] = [s.value for s in samples if s.name == PREFIX + name + suffix and s.labels == wanted]
        return float(value)

    def histogram(self, name: str) -> tuple[float, float]:
        """(number, sum) of what was observed."""
        return self.value(name, "_count"), self.value(name, "_sum")


@pytest.mark.trio
async def test_the_exposition_says_what_a_scripted_run_did(tiny_model: TinyModel, mock_clock: MockClock) -> None:
    """The clock moves one second with each token and not otherwise, so every time is known."""
    refused: list[type[Exception]] = []
    accumulating = {"batch_size": 2, "batch_timeout": 1e6}
    async with batcher(tiny_model("llama"), **accumulating) as ref:

        async def generate(**params: Any) -> None:
            request = GenerateRequest(**{"token_ids": PROMPT, "max_tokens": 4, "ignore_eos": True, **params})
            try:
                await ref.call(Generate(request, on_token), timeout=None)
            except (QueueFull, InvalidRequest) as error:
                refused.append(type(error))

        def on_token(token: Token) -> None:
            mock_clock.jump(1.0)

        await generate(temperature=-1.0)
        async with trio.open_nursery() as all_three:  # more than slot and queue together
            for _ in range(3):
                all_three.start_soon(generate)
        scrape = Scrape(await ref.call(StatsRequest()))

    assert sorted(error.__name__ for error in refused) == ["InvalidRequest", "QueueFull"]
    assert scrape.value("admission_rejections", "_total", code="queue_full") == 1
    assert scrape.value("admission_rejections", "_total", code="invalid_request") == 1
    assert scrape.value("request_success", "_total", finished_reason="length") == 2
    assert scrape.value("prompt_tokens", "_total") == 2 * 5
    assert scrape.value("generation_tokens", "_total") == 2 * 4
    # The second prompt finds its first block, and could find no more than that.
    assert scrape.value("prefix_cache_queries", "_total") == 2 * 4
    assert scrape.value("prefix_cache_hits", "_total") == 4
    assert scrape.value("prefix_recomputed_tokens", "_total", cause="evicted") == 0
    assert scrape.value("kv_cache_usage_perc") == 0
    assert scrape.value("num_requests_running") == scrape.value("num_requests_waiting") == 0
    # Both arrive at once; the second starts after the first one's fourth token.
    assert scrape.histogram("request_queue_time_seconds") == (2, 4.0)
    assert scrape.value("request_queue_time_seconds", "_bucket", le="2.5") == 1
    assert scrape.value("request_queue_time_seconds", "_bucket", le="5.0") == 2
    assert scrape.histogram("time_to_first_token_seconds") == (2, 4.0)
    assert scrape.histogram("request_prefill_time_seconds") == (2, 0.0)
    assert scrape.histogram("inter_token_latency_seconds") == (2 * 3, 6.0)
    assert scrape.histogram("request_decode_time_seconds") == (2, 8.0)
    assert scrape.histogram("e2e_request_latency_seconds") == (2, 4.0 + 8.0)
    assert scrape.histogram("request_prompt_tokens") == (2, 10.0)
    assert scrape.histogram("request_generation_tokens") == (2, 8.0)
    # 5 and then 1 token of the prompts are prefilled, 3 decode steps each.
    assert scrape.histogram("iteration_tokens_total") == (2 + 2 * 3, 5 + 1 + 6)
    # The rate looks back to the end of the first step, seven seconds before the end of the last one.
    assert scrape.value("decode_tokens_per_second") == pytest.approx(8 / 7)


@pytest.mark.trio
async def test_vllms_names_are_there_before_anything_was_asked(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as ref:
        families = Scrape(await ref.call(StatsRequest())).families
    found = {name: families[PREFIX + name].type for name in VLLM_NAMES}
    assert found == VLLM_NAMES


@pytest.mark.trio
async def test_a_cancelled_request_is_counted_and_leaves_its_tenants_share(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as ref:
        request = GenerateRequest(token_ids=PROMPT, max_tokens=100, ignore_eos=True, tenant="acme")
        with trio.CancelScope() as scope:
            await ref.call(Generate(request, lambda token: token.index == 2 and scope.cancel()), timeout=None)
        while not (stats := await ref.call(StatsRequest()))["finished"]:
            await a_moment()
    assert Scrape(stats).value("request_success", "_total", finished_reason="cancelled") == 1
    generated = stats["generation_tokens"]
    assert stats["tenants"] == {
        "acme": {"requests": 1, "running": 0, "prompt_tokens": 5, "generation_tokens": generated}
    }


def test_while_the_engine_is_down_the_gateways_counters_are_there() -> None:
    own = {"model": "m", "engine_restarts": 2, "requests_replayed": 3, "requests_lost": 4}
    scrape = Scrape({**own, "engine": "down"})
    assert scrape.value("engine_up") == 0
    assert [scrape.value(name, "_total") for name in own if name != "model"] == [2, 3, 4]
    assert set(scrape.families) == {PREFIX + name for name in own.keys() - {"model"} | {"engine_up"}}


@pytest.mark.trio
async def test_an_engine_that_is_up_is_said_to_be_beside_its_own_counters(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as ref:
        stats = await ref.call(StatsRequest())
    gateways = {"engine": "up", "engine_restarts": 0, "requests_replayed": 0, "requests_lost": 0}
    scrape = Scrape({**stats, **gateways})
    assert scrape.value("engine_up") == 1
    assert scrape.families.keys() > Scrape(stats).families.keys()
