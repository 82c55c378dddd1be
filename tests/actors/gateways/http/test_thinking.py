"""Efforts and budgets of thinking at each API, over a tiny model that thinks until it is told to stop."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genbatch.actors.gateways.http.bodies import HEADER
from tests.actors.gateways.threaded_service import threaded_service
from tests.tool_models import TEMPLATE, tool_model

OPENED = TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%") + "{# </think> #}"
USER = [{"role": "user", "content": "Well?"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
# A budget of 6 tokens by each API, for answers of 24.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai, effort": (CHAT, {"messages": USER, "max_tokens": 24, "reasoning_effort": "low"}),
    "openrouter": (CHAT, {"messages": USER, "max_tokens": 24, "reasoning": {"max_tokens": 6}}),
    "vllm": (CHAT, {"messages": USER, "max_tokens": 24, "thinking_token_budget": 6}),
    "seed": (CHAT, {"messages": USER, "max_tokens": 24, "chat_template_kwargs": {"thinking_budget": 6}}),
    "anthropic": (MESSAGES, {"messages": USER, "max_tokens": 24, "thinking": {"type": "enabled", "budget_tokens": 6}}),
    "anthropic, effort": (MESSAGES, {"messages": USER, "max_tokens": 24, "output_config": {"effort": "low"}}),
    "responses": (RESPONSES, {"input": USER, "max_output_tokens": 24, "reasoning": {"effort": "low"}}),
    "ollama": ("/api/chat", {"messages": USER, "options": {"num_predict": 24}, "think": "low", "stream": False}),
}


@pytest.fixture(scope="module")
def models(
    tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, httpx2.Client]]:
    folder = tmp_path_factory.mktemp("thinking")
    tiny = tiny_model_dir("llama")
    thinks, other = tool_model(tiny, folder / "model", OPENED), tool_model(tiny, folder / "other" / "model")
    with threaded_service(thinks, http=":0") as one, threaded_service(other, http=":0") as two:
        options: dict[str, Any] = {"trust_env": False, "timeout": 60}
        with (
            httpx2.Client(base_url=one.addresses[0], **options) as client,
            httpx2.Client(base_url=two.addresses[0], **options) as plain,
        ):
            yield {"thinks": client, "plain": plain}


def said(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """The thinking and the text of an answer."""
    if path == CHAT:
        message = body["choices"][0]["message"]
        return message["reasoning_content"], message["content"]
    if path == MESSAGES:
        thinking, text = body["content"]
        return thinking["thinking"], text["text"]
    if path == RESPONSES:
        thinking, text = (item["content"][0]["text"] for item in body["output"])
        return thinking, text
    return body["message"]["thinking"], body["message"]["content"]


def test_every_api_has_the_same_budget(models: dict[str, httpx2.Client]) -> None:
    answers = {}
    for api, (path, body) in ASKED.items():
        response = models["thinks"].post(path, json={"model": "model", **body})
        assert response.status_code == 200, response.text
        assert HEADER not in response.headers, api
        answers[api] = said(path, response.json())
    assert len(set(answers.values())) == 1, answers
    assert all(answers["vllm"])


def test_a_stream_counts_its_thinking(models: dict[str, httpx2.Client]) -> None:
    path, body = ASKED["openai, effort"]
    whole = models["thinks"].post(path, json=body).json()
    usage = whole["usage"]["completion_tokens_details"]
    assert 6 <= usage["reasoning_tokens"] < 24
    more = {"stream": True, "stream_options": {"include_usage": True}}
    lines = models["thinks"].post(path, json=body | more).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    told = tuple("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))
    assert told == said(path, whole)
    assert chunks[-1]["usage"]["completion_tokens_details"] == usage


def test_tools_and_formats_follow_the_thinking_of_each_choice(models: dict[str, httpx2.Client]) -> None:
    body: dict[str, Any] = {"messages": USER, "n": 2, "max_tokens": 120, "temperature": 1, "thinking_budget": 6}
    tools = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    answer = models["thinks"].post(CHAT, json=body | tools | {"parallel_tool_calls": False}).json()
    for choice in answer["choices"]:
        assert choice["message"]["reasoning_content"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": "{}"}
    shape = {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}}
    answer = models["thinks"].post(CHAT, json=body | {"response_format": shape}).json()
    assert all(json.loads(choice["message"]["content"]) in (1, 2) for choice in answer["choices"])


def test_no_thinking_is_an_answer_from_the_first_token(models: dict[str, httpx2.Client]) -> None:
    for off in ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}):
        answer = models["thinks"].post(CHAT, json={"messages": USER, "max_tokens": 24, **off}).json()
        message = answer["choices"][0]["message"]
        assert message["content"] and "reasoning_content" not in message


def test_a_model_that_does_not_think_names_what_it_cannot_follow(models: dict[str, httpx2.Client]) -> None:
    named = {
        "openai, effort": "reasoning_effort",
        "openrouter": "reasoning.max_tokens",
        "vllm": "thinking_token_budget",
        "anthropic": "thinking.type, thinking.budget_tokens",
        "responses": "reasoning.effort",
        "ollama": "think",
    }
    for api, names in named.items():
        path, body = ASKED[api]
        response = models["plain"].post(path, json={"model": "model", **body})
        assert (response.status_code, response.headers[HEADER]) == (200, names), response.text
    off = models["plain"].post(CHAT, json={"messages": USER, "max_tokens": 2, "reasoning_effort": "none"})
    assert HEADER not in off.headers
