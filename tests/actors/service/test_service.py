"""The whole tree over a real (tiny) model: ZeroMQ clients, restarts, callers that vanish."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch import SyncZeroMQClient, ZeroMQClient
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import Service, open_service
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.errors import InvalidRequest, Unavailable
from genbatch.proto.messages import Payer, Result
from genbatch.proto.service_messages import StatsRequest
from tests.actors import holding_scheduler
from tests.actors.holding_scheduler import ENDLESS
from tests.waiting import a_moment, until_idle


@pytest.fixture
def serve(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> Any:
    @asynccontextmanager
    async def running(**options: Any) -> AsyncIterator[Service]:
        engine = EngineOptions(model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=1024)
        address = f"ipc://{tmp_path}/zeromq.sock"
        batcher = BatcherOptions(batch_timeout=1.0, **options)
        async with open_service(engine, batcher, ServiceOptions(bind=address)) as service:
            yield service

    return running


# No goodbye of any kind: the process ends between two tokens, with thousands to come.
DIES_IN_MID_STREAM = """
import os, sys, trio
from genbatch import ZeroMQClient

async def main():
    async with ZeroMQClient(sys.argv[1]) as client:
        async with client.stream("go", max_tokens=int(sys.argv[2]), n=8, ignore_eos=True) as stream:
            async for token in stream:
                if token.index == 3:
                    os._exit(7)

trio.run(main)
"""


@pytest.mark.trio
async def test_a01_many_clients_over_zeromq_each_get_their_own_text(serve: Any, oracle: Callable[[str], Any]) -> None:
    prompts = [[5 + i, 6, 7 * i + 1] for i in range(12)]
    results: dict[int, Result] = {}

    async def ask(address: str, index: int) -> None:
        async with ZeroMQClient(address) as client:
            if index % 2:
                results[index] = await client.generate(prompts[index], max_tokens=9)
            else:
                async with client.stream(prompts[index], max_tokens=9) as stream:
                    tokens = [token async for token in stream]
                results[index] = stream.result
                assert [token.token_id for token in tokens] == stream.result.token_ids

    async with serve(n_parallel=4) as service:
        async with trio.open_nursery() as nursery:
            for index in range(12):
                nursery.start_soon(ask, service.addresses[0], index)
        stats = await until_idle(lambda: service.batcher.call(StatsRequest()))
    for index, prompt in enumerate(prompts):
        assert results[index].token_ids == oracle("llama").generate(prompt, 9)
    assert stats["kv_blocks_used"] == 0


@pytest.mark.trio
async def test_a06_cancelling_a_remote_callers_scope_frees_its_sequence(serve: Any) -> None:
    async with serve(scheduler=holding_scheduler.NAME) as service, ZeroMQClient(service.addresses[0]) as client:
        with trio.CancelScope() as scope:
            async with client.stream("go", max_tokens=ENDLESS, ignore_eos=True) as stream:
                async for token in stream:
                    if token.index == 3:
                        scope.cancel()
        stats = await until_idle(lambda: service.batcher.call(StatsRequest()))
        assert stats["finished"] == {"cancelled": 1}
        assert stats["kv_blocks_used"] == 0
        assert len((await client.generate("again", max_tokens=3, ignore_eos=True)).token_ids) == 3


@pytest.mark.trio
async def test_a06_a_client_that_vanishes_in_mid_stream_frees_its_sequence(serve: Any) -> None:
    async with serve(scheduler=holding_scheduler.NAME) as service:
        command = [sys.executable, "-c", DIES_IN_MID_STREAM, service.addresses[0], str(ENDLESS)]
        process = await trio.run_process(command, check=False)
        assert process.returncode == 7
        stats = await until_idle(lambda: service.batcher.call(StatsRequest()))
        assert stats["finished"] == {"cancelled": 1}
        assert stats["kv_blocks_used"] == 0


@pytest.mark.trio
async def test_a12_a_crash_of_the_batcher_is_answered_and_the_same_client_goes_on(
    serve: Any, oracle: Callable[[str], Any]
) -> None:
    async with serve(scheduler=holding_scheduler.NAME) as service, ZeroMQClient(service.addresses[0]) as client:
        with pytest.raises(Unavailable):
            async with client.stream("go", max_tokens=ENDLESS, ignore_eos=True) as stream:
                async for token in stream:
                    if token.index == 2:
                        service.batcher.cast("no such cast")  # an actor ends on what it does not know
        while True:
            try:
                result = await client.generate([5, 6, 7], max_tokens=6)
                break
            except Unavailable:
                await a_moment()
        assert result.token_ids == oracle("llama").generate([5, 6, 7], 6)


@pytest.mark.trio
async def test_nobody_but_a_fleets_gateway_says_who_pays(serve: Any) -> None:
    async with serve() as service, ZeroMQClient(service.addresses[0]) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.generate([5, 6], max_tokens=1, payer=Payer(name="another", served=0.0))
        assert refused.value.field == "payer"


@pytest.mark.trio
async def test_bad_requests_over_the_wire_name_the_field_and_the_connection_lives(serve: Any) -> None:
    async with serve() as service, ZeroMQClient(service.addresses[0]) as client:
        for params, field in (
            ({"prompt": ""}, "prompt"),
            ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
            ({"prompt": [999]}, "token_ids[0]"),
            ({"prompt": "a", "temperature": -1.0}, "temperature"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await client.generate(**params)
            assert caught.value.field == field
        assert (await client.generate("a", max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2


@pytest.mark.trio
async def test_b35_a_plain_client_in_a_thread_is_served_over_zeromq(serve: Any, oracle: Callable[[str], Any]) -> None:
    def ask(address: str) -> tuple[list[int], list[int], dict[str, Any]]:
        with SyncZeroMQClient(address) as client:
            whole = client.generate([5, 6, 7], max_tokens=6)
            with client.stream([5, 6, 7], max_tokens=6) as stream:
                streamed = [token.token_id for token in stream]
            assert stream.result.token_ids == streamed
            return whole.token_ids, streamed, client.stats()

    async with serve() as service:
        whole, streamed, stats = await trio.to_thread.run_sync(ask, service.addresses[0])
    assert whole == streamed == oracle("llama").generate([5, 6, 7], 6)
    assert stats["finished"]
