"""Which requests are taken: every range, at its edges, and the path of the fault."""

import gc
import math
import tracemalloc
from typing import Any

import msgspec
import pytest

from genbatch.actors.gateways.dispatcher import held_bytes
from genbatch.proto.codec import REQUEST_LIMITS, decode, encode
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, Message, Payer, Scores, Usage, ranking_of
from genbatch.proto.validation import RequestLimits, check_type, check_types, validate_request

LIMITS = RequestLimits()


def _validate_made(request: GenerateRequest) -> None:
    """As the Batcher validates what the program that runs it has made."""
    check_types(request)
    validate_request(request, LIMITS)


def fault_of(**fields: Any) -> str | None:
    """The field at fault of a request with a prompt and these fields, or None if it is taken."""
    if not fields.keys() & {"token_ids", "messages"}:
        fields = {"prompt": "x"} | fields
    with pytest.raises(InvalidRequest) as info:
        _validate_made(GenerateRequest(**fields))
    assert info.value.code == "invalid_request"
    return info.value.field


def test_a_plain_request_and_every_parameter_at_the_edge_of_its_range_are_taken() -> None:
    validate_request(GenerateRequest(prompt="x"), LIMITS)
    validate_request(GenerateRequest(token_ids=[0]), LIMITS)
    validate_request(GenerateRequest(messages=[Message(role="user", content="")]), LIMITS)
    low = GenerateRequest(
        prompt="x", max_tokens=1, temperature=0, top_k=0, top_p=1e-9, min_p=0, repetition_penalty=1e-9,
        presence_penalty=-2, frequency_penalty=-2, logit_bias={0: -100}, seed=0, min_tokens=0, logprobs=0,
        prompt_logprobs=0, n=1, priority=-100, deadline_s=1e-9,
    )  # fmt: skip
    high = GenerateRequest(
        prompt="x", max_tokens=2**31 - 1, temperature=1e300, top_k=2**31 - 1, top_p=1, min_p=1, repetition_penalty=1e9,
        presence_penalty=2, frequency_penalty=2, logit_bias={7: 100}, seed=2**64 - 1, min_tokens=2**31 - 1,
        stop=["x" * LIMITS.max_stop_length] * LIMITS.max_stop, logprobs=LIMITS.max_logprobs, n=LIMITS.max_n,
        priority=100, deadline_s=LIMITS.max_deadline_s, tenant="t" * 128,
    )  # fmt: skip
    validate_request(low, LIMITS)
    validate_request(high, LIMITS)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt", ["", "a\ud800", 5, None]),
        ("token_ids", [[], 5, "ab"]),
        ("messages", [[], "ab"]),
        ("max_tokens", [0, -1, 2**31, 10**40, 1.5, True, "1"]),
        ("min_tokens", [-1, 2**31, 1.5, True, "1"]),
        ("temperature", [-0.1, math.nan, math.inf, -math.inf, True, "hot", 10**400]),
        ("top_k", [-1, 2**31, 1.0]),
        ("top_p", [-0.5, 1.0001, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0, -1, 1e-10, 1.1e9, math.nan, math.inf]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("logit_bias", [{"a": 1.0}, [1], dict.fromkeys(range(LIMITS.max_logit_bias + 1), 0.0)]),
        ("seed", [-1, 2**64, 0.5, True]),
        ("stop", ["ab", ["x"] * (LIMITS.max_stop + 1)]),
        ("stop_token_ids", [5, [1] * (LIMITS.max_stop + 1)]),
        ("min_tokens", [-1, 2**31]),
        ("ignore_eos", [1, "yes", None]),
        ("logprobs", [-1, LIMITS.max_logprobs + 1, True]),
        ("prompt_logprobs", [-1, LIMITS.max_logprobs + 1]),
        ("echo", [0]),
        ("n", [0, -1, LIMITS.max_n + 1, True]),
        ("priority", [-101, 101]),
        ("deadline_s", [0, -1, math.nan, math.inf, LIMITS.max_deadline_s + 1]),
        ("tenant", ["t" * 129, "\udfff", None]),
        ("payer", ["a", 5]),
    ],
)
def test_a_value_out_of_range_or_of_the_wrong_type_is_refused_by_its_name(field: str, values: list[Any]) -> None:
    for value in values:
        assert fault_of(**{field: value}) == field, value


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"token_ids": [1, -1]}, "token_ids[1]"),
        ({"payer": {"served": 1.0}}, "payer.name"),
        ({"payer": Payer(name="a" * 257)}, "payer.name"),
        ({"payer": Payer(name="a", served=-1.0)}, "payer.served"),
        ({"payer": Payer(name="a", served=math.nan)}, "payer.served"),
        ({"token_ids": [1, 2, "3"]}, "token_ids[2]"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": 1, "content": "a"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "nick": "b"}]}, "messages[0].nick"),
        ({"messages": [Message(role="", content="a")]}, "messages[0].role"),
        ({"messages": [Message(role="r" * 129, content="a")]}, "messages[0].role"),
        ({"messages": [Message(role="user", content="\ud800")]}, "messages[0].content"),
        ({"stop": ["ok", ""]}, "stop[1]"),
        ({"stop": ["x" * 257]}, "stop[0]"),
        ({"stop": ["\ud800"]}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids[1]"),
        ({"logit_bias": {3: math.nan}}, "logit_bias[3]"),
        ({"logit_bias": {3: 101}}, "logit_bias[3]"),
        ({"logit_bias": {-3: 1}}, "logit_bias[-3]"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ],
)
def test_a_fault_inside_a_list_is_named_by_its_path(fields: dict[str, Any], path: str) -> None:
    assert fault_of(**fields) == path


@pytest.mark.parametrize(
    "given", [{}, {"prompt": "x", "token_ids": [1]}, {"prompt": "x", "messages": [], "token_ids": []}]
)
def test_a_request_has_exactly_one_prompt(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="exactly one") as info:
        _validate_made(GenerateRequest(**given))
    assert info.value.field == "prompt"


def test_the_operator_sets_the_caps() -> None:
    limits = RequestLimits(max_n=1, max_logprobs=0, max_stop=0, max_messages=1, max_logit_bias=0, max_deadline_s=5.0)
    message = Message(role="user", content="a")
    for fields in ({"n": 2}, {"logprobs": 1}, {"stop": ["a"]}, {"logit_bias": {1: 1.0}}, {"deadline_s": 6.0}):
        with pytest.raises(InvalidRequest) as info:
            validate_request(GenerateRequest(prompt="x", **fields), limits)
        assert info.value.field in fields
    with pytest.raises(InvalidRequest, match="messages"):
        validate_request(GenerateRequest(messages=[message, message]), limits)


def test_every_field_of_a_request_is_documented_and_has_a_default() -> None:
    for field in msgspec.structs.fields(GenerateRequest):
        assert f"        {field.name}: " in (GenerateRequest.__doc__ or ""), field.name
        assert not field.required


SCHEMA = {"type": "object", "properties": {f"name{i}": {"type": "string", "enum": ["ab", "cd"]} for i in range(40)}}


@pytest.mark.parametrize(
    "params",
    [
        {"prompt": "x" * 2**19},
        {"prompt": "é" * 2**18},
        {"prompt": "世" * 2**17},
        {"prompt": "😀" + "x" * 2**19},
        {"token_ids": list(range(40_000, 140_000))},
        {"prompt": "x", "logit_bias": {number: 0.5 * number for number in range(300, 1300)}},
        {"messages": [{"role": "user", "content": f"Number {number}"} for number in range(1000)]},
        {"messages": [], "tools": [{"name": f"tool{number}", "parameters": SCHEMA} for number in range(40)]},
    ],
    ids=["ASCII", "Latin", "Chinese", "one emoji", "token ids", "bias", "messages", "tools"],
)
def test_what_a_request_holds_is_counted_in_full(params: dict[str, Any]) -> None:
    """As the gateway holds it: as plain data and as a request, after it was sent to the engine."""
    message = encode(params)
    tracemalloc.start()
    try:
        plain = decode(message, REQUEST_LIMITS)
        request = check_type(plain, GenerateRequest)
        counted = held_bytes(request)
        encode(request)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= counted + 4096 and counted < 3 * held


def test_a_ranking_keeps_the_order_of_equal_scores() -> None:
    scores = Scores(scores=[[0.5], [0.75], [0.5]], usage=Usage(prompt_tokens=1, completion_tokens=0))
    assert [one.index for one in ranking_of(scores).results] == [1, 0, 2]
    assert [one.score for one in ranking_of(scores, 2).results] == [0.75, 0.5]
