"""Who is told of what happens: the Journal, for those who look on, and a Flight, for a recorder.

The Journal counts in the stats and tells whoever listens to telemetry. A Flight is told of all that decides about
ticks: objects, tokens among them. And it answers: a replay says what time it is, and who is left out of a plan.

Events of the Batcher (measurements | metadata):

    request.accepted     tokenize_s, prompt_tokens, max_tokens, n, temperature | request_id, client, tenant, model, kind
                         its prompt is tokenized and it waits; kind is "chat", "text_completion",
                         "embeddings" or "scores"
    request.refused      | request_id, client, tenant, model, code   it was not accepted; code is the error's
    request.started      queue_s, cached_tokens | request_id         it has a slot, for the first time
    request.first_token  ttft_s | request_id
    request.preempted    generated_tokens | request_id, swapped      its blocks were taken; it goes on by itself
    request.finished     e2e_s, prompt_tokens, cached_tokens, generation_tokens | request_id, client, tenant, model,
                         reason, code   its one end; code is "" unless the reason is "error"
    step.end             duration_s, entries, tokens | model         one forward over so many sequences and tokens

Each accepted request has one request.finished; events of one request come in the order above. No event holds text of
a prompt or of an answer. Values are numbers, text and booleans, so that events can cross processes.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from itertools import count

import outcome
import trio

from genbatch.actors.batcher.counters import BatcherStats
from genbatch.actors.batcher.events import StepMessage
from genbatch.actors.batcher.generation import GenerationRequest
from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Planned, Prompt, Request, Sequence
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.scheduling.plan import PromptBudget, SchedulerOutput
from genbatch.nif.context import Context
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import GenbatchError


class Journal:
    """The one place that books the lives of requests; telemetry costs nothing while nobody listens.

    Args:
        stats: where everything is counted.
        telemetry: who listens.
        model: the model's name.
        now: the time that decides.
    """

    def __init__(
        self, stats: BatcherStats, telemetry: Telemetry, model: str, now: Callable[[], float] = trio.current_time
    ) -> None:
        self.stats = stats
        self._deciding_time = now
        self._telemetry = telemetry
        self._model = model
        self._inter_token = stats.histograms["inter_token_latency_seconds"]  # has a value for each token
        self._numbers = count(1)
        self._now = trio.current_time()  # when the last step ended: the time of all its tokens

    def request_id(self, message: Generate | Embed) -> str:
        """What a request is called in logs and spans: its gateway's name for it, else one of our own."""
        return message.request_id or f"{message.client or 'local'}#{next(self._numbers)}"

    def refused(self, message: Generate | Embed, error: GenbatchError) -> None:
        """Books a request that was not accepted."""
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
        """Books a request that was refused once its prompt was tokenized."""
        self.stats.count_refused(error.code)
        if self._telemetry.attached:
            self._telemetry.execute("request.refused", {}, {**self._names(request), "code": error.code})

    def accepted(self, request: Request) -> None:
        """Books a request whose sequences are about to wait."""
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
        """Books that a sequence has taken a slot."""
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
        """Books that a sequence's blocks were taken, and whether its KV was kept in host memory."""
        self.stats.preemptions += 1
        self.stats.swaps += swapped
        if self._telemetry.attached:
            metadata = {"request_id": sequence.request.request_id, "swapped": swapped}
            self._telemetry.execute("request.preempted", {"generated_tokens": sequence.num_generated}, metadata)

    def stepped(self, batch: list[Planned], seconds: float, *, num_drafted: int = 0) -> None:
        """Books one forward, over so many drafted tokens besides; to be called before its tokens are booked."""
        self._now = trio.current_time()
        num_tokens = sum([len(planned.entry.tokens) for planned in batch]) + num_drafted
        self.stats.count_step(len(batch), num_tokens, seconds)
        self.stats.update_rates(self._now)
        if self._telemetry.attached:
            measurements = {"duration_s": seconds, "entries": len(batch), "tokens": num_tokens}
            self._telemetry.execute("step.end", measurements, {"model": self._model})

    def drafted(self, num_drafted: int, num_accepted: int) -> None:
        """Books the drafts of one forward, and how many of their tokens were right."""
        self.stats.drafted_tokens += num_drafted
        self.stats.accepted_draft_tokens += num_accepted

    def generated(self, sequence: Sequence, num_tokens: int = 1) -> None:
        """Books what a sequence has drawn in the last step: one token, or one a beam."""
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
        """Books the end of a request that was taken in, however it ended."""
        now = trio.current_time()
        histograms = self.stats.histograms
        self.stats.count_finished(reason, now - request.accepted_at)
        if request.share is None:  # it ended while its prompt was still being tokenized
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
    """A flight that nobody records. Between two calls of `began` one message is handled."""

    def begin(self, context: Context, system_prompts: ListOf[list[int]]) -> None:
        """The Batcher has opened its context, and is about to evaluate the prompts that it holds from the start."""

    def began(self) -> None:
        """The Batcher turns to its next message."""

    def now(self) -> float:
        """The time that decides: seconds on the event loop's clock."""
        return trio.current_time()

    def arrived(self, request: GenerationRequest, message: Generate) -> None:
        """A request was accepted."""

    def encoded(self, request: Request, prompt: outcome.Outcome[Prompt]) -> None:
        """Its prompt was tokenized."""

    def left(self, request: Request) -> None:
        """Its caller is gone."""

    def stepped(self, message: StepMessage) -> None:
        """A step has ended, and was booked."""

    def draining(self, timeout_s: float) -> None:
        """New requests are refused from now on."""

    def drain_over(self) -> None:
        """The requests that are still open are cancelled."""

    def prompted(self) -> None:
        """Something else has become ready: a tick follows where none is under way."""

    def sitting_out(self, ids: frozenset[int]) -> frozenset[int]:
        """Who is not to be planned in the next tick."""
        return ids

    def prompt_budget(self, budget: PromptBudget | None) -> PromptBudget | None:
        """The time for prompts in the next tick."""
        return budget

    def ticked(self, plan: SchedulerOutput, groups: ListOf[ListOf[Planned]]) -> None:
        """A tick has planned, and made these forwards of it."""

    def close(self, reason: str) -> None:
        """Nothing that follows can be told; may be called again."""


OpenFlight = Callable[[BatcherOptions], Flight]


def unrecorded(options: BatcherOptions) -> Flight:
    """A flight that nobody records.

    Raises:
        OptionError: the options ask for a record.
    """
    if options.record is not None:
        raise OptionError("record", "a Batcher made without `open_flight` records nothing")
    return Flight()
