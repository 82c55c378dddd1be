"""PromptLookup: guesses a sequence's next tokens by looking the last ones up in the sequence itself.

lookup = PromptLookup()                 # one a sequence
lookup.catch_up(tokens)                 # the prompt's
lookup.draft(4)                         # the tokens that followed when the last tokens stood there before
lookup.push(token)                      # the token that was drawn; whether the lookup knew it is remembered
"""

from collections.abc import Sequence as ListOf

# Tokens of a prompt, its last ones, in which is looked: a bound for memory and for the time that a first run waits.
MAX_PROMPT = 32_768
# From so many tokens in common on a guess is counted apart from those after shorter matches, which are often chance.
SURE_MATCH = 4
# The share of right guesses that is reckoned with before there was any: too low to draft.
UNTRIED = 0.1
# Weight of the newest guess in the share of right ones, at least.
NEWEST = 0.1


class PromptLookup:
    """The last place of each pair of tokens in one sequence; a token costs the same however many came before it."""

    __slots__ = ("_guesses", "_latest", "_match", "_num_seen", "_place", "_right", "_tokens")

    def __init__(self) -> None:
        self._num_seen = 0  # of the sequence's tokens, those before the first of `_tokens` included
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # the last place after a pair
        self._place = 0  # of the token that is guessed to come next; 0: none
        self._match = 0  # tokens in front of it that are the last ones, too
        # Of guesses after short and after sure matches the share that was right lately, and how many there were.
        self._right = [UNTRIED, UNTRIED]
        self._guesses = [0, 0]

    @property
    def chance(self) -> float:
        """How likely the next token is the one that a draft begins with; 0 where there is none."""
        return self._right[self._match >= SURE_MATCH] if self._place else 0.0

    def catch_up(self, tokens: ListOf[int]) -> None:
        """Takes those of the sequence's tokens that it has not seen."""
        if self._num_seen:
            for token in tokens[self._num_seen :]:
                self.push(token)
            return
        self._num_seen = len(tokens)
        for token in tokens[-MAX_PROMPT:]:
            self._append(token)
        self._find()

    def draft(self, most: int) -> list[int]:
        """The tokens, at most so many, that followed the last ones where they stood before."""
        if not self._place:
            return []
        # What is behind the end repeats what is in front of it: a text that goes round goes on so.
        tokens, first, period = self._tokens, self._place, len(self._tokens) - self._place
        return [tokens[first + step % period] for step in range(most)]

    def push(self, token: int) -> None:
        """Takes the next token, and guesses the one after it."""
        self._num_seen += 1
        is_right = False
        if self._place:
            is_right = self._tokens[self._place] == token
            kind = self._match >= SURE_MATCH
            self._guesses[kind] += 1
            newest = max(NEWEST, 1 / (self._guesses[kind] + 1))
            self._right[kind] += newest * (is_right - self._right[kind])
        self._append(token)
        if is_right:
            self._place += 1
            self._match += 1
        else:
            self._find()

    def _append(self, token: int) -> None:
        tokens = self._tokens
        if len(tokens) >= 2:
            self._latest[tokens[-2], tokens[-1]] = len(tokens)
        tokens.append(token)

    def _find(self) -> None:
        """Guesses what followed the last two tokens when they stood together last."""
        tokens = self._tokens
        self._place = place = self._latest.get((tokens[-2], tokens[-1]), 0) if len(tokens) >= 2 else 0
        self._match = match = 2
        while place > match and match < SURE_MATCH and tokens[place - 1 - match] == tokens[-1 - match]:
            self._match = match = match + 1
