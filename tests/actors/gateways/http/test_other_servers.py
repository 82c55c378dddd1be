"""Requests that the published tests of vLLM, llama.cpp's server and Ollama make: answered, or refused by name."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from genbatch.actors.gateways.http.openai_request import read_chat
from genbatch.proto.service_messages import StatsRequest
from tests.actors.gateways.http.serving import served_http
from tests.actors.gateways.scripted_batcher import CARD, ScriptedBatcher
from tests.actors.gateways.threaded_service import threaded_service
from tests.tool_models import tool_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TURNS: list[Any] = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
PREFILL: list[Any] = [*TURNS, {"role": "assistant", "content": [{"type": "text", "text": "Wh"}]}]
IDS = [5, 6, 7]


@pytest.fixture(scope="module")
def client(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    model = tool_model(tiny_model_dir("llama"), tmp_path_factory.mktemp("servers") / "model")
    with (
        threaded_service(model, http=":0") as service,
        httpx2.Client(base_url=service.addresses[0], trust_env=False, timeout=60) as client,
    ):
        yield client


def asked(client: httpx2.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: httpx2.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


# What each of the three accepts in a chat or a completion, and whether we do.
@pytest.mark.parametrize(
    ("path", "more", "refused"),
    [
        # vLLM
        (CHAT, {"logprobs": True, "top_logprobs": 20}, None),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": False}, None),
        (CHAT, {"max_completion_tokens": 3, "min_tokens": 3, "ignore_eos": True}, None),
        (CHAT, {"stream_options": None}, None),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"structured_outputs": {"choice": ["Python", "Rust"]}}, None),
        (CHAT, {"structured_outputs": {"regex": "[0-9]{3}"}}, None),
        (CHAT, {"tools": None, "tool_choice": None, "seed": None, "stop": None, "n": None}, None),
        (CHAT, {"tool_choice": "none"}, None),
        (CHAT, {"tool_choice": "any", "tools": [{"type": "function", "function": {"name": "f"}}]}, None),  # Mistral's
        (CHAT, {"logit_bias": {"1": 1.0}, "repetition_penalty": 1.1, "top_k": -1, "min_p": 0.1}, None),
        (CHAT, {"logit_bias": {"999999": 1.0}}, "logit_bias[999999]"),
        (CHAT, {"stop_token_ids": [999999]}, "stop_token_ids[0]"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        (CHAT, {"add_generation_prompt": False}, "add_generation_prompt"),
        (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
        (CHAT, {"structural_tag": "{}"}, "structural_tag"),
        (CHAT, {"random_seed": 3}, None),
        (CHAT, {"random_seed": 3, "seed": 4}, "random_seed"),
        (CHAT, {"random_seed": -1}, "random_seed"),
        (CHAT, {"messages": PREFILL, "add_generation_prompt": False, "continue_final_message": True}, None),
        (CHAT, {"skip_special_tokens": True, "spaces_between_special_tokens": True}, None),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"prompt_logprobs": 1, "return_token_ids": True, "skip_special_tokens": False}, None),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"bad_words": ["x"]}, None),
        (CHAT, {"bad_words": [" "]}, "bad_words[0]"),
        (COMPLETIONS, {"prompt": [IDS, IDS], "n": 2, "logprobs": 0}, None),
        (COMPLETIONS, {"prompt": ["a", "b"], "echo": True, "logprobs": 1}, None),
        (COMPLETIONS, {"prompt": IDS, "echo": True, "max_tokens": 0, "logprobs": 5}, None),
        (COMPLETIONS, {"prompt": IDS, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": "a", "suffix": None, "user": "me", "best_of": 1}, None),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 4}, None),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": -1}, None),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"prompt": "a", "return_tokens_as_token_ids": True, "logprobs": 1}, None),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [1]}, None),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [999999]}, "allowed_token_ids[0]"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        # llama.cpp
        (CHAT, {"response_format": {"type": "sound"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        (CHAT, {"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, "response_format.schema"),
        (CHAT, {"json_schema": {"type": "hiccup"}}, "json_schema"),
        (CHAT, {"messages": [{"role": "system", "content": 123}]}, "messages[0].content"),
        (CHAT, {"messages": [{}]}, "messages[0].role"),
        (CHAT, {"messages": "string"}, "messages"),
        (CHAT, {"timings_per_token": True, "cache_prompt": True, "id_slot": 0}, None),
        ("/completion", {"prompt": "a", "n_predict": 2, "samplers": ["top_k"], "t_max_predict_ms": 9}, None),
        ("/completion", {"prompt": [], "n_predict": 2}, "prompt"),
        ("/completion", {"prompt": "a", "n_probs": 99}, "n_probs"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "content"),
    ],
)  # fmt: skip
def test_what_others_accept_is_answered_or_refused_by_its_name(
    path: str, more: dict[str, Any], refused: str | None, client: httpx2.Client
) -> None:
    least: dict[str, Any] = {CHAT: {"messages": TURNS, "max_tokens": 2}, COMPLETIONS: {"max_tokens": 2}}.get(path, {})
    if "max_completion_tokens" in more:
        least.pop("max_tokens")
    answer = client.post(path, json=least | more)
    if refused is None:
        assert answer.status_code == 200, answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, refused), answer.text


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, '"42"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "foo"}}}}, '"foo"'),
        ({"json_schema": {"const": "42"}}, '"42"'),
        ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
        ({"structured_outputs": {"choice": ["Rust"]}}, "Rust"),
    ],
)
def test_shapes_of_answers_have_every_servers_names(more: dict[str, Any], expected: str, client: httpx2.Client) -> None:
    answer = asked(client, CHAT, messages=TURNS, max_tokens=20, **more)
    assert answer["choices"][0]["message"]["content"] == expected


def test_llama_cpps_tokenize_has_its_own_names(client: httpx2.Client) -> None:
    plain = asked(client, "/tokenize", content="Hello world")["tokens"]
    ours = asked(client, "/tokenize", prompt="Hello world", add_special_tokens=False)["tokens"]
    assert plain == ours and asked(client, "/detokenize", tokens=plain)["content"] == "Hello world"
    special = asked(client, "/tokenize", content="Hello world", add_special=True)["tokens"]
    assert special == asked(client, "/tokenize", prompt="Hello world")["tokens"]
    pieces = asked(client, "/tokenize", content="Hello world", with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == plain
    assert "".join(piece["piece"] for piece in pieces) == "Hello world"


def test_llama_cpps_completion_takes_several_prompts(client: httpx2.Client) -> None:
    one = asked(client, "/completion", prompt=IDS, n_predict=4)
    text = asked(client, "/completion", prompt="Once upon", n_predict=4)
    both = asked(client, "/completion", prompt=[IDS, "Once upon"], n_predict=4)
    assert [answer["content"] for answer in both] == [one["content"], text["content"]]
    assert [answer["index"] for answer in both] == [0, 1]
    assert len(asked(client, "/completion", prompt=["Once upon"], n_predict=4)) == 1
    events = streamed(client, "/completion", prompt=[IDS, "Once upon"], n_predict=4)
    for index, answer in enumerate(both):
        pieces = [event for event in events if event["index"] == index]
        assert "".join(piece["content"] for piece in pieces) == answer["content"]
        assert [piece["stop"] for piece in pieces][-1] is True


@pytest.mark.parametrize(("path", "name"), [("/completion", "prompt"), ("/infill", "input_prefix")])
def test_llama_cpps_editors_have_a_prompt_evaluated_with_no_tokens(path: str, name: str, client: httpx2.Client) -> None:
    text = f"An editor warms the cache of {path} " * 4
    body: dict[str, Any] = {name: text, "n_predict": 0, "n_probs": 1}
    whole = asked(client, path, **body)
    counts = ("content", "tokens", "tokens_predicted", "stop_type")
    assert [whole[name] for name in counts] == ["", [], 0, "limit"] and "completion_probabilities" not in whole
    assert asked(client, path, **body)["tokens_cached"] > whole["tokens_evaluated"] // 2
    [event] = streamed(client, path, **body)
    assert [event[name] for name in counts] == ["", [], 0, "limit"]
    assert asked(client, path, **body, response_fields=[""]) == {}  # as llama.vim sends it


def test_llama_cpps_completion_shows_probabilities_timings_and_chosen_fields(client: httpx2.Client) -> None:
    body: dict[str, Any] = {"prompt": "Once upon", "n_predict": 5, "n_probs": 3}
    whole = asked(client, "/completion", **body)
    shown = whole["completion_probabilities"]
    assert [entry["id"] for entry in shown] == whole["tokens"] and len(shown) == 5
    for entry in shown:
        assert len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["logprob"] >= entry["logprob"]
        is_part = "\ufffd" in entry["token"]  # of a character: the text does not tell the bytes
        assert entry["bytes"] == (None if is_part else list(entry["token"].encode()))
    part = next(i for i in range(512) if "\ufffd" in asked(client, "/detokenize", tokens=[i])["content"])
    [entry] = asked(client, "/completion", **body | {"n_predict": 1, "logit_bias": [[part, 100]]})[
        "completion_probabilities"
    ]
    assert entry["id"] == part and entry["bytes"] is None
    *pieces, last = streamed(client, "/completion", **body)
    assert [entry for piece in pieces for entry in piece["completion_probabilities"]] == shown
    assert last["timings"]["predicted_n"] == 5 and last["timings"]["predicted_per_second"] > 0
    assert last["timings"]["prompt_n"] + last["timings"]["cache_n"] == whole["tokens_evaluated"]
    names = ["content", "timings/predicted_n", "nothing"]
    chosen = asked(client, "/completion", prompt="Once upon", n_predict=5, response_fields=names)
    assert chosen == {"content": whole["content"], "timings/predicted_n": 5}


def test_llama_cpps_logit_bias_is_pairs_or_an_object_and_false_is_never(client: httpx2.Client) -> None:
    body: dict[str, Any] = {"prompt": "Once upon", "n_predict": 3}
    first = asked(client, "/completion", **body)["tokens"][0]
    for bias in ([[7, 100]], [["7", 100]], {"7": 100}):
        assert asked(client, "/completion", **body, logit_bias=bias)["tokens"] == [7, 7, 7]
    for bias in ([[first, False]], {str(first): False}):
        assert first not in asked(client, "/completion", **body, logit_bias=bias)["tokens"]
    for wrong in ([["Hello", 1]], [[7, True]], [[7]], {"x": 1}, 5, [[7, 101]]):
        refused = client.post("/completion", json={**body, "logit_bias": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("logit_bias"), refused.text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_answers_have_log_probs(path: str, client: httpx2.Client) -> None:
    said = {"messages": TURNS} if path == "/api/chat" else {"prompt": "Well?", "raw": True}
    body = {"model": "model", **said, "options": {"num_predict": 4}, "logprobs": True, "top_logprobs": 2}
    whole = asked(client, path, **body, stream=False)
    assert len(whole["logprobs"]) == 4
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in whole["logprobs"])
    lines = [json.loads(line) for line in client.post(path, json=body).text.splitlines()]
    streamed = [entry for line in lines for entry in line.get("logprobs", ())]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole["logprobs"]]
    # In torch the last bits depend on how much of the prompt is cached.
    logprobs = [entry["logprob"] for entry in whole["logprobs"]]
    assert [entry["logprob"] for entry in streamed] == pytest.approx(logprobs, abs=1e-4)
    assert "logprobs" not in asked(client, path, **(body | {"logprobs": None}), stream=False)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": True}, None])
def test_a_streams_usage_comes_once_if_it_is_asked_for(
    path: str, options: dict[str, Any] | None, client: httpx2.Client
) -> None:
    body: dict[str, Any] = {"messages": TURNS} if path == CHAT else {"prompt": "Once upon"}
    chunks = streamed(client, path, **body, max_tokens=4, n=2, stream_options=options)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert ends == ["length", "length"]
    if options == {"include_usage": True}:
        assert [usage["completion_tokens"] for usage in usages] == [8] and chunks[-1]["choices"] == []
    else:
        assert not usages


def test_both_names_of_thinking_come_back() -> None:
    for name in ("reasoning", "reasoning_content"):
        body = {"messages": [*TURNS, {"role": "assistant", "content": "x", name: "hm"}, TURNS[1]]}
        (request,) = read_chat(body).requests
        assert request.messages is not None and request.messages[2].reasoning_content == "hm"


def test_vllms_token_ids_and_log_probs_of_prompts_have_its_names(client: httpx2.Client) -> None:
    ids = {"return_token_ids": True, "max_tokens": 3, "ignore_eos": True}
    for path, prompt in ((CHAT, {"messages": TURNS}), (COMPLETIONS, {"prompt": "Hello world"})):
        whole = asked(client, path, **prompt, **ids, prompt_logprobs=1)
        (choice,) = whole["choices"]
        about = choice if path == COMPLETIONS else whole  # a chat has one prompt
        assert len(choice["token_ids"]) == 3 and len(about["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
        first, *rest = about["prompt_logprobs"]
        assert first is None and len(rest) == len(about["prompt_token_ids"]) - 1
        for token_id, row in zip(about["prompt_token_ids"][1:], rest, strict=True):
            entry = row[str(token_id)]
            ranks = {value["rank"] for value in row.values()}
            assert entry["logprob"] <= 0 and 1 in ranks and len(row) <= 2
            assert entry["decoded_token"] == asked(client, "/detokenize", tokens=[token_id])["content"]
        chunks = streamed(client, path, **prompt, **ids)
        written = [token_id for chunk in chunks for each in chunk["choices"] for token_id in each.get("token_ids", [])]
        told = [each["prompt_token_ids"] for chunk in chunks for each in chunk["choices"] if "prompt_token_ids" in each]
        assert (written, told) == (choice["token_ids"], [about["prompt_token_ids"]])
    several = asked(client, COMPLETIONS, prompt=["a", "b c"], **ids)
    assert [len(each["prompt_token_ids"]) for each in several["choices"]] != [0, 0]
    assert "token_ids" not in asked(client, COMPLETIONS, prompt="a", max_tokens=1)["choices"][0]


def test_llama_cpps_apply_template_and_props_tell_about_the_model(client: httpx2.Client) -> None:
    tool = {"type": "function", "function": {"name": "look_up"}}
    for more in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "none"}):
        prompt = asked(client, "/apply-template", messages=TURNS, **more)["prompt"]
        assert prompt.endswith("<|start|>assistant\n") and TURNS[-1]["content"] in prompt
        assert ("look_up" in prompt) is ("tools" in more and "tool_choice" not in more)
        ids = asked(client, "/tokenize", content=prompt)["tokens"]
        usage = asked(client, CHAT, messages=TURNS, max_tokens=1, **more)["usage"]
        assert len(ids) == usage["prompt_tokens"]
    refused = client.post("/apply-template", json={"messages": PREFILL, "continue_final_message": True})
    assert refused.status_code == 400
    chats = [asked(client, path, messages=TURNS, max_tokens=4) for path in (CHAT, "/chat/completions")]
    assert chats[0]["choices"] == chats[1]["choices"]
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/v1/health").json()["status"] == "ready"
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] > 0 and props["total_slots"] > 0


class _Counting(ScriptedBatcher):
    """A Batcher that counts the requests that it holds."""

    def _answer(self, request: Any) -> Any:
        return {"requests_running": len(self.held)} if isinstance(request, StatsRequest) else super()._answer(request)


@pytest.mark.trio
async def test_llama_cpps_slots_tell_how_many_are_taken() -> None:
    async with served_http(batcher=_Counting()) as served, trio.open_nursery() as nursery:
        for num_taken in range(CARD.n_parallel + 1):
            slots = (await served.client.get("/slots")).json()
            assert [slot["is_processing"] for slot in slots] == [slot < num_taken for slot in range(CARD.n_parallel)]
            assert [slot["id"] for slot in slots] == [*range(CARD.n_parallel)] and slots[0]["n_ctx"] == CARD.n_ctx
            answer = await served.client.get("/slots", params={"fail_on_no_slot": 1})
            assert answer.status_code == (200 if num_taken < CARD.n_parallel else 503)
            nursery.start_soon(served.complete, f"hold {num_taken}")
            await served.batcher.arrival(f"hold {num_taken}")
        nursery.cancel_scope.cancel()
