"""Log-probs in the two shapes of OpenAI's API."""

from collections.abc import Iterable, Sequence
from typing import Any

from genbatch.actors.http.token_texts import TokenTexts
from genbatch.proto.messages import TokenLogprob

# JSON has no infinity; OpenAI's own value for "as good as never".
LOWEST = -9999.0
_INCOMPLETE = "\ufffd"


def chat_logprobs(logprobs: Iterable[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """A list with each token, its log-prob and the likeliest ones in its place."""
    content = []
    for entry in logprobs:
        top = [_named(texts[token_id], logprob) for token_id, logprob in entry.top.items()]
        content.append(_named(texts[entry.token_id], entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _named(text: str, logprob: float) -> dict[str, Any]:
    # A part of a character has bytes, but its text does not tell which.
    shown = None if _INCOMPLETE in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": shown}


class LogprobTable:
    """Four lists with an entry a token, as completions have them.

    Args:
        texts: where the tokens' texts are.
        offset: characters in front of the first token.
    """

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self.offset = offset
        self._texts = texts
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_first(self, token_id: int) -> None:
        """A prompt's first token, which nothing foretold."""
        self._place(self._texts[token_id])
        self._logprobs.append(None)
        self._tops.append(None)

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """Further tokens."""
        for entry in entries:
            text = self._texts[entry.token_id]
            self._place(text)
            logprob = max(entry.logprob, LOWEST)
            self._logprobs.append(logprob)
            top: dict[str, float] = {}
            for token_id, other in entry.top.items():
                top.setdefault(self._texts[token_id], max(other, LOWEST))  # of two that look the same, the likelier
            top.setdefault(text, logprob)
            self._tops.append(top)

    def to_dict(self) -> dict[str, Any]:
        """The lists under OpenAI's names."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def _place(self, text: str) -> None:
        self._tokens.append(text)
        self._offsets.append(self.offset)
        self.offset += len(text)
