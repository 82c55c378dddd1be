"""Sequence and HeldPrompt: what takes a slot of the context, a caller's generation or a prompt kept to be shared."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from genbatch.actors.scheduling.llm_request import LlmRequest, Phase
from genbatch.nif.sampling.sampler import SamplerState

if TYPE_CHECKING:
    from genbatch.actors.batching.beam_search import BeamSearch
    from genbatch.actors.batching.output import Output
    from genbatch.actors.batching.request import Request


@dataclass(slots=True, kw_only=True, eq=False)
class Slotted(LlmRequest):
    """A unit of scheduling with tokens, which holds a slot while it is being evaluated.

    Args:
        tokens: prompt and generated token ids; position i of the KV cache belongs to tokens[i].
        seq_id: the slot, None while it waits.
        donor: whose beginning this one shares once that is evaluated; None when nothing is shared.
        num_shared: how many positions it shares of the donor.
        beam_slots: the further slots of a beam search, one a beam after the first.
    """

    tokens: list[int] = field(default_factory=list)
    seq_id: int | None = None
    donor: "Slotted | None" = None
    num_shared: int = 0
    beam_slots: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)  # of its tokens, as far as the prefix cache was asked

    @property
    def held_donor(self) -> "HeldPrompt | None":
        """The held prompt whose beginning it shares, itself or through another choice of its request."""
        donor = self.donor
        while donor is not None and not isinstance(donor, HeldPrompt):
            donor = donor.donor
        return donor if donor is not None and donor.seq_id is not None else None

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


@dataclass(slots=True, kw_only=True, eq=False)
class HeldPrompt(Slotted):
    """A system prompt whose KV stays, so that each request that starts with it evaluates only its own tokens."""

    key: bytes = b""  # whose requests may share it
    last_used: float = 0.0  # seconds on the event loop's clock
    pinned: bool = False  # configured, not noticed: never dropped to make room

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
    last_token_at: float | None = None  # seconds on the event loop's clock
    ended: bool = False  # no more tokens are booked, though a step under way may still compute one
    raised: bool = False  # at its last token the caller's function did
    beams: "BeamSearch | None" = None  # a search over several continuations instead of one draw after another
