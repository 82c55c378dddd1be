"""TokenTexts: what single tokens look like, for log-probs, which OpenAI's API shows by text."""

from collections.abc import Awaitable, Callable, Iterable

Detokenize = Callable[[int], Awaitable[str]]


class TokenTexts:
    """Remembers the text of each token it was asked for; the vocabulary bounds how many those are.

    Args:
        detokenize: the text of one token id, by itself.
    """

    def __init__(self, detokenize: Detokenize) -> None:
        self._detokenize = detokenize
        self._known: dict[int, str] = {}

    async def learn(self, token_ids: Iterable[int]) -> None:
        """Makes `self[token_id]` work for these."""
        for token_id in token_ids:
            if token_id not in self._known:
                self._known[token_id] = await self._detokenize(token_id)

    def __getitem__(self, token_id: int) -> str:
        """The text, with U+FFFD in the place of an incomplete character; empty for special tokens."""
        return self._known[token_id]


class TokenNames(TokenTexts):
    """In the place of TokenTexts where the caller wants ids: no two tokens have the same name."""

    def __init__(self) -> None:
        pass

    async def learn(self, token_ids: Iterable[int]) -> None:
        """Nothing is to be learned."""

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}"
