"""The Batcher's options, with their defaults in one place."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from genbatch.actors.scheduling.batching_type import BatchingType
from genbatch.actors.scheduling.capacity import PauseOrder, SchedulerPolicy
from genbatch.actors.scheduling.scheduler import RequestScheduler
from genbatch.actors.scheduling.scheduler_spec import SchedulerOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.messages import RequestLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherOptions:
    """How the Batcher accumulates, admits and plans.

    Args:
        n_parallel: sequences decoded at once.
        batch_size: pending sequences that end the accumulation at once; 0 means n_parallel.
        batch_timeout: milliseconds an idle Batcher waits for more requests before it starts.
        max_batch_tokens: most tokens, decodes and prefill chunks together, in one forward.
        max_queue: most sequences waiting for a slot; a request beyond is refused with a retry hint.
        scheduler: "fifo", "prefill_first", "module:Class", or a RequestScheduler.
        scheduler_policy, batching_type, cache_budget, enable_chunked_context, margin, pause_order: see
            SchedulerOptions.
        cpu_offload_space: GiB of host memory for the KV of paused sequences; 0: they are evaluated again.
        system_prompts: contents of system messages to hold from the start.
        max_held_prompts: most system prompts whose KV is held for requests to share, those included.
        limits: caps on what one request may ask.

    Raises:
        SchedulerError: an option of the scheduler is out of range.
        OptionError: another one is.
    """

    n_parallel: int = 8
    batch_size: int = 0
    batch_timeout: float = 20.0
    max_batch_tokens: int = 512
    max_queue: int = 256
    scheduler: str | RequestScheduler = "fifo"
    scheduler_policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION
    batching_type: BatchingType = BatchingType.INFLIGHT_FUSED_BATCHING
    cache_budget: int | None = None
    enable_chunked_context: bool = True
    margin: float | None = None
    pause_order: PauseOrder | None = None
    cpu_offload_space: float = 0.0
    system_prompts: Sequence[str] = ()
    max_held_prompts: int = 4
    limits: RequestLimits = field(default_factory=RequestLimits)
    scheduling: SchedulerOptions = field(init=False)

    def __post_init__(self) -> None:
        if self.n_parallel < 1:
            raise OptionError("n_parallel", f"must be at least 1, not {self.n_parallel}")
        for name in ("batch_size", "batch_timeout", "max_queue", "max_held_prompts", "cpu_offload_space"):
            if not getattr(self, name) >= 0:  # also refuses NaN
                raise OptionError(name, f"{getattr(self, name)} is less than 0")
        if len(self.system_prompts) > self.max_held_prompts:
            raise OptionError("system_prompts", f"{len(self.system_prompts)} are more than max_held_prompts")
        scheduling = SchedulerOptions(
            scheduler=self.scheduler,
            policy=self.scheduler_policy,
            batching_type=self.batching_type,
            max_num_requests=self.n_parallel,
            max_batch_tokens=self.max_batch_tokens,
            cache_budget=self.cache_budget,
            enable_chunked_context=self.enable_chunked_context,
            margin=self.margin,
            pause_order=self.pause_order,
        )
        object.__setattr__(self, "scheduling", scheduling)

    @property
    def flush_size(self) -> int:
        """Pending sequences at which an idle Batcher starts without waiting longer."""
        return self.batch_size or self.n_parallel
