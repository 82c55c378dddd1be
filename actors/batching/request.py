"""Request: what one caller asked, the sequences it became, and the one reply it gets."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from genbatch.actors.batching.beam_search import Beam
from genbatch.actors.batching.keep import Keep
from genbatch.actors.batching.sequence import Sequence
from genbatch.actors.batching.tenant_shares import TenantShare
from genbatch.actors.runtime.actor import From, Monitor, reply, reply_error
from genbatch.nif.sampling.constraint import Constraint
from genbatch.nif.sampling.sampler import Sampled
from genbatch.proto.messages import Choice, FinishReason, GenerateRequest, Result, Token, TokenLogprob, Usage
from genbatch.proto.validation import Grammar


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A caller's request from its acceptance to its single reply.

    Args:
        wanted: the validated message.
        from_: whom to reply to.
        monitor: tells when the caller is gone.
        on_token: called once per token, must not block; None when only the whole is wanted.
        tag, beam_width, keep: see Generate.
        request_id: its name in logs and spans.
        number: which one it is of those that this Batcher accepted, from 1.
        grammar: what its answers must match.
        accepted_at, started_at, first_token_at, expires_at: seconds on the event loop's clock.
    """

    wanted: GenerateRequest
    from_: "From[Any]"
    monitor: Monitor
    on_token: Callable[[Token], None] | None
    client: str
    accepted_at: float
    tag: Hashable = None
    beam_width: int = 1
    keep: Keep | None = None
    grammar: Grammar | None = None
    constraints: list[Constraint] = field(default_factory=list)  # one a sequence; empty without a grammar
    prompt_tokens: list[int] = field(default_factory=list)  # empty until tokenized
    first_message: list[int] = field(default_factory=list)  # see Prompt
    echo: str = ""  # see Prompt
    expires_at: float | None = None
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

    @property
    def account(self) -> str:
        """Who is charged for it: its tenant, else the client that sent it."""
        return self.wanted.tenant or self.client

    @property
    def num_generated(self) -> int:
        """Tokens that all of its sequences have drawn."""
        return sum([sequence.num_generated for sequence in self.sequences])

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Books a sequence's end; returns whether it was the request's last."""
        if sequence.beams is not None:
            self._finish_beams(sequence, sequence.beams.best(), reason)
            return True
        self.choices[sequence.choice] = sequence.output.choice(reason)
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
            prompt_logprobs=self.prompt_logprobs,
            choices=choices if len(choices) > 1 else (),
        )

    def reply(self) -> None:
        """Sends the result to the caller."""
        self.replied = True
        reply(self.from_, self.result())

    def fail(self, error: Exception) -> None:
        """Sends the error that ended the request to the caller."""
        self.replied = True
        reply_error(self.from_, error)
