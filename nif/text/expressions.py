"""Regular expressions of a model's files, with bounds for compiling and for searching.

    check_repeats(pattern)                     # before compiling
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

# `regex` expands fixed repeats: 100,000 repeats take 0.1 s and 30 MB, and 10**14 never end.
MAX_REPEATS = 100_000
_REPEAT = re.compile(r"\{(\d+)(?:,\d*)?\}")


def check_repeats(pattern: str) -> None:
    """Check that an expression is cheap to compile.

    Raises:
        ValueError: the repeats multiply to more than MAX_REPEATS.
    """
    counts = [match[1] for match in _REPEAT.finditer(pattern)]
    if any(len(count) > 9 for count in counts) or prod(max(1, int(count)) for count in counts) > MAX_REPEATS:
        raise ValueError(f"its repeats multiply to more than {MAX_REPEATS}")


class SearchTime:
    """A time budget that several expressions share.

    Args:
        left_s: the budget in seconds; a caller may add to it.
    """

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s

    def run(self, search: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Run a search of the module `regex`.

        Raises:
            TimeoutError: the budget is used up.
        """
        if self.left_s <= 0:
            raise TimeoutError("the expressions take too long")
        began = time.perf_counter()
        try:
            return search(*args, **named, timeout=self.left_s)
        finally:
            self.left_s -= time.perf_counter() - began


class Expression:
    """A compiled expression of `regex` with a shared time budget. Each search may raise TimeoutError."""

    def __init__(self, pattern: Any, left: SearchTime) -> None:
        self._pattern = pattern
        self._left = left

    def search(self, *args: Any, **named: Any) -> Any:
        """Run the `regex` method of the same name under the time budget."""
        return self._left.run(self._pattern.search, *args, **named)

    def match(self, *args: Any, **named: Any) -> Any:
        """Run the `regex` method of the same name under the time budget."""
        return self._left.run(self._pattern.match, *args, **named)

    def finditer(self, text: str) -> list[Any]:
        """Return all matches at once."""
        matches: list[Any] = self._left.run(lambda **named: list(self._pattern.finditer(text, **named)))
        return matches
