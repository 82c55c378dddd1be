"""Load: scripted requests, the same wherever and whenever they are made.

Prompts are token ids and lengths are scripted, so that every engine does the same work. Lengths come from the seed
alone; the tokens of the prompts from seed, salt and the load's name, so that no load's are found in the prefix cache
after another one, nor after the same one with another salt.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

# Smaller ids are often special tokens.
FIRST_TOKEN = 32
DEFAULT_SEED = 20260101


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request that nothing ends early.

    Args:
        prompt: token ids.
        max_tokens: of its answer, exactly.
        after_tokens: it starts once every other request has had so many tokens; 0: with the load.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    after_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a service.

    Args:
        name: of the load, with what sets it apart.
        requests: in the order of their arrival.
    """

    name: str
    requests: tuple[LoadRequest, ...]

    @property
    def max_positions(self) -> int:
        """Positions that the longest request comes to need."""
        return max(len(one.prompt) + one.max_tokens for one in self.requests)

    def positions_of(self, count: int) -> int:
        """Positions that the `count` longest requests need together: a KV pool in which nobody waits for memory."""
        return sum(sorted(len(one.prompt) + one.max_tokens for one in self.requests)[-count:])


class Prompts:
    """Draws token ids.

    Args:
        vocab_size: token ids are below it.
        key: decides the draws.
    """

    def __init__(self, vocab_size: int, key: str) -> None:
        self._draw = random.Random(key)
        self._range = range(min(FIRST_TOKEN, vocab_size - 1), vocab_size)

    def tokens(self, length: int) -> tuple[int, ...]:
        """The next `length` token ids."""
        return tuple(self._draw.choices(self._range, k=length))


def lognormal_lengths(draw: random.Random, median: float, sigma: float, cap: int) -> Iterator[int]:
    """Whole lengths from 1 to `cap` without end."""
    while True:
        yield max(1, min(cap, round(median * draw.lognormvariate(0.0, sigma))))
