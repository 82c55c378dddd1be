"""A request, the sequences it becomes, and what each has generated.

Request ── one a choice ── Sequence ── tokens drawn ── Output ── text, log-probs
                              └ a Slotted, as is HeldPrompt: what takes a slot of the context
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from genbatch.actors.batcher.beam_search import Beam, BeamSearch
from genbatch.actors.batcher.counters import TenantShare
from genbatch.actors.batcher.kept_logits import Keep
from genbatch.actors.batcher.messages import Embedded, charged_account
from genbatch.actors.batcher.output import Output
from genbatch.actors.runtime.actor import From, Monitor, reply, reply_error
from genbatch.actors.scheduling.request import LlmRequest, Phase
from genbatch.nif.pooling import Pooling
from genbatch.nif.runner import Entry, Logits, LoraAdapter
from genbatch.nif.sampling.prompt_lookup import PromptLookup
from genbatch.nif.sampling.sampler import Constraint, Sampled, SamplerState
from genbatch.proto.messages import (
    Choice,
    EmbedRequest,
    FinishReason,
    GenerateRequest,
    Result,
    Token,
    TokenLogprob,
    Usage,
)
from genbatch.proto.validation import Grammar


@dataclass(slots=True, kw_only=True, eq=False)
class Slotted(LlmRequest):
    """A unit of scheduling with tokens, which holds a slot while it is being evaluated.

    Args:
        tokens: prompt and generated token ids; position i of the KV cache belongs to tokens[i].
        seq_id: the slot, None while it waits.
        donor: whose beginning this one shares once that is evaluated; None when nothing is shared.
        num_shared: how many positions it shares of the donor.
        beam_slots: the further slots of a beam search, one a beam after the first.
        adapter: what it is evaluated with.
    """

    tokens: list[int] = field(default_factory=list)
    seq_id: int | None = None
    donor: "Slotted | None" = None
    num_shared: int = 0
    beam_slots: list[int] = field(default_factory=list)
    adapter: LoraAdapter | None = None
    block_names: list[bytes] = field(default_factory=list)  # of its tokens, as far as the prefix cache was asked

    @property
    def held_donor(self) -> "HeldPrompt | None":
        """The held prompt whose beginning it shares, itself or through another choice of its request."""
        donor = self.donor
        while donor is not None:
            if isinstance(donor, HeldPrompt) and donor.seq_id is not None:
                return donor
            donor = donor.donor
        return None

    @property
    def pinned_donor(self) -> "HeldPrompt | None":
        """The configured prompt whose beginning it shares, itself or through what begins with that one."""
        donor = self.held_donor
        while donor is not None and not donor.pinned:
            donor = donor.held_donor
        return donor

    @property
    def donor_ready(self) -> bool:
        """Whether the shared positions can be taken now."""
        donor = self.donor
        return donor is not None and donor.seq_id is not None and donor.num_computed >= self.num_shared

    @property
    def waits_for_donor(self) -> bool:
        """Whether evaluating what it shares would be work done twice."""
        donor = self.donor
        return donor is not None and donor.phase is not Phase.FINISHED and not self.donor_ready


@dataclass(frozen=True, slots=True)
class Planned:
    """One entry of a step and whose it is."""

    owner: Slotted
    entry: Entry
    draws: bool


@dataclass(slots=True, kw_only=True, eq=False)
class HeldPrompt(Slotted):
    """A system prompt whose KV stays, so that each request that starts with it evaluates only its own tokens."""

    key: bytes = b""  # whose requests may share it
    last_used: float = 0.0  # seconds on the event loop's clock
    pinned: bool = False  # configured, not noticed: never dropped to make room
    begun: bool = False  # its slot has what was evaluated of it before
    num_reused: int = 0  # of its tokens, those that were evaluated before it was held
    noticed_by: "Request | None" = None  # the request for which the rest is evaluated, until that has started

    @property
    def ready(self) -> bool:
        """Whether all of it is evaluated."""
        return self.seq_id is not None and self.num_computed == len(self.tokens)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence(Slotted):
    """One generation of a request: the request's only one, or one of its `n`."""

    request: "Request"
    output: "Output"
    sampler: SamplerState
    choice: int = 0
    cache_key: bytes = b""  # keeps tenants' reusable blocks apart
    scores_prompt: bool = False  # its prompt's log-probs or logits are wanted, so every prompt token is evaluated
    drawn_before: int = 0  # tokens that it had drawn when it took its slot
    last_token_at: float | None = None  # seconds on the event loop's clock
    ended: bool = False  # no more tokens are booked, though a step under way may still compute one
    raised: bool = False  # at its last token the caller's function did
    reached: int = 0  # the most positions that it had when it was paused
    num_vain: int = 0  # pauses in a row before which it got no further than before an earlier one
    pooled: "PooledText | None" = None  # it is a text to be embedded: it draws nothing, and ends with its prompt
    beams: BeamSearch | None = None  # a search over several continuations instead of one draw after another
    lookup: PromptLookup | None = None  # once a run was to draft its tokens


class PooledText:
    """One text's states, as they come in.

    Args:
        place: which of the request's texts it is.
        pooling: the model's.
    """

    __slots__ = ("_count", "_pooling", "_sum", "place")

    def __init__(self, place: int, pooling: Pooling) -> None:
        self.place = place
        self._pooling = pooling
        self._sum = torch.zeros(pooling.size)
        self._count = 0

    def wanted(self, *, is_last: bool) -> Logits:
        """Which states are wanted of a chunk."""
        if self._pooling.needs_every_state:
            return Logits.EVERY_STATE
        return Logits.LAST_STATE if is_last else Logits.NONE

    def add(self, first: int, states: torch.Tensor) -> None:
        """Takes a chunk's states, [n, size]; the chunk begins at position `first`."""
        if not self._pooling.needs_every_state:
            self._sum = states[-1]
            self._count = 1
            return
        if first == 0:  # also once more, after a pause
            self._sum, self._count = torch.zeros(self._pooling.size), 0
        assert first == self._count, f"states from {first} on, after {self._count}"
        self._sum = self._sum + states.sum(0)
        self._count += len(states)

    @property
    def is_finite(self) -> bool:
        """Whether all of it are numbers."""
        return bool(torch.isfinite(self._sum).all())

    def vector(self, dimensions: int | None) -> torch.Tensor:
        """The embedding."""
        return self._pooling.finish(self._sum / self._count, dimensions)


@dataclass(slots=True, eq=False)
class Embedding:
    """What of a request is its own, where that asks for embeddings.

    Args:
        wanted: as it was asked for.
        width: texts of it that wait or run at a time.
    """

    wanted: EmbedRequest
    width: int
    num_tokens: int = 0  # of all texts, once they are tokenized
    _vectors: list[bytes] = field(default_factory=list)
    _num_left: int = 0  # texts that have no vector yet
    _texts: deque[tuple[int, list[int]]] = field(default_factory=deque)  # that do not wait for a slot yet
    _make: "Callable[[int, list[int], float], Sequence] | None" = None

    def start(self, texts: list[list[int]], make: "Callable[[int, list[int], float], Sequence]") -> None:
        """Its texts are tokenized.

        Args:
            make: the sequence of the text in this place, which begins to wait now.
        """
        self.num_tokens = sum(map(len, texts))
        self._vectors = [b""] * len(texts)
        self._num_left = len(texts)
        self._texts.extend(enumerate(texts))
        self._make = make

    def next_text(self, now: float) -> "Sequence | None":
        """The next text, which begins to wait for a slot; None where there is none left."""
        if not self._texts:
            return None
        assert self._make is not None
        return self._make(*self._texts.popleft(), now)

    def finish(self, text: PooledText) -> bool:
        """Books a text's embedding; returns whether it was the last."""
        vector = text.vector(self.wanted.dimensions)
        self._vectors[text.place] = vector.numpy().astype("<f4").tobytes()
        self._num_left -= 1
        return not self._num_left

    @property
    def rounds(self) -> int:
        """How often as many of its texts as run at a time have to follow one another."""
        return -(-len(self._vectors) // self.width)

    def result(self) -> Embedded:
        """The reply, once all are there."""
        assert not self._num_left, "a text has no embedding yet"
        return Embedded(vectors=self._vectors, prompt_tokens=self.num_tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What tokenizing a request gives.

    Args:
        tokens: of the prompt.
        first_message: the tokens that every conversation beginning with this one's first message starts with.
        echo: what the text begins with, where the prompt is to be repeated.
    """

    tokens: list[int]
    first_message: list[int]
    echo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """What bounds a request's time, in seconds; None is no bound.

    Args:
        deadline_s: the caller's own deadline, from arrival. The request then ends with what it has.
        wait_s: the operator's bound on waiting for the first slot, from arrival. The request then fails.
        answer_s: the operator's bound on an answer, from the first slot. The answer then ends as its length ends it.
    """

    deadline_s: float | None = None
    wait_s: float | None = None
    answer_s: float | None = None

    @property
    def patience_s(self) -> float | None:
        """How long the request may wait for its first slot."""
        return self.wait_s if self.deadline_s is None else self.deadline_s


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A caller's request from its acceptance to its single reply.

    Args:
        wanted: the validated message.
        from_: whom to reply to.
        monitor: tells when the caller is gone.
        on_token: called once per token, must not block; None when only the whole is wanted.
        on_begin, tag, beam_width, keep: see Generate.
        request_id: its name in logs and spans.
        embedding: what it has of its own where it asks for embeddings; `wanted` then says only what books need.
        number: which one it is of those that this Batcher accepted, from 1.
        grammar: what its answers must match.
        adapter: the one that it names.
        limits: what bounds its time.
        accepted_at, started_at, first_token_at: seconds on the event loop's clock.
    """

    wanted: GenerateRequest
    from_: "From[Any]"
    monitor: Monitor
    client: str
    accepted_at: float
    on_token: Callable[[Token], None] | None = None
    on_begin: Callable[[], None] | None = None
    tag: Hashable = None
    beam_width: int = 1
    keep: Keep | None = None
    grammar: Grammar | None = None
    embedding: Embedding | None = None
    adapter: LoraAdapter | None = None
    constraints: list[Constraint] = field(default_factory=list)  # one a sequence; empty without a grammar
    prompt_tokens: list[int] = field(default_factory=list)  # empty until tokenized
    first_message: list[int] = field(default_factory=list)  # see Prompt
    echo: str = ""  # see Prompt
    limits: TimeLimits = TimeLimits()
    expires_at: float | None = None  # when the next of its limits ends it
    expiry: FinishReason = "deadline"  # how that limit ends it
    request_id: str = ""
    number: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    share: TenantShare | None = None  # its tenant's counters, once it is accepted
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    sequences: list[Sequence] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    abandoned: FinishReason | None = None  # why nobody waits any more; acted on at the next tick
    replied: bool = False

    def __post_init__(self) -> None:
        patience_s = self.limits.patience_s
        self.expires_at = None if patience_s is None else self.accepted_at + patience_s

    def begin(self, now: float) -> None:
        """It has its first slot: the operator's bound on waiting is over, and the one on its answer begins."""
        self.started_at = now
        # guard: default deadline, once it has a slot
        if self.limits.deadline_s is None:
            self.expires_at = None
        # guard: limit on an answer's time
        if self.limits.answer_s is not None and self.embedding is None:
            answer_ends = now + self.limits.answer_s
            if self.expires_at is None or answer_ends < self.expires_at:
                self.expires_at, self.expiry = answer_ends, "length"

    @property
    def account(self) -> str:
        """Who is charged for it."""
        return charged_account(self.client, self.wanted.tenant, embeds=self.embedding is not None)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt, or of all its texts."""
        return len(self.prompt_tokens) if self.embedding is None else self.embedding.num_tokens

    def next_text(self, now: float) -> Sequence | None:
        """The next of its texts, which begins to wait for a slot; None where there is none left."""
        if self.embedding is None:
            return None
        sequence = self.embedding.next_text(now)
        if sequence is not None:
            self.sequences.append(sequence)
        return sequence

    @property
    def num_generated(self) -> int:
        """Tokens that all of its sequences have drawn."""
        return sum([sequence.num_generated for sequence in self.sequences])

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Books a sequence's end; returns whether it was the request's last."""
        if sequence.pooled is not None:
            assert self.embedding is not None
            self.sequences.remove(sequence)  # there may be thousands
            return self.embedding.finish(sequence.pooled)
        if sequence.beams is not None:
            self._finish_beams(sequence, sequence.beams.best(), reason)
            return True
        self.choices[sequence.choice] = sequence.output.choice(reason, only_shown=self.on_token is not None)
        return len(self.choices) == len(self.sequences)

    def _finish_beams(self, sequence: Sequence, beams: list[Beam], reason: FinishReason) -> None:
        for index, beam in enumerate(beams):
            output = sequence.output.blank()
            for token_id, logprob in zip(beam.tokens, beam.logprobs, strict=True):
                output.push(Sampled(token_id, logprob))
            # A beam that ended by itself says how; the others share the reason for which the search was cut short.
            self.choices[index] = output.choice(reason)
            if self.keep is not None:
                self.keep.set_generation(index, beam.logits)

    def result(self) -> Result:
        """The reply: the first choice, and all of them when several were asked for."""
        choices = tuple(self.choices[index] for index in sorted(self.choices))
        first = choices[0]
        return Result(
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            usage=Usage(
                prompt_tokens=len(self.prompt_tokens),
                completion_tokens=sum(len(choice.token_ids) for choice in choices),
                cached_tokens=self.cached_tokens,
            ),
            logprobs=first.logprobs,
            reasoning=first.reasoning,
            tool_calls=first.tool_calls,
            stop_string=first.stop_string,
            reasoning_tokens=first.reasoning_tokens,
            prompt_logprobs=self.prompt_logprobs,
            choices=choices if len(choices) > 1 else (),
        )

    def reply(self) -> None:
        """Sends the result to the caller."""
        self.replied = True
        reply(self.from_, self.result() if self.embedding is None else self.embedding.result())

    def fail(self, error: Exception) -> None:
        """Sends the error that ended the request to the caller."""
        self.replied = True
        reply_error(self.from_, error)
