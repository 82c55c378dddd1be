"""InferenceRequest: a request to the batch manager, an id with named tensors, and its bytes.

    request = InferenceRequest(2**64 - 1, {"input_ids": np.array([[5, 6, 7]], np.int32)})
    assert decode_inference_request(encode_inference_request(request)).request_id == request.request_id

A tensor travels as its dtype, its shape and its elements in row order, little-endian.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from genbatch.proto.codec import decode, encode
from genbatch.proto.errors import InvalidRequest, MalformedMessage
from genbatch.proto.limits import REQUEST_LIMITS, DecodeLimits

Tensor: TypeAlias = npt.NDArray[Any]

MAX_REQUEST_ID = 2**64 - 1
# Plain numbers only: object arrays would need unpickling.
DTYPES = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True, eq=False)
class InferenceRequest:
    """What the client hands to the batch manager.

    Args:
        request_id: uint64; unique among the requests in flight.
        tensors: input tensors by name.

    Raises:
        InvalidRequest: the id is no uint64, or a tensor is none that can travel.
    """

    request_id: int
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if type(self.request_id) is not int or not 0 <= self.request_id <= MAX_REQUEST_ID:
            raise InvalidRequest("request_id", f"must be an integer from 0 to 2**64 - 1, not {self.request_id!r}")
        for name, tensor in self.tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, np.ndarray):
                raise InvalidRequest(f"tensors[{name!r}]", "tensors are numpy arrays named by strings")
            if tensor.dtype.name not in DTYPES:
                raise InvalidRequest(f"tensors[{name!r}]", f"dtype {tensor.dtype} is not one of plain numbers")
            if tensor.ndim > MAX_DIMENSIONS:
                raise InvalidRequest(f"tensors[{name!r}]", f"has {tensor.ndim} dimensions, {MAX_DIMENSIONS} are taken")


def encode_inference_request(request: InferenceRequest) -> bytes:
    """The request as msgpack."""
    tensors = {name: _tensor_to_wire(tensor) for name, tensor in request.tensors.items()}
    return encode({"request_id": request.request_id, "tensors": tensors})


def decode_inference_request(data: bytes, limits: DecodeLimits = REQUEST_LIMITS) -> InferenceRequest:
    """The request in its msgpack bytes; nothing is executed and nothing unpickled.

    Raises:
        FrameTooLarge, MalformedMessage: not one well-formed message within `limits`.
        InvalidRequest: a message that is no inference request; the error names the field.
    """
    value = decode(data, limits)
    if not isinstance(value, dict) or set(value) != {"request_id", "tensors"}:
        raise MalformedMessage("not a map of request_id and tensors")
    if not isinstance(value["tensors"], dict):
        raise InvalidRequest("tensors", "must be a map")
    tensors = {name: _tensor_from_wire(f"tensors[{name!r}]", tensor) for name, tensor in value["tensors"].items()}
    return InferenceRequest(value["request_id"], tensors)


def _tensor_to_wire(tensor: Tensor) -> dict[str, object]:
    little = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<"))
    return {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "data": little.tobytes()}


def _tensor_from_wire(field: str, value: object) -> Tensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data"}:
        raise InvalidRequest(field, "must be a map of dtype, shape and data")
    name, shape, data = value["dtype"], value["shape"], value["data"]
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidRequest(f"{field}.dtype", f"{name!r} is unknown")
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"{field}.shape", f"must be at most {MAX_DIMENSIONS} sizes, not {shape!r:.100}")
    dtype = np.dtype(name).newbyteorder("<")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
        raise InvalidRequest(f"{field}.data", f"is not {math.prod(shape)} elements of {name}")
    # A copy in the machine's order: the bytes are read-only and belong to the message.
    return np.frombuffer(data, dtype).reshape(shape).astype(np.dtype(name))
