"""The flags of a service: which model, how it runs, how it batches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from genbatch.actors.batching_type import BatchingType
from genbatch.actors.capacity import DEFAULT_MARGIN, PauseOrder, SchedulerPolicy
from genbatch.actors.options import BatcherOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.messages import RequestLimits

if TYPE_CHECKING:  # imports torch, which takes seconds
    from genbatch.nif.engine import EngineOptions

DEFAULT_MODEL = "smollm2"

_MODEL = "Model and memory"
_BATCHING = "Batching"
_SCHEDULING = "Scheduling"
_LIMITS = "Requests"

_LIMIT_NAMES = ", ".join(RequestLimits.__struct_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The fields of EngineOptions, without the model's name."""

    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="auto, float32, bfloat16 or float16; auto is bfloat16 where the GPU has it, else float32.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    n_gpu_layers: Annotated[
        int, typer.Option(help="-1: all layers on the GPU if there is one; 0: all on the CPU.", rich_help_panel=_MODEL)
    ] = -1
    runner: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto, native (C, CPU), triton (GPU) or torch; auto is the fastest that runs the model here.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    quantize: Annotated[
        str,
        typer.Option(
            metavar="TYPE", help="none, or int8 weights and activations of the native runner.", rich_help_panel=_MODEL
        ),
    ] = "none"
    n_threads: Annotated[
        int, typer.Option(help="Threads of a step on the CPU; 0: the cores there are.", rich_help_panel=_MODEL)
    ] = 0
    n_ctx: Annotated[
        int, typer.Option(help="Positions in the KV pool, all sequences together.", rich_help_panel=_MODEL)
    ] = 8192
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV pool, instead of n_ctx.", rich_help_panel=_MODEL)
    ] = None
    max_tokens_in_cache: Annotated[
        int | None, typer.Option(help="Positions at most, whatever the other limits say.", rich_help_panel=_MODEL)
    ] = None
    max_memory_percent: Annotated[
        float, typer.Option(help="Fraction of the free memory for the KV pool and a step.", rich_help_panel=_MODEL)
    ] = 0.9
    block_size: Annotated[int, typer.Option(help="Positions in a KV block.", rich_help_panel=_MODEL)] = 16
    cap_per_sequence: Annotated[
        bool,
        typer.Option(
            "--cap-per-sequence",
            help="Let one sequence take at most n_ctx / n_parallel positions.",
            rich_help_panel=_MODEL,
        ),
    ] = False
    no_block_sharing: Annotated[
        bool,
        typer.Option(
            "--no-block-sharing",
            help="Do not reuse evaluated blocks by content (the prefix cache).",
            rich_help_panel=_MODEL,
        ),
    ] = False

    def options(self, model: str) -> "EngineOptions":
        """The engine's options for `model`; imports torch."""
        from genbatch.nif.engine import EngineOptions

        return EngineOptions(model_path=model, **self.by_name())

    def by_name(self) -> dict[str, Any]:
        """Keyword arguments of EngineOptions."""
        return {
            "dtype": self.dtype,
            "n_gpu_layers": self.n_gpu_layers,
            "runner": self.runner,
            "quantize": self.quantize,
            "n_threads": self.n_threads,
            "n_ctx": self.n_ctx,
            "num_blocks": self.num_blocks,
            "max_tokens_in_cache": self.max_tokens_in_cache,
            "max_memory_percent": self.max_memory_percent,
            "block_size": self.block_size,
            "cap_per_sequence": self.cap_per_sequence,
            "allow_block_sharing": not self.no_block_sharing,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherFlags:
    """The fields of BatcherOptions."""

    n_parallel: Annotated[int, typer.Option(help="Sequences decoded at once.", rich_help_panel=_BATCHING)] = 8
    batch_size: Annotated[
        int,
        typer.Option(
            help="Requests for which an idle service stops waiting; 0: n_parallel.", rich_help_panel=_BATCHING
        ),
    ] = 0
    batch_timeout: Annotated[
        float, typer.Option(help="Milliseconds an idle service waits for more requests.", rich_help_panel=_BATCHING)
    ] = 20.0
    max_batch_tokens: Annotated[
        int, typer.Option(help="Most tokens in one forward, decodes and prefill together.", rich_help_panel=_BATCHING)
    ] = 512
    scheduler: Annotated[
        str,
        typer.Option(metavar="NAME", help='"fifo", "prefill_first" or "module:Class".', rich_help_panel=_SCHEDULING),
    ] = "fifo"
    scheduler_policy: Annotated[
        SchedulerPolicy,
        typer.Option(
            metavar="NAME",
            case_sensitive=False,
            help="How memory is promised: max_utilization or guaranteed_no_evict.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = SchedulerPolicy.MAX_UTILIZATION
    batching_type: Annotated[
        BatchingType,
        typer.Option(
            metavar="NAME",
            case_sensitive=False,
            help="When requests join a batch: V1, InflightBatching or InflightFusedBatching.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = BatchingType.INFLIGHT_FUSED_BATCHING
    no_chunked_context: Annotated[
        bool,
        typer.Option("--no-chunked-context", help="Do not prefill a prompt in chunks.", rich_help_panel=_SCHEDULING),
    ] = False
    cache_budget: Annotated[
        int | None, typer.Option(help="Most KV blocks read in one step.", rich_help_panel=_SCHEDULING)
    ] = None
    margin: Annotated[
        float | None,
        typer.Option(
            help=f"Share of free blocks below which max_utilization holds new requests; {DEFAULT_MARGIN} if not given.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = None
    pause_order: Annotated[
        PauseOrder | None,
        typer.Option(
            metavar="NAME",
            help="Whom max_utilization pauses when the pool is full: newest or oldest; newest if not given.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = None
    cpu_offload_space: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            help="Host memory for the KV of paused sequences; 0: they are evaluated again.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = 0.0
    max_queue: Annotated[
        int, typer.Option(help="Most requests waiting; one more is refused with a hint.", rich_help_panel=_LIMITS)
    ] = 256
    system_prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="A system prompt to hold from the start; may be given again.", rich_help_panel=_LIMITS
        ),
    ] = None
    max_held_prompts: Annotated[
        int, typer.Option(help="Most system prompts whose KV is held to be shared.", rich_help_panel=_LIMITS)
    ] = 4
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help=f"What one request may ask for; may be given again. Names: {_LIMIT_NAMES}.",
            rich_help_panel=_LIMITS,
        ),
    ] = None

    def options(self) -> BatcherOptions:
        """The Batcher's options.

        Raises:
            OptionError, SchedulerError: a value is out of range; the message names the option.
        """
        return BatcherOptions(
            n_parallel=self.n_parallel,
            batch_size=self.batch_size,
            batch_timeout=self.batch_timeout,
            max_batch_tokens=self.max_batch_tokens,
            max_queue=self.max_queue,
            scheduler=self.scheduler,
            scheduler_policy=self.scheduler_policy,
            batching_type=self.batching_type,
            cache_budget=self.cache_budget,
            enable_chunked_context=not self.no_chunked_context,
            margin=self.margin,
            pause_order=self.pause_order,
            cpu_offload_space=self.cpu_offload_space,
            system_prompts=tuple(self.system_prompt or ()),
            max_held_prompts=self.max_held_prompts,
            limits=_limits(self.limit or []),
        )


def _limits(assignments: list[str]) -> RequestLimits:
    named: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise OptionError("limit", f"{assignment!r} is not NAME=VALUE")
        if name not in RequestLimits.__struct_fields__:
            raise OptionError("limit", f"{name!r} is none of {_LIMIT_NAMES}")
        named[name] = value
    try:
        return msgspec.convert(named, RequestLimits, strict=False)
    except msgspec.ValidationError as error:
        raise OptionError("limit", str(error)) from error
