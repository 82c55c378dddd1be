"""How one sequence's next token is chosen, and which log-probabilities go with it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Beyond these a draw is what it is at them: of the largest logit, and of any token with the same chance. In float32 the
# divisor would soon be 0 or infinite, and a row without a number to draw from.
_COLDEST, _HOTTEST = 2.0**-64, 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one sequence. Ranges are checked where requests enter; here they are invariants.

    Args:
        seed: keys the random draws, 0 <= seed < 2**64; the same seed at the same position draws the same.
        temperature: 0 is greedy, otherwise the logits' divisor; kept from 2**-64 to 2**64: beyond, nothing changes.
        top_k: keep the k most likely tokens and all that tie with the last of them; 0 is off.
        top_p: keep the fewest most likely tokens that hold this share of the probability; 1 is off.
        min_p: keep tokens at least this fraction as likely as the likeliest one; 0 is off.
        repetition_penalty: of tokens in the prompt or the output, positive logits are divided by it and
            negative ones multiplied (the rule of transformers); 1 is off.
        presence_penalty: taken once from the logit of every token in the output.
        frequency_penalty: taken from a token's logit as often as the output holds that token.
        logit_bias: added to the logits of these token ids, which are below the logits' width.
        logprobs: None for none, else how many of the likeliest tokens to report beside the chosen one.
        min_tokens: `suppress` cannot be chosen before so many tokens were generated.
        suppress: ids that would end the sequence (EOS, stop ids), below the logits' width.
    """

    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    suppress: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        assert 0 <= self.seed < 2**64
        assert 0.0 <= self.temperature < math.inf
        if self.temperature > 0.0:
            object.__setattr__(self, "temperature", min(max(self.temperature, _COLDEST), _HOTTEST))
        assert self.top_k >= 0
        assert 0.0 < self.top_p <= 1.0
        assert 0.0 <= self.min_p <= 1.0
        assert 0.0 < self.repetition_penalty < math.inf
        assert math.isfinite(self.presence_penalty)
        assert math.isfinite(self.frequency_penalty)
        assert self.logprobs is None or self.logprobs >= 0
        assert self.min_tokens >= 0

    @property
    def penalised(self) -> bool:
        """Whether tokens already seen change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
