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

from genbatch.actors.batcher.draining import Draining
from genbatch.actors.batcher.embeddings import QUEUE_SHARE, books
from genbatch.actors.batcher.flight import Flight
from genbatch.actors.batcher.grammars import Compiled, Grammars
from genbatch.actors.batcher.intake import Intake, Prompt
from genbatch.actors.batcher.journal import Journal
from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.batcher.open_requests import OpenRequests
from genbatch.actors.batcher.options import BatcherOptions, Load
from genbatch.actors.batcher.report import StallWatch
from genbatch.actors.batcher.requests import HeldPrompt, Request, account_of
from genbatch.actors.batcher.slots import HeldPrompts, Slots
from genbatch.actors.runtime.actor import From, Monitor, reply_error
from genbatch.actors.runtime.worker import Worker
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
                held = self._hold(self._intake.held_prompt(prefix, first.cache_key, first.adapter), context_is_free)
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


# Prompts with more characters than this are tokenized off the event loop.
INLINE_PROMPT_CHARS = 8192


@dataclass(frozen=True, slots=True)
class Encoded:
    """A long prompt has been tokenized, or the texts of an embedding request."""

    request: Request
    prompt: outcome.Outcome[Prompt | list[list[int]]]


class Arrivals:
    """Its length is the number of sequences, of requests whose prompt or grammar is with a thread.

    Args:
        options: how much may wait.
        draining: whether new ones are taken at all.
        intake: checks, tokenizes and makes sequences.
        grammars: answers with Compiled.
        worker: the tokenizer's thread.
        slots: what waits and what is free.
        requests: takes what is let in.
        journal, flight, watch: are told.
        monitor: watches over a caller.
        send: brings Encoded back to the actor that owns this.
        on_ready: called with each request that has its sequences.
    """

    def __init__(
        self,
        *,
        options: BatcherOptions,
        draining: Draining,
        intake: Intake,
        grammars: Grammars,
        worker: Worker,
        slots: Slots,
        requests: OpenRequests,
        journal: Journal,
        flight: Flight,
        watch: StallWatch,
        monitor: Callable[[From[Any]], Monitor],
        send: Callable[[Encoded], None],
        on_ready: Callable[[Request], None],
    ) -> None:
        self._options = options
        self._draining = draining
        self._intake = intake
        self._grammars = grammars
        self._worker = worker
        self._slots = slots
        self._requests = requests
        self._journal = journal
        self._flight = flight
        self._watch = watch
        self._monitor = monitor
        self._send = send
        self._on_ready = on_ready
        self._num_away = 0  # sequences of requests that are with a thread
        self._numbers = count(1)

    def __len__(self) -> int:
        return self._num_away

    def embed(self, message: Embed, from_: "From[Any]") -> None:
        """As `take`, for texts that are to be embedded."""
        try:
            self._draining.check()
            if self._intake.adapter(message.request.model) is not None:
                raise InvalidRequest("model", "an adapter changes what is generated; embeddings are the model's own")
            embedding = self._intake.embeddings.begin(message.request)
            wanted = books(embedding)
            deadline_s = self._admit(wanted, message.client, embeds=True)
        except GenbatchError as error:
            self._journal.refused(message, error)
            reply_error(from_, error)
            return
        now = self._flight.now()
        request = Request(
            number=next(self._numbers),
            wanted=wanted,
            embedding=embedding,
            from_=from_,
            monitor=self._monitor(from_),
            on_token=None,
            client=message.client,
            request_id=self._journal.request_id(message),
            accepted_at=now,
            expires_at=None if deadline_s is None else now + deadline_s,
        )
        self._add(request)
        self._flight.close("embeddings were asked for, and a record has none")
        self._encode(request)

    def _add(self, request: Request) -> None:
        if not self._requests:
            self._watch.restart(request.accepted_at)
        self._requests.add(request)

    def take(self, message: Generate, from_: "From[Any]") -> None:
        """Lets a request in, or replies with what is wrong with it."""
        wanted = message.request
        try:
            self._draining.check()
            self._intake.check(wanted)
            adapter = self._intake.adapter(wanted.model)
            self._intake.check_beams(message.beam_width, wanted)
            grammar = self._intake.grammar(wanted)
            deadline_s = self._admit(wanted, message.client, embeds=False)
        except GenbatchError as error:
            self._journal.refused(message, error)
            reply_error(from_, error)
            return
        now = self._flight.now()
        request = Request(
            number=next(self._numbers),
            wanted=wanted,
            from_=from_,
            monitor=self._monitor(from_),
            on_token=message.on_token,
            on_begin=message.on_begin,
            client=message.client,
            request_id=self._journal.request_id(message),
            accepted_at=now,
            tag=message.tag,
            beam_width=message.beam_width,
            keep=message.keep,
            grammar=grammar,
            adapter=adapter,
            expires_at=None if deadline_s is None else now + deadline_s,
        )
        self._add(request)
        self._flight.arrived(request, message, deadline_s)
        if request.grammar is None:
            self._encode(request)
        else:
            self._num_away += wanted.n
            self._grammars.compile(request)

    def compiled(self, message: Compiled) -> None:
        """Goes on with a request whose grammar was compiled, or refused."""
        request, constraints = message.request, message.constraints
        self._num_away -= request.wanted.n
        if request not in self._requests:
            return  # its caller left meanwhile
        if isinstance(constraints, outcome.Error):
            self._finish(request, constraints)
        else:
            request.constraints = constraints.unwrap()
            self._encode(request)

    def encoded(self, message: Encoded) -> None:
        """Goes on with a request whose long prompt was tokenized."""
        self._num_away -= message.request.wanted.n
        if message.request in self._requests:
            self._finish(message.request, message.prompt)

    def _admit(self, wanted: GenerateRequest, client: str, *, embeds: bool) -> float | None:
        """Lets a request wait, or raises; returns its deadline in seconds from now."""
        options = self._options
        deadline_s = wanted.deadline_s
        if deadline_s is None and client and options.default_deadline_s:
            deadline_s = options.default_deadline_s
        account = account_of(wanted.tenant or client, embeds=embeds)
        load = Load(
            free_slots=len(self._slots.seq_pool),
            waiting=len(self._slots.pending) + len(self),
            # The program's own requests, of which there may be many, have no share to be measured.
            waiting_of=self._requests.waiting_of() if account else {},
            open_of=self._requests.open_of() if account else {},
            service_s=self._journal.stats.median_service(),
        )
        admission = options.admission(client)
        if embeds and self._intake.generates:
            admission = replace(admission, max_queue=int(QUEUE_SHARE * admission.max_queue))
        admission.check(wanted=wanted.n, client=account, deadline_s=deadline_s, load=load)
        return deadline_s

    def _encode(self, request: Request) -> None:
        """Tokenizes the prompt, a long one off the event loop."""
        wanted, send = request.wanted, self._send
        read: Callable[[], Any] = partial(self._intake.read, wanted)
        size = self._intake.size(wanted)
        if request.embedding is not None:
            texts = request.embedding.wanted
            read, size = partial(self._intake.embeddings.read, texts), self._intake.embeddings.size(texts)
        if size <= INLINE_PROMPT_CHARS:
            self._finish(request, outcome.capture(read))
        else:
            self._num_away += wanted.n
            self._worker.submit(read, on_done=lambda prompt: send(Encoded(request, prompt)))

    def _finish(self, request: Request, prompt: "outcome.Outcome[Any]") -> None:
        """Makes the sequences, or ends a request that cannot have any."""
        if request.embedding is None:
            self._flight.encoded(request, prompt)
        try:
            found = prompt.unwrap()
            if request.embedding is not None:
                self._intake.embeddings.start(request, found, self._intake.longest)
                for _ in range(request.embedding.width):
                    request.next_text(request.accepted_at)
                self._journal.accepted(request)
                self._on_ready(request)
                return
            request.prompt_tokens, request.first_message, request.echo = found.tokens, found.first_message, found.echo
            if request.wanted.prompt_logprobs is not None:
                request.prompt_logprobs = [None]  # nothing foretells the first token
            max_tokens = self._intake.max_tokens(request)
        except Exception as error:  # a tokenizer that chokes on a prompt fails that prompt's request
            refusal = error if isinstance(error, GenbatchError) else EngineError(f"reading it failed: {error}")
            self._journal.unreadable(request, refusal)
            self._requests.end(request, refusal)
            return
        request.sequences = self._intake.sequences(request, max_tokens)
        self._journal.accepted(request)
        if request.constraints:
            self._grammars.watch(request.sequences)
        self._on_ready(request)
