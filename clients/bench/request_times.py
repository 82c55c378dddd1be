"""RequestTimes: what its caller saw of one request, and the latencies that follow."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the client's clock.

    Args:
        prompt_tokens, max_tokens: what was asked for.
        sent_at: when the client began to send it.
        token_at: when each token reached the caller.
        ended_at: when the result did.
        cached_tokens: prompt tokens that the service did not evaluate.
        error: why it failed, the code; None if it did not.
    """

    prompt_tokens: int
    max_tokens: int
    sent_at: float
    token_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.token_at[0] - self.sent_at

    @property
    def e2el(self) -> float:
        """From sending to the result."""
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first; None with one token."""
        count = len(self.token_at)
        return (self.e2el - self.ttft) / (count - 1) if count > 1 else None

    @property
    def itl(self) -> list[float]:
        """Times between two tokens that follow one another."""
        return [later - earlier for earlier, later in pairwise(self.token_at)]
