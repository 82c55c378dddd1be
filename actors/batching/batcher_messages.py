"""What the Batcher is sent."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from genbatch.actors.batching.keep import Keep
from genbatch.proto.messages import GenerateRequest, Token


@dataclass(frozen=True, slots=True)
class Generate:
    """A call that is answered with the Result, once all of it is generated.

    Args:
        request: what to generate.
        on_token: called on the event loop with each token as it comes; must not block.
        client: who asks, for fairness and logs.
        tag: what Interrupt and Iterate name the request by; None for one that nobody names.
        beam_width: above 1, a beam search over so many continuations, which become the result's choices.
        keep: where to put logits; None keeps none.
    """

    request: GenerateRequest
    on_token: Callable[[Token], None] | None = None
    client: str = ""
    tag: Hashable = None
    beam_width: int = 1
    keep: Keep | None = None


@dataclass(frozen=True, slots=True)
class GetStats:
    """A call that is answered with a dict of counters."""
