"""InferenceRequest: what goes in comes out; the tensors of a response: exact shapes, and numbers that agree."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from genbatch.clients.gpt_manager.requests import (
    DTYPES,
    InferenceRequest,
    decode_inference_request,
    encode_inference_request,
    last_response,
)
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.codec import DecodeLimits
from genbatch.proto.errors import FrameTooLarge, GenbatchError, InvalidRequest, MalformedMessage
from tests.clients.gpt_manager.batch_client import BatchClient, inference_request, manager

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


TinyModel = Callable[[str], Model]
OracleOf = Callable[[str], Any]

VOCAB = 320


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


def respond(model: Model, prompt: list[int], length: int, *, beams: int = 1, **build: Any) -> Any:
    client = BatchClient(inference_request(1, prompt, length, end_id=-1, pad_id=7, beam_width=beams))
    with manager(model, client, max_beam_width=3, **build):
        client.wait(1)
    [response] = client.responses[1]
    assert response.error == ""
    return response.tensors


@pytest.mark.parametrize("beams", [1, 3])
def test_b25_to_b30_the_shapes_are_the_documented_ones(tiny_model: TinyModel, beams: int) -> None:
    prompt = prompt_of(11, 1)
    tensors = respond(
        tiny_model("llama"),
        prompt,
        6,
        beams=beams,
        gather_all_token_logits=True,
        max_input_len=20,
        max_output_len=30,
    )
    assert [tensor.shape for tensor in tensors] == [
        (1, beams, 50),
        (1, 1),
        (1, 11, VOCAB),
        (1, beams, 6, VOCAB),
        (1, beams, 6),
        (1, beams),
    ]
    assert all(isinstance(tensor, np.ndarray) for tensor in tensors)
    assert tensors.sequence_length[0, 0] == 11 + 6
    assert (tensors.output_ids[:, :, :11] == prompt).all()
    assert (tensors.output_ids[:, :, 17:] == 7).all()


@pytest.mark.parametrize("beams", [1, 3])
def test_b28_b29_b30_log_probs_are_those_of_the_logits_and_add_up(tiny_model: TinyModel, beams: int) -> None:
    tensors = respond(tiny_model("llama"), prompt_of(5, 2), 9, beams=beams, gather_generation_logits=True)
    scores = torch.log_softmax(torch.from_numpy(tensors.generation_logits), dim=-1)  # [1, beams, 9, V]
    ids = torch.from_numpy(tensors.output_ids[:, :, 5:14]).long()
    chosen = scores.gather(-1, ids[..., None])[..., 0].numpy()
    np.testing.assert_allclose(tensors.log_probs, chosen, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(tensors.cum_log_probs, tensors.log_probs.sum(axis=-1), rtol=1e-5)
    assert (np.diff(tensors.cum_log_probs[0]) <= 0).all(), "the best beam is the first"


@pytest.mark.parametrize("max_num_tokens", [8, 64])
def test_b27_context_logits_are_those_of_a_plain_forward(
    tiny_model: TinyModel, oracle: OracleOf, max_num_tokens: int
) -> None:
    prompt = prompt_of(21, 3)
    tensors = respond(tiny_model("llama"), prompt, 2, gather_context_logits=True, max_num_tokens=max_num_tokens)
    scores = torch.log_softmax(torch.from_numpy(tensors.context_logits[0]), dim=-1)
    torch.testing.assert_close(scores, oracle("llama").log_probs(prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("build", "context", "generation"),
    [
        ({}, (1, 1, 1), (1, 1, 1, 1)),
        ({"gather_context_logits": True}, (1, 4, VOCAB), (1, 1, 1, 1)),
        ({"gather_generation_logits": True}, (1, 1, 1), (1, 1, 3, VOCAB)),
        ({"gather_all_token_logits": True}, (1, 4, VOCAB), (1, 1, 3, VOCAB)),
    ],
)
def test_b31_each_gather_option_toggles_its_tensor(
    tiny_model: TinyModel, build: dict[str, bool], context: tuple[int, ...], generation: tuple[int, ...]
) -> None:
    tensors = respond(tiny_model("llama"), prompt_of(4, 4), 3, **build)
    assert tensors.context_logits.shape == context
    assert tensors.generation_logits.shape == generation


def test_b27_logits_are_complete_when_the_request_was_paused_and_its_prompt_reused(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    prompts = {i: prompt_of(9, 1) for i in range(4)}
    client = BatchClient(*(inference_request(i, prompt, 30, end_id=-1) for i, prompt in prompts.items()))
    cache = {"maxTokens": 64, "enableBlockReuse": True}
    with manager(tiny_model("llama"), client, cache=cache, gather_all_token_logits=True):
        client.wait(*prompts)
    for i, prompt in prompts.items():
        [response] = client.responses[i]
        tokens = prompt + client.output(i, prompt)
        logits = np.concatenate([response.tensors.context_logits[0, :-1], response.tensors.generation_logits[0, 0]])
        scores = torch.log_softmax(torch.from_numpy(logits), dim=-1)
        torch.testing.assert_close(scores, oracle("llama").log_probs(tokens)[:-1], atol=2e-4, rtol=1e-4)


def test_b26_a_streamed_request_has_its_logits_token_by_token(tiny_model: TinyModel) -> None:
    prompt = prompt_of(6, 5)
    client = BatchClient(
        inference_request(1, prompt, 5, end_id=-1), inference_request(2, prompt, 5, end_id=-1, streaming=True)
    )
    with manager(tiny_model("llama"), client, gather_all_token_logits=True):
        client.wait(1, 2)
    whole, parts = client.responses[1][0].tensors, [one.tensors for one in client.responses[2]]
    assert [part.generation_logits.shape for part in parts] == [(1, 1, 1, VOCAB)] * 5
    joined = np.concatenate([part.generation_logits for part in parts], axis=2)
    np.testing.assert_allclose(joined, whole.generation_logits, atol=1e-5)
    np.testing.assert_allclose(parts[0].context_logits, whole.context_logits, atol=1e-5)
    assert parts[1].context_logits.shape == (1, 1, 1)


def test_the_end_of_a_stopped_stream_brings_no_token() -> None:
    request: Any = SimpleNamespace(prompt=[1, 2, 3], num_sent=2, cum_logprob=np.float32(-0.5))
    tensors = last_response(request)
    assert [tensor.shape for tensor in tensors] == [(1, 1, 0), (1, 1), (1, 1, 1), (1, 1, 1, 1), (1, 1, 0), (1, 1)]
    assert tensors.sequence_length == 5 and tensors.cum_log_probs == np.float32(-0.5)
