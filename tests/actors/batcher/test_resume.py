"""A request that goes on after tokens that another engine has drawn has the same rest as one that no death met."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from genbatch.actors.batcher.messages import Generate
from genbatch.nif.context.engine import choose_runner
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.models.model import load_model
from genbatch.proto.errors import EngineLost, GenbatchError, InvalidRequest, QueueFull
from genbatch.proto.messages import (
    DrawnTokens,
    GenerateRequest,
    Message,
    NamedTool,
    ResponseFormat,
    Result,
    Token,
    Tool,
)
from tests.actors.batcher.bench import Bench, batcher, prompt_of
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer
from tests.tool_models import TEMPLATE, tool_model

Native = Callable[..., Any]
USER = Message(role="user", content="Well?")
TOOL = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": 24}
HELD: dict[str, Any] = {"temperature": 1.0, "seed": 7}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 24, "ignore_eos": True},
    "seeded": {**DRAWN, "top_p": 0.9},
    "penalised": {**DRAWN, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7},
    "log-probs": {**DRAWN, "logprobs": 3},
    "prompt log-probs": {**DRAWN, "prompt_logprobs": 1, "echo": True},
    "several": {**DRAWN, "n": 3},
    "grammar": {**HELD, "max_tokens": 200, "response_format": ResponseFormat(type="json_schema", schema=SCHEMA)},
    "regex": {**HELD, "max_tokens": 40, "regex": "(ab|ba){8}[0-9]"},
}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    """Opens Batchers with the native runner, whose rows do not depend on how a prompt was cut into chunks."""
    folder = tmp_path_factory.mktemp("resume")
    built = build_native_model("llama", folder / "llama", build_tokenizer)
    model = load_model(str(tool_model(built, folder / "tools")), dtype="float32", n_gpu_layers=0)
    opened = choose_runner(model, EngineOptions(runner="native", n_threads=1))
    return partial(batcher, model, new_runner=lambda _: opened(4))


async def ask(
    bench: Bench, request: GenerateRequest, drawn: tuple[DrawnTokens, ...] = (), *, is_admitted: bool = True
) -> tuple[list[Token], Result]:
    tokens: list[Token] = []
    call = Generate(request, tokens.append, "client", drawn=drawn, is_admitted=is_admitted and bool(drawn))
    result = await bench.ref.call(call, timeout=None)
    return tokens, result


def drawn_by(tokens: list[Token], num_choices: int, *, scored: bool) -> tuple[DrawnTokens, ...]:
    """What a gateway has kept of these tokens."""
    kept = []
    for choice in range(num_choices):
        own = [token for token in tokens if token.choice == choice]
        kept.append(
            DrawnTokens(
                [token.token_id for token in own],
                [(token.logprob or 0.0, token.top) for token in own] if scored else [],
                [piece.id for token in own for piece in token.tool_calls if piece.id is not None],
            )
        )
    return tuple(kept)


def by_choice(tokens: list[Token]) -> dict[int, list[Token]]:
    return {choice: [one for one in tokens if one.choice == choice] for choice in {one.choice for one in tokens}}


async def check(bench: Bench, request: GenerateRequest, cuts: int = 7) -> None:
    """However many tokens an engine had drawn, the next one draws the rest."""
    whole, expected = await ask(bench, request)
    assert len(whole) > cuts
    for cut in sorted({0, 1, len(whole) - 1, len(whole), *range(2, len(whole), max(1, len(whole) // cuts))}):
        drawn = drawn_by(whole[:cut], request.n, scored=request.logprobs is not None)
        rest, result = await ask(bench, request, drawn)
        assert by_choice(whole[:cut] + rest) == by_choice(whole)
        assert plain(result) == plain(expected), cut


def first_call(tokens: list[Token]) -> int:
    """The number of tokens until a call's id was shown."""
    return next((index + 1 for index, token in enumerate(tokens) if token.tool_calls), 0)


def plain(result: Result) -> Any:
    """All of a result but random ids and what a cache knew."""
    calls = [(call.name, call.arguments) for call in result.tool_calls]
    choices = [(one.text, one.token_ids, one.finish_reason, one.logprobs) for one in result.choices]
    return (
        (result.text, result.token_ids, result.finish_reason, result.logprobs, result.reasoning, result.stop_string),
        (calls, choices, result.prompt_logprobs, result.usage.prompt_tokens, result.usage.completion_tokens),
    )


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_the_rest_is_that_of_a_stream_that_no_death_met(native: Native, kind: str) -> None:
    async with native() as bench:
        await check(bench, GenerateRequest(token_ids=prompt_of(11, 1), **KINDS[kind]))


@pytest.mark.trio
async def test_stop_strings_characters_and_least_tokens_go_across_the_seam(native: Native) -> None:
    async with native() as bench:
        request = GenerateRequest(token_ids=prompt_of(11, 2), **{**DRAWN, "temperature": 3.0, "max_tokens": 48})
        _, free = await ask(bench, request)
        middle = len(free.text) // 2
        for stop in (free.text[middle : middle + 6], free.text[middle : middle + 1]):
            wanted = GenerateRequest(token_ids=request.token_ids, **{**DRAWN, "temperature": 3.0, "max_tokens": 48},
                                     stop=[stop, free.text[-5:]], min_tokens=9)  # fmt: skip
            await check(bench, wanted, cuts=20)


@pytest.mark.trio
async def test_a_budget_of_thinking_goes_across_the_seam(tmp_path: Path) -> None:
    template = TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%") + "{# </think> #}"
    model = tool_model(build_native_model("llama", tmp_path / "llama", build_tokenizer), tmp_path / "thinks", template)
    loaded = load_model(str(model), dtype="float32", n_gpu_layers=0)
    runner = choose_runner(loaded, EngineOptions(runner="native", n_threads=1))
    asked: dict[str, Any] = {"messages": [USER], "reasoning": True, **HELD, "ignore_eos": True, "max_tokens": 32}
    async with batcher(loaded, new_runner=lambda _: runner(4), n_ctx=2048) as bench:
        for more in ({"max_thinking_tokens": 5, "n": 2}, {"reasoning_effort": "minimal"}):
            request = GenerateRequest(**asked, **more)
            await check(bench, request, cuts=16)
            _, result = await ask(bench, request)
            assert result.reasoning and result.text


@pytest.mark.trio
async def test_calls_keep_their_ids_and_go_on_in_the_middle_of_their_arguments(native: Native) -> None:
    async with native(n_ctx=2048) as bench:
        request = GenerateRequest(messages=[USER], tools=[TOOL], tool_choice=NamedTool(name=TOOL.name), temperature=1.0,
                                  seed=4, max_tokens=200)  # fmt: skip
        whole, expected = await ask(bench, request)
        (call,) = expected.tool_calls
        begins = first_call(whole)
        for cut in (begins, begins + 1, *range(begins + 2, len(whole), 9), len(whole)):
            rest, result = await ask(bench, request, drawn_by(whole[:cut], 1, scored=False))
            assert whole[:cut] + rest == whole and result.tool_calls == (call,)


@pytest.mark.trio
async def test_a_request_that_was_let_in_before_is_not_refused_by_a_full_queue_and_goes_first(native: Native) -> None:
    async with native(n_parallel=1, max_queue=1, max_client_queue_share=1.0) as bench, trio.open_nursery() as all:
        request = GenerateRequest(token_ids=prompt_of(5, 3), **DRAWN)
        whole, expected = await ask(bench, request)
        ended: list[str] = []

        async def other(name: str) -> None:
            await ask(bench, GenerateRequest(token_ids=prompt_of(6, 4), max_tokens=300, ignore_eos=True))
            ended.append(name)

        for name in ("runs", "waits"):
            all.start_soon(other, name)
            await wait_all_tasks_blocked()
        rest, result = await ask(bench, request, drawn_by(whole[:9], 1, scored=False))
        assert whole[:9] + rest == whole and plain(result) == plain(expected)
        assert "waits" not in ended


@pytest.mark.trio
async def test_a_passed_deadline_ends_it_with_what_was_shown(native: Native) -> None:
    async with native() as bench:
        request = GenerateRequest(token_ids=prompt_of(5, 3), **DRAWN)
        whole, _ = await ask(bench, request)
        late = GenerateRequest(token_ids=request.token_ids, **DRAWN, deadline_s=1e-9)
        rest, result = await ask(bench, late, drawn_by(whole[:9], 1, scored=False))
        assert rest == [] and result.finish_reason == "deadline"
        assert result.token_ids == [token.token_id for token in whole[:9]]
        assert result.text == "".join(token.text for token in whole[:9])


@pytest.mark.trio
async def test_tokens_that_this_engine_would_not_have_drawn_are_no_beginning(native: Native) -> None:
    """An engine that came back with less memory may have room for fewer."""
    async with native() as bench:
        request = GenerateRequest(token_ids=prompt_of(5, 3), max_tokens=4, ignore_eos=True)
        with pytest.raises(EngineLost) as lost:
            await ask(bench, request, (DrawnTokens([7, 8, 9, 10, 11]),))
        assert lost.value.tokens_delivered == 5


# Tokens that a client brings, after its gateway died


@pytest.mark.trio
@pytest.mark.parametrize(
    ("drawn", "field"),
    [
        ((DrawnTokens([7, 8, 9, 10, 11]),), "drawn"),
        ((DrawnTokens([7]), DrawnTokens([7])), "drawn"),
        ((DrawnTokens([7, 10**6]),), "drawn[0].token_ids[1]"),
        ((DrawnTokens([-1]),), "drawn[0].token_ids"),
        ((DrawnTokens([7], [(-1.0, {})]),), "drawn[0].logprobs"),
        ((DrawnTokens([7], [], ["a", "b"]),), "drawn[0].call_ids"),
    ],
)
async def test_tokens_that_a_client_brings_must_be_those_of_its_request(
    native: Native, drawn: tuple[DrawnTokens, ...], field: str
) -> None:
    async with native() as bench:
        request = GenerateRequest(token_ids=prompt_of(5, 3), max_tokens=4, ignore_eos=True)
        with pytest.raises(InvalidRequest) as refused:
            await ask(bench, request, drawn, is_admitted=False)
        assert refused.value.field == field
        scored = GenerateRequest(token_ids=prompt_of(5, 3), max_tokens=4, logprobs=1)
        with pytest.raises(InvalidRequest, match="finite"):
            await ask(bench, scored, (DrawnTokens([7], [(float("nan"), {})]),), is_admitted=False)


@pytest.mark.trio
async def test_tokens_against_the_grammar_fail_their_request_alone(native: Native) -> None:
    async with native() as bench:
        request = GenerateRequest(token_ids=prompt_of(5, 3), regex="(ab){20}", max_tokens=40)
        with pytest.raises(GenbatchError, match="cannot be followed"):
            await ask(bench, request, (DrawnTokens([7, 8, 9]),), is_admitted=False)
        await check(bench, GenerateRequest(token_ids=prompt_of(5, 3), **DRAWN))


@pytest.mark.trio
async def test_who_brings_tokens_does_not_pass_those_that_wait(native: Native) -> None:
    async with native(n_parallel=1, max_queue=1, max_client_queue_share=1.0) as bench, trio.open_nursery() as all:
        request = GenerateRequest(token_ids=prompt_of(5, 3), **DRAWN)
        whole, _ = await ask(bench, request)
        drawn = drawn_by(whole[:9], 1, scored=False)
        other = GenerateRequest(token_ids=prompt_of(6, 4), max_tokens=300, ignore_eos=True)
        all.start_soon(ask, bench, other)
        await wait_all_tasks_blocked()
        all.start_soon(ask, bench, other)
        await wait_all_tasks_blocked()
        with pytest.raises(QueueFull):
            await ask(bench, request, drawn, is_admitted=False)
