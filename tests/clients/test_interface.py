"""What callers write, as the request it becomes."""

from typing import Any

import msgspec
import pytest

from genbatch.clients import remote
from genbatch.clients.interface import GenerateParams, build_request
from genbatch.clients.remote import Retry
from genbatch.clients.transports import ConnectionLost
from genbatch.proto.errors import InvalidRequest, QueueFull
from genbatch.proto.messages import GenerateRequest, Message


def generate_request(prompt: Any = None, *, messages: Any = None, **params: Any) -> GenerateRequest:
    return build_request(prompt, messages, params)  # type: ignore[arg-type]


def test_a_string_is_a_prompt_and_a_sequence_of_ints_is_token_ids() -> None:
    assert generate_request("a", seed=5) == GenerateRequest(prompt="a", seed=5)
    assert generate_request((1, 2)) == GenerateRequest(token_ids=[1, 2])
    assert generate_request(range(3)) == GenerateRequest(token_ids=[0, 1, 2])


def test_messages_are_objects_or_dicts() -> None:
    hello = Message(role="user", content="hello")
    assert generate_request(messages=[hello, {"role": "user", "content": "hello"}]).messages == [hello, hello]


def test_sequences_of_any_kind_do_for_lists() -> None:
    request = generate_request("a", stop=("x", "y"), stop_token_ids=(1, 2), logit_bias={3: 1})
    assert (request.stop, request.stop_token_ids, request.logit_bias) == (["x", "y"], [1, 2], {3: 1.0})
    assert generate_request("a", stop="x").stop == ["x"]


@pytest.mark.parametrize(
    ("prompt", "messages", "params", "field"),
    [
        (5, None, {}, "prompt"),
        (b"bytes", None, {}, "prompt"),
        ([1, "2"], None, {}, "token_ids[1]"),
        ("a", "hello", {}, "messages"),
        ("a", {"role": "user", "content": "x"}, {}, "messages"),
        (None, [{"role": "user"}], {}, "messages[0].content"),
        (None, [5], {}, "messages[0]"),
        ("a", None, {"max_tokens": 1.5}, "max_tokens"),
        ("a", None, {"prompt_logprob": 1}, "prompt_logprob"),
    ],
)
def test_a_mistake_is_named_by_its_path(prompt: Any, messages: Any, params: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as info:
        build_request(prompt, messages, params)
    assert info.value.field == field


def test_every_parameter_of_a_request_can_be_given() -> None:
    names = {field.name for field in msgspec.structs.fields(GenerateRequest)}
    assert set(GenerateParams.__annotations__) == names - {
        "prompt",
        "token_ids",
        "messages",
        "payer",
    }  # a fleet's gateway pays


def test_each_try_waits_longer_than_was_said_and_than_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.random, "random", lambda: 0.5)
    waited: list[float] = []

    def refuse(error: Exception) -> None:
        attempts = Retry(max_attempts=4).sync_attempts(repeats=False)
        attempts.sleep = waited.append
        for attempt in attempts:
            with attempt:
                raise error

    with pytest.raises(QueueFull):
        refuse(QueueFull("full", retry_after_ms=200))
    assert waited == pytest.approx([0.2 * remote.GROWTH**index * (1 + remote.JITTER / 2) for index in range(3)])
    for error in (QueueFull("full"), ConnectionLost("ipc://a"), ValueError()):
        with pytest.raises(type(error)):
            refuse(error)
    assert len(waited) == 3


def test_a_retry_is_logged_and_standard_output_belongs_to_the_program(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for attempt in Retry().sync_attempts():
        with attempt:
            if attempt.retry_state.attempt_number == 1:
                raise QueueFull("the queue is full", retry_after_ms=1)
    assert [(line.name, line.levelname) for line in caplog.records] == [("genbatch", "WARNING")]
    assert caplog.messages[0].endswith("s: the queue is full")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("asked", [0.5, 5.0])
def test_a_request_that_is_sent_again_has_the_time_that_is_left(asked: float) -> None:
    now = 100.0
    deadline = remote.Deadline(GenerateRequest(prompt="a", deadline_s=asked), lambda: now)
    assert deadline.remaining_request().deadline_s == asked
    now += asked / 2
    assert deadline.remaining_request().deadline_s == asked / 2
    now += asked
    assert deadline.remaining_request().deadline_s == 0.001


@pytest.mark.parametrize("asked", [0.0, -1.0])
def test_a_deadline_that_makes_no_sense_is_for_the_service_to_refuse(asked: float) -> None:
    request = GenerateRequest(prompt="a", deadline_s=asked)
    assert remote.Deadline(request, lambda: 100.0).remaining_request() is request
