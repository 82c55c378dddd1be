"""A request, and its units of scheduling.

Every kind of work is a class. Generations and beam searches are in generation.py, embeddings in embeddings.py.

Slotted                      a unit with tokens, which takes a slot of the context
  ├ HeldPrompt               a prompt that stays, so that others share it as a prefix
  └ Sequence                 belongs to a Request
      ├ Generation           draws token after token
      │   └ BeamGeneration   keeps several continuations
      └ TextEmbedding        draws no token and ends with its prompt
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import outcome

from genbatch.actors.runtime.actor import From, Monitor, reply, reply_error
from genbatch.actors.scheduling.request import LlmRequest, Phase, RequestList, charged_account
from genbatch.nif.runner import Entry, Logits, LoraAdapter, Rows
from genbatch.nif.sampling.sampler import Constraint, Sampled, SampleFault, SamplerState
from genbatch.nif.text.tokenizer import ChatPrompt
from genbatch.proto.errors import Cancelled, DeadlineExceeded, GenbatchError
from genbatch.proto.messages import FinishReason, Payer, TokenLogprob

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Planned:
    """One entry of a step.

    Args:
        owner: the unit of scheduling that the entry belongs to.
        entry: the tokens to evaluate.
        sampler: draws the next token from the entry's last logits; None for an entry without a draw.
    """

    owner: "Slotted"
    entry: Entry
    sampler: SamplerState | None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The results of a step for one entry.

    Args:
        drawn: the next token, or the fault of the draw; None for an entry without a draw.
        prompt_logprobs: log-probs of the prompt tokens that follow the entry's tokens.
        rows: the kept logits, [rows, vocab_size] on the CPU, or the states of a text to embed; None for neither.
    """

    drawn: Sampled | SampleFault | None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    rows: npt.NDArray[np.float32] | None = None


class Books(Protocol):
    """Books the progress of a unit of scheduling; `StepCommit` implements it."""

    def prefilled(self, num_tokens: int) -> None:
        """Count tokens that were evaluated as context."""

    def generated(self, sequence: "Sequence", num_tokens: int = 1) -> None:
        """Count tokens that a sequence has drawn in this step."""

    def embedded(self) -> None:
        """Count a text that has its embedding."""

    def copy_slot(self, source: int, target: int) -> None:
        """Replace the KV of one slot with that of another."""

    def drop_held(self, held: "HeldPrompt") -> None:
        """Free a held prompt."""

    def finish(self, sequence: "Sequence", reason: FinishReason) -> None:
        """End a sequence, and its request if this was the last sequence."""

    def fail(self, request: "Request", error: GenbatchError) -> None:
        """End a request and all its sequences with an error."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slotted(LlmRequest):
    """A unit of scheduling with tokens, which holds a slot while it is being evaluated.

    Args:
        tokens: prompt and generated token ids; position i of the KV cache belongs to tokens[i].
        seq_id: the slot, None while it waits.
        donor: the unit with the prefix that this one shares, once evaluated; None for no sharing.
        num_shared: the number of positions that it shares with the donor.
        beam_slots: the further slots of a beam search, one per beam after the first.
        adapter: the LoRA adapter that evaluates it.
        waits_for_blocks: whether blocks of its prompt are being read from the disk.
    """

    tokens: list[int] = field(default_factory=list)
    seq_id: int | None = None
    donor: "Slotted | None" = None
    num_shared: int = 0
    beam_slots: list[int] = field(default_factory=list)
    adapter: LoraAdapter | None = None
    waits_for_blocks: bool = False
    block_names: list[bytes] = field(default_factory=list)  # of its tokens, as far as the prefix cache was searched

    # Sharing

    @property
    def as_held(self) -> "HeldPrompt | None":
        """This unit, if it is a held prompt with a slot; else None."""
        return None

    @property
    def held_donor(self) -> "HeldPrompt | None":
        """The held prompt at the start of this unit, directly or through another choice of its request."""
        donor = self.donor
        while donor is not None and donor.as_held is None:
            donor = donor.donor
        return None if donor is None else donor.as_held

    @property
    def pinned_donor(self) -> "HeldPrompt | None":
        """The configured prompt at the start of this unit, directly or through another held prompt."""
        donor = self.held_donor
        while donor is not None and not donor.pinned:
            donor = donor.held_donor
        return donor

    @property
    def donor_ready(self) -> bool:
        """True if the shared positions can be copied now."""
        donor = self.donor
        return donor is not None and donor.seq_id is not None and donor.num_computed >= self.num_shared

    @property
    def waits_for_others(self) -> bool:
        """True if the unit should wait: for its donor, which evaluates the shared positions, or for blocks on disk."""
        donor = self.donor
        if self.waits_for_blocks:
            return True
        return donor is not None and donor.phase is not Phase.FINISHED and not self.donor_ready

    @property
    def num_copied_blocks(self) -> int:
        """Blocks that this unit and its donor both copy while the original block still exists."""
        return 0

    # Entries

    @property
    def kv_slots(self) -> list[int]:
        """The slots that hold KV of this unit."""
        if self.seq_id is None:
            return []
        return [self.seq_id, *self.beam_slots] if self.phase is Phase.DECODING else [self.seq_id]

    @property
    def decode_slots(self) -> list[int]:
        """The slots to which the next decode adds a position."""
        assert self.seq_id is not None
        return [self.seq_id]

    @property
    def runs_ahead(self) -> bool:
        """True if its decode steps may follow one another without a plan."""
        return False

    def plan_chunk(self, size: int) -> Planned:
        """Return an entry for the next `size` unevaluated tokens: a chunk of the context, or the token drawn last."""
        start = self.num_computed
        tokens = self.tokens[start : start + size]
        assert self.seq_id is not None and tokens, "planned without a slot or without tokens"
        logits, sampler = self.reads(start, is_last=start + size == len(self.tokens))
        handle = 0 if self.adapter is None else self.adapter.handle
        return Planned(self, Entry(self.seq_id, tokens, start, logits, handle), sampler)

    def plan_decode(self) -> list[Planned]:
        """Return the entries of a decode step."""
        return [self.plan_chunk(1)]

    def reads(self, start: int, *, is_last: bool) -> tuple[Logits, SamplerState | None]:
        """Return the logits that a chunk needs, and the sampler that draws from them.

        Args:
            start: position of the chunk's first token.
            is_last: whether the chunk ends the context.
        """
        return Logits.NONE, None

    # Results: `reads_rows`, `read` and `accept` run on the model's thread

    def reads_rows(self, planned: Planned) -> bool:
        """Return whether the unit reads the rows of an entry's logits in addition to the draw."""
        return False

    def read(self, planned: Planned, rows: Rows, drawn: Sampled | SampleFault | None) -> Evaluated:
        """Return the results of a step for one of its entries."""
        return Evaluated(drawn)

    def accept(self, token_id: int) -> None:
        """Tell the sampler which token it drew."""

    def book(self, planned: Planned, evaluated: Evaluated, books: Books) -> None:
        """Book the results of a step for one of its entries."""
        self.num_computed += len(planned.entry.tokens)
        books.prefilled(len(planned.entry.tokens))

    # Ends

    @property
    def accountable(self) -> object:
        """The object at fault when a step with this unit fails."""
        return self

    @property
    def tags(self) -> tuple[Hashable, ...]:
        """The tag of its request."""
        return ()

    @property
    def num_vain_pauses(self) -> int:
        """The number of pauses in a row without progress in between."""
        return 0

    def give_up(self, error: GenbatchError, books: Books) -> None:
        """End the unit with an error."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True, eq=False)
class HeldPrompt(Slotted):
    """A prompt with KV that stays, so that requests with this prefix evaluate only their own tokens."""

    key: bytes = b""  # the key of the tenant that may share it
    last_used: float = 0.0  # seconds on the event loop's clock
    pinned: bool = False  # configured, not noticed: never dropped to make room
    begun: bool = False  # whether its slot has its cached prefix
    num_reused: int = 0  # tokens that were already cached when it was held
    noticed_by: "Request | None" = None  # the request that it is evaluated for, until that request starts

    @property
    def ready(self) -> bool:
        """True if it is fully evaluated."""
        return self.seq_id is not None and self.num_computed == len(self.tokens)

    @property
    def as_held(self) -> "HeldPrompt | None":
        return self if self.seq_id is not None else None

    def give_up(self, error: GenbatchError, books: Books) -> None:
        books.drop_held(self)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence(Slotted):
    """A unit of a request: one of its `n` choices, its beam search, or one of its texts."""

    request: "Request"
    choice: int = 0
    cache_key: bytes = b""  # separates tenants in the prefix cache
    scores_prompt: bool = False  # every prompt token is evaluated, to read its log-probs or states
    drawn_before: int = 0  # tokens drawn before it took its slot
    last_token_at: float | None = None  # seconds on the event loop's clock
    ended: bool = False  # no more tokens are booked; a running step may still compute one
    reached: int = 0  # the most positions at any of its pauses
    num_vain: int = 0  # pauses in a row without progress

    @property
    def has_begun(self) -> bool:
        """True if it was evaluated before: until a pause, or on a failed engine."""
        return self.num_pauses > 0 or self.num_generated > 0

    @property
    def final_reason(self) -> FinishReason | None:
        """The reason why it is complete; None while it is not complete."""
        return None

    @property
    def temperature(self) -> float:
        """Its sampling temperature, for telemetry."""
        return 0.0

    @property
    def keeps_progress(self) -> bool:
        """True if it keeps its drawn tokens over a pause."""
        return True

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on its tokens, if any."""
        return None

    @property
    def completion_tokens(self) -> int:
        """The tokens that its request is charged for."""
        return self.num_generated

    @property
    def num_copied_blocks(self) -> int:
        return 1 if self.choice and self.donor is not None else 0

    @property
    def accountable(self) -> object:
        return self.request

    @property
    def tags(self) -> tuple[Hashable, ...]:
        return (self.request.tag,)

    @property
    def num_vain_pauses(self) -> int:
        return self.num_vain

    def restart(self) -> None:
        """Discard the state that a pause does not keep."""

    def conclude(self, reason: FinishReason) -> bool:
        """Give the request its result; return whether it was the request's last result."""
        raise NotImplementedError

    def cut(self, reason: FinishReason) -> None:
        """Give the request a partial result, for kinds of work with useful partial results."""

    def book(self, planned: Planned, evaluated: Evaluated, books: Books) -> None:
        num_tokens = len(planned.entry.tokens)
        self.num_computed += num_tokens
        if self.phase is Phase.PREFILLING:
            # The token drawn last before a pause is decoded, not prefilled.
            decoded = planned.sampler is not None and self.num_generated > 0
            books.prefilled(num_tokens - decoded)

    def give_up(self, error: GenbatchError, books: Books) -> None:
        if self.phase is not Phase.FINISHED:
            books.fail(self.request, error)


def slotted(requests: RequestList) -> list[Slotted]:
    """Cast the requests of a plan to the Batcher's type. The plan was checked: it has only the Batcher's requests."""
    return cast("list[Slotted]", requests)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The result of tokenizing a request.

    Args:
        tokens: the prompt's tokens.
        first_message: the tokens shared by all conversations with this first message.
        echo: the prompt's text, if the answer is to repeat it.
    """

    tokens: list[int]
    first_message: list[int]
    echo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """The limits on a request's time, in seconds; None for no limit.

    Args:
        deadline_s: the caller's own deadline, from arrival. The request then ends with the output so far.
        wait_s: the operator's limit on the wait for the first slot, from arrival. The request then fails.
        answer_s: the operator's limit on an answer, from the first slot. The answer then ends with reason "length".
    """

    deadline_s: float | None = None
    wait_s: float | None = None
    answer_s: float | None = None

    @property
    def patience_s(self) -> float | None:
        """The seconds that the request may wait for its first slot."""
        return self.wait_s if self.deadline_s is None else self.deadline_s


@dataclass(frozen=True, slots=True)
class ReadJob(Generic[T]):
    """A text or a conversation to tokenize.

    Args:
        begin: starts the chat template; returns None for a text.
        finish: tokenizes the text.
        size: the number of characters.
        client: the account for turns at the tokenizer's thread; "" for a call for tokens or text only.
    """

    begin: Callable[[], ChatPrompt | None]
    finish: Callable[[ChatPrompt | None], T]
    size: int
    client: str = ""


@dataclass(slots=True)
class TenantShare:
    """One tenant's counters."""

    requests: int = 0
    running: int = 0  # requests accepted and not ended
    prompt_tokens: int = 0
    generation_tokens: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A caller's request from its acceptance to its single reply. Each kind of work is a subclass.

    Args:
        from_: the caller, which gets the reply.
        monitor: reports that the caller has left.
        client, tenant, payer: the account and the payer, see Generate and GenerateRequest.
        width: sequences that wait or run at a time.
        tag: see Generate.
        request_id: its name in logs and spans.
        number: its number among this Batcher's accepted requests, from 1.
        adapter: the LoRA adapter that it names.
        limits: its time limits.
        accepted_at, started_at, first_token_at: seconds on the event loop's clock.
        read_job: reads its prompt or texts.
        begin_waiting: takes the outcome of `read_job` and makes the sequences.
    """

    early: ClassVar[str] = "the first step"  # a deadline that passes before this leaves no answer
    counts_answers: ClassVar[bool] = True  # in the histogram of generated tokens
    embeds: ClassVar[bool] = False

    from_: "From[Any]"
    monitor: Monitor
    client: str
    accepted_at: float
    tenant: str = ""
    payer: Payer | None = None
    width: int = 1
    tag: Hashable = None
    adapter: LoraAdapter | None = None
    starts_reading: bool = True  # false: a grammar is compiled first
    read_job: ReadJob[Any] | None = None
    begin_waiting: "Callable[[outcome.Outcome[Any]], None] | None" = None
    prompt_tokens: list[int] = field(default_factory=list)  # empty until tokenized; always empty for embeddings
    first_message: list[int] = field(default_factory=list)  # see Prompt
    limits: TimeLimits = TimeLimits()
    expires_at: float | None = None  # when the next of its limits ends it
    expiry: FinishReason = "deadline"  # the finish reason of that limit
    request_id: str = ""
    number: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    share: TenantShare | None = None  # its tenant's counters, once it is accepted
    cached_tokens: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    abandoned: FinishReason | None = None  # the reason to end it at the next tick
    replied: bool = False
    account: str = field(init=False)  # the account that it is charged to: every plan reads it for every sequence

    def __post_init__(self) -> None:
        self.account = charged_account(self.client, self.tenant, embeds=self.embeds)
        patience_s = self.limits.patience_s
        self.expires_at = None if patience_s is None else self.accepted_at + patience_s

    @property
    def kind(self) -> str:
        """The kind of work, for telemetry."""
        raise NotImplementedError

    def begin(self, now: float) -> None:
        """Note the first slot: the limit on the wait ends, and the limit on the answer begins."""
        self.started_at = now
        # guard: default deadline, once it has a slot
        if self.limits.deadline_s is None:
            self.expires_at = None
        # guard: limit on an answer's time
        if self.limits.answer_s is not None:
            answer_ends = now + self.limits.answer_s
            if self.expires_at is None or answer_ends < self.expires_at:
                self.expires_at, self.expiry = answer_ends, "length"

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of its prompt, or of all its texts."""
        return len(self.prompt_tokens)

    @property
    def num_generated(self) -> int:
        """The tokens that all of its sequences have drawn."""
        return sum([sequence.num_generated for sequence in self.sequences])

    @property
    def completion_tokens(self) -> int:
        """The tokens of its answers."""
        return sum([sequence.completion_tokens for sequence in self.sequences])

    @property
    def rounds(self) -> int:
        """The number of rounds of `width` sequences that it needs."""
        return 1

    @property
    def has_answer(self) -> bool:
        """True if it can be answered if it ends now."""
        return False

    def next_sequence(self, now: float) -> Sequence | None:
        """Return the sequence that waits next after another one has ended; None for none."""
        return None

    def cut_error(self, reason: FinishReason) -> GenbatchError | None:
        """Return the error of a request that was cut short; None if its caller gets an answer."""
        if self.has_answer:
            return None
        if reason == "cancelled":
            return Cancelled("cancelled")
        return DeadlineExceeded(f"the deadline passed before {self.early}")

    def response(self) -> object:
        """Return the reply, once it is complete."""
        raise NotImplementedError

    def reply(self) -> None:
        """Send the response to the caller."""
        self.replied = True
        reply(self.from_, self.response())

    def fail(self, error: Exception) -> None:
        """Send the error that ended the request to the caller."""
        self.replied = True
        reply_error(self.from_, error)
