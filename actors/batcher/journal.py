"""The Batcher's observers: the Journal, for statistics and telemetry, and a Flight, for a recorder.

The Journal counts in the statistics (BatcherStats: totals, histograms, rates, each tenant's share) and emits telemetry
events. StallWatch measures the time since the last progress. A Flight receives every input of a tick's decisions,
as objects, tokens included. A Flight also answers: a replay supplies the time, and which sequences sit out a plan.

Events of the Batcher (measurements | metadata):

    request.accepted     tokenize_s, prompt_tokens, max_tokens, n, temperature | request_id, client, tenant, model, kind
                         its prompt is tokenized and it waits; kind is "chat", "text_completion",
                         "embeddings" or "scores"
    request.refused      | request_id, client, tenant, model, code   it was not accepted; code is the error's
    request.started      queue_s, cached_tokens | request_id         it has a slot, for the first time
    request.first_token  ttft_s | request_id
    request.preempted    generated_tokens | request_id, swapped      its blocks were taken; it resumes by itself
    request.finished     e2e_s, prompt_tokens, cached_tokens, generation_tokens | request_id, client, tenant, model,
                         reason, code   its one end; code is "" unless the reason is "error"
    step.end             duration_s, entries, tokens | model         one forward over these sequences and tokens

Each accepted request has one request.finished; events of one request come in the order above. No event holds text of
a prompt or of an answer. Values are numbers, text and booleans, so that events can cross processes.

The model's thread reports each step to the Batcher by a message: Stepped, Opened, Decoded or RunEnded.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from typing import Any, ClassVar, Protocol, TypeAlias

import outcome
import trio

from genbatch.actors.batcher.generation import Generation, GenerationRequest
from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Evaluated, Planned, Prompt, Request, Sequence, TenantShare
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.scheduling.plan import PromptBudget, SchedulerOutput, StepWork
from genbatch.nif.context import Context
from genbatch.nif.errors import OptionError
from genbatch.nif.sampling.sampler import Sampled, SampleFault
from genbatch.proto.errors import GenbatchError
from genbatch.proto.service_messages import Health, HealthStatus


class Stepping(Protocol):
    """Books the messages of the model's thread; `Stepper` implements it. A method returns True when no work is left."""

    def opened(self, opened: "Opened") -> bool:
        """Book the first step of a run that opens with prompts; the next step may be running."""

    def decoded(self, decoded: "Decoded") -> bool:
        """Book a step of a run; the next step may be running."""

    def stepped(self, batch: list[Planned], result: "outcome.Outcome[list[Evaluated]]") -> bool:
        """Book a single step, or begin to find the request at fault for a failed one."""

    def run_ended(self, run: "Run", result: "outcome.Outcome[Decoded | None]") -> bool:
        """Book the last step of a run."""


class Run(Protocol):
    """A run of decode steps as the event loop sees it; `RunAhead` implements it."""

    batch: list[Planned]
    sequences: list[Generation]

    def stop(self) -> None:
        """Ask for a plan: the run ends with the current step."""

    def booked(self) -> None:
        """Note that the tokens of one more step were handed out."""

    def leave(self, index: int) -> None:
        """Take an ended sequence out of the run."""


# The draws of a run's step: a list with each sequence's first draw, then, if drafts were accepted, a list with each
# sequence's second draw, and so on. A sequence without a draw has None, such as a sequence that has left the run.
Drawn: TypeAlias = ListOf[ListOf[Sampled | SampleFault | None]]


@dataclass(frozen=True, slots=True)
class Opened:
    """The first step of a run that opens with prompts has ended."""

    run: Run
    outputs: list[Evaluated]
    has_first_tokens: ClassVar[bool] = False

    def book(self, stepping: Stepping) -> bool:
        """Book the step; return whether no work is left."""
        return stepping.opened(self)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A step of a run has ended; unless it was the last step, the next step has begun.

    Args:
        work: the work of the step.
        guessing_s: the seconds that drafts took before the step.
        freed: indices of the sequences that have left the run and hold no blocks any more.
    """

    run: Run
    drawn: Drawn
    work: StepWork
    guessing_s: float = 0.0
    freed: ListOf[int] = ()
    has_first_tokens: ClassVar[bool] = False

    def book(self, stepping: Stepping) -> bool:
        """Book the step; return whether no work is left."""
        return stepping.decoded(self)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A forward has ended on the model's thread."""

    batch: list[Planned]
    result: outcome.Outcome[list[Evaluated]]

    @property
    def has_first_tokens(self) -> bool:
        """Whether a sequence has its first token from this step; call this after `book`."""
        return any(planned.owner.num_generated == 1 for planned in self.batch)

    def book(self, stepping: Stepping) -> bool:
        """Book the step; return whether no work is left."""
        return stepping.stepped(self.batch, self.result)


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run has ended on the model's thread, with its last step's draws; None if they were sent before."""

    run: Run
    result: outcome.Outcome[Decoded | None]
    has_first_tokens: ClassVar[bool] = False

    def book(self, stepping: Stepping) -> bool:
        """Book the end; return whether no work is left."""
        return stepping.run_ended(self.run, self.result)


StepMessage = Stepped | Opened | Decoded | RunEnded


class Histogram:
    """Counts of values by range.

    Args:
        le: the upper ends of the ranges, inclusive and rising; larger values fall into one more range.
    """

    __slots__ = ("counts", "le", "sum")

    def __init__(self, le: ListOf[float]) -> None:
        self.le = tuple(le)
        self.counts = [0] * (len(self.le) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Book one value."""
        self.counts[bisect_left(self.le, value)] += 1
        self.sum += value

    def snapshot(self) -> dict[str, Any]:
        """Return plain data: `le`, `counts` (not cumulative, one more than `le`) and `sum`."""
        return {"le": list(self.le), "counts": list(self.counts), "sum": self.sum}


# The rate's window in whole seconds: long enough for a steady value, short enough to follow a change.
WINDOW_S = 10


class RecentRate:
    """A rate over recent seconds, kept as one count per second."""

    def __init__(self) -> None:
        self._counts: deque[list[int]] = deque(maxlen=WINDOW_S + 1)  # [second, count]
        self._since: float | None = None  # time of the first count after a silent window

    def add(self, now: float, count: int) -> None:
        """Book `count` at the time `now`, in seconds on a monotonic clock."""
        second = int(now)
        if self._since is None or not self._counts or self._counts[-1][0] < second - WINDOW_S:
            self._counts.clear()
            self._since = now
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1][1] += count
        else:
            self._counts.append([second, count])

    def per_second(self, now: float) -> float:
        """Return the mean rate since the window's start or the first count, if that is later; over at least 1 s."""
        if self._since is None:
            return 0.0
        start = max(self._since, int(now) - WINDOW_S)
        total = sum(count for second, count in self._counts if second >= int(now) - WINDOW_S)
        return total / max(now - start, 1.0)


# Clients choose the names, so their number is unbounded: tenants after the first 32 are counted together.
MAX_TENANTS = 32
OTHERS = "other"


class TenantShares:
    """The shares by tenant; requests without a tenant are counted under the name ""."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}

    def of(self, tenant: str) -> TenantShare:
        """Return the share in which a tenant's requests are booked."""
        share = self._shares.get(tenant)
        if share is None:
            name = tenant if len(self._shares) < MAX_TENANTS else OTHERS
            share = self._shares.setdefault(name, TenantShare())
        return share

    def snapshot(self) -> dict[str, Any]:
        """Return plain data: {tenant: counters}."""
        return {name: asdict(share) for name, share in self._shares.items()}


# The number of recent requests in the reported quantiles.
RECENT = 256

# Upper ends of the ranges. They are vLLM's, with shorter times added: a step of a small model takes a millisecond.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
           160.0, 640.0, 2560.0)  # fmt: skip
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                  7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST_S = (0.005, 0.025, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
              120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_REQUEST_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))

HISTOGRAMS: dict[str, ListOf[float]] = {
    "time_to_first_token_seconds": _TTFT_S,
    "inter_token_latency_seconds": _INTER_TOKEN_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _REQUEST_S,
    "request_prefill_time_seconds": _REQUEST_S,
    "request_decode_time_seconds": _REQUEST_S,
    "request_prompt_tokens": _REQUEST_TOKENS,
    "request_generation_tokens": _REQUEST_TOKENS,
    "iteration_tokens_total": _STEP_TOKENS,
}


@dataclass(slots=True)
class BatcherStats:
    """Counters and histograms since the start, and recent measurements; times are in seconds."""

    steps: int = 0
    scheduled_entries: int = 0  # sequences in all steps together
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0  # prompt tokens not prefilled, thanks to seq_cp
    reused_tokens: int = 0  # prompt tokens not prefilled, thanks to the prefix cache
    generation_tokens: int = 0
    drafted_tokens: int = 0  # by prompt lookup or a draft model
    accepted_draft_tokens: int = 0  # of those, the correct ones: each saved a step
    embedded_texts: int = 0
    accepted: int = 0
    refused: int = 0
    refusals: dict[str, int] = field(default_factory=dict)  # of those, by error code
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    preemptions: int = 0  # sequences that lost their blocks
    swaps: int = 0  # of those, the sequences with KV kept in host memory
    step_seconds: float = 0.0
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    latency: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    service: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # from taking a slot to the end
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(le) for name, le in HISTOGRAMS.items()}
    )
    tenants: TenantShares = field(default_factory=TenantShares)
    decode_rate: RecentRate = field(default_factory=RecentRate)
    prefill_rate: RecentRate = field(default_factory=RecentRate)
    _rated: tuple[int, int] = (0, 0)  # generated and prefilled tokens already booked in the rates

    def count_step(self, num_entries: int, num_tokens: int, seconds: float) -> None:
        """Book one forward over `num_entries` sequences and `num_tokens` tokens."""
        self.steps += 1
        self.scheduled_entries += num_entries
        self.step_seconds += seconds
        self.histograms["iteration_tokens_total"].observe(num_tokens)

    def count_refused(self, code: str) -> None:
        """Book a request that was not accepted."""
        self.refused += 1
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def count_finished(self, reason: str, seconds: float) -> None:
        """Book a request's end after `seconds`."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.latency.append(seconds)
        self.histograms["e2e_request_latency_seconds"].observe(seconds)

    def median_service(self) -> float | None:
        """Return the median seconds from a request's slot to its end, over recent requests; None before the first."""
        return _quantile(self.service, 0.5)

    def update_rates(self, now: float) -> None:
        """Book the tokens counted since the last call in the rates."""
        generated, prefilled = self._rated
        if self.generation_tokens > generated:
            self.decode_rate.add(now, self.generation_tokens - generated)
        if self.prefilled_tokens > prefilled:
            self.prefill_rate.add(now, self.prefilled_tokens - prefilled)
        self._rated = self.generation_tokens, self.prefilled_tokens

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return all values as plain data at the time `now`: recent times as quantiles, rates in tokens per second."""
        self.update_rates(now)
        data = {name: getattr(self, name) for name in _COUNTERS}
        data["refusals"], data["finished"] = dict(self.refusals), dict(self.finished)
        for name, values in (("ttft", self.ttft), ("latency", self.latency), ("service", self.service)):
            data[f"{name}_p50"] = _quantile(values, 0.5)
            data[f"{name}_p99"] = _quantile(values, 0.99)
        data["mean_batch_size"] = self.scheduled_entries / self.steps if self.steps else 0.0
        data["decode_tokens_per_s"] = self.decode_rate.per_second(now)
        data["prefill_tokens_per_s"] = self.prefill_rate.per_second(now)
        data["histograms"] = {name: histogram.snapshot() for name, histogram in self.histograms.items()}
        data["tenants"] = self.tenants.snapshot()
        return data


_COUNTERS = tuple(field.name for field in fields(BatcherStats) if field.type in (int, float))


def _quantile(values: deque[float], share: float) -> float | None:
    """Return the value above `share` of the values; None for no values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


class StallWatch:
    """Measures the time since the Batcher's last progress.

    Args:
        stall_s: seconds without the end of a step, while work is pending, after which the Batcher counts as stuck.
        now: seconds on the event loop's clock.
    """

    def __init__(self, stall_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._since = now

    def restart(self, now: float) -> None:
        """Restart the watch after a step has ended, or when work arrives at an idle Batcher."""
        self._since = now

    def health(self, now: float, *, num_open: int, draining: bool, steps: int, running: int, waiting: int) -> Health:
        """Return the health of the service while `num_open` requests are open."""
        stalled_s = now - self._since if num_open else 0.0
        status: HealthStatus = "draining" if draining else "ready"
        if stalled_s > self._stall_s:
            status = "stuck"
        return Health(
            status=status,
            steps=steps,
            requests_running=running,
            requests_waiting=waiting,
            stalled_s=stalled_s,
        )


class Journal:
    """Books the lives of requests, in one place; telemetry costs nothing while no listener is attached.

    Args:
        stats: the counters.
        telemetry: emits the events.
        model: the model's name.
        now: the clock of decisions, which a replay sets.
    """

    def __init__(
        self, stats: BatcherStats, telemetry: Telemetry, model: str, now: Callable[[], float] = trio.current_time
    ) -> None:
        self.stats = stats
        self._deciding_time = now
        self._telemetry = telemetry
        self._model = model
        self._inter_token = stats.histograms["inter_token_latency_seconds"]  # each token adds a value
        self._numbers = count(1)
        self._now = trio.current_time()  # when the last step ended: the time of all its tokens
        # The latest gap between tokens: the first token's time, the seconds, and the range in the histogram.
        self._since: float | None = None
        self._gap_s = 0.0
        self._range = 0

    def request_id(self, message: Generate | Embed) -> str:
        """Return the name of a request in logs and spans: its gateway's name for it, or else a new one."""
        return message.request_id or f"{message.client or 'local'}#{next(self._numbers)}"

    def refused(self, message: Generate | Embed, error: GenbatchError) -> None:
        """Book a request that was not accepted."""
        self.stats.count_refused(error.code)
        if self._telemetry.handlers:
            metadata = {
                "request_id": self.request_id(message),
                "client": message.client,
                "tenant": message.request.tenant,
                "model": self._model,
                "code": error.code,
            }
            self._telemetry.execute("request.refused", {}, metadata)

    def unreadable(self, request: Request, error: GenbatchError) -> None:
        """Book a request that was refused once its prompt was tokenized."""
        self.stats.count_refused(error.code)
        if self._telemetry.handlers:
            self._telemetry.execute("request.refused", {}, {**self._names(request), "code": error.code})

    def accepted(self, request: Request) -> None:
        """Book a request before its sequences wait for slots."""
        stats, first = self.stats, request.sequences[0]
        stats.accepted += 1
        stats.prompt_tokens += request.num_prompt_tokens
        request.share = stats.tenants.of(request.tenant)
        request.share.requests += 1
        request.share.running += 1
        request.share.prompt_tokens += request.num_prompt_tokens
        if self._telemetry.handlers:
            measurements = {
                "tokenize_s": trio.current_time() - request.accepted_at,
                "prompt_tokens": request.num_prompt_tokens,
                "max_tokens": first.max_new_tokens,
                "n": request.width,
                "temperature": first.temperature,
            }
            self._telemetry.execute("request.accepted", measurements, {**self._names(request), "kind": request.kind})

    def admitted(self, sequence: Sequence) -> None:
        """Book that a sequence has taken a slot."""
        request = sequence.request
        if request.started_at is not None:
            return
        now = self._deciding_time()
        request.begin(now)
        queue_s = now - request.accepted_at
        self.stats.histograms["request_queue_time_seconds"].observe(queue_s)
        if self._telemetry.handlers:
            measurements = {"queue_s": queue_s, "cached_tokens": request.cached_tokens}
            self._telemetry.execute("request.started", measurements, {"request_id": request.request_id})

    def paused(self, sequence: Sequence, *, swapped: bool) -> None:
        """Book that a sequence lost its blocks, and whether its KV was kept in host memory."""
        self.stats.preemptions += 1
        self.stats.swaps += swapped
        if self._telemetry.handlers:
            metadata = {"request_id": sequence.request.request_id, "swapped": swapped}
            self._telemetry.execute("request.preempted", {"generated_tokens": sequence.num_generated}, metadata)

    def stepped(self, num_entries: int, num_tokens: int, seconds: float) -> None:
        """Book one forward by its numbers of entries and tokens; call this before its tokens are booked."""
        self._now = trio.current_time()
        self._since = None
        self.stats.count_step(num_entries, num_tokens, seconds)
        self.stats.update_rates(self._now)
        if self._telemetry.handlers:
            measurements = {"duration_s": seconds, "entries": num_entries, "tokens": num_tokens}
            self._telemetry.execute("step.end", measurements, {"model": self._model})

    def drafted(self, num_drafted: int, num_accepted: int) -> None:
        """Book the drafts of one forward, and the number of correct tokens."""
        self.stats.drafted_tokens += num_drafted
        self.stats.accepted_draft_tokens += num_accepted

    def generated(self, sequence: Sequence, num_tokens: int = 1) -> None:
        """Book the tokens that a sequence drew in the last step: one token, or one per beam."""
        request, now, stats = sequence.request, self._now, self.stats
        stats.generation_tokens += num_tokens
        assert request.share is not None
        request.share.generation_tokens += num_tokens
        since = sequence.last_token_at
        if since is not None:
            if since != self._since:  # as a rule, all tokens of a step have the same gap
                self._since, self._gap_s = since, now - since
                self._range = bisect_left(self._inter_token.le, self._gap_s)
            self._inter_token.counts[self._range] += 1
            self._inter_token.sum += self._gap_s
        elif request.first_token_at is None:
            self._first_token(request)
        sequence.last_token_at = now

    def ended(self, request: Request, reason: str, error: GenbatchError | None = None) -> None:
        """Book the end of an accepted request, for any reason."""
        now = trio.current_time()
        histograms = self.stats.histograms
        self.stats.count_finished(reason, now - request.accepted_at)
        if request.share is None:  # the request ended before its prompt was tokenized
            return
        request.share.running -= 1
        num_generated = request.completion_tokens
        histograms["request_prompt_tokens"].observe(request.num_prompt_tokens)
        if request.counts_answers:
            histograms["request_generation_tokens"].observe(num_generated)
        if request.started_at is not None:
            self.stats.service.append((now - request.started_at) / request.rounds)
        if request.first_token_at is not None:
            histograms["request_decode_time_seconds"].observe(now - request.first_token_at)
        if self._telemetry.handlers:
            measurements = {
                "e2e_s": now - request.accepted_at,
                "prompt_tokens": request.num_prompt_tokens,
                "cached_tokens": request.cached_tokens,
                "generation_tokens": num_generated,
            }
            metadata = {**self._names(request), "reason": reason, "code": error.code if error else ""}
            self._telemetry.execute("request.finished", measurements, metadata)

    def _first_token(self, request: Request) -> None:
        request.first_token_at = now = self._now
        ttft_s = now - request.accepted_at
        self.stats.ttft.append(ttft_s)
        self.stats.histograms["time_to_first_token_seconds"].observe(ttft_s)
        assert request.started_at is not None
        self.stats.histograms["request_prefill_time_seconds"].observe(now - request.started_at)
        if self._telemetry.handlers:
            self._telemetry.execute("request.first_token", {"ttft_s": ttft_s}, {"request_id": request.request_id})

    def _names(self, request: Request) -> dict[str, object]:
        return {
            "request_id": request.request_id,
            "client": request.client,
            "tenant": request.tenant,
            "model": self._model,
        }


class Flight:
    """A Flight that records nothing. Between two calls of `began` the Batcher handles one message."""

    def begin(self, context: Context, system_prompts: ListOf[list[int]]) -> None:
        """Begin the record: the context is open, and the configured prompts will be evaluated next."""

    def began(self) -> None:
        """Begin the next message."""

    def now(self) -> float:
        """Return the time for decisions, in seconds on the event loop's clock."""
        return trio.current_time()

    def arrived(self, request: GenerationRequest, message: Generate) -> None:
        """Record that a request was accepted."""

    def encoded(self, request: Request, prompt: outcome.Outcome[Prompt]) -> None:
        """Record that a request's prompt was tokenized."""

    def left(self, request: Request) -> None:
        """Record that a request's caller has left."""

    def stepped(self, message: StepMessage) -> None:
        """Record that a step has ended and was booked."""

    def draining(self, timeout_s: float) -> None:
        """Record that new requests are refused from now on."""

    def drain_over(self) -> None:
        """Record that the requests that are still open are cancelled."""

    def prompted(self) -> None:
        """Record that another event has prompted a tick, unless a step is running."""

    def sitting_out(self, ids: frozenset[int]) -> frozenset[int]:
        """Return the ids of the sequences that the next tick must not plan."""
        return ids

    def prompt_budget(self, budget: PromptBudget | None) -> PromptBudget | None:
        """Return the time for prompts in the next tick."""
        return budget

    def ticked(self, plan: SchedulerOutput, groups: ListOf[ListOf[Planned]]) -> None:
        """Record a tick's plan, and the forwards made from the plan."""

    def close(self, reason: str) -> None:
        """End the record, since the next events cannot be recorded; may be called again."""


OpenFlight = Callable[[BatcherOptions], Flight]


def unrecorded(options: BatcherOptions) -> Flight:
    """Return a Flight that records nothing.

    Raises:
        OptionError: the options ask for a record.
    """
    if options.record is not None:
        raise OptionError("record", "a Batcher made without `open_flight` records nothing")
    return Flight()
