"""Arrivals: requests on their way in, from the call to the queue for a slot.

    arrivals.take(message, from_)      # refuses the request at once, or begins to read it
    arrivals.compiled(message)         # the grammar thread has finished with it
    arrivals.encoded(message)          # the tokenizer thread has finished with it

Admission depends on the queue, and is decided before any work is spent on the request. Then its grammar is compiled
(Grammars) and its prompt is tokenized (PromptReader), off the event loop where either takes long. Intake (intake.py)
checks the message and makes the sequences.

    short text            tokenized at once
    long text             tokenized on the tokenizer's thread
    conversation          first rendered by the chat template, in another process (nif/text/templates.py)
        slow template     a thread waits for that process, then the tokenizer's thread continues

A request that was drawn in part before continues after its last token (`restore`), on engines that failed or
elsewhere. The prompt and the drawn tokens are evaluated again, as after a pause. A draw depends only on the logits, the
seed and the position. All other state of a sequence is a function of its tokens: penalties, the position in a grammar,
text held back for a stop string, calls and thinking. So the tokens are pushed through this state once more, and are
not shown again.

PromptSharing knows the held prefixes of prompts, and which requests reuse them unevaluated. A prefix is held when it
is configured, or when a first message arrives a second time.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import outcome

from genbatch.actors.batcher.embeddings import QUEUE_SHARE, TextsRequest
from genbatch.actors.batcher.generation import Generation, GenerationRequest
from genbatch.actors.batcher.intake import Intake
from genbatch.actors.batcher.messages import Embed, Generate
from genbatch.actors.batcher.open_requests import Admission, BatchState, Load, OpenRequests
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import HeldPrompt, Prompt, ReadJob, Request, Sequence, TimeLimits
from genbatch.actors.batcher.slots import HeldPrompts, Slots
from genbatch.actors.runtime.actor import From, GenServer, reply_error
from genbatch.actors.runtime.worker import SharedWorker, Worker
from genbatch.actors.scheduling.request import Phase, charged_account
from genbatch.nif.kv.block_pool import prefix_key
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.sampling.sampler import Constraint, Sampled
from genbatch.nif.text.tokenizer import ChatPrompt
from genbatch.proto.errors import EngineLost, GenbatchError, InvalidRequest, to_genbatch_error
from genbatch.proto.messages import DrawnTokens

if TYPE_CHECKING:  # imports llguidance, which is an extra
    from genbatch.nif.sampling.grammar_compiler import GrammarCompiler


T = TypeVar("T")

log = logging.getLogger("genbatch")

# The compiling thread rests after each grammar as long as the grammar took, up to this. Otherwise a flood of small
# grammars fills all slots in every step: a step in which eight sequences begin takes 2.4 times that of two.
MAX_REST_S = 0.05


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request's grammar was compiled, or refused."""

    request: GenerationRequest
    constraints: outcome.Outcome[list[Constraint]]


@dataclass(frozen=True, slots=True)
class PrepareGrammars:
    """Get ready for the first grammar now: see GrammarCompiler.prepare. A service sends this once it is ready."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sequence without a mask may be planned again."""

    sequence: Sequence


class Grammars:
    """Compile grammars, and make slow masks. `prepare` or the first grammar starts the threads and imports.

    Args:
        model: the model that defines the tokens.
        max_s: seconds of processor time that compiling one grammar may take.
        send: takes Compiled and Prepared, on the event loop.
        open_worker: makes the threads.
    """

    def __init__(
        self,
        model: Model,
        max_s: float,
        send: Callable[[Compiled | Prepared], None],
        open_worker: Callable[[str], Worker] = Worker,
    ) -> None:
        self._model = model
        self._max_s = max_s
        self._send = send
        self._open_worker = open_worker
        self._compiler: GrammarCompiler | None = None  # touched on the compiling thread only
        self._compiling: Worker | None = None
        self._preparing: Worker | None = None
        self._turns: dict[str, deque[GenerationRequest]] = {}  # waiting requests by account; accounts take turns
        self._is_busy = False
        self._is_closed = False
        self._live: list[Sequence] = []
        self._sitting_out: set[Sequence] = set()

    def compile(self, request: GenerationRequest) -> None:
        """Compile a grammar in its account's turn, so that one client's slow grammars delay no other client."""
        if self._is_closed:
            return
        waiting = self._turns.setdefault(request.account, deque())
        # A client that cancels and retries must not fill the queue.
        for left in [waiter for waiter in waiting if waiter.replied]:
            waiting.remove(left)
            self._send(Compiled(left, outcome.Value([])))
        waiting.append(request)
        if not self._is_busy:
            self._compile_next()

    def prepare(self) -> None:
        """Start the thread and the compiler now, so that the first grammar takes no longer than later ones."""
        if not self._is_closed and self._model.generates:
            self._compiling = self._compiling or self._open_worker("genbatch-grammar")
            self._compiling.submit(lambda: self._compiler_here().prepare(), on_done=_log_fault)

    def watch(self, sequences: ListOf[Sequence]) -> None:
        """Add sequences that have a constraint."""
        self._live += sequences

    def sitting_out(self) -> frozenset[int]:
        """Return the ids of the sequences that wait for a slow mask. A step without them does not wait."""
        if not self._live:
            return frozenset()
        self._live = [sequence for sequence in self._live if sequence.phase is not Phase.FINISHED]
        for sequence in self._live:
            constraint = sequence.constraint
            if constraint is not None and constraint.is_slow and sequence not in self._sitting_out:
                self._prepare(sequence, constraint)
        return frozenset(sequence.request_id for sequence in self._sitting_out)

    def prepared(self, message: Prepared) -> None:
        """Let the sequence be planned again."""
        self._sitting_out.remove(message.sequence)

    async def close(self) -> None:
        """End the threads and the compiler's process; waiting requests get no answer."""
        self._is_closed = True
        self._turns.clear()
        if self._compiling is not None:
            await self._compiling.run(self._close_compiler)
            await self._compiling.close()
        if self._preparing is not None:
            await self._preparing.close()

    def _prepare(self, sequence: Sequence, constraint: Constraint) -> None:
        self._preparing = self._preparing or self._open_worker("genbatch-masks")
        self._sitting_out.add(sequence)
        self._preparing.submit(constraint.prepare, on_done=lambda _: self._send(Prepared(sequence)))

    def _compile_next(self) -> None:
        self._is_busy = bool(self._turns)
        if not self._turns:
            return
        account, waiting = next(iter(self._turns.items()))
        request = waiting.popleft()
        del self._turns[account]
        if waiting:
            self._turns[account] = waiting  # behind other accounts
        self._compiling = worker = self._compiling or self._open_worker("genbatch-grammar")
        began = worker.now()

        def compiled(result: "outcome.Outcome[list[Constraint]]") -> None:
            rest_s = min(worker.now() - began, MAX_REST_S)
            self._send(Compiled(request, result))
            worker.submit(time.sleep, rest_s, on_done=lambda _: self._compile_next())

        worker.submit(self._compile, request, on_done=compiled)

    def _compile(self, request: GenerationRequest) -> list[Constraint]:
        """Compile on the compiling thread."""
        grammar, params = request.grammar, request.params
        assert grammar is not None
        if request.replied:  # the caller left while the request waited
            return []
        compiler = self._compiler_here()
        from genbatch.nif.sampling.grammar import branches
        from genbatch.nif.sampling.grammar_compiler import GrammarError

        owner, answer, kind, text = prefix_key(params.tenant), grammar.answer, str(grammar.kind), grammar.text
        if answer is not None:
            try:  # compile the answer's schema alone first, so that an error names the field at fault
                compiler.compile(answer.kind, answer.text, owner, 0)
            except GrammarError as error:
                raise InvalidRequest(answer.field, str(error)) from None
            kind, text = "branches", branches(grammar.text, answer.kind, answer.text)
        try:
            return [*compiler.compile(kind, text, owner, params.n)]
        except GrammarError as error:
            raise InvalidRequest(grammar.field, str(error)) from None

    def _compiler_here(self) -> "GrammarCompiler":
        """Return the compiler, on the compiling thread."""
        if self._compiler is None:
            from genbatch.nif.sampling.grammar_compiler import GrammarCompiler

            self._compiler = GrammarCompiler(self._model, self._max_s)
        return self._compiler

    def _close_compiler(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


# Prompts with more characters than this are tokenized off the event loop.
INLINE_PROMPT_CHARS = 8192
# Seconds that the event loop waits for a chat template. Most conversations of that length take 0.0001 s.
INLINE_RENDER_S = 0.005
# Seconds that the tokenizer's thread waits for a chat template, for longer conversations.
LONG_RENDER_S = 0.02


class PromptReader:
    """Tokenizes prompts; use it on the event loop.

    Args:
        worker: the tokenizer's thread.
        open_worker: makes the threads that wait for chat templates.
        inline_chars: texts with more characters are tokenized on the thread.
    """

    def __init__(
        self, worker: Worker, open_worker: Callable[[str], Worker], inline_chars: int = INLINE_PROMPT_CHARS
    ) -> None:
        self._worker = worker
        self._turns = SharedWorker(worker)
        self._open_worker = open_worker
        self._inline_chars = inline_chars
        self._waiting: list[Worker] = []  # all threads
        self._free: list[Worker] = []  # idle threads

    def read(
        self, reading: ReadJob[T], on_done: Callable[["outcome.Outcome[T]"], object]
    ) -> "outcome.Outcome[T] | None":
        """Return the outcome if it is available at once; else return None, and call `on_done` with it later."""
        if reading.size > self._inline_chars:
            self.submit(reading, on_done)
            return None
        try:
            prompt = reading.begin()
        except Exception as error:
            return outcome.Error(error)
        if prompt is None:
            return outcome.capture(reading.finish, None)
        if not self._worker.wait(prompt.rendering.wait, INLINE_RENDER_S):
            self._set_aside(reading, prompt, on_done)
            return None
        if prompt.num_characters > self._inline_chars:
            self._turns.submit(reading.client, partial(reading.finish, prompt), on_done=on_done)
            return None
        return outcome.capture(reading.finish, prompt)

    def submit(self, reading: ReadJob[T], on_done: Callable[["outcome.Outcome[T]"], object]) -> None:
        """Tokenize off the event loop; `on_done` gets the outcome on the event loop."""

        def work() -> tuple[ChatPrompt | None, Any]:
            prompt = reading.begin()
            if prompt is None or prompt.rendering.wait(LONG_RENDER_S):
                return None, reading.finish(prompt)
            return prompt, None

        def done(result: "outcome.Outcome[tuple[ChatPrompt | None, Any]]") -> None:
            try:
                prompt, value = result.unwrap()
            except Exception as error:
                on_done(outcome.Error(error))
                return
            if prompt is None:
                on_done(outcome.Value(value))
            else:
                self._set_aside(reading, prompt, on_done)

        self._turns.submit(reading.client, work, on_done=done)

    async def close(self) -> None:
        """End the threads after their current templates, which have time limits."""
        for waiting in self._waiting:
            await waiting.close()

    def _set_aside(
        self, reading: ReadJob[T], prompt: ChatPrompt, on_done: Callable[["outcome.Outcome[T]"], object]
    ) -> None:
        if not self._free:
            self._free.append(self._open_worker("genbatch-template"))
            self._waiting.append(self._free[0])
        waiting = self._free.pop()

        def rendered(_: "outcome.Outcome[bool]") -> None:
            self._free.append(waiting)
            self._turns.submit(reading.client, partial(reading.finish, prompt), on_done=on_done)

        waiting.submit(prompt.rendering.wait, on_done=rendered)


def without_template(job: Callable[[], T], size: int, client: str = "") -> ReadJob[T]:
    """Return a job for a text without a chat template."""
    return ReadJob(lambda: None, partial(_ignoring_prompt, job), size, client)


def _ignoring_prompt(job: Callable[[], T], _: ChatPrompt | None) -> T:
    return job()


def _log_fault(result: "outcome.Outcome[None]") -> None:
    try:
        result.unwrap()
    except Exception as error:  # a request with the same fault gets it as its error
        log.warning("the compiler of grammars is not ready: %r", error)


class PromptSharing:
    """Decide which prefixes are held, and which requests share them.

    Args:
        intake: renders configured messages, and makes held prompts.
        held_prompts: the held prompts.
        slots: frees the slots of dropped prompts.
    """

    def __init__(self, intake: Intake, held_prompts: HeldPrompts, slots: Slots) -> None:
        self._intake = intake
        self._held_prompts = held_prompts
        self._slots = slots

    def hold_configured(self, content: str) -> HeldPrompt:
        """Hold a configured system message for good, with a slot if one is free; its tokens are not evaluated yet."""
        prompt = self._intake.held_prompt(self._intake.system_prompt(content), b"")
        prompt.pinned = True
        self._held_prompts.hold(prompt)
        return prompt

    def share(self, request: Request, *, context_is_free: bool) -> None:
        """Let the request share a held prompt; hold its first message when another request had the same one."""
        first = request.sequences[0]
        if first.scores_prompt or not request.prompt_tokens:
            return
        prompt = self._held_prompts.find(request.prompt_tokens, first.cache_key, first.adapter)
        if prompt is None:
            prefix = request.first_message
            # A template may render the whole conversation differently. At least one token must remain to be evaluated.
            shares = len(prefix) < len(request.prompt_tokens) and request.prompt_tokens[: len(prefix)] == prefix
            if shares and self._held_prompts.notice(prefix, first.cache_key):
                noticed = self._intake.held_prompt(prefix, first.cache_key, first.adapter)
                noticed.noticed_by = request
                prompt = self._hold(noticed, context_is_free)
        if prompt is not None:
            first.donor = prompt
            first.num_shared = len(prompt.tokens)

    def _hold(self, prompt: HeldPrompt, context_is_free: bool) -> HeldPrompt | None:
        if self._held_prompts.hold(prompt):
            return prompt
        oldest = self._held_prompts.least_recent()
        if oldest is None or not context_is_free:
            return None
        self._slots.drop_held(oldest)
        self._held_prompts.hold(prompt)
        return prompt


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokenizer's thread has tokenized a long prompt, or the texts of an embedding request."""

    request: Request
    prompt: outcome.Outcome[Prompt | list[list[int]]]


class Arrivals:
    """The requests that a thread tokenizes or compiles a grammar for. The length counts their sequences.

    `take`, `compiled` and `encoded` return the request once it has its sequences.

    Args:
        state: the Batcher's shared state, in which arrivals are booked.
        options: the limits of admission.
        intake: checks, tokenizes and makes sequences.
        grammars: answers with Compiled.
        reader: tokenizes prompts.
        owner: the actor that owns this object; the actor monitors callers and receives Encoded.
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
        self._kv = state.ctx.kv
        self._slots = state.slots
        self._requests = state.requests
        self._journal = state.journal
        self._watch = state.watch
        self._flight = state.flight
        self._options = options
        self._admission = {of_clients: Admission.by(options, of_clients=of_clients) for of_clients in (False, True)}
        self._intake = intake
        self._grammars = grammars
        self._reader = reader
        self._owner = owner
        self._num_away = 0  # sequences of requests that are with the tokenizer's thread
        self._with_grammars: dict[int, GenerationRequest] = {}  # by number: requests with a grammar not yet compiled
        self._numbers = count(1)
        self._kinds: dict[type, Callable[[Any, From[Any]], Request]] = {
            Generate: self._generation,
            Embed: self._texts,
        }

    def __len__(self) -> int:
        waiting = (request.width for request in self._with_grammars.values() if not request.replied)
        return self._num_away + sum(waiting)

    def take(self, message: Generate | Embed, from_: "From[Any]") -> Request | None:
        """Admit a request, or reply with the error."""
        try:
            # guard: draining takes nothing new
            self._requests.check_open()
            request = self._kinds[type(message)](message, from_)
        except GenbatchError as error:
            self._journal.refused(message, error)
            reply_error(from_, error)
            return None
        if request.starts_reading:
            return self._encode(request)
        return None

    def _generation(self, message: Generate, from_: "From[Any]") -> GenerationRequest:
        params, intake = message.request, self._intake
        intake.check(message)
        adapter = intake.adapter(params.model)
        intake.check_beams(message.beam_width, params)
        grammar = intake.grammar(params)
        account = charged_account(message.client, params.tenant)
        limits = self._limits(params.deadline_s, message.client)
        if message.is_admitted:
            limits = limits_of_rest(limits, message.drawn)
        else:
            self._admit(message.client, account, params.n, limits, embeds=False)
        request = GenerationRequest(
            **self._common(message, from_, limits),
            params=params,
            width=params.n,
            payer=params.payer,
            on_token=message.on_token,
            shows=message.shows,
            drawn=message.drawn,
            tag=message.tag,
            beam_width=message.beam_width,
            keep=message.keep,
            grammar=grammar,
            adapter=adapter,
        )
        start, read = partial(intake.start_prompt, params), partial(intake.read, params)
        request.read_job = ReadJob(start, read, intake.size(params), request.account)
        request.begin_waiting = partial(self._begin_generation, request, message.is_admitted)
        self._add(request)
        self._flight.arrived(request, message)
        if message.drawn:
            self._flight.close("a request goes on after tokens that are not in the record")
        if grammar is not None:
            request.starts_reading = False
            self._with_grammars[request.number] = request
            self._grammars.compile(request)
        return request

    def _begin_generation(
        self, request: GenerationRequest, is_admitted: bool, prompt: "outcome.Outcome[Prompt]"
    ) -> None:
        self._flight.encoded(request, prompt)
        self._intake.start(request, prompt.unwrap())
        ttl_s = request.params.cache_ttl_s
        if ttl_s is not None:
            self._kv.keep(request.prompt_tokens, request.sequences[0].cache_key, ttl_s)
        restore(request, is_admitted=is_admitted)
        if request.constraints:
            self._grammars.watch(request.sequences)

    def _texts(self, message: Embed, from_: "From[Any]") -> TextsRequest[Any]:
        params, intake = message.request, self._intake.of_texts[type(message.request)]
        if self._intake.adapter(params.model) is not None:
            raise InvalidRequest("model", f"an adapter changes what is generated; {intake.noun} are the model's own")
        width = intake.check(params, is_validated=message.is_validated)
        account = charged_account(message.client, params.tenant, embeds=True)
        limits = self._limits(params.deadline_s, message.client)
        self._admit(message.client, account, width, limits, embeds=True)
        # A single text has no time limit of its own: the operator's limit on answers concerns generated text.
        limits = replace(limits, answer_s=None)
        request = intake.request_type(**self._common(message, from_, limits), params=params, width=width)
        request.read_job = without_template(partial(intake.read, params), intake.size(params), request.account)
        request.begin_waiting = lambda texts: intake.start(request, texts.unwrap(), self._intake.longest)
        self._add(request)
        self._flight.close(f"{request.kind} were asked for, and a record has none")
        return request

    def _common(self, message: Generate | Embed, from_: "From[Any]", limits: TimeLimits) -> dict[str, Any]:
        """Return the fields that every request has."""
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
        """Continue with a request after its grammar was compiled or refused."""
        request = message.request
        del self._with_grammars[request.number]
        if request not in self._requests:
            return None  # its caller left meanwhile
        try:
            request.constraints = message.constraints.unwrap()
        except Exception as error:
            return self._finish(request, outcome.Error(error))
        return self._encode(request)

    def encoded(self, message: Encoded) -> Request | None:
        """Continue with a request after its long prompt was tokenized."""
        self._num_away -= message.request.width
        return self._finish(message.request, message.prompt) if message.request in self._requests else None

    def _limits(self, deadline_s: float | None, client: str) -> TimeLimits:
        """Return the time limits of a request; the operator's limits apply to clients only."""
        options = self._options
        return TimeLimits(
            deadline_s=deadline_s,
            # guard: default deadline
            wait_s=(options.default_deadline_s or None) if client else None,
            answer_s=(options.max_answer_s or None) if client else None,
        )

    def _admit(self, client: str, account: str, width: int, limits: TimeLimits, *, embeds: bool) -> None:
        """Check that `width` more sequences of an account may wait.

        Raises:
            QueueFull: too many sequences wait already.
            DeadlineExceeded: the deadline would pass before the sequences' turn.
        """
        load = Load(
            free_slots=len(self._slots.seq_pool),
            waiting=len(self._slots.pending) + len(self),
            # In-process requests have no account, and their number is not bounded by a share.
            waiting_of=self._requests.waiting_of() if account else {},
            open_of=self._requests.open_of() if account else {},
            service_s=self._journal.stats.median_service(),
        )
        admission = self._admission[bool(client)]
        if embeds and self._intake.generates:
            admission = replace(admission, max_queue=int(QUEUE_SHARE * admission.max_queue))
        admission.check(num_sequences=width, client=account, patience_s=limits.patience_s, load=load)

    def _encode(self, request: Request) -> Request | None:
        """Tokenize the prompt or the texts; long ones are tokenized off the event loop."""
        owner = self._owner
        assert request.read_job is not None
        prompt = self._reader.read(
            request.read_job, lambda prompt: owner.ref.info(Encoded(request, prompt), control=True)
        )
        if prompt is not None:
            return self._finish(request, prompt)
        self._num_away += request.width
        return None

    def _finish(self, request: Request, prompt: "outcome.Outcome[Any]") -> Request | None:
        """Make the sequences, or end a request for which none can be made."""
        assert request.begin_waiting is not None
        try:
            request.begin_waiting(prompt)
        except Exception as error:  # a tokenizer that fails on a prompt fails only that request
            refusal = to_genbatch_error(error, "reading it failed")
            self._journal.unreadable(request, refusal)
            self._requests.end(request, refusal)
            return None
        self._journal.accepted(request)
        return request


def limits_of_rest(limits: TimeLimits, drawn: ListOf[DrawnTokens]) -> TimeLimits:
    """Return the limits of a resumed request: the operator's bound on the first wait ends with the first token."""
    return replace(limits, wait_s=None) if any(part.token_ids for part in drawn) else limits


def restore(request: GenerationRequest, *, is_admitted: bool) -> None:
    """Restore the request's new sequences to their earlier state.

    Args:
        is_admitted: see Generate.

    Raises:
        EngineLost: the tokens do not fit this engine: a choice ends before its last token.
        InvalidRequest: the same, for tokens that came with a client's request.
    """
    if not request.drawn:
        return
    assert len(request.drawn) == len(request.sequences), "as many choices as the request has"
    for sequence, drawn in zip(request.generations, request.drawn, strict=True):
        if is_admitted:
            sequence.turn = -math.inf  # it precedes all waiting sequences
        if drawn.token_ids and not _push_again(sequence, drawn):
            if not is_admitted:
                raise InvalidRequest("drawn", "a choice ends before its last token")
            delivered = sum(len(part.token_ids) for part in request.drawn)
            raise EngineLost("the engine died, and the next one ends the answer before its last token", delivered)


def _push_again(sequence: Generation, drawn: DrawnTokens) -> bool:
    """Push the tokens through the sequence's state; return False if they end it before the last one."""
    output, sampler = sequence.output, sequence.sampler
    sequence.num_shown = len(drawn.token_ids)
    # A prompt with scores must be evaluated even if the answer is complete, so its last token is drawn again.
    token_ids = drawn.token_ids[:-1] if sequence.scores_prompt else drawn.token_ids
    for index, token_id in enumerate(token_ids):
        if output.finish_reason is not None:
            return False
        logprob, top = drawn.logprobs[index] if drawn.logprobs else (None, {})
        # guard: a sampler counts the tokens of a dead engine
        sampler.accept(token_id)
        # guard: text follows that of a dead engine
        output.push(Sampled(token_id, logprob, tuple(top.items())))
    output.keep_call_ids(drawn.call_ids)
    sequence.tokens += token_ids
    sequence.num_generated = len(token_ids)
    return True


def end_complete(request: Request, requests: OpenRequests) -> None:
    """End the sequences that were complete when the engine failed."""
    for sequence in request.sequences:
        if sequence.final_reason is not None:
            requests.finish(sequence, sequence.final_reason)
