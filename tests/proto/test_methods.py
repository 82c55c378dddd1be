"""The table of methods."""

import pytest

from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, TokenizeRequest
from genbatch.proto.methods import METHODS, Lane, method_of
from genbatch.proto.service_messages import HealthRequest, ModelsRequest, StatsRequest
from genbatch.proto.validation import check_type


def test_a_request_names_its_method() -> None:
    assert method_of(TokenizeRequest(prompt="a")) is METHODS["tokenize"]
    assert method_of(GenerateRequest(prompt="a")) is METHODS["generate"], "a stream is asked for by its name"
    assert method_of({}) is None


@pytest.mark.parametrize("request_type", [ModelsRequest, HealthRequest, StatsRequest])
def test_a_method_without_parameters_refuses_each_by_name(request_type: type) -> None:
    check_type({}, request_type)
    with pytest.raises(InvalidRequest) as info:
        check_type({"verbose": 1}, request_type)
    assert info.value.field == "verbose"


def test_the_engine_link_carries_what_has_one_answer() -> None:
    crossing = {name for name, method in METHODS.items() if method.crosses}
    assert crossing == {
        "tokenize", "detokenize", "keep_session", "resume_session", "models", "health", "stats", "load_model",
        "load_adapter", "unload_adapter", "drain",
    }  # fmt: skip
    assert all(method.lane is Lane.WORK for method in METHODS.values() if method.streams)
