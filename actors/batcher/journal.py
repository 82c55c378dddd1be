"""The Batcher's observers: the Journal, for statistics and telemetry, and a Flight, for a recorder.

The Journal counts in the statistics and emits telemetry events. A Flight receives every input of a tick's decisions,
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

The model's thread reports each step to the Batcher by a message: Stepped, Decoded or RunEnded.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeAlias

import outcome
import trio

from genbatch.actors.batcher.counters import BatcherStats
from genbatch.actors.batcher.generation import Generation, GenerationRequest
from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Evaluated, Planned, Prompt, Request, Sequence
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.scheduling.plan import PromptBudget, SchedulerOutput
from genbatch.nif.context import Context
from genbatch.nif.errors import OptionError
from genbatch.nif.sampling.sampler import Sampled, SampleFault
from genbatch.proto.errors import GenbatchError


class Stepping(Protocol):
    """Books the messages of the thread; `Stepper` implements it. Each method returns whether no work is left."""

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


# The draws of a run's step for each sequence: one token, and one more for each accepted draft token.
Drawn: TypeAlias = list[list[Sampled | SampleFault]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A step of a run has ended; unless it was the last step, the next step has begun.

    Args:
        guessing_s: the seconds that a draft model took before the step.
    """

    run: Run
    drawn: Drawn
    num_drafted: int
    guessing_s: float = 0.0

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

    def book(self, stepping: Stepping) -> bool:
        """Book the end; return whether no work is left."""
        return stepping.run_ended(self.run, self.result)


StepMessage = Stepped | Decoded | RunEnded


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

    def request_id(self, message: Generate | Embed) -> str:
        """Return the name of a request in logs and spans: its gateway's name for it, or else a new one."""
        return message.request_id or f"{message.client or 'local'}#{next(self._numbers)}"

    def refused(self, message: Generate | Embed, error: GenbatchError) -> None:
        """Book a request that was not accepted."""
        self.stats.count_refused(error.code)
        if self._telemetry.attached:
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
        if self._telemetry.attached:
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
        if self._telemetry.attached:
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
        if self._telemetry.attached:
            measurements = {"queue_s": queue_s, "cached_tokens": request.cached_tokens}
            self._telemetry.execute("request.started", measurements, {"request_id": request.request_id})

    def paused(self, sequence: Sequence, *, swapped: bool) -> None:
        """Book that a sequence lost its blocks, and whether its KV was kept in host memory."""
        self.stats.preemptions += 1
        self.stats.swaps += swapped
        if self._telemetry.attached:
            metadata = {"request_id": sequence.request.request_id, "swapped": swapped}
            self._telemetry.execute("request.preempted", {"generated_tokens": sequence.num_generated}, metadata)

    def stepped(self, batch: list[Planned], seconds: float, *, num_drafted: int = 0) -> None:
        """Book one forward with `num_drafted` drafted tokens; call this before its tokens are booked."""
        self._now = trio.current_time()
        num_tokens = sum([len(planned.entry.tokens) for planned in batch]) + num_drafted
        self.stats.count_step(len(batch), num_tokens, seconds)
        self.stats.update_rates(self._now)
        if self._telemetry.attached:
            measurements = {"duration_s": seconds, "entries": len(batch), "tokens": num_tokens}
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
        if sequence.last_token_at is not None:
            self._inter_token.observe(now - sequence.last_token_at)
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
        if self._telemetry.attached:
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
        if self._telemetry.attached:
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
