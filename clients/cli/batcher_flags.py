"""The flags that say how a service batches requests."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import DEFAULT_MARGIN, DEFAULT_MAX_PAUSES, PauseOrder, SchedulerPolicy
from genbatch.nif.errors import OptionError
from genbatch.proto.validation import RequestLimits

_BATCHING = "Batching"
_SCHEDULING = "Scheduling"
_REQUESTS = "Requests"
_RECORDING = "Flight recorder"

_LIMIT_NAMES = ", ".join(RequestLimits.__struct_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherFlags:
    """The fields of BatcherOptions, read by `settings_of`."""

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
        typer.Option(
            "--scheduler",
            "--scheduler-type",
            metavar="NAME",
            help='"fifo", "prefill_first" or "module:Class".',
            rich_help_panel=_SCHEDULING,
        ),
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
    max_pauses: Annotated[
        int,
        typer.Option(
            help="How often max_utilization pauses a request while it can pause another instead.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = DEFAULT_MAX_PAUSES
    no_async_batching: Annotated[
        bool,
        typer.Option(
            "--no-async-batching",
            help="Do not begin the next step while a step's tokens are handed out.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = False
    cpu_offload_space: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            help="Host memory for the KV of paused sequences; 0: they are evaluated again.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = 0.0
    max_queue: Annotated[
        int | None,
        typer.Option(
            help="Most requests waiting; one more is refused with a hint. 4 a slot if not given.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    max_client_queue_share: Annotated[
        float,
        typer.Option(help="Share of the queue that one client may take beside others.", rich_help_panel=_REQUESTS),
    ] = 0.5
    max_client_open: Annotated[
        float,
        typer.Option(help="Sequences per slot that one client may have open beside others.", rich_help_panel=_REQUESTS),
    ] = 2.0
    no_fair_share: Annotated[
        bool,
        typer.Option(
            "--no-fair-share",
            help="Let all clients wait in one line instead of taking turns by what each has had.",
            rich_help_panel=_REQUESTS,
        ),
    ] = False
    priority_ageing_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Waiting time that one step of a request's priority is worth; 0: requests may not name one.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 0.0
    default_deadline_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Deadline of clients' requests that name none; 0: none.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 60.0
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
    stall_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Pending work without the end of a step for so long makes the service call itself stuck.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 30.0
    record: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Record what arrives and what each tick plans, for `genbatch replay`. The file holds the token ids of "
            "prompts and answers: only its owner may read it. Where FILE is there already, FILE.1 is made. While "
            "recording, no step begins before the tokens of the last one are handed out.",
            rich_help_panel=_RECORDING,
        ),
    ] = None
    record_limit: Annotated[
        int,
        typer.Option(metavar="MIB", help="Size at which recording ends.", rich_help_panel=_RECORDING),
    ] = 1024
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help=f"What one request may ask for; may be given again. Names: {_LIMIT_NAMES}.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None


def limits_of(assignments: list[str]) -> dict[str, Any]:
    """The limits of requests that NAME=VALUE says.

    Raises:
        OptionError: an assignment is none, or its value of the wrong type.
    """
    named: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise OptionError("limit", f"{assignment!r} is not NAME=VALUE")
        if name not in RequestLimits.__struct_fields__:
            raise OptionError("limit", f"{name!r} is none of {_LIMIT_NAMES}")
        named[name] = value
    try:
        limits = msgspec.convert(named, RequestLimits, strict=False)
    except msgspec.ValidationError as error:
        raise OptionError("limit", str(error)) from error
    return {name: getattr(limits, name) for name in named}
