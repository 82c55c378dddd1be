"""What the Batcher is sent."""

from collections.abc import Callable
from dataclasses import dataclass

from genbatch.proto.messages import GenerateRequest, Token


@dataclass(frozen=True, slots=True)
class Generate:
    """A call that is answered with the Result, once all of it is generated.

    Args:
        request: what to generate.
        on_token: called on the event loop with each token as it comes; must not block.
        client: who asks, for fairness and logs.
    """

    request: GenerateRequest
    on_token: Callable[[Token], None] | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class GetStats:
    """A call that is answered with a dict of counters."""
