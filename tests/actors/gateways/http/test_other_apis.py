"""The APIs of Ollama, llama.cpp's server and Mistral, over a tiny model that calls tools."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.actors.gateways.threaded_service import threaded_service
from tests.agent_model import ANSWER, CALLS, agent_model
from tests.tool_models import tool_model

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def client(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    model = tool_model(tiny_model_dir("llama"), tmp_path_factory.mktemp("apis") / "model")
    with (
        threaded_service(model, http=":0") as service,
        httpx2.Client(base_url=service.addresses[0], trust_env=False, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def model(client: httpx2.Client) -> str:
    [row] = client.get("/api/tags").json()["models"]
    assert len(row["digest"]) == 64
    return str(row["name"])


def lines(client: httpx2.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def openai_text(client: httpx2.Client, model: str, messages: list[dict[str, Any]], num_tokens: int) -> str:
    body = {"model": model, "messages": messages, "max_tokens": num_tokens}
    return str(client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


def test_an_ollama_chat_says_what_openais_says_whole_and_streamed(client: httpx2.Client, model: str) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    expected = openai_text(client, model, messages, 12)
    body = {"model": f"{model}:latest", "messages": messages, "options": {"num_predict": 12, "num_ctx": 2048}}
    *pieces, last = lines(client, "/api/chat", body)
    assert "".join(piece["message"]["content"] for piece in pieces) == expected
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 12)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
    whole = client.post("/api/chat", json={**body, "stream": False})
    assert whole.json()["message"] == {"role": "assistant", "content": expected}
    assert whole.headers["x-ignored-fields"] == "options.num_ctx"


def test_ollamas_generate_uses_the_template_unless_it_is_raw(client: httpx2.Client, model: str) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    options = {"num_predict": 8}
    body = {"model": model, "prompt": "Hello", "system": "Be kind.", "options": options, "stream": False}
    assert client.post("/api/generate", json=body).json()["response"] == openai_text(client, model, messages, 8)
    raw = {"model": model, "prompt": "Hello", "raw": True, "options": options}
    told = "".join(piece["response"] for piece in lines(client, "/api/generate", raw))
    completed = client.post("/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 8}).json()
    assert told == completed["choices"][0]["text"]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A client of a model that calls an offered tool named bash, and says ANSWER once it has the result."""
    model = agent_model(tmp_path_factory.mktemp("agent") / "model")
    with (
        threaded_service(model, n_ctx=512, http=":0") as service,
        httpx2.Client(base_url=service.addresses[0], trust_env=False, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize("streams", [False, True])
def test_an_ollama_chat_calls_a_tool_and_takes_its_answer(streams: bool, agent: httpx2.Client) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Well?"}]
    body = {"model": "model", "messages": messages, "tools": [BASH], "stream": streams}
    if streams:
        answer = next(line["message"] for line in lines(agent, "/api/chat", body) if "tool_calls" in line["message"])
    else:
        answer = agent.post("/api/chat", json=body).json()["message"]
    [call] = answer["tool_calls"]
    assert call["function"] == {"index": 0, "name": "bash", "arguments": CALLS["bash"]}
    asked = {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": CALLS["bash"]}}]}
    messages += [asked, {"role": "tool", "tool_name": "bash", "content": "done"}]
    again = agent.post("/api/chat", json={**body, "stream": False}).json()
    assert again["message"] == {"role": "assistant", "content": ANSWER} and again["done_reason"] == "stop"


def test_ollamas_format_holds_an_answer_to_its_schema(client: httpx2.Client, model: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "format": schema, "stream": False}
    answer = client.post("/api/chat", json=body).json()
    assert json.loads(answer["message"]["content"]) == {"a": 1}


def test_a_body_without_a_prompt_asks_ollama_to_load_or_unload(client: httpx2.Client, model: str) -> None:
    answer = client.post("/api/generate", json={"model": model}).json()
    assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, "load")
    answer = client.post("/api/chat", json={"model": model, "messages": [], "keep_alive": 0}).json()
    assert (answer["message"]["content"], answer["done_reason"]) == ("", "unload")


def test_ollama_describes_the_model(client: httpx2.Client, model: str) -> None:
    told = client.post("/api/show", json={"model": model}).json()
    assert "completion" in told["capabilities"] and "tools" in told["capabilities"]
    assert told["model_info"]["genbatch.context_length"] > 0
    assert [row["name"] for row in client.get("/api/ps").json()["models"]] == [model]
    assert client.get("/api/version").json()["version"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "think": "deeply"}, "think"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "format": "xml"}, "format"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "options": {"top_p": 7}}, "options.top_p"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools[0]"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("show", {}, "model"),
    ],
)
def test_ollamas_errors_are_a_text_that_names_the_field(
    path: str, body: dict[str, Any], said: str, client: httpx2.Client, model: str
) -> None:
    answer = client.post(f"/api/{path}", json=body if path == "show" else {"model": model, **body})
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"] and said in answer.json()["error"]


def test_a_model_that_ollama_does_not_have_is_not_found(client: httpx2.Client) -> None:
    answer = client.post("/api/chat", json={"model": "other", "messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 404 and "other" in answer.json()["error"]
    answer = client.post("/api/embed", json={"model": "other", "input": "x"})
    assert answer.status_code == 404


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6, 7]])
def test_llama_cpps_completion_says_what_openais_says(prompt: str | list[int], client: httpx2.Client) -> None:
    expected = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9}).json()
    body = {"prompt": prompt, "n_predict": 9, "cache_prompt": True, "grammar": ""}
    whole = client.post("/completion", json=body).json()
    assert whole["content"] == expected["choices"][0]["text"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 9)
    streamed = client.post("/completion", json={**body, "stream": True}).text
    *pieces, last = [json.loads(event.removeprefix("data: ")) for event in streamed.split("\n\n") if event]
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert not any(piece["stop"] for piece in pieces) and last["stop"] and last["content"] == ""


def test_infill_without_a_suffix_continues_and_with_one_needs_a_model_for_it(client: httpx2.Client) -> None:
    expected = client.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 5}).json()
    body = {"input_prefix": "def", "prompt": " f(", "input_suffix": "", "n_predict": 5}
    assert client.post("/infill", json=body).json()["content"] == expected["choices"][0]["text"]
    refused = client.post("/infill", json={**body, "input_suffix": "):"})
    assert refused.status_code == 400 and "fill-in-the-middle" in refused.text
    bad = client.post("/infill", json={**body, "input_extra": [{"filename": "a.py"}]})
    assert bad.status_code == 400 and "input_extra[0].text" in bad.text


def test_mistrals_fim_answers_in_the_shapes_of_a_chat(client: httpx2.Client) -> None:
    body = {"prompt": "def f(", "max_tokens": 5, "random_seed": 3, "temperature": 1.0}
    expected = client.post("/v1/completions", json={**body, "random_seed": None, "seed": 3}).json()
    answer = client.post("/v1/fim/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    refused = client.post("/v1/fim/completions", json={**body, "suffix": "):"})
    assert refused.status_code == 400 and "suffix" in refused.text


def test_mistrals_chats_have_their_name_of_the_seed(client: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 1.0}

    def text(**seed: int) -> str:
        answer: str = client.post("/v1/chat/completions", json=body | seed).json()["choices"][0]["message"]["content"]
        return answer

    assert text(random_seed=3) == text(seed=3) != text(random_seed=4)
