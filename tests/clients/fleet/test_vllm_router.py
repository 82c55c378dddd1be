"""A router that nobody here wrote in front of two of our services: each is a plain OpenAI server."""

import importlib.util
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
import trio

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import open_service
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.messages import GenerateRequest
from genbatch.proto.service_messages import StatsRequest
from tests.actors.service.running_service import TIMEOUT_S
from tests.waiting import a_moment

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed here"),
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2|openai|httpcore2).* was garbage collected"),
]


@asynccontextmanager
async def vllm_router(*workers: str) -> AsyncIterator[str]:
    """Runs it in front of these; its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--worker-urls", *workers]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.mark.trio
async def test_vllm_router_divides_requests_among_our_services(tiny_model_dir: Callable[[str], Path]) -> None:
    engine = EngineOptions(model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=512)
    batcher, options = BatcherOptions(batch_timeout=1.0), ServiceOptions(http=":0")
    with trio.fail_after(TIMEOUT_S):
        async with (
            open_service(engine, batcher, options) as one,
            open_service(engine, batcher, options) as two,
            vllm_router(one.addresses[0], two.addresses[0]) as address,
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
        ):
            model = await _first_model(client)
            wanted = await one.batcher.call(Generate(GenerateRequest(prompt="Hello", max_tokens=12)), timeout=None)
            for _ in range(4):
                whole = await client.completions.create(model=model, prompt="Hello", max_tokens=12, temperature=0)
                assert whole.choices[0].text == wanted.text
            stream = await client.completions.create(
                model=model, prompt="Hello", max_tokens=12, temperature=0, stream=True
            )
            texts = [chunk.choices[0].text async for chunk in stream]
            assert "".join(texts) == wanted.text and len(texts) > 2
            for service in (one, two):
                stats = await service.batcher.call(StatsRequest())
                assert stats["generation_tokens"] >= 2 * 12, stats


async def _first_model(client: openai.AsyncOpenAI) -> str:
    """Once it has found its workers."""
    while True:
        try:
            return (await client.models.list()).data[0].id
        except (openai.APIConnectionError, openai.InternalServerError, IndexError):
            await a_moment()
