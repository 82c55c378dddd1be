"""ThinkingBudget: a constraint that ends a model's thinking after a number of tokens, so that its answer follows.

    before -> thinking -> over        the template's marks, such as <think> and </think>, separate the states
                 |         ^
                 +-> ended +          the budget ended it: the next token must not begin thinking again

Beyond the budget the only allowed token is the next token of the ending, such as "\n</think>\n\n", in the model's own
tokenization. Otherwise the inner constraint decides, if there is one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from genbatch.nif.sampling.sampler import Constraint

# The last tokens to search for the closing mark. Even as single bytes the longest mark has no more tokens.
_TAIL = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarks:
    """A model's marks around its thinking.

    Args:
        opens: the text before the thinking.
        closes: the text after the thinking.
        ending: token ids that end the thinking, including the closing mark.
        decode: decodes token ids to text, special tokens included.
        forbidden: the token id that would begin thinking again after the ending; None if the ending allows none.
    """

    opens: str
    closes: str
    ending: Sequence[int]
    decode: Callable[[list[int]], str]
    forbidden: int | None = None


class _State(Enum):
    BEFORE = "before"
    THINKING = "thinking"
    ENDED = "ended"
    OVER = "over"


class ThinkingBudget:
    """Implements `Constraint` for one sequence.

    Args:
        marks: the model's marks.
        max_tokens: most tokens of thinking, without the ending.
        num_words: words of a mask, 32 tokens each; the mask covers every logit.
        thinks: whether the prompt has opened the thinking already.
        inner: the sequence's other constraint; None if there is none.
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
        self._pending: list[int] = []  # accepted, not processed yet
        self._tail: list[int] = []
        self._num_thought = 0
        self._num_ending = 0  # tokens of the ending that are generated

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
            bit = _bit(token_id)
            # The inner constraint has priority: if it forbids the ending here, the thinking continues.
            if within[token_id // 32] & bit:
                self._mask = np.zeros_like(within)
                self._mask[token_id // 32] = bit
        elif self._state is _State.ENDED and self._marks.forbidden is not None:
            self._mask = within.copy()
            self._mask[self._marks.forbidden // 32] &= ~_bit(self._marks.forbidden)

    def _follow(self, token_id: int) -> None:
        """Advance the state by one token."""
        if self._state in (_State.ENDED, _State.OVER):
            self._state = _State.OVER
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
        if self._num_ending == len(ending):
            self._state = _State.ENDED
        elif not self._num_ending and self._marks.closes in self._marks.decode(self._tail):
            self._state = _State.OVER


def _bit(token_id: int) -> np.int32:
    """Return the token's bit within its word of a mask."""
    return np.int32(np.uint32(1 << token_id % 32).view(np.int32))
