"""open_batcher: the in-process client over the real tree."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from genbatch import open_batcher
from genbatch.actors.scheduling.plan import SchedulerError
from genbatch.clients.bridge import AsyncioStream
from genbatch.clients.interface import ClientError, TokenStream
from genbatch.nif.errors import ModelError, OptionError
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import Token
from tests.actors import holding_scheduler
from tests.actors.holding_scheduler import ENDLESS
from tests.waiting import a_moment

OPTIONS: dict[str, Any] = {"dtype": "float32", "n_gpu_layers": 0, "n_ctx": 512, "batch_timeout": 1.0}


@pytest.fixture
def tiny(tiny_model_dir: Callable[[str], Path]) -> str:
    return str(tiny_model_dir("llama"))


@pytest.mark.trio
async def test_generate_equals_the_oracle(tiny: str, oracle: Callable[[str], Any]) -> None:
    async with open_batcher(tiny, **OPTIONS) as batcher:
        result = await batcher.generate([5, 6, 7], max_tokens=9)
    assert result.token_ids == oracle("llama").generate([5, 6, 7], 9)


@pytest.mark.trio
async def test_the_programs_own_requests_have_no_deadline_and_its_own_queue(tiny: str) -> None:
    """Others' default deadline, and their bound of the queue, are not for it."""
    async with open_batcher(tiny, **OPTIONS, default_deadline_s=1e-9, n_parallel=1) as batcher:
        results: list[Any] = []

        async def ask() -> None:
            results.append(await batcher.generate([5, 6, 7], max_tokens=2, ignore_eos=True))

        async with trio.open_nursery() as nursery:
            for _ in range(12):  # of others five would be let in
                nursery.start_soon(ask)
        assert [result.finish_reason for result in results] == ["length"] * 12


@pytest.mark.trio
async def test_a_stream_yields_tokens_then_has_the_result(tiny: str) -> None:
    async with open_batcher(tiny, **OPTIONS) as batcher:
        async with batcher.stream("Hello", max_tokens=6, ignore_eos=True) as stream:
            tokens = [token async for token in stream]
        assert stream.result.text == "".join(token.text for token in tokens)
        assert (await batcher.stats())["finished"] == {"length": 1}


@pytest.mark.trio
async def test_leaving_a_stream_early_frees_its_sequence(tiny: str) -> None:
    async with open_batcher(tiny, **OPTIONS, scheduler=holding_scheduler.NAME) as batcher:
        async with batcher.stream("Hello", max_tokens=ENDLESS, ignore_eos=True) as stream:
            async for token in stream:
                if token.index == 2:
                    break
        while (await batcher.stats())["requests_running"]:
            await a_moment()
        assert (await batcher.stats())["finished"] == {"cancelled": 1}


@pytest.mark.trio
async def test_cancelling_the_scope_cancels_the_request(tiny: str) -> None:
    async with open_batcher(tiny, **OPTIONS, scheduler=holding_scheduler.NAME) as batcher:
        with trio.move_on_after(0.05) as scope:
            await batcher.generate("Hello", max_tokens=ENDLESS, ignore_eos=True)
        assert scope.cancelled_caught
        while (await batcher.stats())["requests_running"]:
            await a_moment()


@pytest.mark.trio
async def test_errors_come_out_as_they_are(tiny: str) -> None:
    async with open_batcher(tiny, **OPTIONS) as batcher:
        with pytest.raises(InvalidRequest) as caught:
            await batcher.generate("Hello", temperature=-1.0)
        assert caught.value.field == "temperature"
        with pytest.raises(InvalidRequest):
            async with batcher.stream("Hello", max_tokens=0) as stream:
                async for _ in stream:
                    pass
    with pytest.raises(ZeroDivisionError):
        async with open_batcher(tiny, **OPTIONS):
            raise ZeroDivisionError


@pytest.mark.trio
async def test_b14_a_model_that_is_not_there_fails_before_any_request(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing"):
        async with open_batcher(str(tmp_path / "missing"), **OPTIONS):
            pass


@pytest.mark.trio
@pytest.mark.parametrize(
    ("option", "value"),
    [("n_ctx", -1), ("n_gpu_layers", 3), ("dtype", "int3"), ("batch_timeout", -1.0), ("temprature", 1)],
)
async def test_an_option_out_of_range_is_named(tiny: str, option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        async with open_batcher(tiny, **{**OPTIONS, option: value}):
            pass
    assert caught.value.option == option


@pytest.mark.trio
async def test_h06_transformers_names_of_options_are_taken(tiny: str) -> None:
    async with open_batcher(tiny, **{**OPTIONS, "page_size": 4, "scheduler_type": "prefill_first"}) as batcher:
        assert (await batcher.stats())["kv_block_size"] == 4
        assert (await batcher.generate("a b", max_tokens=2)).usage.completion_tokens <= 2
    with pytest.raises(OptionError) as caught:
        async with open_batcher(tiny, **{**OPTIONS, "page_size": 4, "block_size": 4}):
            pass
    assert caught.value.option == "page_size"
    with pytest.raises(SchedulerError, match="nosuch"):
        async with open_batcher(tiny, **{**OPTIONS, "scheduler_type": "nosuch"}):
            pass


@pytest.mark.trio
async def test_a_second_task_that_reads_a_stream_gets_an_error_and_the_first_its_tokens() -> None:
    stream, token = TokenStream(), Token(token_id=5, text="a", index=0)
    read: list[Token] = []
    async with trio.open_nursery() as nursery:

        async def read_one() -> None:
            read.append(await anext(stream))

        nursery.start_soon(read_one)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ClientError, match="another task reads this stream"):
            await anext(stream)
        stream.push(token)
    assert read == [token]


def test_on_asyncio_a_second_reader_gets_an_error_too_and_a_cancelled_one_is_none() -> None:
    async def main() -> None:
        stream, token = AsyncioStream(), Token(token_id=5, text="a", index=0)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(ClientError, match="another task reads this stream"):
            await anext(stream)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.push(token)
        assert await second == token

    asyncio.run(main())


@pytest.mark.trio
async def test_a_client_of_trio_refuses_a_caller_of_another_event_loop(tiny: str) -> None:
    async with open_batcher(tiny, **OPTIONS) as batcher:

        async def ask() -> Any:
            return await batcher.generate("Hello", max_tokens=2)

        with pytest.raises(ClientError, match="opened on trio"):
            await trio.to_thread.run_sync(lambda: asyncio.run(ask()))
        assert (await ask()).usage.completion_tokens
