"""GptRequest: an InferenceRequest on its way through the batch manager, and how its tensors are read.

Input tensors, TensorRT-LLM's names; all but `input_ids` and `request_output_len` may be left out, and a scalar may
have any shape with one element:

    input_ids             token ids of the prompt
    request_output_len    most tokens to generate
    beam_width            1
    end_id, pad_id        the model's; a negative end_id lets nothing but the length end the output
    temperature, runtime_top_k, runtime_top_p, random_seed     greedy unless one of the first three is given
    repetition_penalty, presence_penalty, frequency_penalty, min_length
    streaming             false
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from genbatch.actors.batch_manager.gpt_engine import GptEngine
from genbatch.actors.batching.batcher_messages import Generate
from genbatch.actors.batching.keep import Keep
from genbatch.proto.errors import InvalidRequest, PromptTooLong
from genbatch.proto.inference_request import InferenceRequest, Tensor
from genbatch.proto.messages import GenerateRequest, Result, Token

# Per tensor of one number: the parameter it becomes, and its type.
SCALARS: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "temperature": ("temperature", float),
    "runtime_top_k": ("top_k", int),
    "runtime_top_p": ("top_p", float),
    "random_seed": ("seed", int),
    "repetition_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "min_length": ("min_tokens", int),
}
OTHERS = frozenset(["input_ids", "request_output_len", "beam_width", "end_id", "pad_id", "streaming"])
DRAWS = ("temperature", "top_k", "top_p")


@dataclass(slots=True, eq=False)
class GptRequest:
    """One request from its arrival to its final response.

    Args:
        request_id: the client's.
        message: what the Batcher is sent; its tag is this request's own, as ids may come twice.
        micro_batch: which of the two it belongs to; 0 without overlap.
        tokens: a stream's tokens that no response held yet.
        num_sent: tokens that responses held.
        cum_logprob: of the tokens sent, float32.
        result, error: how it ended; at most one of them is set.
        fault: why it is being stopped before its end; its final response says so.
    """

    request_id: int
    message: Generate
    pad_id: int
    streaming: bool
    micro_batch: int = 0
    tokens: list[tuple[Token, Any]] = field(default_factory=list)
    num_sent: int = 0
    cum_logprob: np.float32 = field(default_factory=lambda: np.float32(0))
    result: Result | None = None
    error: Exception | None = None
    fault: str | None = None

    @property
    def prompt(self) -> list[int]:
        """Its input ids."""
        assert self.message.request.token_ids is not None
        return self.message.request.token_ids


def read_request(request: InferenceRequest, engine: GptEngine) -> GptRequest:
    """Reads the tensors and checks them against the engine's limits.

    Raises:
        InvalidRequest: a tensor is missing, unknown, malformed or out of its range; `field` names it.
        PromptTooLong: more input ids than the engine takes.
    """
    tensors = request.tensors
    for name in tensors:
        if name not in OTHERS and name not in SCALARS:
            raise InvalidRequest(name, "there is no such input tensor")
    prompt = _prompt(tensors, engine)
    beam_width = _integer(tensors, "beam_width", 1)
    if not 1 <= beam_width <= engine.max_beam_width:
        raise InvalidRequest("beam_width", f"must be at least 1 and at most {engine.max_beam_width}, not {beam_width}")
    streaming = bool(_scalar(tensors, "streaming", False))
    if streaming and beam_width > 1:
        raise InvalidRequest("streaming", "which beam is the best shows at the end: beams cannot be streamed")
    model = engine.engine.model
    end_ids = sorted(model.eos_token_ids)
    parameters: dict[str, Any] = {}
    if "end_id" in tensors:
        end_id = _integer(tensors, "end_id", 0)
        end_ids = [end_id] if end_id >= 0 else []
        parameters |= {"ignore_eos": True, "stop_token_ids": end_ids}
    for name, (ours, kind) in SCALARS.items():
        if name in tensors:
            parameters[ours] = _number(tensors, name, kind)
    if any(name in parameters for name in DRAWS):
        parameters.setdefault("temperature", 1.0)
    tag = object()
    keep = Keep(context=engine.build.context_logits, generation=engine.build.generation_logits)
    return GptRequest(
        request.request_id,
        Generate(
            GenerateRequest(
                token_ids=prompt, max_tokens=_output_len(tensors, len(prompt), engine), logprobs=0, **parameters
            ),
            tag=tag,
            beam_width=beam_width,
            keep=keep,
            client="batch-manager",
        ),
        pad_id=_integer(tensors, "pad_id", end_ids[0] if end_ids else 0),
        streaming=streaming,
    )


def _prompt(tensors: Mapping[str, Tensor], engine: GptEngine) -> list[int]:
    ids = tensors.get("input_ids")
    if ids is None:
        raise InvalidRequest("input_ids", "is missing")
    if ids.dtype.kind not in "iu" or ids.size != max(ids.shape, default=0) or not ids.size:
        raise InvalidRequest("input_ids", f"must be one row of token ids, not {ids.dtype} of shape {ids.shape}")
    if ids.size > engine.max_input_len:
        raise PromptTooLong(f"{ids.size} tokens are more than max_input_len, {engine.max_input_len}", field="input_ids")
    prompt: list[int] = ids.reshape(-1).tolist()
    return prompt


def _output_len(tensors: Mapping[str, Tensor], num_prompt: int, engine: GptEngine) -> int:
    if "request_output_len" not in tensors:
        raise InvalidRequest("request_output_len", "is missing")
    wanted = _integer(tensors, "request_output_len", 0)
    if not 1 <= wanted <= engine.max_output_len:
        raise InvalidRequest(
            "request_output_len",
            f"must be at least 1 and at most max_output_len, {engine.max_output_len}, not {wanted}",
        )
    if num_prompt + wanted > engine.max_seq_len:
        raise InvalidRequest("request_output_len", f"{wanted} after {num_prompt} exceed {engine.max_seq_len} positions")
    return wanted


def _scalar(tensors: Mapping[str, Tensor], name: str, default: bool | int | float) -> bool | int | float:
    tensor = tensors.get(name)
    if tensor is None:
        return default
    if tensor.size != 1:
        raise InvalidRequest(name, f"must hold one element, not {tensor.size}")
    value: bool | int | float = tensor.reshape(-1)[0].item()
    return value


def _number(tensors: Mapping[str, Tensor], name: str, kind: type[int] | type[float]) -> int | float:
    return _integer(tensors, name, 0) if kind is int else float(_scalar(tensors, name, 0.0))


def _integer(tensors: Mapping[str, Tensor], name: str, default: int) -> int:
    value = _scalar(tensors, name, default)
    if type(value) is not int:
        raise InvalidRequest(name, f"must be an integer, not {value!r}")
    return value
