"""What a GptManager is built from, under TensorRT-LLM's names, and what that is in ours.

Fields are in snake case; `named` takes the documents' camel case as well:

    TrtGptModelOptionalParams.named(kvCacheConfig=KvCacheConfig.named(maxTokens=4096), enableChunkedContext=True)

`open_engine` makes a loaded engine and the Batcher's options of them.
"""

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.nif.context.engine import Engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.layer_group import LayerGroup
from genbatch.nif.models.model import Model, load_model

TrtGptModelType = BatchingType


class _Named:
    """Construction with either spelling of a field."""

    @classmethod
    def named(cls, **options: Any) -> Self:
        """The parameters under either spelling.

        Raises:
            OptionError: there is no such parameter, it is given twice, or its value is out of range.
        """
        known = {one.name for one in fields(cls)}  # type: ignore[arg-type]
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
    """How much KV cache, and how it is used.

    Args:
        max_tokens: most positions, all requests together; None leaves it to the memory.
        max_attention_window: positions a token attends to, itself included; None is all before it.
        sink_token_length: StreamingLLM's first tokens that stay in sight of a window; None or 0. Keys hold their
            rotation by absolute position here, and StreamingLLM rotates by the place within the window.
        free_gpu_memory_fraction: share of the memory that is free once the model is loaded (the host's on a CPU)
            that the cache and a step may take; with max_tokens the smaller of the two counts.
        enable_block_reuse: whether KV blocks of earlier requests are reused by content.

    Raises:
        OptionError: a value is out of range, or the two last ones contradict each other.
    """

    max_tokens: int | None = None
    max_attention_window: int | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_attention_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, f"must be at least 1, not {value}")
        if self.sink_token_length:
            raise OptionError(
                "sink_token_length",
                f"{self.sink_token_length} is not possible: keys are kept as rotated for their absolute positions, and "
                "StreamingLLM's sinks are rotated anew as the window moves; leave it out, and bound what is kept with "
                "max_attention_window, or take a model that was trained with sinks (gpt-oss)",
            )
        if not 0 < self.free_gpu_memory_fraction <= 1:
            raise OptionError("free_gpu_memory_fraction", f"must be above 0 and at most 1, not "
                              f"{self.free_gpu_memory_fraction}")  # fmt: skip
        if self.enable_block_reuse and self.max_attention_window is not None:
            raise OptionError("enable_block_reuse", "a window drops the blocks that a later request would want")


@dataclass(frozen=True, kw_only=True)
class TrtGptModelOptionalParams(_Named):
    """The optional parameters.

    Args:
        kv_cache_config: see KvCacheConfig.
        enable_trt_overlap: two micro-batches that take turns. They never run at the same time here: each iteration
            evaluates one of them, so that one's callbacks and the other's forward do not mix. It makes nothing faster:
            twice as many forwards are half as large.
        enable_chunked_context: whether a context may be split to fill up a step; one that is longer than
            `max_num_tokens` is split either way.
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_trt_overlap: bool = False
    enable_chunked_context: bool = False


@dataclass(frozen=True, kw_only=True)
class BuildConfig(_Named):
    """What TensorRT-LLM fixes when an engine is built; here it is given with the model.

    Args:
        max_batch_size: requests in flight; None takes any number, of which 8 run at once and the others wait.
        max_input_len: tokens of a prompt; None is as many as the model has positions.
        max_output_len: tokens generated for a request; None likewise.
        max_num_tokens: tokens of one forward, contexts and generation together.
        tokens_per_block: positions a KV block holds.
        gather_context_logits: whether responses hold the logits of the prompt.
        gather_generation_logits: whether responses hold the logits of the generated tokens.
        gather_all_token_logits: both.
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


# Requests that run at once where the build does not say.
DEFAULT_BATCH_SIZE = 8
# The queue's bound is the client's: it gives as many requests as it wants to.
UNBOUNDED_QUEUE = 2**31


@dataclass(frozen=True, slots=True)
class GptEngine:
    """What the worker thread runs.

    Args:
        max_input_len, max_output_len: most tokens of a prompt and of an output.
        max_seq_len: most of both together, the length of a response's output ids.
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
    """Loads the model and settles all sizes.

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
        loaded = with_attention_window(loaded, cache.max_attention_window)
    if cache.enable_block_reuse and any(group.window is not None for group in loaded.groups):
        raise OptionError("enable_block_reuse", "the model's windows drop the blocks that a later request would want")
    max_input_len = min(build.max_input_len or loaded.max_position, loaded.max_position)
    max_output_len = min(build.max_output_len or loaded.max_position, loaded.max_position)
    max_seq_len = min(max_input_len + max_output_len, loaded.max_position)
    num_slots = (build.max_batch_size or DEFAULT_BATCH_SIZE) * max_beam_width
    options = EngineOptions(
        model_path=loaded.name,
        dtype=build.dtype,
        # What every slot could fill: more would never be used.
        n_ctx=num_slots * max_seq_len,
        max_tokens_in_cache=cache.max_tokens,
        max_memory_percent=cache.free_gpu_memory_fraction,
        block_size=build.tokens_per_block,
        allow_block_sharing=cache.enable_block_reuse,
    )
    batcher_options = BatcherOptions(
        n_parallel=num_slots,
        max_batch_tokens=build.max_num_tokens,
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


def with_attention_window(model: Model, window: int) -> Model:
    """The same weights, every layer attending to at most the last `window` positions, itself included.

    A layer that the model already limits to fewer keeps its own limit.

    Raises:
        OptionError: the window is less than one position.
    """
    if window < 1:
        raise OptionError("max_attention_window", f"must be at least 1, not {window}")
    if window >= model.max_position:
        return model
    layers_of: dict[int, list[int]] = {}
    for group in model.groups:
        reach = window if group.window is None else min(window, group.window)
        layers_of.setdefault(reach, []).extend(group.layers)
    groups = tuple(LayerGroup(tuple(sorted(layers)), reach) for reach, layers in layers_of.items())
    return replace(model, groups=groups)
