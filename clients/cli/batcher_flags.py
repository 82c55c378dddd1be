"""The flags that say how a service batches requests."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer

from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.scheduling.batching_type import BatchingType
from genbatch.actors.scheduling.capacity import DEFAULT_MARGIN, PauseOrder, SchedulerPolicy
from genbatch.nif.errors import OptionError
from genbatch.proto.messages import RequestLimits

_BATCHING = "Batching"
_SCHEDULING = "Scheduling"
_REQUESTS = "Requests"

_LIMIT_NAMES = ", ".join(RequestLimits.__struct_fields__)


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
        int, typer.Option(help="Most requests waiting; one more is refused with a hint.", rich_help_panel=_REQUESTS)
    ] = 256
    system_prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A system prompt to hold from the start; may be given again.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    max_held_prompts: Annotated[
        int, typer.Option(help="Most system prompts whose KV is held to be shared.", rich_help_panel=_REQUESTS)
    ] = 4
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help=f"What one request may ask for; may be given again. Names: {_LIMIT_NAMES}.",
            rich_help_panel=_REQUESTS,
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
