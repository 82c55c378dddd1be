"""What a request says of its text, over a tiny random model: stop strings, a message gone on with, the template."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from genbatch import open_batcher
from genbatch.proto.errors import PromptTooLong
from tests.tool_models import tool_model
from tests.waiting import ENGINE_PATIENCE_S

pytestmark = pytest.mark.trio
USER = {"role": "user", "content": "Well?"}


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
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
