"""A chat template that loops ends its own request, with an error that names the field; other callers do not notice."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import trio

from genbatch.actors.batcher.arrivals import INLINE_PROMPT_CHARS
from genbatch.actors.batcher.messages import SaveSession
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.text.templates import MAX_RENDERINGS, TemplateRenderer
from genbatch.proto.errors import InvalidRequest, PromptTooLong, QueueFull
from genbatch.proto.messages import Message, TokenizeRequest
from tests.actors.batcher.bench import Bench, batcher
from tests.nif.text.test_templates import LOOP, PLAIN

TinyModel = Callable[[str], Model]
pytestmark = pytest.mark.trio

# Does what the first message says, or the variable that a request may set.
TEMPLATE = (
    "{% if messages[0].content.startswith('loop') or loops %}" + LOOP + "{% elif messages[0].content == 'grow' %}"
    "{{ 'a ' * 500000 }}{% elif messages[0].content == 'fill' %}{{ 'a' * (number * 10**9) }}{% else %}"
    + PLAIN
    + "{% endif %}"
)


@pytest.fixture
def model(tiny_model: TinyModel) -> Iterator[Model]:
    model = tiny_model("llama")
    own = model.tokenizer.hf.chat_template
    model.tokenizer.set_template(TEMPLATE)
    yield model
    model.tokenizer.set_template(own)


def chat(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


# A request that has it is read on the tokenizer's thread.
LONG = {"unread": "x" * INLINE_PROMPT_CHARS}
LOOPING: dict[str, dict[str, Any]] = {
    "by its text": {"messages": chat("loop")},
    "off the event loop": {"messages": chat("loop"), "chat_template_kwargs": LONG},
    "by a variable": {"messages": chat("hi"), "chat_template_kwargs": {"loops": True}},
    "by memory": {"messages": chat("fill"), "chat_template_kwargs": {"number": 1}},
}


# A session is saved of a conversation alone, without variables.
CALLS = [*product(("generate", "tokenize"), LOOPING), ("save", "by its text")]


@pytest.mark.parametrize(("call", "kind"), CALLS)
async def test_a_looping_chat_template_ends_its_own_request_by_name(model: Model, call: str, kind: str) -> None:
    async with batcher(model) as bench:
        with pytest.raises(InvalidRequest, match=r"takes (more than|too much)") as caught:
            if call == "generate":
                await bench.generate(**LOOPING[kind])
            else:
                question = TokenizeRequest(**LOOPING[kind])
                await bench.ref.call(
                    question if call == "tokenize" else SaveSession(question.messages or []), timeout=None
                )
        assert caught.value.field == "messages"
        assert (await bench.generate(messages=chat("hi"), ignore_eos=True)).finish_reason == "length"


@pytest.mark.parametrize("variables", [None, LONG], ids=["short", "long"])
async def test_others_are_served_while_a_template_loops(model: Model, variables: dict[str, Any] | None) -> None:
    ended: list[str] = []

    async def loop(bench: Bench) -> None:
        with pytest.raises(InvalidRequest):
            await bench.generate(messages=chat("loop"), chat_template_kwargs=variables)
        ended.append("loop")

    async with batcher(model) as bench, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(loop, bench)
        while not len(bench.actor.arrivals):
            await trio.lowlevel.checkpoint()
        await bench.generate(messages=chat("hi"), chat_template_kwargs=variables, max_tokens=1, ignore_eos=True)
        ended.append("hi")
    assert ended == ["hi", *["loop"] * 3]


async def test_a_flood_of_looping_templates_is_told_to_come_again(model: Model) -> None:
    errors: list[InvalidRequest | QueueFull] = []

    async def loop(bench: Bench) -> None:
        with pytest.raises((InvalidRequest, QueueFull)) as caught:
            await bench.generate(messages=chat("loop"))
        errors.append(caught.value)

    async with batcher(model, max_queue=64) as bench, trio.open_nursery() as nursery:
        for _ in range(2 * MAX_RENDERINGS):
            nursery.start_soon(loop, bench)
    full = [error for error in errors if isinstance(error, QueueFull)]
    assert len(full) >= MAX_RENDERINGS and all(error.retry_after_ms for error in full)


async def test_a_few_words_that_become_a_megabyte_do_not_fit(model: Model) -> None:
    async with batcher(model) as bench:
        with pytest.raises(PromptTooLong) as caught:
            await bench.generate(messages=chat("grow"))
        assert caught.value.field == "messages"
        reply = await bench.ref.call(TokenizeRequest(messages=chat("grow")), timeout=None)
        assert len(reply.token_ids) > 100_000


async def test_a_batcher_closes_while_a_template_loops(model: Model) -> None:
    async def loop(bench: Bench) -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await bench.generate(messages=chat("loop"))

    scopes: list[trio.CancelScope] = []
    async with trio.open_nursery() as nursery, batcher(model) as bench:
        nursery.start_soon(loop, bench)
        while not len(bench.actor.arrivals):
            await trio.lowlevel.checkpoint()
        scopes[0].cancel()
        while len(bench.actor.requests):
            await trio.lowlevel.checkpoint()


async def test_the_first_conversation_finds_the_processes_of_the_template_started(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Batcher opens with a conversation read for nobody; so no request waits for a fork, or for the vocabulary."""
    vars(model.tokenizer).pop("_longest_token", None)
    async with batcher(model) as bench:
        assert "_longest_token" in vars(model.tokenizer)
        monkeypatch.setattr(TemplateRenderer, "_fork", lambda _: pytest.fail("a request waits for a process"))
        await bench.generate(messages=chat("hi"), max_tokens=1, ignore_eos=True)


async def test_a_template_that_refuses_the_first_conversation_ends_no_service(model: Model) -> None:
    model.tokenizer.set_template("{% if messages[0].content == 'Hello' %}" + LOOP + "{% endif %}" + PLAIN)
    async with batcher(model) as bench:
        assert (await bench.generate(messages=chat("hi"), max_tokens=1, ignore_eos=True)).finish_reason == "length"
