"""What a body of OpenAI's API becomes."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genbatch.actors.gateways.addresses import HTTPAddress, parse_http_address
from genbatch.actors.gateways.http.anthropic import read_message
from genbatch.actors.gateways.http.bodies import ACCEPTED, HINTS, NEUTRAL, REFUSED, Fields, HTTPRequest, renamed
from genbatch.actors.gateways.http.llama_cpp import read_llama_completion
from genbatch.actors.gateways.http.ollama import read_ollama_chat
from genbatch.actors.gateways.http.openai_request import MAX_PROMPTS, read_chat, read_completion
from genbatch.actors.gateways.http.responses import Conversations, read_response
from genbatch.actors.security.key_files import AddressError
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, Message, ResponseFormat
from genbatch.proto.validation import RequestLimits, check_types, validate_request

USER = {"role": "user", "content": "x"}


def test_the_length_of_a_completion_has_openais_default_and_drawing_is_left_to_the_model() -> None:
    (chat,) = read_chat({"messages": [USER]}).requests
    assert chat == GenerateRequest(messages=[Message(**USER)], reasoning=True)
    (completion,) = read_completion({"prompt": "x"}).requests
    assert completion == GenerateRequest(prompt="x", max_tokens=16)


def test_every_parameter_arrives_under_our_name() -> None:
    body: dict[str, Any] = {
        "prompt": [5, 6], "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "n": 2,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"7": -1.5},
        "seed": -1, "stop": "END", "stop_token_ids": [3], "min_tokens": 2, "ignore_eos": True, "logprobs": 4,
        "priority": 1, "deadline_s": 5.0, "echo": True, "user": "me", "suffix": None, "best_of": 2,
    }  # fmt: skip
    (request,) = read_completion(body).requests
    check_types(request)
    validate_request(request, RequestLimits())
    assert request.token_ids == [5, 6]
    assert (request.top_k, request.seed, request.stop, request.logit_bias) == (0, 2**64 - 1, ["END"], {7: -1.5})
    assert (request.logprobs, request.prompt_logprobs, request.echo) == (4, 4, True)
    taken = {"prompt", "top_k", "seed", "stop", "logit_bias", "logprobs", "echo", "user", "suffix", "best_of"}
    for name in body.keys() - taken:
        assert getattr(request, name) == body[name], name


@given(st.integers(-(2**63), 2**64 - 1))
def test_every_seed_that_openai_takes_is_one_of_ours(seed: int) -> None:
    (request,) = read_chat({"messages": [USER], "seed": seed}).requests
    assert request.seed is not None and 0 <= request.seed < 2**64
    assert request.seed == seed or seed < 0


OBJECTS = {"reasoning", "thinking"}  # a chat has them, and checks what is in them


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", sorted(name for name in (ACCEPTED | HINTS) - OBJECTS if name.isidentifier()))
def test_what_changes_no_answer_is_accepted_and_a_hint_is_named(name: str, strict: bool) -> None:
    reader = Fields(strict=strict)
    plain = read_chat({"messages": [USER]})
    assert read_chat({"messages": [USER], name: {"anything": ["at", "all"]}}, reader) == plain
    assert reader.ignored == ((name,) if name in HINTS else ())


@pytest.mark.parametrize("name", sorted(name for name in REFUSED if name.isidentifier()))
def test_what_cannot_be_done_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    for nothing in (None, [], "none"):
        read_chat({"messages": [USER], name: nothing})
    with pytest.raises(InvalidRequest) as caught:
        read_chat({"messages": [USER], name: {"type": "function"}})
    assert caught.value.field == name


def test_an_answer_may_be_sent_back_as_it_was_received() -> None:
    answer = {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None, "annotations": []}
    (request,) = read_chat({"messages": [USER, answer, USER]}).requests
    assert request.messages is not None and request.messages[1] == Message(role="assistant", content="y")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": 1, "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_a_message_that_is_more_than_text_is_refused(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_chat({"messages": [message]})
    assert caught.value.field == field


def test_old_and_new_name_of_the_same_limit_must_agree() -> None:
    (request,) = read_chat({"messages": [USER], "max_tokens": 5, "max_completion_tokens": 5}).requests
    assert request.max_tokens == 5
    with pytest.raises(InvalidRequest):
        read_chat({"messages": [USER], "max_tokens": 5, "max_completion_tokens": 6})


def test_a_shape_is_passed_on_and_its_faults_have_openais_names() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "A", "strict": True, "schema": schema}}
    asked = read_chat({"messages": [USER], "response_format": wanted})
    request = asked.requests[0]
    validate_request(request, RequestLimits())
    assert request.response_format is not None
    assert request.response_format.schema == schema
    incomplete = read_chat({"messages": [USER], "response_format": {"type": "json_schema"}})
    with pytest.raises(InvalidRequest) as caught:
        validate_request(incomplete.requests[0], RequestLimits())
    error = renamed(caught.value, incomplete.names)
    assert error.field == "response_format.json_schema.schema"


def test_there_are_only_so_many_prompts_in_a_body() -> None:
    assert len(read_completion({"prompt": ["x"] * MAX_PROMPTS}).requests) == MAX_PROMPTS
    with pytest.raises(InvalidRequest):
        read_completion({"prompt": ["x"] * (MAX_PROMPTS + 1)})


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        (":8000", "127.0.0.1", 8000, "http://127.0.0.1:8000"),
        ("8000", "127.0.0.1", 8000, "http://127.0.0.1:8000"),
        ("localhost:0", "127.0.0.1", 0, "http://127.0.0.1:0"),
        ("[::1]:8000", "::1", 8000, "http://[::1]:8000"),
        ("*:80", "0.0.0.0", 80, "http://0.0.0.0:80"),
        ("genbatch.example:443", "genbatch.example", 443, "http://genbatch.example:443"),
    ],
)
def test_an_address_is_a_port_with_or_without_a_host(text: str, host: str, port: int, url: str) -> None:
    address = parse_http_address(text)
    assert address == HTTPAddress(host, port)
    assert address.url(tls=False) == url


@pytest.mark.parametrize("text", ["", ":", ":x", ":65536", ":-1", "::1:80", "http://a:80", "a:80/b", ":٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        parse_http_address(text)


CHAT: dict[str, Any] = {"messages": [USER]}
MESSAGE: dict[str, Any] = {"messages": [USER], "max_tokens": 9}
INPUT: dict[str, Any] = {"input": "x"}


def read_input(body: dict[str, Any], reader: Fields | None = None) -> HTTPRequest:
    return read_response(body, Conversations(), "me", reader)


def read_ollama(body: dict[str, Any], reader: Fields | None = None) -> HTTPRequest:
    return read_ollama_chat({"model": "m", **body}, reader or Fields())


Read = Callable[[dict[str, Any], Fields | None], HTTPRequest]


@pytest.mark.parametrize(
    ("read", "body", "effort", "budget", "name"),
    [
        (read_chat, CHAT | {"reasoning_effort": "minimal"}, "minimal", None, "reasoning_effort"),
        (read_chat, CHAT | {"reasoning": {"effort": "xhigh"}}, "xhigh", None, "reasoning.effort"),
        (read_chat, CHAT | {"reasoning": {"max_tokens": 5}}, None, 5, "reasoning.max_tokens"),
        (read_chat, CHAT | {"reasoning": {"enabled": False}}, "none", None, ""),
        (read_chat, CHAT | {"thinking": {"type": "enabled", "budget_tokens": 5}}, None, 5, "thinking.budget_tokens"),
        (read_chat, CHAT | {"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "none", None, ""),
        (read_chat, CHAT | {"thinking_token_budget": 5, "thinking_budget": 5}, None, 5, "thinking_token_budget"),
        (read_chat, CHAT | {"thinking_budget": 0}, None, 0, "thinking_budget"),
        (read_chat, CHAT | {"enable_thinking": False}, "none", None, ""),
        (read_message, MESSAGE | {"thinking": {"type": "enabled", "budget_tokens": 5}}, None, 5, "thinking.type"),
        (read_message, MESSAGE | {"thinking": {"type": "adaptive"}}, None, None, "thinking.type"),
        (read_message, MESSAGE | {"output_config": {"effort": "max"}}, "max", None, "output_config.effort"),
        (read_message, MESSAGE | {"thinking": {"type": "disabled"}}, "none", None, ""),
        (read_input, INPUT | {"reasoning": {"effort": "low", "summary": "auto"}}, "low", None, "reasoning.effort"),
        (read_ollama, CHAT | {"think": "high"}, "high", None, "think"),
        (read_ollama, CHAT | {"think": False}, "none", None, ""),
        (read_ollama, CHAT | {"think": True}, None, None, "think"),
    ],
)  # fmt: skip
def test_efforts_and_budgets_have_the_names_of_their_apis(
    read: Read, body: dict[str, Any], effort: str | None, budget: int | None, name: str
) -> None:
    asked = read(body, None)
    (request,) = asked.requests
    assert (request.reasoning_effort, request.max_thinking_tokens) == (effort, budget)
    assert (name in asked.thinking) if name else not asked.thinking


def test_thinking_that_is_turned_on_without_an_effort_is_told_to_the_template() -> None:
    variables = {"enable_thinking": True, "thinking": True}
    assert read_chat(CHAT | {"enable_thinking": True}).requests[0].chat_template_kwargs == variables
    assert read_ollama(CHAT | {"think": True}).requests[0].chat_template_kwargs == variables
    own = {"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}
    assert read_chat(CHAT | own).requests[0].chat_template_kwargs == {"enable_thinking": True, "thinking": False}


def test_an_effort_that_no_api_has_is_named_and_two_budgets_are_refused() -> None:
    reader = Fields()
    assert read_chat(CHAT | {"reasoning_effort": "much"}, reader).requests[0].reasoning_effort is None
    assert reader.ignored == ("reasoning_effort",)
    with pytest.raises(InvalidRequest) as caught:
        read_chat(CHAT | {"thinking_token_budget": 5, "thinking_budget": 6})
    assert caught.value.field == "thinking_budget" and "thinking_token_budget" in str(caught.value)


def test_allowed_tools_narrow_what_is_offered_in_chats_and_responses() -> None:
    functions = [{"name": name, "parameters": {"type": "object"}} for name in ("a", "b", "c")]
    chat = CHAT | {"tools": [{"type": "function", "function": function} for function in functions]}
    named = [{"type": "function", "function": {"name": name}} for name in ("a", "c")]
    nested = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    asked = read_chat(chat | {"tool_choice": nested})
    assert [tool.name for tool in asked.requests[0].tools] == ["a", "c"] and asked.requests[0].tool_choice == "required"
    assert asked.names["tools[1]"] == "tools[2].function"
    given = INPUT | {"tools": [{"type": "function", **function} for function in functions]}
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}, {"type": "mcp"}]}
    (request,) = read_input(given | {"tool_choice": flat}).requests
    assert [tool.name for tool in request.tools] == ["b"] and request.tool_choice == "auto"
    for wrong, field in (({"mode": "some", "tools": []}, "tool_choice.mode"), ({"mode": "auto"}, "tool_choice.tools")):
        with pytest.raises(InvalidRequest) as caught:
            read_chat(chat | {"tool_choice": {"type": "allowed_tools", **wrong}})
        assert caught.value.field == field


def test_vllms_further_fields_do_what_they_say_or_are_named() -> None:
    (request,) = read_chat({"messages": [USER], "guided_choice": ["a.b", "c|d"], "no_stop_trim": True}).requests
    assert request.regex == r"(a\.b)|(c\|d)" and request.keep_stop is True
    (request,) = read_chat({"messages": [USER], "structured_outputs": {"json": {"type": "object"}}}).requests
    assert request.response_format == ResponseFormat(type="json_schema", schema={"type": "object"})
    going_on = {"messages": [USER], "continue_final_message": True, "add_generation_prompt": False}
    assert read_chat(going_on).requests[0].continue_final_message is True
    neutral = {"length_penalty": 1.0, "skip_special_tokens": True, "bad_words": [], "use_beam_search": False}
    rules = {"allowed_token_ids": [3, 5], "bad_words": ["x"], "truncate_prompt_tokens": 7, "prompt_logprobs": 2}
    asked = read_chat({"messages": [USER], **rules, "skip_special_tokens": False, "return_token_ids": True})
    (request,) = asked.requests
    assert {name: getattr(request, name) for name in rules} == rules and request.skip_special_tokens is False
    assert request.return_prompt_token_ids and asked.shows_ids and asked.scores_prompt
    assert read_chat({"messages": [USER], **neutral}).requests == read_chat({"messages": [USER]}).requests
    for field, value in {"length_penalty": 2.0, "use_beam_search": True, "stop_regex": ["x"]}.items():
        with pytest.raises(InvalidRequest) as caught:
            read_chat({"messages": [USER], field: value})
        assert caught.value.field == field


def test_a_flag_of_others_says_nothing_when_it_is_off_and_is_refused_when_it_is_on() -> None:
    flags = {name for name, neutral in NEUTRAL.items() if any(type(value) is bool for value in neutral)}
    on = {"spaces_between_special_tokens", "add_special_tokens", "stream_reasoning"}
    assert on < flags
    for name in on:
        read_chat({"messages": [USER], name: True})
    for name in flags - on:
        read_completion({"prompt": "a", name: False})
        if name != "echo":  # a completion has it
            with pytest.raises(InvalidRequest) as caught:
                read_chat({"messages": [USER], name: True})
            assert caught.value.field == name


def test_llama_cpps_and_ollamas_names_become_ours_and_their_words_for_no_limit_are_none() -> None:
    options = {"repeat_penalty": 1.5, "seed": -1, "stop": "END", "min_p": 0.25}
    ours = {"repetition_penalty": 1.5, "seed": None, "stop": ["END"], "min_p": 0.25}

    def read(body: dict[str, Any], reader: Callable[[dict[str, Any], Fields], HTTPRequest]) -> HTTPRequest:
        asked = reader(body, Fields())
        for name, value in ours.items():
            assert getattr(asked.requests[0], name) == value, name
        return asked

    for limit, most in ((-1, None), (-5, None), (0, 1), (7, 7)):
        asked = read({"prompt": "a", "n_predict": limit, **options}, read_llama_completion)
        assert asked.requests[0].max_tokens == most
    for limit, most in ((-1, None), (-2, None), (-5, -5), (7, 7)):
        body = {"model": "m", "messages": [USER], "options": {"num_predict": limit, **options}}
        asked = read(body, read_ollama_chat)
        assert asked.requests[0].max_tokens == most
        assert (asked.names["max_tokens"], asked.names["repetition_penalty"]) == (
            "options.num_predict",
            "options.repeat_penalty",
        )
