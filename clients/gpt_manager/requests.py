"""Requests and responses of the batch manager: an id with named tensors.

    request = InferenceRequest(2**64 - 1, {"input_ids": np.array([[5, 6, 7]], np.int32)})
    assert decode_inference_request(encode_inference_request(request)).request_id == request.request_id

The wire has a tensor's dtype, its shape, and its elements in row order, little-endian. A GptRequest is an
InferenceRequest inside the batch manager. ResponseTensors are the answer: CPU tensors of the documented shapes.

The input tensors have TensorRT-LLM's names. All but `input_ids` and `request_output_len` are optional. A scalar may
have any shape with one element:

    input_ids             token ids of the prompt
    request_output_len    most tokens to generate
    beam_width            1
    end_id, pad_id        the model's; with a negative end_id only the length ends the output
    temperature, runtime_top_k, runtime_top_p, random_seed     greedy unless one of the first three is given
    repetition_penalty, presence_penalty, frequency_penalty, min_length
    streaming             false

The options of a GptManager come first, with their translation into our options. They have TensorRT-LLM's names in
snake case; `named` takes camel case, too.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from genbatch.actors.batcher.messages import Generate, Keep
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.nif.context.engine import Engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.runner import LayerGroup
from genbatch.nif.sampling.sampler import FILE_SAMPLING, SamplingParams
from genbatch.proto.codec import REQUEST_LIMITS, DecodeLimits, decode, encode
from genbatch.proto.errors import InvalidRequest, MalformedMessage, PromptTooLong
from genbatch.proto.messages import GenerateRequest, Result, Token

TrtGptModelType = BatchingType


class _Named:
    """Options that camel case names, too."""

    @classmethod
    def named(cls, **options: Any) -> Self:
        """Return the options; each name is in snake case or in camel case.

        Raises:
            OptionError: there is no such parameter, it is given twice, or its value is out of range.
        """
        known = {each.name for each in fields(cls)}  # type: ignore[arg-type]
        chosen: dict[str, Any] = {}
        for name, value in options.items():
            ours = re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name)
            if ours not in known:
                raise OptionError(name, f"{cls.__name__} has no such parameter")
            if ours in chosen:
                raise OptionError(name, f"given twice, as {ours} too")
            chosen[ours] = value
        return cls(**chosen)


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig(_Named):
    """The size and the use of the KV cache.

    Args:
        max_tokens: most positions of all requests together; without it the memory sets the limit.
        max_attention_window: positions that a token attends to, its own included; None means all earlier positions.
        sink_token_length: first positions that a token attends to beside its window, as StreamingLLM's sinks; None
            means 0. Positions stay those of the text (ADR 31). On a GPU, sinks need torch's attention.
        free_gpu_memory_fraction: the cache and a step may take this share of the memory that is free after the model
            was loaded (on a CPU, of the host's memory). With max_tokens the smaller limit counts.
        enable_block_reuse: whether a request reuses KV blocks of earlier requests with the same content.

    Raises:
        OptionError: a value is out of range, or two options contradict each other.
    """

    max_tokens: int | None = None
    max_attention_window: int | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("max_attention_window", 1), ("sink_token_length", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(name, f"must be at least {least}, not {value}")
        if self.sink_token_length and self.max_attention_window is None:
            raise OptionError(
                "sink_token_length", "needs max_attention_window: without a window, every position stays visible"
            )
        if not 0 < self.free_gpu_memory_fraction <= 1:
            raise OptionError("free_gpu_memory_fraction", f"must be above 0 and at most 1, not "
                              f"{self.free_gpu_memory_fraction}")  # fmt: skip
        if self.enable_block_reuse and self.max_attention_window is not None:
            raise OptionError("enable_block_reuse", "a window drops blocks that a later request could share")


@dataclass(frozen=True, kw_only=True)
class TrtGptModelOptionalParams(_Named):
    """The optional parameters.

    Args:
        kv_cache_config: see KvCacheConfig.
        enable_trt_overlap: whether two micro-batches take turns. Each iteration evaluates one of them, so callbacks
            never run during a forward. This makes nothing faster: twice as many forwards are half as large.
        enable_chunked_context: whether a context may be split to fill up a step. A context that is longer than
            `max_num_tokens` is always split.
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_trt_overlap: bool = False
    enable_chunked_context: bool = False


@dataclass(frozen=True, kw_only=True)
class BuildConfig(_Named):
    """The options that TensorRT-LLM fixes when it builds an engine.

    Args:
        max_batch_size: most requests in flight; None takes any number, of which 8 run at once.
        max_input_len: most tokens of a prompt; None means the model's positions.
        max_output_len: most generated tokens of a request; None means the model's positions.
        max_num_tokens: most tokens of one forward, those of contexts and of generation together.
        tokens_per_block: positions of a KV block.
        gather_context_logits: whether responses hold the logits of the prompt.
        gather_generation_logits: whether responses hold the logits of the generated tokens.
        gather_all_token_logits: whether responses hold both.
        dtype: "auto", "float32", "bfloat16" or "float16".

    Raises:
        OptionError: a value is less than 1.
    """

    max_batch_size: int | None = 8
    max_input_len: int | None = None
    max_output_len: int | None = None
    max_num_tokens: int = 512
    tokens_per_block: int = 16
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    gather_all_token_logits: bool = False
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_input_len", "max_output_len", "max_num_tokens", "tokens_per_block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, f"must be at least 1, not {value}")

    @property
    def context_logits(self) -> bool:
        """Whether context logits are kept."""
        return self.gather_context_logits or self.gather_all_token_logits

    @property
    def generation_logits(self) -> bool:
        """Whether generation logits are kept."""
        return self.gather_generation_logits or self.gather_all_token_logits


# Requests that run at once if the build sets no max_batch_size.
DEFAULT_BATCH_SIZE = 8
# The Batcher's queue has no bound, because the client decides how many requests it sends.
UNBOUNDED_QUEUE = 2**31


@dataclass(frozen=True, slots=True)
class GptEngine:
    """The engine that the worker thread runs.

    Args:
        max_input_len, max_output_len: most tokens of a prompt and of an output.
        max_seq_len: most tokens of prompt and output together, and the length of a response's output ids.
        max_requests: requests that can run at once.
        overlap: whether two micro-batches take turns.
    """

    engine: Engine
    options: BatcherOptions
    build: BuildConfig
    max_beam_width: int
    max_input_len: int
    max_output_len: int
    max_seq_len: int
    max_requests: int
    overlap: bool


def open_engine(
    model: str | Path | Model,
    model_type: BatchingType,
    max_beam_width: int,
    scheduler_policy: SchedulerPolicy,
    params: TrtGptModelOptionalParams,
    build: BuildConfig,
) -> GptEngine:
    """Load the model and compute all sizes.

    Raises:
        ModelError: the model cannot be found, read or served.
        OptionError, SchedulerError: a parameter is out of range, or contradicts another.
    """
    if max_beam_width < 1:
        raise OptionError("max_beam_width", f"must be at least 1, not {max_beam_width}")
    if max_beam_width > build.max_num_tokens:
        raise OptionError("max_beam_width", f"{max_beam_width} beams do not fit into max_num_tokens")
    if params.enable_trt_overlap and model_type is BatchingType.V1:
        raise OptionError("enable_trt_overlap", "V1 runs one batch to its end; micro-batches need in-flight batching")
    cache = params.kv_cache_config
    loaded = model if isinstance(model, Model) else load_model(str(model), dtype=build.dtype)
    if cache.max_attention_window is not None:
        loaded = with_attention_window(loaded, cache.max_attention_window, cache.sink_token_length or 0)
    max_input_len = min(build.max_input_len or loaded.max_position, loaded.max_position)
    max_output_len = min(build.max_output_len or loaded.max_position, loaded.max_position)
    max_seq_len = min(max_input_len + max_output_len, loaded.max_position)
    num_slots = (build.max_batch_size or DEFAULT_BATCH_SIZE) * max_beam_width
    options = EngineOptions(
        model_path=loaded.name,
        dtype=build.dtype,
        # All slots can fill this many positions.
        n_ctx=num_slots * max_seq_len,
        max_tokens_in_cache=cache.max_tokens,
        max_memory_percent=cache.free_gpu_memory_fraction,
        block_size=build.tokens_per_block,
        allow_block_sharing=cache.enable_block_reuse,
    )
    batcher_options = BatcherOptions(
        n_parallel=num_slots,
        max_batch_tokens=build.max_num_tokens,
        target_inter_token_latency_ms=0.0,  # chunks are as large as max_num_tokens, as in TensorRT-LLM
        max_queue=UNBOUNDED_QUEUE,
        scheduler_policy=scheduler_policy,
        batching_type=model_type,
        enable_chunked_context=params.enable_chunked_context,
        max_held_prompts=0,
    )
    return GptEngine(
        engine=Engine(loaded, options),
        options=batcher_options,
        build=build,
        max_beam_width=max_beam_width,
        max_input_len=max_input_len,
        max_output_len=max_output_len,
        max_seq_len=max_seq_len,
        max_requests=build.max_batch_size or num_slots,
        overlap=params.enable_trt_overlap,
    )


def with_attention_window(model: Model, window: int, sink_tokens: int = 0) -> Model:
    """Return a model with the same weights, in which a token attends to at most the last `window` positions.

    A layer with a smaller window of its own keeps this window and gets no sinks, because it was trained without sinks.
    Layers that convolve or recur do not change.

    Args:
        sink_tokens: first positions that a token attends to beside the window.

    Raises:
        OptionError: the window is less than one position, or the number of sinks is negative.
    """
    for option, value, least in (("max_attention_window", window, 1), ("sink_token_length", sink_tokens, 0)):
        if value < least:
            raise OptionError(option, f"must be at least {least}, not {value}")
    if window >= model.max_position:
        return model
    layers_of: dict[LayerGroup, list[int]] = {}
    for group in model.groups:
        own = group.convolves or group.recurs or (group.window is not None and group.window <= window)
        kind = replace(group, layers=()) if own else LayerGroup((), window, sink_tokens)
        layers_of.setdefault(kind, []).extend(group.layers)
    groups = tuple(replace(kind, layers=tuple(sorted(layers))) for kind, layers in layers_of.items())
    return replace(model, groups=groups)


Tensor: TypeAlias = npt.NDArray[Any]

MAX_REQUEST_ID = 2**64 - 1
# Only plain numbers are taken, because object arrays would need unpickling.
DTYPES = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True, eq=False)
class InferenceRequest:
    """A request that the client hands to the batch manager.

    Args:
        request_id: uint64; unique among the requests in flight.
        tensors: input tensors by name.

    Raises:
        InvalidRequest: the id is no uint64, or a tensor has another type than plain numbers, or too many dimensions.
    """

    request_id: int
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if type(self.request_id) is not int or not 0 <= self.request_id <= MAX_REQUEST_ID:
            raise InvalidRequest("request_id", f"must be an integer from 0 to 2**64 - 1, not {self.request_id!r}")
        for name, tensor in self.tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, np.ndarray):
                raise InvalidRequest(f"tensors[{name!r}]", "must be a numpy array with a string as its name")
            if tensor.dtype.name not in DTYPES:
                raise InvalidRequest(f"tensors[{name!r}]", f"must have a dtype of plain numbers, not {tensor.dtype}")
            if tensor.ndim > MAX_DIMENSIONS:
                raise InvalidRequest(
                    f"tensors[{name!r}]", f"must have at most {MAX_DIMENSIONS} dimensions, not {tensor.ndim}"
                )


def encode_inference_request(request: InferenceRequest) -> bytes:
    """Return the request as msgpack."""
    tensors = {name: _tensor_to_wire(tensor) for name, tensor in request.tensors.items()}
    return encode({"request_id": request.request_id, "tensors": tensors})


def decode_inference_request(data: bytes, limits: DecodeLimits = REQUEST_LIMITS) -> InferenceRequest:
    """Return the request of these msgpack bytes. Decoding executes and unpickles nothing.

    Raises:
        FrameTooLarge, MalformedMessage: the bytes are not one well-formed message within `limits`.
        InvalidRequest: the message is no inference request; the error names the field.
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
    # The array is a copy in the machine's byte order, because the message's bytes are read-only.
    return np.frombuffer(data, dtype).reshape(shape).astype(np.dtype(name))


# By the name of a tensor with one number: the name and the type of its sampling parameter.
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
OFF = {name: getattr(SamplingParams(seed=0), name) for name in FILE_SAMPLING}
DRAWS = ("temperature", "top_k", "top_p")


@dataclass(slots=True, eq=False)
class GptRequest:
    """One request from its arrival to its final response.

    Args:
        request_id: the client's id.
        message: the message to the Batcher. Its tag is unique, because a client may use an id again.
        micro_batch: the number of the request's micro-batch; 0 without overlap.
        tokens: a stream's tokens that were not sent yet.
        num_sent: the number of tokens that were sent.
        cum_logprob: the sum of the sent tokens' log-probabilities, float32.
        result, error: the outcome; at most one of them is set.
        fault: the reason why the manager stops the request; its final response has this reason.
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
        """The input ids."""
        assert self.message.request.token_ids is not None
        return self.message.request.token_ids


def read_request(request: InferenceRequest, engine: GptEngine) -> GptRequest:
    """Read the tensors and check them against the engine's limits.

    Raises:
        InvalidRequest: a tensor is missing, unknown, malformed or out of its range; `field` names it.
        PromptTooLong: there are more input ids than the engine takes.
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
        raise InvalidRequest("streaming", "beams cannot be streamed, because the best beam is known only at the end")
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
    # TensorRT-LLM does not read a model's generation_config.
    temperature = 1.0 if any(name in parameters for name in DRAWS) else 0.0
    parameters = {**OFF, "temperature": temperature, **parameters}
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
    length = _integer(tensors, "request_output_len", 0)
    if not 1 <= length <= engine.max_output_len:
        raise InvalidRequest(
            "request_output_len",
            f"must be at least 1 and at most max_output_len, {engine.max_output_len}, not {length}",
        )
    if num_prompt + length > engine.max_seq_len:
        raise InvalidRequest("request_output_len", f"{length} after {num_prompt} exceed {engine.max_seq_len} positions")
    return length


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


Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


class ResponseTensors(NamedTuple):
    """The tensors of one response, in the order of TensorRT-LLM's documents.

    A whole response holds input and output. Shorter beams are filled up to the longest: ids with the pad id, numbers
    with 0. A stream's response holds one token, so maxSeqLength and outputLength are 1 in it. They are 0 in a final
    response without a token. The sequence length grows with each response. The first response has the context logits.

    Args:
        output_ids: [1, beamWidth, maxSeqLength] int32, input ids and output ids; in a stream only the new id.
        sequence_length: [1, 1] int32, the tokens of input and output; with beams, of the longest output.
        context_logits: [1, promptLength, vocabSizePadded] float32; [1, 1, 1] if they are not gathered.
        generation_logits: [1, beamWidth, outputLength, vocabSizePadded] float32; [1, 1, 1, 1] if not gathered.
        log_probs: [1, beamWidth, outputLength] float32, of the output ids under the model's own distribution.
        cum_log_probs: [1, beamWidth] float32, the sums of log_probs.
    """

    output_ids: Int32s
    sequence_length: Int32s
    context_logits: Float32s
    generation_logits: Float32s
    log_probs: Float32s
    cum_log_probs: Float32s


def whole_response(request: GptRequest, engine: GptEngine) -> ResponseTensors:
    """Return the tensors of a request that has ended."""
    result = request.result
    assert result is not None and request.message.keep is not None
    width, prompt = request.message.beam_width, request.prompt
    length = max(len(choice.token_ids) for choice in result.choices)
    ids = np.full((1, width, engine.max_seq_len), request.pad_id, np.int32)
    ids[:, :, : len(prompt)] = prompt
    log_probs = np.zeros((1, width, length), np.float32)
    for beam, choice in enumerate(result.choices):
        count = len(choice.token_ids)
        ids[0, beam, len(prompt) : len(prompt) + count] = choice.token_ids
        log_probs[0, beam, :count] = [score.logprob for score in choice.logprobs or ()]
    return ResponseTensors(
        ids,
        _sequence_length(len(prompt) + length),
        _context_logits(request, engine),
        _generation_logits(request, engine, length),
        log_probs,
        log_probs.sum(axis=2, dtype=np.float32),
    )


def stream_response(request: GptRequest, token: Token, row: Float32s | None, engine: GptEngine) -> ResponseTensors:
    """Return the tensors of one token of a stream.

    Args:
        row: the logits that the token was chosen from, [vocab_size]; None if they are not kept.
    """
    assert token.logprob is not None
    request.num_sent += 1
    request.cum_logprob = request.cum_logprob + np.float32(token.logprob)
    return ResponseTensors(
        np.array([[[token.token_id]]], np.int32),
        _sequence_length(len(request.prompt) + request.num_sent),
        _context_logits(request, engine) if request.num_sent == 1 else np.zeros((1, 1, 1), np.float32),
        np.zeros((1, 1, 1, 1), np.float32) if row is None else row[None, None, None],
        np.array([[[token.logprob]]], np.float32),
        np.array([[request.cum_logprob]], np.float32),
    )


def last_response(request: GptRequest) -> ResponseTensors:
    """Return the end of a stream that was stopped between two tokens."""
    return ResponseTensors(
        np.zeros((1, 1, 0), np.int32),
        _sequence_length(len(request.prompt) + request.num_sent),
        np.zeros((1, 1, 1), np.float32),
        np.zeros((1, 1, 1, 1), np.float32),
        np.zeros((1, 1, 0), np.float32),
        np.array([[request.cum_logprob]], np.float32),
    )


def _sequence_length(length: int) -> Int32s:
    return np.array([[length]], np.int32)


def _context_logits(request: GptRequest, engine: GptEngine) -> Float32s:
    if not engine.build.context_logits:
        return np.zeros((1, 1, 1), np.float32)
    assert request.message.keep is not None
    rows = request.message.keep.context_logits()
    if rows is None:  # the request was stopped before its context was evaluated
        return np.zeros((1, 0, engine.engine.model.vocab_size), np.float32)
    return rows[None]


def _generation_logits(request: GptRequest, engine: GptEngine, length: int) -> Float32s:
    if not engine.build.generation_logits:
        return np.zeros((1, 1, 1, 1), np.float32)
    assert request.message.keep is not None
    logits = np.zeros((1, request.message.beam_width, length, engine.engine.model.vocab_size), np.float32)
    for beam in range(request.message.beam_width):
        rows = request.message.keep.generation_logits(beam)
        if rows is not None:
            logits[0, beam, : len(rows)] = rows
    return logits
