"""A budget ends the thinking after so many tokens; a random model never does so by itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch.clients.in_process import open_batcher
from genbatch.nif.sampling.constraints import ThinkingBudget, ThinkingMarks
from genbatch.nif.text.tools import THINKING_TAGS
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import Message, ResponseFormat
from tests.tool_models import TEMPLATE, add_marks, tool_model

USER = Message(role="user", content="Well?")
OPENED = TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%") + "{# </think> #}"
UNOPENED = TEMPLATE + "{# <think></think> #}"


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompt opens the thinking."""
    assert "<think>" in OPENED
    return tool_model(tiny_model_dir("llama"), tmp_path_factory.mktemp("thinking") / "model", OPENED)


def running(model: Path) -> Any:
    return open_batcher(str(model), n_ctx=2048, n_parallel=4)


@pytest.mark.trio
@pytest.mark.parametrize("budget", [0, 1, 7, 30])
async def test_thinking_ends_at_its_budget_and_the_answer_follows(budget: int, model: Path) -> None:
    asked: Any = {"messages": [USER], "reasoning": True, "seed": 3, "temperature": 1.0}
    async with running(model) as batcher:
        free = await batcher.generate(**asked, max_tokens=80)
        assert free.text == "" and free.reasoning_tokens == 80, "the model does not stop thinking by itself"
        result = await batcher.generate(**asked, max_tokens=80, max_thinking_tokens=budget)
        assert result.token_ids[:budget] == free.token_ids[:budget]
        ending = result.reasoning_tokens - budget
        assert result.text and (budget == 0 or 0 <= ending <= 16)
        assert result.usage.completion_tokens == len(result.token_ids) == 80
        plain = await batcher.generate(
            messages=[USER], seed=3, temperature=1.0, max_tokens=80, max_thinking_tokens=budget
        )
        assert plain.token_ids == result.token_ids
        assert plain.text.partition("</think>")[2].lstrip() == result.text


@pytest.mark.trio
@pytest.mark.parametrize(("place", "special"), [(0, True), (1, False), (3, True)], ids=["[THINK]", "seed", "Gemma 4"])
async def test_thinking_in_the_tags_of_other_templates_is_read_and_limited(
    place: int, special: bool, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    tags = THINKING_TAGS[place]
    written = TEMPLATE.replace("assistant\n{%", f"assistant\n{tags.opens}{{%") + f"{{# {tags.closes} #}}"
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model", written)
    if special:  # "thought" behind Gemma 4's token is text
        add_marks(model, [tags.opens.removesuffix("thought"), tags.closes])
    asked: Any = {"messages": [USER], "reasoning": True, "seed": 3, "temperature": 1.0, "max_tokens": 60}
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    async with running(model) as batcher:
        (card,) = await batcher.models()
        assert card.thinks
        result = await batcher.generate(**asked, max_thinking_tokens=5)
        assert result.reasoning and result.text and 0 < result.reasoning_tokens <= 5 + 24
        for mark in (tags.opens, tags.closes):
            assert mark not in result.reasoning and not result.text.startswith(mark)
        shape = ResponseFormat(type="json_schema", schema=schema)
        held = await batcher.generate(**asked, max_thinking_tokens=5, response_format=shape)
        assert json.loads(held.text) == {"a": 1} and held.reasoning


@pytest.mark.trio
async def test_each_answer_of_a_batch_keeps_to_its_own_budget(model: Path) -> None:
    budgets = (None, 0, 3, 20)
    alone, together = {}, {}
    async with running(model) as batcher:

        async def ask(budget: int | None, results: dict[int | None, Any]) -> None:
            results[budget] = await batcher.generate(
                messages=[USER], max_tokens=40, n=2, temperature=1.0, seed=1, reasoning=True, max_thinking_tokens=budget
            )

        for budget in budgets:
            await ask(budget, alone)
        async with trio.open_nursery() as nursery:
            for budget in budgets:
                nursery.start_soon(ask, budget, together)
    for budget in budgets:
        assert [choice.token_ids for choice in together[budget].choices] == [
            choice.token_ids for choice in alone[budget].choices
        ]
    assert alone[3].choices[0].token_ids != alone[3].choices[1].token_ids
    assert all(bool(choice.text) is (budget is not None) for budget in budgets for choice in alone[budget].choices)


@pytest.mark.trio
async def test_an_answer_in_a_format_follows_the_thinking_that_a_budget_ended(model: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    shape = ResponseFormat(type="json_schema", schema=schema)
    async with running(model) as batcher:
        asked: Any = {"messages": [USER], "reasoning": True, "response_format": shape, "max_tokens": 60}
        async with batcher.stream(**asked, max_thinking_tokens=5) as stream:
            tokens = [token async for token in stream]
        assert json.loads("".join(token.text for token in tokens)) == {"a": 1}
        assert stream.result.reasoning_tokens > 5 and stream.result.finish_reason == "stop"


@pytest.mark.trio
async def test_an_answer_that_does_not_think_has_no_use_for_a_budget(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model", UNOPENED)
    async with running(model) as batcher:
        free = await batcher.generate(messages=[USER], max_tokens=20)
        assert not free.text.startswith("<think>")
        limited = await batcher.generate(messages=[USER], max_tokens=20, max_thinking_tokens=2)
        assert limited.token_ids == free.token_ids
        asked: Any = {"messages": [USER], "reasoning": True, "regex": "<think>hm, so</think>\n*Yes\\."}
        held = await batcher.generate(**asked, max_tokens=40, max_thinking_tokens=1)
        assert (held.reasoning, held.text) == ("hm, so", "Yes."), "the caller's expression holds the thinking"


@pytest.mark.trio
async def test_thinking_that_the_model_opened_itself_is_counted_from_its_mark(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model", UNOPENED)
    asked: Any = {"messages": [USER], "reasoning": True, "regex": "<think>[^<]*</think>\n*Yes\\."}
    async with running(model) as batcher:
        result = await batcher.generate(**asked, max_tokens=60, max_thinking_tokens=5)
        assert result.reasoning and result.text == "Yes."
        mark = len(await batcher.tokenize("<think>", add_special_tokens=False))
        assert result.reasoning_tokens <= mark + 9 + 16


@pytest.mark.trio
@pytest.mark.parametrize(("asked", "field"), [({"prompt": "x"}, "max_thinking_tokens"), ({"messages": [USER]}, None)])
async def test_a_budget_is_a_count_and_goes_with_messages(asked: Any, field: str | None, model: Path) -> None:
    async with running(model) as batcher:
        with pytest.raises(InvalidRequest) as caught:
            await batcher.generate(**asked, max_thinking_tokens=-1 if field is None else 5)
        assert caught.value.field == "max_thinking_tokens"


@pytest.mark.trio
async def test_an_effort_is_a_budget_where_the_template_knows_none(model: Path) -> None:
    asked: Any = {"messages": [USER], "reasoning": True, "seed": 3, "temperature": 1.0, "max_tokens": 80}
    async with running(model) as batcher:
        for effort, budget in {"none": 0, "minimal": 10, "low": 20, "medium": 40, "high": 60, "max": None}.items():
            by_effort = await batcher.generate(**asked, reasoning_effort=effort)
            by_budget = await batcher.generate(**asked, max_thinking_tokens=budget)
            assert by_effort.token_ids == by_budget.token_ids, effort
            assert bool(by_effort.text) is (budget is not None)
        both = await batcher.generate(**asked, reasoning_effort="high", max_thinking_tokens=7)
        assert both.token_ids == (await batcher.generate(**asked, max_thinking_tokens=7)).token_ids
        by_variable = await batcher.generate(**asked, chat_template_kwargs={"thinking_budget": 7})
        assert by_variable.token_ids == both.token_ids
        (card,) = await batcher.models()
        assert card.thinks


@pytest.mark.trio
async def test_an_effort_is_told_to_a_template_that_knows_it(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    shows = "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking_budget }}"
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model", shows + OPENED)
    async with running(model) as batcher:

        async def num_tokens(**params: Any) -> tuple[int, int]:
            result = await batcher.generate(messages=[USER], reasoning=True, max_tokens=40, seed=1, **params)
            return result.usage.prompt_tokens, result.reasoning_tokens

        for effort, told in {"minimal": "low", "low": "low", "medium": "medium", "max": "high"}.items():
            own = {"reasoning_effort": told, "enable_thinking": True}
            length, thought = await num_tokens(reasoning_effort=effort)
            assert (length, thought) == (await num_tokens(chat_template_kwargs=own)), effort
            assert thought == 40, "it has no budget"
        length, thought = await num_tokens(reasoning_effort="none")
        assert length == (await num_tokens(chat_template_kwargs={"enable_thinking": False}))[0] and thought < 40
        length, _ = await num_tokens(max_thinking_tokens=12)
        shown = await num_tokens(max_thinking_tokens=3, chat_template_kwargs={"thinking_budget": 12})
        assert length == shown[0] > (await num_tokens())[0]


@pytest.mark.trio
async def test_a_template_is_told_an_effort_that_it_accepts_and_a_lower_one_is_a_budget_beside_it(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    checks = (  # as Mistral Small 4
        "{% set reasoning_effort = reasoning_effort or 'none' %}{% if reasoning_effort not in ['none', 'high'] %}"
        "{{ raise_exception('an effort') }}{% endif %}{% if reasoning_effort == 'high' %}{{ 'think hard' }}{% endif %}"
    )
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model", checks + OPENED)
    asked: Any = {"messages": [USER], "reasoning": True, "seed": 3, "temperature": 1.0, "max_tokens": 80}
    async with running(model) as batcher:
        high = await batcher.generate(**asked, chat_template_kwargs={"reasoning_effort": "high"})
        none = await batcher.generate(**asked, chat_template_kwargs={"reasoning_effort": "none"})
        assert high.usage.prompt_tokens != none.usage.prompt_tokens
        for effort, told, budget in (("none", none, 0), ("low", high, 20), ("high", high, None), ("max", high, None)):
            result = await batcher.generate(**asked, reasoning_effort=effort)
            assert result.usage.prompt_tokens == told.usage.prompt_tokens, effort
            ending = result.reasoning_tokens - (80 if budget is None else budget)
            assert 0 <= ending <= (0 if budget is None else 24), effort


@pytest.mark.trio
async def test_a_prompt_that_has_closed_the_thinking_leaves_the_answer_alone(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    closed = TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n\n</think>\n\n{%")
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model", closed)
    asked: Any = {"messages": [USER], "regex": "<think>[a-z]{9}</think>", "max_tokens": 40}
    async with running(model) as batcher:
        free = await batcher.generate(**asked)
        assert (await batcher.generate(**asked, reasoning_effort="none")).token_ids == free.token_ids


@pytest.mark.trio
async def test_a_model_that_does_not_think_says_so(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    async with running(tool_model(tiny_model_dir("llama"), tmp_path / "model")) as batcher:
        (card,) = await batcher.models()
        assert not card.thinks
        free = await batcher.generate(messages=[USER], max_tokens=8)
        assert (
            await batcher.generate(messages=[USER], max_tokens=8, reasoning_effort="low")
        ).token_ids == free.token_ids
        with pytest.raises(InvalidRequest) as caught:
            await batcher.generate("x", reasoning_effort="low")
        assert caught.value.field == "reasoning_effort"


# gpt-oss: the thinking is a channel. After its end the model must choose another one.
PIECES = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "assistant", "analysis", "final", "hm", "Yes")


def channels(max_tokens: int) -> tuple[ThinkingBudget, dict[str, int]]:
    ids = {piece: token_id for token_id, piece in enumerate(PIECES, 30)}  # across two words of the mask

    def decode(token_ids: list[int]) -> str:
        return "".join(PIECES[token_id - 30] for token_id in token_ids)

    marks = ThinkingMarks(
        opens="<|channel|>analysis<|message|>",
        closes="<|end|>",
        ending=[ids[piece] for piece in ("<|end|>", "<|start|>", "assistant", "<|channel|>")],
        decode=decode,
        forbidden=ids["analysis"],
    )
    return ThinkingBudget(marks, max_tokens, 2, thinks=False, inner=None), ids


def allowed(budget: ThinkingBudget) -> set[int]:
    budget.prepare()
    words = budget.allowed.view("uint32").tolist()
    return {32 * word + bit for word, bits in enumerate(words) for bit in range(32) if bits >> bit & 1}


def test_a_channel_of_thinking_is_ended_and_not_begun_again() -> None:
    budget, ids = channels(2)
    every = set(range(64))
    for piece in ("<|channel|>", "analysis", "<|message|>", "hm", "hm"):
        assert allowed(budget) == every, piece
        budget.accept(ids[piece])
    for piece in ("<|end|>", "<|start|>", "assistant", "<|channel|>"):
        assert allowed(budget) == {ids[piece]}
        budget.accept(ids[piece])
    assert allowed(budget) == every - {ids["analysis"]}
    for piece in ("final", "<|message|>", "analysis", "Yes"):
        budget.accept(ids[piece])
        assert allowed(budget) == every, piece


def test_a_channel_of_thinking_that_the_model_ends_itself_is_left_alone() -> None:
    budget, ids = channels(9)
    for piece in ("<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", *["hm"] * 12):
        budget.accept(ids[piece])
        assert allowed(budget) == set(range(64)), piece


def test_the_ending_is_forced_beyond_the_budget_and_a_fork_goes_its_own_way() -> None:
    budget, ids = channels(2)
    for piece in ("<|channel|>", "analysis", "<|message|>", "hm"):
        budget.accept(ids[piece])
        assert allowed(budget) and budget.forced() == ()
    fork = budget.fork()
    for piece in ("hm", "<|end|>"):
        fork.accept(ids[piece])
        allowed(fork)
    assert fork.forced() == [ids[piece] for piece in ("<|start|>", "assistant", "<|channel|>")]
    assert allowed(fork) == {ids["<|start|>"]}
    assert len(allowed(budget)) > 1 and budget.forced() == ()
