"""PromptLookup: drafts a sequence's next tokens by finding the last tokens earlier in the same sequence.

lookup = PromptLookup()                 # one per sequence
lookup.catch_up(tokens)                 # the prompt's tokens
lookup.draft(4)                         # the tokens that followed the last tokens at their earlier place
lookup.push(token)                      # the drawn token; it updates the share of right guesses
"""

from collections.abc import Sequence as ListOf

# Only the last tokens of a prompt are indexed. This bounds the memory and the wait before the first run.
MAX_PROMPT = 32_768
# Matches of at least this many tokens have their own statistics, because shorter matches are often chance.
SURE_MATCH = 4
# The assumed share of right guesses before the first guess: it is too low for drafting.
UNTRIED = 0.1
# The least weight of the newest guess in the share of right guesses.
NEWEST = 0.1


class PromptLookup:
    """Indexes the last place of each pair of tokens in one sequence. Adding a token takes constant time."""

    __slots__ = ("_guesses", "_latest", "_match", "_num_seen", "_place", "_right", "_tokens")

    def __init__(self) -> None:
        self._num_seen = 0  # the sequence's tokens so far, including those that `_tokens` leaves out
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # the last place after a pair
        self._place = 0  # the place of the token that is guessed to come next; 0: no guess
        self._match = 0  # tokens before `_place` that equal the sequence's last tokens
        # For guesses after short and after sure matches: the recent share of right guesses, and their number.
        self._right = [UNTRIED, UNTRIED]
        self._guesses = [0, 0]

    @property
    def chance(self) -> float:
        """Return the estimated probability that a draft's first token is right; 0 without a draft."""
        return self._right[self._match >= SURE_MATCH] if self._place else 0.0

    def catch_up(self, tokens: ListOf[int]) -> None:
        """Add the sequence's tokens that are not indexed yet."""
        if self._num_seen:
            for token in tokens[self._num_seen :]:
                self.push(token)
            return
        self._num_seen = len(tokens)
        for token in tokens[-MAX_PROMPT:]:
            self._append(token)
        self._find()

    def draft(self, most: int) -> list[int]:
        """Return at most `most` tokens that followed the last tokens at their earlier place."""
        if not self._place:
            return []
        # Past the end the draft repeats itself, because a text in a loop continues like that.
        tokens, first, period = self._tokens, self._place, len(self._tokens) - self._place
        return [tokens[first + step % period] for step in range(most)]

    def push(self, token: int) -> None:
        """Add the next token, and guess the token after it."""
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
        """Guess the token that followed the last earlier place of the last two tokens."""
        tokens = self._tokens
        self._place = place = self._latest.get((tokens[-2], tokens[-1]), 0) if len(tokens) >= 2 else 0
        self._match = match = 2
        while place > match and match < SURE_MATCH and tokens[place - 1 - match] == tokens[-1 - match]:
            self._match = match = match + 1
