"""Turns a GptManager's parameters into a loaded engine and the Batcher's options."""

from dataclasses import dataclass
from pathlib import Path

from genbatch.actors.batch_manager.gpt_manager_params import BuildConfig, TrtGptModelOptionalParams
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.scheduling.batching_type import BatchingType
from genbatch.actors.scheduling.capacity import SchedulerPolicy
from genbatch.nif.engine import Engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.models.model import Model, load_model
from genbatch.nif.runners.attention_window import with_attention_window

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
