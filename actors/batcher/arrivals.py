"""Arrivals: requests on their way in, from the call to the queue for a slot.

    arrivals.take(message, from_)      # is refused at once, or on its way
    arrivals.compiled(message)         # the grammar's thread is done with it
    arrivals.encoded(message)          # the tokenizer's is

Whether one is let in depends on what waits already, and is decided before anything is spent on it. Then its grammar is
compiled and its prompt tokenized, off the event loop where that takes long. Intake (intake.py) checks the message and
makes the sequences.

PromptSharing knows the beginnings of prompts that are held, and which requests take them over unevaluated. What is
held is configured, or is a first message that came a second time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import outcome

from genbatch.actors.batcher import resume
from genbatch.actors.batcher.embeddings import QUEUE_SHARE, TextsRequest
from genbatch.actors.batcher.generation import GenerationRequest
from genbatch.actors.batcher.grammars import Compiled, Grammars
from genbatch.actors.batcher.intake import Intake
from genbatch.actors.batcher.kept_logits import Keep
from genbatch.actors.batcher.messages import Embed, Generate, charged_account
from genbatch.actors.batcher.open_requests import BatchState
from genbatch.actors.batcher.options import BatcherOptions, Load
from genbatch.actors.batcher.prompt_reader import PromptReader, ReadJob, without_template
from genbatch.actors.batcher.requests import HeldPrompt, Prompt, Request, TimeLimits
from genbatch.actors.batcher.slots import HeldPrompts, Slots
from genbatch.actors.runtime.actor import From, GenServer, reply_error
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest


class PromptSharing:
    """Decides what is held, and which requests share it.

    Args:
        intake: renders configured messages, and makes held prompts.
        held: what is held.
        slots: frees what is held no longer.
    """

    def __init__(self, intake: Intake, held: HeldPrompts, slots: Slots) -> None:
        self._intake = intake
        self._held = held
        self._slots = slots

    def hold_configured(self, content: str) -> HeldPrompt:
        """Takes a slot, if there is one, for a system message that stays; its tokens are still to be evaluated."""
        held = self._intake.held_prompt(self._intake.system_prompt(content), b"")
        held.pinned = True
        self._held.hold(held)
        return held

    def share(self, request: Request, *, context_is_free: bool) -> None:
        """Lets the request share a held prompt; holds its first message when another request had the same."""
        first = request.sequences[0]
        if first.scores_prompt or not request.prompt_tokens:
            return
        held = self._held.find(request.prompt_tokens, first.cache_key, first.adapter)
        if held is None:
            prefix = request.first_message
            # A template may do something new with a conversation; at least one token stays to be evaluated.
            shares = len(prefix) < len(request.prompt_tokens) and request.prompt_tokens[: len(prefix)] == prefix
            if shares and self._held.notice(prefix, first.cache_key):
                noticed = self._intake.held_prompt(prefix, first.cache_key, first.adapter)
                noticed.noticed_by = request
                held = self._hold(noticed, context_is_free)
        if held is not None:
            first.donor = held
            first.num_shared = len(held.tokens)

    def _hold(self, held: HeldPrompt, context_is_free: bool) -> HeldPrompt | None:
        if self._held.hold(held):
            return held
        oldest = self._held.least_recent()
        if oldest is None or not context_is_free:
            return None
        self._slots.drop_held(oldest)
        self._held.hold(held)
        return held


@dataclass(frozen=True, slots=True)
class Encoded:
    """A long prompt has been tokenized, or the texts of an embedding request."""

    request: Request
    prompt: outcome.Outcome[Prompt | list[list[int]]]


class Arrivals:
    """Its length is the number of sequences, of requests whose prompt or grammar is with a thread.

    What lets a request in, or goes on with it, returns it once it has its sequences.

    Args:
        state: who is there already, and where arrivals are booked.
        options: how much may wait.
        intake: checks, tokenizes and makes sequences.
        grammars: answers with Compiled.
        reader: makes tokens of prompts.
        owner: the actor that this belongs to: it watches over callers, and gets Encoded.
    """

    def __init__(
        self,
        state: BatchState,
        options: BatcherOptions,
        intake: Intake,
        grammars: Grammars,
        reader: PromptReader,
        owner: GenServer,
    ) -> None:
        self._slots = state.slots
        self._requests = state.requests
        self._draining = state.draining
        self._journal = state.journal
        self._watch = state.watch
        self._flight = state.flight
        self._options = options
        self._intake = intake
        self._grammars = grammars
        self._reader = reader
        self._owner = owner
        self._num_away = 0  # sequences of requests that are with the tokenizer's thread
        self._with_grammars: dict[int, GenerationRequest] = {}  # by number, whose grammar is compiled or waits for that
        self._numbers = count(1)
        self._kinds: dict[type, Callable[[Any, From[Any]], Request]] = {
            Generate: self._generation,
            Embed: self._texts,
        }

    def __len__(self) -> int:
        waiting = (request.width for request in self._with_grammars.values() if not request.replied)
        return self._num_away + sum(waiting)

    def take(self, message: Generate | Embed, from_: "From[Any]") -> Request | None:
        """Lets a request in, or replies with what is wrong with it."""
        try:
            # guard: draining takes nothing new
            self._draining.check()
            request = self._kinds[type(message)](message, from_)
        except GenbatchError as error:
            self._journal.refused(message, error)
            reply_error(from_, error)
            return None
        if request.starts_reading:
            return self._encode(request)
        return None

    def _generation(self, message: Generate, from_: "From[Any]") -> GenerationRequest:
        wanted, intake = message.request, self._intake
        intake.check(message)
        adapter = intake.adapter(wanted.model)
        intake.check_beams(message.beam_width, wanted)
        grammar = intake.grammar(wanted)
        account = charged_account(message.client, wanted.tenant)
        limits = self._limits(wanted.deadline_s, message.client)
        if message.drawn:  # another engine had let it in
            limits = resume.time_limits(limits, message.drawn)
        else:
            self._admit(message.client, account, wanted.n, limits, embeds=False)
        request = GenerationRequest(
            **self._common(message, from_, limits),
            wanted=wanted,
            width=wanted.n,
            payer=wanted.payer,
            on_token=message.on_token,
            shows=message.shows,
            drawn=message.drawn,
            tag=message.tag,
            beam_width=message.beam_width,
            keep=message.keep or Keep(),
            grammar=grammar,
            adapter=adapter,
        )
        start, read = partial(intake.start_prompt, wanted), partial(intake.read, wanted)
        request.read_job = ReadJob(start, read, intake.size(wanted), request.account)
        request.begin_waiting = partial(self._begin_generation, request)
        self._add(request)
        self._flight.arrived(request, message)
        if message.drawn:
            self._flight.close("a request goes on that another engine began, whose tokens are not in the record")
        if grammar is not None:
            request.starts_reading = False
            self._with_grammars[request.number] = request
            self._grammars.compile(request)
        return request

    def _begin_generation(self, request: GenerationRequest, prompt: "outcome.Outcome[Prompt]") -> None:
        self._flight.encoded(request, prompt)
        self._intake.start(request, prompt.unwrap())
        resume.restore(request)
        if request.constraints:
            self._grammars.watch(request.sequences)

    def _texts(self, message: Embed, from_: "From[Any]") -> TextsRequest[Any]:
        wanted, intake = message.request, self._intake.of_texts[type(message.request)]
        if self._intake.adapter(wanted.model) is not None:
            raise InvalidRequest("model", f"an adapter changes what is generated; {intake.noun} are the model's own")
        width = intake.check(wanted, is_validated=message.is_validated)
        account = charged_account(message.client, wanted.tenant, embeds=True)
        limits = self._limits(wanted.deadline_s, message.client)
        self._admit(message.client, account, width, limits, embeds=True)
        # One text has no time of its own: the operator's bound on an answer is for what is generated.
        limits = replace(limits, answer_s=None)
        request = intake.request_type(**self._common(message, from_, limits), wanted=wanted, width=width)
        request.read_job = without_template(partial(intake.read, wanted), intake.size(wanted), request.account)
        request.begin_waiting = lambda texts: intake.start(request, texts.unwrap(), self._intake.longest)
        self._add(request)
        self._flight.close(f"{request.kind} were asked for, and a record has none")
        return request

    def _common(self, message: Generate | Embed, from_: "From[Any]", limits: TimeLimits) -> dict[str, Any]:
        """The fields that every request has."""
        return {
            "number": next(self._numbers),
            "from_": from_,
            "monitor": self._owner.monitor(from_),
            "client": message.client,
            "tenant": message.request.tenant,
            "request_id": self._journal.request_id(message),
            "accepted_at": self._flight.now(),
            "limits": limits,
        }

    def _add(self, request: Request) -> None:
        if not self._requests:
            self._watch.restart(request.accepted_at)
        self._requests.add(request)

    def compiled(self, message: Compiled) -> Request | None:
        """Goes on with a request whose grammar was compiled, or refused."""
        request, constraints = message.request, message.constraints
        del self._with_grammars[request.number]
        if request not in self._requests:
            return None  # its caller left meanwhile
        if isinstance(constraints, outcome.Error):
            return self._finish(request, constraints)
        request.constraints = constraints.unwrap()
        return self._encode(request)

    def encoded(self, message: Encoded) -> Request | None:
        """Goes on with a request whose long prompt was tokenized."""
        self._num_away -= message.request.width
        return self._finish(message.request, message.prompt) if message.request in self._requests else None

    def _limits(self, deadline_s: float | None, client: str) -> TimeLimits:
        """What bounds a request's time; the operator's bounds are for clients only."""
        options = self._options
        return TimeLimits(
            deadline_s=deadline_s,
            # guard: default deadline
            wait_s=(options.default_deadline_s or None) if client else None,
            answer_s=(options.max_answer_s or None) if client else None,
        )

    def _admit(self, client: str, account: str, width: int, limits: TimeLimits, *, embeds: bool) -> None:
        """Let so many more sequences of an account wait.

        Raises:
            QueueFull: there are too many already.
            DeadlineExceeded: the deadline would pass before its turn.
        """
        load = Load(
            free_slots=len(self._slots.seq_pool),
            waiting=len(self._slots.pending) + len(self),
            # The program's own requests, of which there may be many, have no share to be measured.
            waiting_of=self._requests.waiting_of() if account else {},
            open_of=self._requests.open_of() if account else {},
            service_s=self._journal.stats.median_service(),
        )
        admission = self._options.admission(client)
        if embeds and self._intake.generates:
            admission = replace(admission, max_queue=int(QUEUE_SHARE * admission.max_queue))
        admission.check(wanted=width, client=account, patience_s=limits.patience_s, load=load)

    def _encode(self, request: Request) -> Request | None:
        """Read the prompt or the texts, long ones off the event loop."""
        owner = self._owner
        assert request.read_job is not None
        found = self._reader.read(request.read_job, lambda found: owner.ref.info(Encoded(request, found), control=True))
        if found is not None:
            return self._finish(request, found)
        self._num_away += request.width
        return None

    def _finish(self, request: Request, found: "outcome.Outcome[Any]") -> Request | None:
        """Make the sequences, or end a request that cannot have any."""
        assert request.begin_waiting is not None
        try:
            request.begin_waiting(found)
        except Exception as error:  # a tokenizer that chokes on a prompt fails that prompt's request
            refusal = error if isinstance(error, GenbatchError) else EngineError(f"reading it failed: {error}")
            self._journal.unreadable(request, refusal)
            self._requests.end(request, refusal)
            return None
        self._journal.accepted(request)
        return request
