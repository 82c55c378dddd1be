"""OpenAI's own client against the whole tree over a real (tiny) model."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import trio

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import Service, open_service
from genbatch.nif.context.engine import EngineOptions
from genbatch.proto.errors import QueueFull
from genbatch.proto.messages import GenerateRequest, Message, Result
from genbatch.proto.service_messages import StatsRequest
from tests.actors import holding_scheduler
from tests.actors.holding_scheduler import ENDLESS
from tests.tool_models import tool_model
from tests.waiting import ENGINE_PATIENCE_S, a_moment, until_idle

# The client leaves its own generators as they are when a stream says that it is done.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator '(httpx2|openai|httpcore2).* was garbage collected")

USER = {"role": "user", "content": "What is it?"}


@pytest.fixture
def serve(tiny_model_dir: Callable[[str], Path]) -> Any:
    @asynccontextmanager
    async def running(*, tokens: str | None = None, **options: Any) -> AsyncIterator[Service]:
        engine = EngineOptions(model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=1024)
        batcher = BatcherOptions(batch_timeout=1.0, **options)
        with trio.fail_after(ENGINE_PATIENCE_S):
            async with open_service(engine, batcher, ServiceOptions(http=":0", tokens=tokens)) as service:
                yield service

    return running


def connect(service: Service, api_key: str = "none", max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{service.addresses[0]}/v1", api_key=api_key, max_retries=max_retries)


async def ask(service: Service, **params: Any) -> Result:
    result: Result = await service.batcher.call(Generate(GenerateRequest(**params)), timeout=None)
    return result


@pytest.mark.trio
async def test_a_chat_is_what_our_own_client_gets_whole_and_streamed(serve: Any) -> None:
    async with serve() as service, connect(service) as client:
        model = (await client.models.list()).data[0].id
        assert (await client.models.retrieve(model)).id == model
        wanted = await ask(service, messages=[Message(**USER)], max_tokens=12)
        params: Any = {"model": model, "messages": [USER], "max_completion_tokens": 12, "temperature": 0}
        whole = await client.chat.completions.create(**params)
        assert whole.choices[0].message.role == "assistant"
        assert whole.choices[0].message.content == wanted.text
        assert whole.choices[0].finish_reason == wanted.finish_reason
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == wanted.usage.prompt_tokens
        assert whole.usage.total_tokens == wanted.usage.prompt_tokens + wanted.usage.completion_tokens
        stream = await client.chat.completions.create(**params, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        *spoken, last = chunks
        assert "".join(chunk.choices[0].delta.content or "" for chunk in spoken) == wanted.text
        assert [chunk.choices[0].finish_reason for chunk in spoken if chunk.choices[0].finish_reason] == ["length"]
        assert spoken[0].choices[0].delta.role == "assistant"
        assert not last.choices
        assert last.usage == whole.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})
        # The whole conversation so far, as the client's own types.
        again = await client.chat.completions.create(
            model=model, messages=[USER, whole.choices[0].message, USER], max_tokens=2
        )
        assert again.choices[0].message.content is not None


@pytest.mark.trio
async def test_content_may_come_in_parts_and_the_developer_is_the_system(serve: Any) -> None:
    async with serve() as service, connect(service) as client:
        turns = [Message(role="system", content="Be brief."), Message(role="user", content="Hello there")]
        wanted = await ask(service, messages=turns, max_tokens=6)
        parts: Any = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
        messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        model = (await client.models.list()).data[0].id
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=6, temperature=0)
        assert answer.choices[0].message.content == wanted.text


@pytest.mark.trio
async def test_chat_logprobs_spell_the_answer_whole_and_streamed(serve: Any) -> None:
    async with serve() as service, connect(service) as client:
        model = (await client.models.list()).data[0].id
        wanted = await ask(service, messages=[Message(**USER)], max_tokens=9, logprobs=3)
        assert wanted.logprobs is not None
        params: Any = {"model": model, "messages": [USER], "max_tokens": 9, "temperature": 0}
        # Streamed first: the gateway does not know the text of any token yet.
        stream = await client.chat.completions.create(**params, logprobs=True, top_logprobs=3, stream=True)
        streamed = [
            entry async for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
        ]
        whole = await client.chat.completions.create(**params, logprobs=True, top_logprobs=3)
        assert whole.choices[0].logprobs is not None
        content = whole.choices[0].logprobs.content
        assert content is not None
        # In torch the last bits depend on how many tokens of the prompt were in the cache.
        expected = [entry.logprob for entry in wanted.logprobs]
        assert [entry.logprob for entry in content] == pytest.approx(expected, abs=1e-5)
        assert [len(entry.top_logprobs) for entry in content] == [3] * 9
        assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content), "greedy takes the likeliest"
        assert streamed == content
        unwanted = await client.chat.completions.create(**params)
        assert unwanted.choices[0].logprobs is None


@pytest.mark.trio
async def test_completions_take_texts_and_token_ids_and_echo_them_with_their_logprobs(serve: Any) -> None:
    async with serve() as service, connect(service) as client:
        model = (await client.models.list()).data[0].id
        ids = (await client.post("/../tokenize", body={"prompt": "The capital"}, cast_to=dict[str, Any]))["tokens"]
        scored = await ask(service, token_ids=ids, max_tokens=3, logprobs=1, prompt_logprobs=1)
        assert scored.prompt_logprobs is not None and scored.logprobs is not None
        for prompt in ("The capital", ids, ["The capital"], [ids]):
            answer = await client.completions.create(
                model=model, prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=1
            )
            choice = answer.choices[0]
            assert choice.text == "The capital" + scored.text
            table = choice.logprobs
            assert table is not None
            values = [entry.logprob for entry in (*scored.prompt_logprobs[1:], *scored.logprobs) if entry]
            assert table.token_logprobs == [None, *values]
            assert table.top_logprobs is not None and table.top_logprobs[0] is None
            assert table.tokens is not None and table.text_offset is not None
            starts = [len("".join(table.tokens[:place])) for place in range(len(table.tokens))]
            assert table.text_offset == starts
        for stream in (False, True):  # as lm-eval and others score a text
            got = await client.completions.create(
                model=model, prompt="The capital", max_tokens=0, temperature=0, echo=True, stream=stream,
                logprobs=None if stream else 1,
            )  # type: ignore[call-overload]  # fmt: skip
            parts = [part async for part in got] if stream else [got]
            assert "".join(part.choices[0].text for part in parts) == "The capital"
            assert parts[-1].choices[0].finish_reason == "length"
            if not stream:
                scores = [entry.logprob for entry in scored.prompt_logprobs[1:] if entry]
                assert got.choices[0].logprobs.token_logprobs == [None, *scores]
                assert got.usage.completion_tokens == 0
        alone = await client.completions.create(  # of a prompt of one token nothing is foretold
            model=model, prompt=ids[:1], max_tokens=2, temperature=0, echo=True, logprobs=0
        )
        table = alone.choices[0].logprobs
        assert table is not None and table.tokens is not None and table.token_logprobs is not None
        assert (len(table.tokens), table.token_logprobs[0], None in table.token_logprobs[1:]) == (3, None, False)
        assert table.text_offset == [len("".join(table.tokens[:place])) for place in range(3)]
        named = await client.completions.create(
            model=model,
            prompt=ids,
            max_tokens=3,
            temperature=0,
            logprobs=0,
            extra_body={"return_tokens_as_token_ids": True},
        )
        assert named.choices[0].logprobs is not None
        assert named.choices[0].logprobs.tokens == [f"token_id:{token_id}" for token_id in scored.token_ids]
        default = await client.completions.create(model=model, prompt=ids, extra_body={"ignore_eos": True})
        assert default.usage is not None and default.usage.completion_tokens == 16


@pytest.mark.trio
async def test_n_answers_to_each_of_several_prompts_are_told_apart_and_repeatable(serve: Any) -> None:
    async with serve() as service, connect(service) as client:
        model = (await client.models.list()).data[0].id
        params: Any = {"model": model, "prompt": ["one", "two"], "n": 2, "seed": -7, "max_tokens": 5}
        params["extra_body"] = {"ignore_eos": True}
        whole = await client.completions.create(**params)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert whole.usage is not None and whole.usage.completion_tokens == 20
        texts = ["", "", "", ""]
        ended = []
        async for chunk in await client.completions.create(**params, stream=True):
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ended.append(choice.index)
        assert texts == [choice.text for choice in whole.choices]
        assert len(set(texts)) > 1
        assert ended == [0, 1, 2, 3]


@pytest.mark.trio
async def test_a_list_of_prompts_may_be_longer_than_the_queue_and_waits_beside_others(serve: Any) -> None:
    async with serve(n_parallel=2, max_queue=2) as service, connect(service) as client:
        prompts = [f"{index} is" for index in range(24)]
        params: Any = {"model": "", "prompt": prompts, "max_tokens": 3, "extra_body": {"ignore_eos": True}}
        params["model"] = (await client.models.list()).data[0].id
        wanted = [(await ask(service, prompt=prompt, max_tokens=3, ignore_eos=True)).text for prompt in prompts]
        whole = await client.completions.create(**params)
        assert [choice.text for choice in whole.choices] == wanted
        twins = await client.completions.create(**(params | {"n": 4, "prompt": prompts[:3]}))
        assert [choice.text for choice in twins.choices] == [text for text in wanted[:3] for _ in range(4)]

        refused = 0

        async def fill_the_queue() -> None:
            nonlocal refused
            while True:
                try:
                    await ask(service, prompt="other", max_tokens=3, ignore_eos=True)
                except QueueFull:
                    refused += 1
                await trio.sleep(0.01)  # so that the list finds a place, too

        texts = [""] * len(prompts)
        async with trio.open_nursery() as nursery:
            async for chunk in await client.completions.create(**params, stream=True):
                choice = chunk.choices[0]
                texts[choice.index] += choice.text
                if choice.index >= 2 and not nursery.child_tasks:  # an earlier prompt has its result
                    for _ in range(6):
                        nursery.start_soon(fill_the_queue)
            nursery.cancel_scope.cancel()
        assert texts == wanted and refused

        await until_idle(lambda: service.batcher.call(StatsRequest()))
        late: Any = params["extra_body"] | {"deadline_s": 0.05}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(**(params | {"max_tokens": 200, "prompt": prompts * 5, "extra_body": late}))
        assert caught.value.status_code == 504


@pytest.mark.trio
async def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(serve: Any) -> None:
    async with serve() as service, connect(service) as client:
        model = (await client.models.list()).data[0].id
        whole = await ask(service, prompt="go", max_tokens=20, ignore_eos=True)
        stop = whole.text[6:8]
        params: Any = {"model": model, "prompt": "go", "max_tokens": 20, "temperature": 0, "stop": stop}
        params["extra_body"] = {"ignore_eos": True, "top_k": -1}
        answer = await client.completions.create(**params)
        assert answer.choices[0].text == whole.text[: whole.text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        streamed = [chunk.choices[0].text async for chunk in await client.completions.create(**params, stream=True)]
        assert "".join(streamed) == answer.choices[0].text


@pytest.mark.trio
async def test_a_message_that_cannot_be_continued_and_a_format_beside_min_tokens_are_named(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    template = "{% for message in messages %}{{ message.role }}{% endfor %}"  # it writes no content
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model", template)
    engine = EngineOptions(model_path=str(model), dtype="float32", n_gpu_layers=0, n_ctx=1024)
    with trio.fail_after(ENGINE_PATIENCE_S):
        async with (
            open_service(engine, BatcherOptions(), ServiceOptions(http=":0")) as service,
            connect(service) as client,
        ):
            said: Any = {"model": (await client.models.list()).data[0].id, "messages": [USER], "max_tokens": 4}
            going_on = {"continue_final_message": True, "add_generation_prompt": False}
            with pytest.raises(openai.BadRequestError, match="does not name `content`") as refused:
                await client.chat.completions.create(**said, extra_body=going_on)
            assert refused.value.param == "continue_final_message"
            shape: Any = {"type": "json_object"}
            with pytest.raises(openai.BadRequestError, match="combined with response_format") as refused:
                await client.chat.completions.create(**said, response_format=shape, extra_body={"min_tokens": 2})
            assert refused.value.param == "min_tokens"


@pytest.mark.trio
async def test_errors_are_raised_as_the_clients_own_types(serve: Any, tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    token = store.new_token("alice")
    options: dict[str, Any] = {"n_parallel": 1, "max_queue": 2, "scheduler": holding_scheduler.NAME}
    async with serve(tokens=str(store.tokens), **options) as service:
        async with connect(service) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with connect(service, token) as client:
            model = (await client.models.list()).data[0].id
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.completions.create(model="gpt-9", prompt="a")
            assert unknown.value.code == "model_not_found"
            with pytest.raises(openai.NotFoundError, match="no embeddings"):
                await client.embeddings.create(model=model, input="a")
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as bad:
                    await client.completions.create(model=model, prompt="a", max_tokens=-5, stream=stream)  # type: ignore[call-overload]
                assert bad.value.param == "max_tokens"
            with pytest.raises(openai.BadRequestError) as long:
                await client.completions.create(model=model, prompt="a" * 4000)
            assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
            endless: Any = {"model": model, "prompt": "go", "max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
            async with await client.completions.create(**endless, stream=True) as stream:
                await anext(aiter(stream))
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(lambda: client.completions.create(**endless))
                        while not (await service.batcher.call(StatsRequest()))["requests_waiting"]:
                            await a_moment()
                        with pytest.raises(openai.RateLimitError) as full:
                            await client.completions.create(**endless)
                        scope.cancel()
            assert full.value.code == "queue_full"
            assert int(full.value.response.headers["retry-after"]) >= 1
        stats = await until_idle(lambda: service.batcher.call(StatsRequest()))
        assert stats["finished"] == {"cancelled": 2}


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_sequence(serve: Any, stream: bool) -> None:
    async with serve(scheduler=holding_scheduler.NAME) as service, connect(service) as client:
        model = (await client.models.list()).data[0].id
        params: Any = {"model": model, "prompt": "go", "max_tokens": ENDLESS, "n": 8}
        params["extra_body"] = {"ignore_eos": True}
        if stream:
            async with await client.completions.create(**params, stream=True) as chunks:
                async for _ in chunks:
                    break
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: client.completions.create(**params))
                while not (await service.batcher.call(StatsRequest()))["requests_running"]:
                    await a_moment()
                nursery.cancel_scope.cancel()
        stats = await until_idle(lambda: service.batcher.call(StatsRequest()))
        assert stats["finished"] == {"cancelled": 1}
        assert stats["kv_blocks_used"] == 0


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/responses", {"input": "go", "max_output_tokens": ENDLESS, "seed": 1}),
        ("/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": ENDLESS, "temperature": 0}),
    ],
)
async def test_a_stream_of_another_door_that_is_left_frees_its_kv(serve: Any, path: str, body: dict[str, Any]) -> None:
    async with serve(scheduler=holding_scheduler.NAME) as service:
        url = f"{service.addresses[0]}/v1{path}"
        async with httpx2.AsyncClient(trust_env=False, timeout=ENGINE_PATIENCE_S) as client:
            async with client.stream("POST", url, json=body | {"stream": True}) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if "delta" in line:
                        break
            stats = await until_idle(lambda: service.batcher.call(StatsRequest()))
        assert stats["finished"] == {"cancelled": 1}
        assert stats["kv_blocks_used"] == 0


@pytest.mark.trio
async def test_the_sync_client_and_prometheus_work_too(serve: Any) -> None:
    def talk(address: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            model = client.models.list().data[0].id
            text = ""
            for chunk in client.completions.create(
                model=model, prompt="go", max_tokens=5, temperature=0, stream=True, logit_bias={"7": -100}, user="me"
            ):
                text += chunk.choices[0].text
            with client.completions.with_streaming_response.create(model=model, prompt="a", max_tokens=1) as raw:
                raw.read()
                assert raw.headers["x-request-id"].startswith("cmpl-")
            return text, client.get("/../metrics", cast_to=str)

    async with serve() as service:
        text, metrics = await trio.to_thread.run_sync(talk, service.addresses[0])
        assert text == (await ask(service, prompt="go", max_tokens=5, logit_bias={7: -100.0})).text
    assert 'genbatch:generation_tokens_total{model_name="' in metrics


@pytest.mark.trio
async def test_the_default_model_answers_the_openai_client() -> None:
    engine = EngineOptions(model_path="smollm2", dtype="float32", n_gpu_layers=0, n_ctx=512)
    opened = open_service(engine, BatcherOptions(n_parallel=2), ServiceOptions(http=":0"))
    async with opened as service, connect(service) as client:
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        answer = await client.chat.completions.create(
            model="smollm2", messages=messages, max_tokens=16, temperature=0, logprobs=True
        )
    choice = answer.choices[0]
    assert choice.message.content == "The capital of France is Paris."
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert all(math.isfinite(entry.logprob) for entry in choice.logprobs.content)
