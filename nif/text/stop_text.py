"""Ends a streamed text at its first stop string, never showing text that may become part of one."""

from collections.abc import Sequence


class StopMatcher:
    """Watches one text that arrives in pieces.

    However the text is cut into pieces, what comes out joined is the whole text up to the first occurrence
    of any stop string, that one excluded. Where two occurrences overlap, the one that begins first counts.
    Each character costs amortised constant time per stop string (Knuth, Morris and Pratt).

    Example:
        >>> matcher = StopMatcher(["END"])
        >>> matcher.push("the E")
        ('the ', False)
        >>> matcher.push("ND of it")
        ('', True)
    """

    def __init__(self, stop: Sequence[str], *, keep: bool = False) -> None:
        assert all(stop), "an empty stop string would end every text at once"
        self._stop = list(dict.fromkeys(stop))
        self._keep = keep  # whether the stop string found is part of the text
        self._borders = [_borders(word) for word in self._stop]
        self._matched = [0] * len(self._stop)  # how much of each stop string the text now ends with
        self._held = ""  # text that is not out yet
        self._found: int | None = None  # where in the held text the earliest match so far begins
        self._word = ""  # the stop string found there
        self._stopped = False

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Takes the next piece and returns what may be shown, and whether the text has ended.

        A stop string that is complete where the text may not end yet is text like any other.

        A stop string that lies inside the beginning of a longer one ends the text once the longer one is out
        of the question. After the end, every further piece gives ("", True).
        """
        if self._stopped:
            return "", True
        if not self._stop:
            return text, False
        begin = len(self._held)
        self._held += text
        for end, character in enumerate(text, begin + 1):
            self._advance(character, end)
            if not may_end:
                self._found = None
            if self._found is not None and self._settled(end):
                return self._finish()
        # Everything before the longest partial match is out of reach of any stop string. A match that is not
        # settled lies behind the beginning of that one.
        keep = len(self._held) - max(self._matched)
        if self._found is not None:
            self._found -= keep
        emit, self._held = self._held[:keep], self._held[keep:]
        return emit, False

    def flush(self) -> str:
        """Returns what was held back, cut at a stop string if one was found; the text has ended."""
        if self._stopped:
            return ""
        return self._finish()[0]

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; one still in question at the end counts after `flush`."""
        return self._stopped and self._found is not None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text; None as long as none has."""
        return self._word if self.stopped else None

    def _advance(self, character: str, end: int) -> None:
        """Moves every stop string's automaton by one character; `end` counts the held ones up to it."""
        for i, (word, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and (matched == len(word) or word[matched] != character):
                matched = borders[matched - 1]
            if word[matched] == character:
                matched += 1
            self._matched[i] = matched
            if matched == len(word):
                start = end - matched
                if self._found is None or start < self._found:
                    self._found, self._word = start, word

    def _settled(self, end: int) -> bool:
        """Whether no partial match began before the found one."""
        assert self._found is not None
        found = self._found
        return all(
            matched == len(word) or end - matched >= found
            for word, matched in zip(self._stop, self._matched, strict=True)
        )

    def _finish(self) -> tuple[str, bool]:
        emit = self._held if self._found is None else self._held[: self._found]
        if self._keep and self._found is not None:
            emit += self._word
        self._held = ""
        self._stopped = True
        return emit, True


def _borders(word: str) -> list[int]:
    """For each prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        if word[i] == word[length]:
            length += 1
        borders[i] = length
    return borders
