"""The Batcher's calls beside Generate: text, models, health, and its end."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batcher.arrivals import INLINE_PROMPT_CHARS
from genbatch.actors.batcher.intake import CHARS_PER_TOKEN, Intake
from genbatch.actors.batcher.messages import SaveSession
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.errors import InvalidRequest, Unavailable
from genbatch.proto.messages import (
    DetokenizeRequest,
    Message,
    Result,
    Text,
    Token,
    TokenIds,
    TokenizeRequest,
    Tool,
    ToolCall,
)
from genbatch.proto.service_messages import (
    Drained,
    DrainRequest,
    Health,
    HealthRequest,
    ModelCard,
    Models,
    ModelsRequest,
)
from tests.actors.batcher.bench import Bench, batcher

TinyModel = Callable[[str], Model]
pytestmark = pytest.mark.trio


async def tokenize(bench: Bench, request: TokenizeRequest) -> list[int]:
    reply = await bench.ref.call(request)
    assert isinstance(reply, TokenIds)
    return reply.token_ids


async def test_tokenize_gives_what_generate_evaluates(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        ids = await tokenize(bench, TokenizeRequest(prompt="The capital"))
        bare = await tokenize(bench, TokenizeRequest(prompt="The capital", add_special_tokens=False))
        result = await bench.generate(prompt="The capital", max_tokens=1)
        chat = await tokenize(bench, TokenizeRequest(messages=[Message(role="user", content="Hi")]))
        asked = await bench.generate(messages=[Message(role="user", content="Hi")], max_tokens=1)
        assert result.usage.prompt_tokens == len(ids)
        assert asked.usage.prompt_tokens == len(chat)
        assert ids[-len(bare) :] == bare
        assert await tokenize(bench, TokenizeRequest(prompt="", add_special_tokens=False)) == []
        assert await bench.ref.call(DetokenizeRequest(token_ids=bare)) == Text(text="The capital")


async def test_long_texts_are_tokenized_off_the_event_loop_with_the_same_result(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        text = "word " * (INLINE_PROMPT_CHARS // 4)
        ids = await tokenize(bench, TokenizeRequest(prompt=text, add_special_tokens=False))
        assert ids == tiny_model("llama").tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) > (INLINE_PROMPT_CHARS // CHARS_PER_TOKEN)
        assert await bench.ref.call(DetokenizeRequest(token_ids=ids)) == Text(text=text)


async def test_many_token_ids_are_checked_off_the_event_loop(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    check = Intake.check_detokenize

    def note(intake: Intake, wanted: DetokenizeRequest) -> None:
        checked.append(threading.current_thread().name)
        check(intake, wanted)

    monkeypatch.setattr(Intake, "check_detokenize", note)
    async with batcher(tiny_model("llama")) as bench:
        for count, thread in (
            ((INLINE_PROMPT_CHARS // CHARS_PER_TOKEN), "MainThread"),
            ((INLINE_PROMPT_CHARS // CHARS_PER_TOKEN) + 1, "genbatch-tokenizer"),
        ):
            for wrong in (-1, tiny_model("llama").vocab_size):
                with pytest.raises(InvalidRequest) as caught:
                    await bench.ref.call(DetokenizeRequest(token_ids=[*[5] * (count - 1), wrong]))
                assert caught.value.field == f"token_ids[{count - 1}]"
            assert checked == [thread] * 2
            checked.clear()


async def test_a_text_whose_caller_has_left_is_not_read(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_model("llama").tokenizer
    read: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **rest: read.append(text[:5]) or encode(text, **rest))
    async with batcher(tiny_model("llama")) as bench:
        gate = threading.Event()
        bench.actor._tokenizing.submit(gate.wait, on_done=lambda _: None)
        async with trio.open_nursery() as callers:
            for _ in range(3):
                callers.start_soon(tokenize, bench, TokenizeRequest(prompt="left " * INLINE_PROMPT_CHARS))
            await wait_all_tasks_blocked()
            callers.cancel_scope.cancel()
        gate.set()
        assert await tokenize(bench, TokenizeRequest(prompt="there" * INLINE_PROMPT_CHARS))
    assert read == ["there"]


async def test_nothing_long_is_tokenized_on_the_event_loop(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What conversations share is found by rendering several of them, and an echo by decoding the prompt."""
    tokenizer = tiny_model("llama").tokenizer
    inline: dict[str, int] = {}  # characters or tokens that this thread read at once

    def watched(name: str) -> None:
        whole = getattr(tokenizer, name)

        def method(first: Any, *rest: Any, **named: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                size = sum(len(turn["content"]) for turn in first) if name == "start_prompt" else len(first)
                inline[name] = inline.get(name, 0) + size
            return whole(first, *rest, **named)

        monkeypatch.setattr(tokenizer, name, method)

    for name in ("encode", "start_prompt", "encode_prompt", "decode"):
        watched(name)
    async with batcher(tiny_model("llama"), n_ctx=512) as bench:
        monkeypatch.setattr(bench.actor._reader, "_inline_chars", 100)
        for number in range(3):
            inline.clear()
            system = Message(role="system", content=f"be kind, {number} times")
            chat = [system, Message(role="user", content="Hi")]
            await bench.generate(messages=chat, max_tokens=1)
            await bench.generate(messages=[*chat, *chat[1:]], max_tokens=1)
            await bench.generate(token_ids=[5, 6] * 50, max_tokens=1, echo=True)
            await bench.ref.call(SaveSession(chat * 9), timeout=None)
            assert all(size <= 100 for size in inline.values()), inline


CALL = ToolCall(id="1", name="f", arguments='{"a": "' + "x" * 9000 + '"}')


@pytest.mark.parametrize(
    "long",
    [
        {"tools": [Tool(name="f", description="x" * 9000)]},
        {"tools": [Tool(name="f", parameters={"type": "object", "properties": {"a": {"const": "x" * 9000}}})]},
        {"chat_template_kwargs": {"names": ["x" * 9000]}},
        {"messages": [Message(role="assistant", content="", tool_calls=[CALL])]},
        {"messages": [Message(role="assistant", content="", reasoning_content="x" * 9000)]},
    ],
    ids=lambda long: next(iter(long)),
)
async def test_what_is_long_beside_the_words_of_a_conversation_is_not_rendered_on_the_event_loop(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, long: dict[str, Any]
) -> None:
    """A template may show all of it, and cutting a MB into tokens takes everybody's time."""
    tokenizer = tiny_model("llama").tokenizer
    whole, inline = tokenizer.start_prompt, list[bool]()

    def watched(*arguments: Any, **named: Any) -> Any:
        inline.append(threading.current_thread() is threading.main_thread())
        return whole(*arguments, **named)

    chat = {"messages": [Message(role="user", content="Hi")]}
    async with batcher(tiny_model("llama"), n_ctx=512) as bench:
        monkeypatch.setattr(tokenizer, "start_prompt", watched)  # the Batcher has rehearsed
        await bench.ref.call(TokenizeRequest(**chat), timeout=None)
        assert inline == [True], "a short one is not worth a thread"
        inline.clear()
        await bench.ref.call(TokenizeRequest(**{**chat, **long}), timeout=None)
        assert inline and not any(inline)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (TokenizeRequest(), "prompt"),
        (TokenizeRequest(prompt="a", messages=[]), "prompt"),
        (TokenizeRequest(messages=[]), "messages"),
        (TokenizeRequest(prompt=5), "prompt"),  # type: ignore[arg-type]
        (TokenizeRequest(prompt="\ud800"), "prompt"),
        (TokenizeRequest(messages=[Message(role="", content="")]), "messages[0].role"),
        (DetokenizeRequest(token_ids=[1, -1]), "token_ids[1]"),
        (DetokenizeRequest(token_ids=[2**40]), "token_ids[0]"),
    ],
    ids=repr,
)
async def test_bad_text_calls_are_refused_by_name(
    tiny_model: TinyModel, message: TokenizeRequest | DetokenizeRequest, field: str
) -> None:
    async with batcher(tiny_model("llama")) as bench:
        with pytest.raises(InvalidRequest) as info:
            await bench.ref.call(message)
        assert info.value.field == field


async def test_the_model_is_described(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    async with batcher(model, n_ctx=48) as bench:
        card = ModelCard(
            id=model.name,
            n_ctx=48,
            n_parallel=4,
            vocab_size=model.vocab_size,
            dtype="float32",
            quantize="none",
            runner="torch",
            device="cpu",
        )
        assert await bench.ref.call(ModelsRequest()) == Models(models=(card,))


async def test_health_tells_a_stuck_engine_from_an_idle_one(tiny_model: TinyModel, mock_clock: MockClock) -> None:
    async with batcher(tiny_model("llama"), stall_s=5.0) as bench:
        mock_clock.jump(100)
        idle = await bench.ref.call(HealthRequest())
        assert (idle.status, idle.stalled_s) == ("ready", 0.0)
        bench.actor._stepping = True  # a step that does not end
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: bench.generate(prompt="x"))
            await wait_all_tasks_blocked()
            mock_clock.jump(4)
            busy = await bench.ref.call(HealthRequest())
            assert busy == Health(status="ready", steps=0, requests_running=0, requests_waiting=1, stalled_s=4.0)
            mock_clock.jump(2)
            assert (await bench.ref.call(HealthRequest())).status == "stuck"
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        bench.actor._stepping = False
        bench.actor.requests.end_abandoned()


async def test_a_draining_batcher_finishes_what_it_has_and_takes_nothing_new(tiny_model: TinyModel) -> None:
    async with batcher(tiny_model("llama")) as bench:
        results: list[Result] = []
        drained: list[Drained] = []
        seen: list[str] = []

        async def ask() -> None:
            results.append(await bench.generate(on_token, prompt="a", max_tokens=6, ignore_eos=True))

        def on_token(token: Token) -> None:
            if token.index == 0:
                nursery.start_soon(drain)

        async def drain() -> None:
            nursery.start_soon(refuse)
            drained.append(await bench.ref.call(DrainRequest(timeout_s=60.0), timeout=None, control=True))

        async def refuse() -> None:
            await wait_all_tasks_blocked()
            seen.append((await bench.ref.call(HealthRequest())).status)
            with pytest.raises(Unavailable, match="draining"):
                await bench.generate(prompt="b")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
        assert len(results[0].token_ids) == 6
        assert (drained, seen) == ([Drained(num_cancelled=0)], ["draining"])
        assert await bench.ref.call(DrainRequest(timeout_s=0.0)) == Drained(num_cancelled=0)


async def test_what_a_drain_does_not_wait_for_is_cancelled(tiny_model: TinyModel, mock_clock: MockClock) -> None:
    async with batcher(tiny_model("llama"), batch_timeout=1e6) as bench:  # nothing starts
        results: list[Result] = []

        async def ask() -> None:
            results.append(await bench.generate(prompt="a"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            mock_clock.autojump_threshold = 0
            assert await bench.ref.call(DrainRequest(timeout_s=2.0), timeout=None) == Drained(num_cancelled=1)
            assert trio.current_time() == 2.0
            mock_clock.autojump_threshold = float(
                "inf"
            )  # the Batcher's end waits for a thread, which the clock does not see
        assert [result.finish_reason for result in results] == ["cancelled"]
