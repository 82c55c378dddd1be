"""GrammarConstraint: a Constraint by llguidance's matcher."""

import time
from typing import Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

# A sequence whose last mask took longer is prepared beside the steps, so that nobody else waits for it.
SLOW_S = 0.001
# Seconds of processor time that a sequence's masks may take, at first and for each token. Ordinary schemas take
# 0.00005 a token, a schema of 200 optional properties 0.0005.
FIRST_S = 0.25
PER_TOKEN_S = 0.002
MAX_MESSAGE = 300  # characters; llguidance quotes what it was given


class GrammarConstraint:
    """One sequence's place in its grammar. Implements `Constraint`.

    Args:
        matcher: over the model's tokenizer, nothing consumed.
        num_words: of a mask, 32 tokens each; it covers every token that the matcher knows.
    """

    __slots__ = ("_accepted", "_fault", "_is_prepared", "_last_s", "_mask", "_matcher", "_num_tokens", "_spent_s")

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((1, num_words), np.int32)
        self._accepted: list[int] = []  # not consumed yet
        self._num_tokens = 0
        self._is_prepared = False
        self._fault: str | None = None
        self._spent_s = 0.0
        self._last_s = 0.0

    def fork(self) -> Self:
        """An independent constraint with the same past."""
        twin = type(self)(self._matcher.deep_copy(), self._mask.shape[1])
        twin._mask[:] = self._mask
        twin._accepted = list(self._accepted)
        twin._num_tokens = self._num_tokens
        twin._is_prepared = self._is_prepared
        twin._fault = self._fault
        twin._spent_s = self._spent_s
        twin._last_s = self._last_s
        return twin

    @property
    def fault(self) -> str | None:
        return self._fault

    @property
    def is_slow(self) -> bool:
        return not self._is_prepared and self._last_s > SLOW_S

    @property
    def allowed(self) -> npt.NDArray[np.int32]:
        row: npt.NDArray[np.int32] = self._mask[0]
        return row

    def accept(self, token_id: int) -> None:
        self._accepted.append(token_id)
        self._num_tokens += 1
        self._is_prepared = False

    def prepare(self) -> None:
        if self._is_prepared:
            return
        # Processor time: a busy machine must not make a grammar look expensive.
        started = time.thread_time()
        if self._accepted:
            self._matcher.consume_tokens(self._accepted)
            self._accepted = []
        if not self._matcher.is_error():
            fill_next_token_bitmask(self._matcher, self._mask)
        self._last_s = time.thread_time() - started
        self._spent_s += self._last_s
        if self._matcher.is_error():
            self._fault = f"cannot be followed any further: {one_line(self._matcher.get_error())}"
        elif self._spent_s > FIRST_S + PER_TOKEN_S * self._num_tokens:
            self._fault = f"takes too long to follow: {self._spent_s:.1f} s for {self._num_tokens} tokens"
        self._is_prepared = True


def one_line(message: str) -> str:
    """What llguidance says of a fault, fit for an error message."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "…"
