"""InferenceRequest: what goes in comes out, and bytes that are none are refused by name."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from genbatch.proto.errors import FrameTooLarge, GenbatchError, InvalidRequest, MalformedMessage
from genbatch.proto.inference_request import (
    DTYPES,
    InferenceRequest,
    decode_inference_request,
    encode_inference_request,
)
from genbatch.proto.limits import DecodeLimits

TENSORS = arrays.arrays(
    dtype=st.sampled_from(sorted(DTYPES)).map(np.dtype),
    shape=arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


@given(st.integers(0, 2**64 - 1), st.dictionaries(st.text(max_size=8), TENSORS, max_size=4))
def test_b02_ids_and_tensors_survive_the_wire(request_id: int, tensors: dict[str, Any]) -> None:
    decoded = decode_inference_request(encode_inference_request(InferenceRequest(request_id, tensors)))
    assert decoded.request_id == request_id
    assert list(decoded.tensors) == list(tensors)
    for name, tensor in tensors.items():
        got = decoded.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert got.tobytes() == tensor.tobytes()
        assert got.flags.writeable


def test_b02_the_largest_id_and_strided_or_big_endian_tensors_survive() -> None:
    ids = np.arange(24, dtype=np.int32).reshape(4, 6)
    tensors = {"turned": ids.T, "every_other": ids[::2, ::3], "big": ids.astype(">i4")}
    decoded = decode_inference_request(encode_inference_request(InferenceRequest(2**64 - 1, tensors)))
    assert decoded.request_id == 2**64 - 1
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(decoded.tensors[name], tensor)


@pytest.mark.parametrize("request_id", [-1, 2**64, 1.0, True, "7", None])
def test_b02_an_id_that_is_no_uint64_is_refused(request_id: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        InferenceRequest(request_id, {})
    assert caught.value.field == "request_id"


@pytest.mark.parametrize("tensor", [np.array([object()]), np.array(["text"]), [1, 2], np.zeros((1,) * 9)])
def test_b02_tensors_are_plain_numbers(tensor: Any) -> None:
    with pytest.raises(InvalidRequest, match="tensors"):
        InferenceRequest(1, {"bad": tensor})


GOOD = {"dtype": "int32", "shape": [2], "data": bytes(8)}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"request_id": 1}, None),
        ({"request_id": 1, "tensors": {}, "more": 1}, None),
        ({"request_id": 1, "tensors": []}, "tensors"),
        ({"request_id": -1, "tensors": {}}, "request_id"),
        ({"request_id": 1, "tensors": {"a": 3}}, "tensors['a']"),
        ({"request_id": 1, "tensors": {"a": GOOD | {"dtype": "object"}}}, "tensors['a'].dtype"),
        ({"request_id": 1, "tensors": {"a": GOOD | {"shape": [-2]}}}, "tensors['a'].shape"),
        ({"request_id": 1, "tensors": {"a": GOOD | {"shape": [2**62, 2**62]}}}, "tensors['a'].data"),
        ({"request_id": 1, "tensors": {"a": GOOD | {"data": bytes(7)}}}, "tensors['a'].data"),
        ({"request_id": 1, "tensors": {7: GOOD}}, "tensors[7]"),
    ],
)
def test_b02_bytes_that_are_no_request_are_refused_by_name(value: object, field: str | None) -> None:
    with pytest.raises((InvalidRequest, MalformedMessage)) as caught:
        decode_inference_request(msgpack.packb(value))
    assert caught.value.field == field


@given(st.binary(max_size=64))
def test_b02_any_bytes_are_a_request_or_a_typed_error(data: bytes) -> None:
    try:
        decode_inference_request(data)
    except GenbatchError:
        return


def test_b02_more_bytes_than_allowed_are_refused() -> None:
    data = encode_inference_request(InferenceRequest(1, {"input_ids": np.zeros(100, np.int64)}))
    with pytest.raises(FrameTooLarge):
        decode_inference_request(data, DecodeLimits(max_bytes=200, max_array_length=10, max_map_length=10))
