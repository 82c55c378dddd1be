"""What a request says of its text, over a tiny random model: stop strings, a message gone on with, the template."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch import open_batcher
from genbatch.proto.errors import InvalidRequest, PromptTooLong
from tests.tool_models import add_marks, tool_model
from tests.waiting import ENGINE_PATIENCE_S

pytestmark = pytest.mark.trio
USER = {"role": "user", "content": "Well?"}


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tiny_model_dir("llama"), tmp_path_factory.mktemp("text") / "model")


@asynccontextmanager
async def running(model: Path, **options: Any) -> AsyncIterator[Any]:
    with trio.fail_after(ENGINE_PATIENCE_S):
        async with open_batcher(str(model), dtype="float32", n_gpu_layers=0, n_ctx=512, **options) as batcher:
            yield batcher


async def test_a_stop_string_is_kept_where_that_is_asked_for(model: Path) -> None:
    async with running(model) as batcher:
        whole = (await batcher.generate([5, 6, 7], max_tokens=12, ignore_eos=True)).text
        stop = whole[4:7]
        assert len(stop) == 3
        cut = await batcher.generate([5, 6, 7], max_tokens=12, ignore_eos=True, stop=[stop])
        kept = await batcher.generate([5, 6, 7], max_tokens=12, ignore_eos=True, stop=[stop], keep_stop=True)
        assert (cut.finish_reason, kept.finish_reason) == ("stop", "stop")
        assert cut.text == whole[: whole.index(stop)] and kept.text == cut.text + stop
        async with batcher.stream([5, 6, 7], max_tokens=12, ignore_eos=True, stop=[stop], keep_stop=True) as stream:
            assert "".join([token.text async for token in stream]) == kept.text


async def test_a_message_is_gone_on_with_as_transformers_renders_it(model: Path) -> None:
    async with running(model) as batcher:
        turns = [USER, {"role": "assistant", "content": "It is"}]
        hf = batcher.service.engine.model.tokenizer.hf
        text = hf.apply_chat_template(turns, tokenize=False, continue_final_message=True)
        open_ended = hf.encode(text, add_special_tokens=False)
        gone_on = await batcher.generate(messages=turns, continue_final_message=True, max_tokens=6, ignore_eos=True)
        alone = await batcher.generate(open_ended, max_tokens=6, ignore_eos=True)
        assert gone_on.token_ids == alone.token_ids
        assert gone_on.usage.prompt_tokens == len(open_ended)
        answered = await batcher.generate(messages=turns, max_tokens=6, ignore_eos=True)
        assert answered.usage.prompt_tokens > len(open_ended)  # the message is closed, and another one begun


async def test_a_template_of_ones_own_is_used_and_gets_what_a_request_says(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}{% if shout %}!!{% endif %}")
    async with running(model, chat_template=str(template)) as batcher:
        for kwargs, text in (({}, "Well?"), ({"shout": True}, "Well?!!"), ({"shout": False}, "Well?")):
            result = await batcher.generate(messages=[USER], chat_template_kwargs=kwargs, max_tokens=1)
            tokens = await batcher.tokenize(text, add_special_tokens=False)
            assert result.usage.prompt_tokens == len(tokens)


async def test_a_text_that_can_never_fit_is_refused_before_it_is_cut_into_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model) as batcher:
        tokenizer = batcher.service.engine.model.tokenizer
        for text in ("word " * 500, " " * 3000, "\n\n" * 999, "é世🙂" * 300, "\x01\xff" * 99, "<s>" * 50):
            assert 0 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
        assert (await batcher.generate("word " * 50, max_tokens=1)).usage.completion_tokens == 1

        def asked(*args: object, **options: object) -> list[int]:
            raise AssertionError("the tokenizer is asked")

        monkeypatch.setattr(type(tokenizer), "encode", asked)
        monkeypatch.setattr(type(tokenizer), "start_prompt", asked)
        for request, field in (
            ({"prompt": "word " * 200_000}, "prompt"),
            ({"messages": [{"role": "user", "content": "word " * 200_000}]}, "messages"),
        ):
            with pytest.raises(PromptTooLong, match="and 512 fit") as caught:
                await batcher.generate(**request)
            assert caught.value.field == field


async def test_an_output_has_allowed_tokens_only_and_no_bad_words(model: Path) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 7}
    async with running(model) as batcher:
        few = await batcher.generate([5, 6, 7], **asked, allowed_token_ids=[40, 41, 42], n=2)
        assert all(set(choice.token_ids) <= {40, 41, 42} and len(choice.token_ids) == 30 for choice in few.choices)
        greedy = await batcher.generate([5, 6, 7], max_tokens=30, ignore_eos=True)
        bad = await batcher.detokenize(greedy.token_ids[3:5])
        assert len(bad) > 1
        without = await batcher.generate([5, 6, 7], max_tokens=30, ignore_eos=True, bad_words=[bad])
        assert bad.strip() and without.token_ids[:4] == greedy.token_ids[:4] != without.token_ids
        tokens = await batcher.tokenize(bad.strip(), add_special_tokens=False)
        pairs = list(zip(*(without.token_ids[start:] for start in range(len(tokens))), strict=False))
        assert tuple(tokens) not in pairs
        held = await batcher.generate([5, 6, 7], **asked, regex="[a-z]{1,9}", bad_words=["e", "a"])
        banned = [await batcher.tokenize(letter, add_special_tokens=False) for letter in ("e", "a")]
        assert held.finish_reason == "stop" and not {token_id for (token_id,) in banned} & set(held.token_ids)
        with pytest.raises(InvalidRequest, match="none of the allowed tokens"):
            await batcher.generate([5, 6, 7], **asked, regex="[0-9]{3}", allowed_token_ids=[few.token_ids[0], 3])
        for wrong in ({"allowed_token_ids": [10**6]}, {"allowed_token_ids": []}, {"bad_words": [" "]}):
            with pytest.raises(InvalidRequest) as caught:
                await batcher.generate([5, 6, 7], **asked, **wrong)
            assert (caught.value.field or "").startswith(next(iter(wrong)))


async def test_a_prompt_keeps_its_last_tokens_and_its_ids_are_reported(model: Path) -> None:
    async with running(model) as batcher:
        for prompt in ({"prompt": "word " * 2000}, {"messages": [USER | {"content": "word " * 2000}]}):
            with pytest.raises(PromptTooLong):
                await batcher.generate(**prompt, max_tokens=4)
            cut = await batcher.generate(
                **prompt, max_tokens=4, truncate_prompt_tokens=50, return_prompt_token_ids=True, echo=True
            )
            assert cut.usage.prompt_tokens == len(cut.prompt_token_ids) == 50
            plain = await batcher.generate(cut.prompt_token_ids, max_tokens=4, echo=True)
            assert (plain.token_ids, plain.text) == (cut.token_ids, cut.text) and plain.prompt_token_ids is None
        whole = await batcher.generate("a word", max_tokens=1, truncate_prompt_tokens=50, return_prompt_token_ids=True)
        assert whole.prompt_token_ids == await batcher.tokenize("a word")


async def test_special_tokens_are_text_where_that_is_asked_for(
    model: Path, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    marked = tool_model(tiny_model_dir("llama"), tmp_path / "model")
    add_marks(marked, ["<|mark|>"])
    async with running(marked) as batcher:
        (mark,) = await batcher.tokenize("<|mark|>", add_special_tokens=False)
        asked: dict[str, Any] = {"max_tokens": 3, "allowed_token_ids": [mark]}
        assert (await batcher.generate([5, 6, 7], **asked)).text == ""
        shown = await batcher.generate([5, 6, 7], **asked, skip_special_tokens=False)
        assert shown.text == "<|mark|>" * 3
        async with batcher.stream([5, 6, 7], **asked, skip_special_tokens=False) as stream:
            assert [token.text async for token in stream] == ["<|mark|>"] * 3
