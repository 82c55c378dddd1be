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

from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import outcome

from genbatch.actors.batcher.embeddings import QUEUE_SHARE, books
from genbatch.actors.batcher.grammars import Compiled, Grammars
from genbatch.actors.batcher.intake import Intake
from genbatch.actors.batcher.messages import Embed, Generate, charged_account
from genbatch.actors.batcher.open_requests import BatchState
from genbatch.actors.batcher.options import BatcherOptions, Load
from genbatch.actors.batcher.prompt_reader import PromptReader, ReadJob, without_template
from genbatch.actors.batcher.requests import HeldPrompt, Prompt, Request, TimeLimits
from genbatch.actors.batcher.slots import HeldPrompts, Slots
from genbatch.actors.runtime.actor import From, GenServer, reply_error
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest
from genbatch.proto.messages import GenerateRequest


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
        if first.scores_prompt:
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
        self._with_grammars: dict[int, Request] = {}  # by number, whose grammar is compiled or waits for that
        self._numbers = count(1)

    def __len__(self) -> int:
        waiting = (request.wanted.n for request in self._with_grammars.values() if not request.replied)
        return self._num_away + sum(waiting)

    def take(self, message: Generate | Embed, from_: "From[Any]") -> Request | None:
        """Lets a request in, or replies with what is wrong with it."""
        try:
            # guard: draining takes nothing new
            self._draining.check()
            if isinstance(message, Embed):
                request = self._embedding(message, from_)
            else:
                request = self._generation(message, from_)
        except GenbatchError as error:
            self._journal.refused(message, error)
            reply_error(from_, error)
            return None
        if request.grammar is None:
            return self._encode(request)
        self._with_grammars[request.number] = request
        self._grammars.compile(request)
        return None

    def _generation(self, message: Generate, from_: "From[Any]") -> Request:
        wanted = message.request
        self._intake.check(wanted)
        adapter = self._intake.adapter(wanted.model)
        self._intake.check_beams(message.beam_width, wanted)
        grammar = self._intake.grammar(wanted)
        limits = self._admit(wanted, message.client, embeds=False)
        request = self._request(message, from_, wanted, limits)
        request.on_token, request.on_begin = message.on_token, message.on_begin
        request.tag, request.beam_width, request.keep = message.tag, message.beam_width, message.keep
        request.grammar, request.adapter = grammar, adapter
        self._add(request)
        self._flight.arrived(request, message)
        return request

    def _embedding(self, message: Embed, from_: "From[Any]") -> Request:
        if self._intake.adapter(message.request.model) is not None:
            raise InvalidRequest("model", "an adapter changes what is generated; embeddings are the model's own")
        embedding = self._intake.embeddings.begin(message.request)
        wanted = books(embedding)
        limits = self._admit(wanted, message.client, embeds=True)
        request = self._request(message, from_, wanted, limits)
        request.embedding = embedding
        self._add(request)
        self._flight.close("embeddings were asked for, and a record has none")
        return request

    def _request(
        self, message: Generate | Embed, from_: "From[Any]", wanted: GenerateRequest, limits: TimeLimits
    ) -> Request:
        return Request(
            number=next(self._numbers),
            wanted=wanted,
            from_=from_,
            monitor=self._owner.monitor(from_),
            client=message.client,
            request_id=self._journal.request_id(message),
            accepted_at=self._flight.now(),
            limits=limits,
        )

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
        self._num_away -= message.request.wanted.n
        return self._finish(message.request, message.prompt) if message.request in self._requests else None

    def _limits(self, wanted: GenerateRequest, client: str) -> TimeLimits:
        """What bounds a request's time; the operator's bounds are for clients only."""
        options = self._options
        return TimeLimits(
            deadline_s=wanted.deadline_s,
            # guard: default deadline
            wait_s=(options.default_deadline_s or None) if client else None,
            answer_s=(options.max_answer_s or None) if client else None,
        )

    def _admit(self, wanted: GenerateRequest, client: str, *, embeds: bool) -> TimeLimits:
        """Lets a request wait, or raises."""
        limits = self._limits(wanted, client)
        account = charged_account(client, wanted.tenant, embeds=embeds)
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
        admission.check(wanted=wanted.n, client=account, patience_s=limits.patience_s, load=load)
        return limits

    def _encode(self, request: Request) -> Request | None:
        """Tokenizes the prompt, a long one off the event loop."""
        intake, wanted, owner = self._intake, request.wanted, self._owner
        reading: ReadJob[Any]
        if request.embedding is not None:
            texts = request.embedding.wanted
            read_texts = partial(intake.embeddings.read, texts)
            reading = without_template(read_texts, intake.embeddings.size(texts), request.account)
        else:
            start, read = partial(intake.start_prompt, wanted), partial(intake.read, wanted)
            reading = ReadJob(start, read, intake.size(wanted), request.account)
        prompt = self._reader.read(reading, lambda prompt: owner.ref.info(Encoded(request, prompt), control=True))
        if prompt is not None:
            return self._finish(request, prompt)
        self._num_away += wanted.n
        return None

    def _finish(self, request: Request, prompt: "outcome.Outcome[Any]") -> Request | None:
        """Makes the sequences, or ends a request that cannot have any."""
        if request.embedding is None:
            self._flight.encoded(request, prompt)
        try:
            max_tokens = self._keep(request, prompt.unwrap())
        except Exception as error:  # a tokenizer that chokes on a prompt fails that prompt's request
            refusal = error if isinstance(error, GenbatchError) else EngineError(f"reading it failed: {error}")
            self._journal.unreadable(request, refusal)
            self._requests.end(request, refusal)
            return None
        if request.embedding is None:
            request.sequences = self._intake.sequences(request, max_tokens)
        else:
            for _ in range(request.embedding.width):
                request.next_text(request.accepted_at)
        self._journal.accepted(request)
        if request.constraints:
            self._grammars.watch(request.sequences)
        return request

    def _keep(self, request: Request, found: Any) -> int:
        """Gives a request what was read of its prompt or its texts; returns how many tokens it may generate.

        Raises:
            PromptTooLong: there is no room for any.
        """
        if request.embedding is not None:
            self._intake.embeddings.start(request, found, self._intake.longest)
            return 0
        request.prompt_tokens, request.first_message, request.echo = found.tokens, found.first_message, found.echo
        if request.wanted.prompt_logprobs is not None:
            request.prompt_logprobs = [None]  # nothing foretells the first token
        return self._intake.max_tokens(request)
