"""Regular expressions of a model's files: bounded when they are compiled, and when they search.

    check_repeats(pattern)                     # before anybody compiles it
    left = SearchTime(0.1)
    expression = Expression(regex.compile(pattern), left)
    expression.search(text)                    # TimeoutError once all searches together took a tenth of a second

A response template of a tokenizer and the configuration of a LoRA adapter have such expressions.
"""

import re
import time
from collections.abc import Callable
from math import prod
from typing import Any

# `regex` writes out what repeats a fixed number of times: 100,000 take 0.1 s and 30 MB, and 10**14 never end.
MAX_REPEATS = 100_000
_REPEAT = re.compile(r"\{(\d+)(?:,\d*)?\}")


def check_repeats(pattern: str) -> None:
    """Bounds what compiling an expression takes.

    Raises:
        ValueError: its repeats multiply to more than MAX_REPEATS.
    """
    counts = [match[1] for match in _REPEAT.finditer(pattern)]
    if any(len(count) > 9 for count in counts) or prod(max(1, int(count)) for count in counts) > MAX_REPEATS:
        raise ValueError(f"its repeats multiply to more than {MAX_REPEATS}")


class SearchTime:
    """The time that several expressions share.

    Args:
        left_s: seconds; a caller may add to what is left.
    """

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s

    def run(self, search: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Runs a search of the module `regex`.

        Raises:
            TimeoutError: the time is used up.
        """
        if self.left_s <= 0:
            raise TimeoutError("the expressions take too long")
        began = time.perf_counter()
        try:
            return search(*args, **named, timeout=self.left_s)
        finally:
            self.left_s -= time.perf_counter() - began


class Expression:
    """A compiled expression of `regex` whose searches share a time. Each raises TimeoutError."""

    def __init__(self, pattern: Any, left: SearchTime) -> None:
        self._pattern = pattern
        self._left = left

    def search(self, *args: Any, **named: Any) -> Any:
        """As of `regex`."""
        return self._left.run(self._pattern.search, *args, **named)

    def match(self, *args: Any, **named: Any) -> Any:
        """As of `regex`."""
        return self._left.run(self._pattern.match, *args, **named)

    def finditer(self, text: str) -> list[Any]:
        """All matches at once."""
        matches: list[Any] = self._left.run(lambda **named: list(self._pattern.finditer(text, **named)))
        return matches
