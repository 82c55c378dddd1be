"""The Batcher's options, with their defaults in one place."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import (
    DEFAULT_MAX_PAUSES,
    PauseOrder,
    RequestScheduler,
    SchedulerOptions,
    SchedulerPolicy,
)
from genbatch.nif.engine_options import CpuDefault
from genbatch.nif.errors import OptionError
from genbatch.proto.validation import RequestLimits

# The defaults of batch_timeout and batch_quiet.
BATCH_TIMEOUT_MS, BATCH_QUIET_MS = 20.0, 2.0
# The default of target_inter_token_latency_ms.
CPU_TARGET_MS, GPU_TARGET_MS = 12.0, 20.0
# A GPU's defaults of n_parallel and max_batch_tokens. Its weights are read once for all rows of a step.
GPU_SLOTS_PER_GIB, MOST_GPU_SLOTS = 4, 256
# A step keeps room for the logits of all of its tokens: 0.6 MB each with a vocabulary of 152,000.
GPU_STEP_TOKENS_PER_GIB, MOST_GPU_STEP_TOKENS = 64, 4096

# Sequences that may wait for each slot, and the whole queue for in-process requests.
QUEUE_PER_SLOT = 4
OWN_QUEUE = 1024
NOT_NEGATIVE = (
    *("batch_size", "batch_timeout", "batch_quiet", "max_client_queue_share", "max_client_open", "priority_ageing_s"),
    *("default_deadline_s", "max_answer_s", "max_held_prompts", "cpu_offload_space", "stall_s", "record_limit"),
    "session_space",
    "kept_prefix_share",
    "target_inter_token_latency_ms",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherOptions:
    """How the Batcher accumulates, admits and plans.

    Args:
        n_parallel: sequences decoded at once. A GPU takes about 4 a GiB of its memory, up to 256, if nothing is given.
        batch_size: pending sequences that end the accumulation at once; 0 means n_parallel.
        batch_timeout: most milliseconds that an idle Batcher waits for more requests; 20 if not given.
        batch_quiet: milliseconds without a new request after which an idle Batcher starts before `batch_timeout`; a
            tenth of its first step's time, if that is less; 0: it always waits for `batch_timeout`. If not given: 2, or
            0 with `batch_timeout` or `batch_size`.
        max_batch_tokens: most tokens, decodes and prefill chunks together, in one forward. A GPU takes about 64 a GiB
            of its memory, from 512 to 4096, if nothing is given.
        target_inter_token_latency_ms: milliseconds that a step should take while sequences decode; prompts are split
            into chunks that fit into this time. A step may always take twice as long as a step in which all
            sequences decode. 0: chunks are as large as `max_batch_tokens`. If not given: 12 on a CPU, 20 on a GPU.
        max_queue: most sequences that wait for a slot; a further request is refused with a retry hint. If not given: 4
            per slot for clients, 1024 for the program that runs the Batcher.
        max_client_queue_share: the share of the free places in the queue that one client may fill. At 0.5 one client
            may fill half of the queue, two may fill a third each, and there is room for a third client. A client
            without open requests needs only a free place.
        max_client_open: sequences that one client may have open while other clients have some, per slot.
        fair_share: let clients take turns by the work that each has had, and share the slots: a client with more than
            an equal part of the slots pauses a sequence while another client waits for its part. Otherwise all requests
            wait in one line.
        priority_ageing_s: seconds of waiting that one step of `priority` is worth; 0: requests may not have a priority.
        default_deadline_s: seconds that a client's request without a deadline of its own may wait for a slot; 0: no
            bound. The time with a slot is not bounded, nor are requests of the program that runs the Batcher.
        max_answer_s: seconds from its first slot after which a client's answer ends, with its text so far and the
            finish reason "length"; 0: no bound.
        scheduler: "fifo", "prefill_first" or "module:Class", or two of them with a comma, the capacity scheduler and
            the micro-batch scheduler; in a program also a RequestScheduler.
        scheduler_policy: MAX_UTILIZATION starts each request that fits now, and pauses requests when the pool is full;
            GUARANTEED_NO_EVICT starts each request that fits at its full length. V1 batching always does the latter.
        batching_type: when requests join a batch: V1 (after the end of the whole batch), InflightBatching (at every
            step, prompts and decodes in separate forwards) or InflightFusedBatching (at every step, in one forward).
        cache_budget: most KV blocks that one step reads; without it only the pool bounds them.
        enable_chunked_context: split prompts that fit `max_batch_tokens` over several steps, too; longer prompts are
            always split.
        margin: the share of free blocks below which MAX_UTILIZATION starts no new requests; 0.2 if not given.
        pause_order: the request that MAX_UTILIZATION pauses when the pool is full: newest or oldest; newest if not
            given.
        max_pauses: how often MAX_UTILIZATION pauses one request while it can pause another one instead.
        async_batching: run the next step while the tokens of a step are handed out, as long as requests only decode and
            the scheduler is one of ours.
        prompt_lookup: draft tokens by repetition: while at most two requests decode, and nothing else, the tokens that
            followed the same words before are verified several at a time. Answers do not change. Drafting starts and
            stops by itself, as it pays. Only the native runner drafts, and only with `async_batching`.
        cpu_offload_space: GiB of host memory for the KV of paused sequences; 0: they are evaluated again.
        stall_s: seconds of pending work without the end of a step after which the service's health is "stuck".
        system_prompts: contents of system messages to hold from the start.
        max_held_prompts: most system prompts whose KV is held for requests to share, those included.
        kept_prefix_share: share of the KV blocks that stay longest in the prefix cache because requests ask for it
            (`cache_ttl_s`, Anthropic's `cache_control`, OpenAI's `prompt_cache_retention`). They take no memory from
            running requests. 0 ignores what requests ask.
        strip_billing_header: take the first line out of a conversation's system prompt if it begins with
            "x-anthropic-billing-header:". Claude Code changes this value with each request, so the prefix cache would
            never help.
        session_dir: folder for conversations whose KV clients keep under a name (`keep_session`), and load again
            (`resume_session`), also after a restart. Only this user may write to it. Off if not given.
        session_space: GiB that the folder may take; the tenant with the most bytes loses the session that was used
            longest ago.
        record: a file for a record of all inputs of the scheduler, for `genbatch replay`. It holds the token ids of
            prompts and answers, so only its owner may read it. If the file exists, FILE.1 is made, and so on. While
            recording, no step begins before the tokens of the step before are handed out.
        record_limit: MiB after which the recording ends.
        limits: caps on what one request may ask.

    Raises:
        SchedulerError: an option of the scheduler is out of range.
        OptionError: another option is out of range.
    """

    n_parallel: int = CpuDefault(8)
    batch_size: int = 0
    batch_timeout: float | None = None
    batch_quiet: float | None = None
    max_batch_tokens: int = CpuDefault(512)
    target_inter_token_latency_ms: float | None = None
    max_queue: int | None = None
    max_client_queue_share: float = 0.5
    max_client_open: float = 2.0
    fair_share: bool = True
    priority_ageing_s: float = 0.0
    default_deadline_s: float = 60.0
    max_answer_s: float = 0.0
    scheduler: str | RequestScheduler = "fifo"
    scheduler_policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION
    batching_type: BatchingType = BatchingType.INFLIGHT_FUSED_BATCHING
    cache_budget: int | None = None
    enable_chunked_context: bool = True
    margin: float | None = None
    pause_order: PauseOrder | None = None
    max_pauses: int = DEFAULT_MAX_PAUSES
    async_batching: bool = True
    prompt_lookup: bool = True
    cpu_offload_space: float = 0.0
    stall_s: float = 30.0
    system_prompts: Sequence[str] = ()
    max_held_prompts: int = 4
    kept_prefix_share: float = 0.25
    strip_billing_header: bool = True
    session_dir: str | None = None
    session_space: float = 8.0
    record: str | None = None
    record_limit: int = 1024
    limits: RequestLimits = field(default_factory=RequestLimits)
    scheduling: SchedulerOptions = field(init=False)

    def __post_init__(self) -> None:
        if self.n_parallel < 1:
            raise OptionError("n_parallel", f"must be at least 1, not {self.n_parallel}")
        if self.batch_quiet is None:
            is_default = self.batch_timeout is None and not self.batch_size
            object.__setattr__(self, "batch_quiet", BATCH_QUIET_MS if is_default else 0.0)
        if self.batch_timeout is None:
            object.__setattr__(self, "batch_timeout", BATCH_TIMEOUT_MS)
        if self.max_queue is not None and self.max_queue < 0:
            raise OptionError("max_queue", f"{self.max_queue} is less than 0")
        if self.kept_prefix_share > 1:
            raise OptionError("kept_prefix_share", f"{self.kept_prefix_share} is more than all blocks")
        if self.max_client_queue_share > 1:
            raise OptionError("max_client_queue_share", f"{self.max_client_queue_share} is more than all of the queue")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not value >= 0:  # also refuses NaN
                raise OptionError(name, f"{value} is less than 0")
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
            max_pauses=self.max_pauses,
        )
        object.__setattr__(self, "scheduling", scheduling)

    def on_device(self, gpu_memory: int) -> "BatcherOptions":
        """Return the options with the defaults of a device.

        Args:
            gpu_memory: bytes of the GPU's memory; 0 for a CPU.
        """
        slots, tokens, target_ms = int(self.n_parallel), int(self.max_batch_tokens), self.target_inter_token_latency_ms
        gib = gpu_memory / 2**30
        if gpu_memory and isinstance(self.n_parallel, CpuDefault):
            slots = _power_of_two(GPU_SLOTS_PER_GIB * gib, slots, MOST_GPU_SLOTS)
        if gpu_memory and isinstance(self.max_batch_tokens, CpuDefault):
            tokens = _power_of_two(GPU_STEP_TOKENS_PER_GIB * gib, tokens, MOST_GPU_STEP_TOKENS)
        if target_ms is None:
            target_ms = GPU_TARGET_MS if gpu_memory else CPU_TARGET_MS
        return replace(self, n_parallel=slots, max_batch_tokens=tokens, target_inter_token_latency_ms=target_ms)

    @property
    def window_s(self) -> float:
        """The most seconds that an idle Batcher waits for more requests."""
        assert self.batch_timeout is not None, "set when the options were made"
        return self.batch_timeout / 1000

    @property
    def quiet_s(self) -> float | None:
        """Seconds without another request that end this wait; None if only the window ends it."""
        return self.batch_quiet / 1000 if self.batch_quiet else None

    @property
    def flush_size(self) -> int:
        """The number of pending sequences at which an idle Batcher starts at once."""
        return self.batch_size or self.n_parallel

    def queue_size(self, *, of_clients: bool) -> int:
        """Return the most sequences that wait for a slot, for clients or for the program that runs the Batcher."""
        if self.max_queue is not None:
            return self.max_queue
        return QUEUE_PER_SLOT * self.n_parallel if of_clients else OWN_QUEUE


def _power_of_two(value: float, least: int, most: int) -> int:
    """Return the largest power of two up to `value`, but at least `least` and at most `most`."""
    return max(least, min(most, 1 << max(0, int(value).bit_length() - 1)))
