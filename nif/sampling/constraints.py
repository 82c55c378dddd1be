"""Constraints on the next token: rules by token ids, and a budget of thinking. Each may have another constraint inside.

    rules = TokenRules(allowed=[5, 9], bad=[(7,), (3, 4)], num_words=10, inner=grammar)

TokenRules is vLLM's `allowed_token_ids` and `bad_words`. Only the allowed tokens may follow. A bad sequence of tokens
is never completed: its last token is forbidden where the output ends with the tokens before it.

ThinkingBudget ends a model's thinking after a number of tokens, so that its answer follows:

    before -> thinking -> over        the template's marks, such as <think> and </think>, separate the states
                 |         ^
                 +-> ended +          the budget ended it: the next token must not begin thinking again

Beyond the budget the only allowed token is the next token of the ending, such as "\n</think>\n\n", in the model's own
tokenization. Otherwise the inner constraint decides, if there is one.
"""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Self

import numpy as np
import numpy.typing as npt

from genbatch.nif.sampling.sampler import Constraint

# The last tokens to search for the closing mark. Even as single bytes the longest mark has no more tokens.
_TAIL = 24


class _Wrapper:
    """A `Constraint` around another constraint of its sequence; a subclass computes `_mask` in `prepare`.

    Args:
        num_words: words of a mask, 32 tokens each; the mask covers every logit.
        inner: the sequence's other constraint; None if there is none.
    """

    __slots__ = ("_all", "_inner", "_mask", "_pending")

    def __init__(self, num_words: int, inner: Constraint | None) -> None:
        self._inner = inner
        self._all = np.full(num_words, -1, np.int32)
        self._mask = self._all
        self._pending: list[int] = []  # accepted, not processed yet

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

    def forced(self) -> Sequence[int]:
        return () if self._inner is None else self._inner.forced()

    def fork(self) -> Self:
        twin = copy(self)
        twin._pending = list(self._pending)
        twin._inner = None if self._inner is None else self._inner.fork()
        return twin

    def _allowed_inside(self) -> npt.NDArray[np.int32]:
        """Prepare the inner constraint and return its mask; without one, the mask that allows every token."""
        if self._inner is None:
            return self._all
        self._inner.prepare()
        return self._inner.allowed[: len(self._all)]


class TokenRules(_Wrapper):
    """Allows only some tokens, and no bad sequence of tokens.

    Args:
        allowed: the tokens that may follow; None allows every token.
        bad: sequences of tokens that the output must not contain, none of them empty.
        num_words, inner: see _Wrapper.
    """

    __slots__ = ("_base", "_longer", "_tail")

    def __init__(
        self,
        allowed: Collection[int] | None,
        bad: Sequence[tuple[int, ...]],
        num_words: int,
        inner: Constraint | None = None,
    ) -> None:
        super().__init__(num_words, inner)
        self._base = np.full(num_words, -1 if allowed is None else 0, np.int32)
        for token_id in allowed or ():
            self._base[token_id // 32] |= _bit(token_id)
        for sequence in bad:
            if len(sequence) == 1:
                self._base[sequence[0] // 32] &= ~_bit(sequence[0])
        self._longer = [sequence for sequence in bad if len(sequence) > 1]
        self._mask = self._base
        self._tail: tuple[int, ...] = ()

    @property
    def fault(self) -> str | None:
        return super().fault or (None if self._mask.any() else "the grammar allows none of the allowed tokens here")

    def prepare(self) -> None:
        longest = max(map(len, self._longer), default=1)
        self._tail = (*self._tail, *self._pending)[1 - longest :] if longest > 1 else ()
        self._pending.clear()
        self._mask = self._base & self._allowed_inside()
        for sequence in self._longer:
            if self._tail[-len(sequence) + 1 :] == sequence[:-1]:
                self._mask[sequence[-1] // 32] &= ~_bit(sequence[-1])


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


class ThinkingBudget(_Wrapper):
    """Ends the thinking after `max_tokens`.

    Args:
        marks: the model's marks.
        max_tokens: most tokens of thinking, without the ending.
        thinks: whether the prompt has opened the thinking already.
        num_words, inner: see _Wrapper.
    """

    __slots__ = ("_marks", "_max_tokens", "_num_ending", "_num_thought", "_state", "_tail")

    def __init__(
        self, marks: ThinkingMarks, max_tokens: int, num_words: int, *, thinks: bool, inner: Constraint | None
    ) -> None:
        super().__init__(num_words, inner)
        self._marks = marks
        self._max_tokens = max_tokens
        self._state = _State.THINKING if thinks else _State.BEFORE
        self._tail: list[int] = []
        self._num_thought = 0
        self._num_ending = 0  # tokens of the ending that are generated

    def prepare(self) -> None:
        for token_id in self._pending:
            self._follow(token_id)
        self._pending.clear()
        self._mask = within = self._allowed_inside()
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

    def forced(self) -> Sequence[int]:
        if self._state is _State.THINKING and self._num_thought >= self._max_tokens:
            return self._marks.ending[self._num_ending :]
        return super().forced()

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
