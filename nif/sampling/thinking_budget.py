"""ThinkingBudget: a constraint that ends a model's thinking after so many tokens, so that its answer follows.

    before -> thinking -> over        the texts <think> and </think> separate them

While it thinks beyond the budget, the only token allowed is the next one of "\n</think>\n\n", written as the model's
tokenizer writes it. Everything else is left to the constraint inside, if there is one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from genbatch.nif.sampling.sampler import Constraint

# Tokens in which the closing mark is looked for. Even by single bytes it has no more.
_TAIL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarks:
    """How a model marks its thinking.

    Args:
        opens: the text in front of it.
        closes: the text behind it.
        ending: token ids that end the thinking, the closing mark among them.
        decode: the text of token ids, special tokens included.
    """

    opens: str
    closes: str
    ending: Sequence[int]
    decode: Callable[[list[int]], str]


class _State(Enum):
    BEFORE = "before"
    THINKING = "thinking"
    OVER = "over"


class ThinkingBudget:
    """Implements `Constraint` for one sequence.

    Args:
        marks: of the model.
        max_tokens: most tokens of thinking, the ending not counted.
        num_words: of a mask, 32 tokens each; it covers every logit.
        thinks: whether the prompt has opened the thinking already.
        inner: what else the sequence keeps to.
    """

    __slots__ = (
        *("_all", "_inner", "_mask", "_marks", "_max_tokens", "_num_ending", "_num_thought"),
        *("_pending", "_state", "_tail"),
    )

    def __init__(
        self, marks: ThinkingMarks, max_tokens: int, num_words: int, *, thinks: bool, inner: Constraint | None
    ) -> None:
        self._marks = marks
        self._max_tokens = max_tokens
        self._inner = inner
        self._state = _State.THINKING if thinks else _State.BEFORE
        self._all = np.full(num_words, -1, np.int32)
        self._mask = self._all
        self._pending: list[int] = []  # accepted, not looked at yet
        self._tail: list[int] = []
        self._num_thought = 0
        self._num_ending = 0  # tokens of the ending that are written

    @property
    def fault(self) -> str | None:
        return None if self._inner is None else self._inner.fault

    @property
    def is_slow(self) -> bool:
        return self._inner is not None and self._inner.is_slow

    @property
    def allowed(self) -> npt.NDArray[np.int32]:
        return self._mask

    def accept(self, token_id: int) -> None:
        self._pending.append(token_id)
        if self._inner is not None:
            self._inner.accept(token_id)

    def prepare(self) -> None:
        for token_id in self._pending:
            self._follow(token_id)
        self._pending.clear()
        if self._inner is not None:
            self._inner.prepare()
        within = self._all if self._inner is None else self._inner.allowed
        self._mask = within
        if self._state is _State.THINKING and self._num_thought >= self._max_tokens:
            token_id = self._marks.ending[self._num_ending]
            bit = np.int32(np.uint32(1 << token_id % 32).view(np.int32))
            # Where the constraint inside does not let the thinking end here, it has its way.
            if within[token_id // 32] & bit:
                self._mask = np.zeros_like(within)
                self._mask[token_id // 32] = bit

    def _follow(self, token_id: int) -> None:
        """Moves on by one token."""
        if self._state is _State.OVER:
            return
        self._tail = [*self._tail[1 - _TAIL :], token_id]
        if self._state is _State.BEFORE:
            begun = self._marks.decode(self._tail).lstrip()
            if begun.startswith(self._marks.opens):
                self._state, self._tail = _State.THINKING, []
            elif not self._marks.opens.startswith(begun):
                self._state = _State.OVER
            return
        ending = self._marks.ending
        is_ending = self._num_thought >= self._max_tokens and token_id == ending[self._num_ending]
        self._num_ending = self._num_ending + 1 if is_ending else 0
        self._num_thought += not is_ending
        if self._num_ending == len(ending) or self._marks.closes in self._marks.decode(self._tail):
            self._state = _State.OVER
