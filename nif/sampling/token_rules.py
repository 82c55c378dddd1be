"""TokenRules: a constraint by token ids, as vLLM's `allowed_token_ids` and `bad_words`.

    rules = TokenRules(allowed=[5, 9], bad=[(7,), (3, 4)], num_words=10, inner=grammar)

Only the allowed tokens may follow. A bad sequence of tokens is never completed: its last token is forbidden where the
output ends with the tokens before it.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from genbatch.nif.sampling.sampler import Constraint


class TokenRules:
    """Implements `Constraint` for one sequence.

    Args:
        allowed: the tokens that may follow; None allows every token.
        bad: sequences of tokens that the output must not contain, none of them empty.
        num_words: words of a mask, 32 tokens each; the mask covers every logit.
        inner: the sequence's other constraint; None if there is none.
    """

    __slots__ = ("_base", "_inner", "_longer", "_mask", "_pending", "_tail")

    def __init__(
        self,
        allowed: Collection[int] | None,
        bad: Sequence[tuple[int, ...]],
        num_words: int,
        inner: Constraint | None = None,
    ) -> None:
        self._inner = inner
        self._base = np.full(num_words, -1 if allowed is None else 0, np.int32)
        for token_id in allowed or ():
            self._base[token_id // 32] |= _bit(token_id)
        for sequence in bad:
            if len(sequence) == 1:
                self._base[sequence[0] // 32] &= ~_bit(sequence[0])
        self._longer = [sequence for sequence in bad if len(sequence) > 1]
        self._mask = self._base
        self._pending: list[int] = []  # accepted, not processed yet
        self._tail: tuple[int, ...] = ()

    @property
    def fault(self) -> str | None:
        if self._inner is not None and self._inner.fault is not None:
            return self._inner.fault
        return None if self._mask.any() else "none of the allowed tokens may follow here"

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
        longest = max(map(len, self._longer), default=1)
        self._tail = (*self._tail, *self._pending)[1 - longest :] if longest > 1 else ()
        self._pending.clear()
        self._mask = self._base.copy()
        for sequence in self._longer:
            if self._tail[-len(sequence) + 1 :] == sequence[:-1]:
                self._mask[sequence[-1] // 32] &= ~_bit(sequence[-1])
        if self._inner is not None:
            self._inner.prepare()
            self._mask &= self._inner.allowed[: len(self._mask)]


def _bit(token_id: int) -> np.int32:
    """Return the token's bit within its word of a mask."""
    return np.int32(np.uint32(1 << token_id % 32).view(np.int32))
