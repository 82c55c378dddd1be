"""Errors cross the wire as the classes they left as."""

import msgspec
import pytest

from genbatch.proto import errors
from genbatch.proto.errors import CLASSES, EngineLost, ErrorInfo, GenbatchError, InvalidRequest, QueueFull, from_wire


def test_every_error_class_is_in_the_table_under_its_own_code() -> None:
    classes = {
        found
        for found in vars(errors).values()
        if isinstance(found, type) and issubclass(found, GenbatchError) and found is not GenbatchError
    }
    assert set(CLASSES.values()) == classes
    assert all(found.code == code for code, found in CLASSES.items())
    assert len({found.code for found in classes}) == len(classes)


@pytest.mark.parametrize("code", sorted(CLASSES))
def test_an_error_arrives_as_the_class_it_left_as(code: str) -> None:
    error = from_wire(ErrorInfo(code=code, message="why", field="stop[0]", retry_after_ms=7))
    again = from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_wire()), type=ErrorInfo))
    assert type(again) is CLASSES[code]
    assert (again.code, again.message, again.field, again.retry_after_ms) == (code, "why", "stop[0]", 7)
    assert str(again) == "stop[0]: why"


def test_a_lost_engine_tells_how_many_tokens_had_come() -> None:
    again = from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(EngineLost("died", 7).to_wire()), type=ErrorInfo))
    assert isinstance(again, EngineLost)
    assert again.tokens_delivered == 7


def test_an_unknown_code_is_kept() -> None:
    error = from_wire(ErrorInfo(code="from_the_future", message="why"))
    assert type(error) is GenbatchError
    assert error.to_wire() == ErrorInfo(code="from_the_future", message="why")
    assert GenbatchError("x").code != "from_the_future"


def test_absent_fields_are_absent_on_the_wire() -> None:
    assert msgspec.to_builtins(InvalidRequest("n", "too many").to_wire()) == {
        "code": "invalid_request",
        "message": "too many",
        "field": "n",
    }
    assert msgspec.to_builtins(QueueFull("full", retry_after_ms=40).to_wire()) == {
        "code": "queue_full",
        "message": "full",
        "retry_after_ms": 40,
    }
